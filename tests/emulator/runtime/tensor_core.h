// How tensor cores multiply and add: exact products of narrow operands, summed in one step, the sum cut off.
#pragma once

#include <cmath>

#include "half.h"
#include "interface.h"

namespace simt {

// CUT_OFF: as GPUs were seen to do it. Products and the sum so far are aligned to the largest of them, cut off two bits
// below float32's last, added, and the sum cut off to 24 bits. Of operands in eight bits they are cut off 13 bits below the
// largest's first, as was published of Hopper; no GPU was asked here. ROUNDED: the exact sum, rounded to nearest.
enum class Accumulation { CUT_OFF, ROUNDED };
inline Accumulation accumulation = Accumulation::CUT_OFF;

inline bool is_byte(Operand kind) { return kind == Operand::E4M3 || kind == Operand::E5M2; }

inline float byte_of(unsigned char bits, Operand kind) { return kind == Operand::E4M3 ? e4m3_to_float(bits) : e5m2_to_float(bits); }

inline float operand(unsigned bits, Operand kind) {
  if (kind == Operand::TF32) bits &= 0xffffe000;  // ten bits of mantissa are looked at
  if (kind == Operand::BF16) bits <<= 16;
  return float_of_bits(bits);
}

// Element `index` of a register that holds operands of this kind.
inline float element_of(unsigned word, int index, Operand kind) {
  if (kind == Operand::TF32) return operand(word, kind);
  if (is_byte(kind)) return byte_of(word >> 8 * index, kind);
  const unsigned short bits = word >> 16 * index;
  return kind == Operand::F16 ? half_to_float(bits) : operand(bits, kind);
}

inline float cut_off(double value) {  // to 24 bits, towards zero; beyond all floats, to infinity
  if (std::fabs(value) >= 0x1p128) return std::copysign(HUGE_VALF, static_cast<float>(value));
  const float nearest = static_cast<float>(value);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(value) ? std::nextafterf(nearest, 0.0f) : nearest;
}

// Of the exponents that normal doubles have, which products of floats do not leave.
inline double power_of_two(int exponent) {
  const unsigned long long bits = (1023ull + exponent) << 52;
  double value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// The least power of two above a normal double, as an exponent.
inline int exponent_above(double value) {
  unsigned long long bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return int(bits >> 52 & 0x7ff) - 1022;
}

inline int kept_bits(Operand kind) { return is_byte(kind) ? 13 : 25; }  // below the largest's first

inline float dot(float sum, const float* x, const float* w, int count, int kept) {
  double products[32], largest = std::fabs(sum), exact = sum;
  for (int i = 0; i < count; ++i) {
    products[i] = double(x[i]) * double(w[i]);
    exact += products[i];
    const double magnitude = std::fabs(products[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  if (!std::isfinite(exact) || largest == 0 || accumulation == Accumulation::ROUNDED) return static_cast<float>(exact);
  const int exponent = exponent_above(largest), last = (exponent > -140 ? exponent : -140) - 1 - kept;
  const double up = power_of_two(-last);
  long long total = static_cast<long long>(sum * up);  // a power of two: exact until it is cut off
  for (int i = 0; i < count; ++i) total += static_cast<long long>(products[i] * up);
  return cut_off(static_cast<double>(total) * power_of_two(last));
}

}  // namespace simt
