// Warp shuffles and votes. They exchange registers and order no memory: only __syncwarp does.
#pragma once

__forceinline__ void __syncwarp(unsigned mask = 0xffffffff) {
  simt::exchange("__syncwarp", mask, nullptr, 0, true);
}

namespace simt {

// The value of lane `source`, which has to take part.
template <typename T>
__forceinline__ T shuffle(const char* what, unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= Exchange::VALUE_BYTES);
  const Exchange& all = exchange(what, mask, &value, sizeof(T), false);
  if (!(mask >> source & 1)) fail("collective", "%s reads lane %d, which mask 0x%08x leaves out", what, source, mask);
  T result;
  __builtin_memcpy(&result, all.values[source], sizeof(T));
  return result;
}

// The lanes of `mask` whose predicate holds.
__forceinline__ unsigned vote(const char* what, unsigned mask, bool predicate) {
  const Exchange& all = exchange(what, mask, &predicate, sizeof(bool), false);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= unsigned(mask >> i & 1 && all.values[i][0]) << i;
  return result;
}

}  // namespace simt

template <typename T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return simt::shuffle("__shfl_sync", mask, value, (simt::lane() & -width) + (source & (width - 1)));
}

template <typename T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int source = simt::lane() ^ bits, end = (simt::lane() & -width) + width;
  return simt::shuffle("__shfl_xor_sync", mask, value, source < end ? source : simt::lane());
}

template <typename T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int source = simt::lane() - int(distance), start = simt::lane() & -width;
  return simt::shuffle("__shfl_up_sync", mask, value, source >= start ? source : simt::lane());
}

template <typename T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int source = simt::lane() + int(distance), end = (simt::lane() & -width) + width;
  return simt::shuffle("__shfl_down_sync", mask, value, source < end ? source : simt::lane());
}

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return simt::vote("__ballot_sync", mask, predicate != 0);
}

__forceinline__ int __any_sync(unsigned mask, int predicate) {
  return simt::vote("__any_sync", mask, predicate != 0) != 0;
}

__forceinline__ int __all_sync(unsigned mask, int predicate) {
  return simt::vote("__all_sync", mask, predicate != 0) == mask;
}
