// CUDA's 16-bit types with their arithmetic: each operation is exact, then rounded once to nearest even.
#pragma once

namespace simt {

// To float, exact or with the last bit set: what is rounded to 16 bits after that is rounded once.
inline float to_odd(double value, bool is_inexact) {
  const float nearest = static_cast<float>(value);
  if (!is_inexact && static_cast<double>(nearest) == value) return nearest;
  if (!(nearest - nearest == 0)) return nearest;  // infinity, NaN
  unsigned bits = __float_as_uint(nearest);
  if (fabs(static_cast<double>(nearest)) > fabs(value)) --bits;
  return __uint_as_float(bits | 1);
}

// x y + z: the product is exact as double, and what the sum leaves behind is known.
inline float multiply_add_to_odd(float x, float y, float z) {
  const double product = double(x) * double(y), sum = product + double(z), part = sum - product;
  const double rest = (product - (sum - part)) + (double(z) - part);
  const bool leaves_more = rest != 0 && (sum > 0) == (rest > 0);
  if (rest == rest && rest != 0 && !leaves_more) {  // towards zero, where the odd bit belongs
    unsigned long long bits = __double_as_longlong(sum);
    return to_odd(__longlong_as_double(bits - 1), true);
  }
  return to_odd(sum, rest == rest && rest != 0);
}

}  // namespace simt

#define SIMT_SIXTEEN_BIT(type, narrow, widen)                                                               \
  struct type {                                                                                             \
    unsigned short bits;                                                                                    \
    type() = default;                                                                                       \
    type(float value) : bits(narrow(value)) {}                                                              \
    operator float() const { return widen(bits); }                                                          \
  };                                                                                                        \
  inline type operator+(type x, type y) { return type(float(x) + float(y)); }                               \
  inline type operator-(type x, type y) { return type(float(x) - float(y)); }                               \
  inline type operator*(type x, type y) { return type(float(x) * float(y)); }                               \
  inline type operator/(type x, type y) { return type(float(x) / float(y)); }                               \
  inline type& operator+=(type& x, type y) { return x = x + y; }                                            \
  inline type& operator-=(type& x, type y) { return x = x - y; }                                            \
  inline type& operator*=(type& x, type y) { return x = x * y; }                                            \
  inline type __hadd(type x, type y) { return x + y; }                                                      \
  inline type __hsub(type x, type y) { return x - y; }                                                      \
  inline type __hmul(type x, type y) { return x * y; }                                                      \
  inline type __hfma(type x, type y, type z) { return type(simt::multiply_add_to_odd(x, y, z)); }           \
  struct alignas(4) type##2 {                                                                               \
    type x, y;                                                                                              \
  };

SIMT_SIXTEEN_BIT(__half, simt::float_to_half, simt::half_to_float)
SIMT_SIXTEEN_BIT(__nv_bfloat16, simt::float_to_bfloat16, simt::bfloat16_to_float)
#undef SIMT_SIXTEEN_BIT

using half = __half;
using half2 = __half2;

inline __half __float2half(float value) { return __half(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline float __half2float(__half value) { return value; }
inline __half2 __floats2half2_rn(float low, float high) { return {__half(low), __half(high)}; }
inline float2 __half22float2(__half2 both) { return {both.x, both.y}; }
inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {__nv_bfloat16(low), __nv_bfloat16(high)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 both) { return {both.x, both.y}; }
