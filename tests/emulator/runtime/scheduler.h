// The threads of one cluster of blocks: who may run, and who waits for what.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "counting.h"
#include "engine.h"
#include "grids.h"
#include "interface.h"
#include "launch.h"
#include "memory.h"
#include "order.h"
#include "thread.h"

namespace simt {

class Scheduler {
 public:
  static constexpr size_t STACK_BYTES = SIMT_ADDRESS || SIMT_RACE ? 256 << 10 : 64 << 10;

  void prepare(int cluster_size, const Entry& entry);
  void run_cluster(const std::vector<unsigned>& numbers);

  int registers() const { return registers_; }  // a thread, at the launch; 0 where the kernel does not say
  int size() const { return int(blocks_[0].threads.size()); }  // threads a block
  std::vector<Block>& blocks() { return blocks_; }
  const std::vector<Suspect>& suspects() const { return suspects_; }
  Thread* current() const { return current_; }  // null while no kernel code runs
  Block& block() const { return *current_->block; }
  void run_as(Thread* thread) {  // for what is done in a thread's name
    current_ = thread;
    if (thread != nullptr) show_memory(thread->has_waited);
  }

  void arrive(const char* what, int id, int threads, bool waits);
  Barrier& cluster_barrier() { return cluster_barrier_; }
  int running() const;  // threads of the cluster
  const Exchange& meet(const char* what, unsigned mask, const void* value, int bytes, bool orders_memory,
                       void (*when_complete)(Exchange&) = nullptr);
  void wait_for(const void* awaited, const char* what, std::function<std::string()> details = nullptr);
  void yield() { current_->fiber.switch_to(main_); }  // it goes on when its turn comes again
  void wake(const void* awaited);
  void wake_own_warp(const void* awaited);

 private:
  static void run_thread();
  void start(Block& block, unsigned number);
  void resume(Thread& thread);
  Meeting& open_meeting(const char* what, unsigned mask);
  static void leave_meeting(Thread& thread);
  void check_same_place(const char* kind, const char* what, const void* other_code);

  std::vector<Block> blocks_;     // of the cluster
  std::vector<Thread*> threads_;  // of all of them
  std::vector<int> turns_;        // which of the threads, in the order in which they run
  std::vector<Suspect> suspects_;  // one for each pair of places
  Fiber main_;
  Thread* current_ = nullptr;
  void (*body_)() = nullptr;
  Barrier cluster_barrier_;
  Token cluster_start_, cluster_end_;
  int registers_ = 0;
};

inline Scheduler scheduler;

[[noreturn]] void report_stuck(Scheduler& scheduler);  // stuck.h
void leave_thread(Thread& thread, Token* cluster_end);  // leave.h

inline void Scheduler::prepare(int cluster_size, const Entry& entry) {
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  body_ = entry.call;
  registers_ = registers_at_launch(entry.bounds);
  blocks_ = std::vector<Block>(cluster_size);
  unsigned char* stack = map(threads * cluster_size * (PAGE + STACK_BYTES), PROT_NONE);  // an overflow faults
  for (Block& block : blocks_) {
    block.rank = int(&block - &blocks_[0]);
    block.shared = &shared_memories[block.rank];
    for (unsigned i = 0; i < threads; ++i, stack += PAGE + STACK_BYTES) {
      mprotect(stack + PAGE, STACK_BYTES, PROT_READ | PROT_WRITE);
      block.threads.push_back(std::make_unique<Thread>(i, stack + PAGE, STACK_BYTES));
      block.threads.back()->index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
      block.threads.back()->block = &block;
      threads_.push_back(block.threads.back().get());
    }
  }
  turns_.resize(threads_.size());
  order.permute(turns_);
}

inline void Scheduler::start(Block& block, unsigned number) {
  const int warps = (size() + 31) / 32;
  block.number = number;
  block.index = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
  block.shared->fill();
  block.running = size();
  block.meetings.assign(warps, std::vector<Meeting>(32));
  block.matrices.clear();
  block.matrices.resize(warps);
  block.product_clocks.resize(warps);
  block.warpgroups.assign((warps + 3) / 4, Warpgroup());
  block.registers.assign(warps, registers_);
  for (Barrier& barrier : block.barriers) barrier.arrived = 0;
  for (auto& thread : block.threads) {
    thread->state = Thread::READY;
    thread->has_waited = !is_early;
    thread->held = nullptr;
    thread->given_up = nullptr;
    thread->copies.clear();
    thread->committed = 0;
    thread->stores.clear();
    thread->stores_committed = 0;
    thread->at_fence = OwnMemory();
    thread->fiber.start(run_thread);
  }
}

inline void Scheduler::run_cluster(const std::vector<unsigned>& numbers) {
  const Unseen unseen;
  fill_nan(__start_simt_shared, static_shared_bytes());
  for (size_t rank = 0; rank < blocks_.size(); ++rank) start(blocks_[rank], numbers[rank]);
  cluster_barrier_.arrived = 0;
  signal_order(&cluster_start_);
  size_t exited = 0;
  while (exited < threads_.size()) {
    bool stuck = true;
    // Threads that have not waited for the previous grid run together, because hiding memory from them takes long.
    // Sometimes only some of them run, so that waiting is no barrier.
    for (const bool has_waited : {false, true}) {
      for (int number : turns_) {
        Thread& thread = *threads_[number];
        if (thread.state != Thread::READY || thread.has_waited != has_waited) continue;
        stuck = false;
        resume(thread);
        exited += thread.state == Thread::EXITED;
        if (!has_waited && order.happens(32)) break;
      }
    }
    // Asynchronous work takes as long as it may: a piece is done when no thread can go on without it.
    if (stuck && !engine.land_one()) report_stuck(*this);
    order.shuffle_again(turns_);
  }
  show_memory(true);
  engine.check_idle();
  observe_order(&cluster_end_);
}

inline int Scheduler::running() const {
  int count = 0;
  for (const Block& block : blocks_) count += block.running;
  return count;
}

inline void Scheduler::resume(Thread& thread) {
  run_as(&thread);
  proxy_clock = &thread.proxy;
  threadIdx = thread.index;
  blockIdx = thread.block->index;
  main_.switch_to(thread.fiber);
  run_as(nullptr);
  proxy_clock = nullptr;
}

inline void Scheduler::run_thread() {
  Fiber::arrived_from(scheduler.main_);
  Thread& thread = *scheduler.current_;
  observe_order(&scheduler.cluster_start_);
  scheduler.body_();
  {
    const Unseen unseen;
    leave_meeting(thread);
    leave_thread(thread, &scheduler.cluster_end_);
  }
  thread.state = Thread::EXITED;
  thread.fiber.switch_to(scheduler.main_);
}

inline void Scheduler::wait_for(const void* awaited, const char* what, std::function<std::string()> details) {
  Thread& thread = *current_;
  thread.what = what;
  thread.awaited = awaited;
  thread.details = std::move(details);
  thread.state = Thread::WAITING;
  thread.fiber.switch_to(main_);
}

inline void Scheduler::wake(const void* awaited) {
  for (Thread* thread : threads_) {
    if (thread->state == Thread::WAITING && thread->awaited == awaited) thread->state = Thread::READY;
  }
}

// Of all threads only those of the current one's warp can wait for it.
inline void Scheduler::wake_own_warp(const void* awaited) {
  const auto& threads = block().threads;
  const size_t first = current_->warp() * 32, end = std::min(first + 32, threads.size());
  for (size_t i = first; i < end; ++i) {
    if (threads[i]->state == Thread::WAITING && threads[i]->awaited == awaited) threads[i]->state = Thread::READY;
  }
}

inline void Scheduler::arrive(const char* what, int id, int threads, bool waits) {
  if (id < 0 || id >= Block::BARRIERS) {
    fail("barrier", "%s: barrier %d; there are 0 to %d", what, id, Block::BARRIERS - 1);
  }
  if (threads != size() && (threads % 32 != 0 || threads < 32 || threads > size())) {
    fail("barrier", "%s: %d threads; whole warps of the block's %d are accepted", what, threads, size());
  }
  Barrier& barrier = block().barriers[id];
  if (barrier.arrived == 0) {
    barrier.code = current_->code;
    barrier.threads = threads;
  }
  if (barrier.threads != threads) {
    fail("barrier", "%s: %d threads at barrier %d, which has %d at %s", what, threads, id, barrier.threads,
         place(barrier.code).c_str());
  }
  if (id == 0) check_same_place("barrier", what, barrier.code);  // at a named one, producers and consumers meet
  Token* token = &barrier.tokens[barrier.turn];
  signal_order(token);
  count_meeting();
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.turn ^= 1;
    count_barrier();
    wake(&barrier);
  } else if (waits) {
    wait_for(&barrier, what);
  }
  if (waits) observe_order(token);
}

// The last lane to come runs `when_complete`, in the name of all.
inline const Exchange& Scheduler::meet(const char* what, unsigned mask, const void* value, int bytes,
                                       bool orders_memory, void (*when_complete)(Exchange&)) {
  Thread& thread = *current_;
  const int lane = thread.lane();
  if (!(mask >> lane & 1)) fail("collective", "%s: mask 0x%08x leaves out the calling lane %d", what, mask, lane);
  leave_meeting(thread);
  if (mask == 0xffffffff) count_meeting();
  Meeting& meeting = open_meeting(what, mask);
  for (int i = 0; i < bytes; ++i) meeting.values[lane][i] = static_cast<const unsigned char*>(value)[i];
  meeting.arrived |= 1u << lane;
  meeting.reading |= 1u << lane;
  thread.held = &meeting;
  if (orders_memory) signal_order(&meeting.token);
  if (meeting.arrived == mask) {
    if (when_complete != nullptr) when_complete(meeting);
    wake_own_warp(&meeting);
  } else {
    wait_for(&meeting, what);
  }
  if (orders_memory) observe_order(&meeting.token);
  return meeting;
}

// The step that lanes of `mask` have begun, or a new one.
inline Meeting& Scheduler::open_meeting(const char* what, unsigned mask) {
  Meeting* free = nullptr;
  for (Meeting& meeting : block().meetings[current_->warp()]) {
    if (meeting.reading == 0) free = &meeting;
    // With another mask, the lanes that wait may be waiting for this one to come by later.
    if (meeting.reading == 0 || meeting.arrived == meeting.mask || meeting.mask != mask) continue;
    if (strcmp(meeting.what, what) != 0) {
      fail("collective", "%s reached while other lanes wait for %s at %s", what, meeting.what,
           place(meeting.code).c_str());
    }
    check_same_place("collective", what, meeting.code);
    return meeting;
  }
  free->what = what;
  free->code = current_->code;
  free->mask = mask;
  free->arrived = 0;
  return *free;
}

inline void Scheduler::leave_meeting(Thread& thread) {
  if (thread.held != nullptr) thread.held->reading &= ~(1u << thread.lane());
  thread.held = nullptr;
}

inline void Scheduler::check_same_place(const char* kind, const char* what, const void* other_code) {
  const void* code = current_->code;
  if (code == other_code) return;
  for (const Suspect& known : suspects_) {
    if (known.code == code && known.other_code == other_code) return;
  }
  suspects_.push_back({kind, what, code, other_code, block().number, current_->number});
}

}  // namespace simt
