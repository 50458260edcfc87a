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

}  // namespace simt
