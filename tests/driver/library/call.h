// How an entry of the API is written: `return call("cuMemAlloc", IN_CONTEXT, [&] { ... });`
#pragma once

#include <unistd.h>

#include "faults.h"
#include "state.h"

namespace driver {

enum Needs { NOTHING, STARTED, IN_CONTEXT };

extern std::mutex guard;
extern pid_t started_in;  // the process; a fork of it may call nothing

inline void need(bool holds, CUresult otherwise = CUDA_ERROR_INVALID_VALUE) {
  if (!holds) throw otherwise;
}

// The action throws the code that is not CUDA_SUCCESS. A call that waits for what never ends never returns.
template <typename Action>
CUresult call(const char* name, Needs needs, Action action) {
  std::unique_lock<std::mutex> lock(guard);
  try {
    if (needs != NOTHING) need(started_in == getpid(), CUDA_ERROR_NOT_INITIALIZED);
    if (needs == IN_CONTEXT) valid_current();
    if (const CUresult code = fault_of_call(name); code != CUDA_SUCCESS) {
      if (is_sticky(code) && current() != nullptr) lose(*current(), code);
      throw code;
    }
    action();
    return CUDA_SUCCESS;
  } catch (CUresult code) {
    return code;
  } catch (Hang) {
    lock.unlock();
    while (true) pause();
  }
}

}  // namespace driver
