// One block's threads: who may run, who waits for what, and what to say when nobody can go on.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "interface.h"
#include "launch.h"
#include "memory.h"
#include "thread.h"

namespace simt {

enum class Order { FORWARD, REVERSE, SHUFFLED };

class Scheduler {
 public:
  static constexpr int BARRIERS = 16;
  static constexpr size_t STACK_BYTES = SIMT_ADDRESS || SIMT_RACE ? 256 << 10 : 64 << 10;

  void prepare(const dim3& block, void (*body)(), Order order, unsigned long long seed);
  void run_block(long block);
  void permute(std::vector<int>& items);

  int size() const { return int(threads_.size()); }
  long block() const { return block_; }
  const std::vector<Suspect>& suspects() const { return suspects_; }
  Thread* current() const { return current_; }  // null while no kernel code runs

  void arrive(const char* what, int id, int threads, bool waits);
  const Exchange& meet(const char* what, unsigned mask, const void* value, int bytes, bool orders_memory);

 private:
  static void run_thread();
  void resume(Thread& thread);
  void wait_for(const void* awaited, const char* what);
  void wake(const void* awaited);
  Exchange& open_exchange(const char* what, unsigned mask);
  static void leave_exchange(Thread& thread);
  void check_same_place(const char* kind, const char* what, const void* other_code);
  [[noreturn]] void report_stuck();

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<std::vector<Exchange>> exchanges_;  // by warp, one for each lane at most; free when nobody reads it
  std::vector<int> turns_;                        // thread numbers in the order in which they run
  std::vector<Suspect> suspects_;                 // one for each pair of places
  Barrier barriers_[BARRIERS];
  Fiber main_;
  Thread* current_ = nullptr;
  long block_ = -1;
  void (*body_)() = nullptr;
  Order order_ = Order::FORWARD;
  unsigned long long random_ = 0;
  char block_start_ = 0, block_end_ = 0;
};

inline Scheduler scheduler;

inline void Scheduler::prepare(const dim3& block, void (*body)(), Order order, unsigned long long seed) {
  const unsigned threads = block.x * block.y * block.z;
  body_ = body;
  order_ = order;
  random_ = seed * 2 + 1;
  for (unsigned i = 0; i < threads; ++i) {
    unsigned char* stack = map(PAGE + STACK_BYTES, PROT_READ | PROT_WRITE);
    mprotect(stack, PAGE, PROT_NONE);  // an overflow faults
    threads_.push_back(std::make_unique<Thread>(i, stack + PAGE, STACK_BYTES));
    threads_.back()->index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    turns_.push_back(i);
  }
  exchanges_.assign((threads + 31) / 32, std::vector<Exchange>(32));
  permute(turns_);
}

inline void Scheduler::permute(std::vector<int>& items) {
  const int count = int(items.size());
  for (int i = 0; i < count; ++i) items[i] = order_ == Order::REVERSE ? count - 1 - i : i;
  if (order_ != Order::SHUFFLED) return;
  for (int i = count - 1; i > 0; --i) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    std::swap(items[i], items[random_ % (i + 1)]);
  }
}

inline void Scheduler::run_block(long block) {
  block_ = block;
  for (Barrier& barrier : barriers_) barrier.arrived = 0;
  for (auto& thread : threads_) {
    thread->state = Thread::READY;
    thread->copies.clear();
    thread->committed = 0;
    thread->fiber.start(run_thread);
  }
  signal_order(&block_start_);
  int exited = 0;
  while (exited < size()) {
    bool stuck = true;
    for (int number : turns_) {
      Thread& thread = *threads_[number];
      if (thread.state != Thread::READY) continue;
      stuck = false;
      resume(thread);
      exited += thread.state == Thread::EXITED;
    }
    if (stuck) report_stuck();
    if (order_ == Order::SHUFFLED) permute(turns_);
  }
  observe_order(&block_end_);
}

inline void Scheduler::resume(Thread& thread) {
  current_ = &thread;
  threadIdx = thread.index;
  main_.switch_to(thread.fiber);
  current_ = nullptr;
}

inline void Scheduler::run_thread() {
  Fiber::arrived_from(scheduler.main_);
  Thread& thread = *scheduler.current_;
  observe_order(&scheduler.block_start_);
  scheduler.body_();
  leave_exchange(thread);
  signal_order(&scheduler.block_end_);
  thread.state = Thread::EXITED;
  thread.fiber.switch_to(scheduler.main_);
}

inline void Scheduler::wait_for(const void* awaited, const char* what) {
  Thread& thread = *current_;
  thread.what = what;
  thread.awaited = awaited;
  thread.state = Thread::WAITING;
  thread.fiber.switch_to(main_);
}

inline void Scheduler::wake(const void* awaited) {
  for (auto& thread : threads_) {
    if (thread->state == Thread::WAITING && thread->awaited == awaited) thread->state = Thread::READY;
  }
}

inline void Scheduler::arrive(const char* what, int id, int threads, bool waits) {
  if (id < 0 || id >= BARRIERS) fail("barrier", "%s: barrier %d; there are 0 to %d", what, id, BARRIERS - 1);
  if (threads != size() && (threads % 32 != 0 || threads < 32 || threads > size())) {
    fail("barrier", "%s: %d threads; whole warps of the block's %d are accepted", what, threads, size());
  }
  Barrier& barrier = barriers_[id];
  if (barrier.arrived == 0) {
    barrier.code = current_->code;
    barrier.threads = threads;
  }
  if (barrier.threads != threads) {
    fail("barrier", "%s: %d threads at barrier %d, which has %d at %s", what, threads, id, barrier.threads,
         place(barrier.code).c_str());
  }
  if (id == 0) check_same_place("barrier", what, barrier.code);  // at a named one, producers and consumers meet
  char* token = &barrier.tokens[barrier.turn];
  signal_order(token);
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.turn ^= 1;
    wake(&barrier);
  } else if (waits) {
    wait_for(&barrier, what);
  }
  if (waits) observe_order(token);
}

inline const Exchange& Scheduler::meet(const char* what, unsigned mask, const void* value, int bytes,
                                       bool orders_memory) {
  Thread& thread = *current_;
  const int lane = thread.number % 32;
  if (!(mask >> lane & 1)) fail("collective", "%s: mask 0x%08x leaves out the calling lane %d", what, mask, lane);
  leave_exchange(thread);
  Exchange& exchange = open_exchange(what, mask);
  for (int i = 0; i < bytes; ++i) exchange.values[lane][i] = static_cast<const unsigned char*>(value)[i];
  exchange.arrived |= 1u << lane;
  exchange.reading |= 1u << lane;
  thread.held = &exchange;
  if (orders_memory) signal_order(&exchange);
  if (exchange.arrived == mask) {
    wake(&exchange);
  } else {
    wait_for(&exchange, what);
  }
  if (orders_memory) observe_order(&exchange);
  return exchange;
}

// The step that lanes of `mask` have begun, or a new one.
inline Exchange& Scheduler::open_exchange(const char* what, unsigned mask) {
  Exchange* free = nullptr;
  for (Exchange& exchange : exchanges_[current_->number / 32]) {
    if (exchange.reading == 0) free = &exchange;
    // With another mask, the lanes that wait may be waiting for this one to come by later.
    if (exchange.reading == 0 || exchange.arrived == exchange.mask || exchange.mask != mask) continue;
    if (strcmp(exchange.what, what) != 0) {
      fail("collective", "%s reached while other lanes wait for %s at %s", what, exchange.what,
           place(exchange.code).c_str());
    }
    check_same_place("collective", what, exchange.code);
    return exchange;
  }
  free->what = what;
  free->code = current_->code;
  free->mask = mask;
  free->arrived = 0;
  return *free;
}

inline void Scheduler::leave_exchange(Thread& thread) {
  if (thread.held != nullptr) thread.held->reading &= ~(1u << thread.number % 32);
  thread.held = nullptr;
}

inline void Scheduler::check_same_place(const char* kind, const char* what, const void* other_code) {
  const void* code = current_->code;
  if (code == other_code) return;
  for (const Suspect& known : suspects_) {
    if (known.code == code && known.other_code == other_code) return;
  }
  suspects_.push_back({kind, what, code, other_code, block_, current_->number});
}

// Every thread waits or has exited: says where, by groups of threads.
inline void Scheduler::report_stuck() {
  const auto together = [](const Thread& one, const Thread& other) {
    return one.state == other.state &&
           (one.state == Thread::EXITED || (one.awaited == other.awaited && one.code == other.code));
  };
  const auto name_group = [&](const Thread& first) {
    std::string names;
    for (int begin = 0, end; begin < size(); begin = end + 1) {
      for (end = begin; end < size() && together(*threads_[end], first);) ++end;
      if (end == begin) continue;
      names += (names.empty() ? "" : ", ") + std::to_string(begin);
      if (end - begin > 1) names += "-" + std::to_string(end - 1);
    }
    return names;
  };
  std::string message;
  const Thread* culprit = nullptr;
  const char* kind = "deadlock";
  for (int i = 0; i < size(); ++i) {
    const Thread& thread = *threads_[i];
    bool named = false;
    for (int j = 0; j < i && !named; ++j) named = together(*threads_[j], thread);
    if (named) continue;
    if (!message.empty()) message += "; ";
    message += "threads " + name_group(thread);
    if (thread.state == Thread::EXITED) {
      message += " exited";
      continue;
    }
    message += std::string(" wait for ") + thread.what + " at " + place(thread.code);
    const bool at_block_barrier = thread.awaited == &barriers_[0];
    const bool at_collective = thread.held != nullptr && thread.awaited == thread.held;
    if (culprit == nullptr || at_block_barrier) culprit = &thread;
    if (at_block_barrier) kind = "barrier";
    if (at_collective && kind[0] == 'd') kind = "collective";
  }
  current_ = const_cast<Thread*>(culprit);
  fail(kind, "%s", message.c_str());
}

}  // namespace simt
