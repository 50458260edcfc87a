// Distributes the work groups of a launch over threads. If a library in the process has OpenMP's threads already, these
// are used, so that one set of threads does everything. Otherwise the launcher starts its own threads, which sleep
// while idle. Between launches that were recorded together, threads do not sleep: they poll, and yield their cores to
// other threads. A launch that took a few microseconds in all runs on its caller's thread from then on. All threads of
// a launch compute in the floating-point modes of its caller, such as rounding or subnormal numbers as zeros, so that
// results do not depend on which thread takes a group.

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <new>

typedef void (*Walk)(const int64_t* arguments, long first, long last, long groups);
// OpenMP's function that begins a parallel region
typedef void (*Parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

namespace {

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

const int POLLS = 2000;  // of a variable, before a thread sleeps or yields: about twenty microseconds

struct Step {  // one of several launches, as native.py writes it
    Walk walk;
    int64_t begin;  // number of its first argument among those of all launches
    int64_t groups;
    int64_t size;  // the batch, or another number by which times differ; 0 if unknown
};

struct Move {
    int64_t argument;  // number of an argument among those of all launches
    int64_t address;   // number of its value among the addresses of a call
};

struct Recorded {  // launches that calls repeat on other arrays, as native.py writes it
    Parallel parallel;
    const Step* steps;
    int64_t count;
    const int64_t* arguments;
    int64_t arguments_count;
    const Move* moves;
    int64_t moves_count;
};

struct Repeat {  // one call, as native.py writes it: a single argument is the cheapest for Python
    const Recorded* recorded;
    int64_t threads;
    int64_t addresses[];
};

struct Progress {
    alignas(64) std::atomic<long> next{0};
    alignas(64) std::atomic<long> done{0};
};

const long MOST_STEPS = 8;  // launches for which threads are woken once, at most

#ifdef __linux__
// Cores on which the threads of one launch run. The system may wake a thread on the core of another thread and leave
// both there for many launches, while other cores are idle. Such a thread moves to a core that no thread of the launch
// has taken.
class Cores {
public:
    void take() {
        if (is_first(sched_getcpu())) return;
        cpu_set_t allowed, untaken;
        if (sched_getaffinity(0, sizeof allowed, &allowed)) return;  // more cores than a cpu_set_t holds
        CPU_ZERO(&untaken);
        for (int core = 0; core < MOST; ++core)
            if (CPU_ISSET(core, &allowed) && !(of(core).load(std::memory_order_relaxed) & bit(core)))
                CPU_SET(core, &untaken);
        if (!CPU_COUNT(&untaken) || sched_setaffinity(0, sizeof untaken, &untaken)) return;
        sched_setaffinity(0, sizeof allowed, &allowed);
        is_first(sched_getcpu());
    }

private:
    static const int MOST = CPU_SETSIZE;

    static uint64_t bit(const int core) { return (uint64_t)1 << core % 64; }
    std::atomic<uint64_t>& of(const int core) { return taken[core / 64]; }
    bool is_first(const int core) {
        return core < 0 || core >= MOST || !(of(core).fetch_or(bit(core), std::memory_order_relaxed) & bit(core));
    }

    std::atomic<uint64_t> taken[MOST / 64]{};
};
#else
struct Cores {
    void take() {}
};
#endif

// Nanoseconds per work group, as measured by the last thread that ran some of a kernel's groups in a launch of as many
// groups and of the same size. Other processes may delay a thread that is woken by milliseconds, and its launch with
// it.
const int64_t ALONE_NS = 5000;  // a launch that takes less than this on one thread wakes no others
struct Pace {
    std::atomic<uintptr_t> key{0};
    std::atomic<int64_t> ns{0};

    static Pace& of(const Step& step) { return all[key_of(step) % COUNT]; }
    static uintptr_t key_of(const Step& step) {
        return ((uintptr_t)step.size * 8191 + (uintptr_t)step.walk * 31 + (uintptr_t)step.groups) * 2 + 1;
    }

    // of all groups of a launch on one thread; ALONE_NS if they were not measured
    static int64_t expected_ns(const Step& step) {
        const Pace& known = of(step);
        if (known.key.load(std::memory_order_relaxed) != key_of(step)) return ALONE_NS;
        return known.ns.load(std::memory_order_relaxed) * step.groups;
    }

    static void note(const Step& step, const int64_t ns, const long groups) {
        Pace& own = of(step);
        own.ns.store(ns / groups, std::memory_order_relaxed);
        own.key.store(key_of(step), std::memory_order_relaxed);
    }

    static int64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

private:
    static const uintptr_t COUNT = 1021;
    static Pace all[COUNT];
};
Pace Pace::all[Pace::COUNT];

struct Launch {
    const Step* steps;
    long count;
    const int64_t* arguments;
    Progress progress[MOST_STEPS];
    Cores cores;
    pthread_t caller;
    fenv_t modes;  // of the caller
};

// Counts finished groups, not threads: there may be fewer threads than requested.
void wait_for_all(const Step& step, const Progress& progress) {
    for (int poll = 0; progress.done.load(std::memory_order_acquire) < step.groups; ++poll) {
        if (poll < POLLS) pause_briefly();
        else sched_yield();
    }
}

void run_alone(const Step* steps, long count, const int64_t* arguments) {
    for (const Step* step = steps; step < steps + count; ++step)
        step->walk(arguments + step->begin, 0, step->groups, step->groups);
}

void take_groups(void* data) {
    Launch& launch = *(Launch*)data;
    for (long index = 0; index < launch.count; ++index) {
        const Step& step = launch.steps[index];
        Progress& progress = launch.progress[index];
        long taken = 0;
        const int64_t begin = Pace::now_ns();
        for (long group; (group = progress.next.fetch_add(1, std::memory_order_relaxed)) < step.groups; ++taken)
            step.walk(launch.arguments + step.begin, group, group + 1, step.groups);
        if (taken) Pace::note(step, Pace::now_ns() - begin, taken);
        if (index + 1 == launch.count) return;
        if (taken) progress.done.fetch_add(taken, std::memory_order_release);
        wait_for_all(step, progress);
    }
}

// in one of OpenMP's threads, which keeps modes of its own
void take_groups_for_openmp(void* data) {
    const Launch& launch = *(const Launch*)data;
    if (pthread_equal(pthread_self(), launch.caller)) return take_groups(data);
    fenv_t before;
    fegetenv(&before);
    fesetenv(&launch.modes);
    take_groups(data);
    fesetenv(&before);
}

// POSIX threads are used, because C++'s headers for threads take longer to compile than a kernel.
class Lock {
public:
    explicit Lock(pthread_mutex_t& mutex) : mutex(mutex) { pthread_mutex_lock(&mutex); }
    ~Lock() { pthread_mutex_unlock(&mutex); }

private:
    pthread_mutex_t& mutex;
};

class Crew {
public:
    pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;  // at a time; a caller that finds it locked works alone

    void run(Launch& launch, const long threads) {
        launch.cores.take();
        {
            const Lock lock(guard);
            start_until(threads - 1);
            current = &launch;
            wanted = members < threads - 1 ? members : threads - 1;
            generation.fetch_add(1);
        }
        pthread_cond_broadcast(&wake);
        take_groups(&launch);
        {
            const Lock lock(guard);
            current = nullptr;  // a thread that wakes from now on would find no group
        }
        for (int poll = 0; busy.load() && poll < POLLS; ++poll) pause_briefly();
        if (!busy.load()) return;
        const Lock lock(guard);
        while (busy.load()) pthread_cond_wait(&done, &guard);
    }

private:
    // Starts threads until there are `count`, or until the system, such as a container, allows no more. The next launch
    // tries to start the missing ones again.
    void start_until(const long count) {
        for (; members < count; ++members) {
            Member* const member = new (std::nothrow) Member{this, members};
            pthread_t thread;
            if (!member || pthread_create(&thread, nullptr, begin, member)) {
                delete member;
                return;
            }
            pthread_detach(thread);
        }
    }

    struct Member {
        Crew* crew;
        long number;
    };

    static void* begin(void* const data) {
        const Member member = *(Member*)data;
        delete (Member*)data;
        member.crew->work(member.number);
        return nullptr;
    }

    void work(const long number) {
        for (long seen = 0;;) {
            for (int poll = 0; generation.load() == seen && poll < POLLS; ++poll) pause_briefly();
            Launch* launch;
            {
                const Lock lock(guard);
                while (generation.load() == seen) pthread_cond_wait(&wake, &guard);
                seen = generation.load();
                launch = number < wanted ? current : nullptr;
                if (launch) busy.fetch_add(1);
            }
            if (!launch) continue;
            fesetenv(&launch->modes);
            launch->cores.take();
            take_groups(launch);
            if (busy.fetch_sub(1) == 1) {
                const Lock lock(guard);
                pthread_cond_signal(&done);
            }
        }
    }

    pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
    Launch* current = nullptr;
    long members = 0, wanted = 0;
    // Threads that have joined the launch. The launch does not wait for threads that still sleep: waking one may take
    // longer than the launch.
    std::atomic<long> busy{0};
    std::atomic<long> generation{0};
};

// A forked child has none of its parent's threads: neither those of the crew nor those of OpenMP, for which it would
// wait forever.
bool is_forked = false;
alignas(Crew) char place[sizeof(Crew)];
Crew* const crew = [] {
    pthread_atfork(nullptr, nullptr, [] {
        is_forked = true;
        new (place) Crew;
    });
    return new (place) Crew;
}();

}  // namespace

static void launch_some(const Step* steps, long count, const int64_t* arguments, long threads, Parallel parallel) {
    long most = 1;
    int64_t alone_ns = 0;
    for (long index = 0; index < count; ++index) {
        most = steps[index].groups > most ? steps[index].groups : most;
        alone_ns += Pace::expected_ns(steps[index]);
    }
    if (threads > most) threads = most;
    if (threads <= 1) return run_alone(steps, count, arguments);
    Launch launch{steps, count, arguments, {}, {}, {}, {}};
    if (alone_ns < ALONE_NS) return take_groups(&launch);
    launch.caller = pthread_self();
    fegetenv(&launch.modes);
    if (parallel && !is_forked) return parallel(take_groups_for_openmp, &launch, (unsigned)threads, 0);
    if (pthread_mutex_trylock(&crew->one_launch)) return take_groups(&launch);
    crew->run(launch, threads);
    pthread_mutex_unlock(&crew->one_launch);
}

extern "C" void ksgen_launch(
    Walk walk, const int64_t* arguments, long groups, int64_t size, long threads, Parallel parallel) {
    const Step step{walk, 0, groups, size};
    launch_some(&step, 1, arguments, threads, parallel);
}

// Each launch begins when the previous one has ended. Several threads may repeat the same launches at once.
extern "C" void ksgen_launch_all(const Repeat* repeat) {
    const Recorded& recorded = *repeat->recorded;
    const size_t bytes = recorded.arguments_count * sizeof(int64_t);
    int64_t* const arguments = (int64_t*)__builtin_alloca(bytes);
    memcpy(arguments, recorded.arguments, bytes);
    for (const Move* move = recorded.moves; move < recorded.moves + recorded.moves_count; ++move)
        arguments[move->argument] = repeat->addresses[move->address];
    long left = recorded.count;
    for (const Step* steps = recorded.steps; left > 0; steps += MOST_STEPS, left -= MOST_STEPS)
        launch_some(steps, left < MOST_STEPS ? left : MOST_STEPS, arguments, repeat->threads, recorded.parallel);
}
