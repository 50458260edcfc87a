// What to say when every thread waits or has exited, and no asynchronous work is left to do.
#pragma once

#include <string>

#include "report.h"
#include "scheduler.h"

namespace simt {

inline bool waits_together(const Thread& one, const Thread& other) {
  return one.block == other.block && one.state == other.state &&
         (one.state == Thread::EXITED || (one.awaited == other.awaited && one.code == other.code));
}

// The threads of a block that wait with this one: "0-31, 40".
inline std::string name_group(const Thread& first) {
  const auto& threads = first.block->threads;
  const int count = int(threads.size());
  std::string names;
  for (int begin = 0, end; begin < count; begin = end + 1) {
    for (end = begin; end < count && waits_together(*threads[end], first);) ++end;
    if (end == begin) continue;
    names += (names.empty() ? "" : ", ") + std::to_string(begin);
    if (end - begin > 1) names += "-" + std::to_string(end - 1);
  }
  return names;
}

void report_stuck(Scheduler& scheduler) {
  std::string message;
  Thread* culprit = nullptr;
  const char* kind = "deadlock";
  for (Block& block : scheduler.blocks()) {
    for (size_t i = 0; i < block.threads.size(); ++i) {
      Thread& thread = *block.threads[i];
      bool named = false;
      for (size_t j = 0; j < i && !named; ++j) named = waits_together(*block.threads[j], thread);
      if (named) continue;
      if (!message.empty()) message += "; ";
      if (scheduler.blocks().size() > 1) message += "cluster block " + std::to_string(block.rank) + ": ";
      message += "threads " + name_group(thread);
      if (thread.state == Thread::EXITED) {
        message += " exited";
        continue;
      }
      message += std::string(" wait for ") + thread.what + " at " + place(thread.code);
      if (thread.details) message += " (" + thread.details() + ")";
      const bool at_block_barrier = thread.awaited == &block.barriers[0];
      const bool at_collective = thread.held != nullptr && thread.awaited == thread.held;
      if (culprit == nullptr || at_block_barrier) culprit = &thread;
      if (at_block_barrier) kind = "barrier";
      if (at_collective && kind[0] == 'd') kind = "collective";
    }
  }
  scheduler.run_as(culprit);
  fail(kind, "%s", message.c_str());
}

}  // namespace simt
