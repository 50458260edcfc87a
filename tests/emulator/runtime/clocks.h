// Order of accesses, for the race build. There, each CUDA thread has two clocks of ThreadSanitizer: its fiber, and a
// second one for what any thread had shown to the asynchronous proxy up to this point of the thread.
// Each piece of asynchronous work has such a pair of its own. Other builds know of no order.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "sanitizers.h"

namespace simt {

// A fiber on which no kernel code runs. It begins with nothing behind it.
class Clock {
 public:
  bool exists() const { return fiber_ != nullptr; }

  void make(const char* name) {
#if SIMT_RACE
    if (exists()) return;
    void* const self = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(unordered_, NO_SYNC);
    fiber_ = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(self, NO_SYNC);
    __tsan_set_fiber_name(fiber_, name);
#endif
    (void)name;
  }

  // What `act` reports to the sanitizer is reported for this clock.
  template <typename Act>
  void run(const Act& act) const {
#if SIMT_RACE
    void* const self = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber_, NO_SYNC);
    {
      const Unseen unseen;
      act();
    }
    __tsan_switch_to_fiber(self, NO_SYNC);
#else
    act();
#endif
  }

 private:
  void* fiber_ = nullptr;
#if SIMT_RACE
  static inline void* const unordered_ = __tsan_create_fiber(0);  // a new fiber is behind the one that makes it
#endif
};

constexpr const char* ENGINE = "the asynchronous engine";
constexpr const char* PROXY = "the asynchronous proxy";
constexpr const char* BLOCK_END = "the end of its block";

inline Clock* proxy_clock = nullptr;  // the second one of who runs now

// Something that one waits for and another one does.
struct Token {
  char generic = 0, proxy = 0;
  bool has_proxy = false;  // a fence came before
};

inline void release(void* address) {
#if SIMT_RACE
  __tsan_release(address);
#endif
  (void)address;
}

inline void acquire(void* address) {
#if SIMT_RACE
  __tsan_acquire(address);
#endif
  (void)address;
}

// What came before `signal` in one thread comes before what follows `observe` in another.
inline void signal_order(Token* token) {
  release(&token->generic);
  if (proxy_clock == nullptr || !proxy_clock->exists()) return;
  proxy_clock->run([token] { release(&token->proxy); });
  token->has_proxy = true;
}

inline void observe_order(Token* token) {
  acquire(&token->generic);
  if (!SIMT_RACE || proxy_clock == nullptr || !token->has_proxy) return;
  proxy_clock->make(PROXY);
  proxy_clock->run([token] { acquire(&token->proxy); });
}

// All that is behind the current thread is shown to the asynchronous proxy.
inline void show_to_proxy(Token* token) {
  if (!SIMT_RACE) return;
  release(&token->generic);
  proxy_clock->make(PROXY);
  proxy_clock->run([token] { acquire(&token->generic); });
}

// The pair of a piece of asynchronous work.
struct WorkClocks {
  Clock generic, proxy;
  Token token;
};

// New clocks are slow to make. An owner's later work is behind its earlier work in all but what that did itself, so its
// clocks serve again, the longest unused ones first.
class WorkClockPool {
 public:
  std::unique_ptr<WorkClocks> take() {
    if (unused_.size() < LEAST_UNUSED) return std::make_unique<WorkClocks>();
    std::unique_ptr<WorkClocks> clocks = std::move(unused_.front());
    unused_.erase(unused_.begin());
    return clocks;
  }
  void give_back(std::unique_ptr<WorkClocks> clocks) { unused_.push_back(std::move(clocks)); }

 private:
  static constexpr size_t LEAST_UNUSED = 4;
  std::vector<std::unique_ptr<WorkClocks>> unused_;
};

// Work that was requested when `issued` was signalled. Its accesses to memory belong to this clock alone. `done`, if
// any, is signalled at its end.
template <typename Work>
void run_as_work(WorkClockPool& pool, Token* issued, Token* done, const Work& work) {
#if SIMT_RACE
  std::unique_ptr<WorkClocks> clocks = pool.take();
  Clock* const proxy_before = proxy_clock;
  proxy_clock = &clocks->proxy;
  clocks->generic.make(ENGINE);
  clocks->generic.run([&] {
    observe_order(issued);
    work();
    if (clocks->proxy.exists()) {  // what it read as the proxy is done, too
      clocks->proxy.run([&] { release(&clocks->token.proxy); });
      acquire(&clocks->token.proxy);
    }
    if (done != nullptr) signal_order(done);
  });
  proxy_clock = proxy_before;
  pool.give_back(std::move(clocks));
#else
  (void)pool, (void)issued, (void)done;
  work();
#endif
}

// The running work reads memory that threads wrote, as the asynchronous proxy: behind fences alone.
inline void note_read_by_proxy(const void* address, size_t bytes, const void* code) {
#if SIMT_RACE
  proxy_clock->make(PROXY);
  proxy_clock->run([&] { note_read(address, bytes, code); });
#endif
  (void)address, (void)bytes, (void)code;
}

}  // namespace simt
