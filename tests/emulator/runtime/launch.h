// CUDA's built-in variables, as the runtime sets them: the kernel side declares the same ones const.
#pragma once

#include "interface.h"

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x, y, z;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace simt {

// Registers a thread gets at the launch: what the compiler may use when as many blocks are resident as the kernel's
// bounds say. Without both bounds it cannot tell, and leaves out setmaxnreg.
constexpr int REGISTERS = 65536;
inline int registers_at_launch(const LaunchBounds& bounds) {
  if (bounds.threads == 0 || bounds.blocks == 0) return 0;
  const int share = REGISTERS / ((bounds.threads + 31) / 32 * 32 * bounds.blocks) / 8 * 8;
  return share < 256 ? share : 256;
}

}  // namespace simt
