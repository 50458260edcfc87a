// How the asynchronous engine does its work: in the name of the thread that asked for it, but with its own place in the
// order of memory accesses.
#pragma once

#include "engine.h"
#include "report.h"
#include "scheduler.h"

namespace simt {

inline void Engine::start(const char* what, Thread& thread, std::function<void()> land) {
  under_way_.push_back({what, &thread, thread.code, std::move(land), std::make_unique<Token>()});
  signal_order(under_way_.back().issued.get());
}

inline bool Engine::land_one() {
  if (under_way_.empty()) return false;
  const size_t chosen = order.pick(under_way_.size());
  Work work = std::move(under_way_[chosen]);
  under_way_.erase(under_way_.begin() + chosen);
  const void* code = work.thread->code;
  work.thread->code = work.code;
  scheduler.run_as(work.thread);
  run_as_work(work.thread->work_clocks, work.issued.get(), nullptr, work.land);
  scheduler.run_as(nullptr);
  work.thread->code = code;
  return true;
}

inline void Engine::check_idle() const {
  if (under_way_.empty()) return;
  const Work& work = under_way_.front();
  work.thread->code = work.code;
  scheduler.run_as(work.thread);
  fail("async", "every thread exited while %s was under way", work.what);
}

}  // namespace simt
