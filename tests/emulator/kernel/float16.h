// 16-bit floats as bit patterns. Rounding is to nearest even; every NaN becomes 0x7fff, as with the GPU's cvt.rn.
#pragma once

namespace simt {

inline unsigned short float_to_half(float value) {
  const unsigned int bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= __float_as_uint(65520.0f)) return sign | 0x7c00u;  // halfway above the largest half
  if (magnitude < __float_as_uint(0x1p-14f)) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f));
  }
  return sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13) - (112u << 10));
}

inline float bfloat16_to_float(unsigned short bfloat16) { return __uint_as_float((unsigned int)bfloat16 << 16); }

inline unsigned short float_to_bfloat16(float value) {
  const unsigned int bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

}  // namespace simt
