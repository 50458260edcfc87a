// Shares the work groups of a launch out among threads: those of OpenMP where a library in the process has them already, so that one set
// of threads does everything, else threads of its own, which sleep while there is nothing to do.

#include <pthread.h>
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

typedef void (*Walk)(const int64_t* arguments, long first, long last, long groups);
typedef void (*Parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags);  // OpenMP's way to begin a region

namespace {

struct Launch {
    Walk walk;
    const int64_t* arguments;
    long groups;
    std::atomic<long> next;
};

void take_groups(void* given) {
    Launch& launch = *(Launch*)given;
    for (long group; (group = launch.next.fetch_add(1, std::memory_order_relaxed)) < launch.groups;)
        launch.walk(launch.arguments, group, group + 1, launch.groups);
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

const int LOOKS = 2000;  // at what is waited for, before a thread sleeps: some twenty microseconds

class Crew {
public:
    std::mutex one_launch;  // at a time; who finds it taken works alone

    void run(Launch& launch, const long threads) {
        {
            std::lock_guard<std::mutex> lock(guard);
            for (; members < threads - 1; ++members) std::thread(&Crew::work, this, members).detach();
            current = &launch;
            wanted = threads - 1;
            busy.store(threads - 1);
            turn.fetch_add(1);
        }
        wake.notify_all();
        take_groups(&launch);
        for (int look = 0; busy.load() && look < LOOKS; ++look) pause_briefly();
        std::unique_lock<std::mutex> lock(guard);
        done.wait(lock, [this] { return !busy.load(); });
        current = nullptr;
    }

private:
    void work(const long number) {
        for (long seen = 0;;) {
            for (int look = 0; turn.load() == seen && look < LOOKS; ++look) pause_briefly();
            Launch* launch;
            {
                std::unique_lock<std::mutex> lock(guard);
                wake.wait(lock, [&] { return turn.load() != seen; });
                seen = turn.load();
                launch = number < wanted ? current : nullptr;
            }
            if (!launch) continue;
            take_groups(launch);
            if (busy.fetch_sub(1) == 1) {
                std::lock_guard<std::mutex> lock(guard);
                done.notify_one();
            }
        }
    }

    std::mutex guard;
    std::condition_variable wake, done;
    Launch* current = nullptr;
    long members = 0, wanted = 0;
    std::atomic<long> busy{0}, turn{0};
};

alignas(Crew) char place[sizeof(Crew)];
Crew* crew() {
    static Crew* const made = [] {
        pthread_atfork(nullptr, nullptr, [] { new (place) Crew; });  // a child has none of its parent's threads
        return new (place) Crew;
    }();
    return made;
}

}  // namespace

extern "C" void ksgen_launch(Walk walk, const int64_t* arguments, long groups, long threads, Parallel parallel) {
    Launch launch{walk, arguments, groups, {0}};
    if (threads > groups) threads = groups;
    if (threads <= 1) return take_groups(&launch);
    if (parallel) return parallel(take_groups, &launch, (unsigned)threads, 0);
    std::unique_lock<std::mutex> alone(crew()->one_launch, std::try_to_lock);
    if (alone.owns_lock()) crew()->run(launch, threads);
    else take_groups(&launch);
}
