// Atomics, relaxed as on the GPU, so that ThreadSanitizer sees no race and no ordering in them.
#pragma once

template <typename T>
__forceinline__ T atomicAdd(T* address, T value) {
  T expected;
  __atomic_load(address, &expected, __ATOMIC_RELAXED);
  T sum = expected + value;
  while (!__atomic_compare_exchange(address, &expected, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    sum = expected + value;
  }
  return expected;
}
