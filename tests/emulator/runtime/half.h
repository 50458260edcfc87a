// How a 16-bit float widens: the one conversion that both the kernel's side and the tensor cores need.
#pragma once

namespace simt {

inline float float_of_bits(unsigned bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float half_to_float(unsigned short half) {
  const unsigned sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return float_of_bits(sign | magnitude | 0x7f800000u);  // infinity, NaN
  const float value = float_of_bits(magnitude) * 0x1p112f;                             // exact, subnormals too
  return sign != 0 ? -value : value;
}

}  // namespace simt
