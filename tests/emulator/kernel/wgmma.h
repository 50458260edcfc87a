// Products by a warpgroup, and registers that its warps take from each other.
#pragma once

__forceinline__ void wgmma_fence() { simt::wgmma_fence(); }
__forceinline__ void wgmma_commit() { simt::wgmma_commit(); }

template <int PENDING>
__forceinline__ void wgmma_wait() {
  simt::wgmma_wait(PENDING);
}

// Tells the compiler that the registers may change here: nothing to do.
template <int SUMS>
__forceinline__ void wgmma_hold(float (&)[SUMS]) {}
template <int WORDS>
__forceinline__ void wgmma_hold(unsigned (&)[WORDS]) {}

namespace simt {

template <int SUMS>
constexpr WgmmaShape wgmma_shape(Operand operand, bool transposes_a, bool transposes_b) {
  static_assert(SUMS % 4 == 0 && SUMS >= 4 && SUMS <= 128,
                "a wgmma has 8 to 256 columns, in steps of 8: half as many sums a thread");
  return {2 * SUMS, operand, transposes_a, transposes_b};
}

}  // namespace simt

#define SIMT_WGMMA_16(name, operand)                                                                                   \
  template <bool TRANSPOSES_A, bool TRANSPOSES_B, int SUMS>                                                            \
  __forceinline__ void wgmma_ss_##name(float (&sums)[SUMS], unsigned long long a, unsigned long long b, bool adds) {   \
    const auto shape = simt::wgmma_shape<SUMS>(simt::Operand::operand, TRANSPOSES_A, TRANSPOSES_B);                    \
    simt::wgmma(sums, nullptr, a, b, adds, shape);                                                                     \
  }                                                                                                                    \
  template <bool TRANSPOSES_B, int SUMS>                                                                               \
  __forceinline__ void wgmma_rs_##name(float (&sums)[SUMS], const unsigned (&a)[4], unsigned long long b, bool adds) { \
    const auto shape = simt::wgmma_shape<SUMS>(simt::Operand::operand, false, TRANSPOSES_B);                           \
    simt::wgmma(sums, a, 0, b, adds, shape);                                                                           \
  }

SIMT_WGMMA_16(f16, F16)
SIMT_WGMMA_16(bf16, BF16)
#undef SIMT_WGMMA_16

#define SIMT_WGMMA_OTHER(name, operand)                                                                              \
  template <int SUMS>                                                                                                \
  __forceinline__ void wgmma_ss_##name(float (&sums)[SUMS], unsigned long long a, unsigned long long b, bool adds) { \
    simt::wgmma(sums, nullptr, a, b, adds, simt::wgmma_shape<SUMS>(simt::Operand::operand, false, false));           \
  }

SIMT_WGMMA_OTHER(tf32, TF32)
SIMT_WGMMA_OTHER(e4m3, E4M3)
SIMT_WGMMA_OTHER(e5m2, E5M2)
#undef SIMT_WGMMA_OTHER

template <int SUMS>
__forceinline__ void wgmma_rs_tf32(float (&sums)[SUMS], const unsigned (&a)[4], unsigned long long b, bool adds) {
  simt::wgmma(sums, a, 0, b, adds, simt::wgmma_shape<SUMS>(simt::Operand::TF32, false, false));
}

template <int COUNT>
__forceinline__ void registers_increase() {
  simt::registers_increase(COUNT);
}

template <int COUNT>
__forceinline__ void registers_decrease() {
  simt::registers_decrease(COUNT);
}
