// CUDA's keywords, built-in variables and barriers.
#pragma once

#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__ static const

// For build.py: it lists the kernels, with their __launch_bounds__ and __cluster_dims__, and C++ has no one word for
// both `__shared__` and `extern __shared__`.
#define __global__ SIMT_KERNEL
#define __shared__ SIMT_SHARED

using size_t = decltype(sizeof(0));

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};

extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
constexpr int warpSize = 32;

extern "C" int printf(const char* format, ...);

__forceinline__ void __syncthreads() {
  simt::barrier("__syncthreads", 0, simt::threads_of_block(), true);
}

__forceinline__ void __barrier_sync(unsigned id) {
  simt::barrier("__barrier_sync", id, simt::threads_of_block(), true);
}

__forceinline__ void __barrier_sync_count(unsigned id, unsigned threads) {
  simt::barrier("__barrier_sync_count", id, threads, true);
}

__forceinline__ size_t __cvta_generic_to_shared(const void* pointer) { return simt::shared_address(pointer); }
__forceinline__ void* __cvta_shared_to_generic(size_t address) { return simt::shared_pointer(unsigned(address)); }

// A fence orders this thread's own accesses; it is no barrier for others.
__forceinline__ void __threadfence() {}
__forceinline__ void __threadfence_block() {}

[[noreturn]] __forceinline__ void __trap() { simt::trap(); }
