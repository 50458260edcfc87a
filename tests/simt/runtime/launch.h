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
