// Matrix instructions of a warp, and what makes their operands.
#pragma once

__forceinline__ unsigned shared_address(const void* pointer) { return simt::shared_address(pointer); }

template <bool TRANSPOSED>
__forceinline__ void ldmatrix_x4(unsigned (&words)[4], unsigned row) {
  simt::ldmatrix(words, row, TRANSPOSED);
}

template <bool TRANSPOSED>
__forceinline__ void stmatrix_x4(unsigned row, const unsigned (&words)[4]) {
  simt::stmatrix(row, words, TRANSPOSED);
}

__forceinline__ void mma_f16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  simt::mma(sums, a, b0, b1, simt::Operand::F16);
}

__forceinline__ void mma_bf16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  simt::mma(sums, a, b0, b1, simt::Operand::BF16);
}

__forceinline__ void mma_tf32(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  simt::mma(sums, a, b0, b1, simt::Operand::TF32);
}

__forceinline__ void mma_e4m3(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  simt::mma(sums, a, b0, b1, simt::Operand::E4M3);
}

__forceinline__ void mma_e5m2(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  simt::mma(sums, a, b0, b1, simt::Operand::E5M2);
}

// To tf32's ten bits of mantissa, to nearest, ties away from zero.
inline unsigned float_to_tf32(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits & 0x007fffffu ? 0x7fffffffu : bits;
  return (bits + 0x1000u) & 0xffffe000u;
}

// Two in a register, the first one in its lower half.
inline unsigned pack_f16(float low, float high) { return unsigned(float_to_half(high)) << 16 | float_to_half(low); }

// Two e4m3 as two float16.
inline unsigned e4m3_to_f16(unsigned short both) { return pack_f16(e4m3_to_float(both & 0xff), e4m3_to_float(both >> 8)); }

inline void multiply_add_pair(float* sums, const float* x, const float w) {
  sums[0] = fmaf(x[0], w, sums[0]);
  sums[1] = fmaf(x[1], w, sums[1]);
}

inline unsigned pack_bf16(float low, float high) {
  return unsigned(float_to_bfloat16(high)) << 16 | float_to_bfloat16(low);
}
