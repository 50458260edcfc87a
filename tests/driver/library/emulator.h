// Runs a launch in the emulator of tests/simt: an executable that reads a job and writes what became of the memory.
#pragma once

#include "state.h"

namespace driver {

// The memory is what the kernel may touch, and is written back. What the emulator catches is told on the error output.
CUresult emulate(const Function& function, const CUlaunchConfig& config, int cluster, const std::vector<unsigned char>& arguments,
                 const std::vector<std::shared_ptr<Allocation>>& memory);

}  // namespace driver
