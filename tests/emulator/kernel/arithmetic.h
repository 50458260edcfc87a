// Scalar functions: the C library's where CUDA has the same name, compiler built-ins for CUDA's own.
#pragma once

extern "C" {
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float erff(float) noexcept;
double erf(double) noexcept;
float erfcf(float) noexcept;
double erfc(double) noexcept;
float tanhf(float) noexcept;
double tanh(double) noexcept;
float expf(float) noexcept;
double exp(double) noexcept;
float exp2f(float) noexcept;
double exp2(double) noexcept;
float logf(float) noexcept;
double log(double) noexcept;
float sqrtf(float) noexcept;
double sqrt(double) noexcept;
float fmaxf(float, float) noexcept;
double fmax(double, double) noexcept;
float fminf(float, float) noexcept;
double fmin(double, double) noexcept;
float fabsf(float) noexcept;
double fabs(double) noexcept;
}

// CUDA overloads the double names for float.
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float erf(float x) { return erff(x); }
inline float tanh(float x) { return tanhf(x); }
inline float exp(float x) { return expf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float fmax(float x, float y) { return fmaxf(x, y); }
inline float fmin(float x, float y) { return fminf(x, y); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

#define SIMT_MIN_MAX(type)                                      \
  constexpr type min(type x, type y) { return y < x ? y : x; }  \
  constexpr type max(type x, type y) { return x < y ? y : x; }

SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned int)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX

inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline double min(double x, double y) { return fmin(x, y); }
inline double max(double x, double y) { return fmax(x, y); }

namespace simt {

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

}  // namespace simt

inline unsigned int __float_as_uint(float x) { return simt::bits_as<unsigned int>(x); }
inline int __float_as_int(float x) { return simt::bits_as<int>(x); }
inline float __uint_as_float(unsigned int x) { return simt::bits_as<float>(x); }
inline float __int_as_float(int x) { return simt::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return simt::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return simt::bits_as<double>(x); }

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned int __umulhi(unsigned int x, unsigned int y) { return (unsigned long long)x * y >> 32; }

// Four bytes picked from the eight of (y, x); a selector's top bit repeats the byte's sign.
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned int result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned int pick = selector >> 4 * i;
    unsigned int byte = bytes >> 8 * (pick & 7) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0x00;
    result |= byte << 8 * i;
  }
  return result;
}
