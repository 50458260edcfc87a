// How floats of 16 and 8 bits widen: the conversions that both the kernel's side and the tensor cores need.
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

inline float e4m3_to_float(unsigned char bits) {  // by the format's definition: a NaN is all ones behind the sign
  const int size = bits & 0x7f, exponent = size >> 3, fraction = size & 7;
  const float wide = size == 0x7f ? __builtin_nanf("")
      : __builtin_ldexpf(exponent ? 8 + fraction : fraction, (exponent ? exponent : 1) - 10);
  return bits & 0x80 ? -wide : wide;
}

inline float e5m2_to_float(unsigned char bits) { return half_to_float(bits << 8); }  // the upper half of a 16-bit one

}  // namespace simt
