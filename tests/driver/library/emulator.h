// Runs a launch in the emulator of tests/emulator: an executable that reads a job and writes what became of the memory.
#pragma once

#include "state.h"

namespace driver {

struct Manner {
  int cluster, architecture;  // 90 for sm_90a: of the GPU, whose tensor cores add as its own do
  // it begins while the work before it ends: the emulator catches a kernel that does not wait for that
  bool is_early = false;
};

// The memory is what the kernel may touch, and is written back. What the emulator catches goes to the error output.
CUresult emulate(const Function& function, const CUlaunchConfig& config, const Manner& manner,
                 const std::vector<unsigned char>& arguments, const std::vector<std::shared_ptr<Allocation>>& memory);

}  // namespace driver
