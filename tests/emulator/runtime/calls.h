// What every function that the kernel calls does first.
#pragma once

#include "addresses.h"
#include "scheduler.h"

namespace simt {

// Lives as long as the call. Always inlined: the address wanted is the one that the kernel's call returns to.
class Call {
 public:
  __attribute__((always_inline)) Call() { scheduler.current()->code = before(__builtin_return_address(0)); }

 private:
  Unseen unseen_;
};

// What is asked of the engine now touches memory only later, when the thread may have waited.
inline void check_has_waited(const char* what) {
  if (!scheduler.current()->has_waited) fail("grid", "%s before wait_for_previous_grid()", what);
}

}  // namespace simt
