// Faults on request: KSGEN_DRIVER_FAULTS, or `ksgen_driver_faults(text)` in a running process.
//
// The text is a list of `what:fault`, or `what:fault@n` for the n-th time alone, with commas between. What starts with
// cu and a capital is a call by its name in the API (cuMemAlloc:2 returns out of memory). Everything else is a kernel's
// entry, with * for any letters: 700 is the error that running it ends in, `hang` never ends, `wrong` spoils its
// results.
#pragma once

#include <cuda.h>

#include <string>

namespace driver {

struct KernelFault {
  CUresult code = CUDA_SUCCESS;
  bool hangs = false, is_wrong = false;
};

CUresult fault_of_call(const char* name);
KernelFault fault_of_kernel(const std::string& entry);

}  // namespace driver
