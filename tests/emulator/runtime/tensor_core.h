// How tensor cores multiply and add: exact products of narrow operands, summed in steps, each sum cut off.
#pragma once

#include <cmath>

#include "half.h"
#include "interface.h"

namespace simt {

// CUT_OFF: as the target's rule says. ROUNDED: the exact sum, rounded to nearest.
enum class Accumulation { CUT_OFF, ROUNDED };
inline Accumulation accumulation = Accumulation::CUT_OFF;
inline int architecture = 90;  // of the target that the kernel runs as: 90 for sm_90a

// How tensor cores add. A product's exponent is the sum of its operands', even if its significand is 2 or more; a
// subnormal operand has the exponent of the least normal one. Products and the sum so far are aligned to the largest
// exponent among them, cut off, added, and the sum is cut off.
struct SumRule {
  int step;         // products that are added at once, in order of k; 0: the target has no such instruction
  int kept;         // bits below the largest exponent, beyond which everything is cut off
  int mantissa;     // bits of a sum behind its first, beyond which it is cut off
  bool adds_after;  // products are summed from zero, and the sum so far is added to theirs, rounded to nearest
};

struct TargetRules {
  int since;  // architecture
  SumRule halves, tf32, bytes;
};

// As published with measurements (arXiv 2512.07004; `python -m tests.measured_sums`); what is only assumed is named.
constexpr TargetRules TARGET_RULES[] = {
    {70, {4, 23, 23}, {}, {}},                                     // V100. sm_75: assumed
    {80, {8, 24, 23}, {4, 24, 23}, {}},                            // A100, A2. sm_87: assumed
    {89, {8, 24, 23}, {4, 24, 23}, {16, 13, 13}},                  // RTX 1000 Ada, L40S
    {90, {16, 25, 23}, {8, 25, 23}, {32, 13, 13}},  // H100, H200. Assumed: bytes whose sum so far is not zero
    {100, {16, 25, 23}, {8, 25, 23}, {32, 25, 23, true}},          // B200. sm_103, sm_110: assumed
    {120, {16, 25, 23}, {8, 25, 23}, {32, 25, 23}},                // assumed: a published model without measurements
};
constexpr int LEAST_ALIGNMENT = -133;  // the least exponent that anything is aligned to

inline bool is_byte(Operand kind) { return kind == Operand::E4M3 || kind == Operand::E5M2; }

inline float byte_of(unsigned char bits, Operand kind) {
  return kind == Operand::E4M3 ? e4m3_to_float(bits) : e5m2_to_float(bits);
}

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

// To so many bits behind the first, towards zero; beyond all floats, to infinity.
inline float cut_off(double value, int mantissa) {
  if (std::fabs(value) >= 0x1p128) return std::copysign(HUGE_VALF, static_cast<float>(value));
  unsigned long long bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits &= ~0ull << (52 - mantissa);
  __builtin_memcpy(&value, &bits, sizeof(value));
  const float nearest = static_cast<float>(value);  // exact, but for a subnormal one
  return std::fabs(static_cast<double>(nearest)) > std::fabs(value) ? std::nextafterf(nearest, 0.0f) : nearest;
}

// Of the exponents that normal doubles have, which products of floats do not leave.
inline double power_of_two(int exponent) {
  const unsigned long long bits = (1023ull + exponent) << 52;
  double value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline const char* name_of(Operand operand) {
  static constexpr const char* NAMES[] = {"f32", "tf32", "f16", "bf16", "e4m3", "e5m2"};
  return NAMES[int(operand)];
}

inline int least_exponent(Operand kind) {  // of a normal number
  return kind == Operand::E4M3 ? -6 : kind == Operand::F16 || kind == Operand::E5M2 ? -14 : -126;
}

// A number's exponent, with float32's bias; 0 for zero.
inline int biased_exponent(float value, int least) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits &= 0x7fffffff;
  const int exponent = bits >> 23, lowest = least + 127;
  return bits == 0 ? 0 : exponent > lowest ? exponent : lowest;
}

inline SumRule sum_rule(Operand kind) {
  SumRule found = {};
  for (const TargetRules& each : TARGET_RULES) {
    if (each.since <= architecture)
      found = kind == Operand::TF32 ? each.tf32 : is_byte(kind) ? each.bytes : each.halves;
  }
  if (found.step == 0 || (kind == Operand::BF16 && architecture < 80)) {
    fail("target",
         "sm_%d has no tensor-core products of %s; f16 begins with sm_70, bf16 and tf32 with sm_80, "
         "e4m3 and e5m2 with sm_89",
         architecture, name_of(kind));
  }
  return found;
}

inline float add_step(float sum, const float* x, const float* w, const SumRule& rule, int least) {
  double products[32], exact = sum;
  int largest = 0;  // exponent of a product, twice biased: 0 where all are zero
  for (int i = 0; i < rule.step; ++i) {
    const int of_x = biased_exponent(x[i], least), of_w = biased_exponent(w[i], least);
    const int exponent = of_x == 0 || of_w == 0 ? 0 : of_x + of_w;
    largest = exponent > largest ? exponent : largest;
  }
  for (int i = 0; i < rule.step; ++i) exact += products[i] = double(x[i]) * double(w[i]);
  if (const int own = biased_exponent(sum, -126); own != 0 && own + 127 > largest) largest = own + 127;
  if (!std::isfinite(exact) || largest == 0) return static_cast<float>(exact);
  largest -= 2 * 127;
  const int last = (largest > LEAST_ALIGNMENT ? largest : LEAST_ALIGNMENT) - rule.kept;
  const double up = power_of_two(-last);
  long long total = static_cast<long long>(sum * up);  // a power of two: exact until it is cut off
  for (int i = 0; i < rule.step; ++i) total += static_cast<long long>(products[i] * up);
  return cut_off(static_cast<double>(total) * power_of_two(last), rule.mantissa);
}

// The sum of `count` products, whole steps of them, and of what was there before.
inline float dot(float sum, const float* x, const float* w, int count, Operand kind, const SumRule& rule) {
  if (accumulation == Accumulation::ROUNDED) {
    double exact = sum;
    for (int i = 0; i < count; ++i) exact += double(x[i]) * double(w[i]);
    return static_cast<float>(exact);
  }
  float found = rule.adds_after ? 0 : sum;
  for (int i = 0; i < count; i += rule.step) found = add_step(found, x + i, w + i, rule, least_exponent(kind));
  return rule.adds_after ? sum + found : found;
}

}  // namespace simt
