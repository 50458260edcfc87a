// CUDA's built-in variables, as the runtime sets them: the kernel side declares the same ones const.
#pragma once

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x, y, z;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace simt {

// Registers a thread gets at the launch: what the compiler may use at most when all of a block's threads are resident.
constexpr int REGISTERS = 65536;
inline int registers_at_launch(int threads) {
  const int share = REGISTERS / threads / 8 * 8;
  return share < 256 ? share : 256;
}

}  // namespace simt
