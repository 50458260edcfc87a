// Defines the parts of OpenCL C that sources for processors use, for a C++ compiler: GCC from 12 on, or Clang.
// `HostCompiler` puts this file before a source, and one loop over work groups per entry after it.

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__) && (defined(__clang__) || __GNUC__ > 15)
#include <immintrin.h>
#elif defined(__SSE2__)
#define OWN_INTRINSICS
#endif

#define inline inline __attribute__((always_inline))

// ---- the functions used from <math.h> and <utility>: GCC takes longer to read these than to compile most kernels

#define HOST_FUNCTION(NAME) \
    extern "C" double NAME(double) noexcept; \
    static inline float NAME(const float value) { return __builtin_##NAME##f(value); }
HOST_FUNCTION(exp)
HOST_FUNCTION(tanh)
HOST_FUNCTION(erf)
HOST_FUNCTION(fabs)
static inline double fma(const double a, const double b, const double c) { return __builtin_fma(a, b, c); }
static inline float fma(const float a, const float b, const float c) { return __builtin_fmaf(a, b, c); }
static inline double copysign(const double size, const double sign) { return __builtin_copysign(size, sign); }
static inline float copysign(const float size, const float sign) { return __builtin_copysignf(size, sign); }

namespace host {
template <class T, T... I>
struct Sequence {};
#ifdef __clang__
template <int N>
using FirstNumbers = __make_integer_seq<Sequence, int, N>;
#else
template <int N>
using FirstNumbers = Sequence<int, __integer_pack(N)...>;
#endif
}  // namespace host

// ---- the functions used from <immintrin.h>: GCC takes a quarter of a second to read it

#ifdef OWN_INTRINSICS
typedef float __m128 __attribute__((vector_size(16), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef long long __m128i_u __attribute__((vector_size(16), may_alias, aligned(1)));
typedef long long __v2di __attribute__((vector_size(16)));
typedef short __v8hi __attribute__((vector_size(16)));
typedef char __v16qi __attribute__((vector_size(16)));
static inline __m128i _mm_loadu_si128(const __m128i_u* from) { return *from; }
static inline void _mm_storeu_si128(__m128i_u* to, const __m128i value) { *to = value; }
static inline void _mm_stream_si128(__m128i* to, const __m128i value) {
    __builtin_ia32_movntdq((__v2di*)to, (__v2di)value);
}
static inline void _mm_sfence() { __builtin_ia32_sfence(); }
#endif
#if defined(OWN_INTRINSICS) && defined(__AVX__)
typedef float __m256 __attribute__((vector_size(32), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef long long __m256i_u __attribute__((vector_size(32), may_alias, aligned(1)));
static inline __m256 _mm256_set_m128(const __m128 high, const __m128 low) {
    return __builtin_ia32_vinsertf128_ps256(__builtin_ia32_ps256_ps(low), high, 1);
}
static inline __m256i _mm256_loadu_si256(const __m256i_u* from) { return *from; }
static inline void _mm256_storeu_si256(__m256i_u* to, const __m256i value) { *to = value; }
static inline void _mm256_stream_si256(__m256i* to, const __m256i value) { __builtin_ia32_movntdq256(to, value); }
#endif
#if defined(OWN_INTRINSICS) && defined(__AVX2__)
typedef int Ints8 __attribute__((vector_size(32)));
typedef short Shorts256 __attribute__((vector_size(32)));
static inline Shorts256 _mm256_cvtepi8_epi16(const __m128i bytes) { return __builtin_ia32_pmovsxbw256((__v16qi)bytes); }
static inline Ints8 _mm256_cvtepi8_epi32(const __m128i bytes) { return __builtin_ia32_pmovsxbd256((__v16qi)bytes); }
#endif
#if defined(OWN_INTRINSICS) && defined(__F16C__)
static inline __m256 _mm256_cvtph_ps(const __m128i halves) { return __builtin_ia32_vcvtph2ps256((__v8hi)halves); }
#define _mm256_cvtps_ph(value, rounding) ((__m128i)__builtin_ia32_vcvtps2ph256(value, rounding))
#endif
#if defined(OWN_INTRINSICS) && defined(__AVX512F__)
typedef double __m256d __attribute__((vector_size(32), may_alias));
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef double __m512d __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef long long __m512i_u __attribute__((vector_size(64), may_alias, aligned(1)));
typedef short Shorts16 __attribute__((vector_size(32)));
template <class V>
static inline V anything() {  // an arbitrary value: a mask of all lanes keeps nothing of it
    V value = value;
    return value;
}
static inline __m512 _mm512_broadcast_f32x4(const __m128 four) {
    return __builtin_ia32_broadcastf32x4_512(four, anything<__m512>(), -1);
}
static inline __m512d _mm512_broadcast_f64x4(const __m256d four) {
    return __builtin_ia32_broadcastf64x4_512(four, anything<__m512d>(), -1);
}
static inline __m512 _mm512_cvtph_ps(const __m256i halves) {
    return __builtin_ia32_vcvtph2ps512_mask((Shorts16)halves, anything<__m512>(), -1, 4);  // 4: current rounding
}
#define _mm512_cvtps_ph(value, rounding) \
    ((__m256i)__builtin_ia32_vcvtps2ph512_mask(value, rounding, anything<Shorts16>(), -1))
typedef int Ints16 __attribute__((vector_size(64)));
static inline Ints16 _mm512_cvtepi8_epi32(const __m128i bytes) {
    return __builtin_ia32_pmovsxbd512_mask((__v16qi)bytes, anything<Ints16>(), -1);
}
static inline __m512i _mm512_loadu_si512(const void* from) { return *(const __m512i_u*)from; }
static inline void _mm512_stream_si512(__m512i* to, const __m512i value) { __builtin_ia32_movntdq512(to, value); }
#endif

namespace host {

thread_local long group = 0, groups = 1;  // index of this thread's work group, and their number

template <class To, class From>
static inline To same_bits(const From value) {
    static_assert(sizeof(To) == sizeof(From), "types of different sizes");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

// ---- vectors: N lanes of T

template <class T, int N>
struct Vector {
    typedef T Raw __attribute__((vector_size(N * sizeof(T))));
    // aligned to its elements only
    typedef T Loose __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T)), may_alias));
    Raw raw;

    Vector() = default;
    inline Vector(const Raw given) : raw(given) {}
    template <class S, class = decltype(T(S()))>
    inline Vector(const S value) : raw(T(value) - Raw{}) {}  // the same in all lanes; x - 0 is x, and costs nothing

    inline T first() const { return raw[0]; }
    template <int M, int... I>
    inline Vector<T, M> picked(Sequence<int, I...>) const { return __builtin_shufflevector(raw, raw, (I % N)...); }
    // repeats all N lanes, by one broadcast if the processor has it: GCC compiles the shuffle to many instructions
    template <int M>
    inline Vector<T, M> repeated() const {
        typedef typename Vector<T, M>::Raw Wide;
        typedef long Longs __attribute__((vector_size(sizeof(Wide))));
        if constexpr (sizeof(Raw) == sizeof(long)) return (Wide)(same_bits<long>(raw) - Longs{});
#ifdef __AVX512F__
        else if constexpr (sizeof(Raw) == 16 && sizeof(Wide) == 64) return (Wide)_mm512_broadcast_f32x4((__m128)raw);
        else if constexpr (sizeof(Raw) == 32 && sizeof(Wide) == 64) return (Wide)_mm512_broadcast_f64x4((__m256d)raw);
#endif
#ifdef __AVX__
        else if constexpr (sizeof(Raw) == 16 && sizeof(Wide) == 32)
            return (Wide)_mm256_set_m128((__m128)raw, (__m128)raw);
#endif
        else return picked<M>(FirstNumbers<M>());
    }

    friend inline Vector operator+(const Vector a, const Vector b) { return a.raw + b.raw; }
    friend inline Vector operator-(const Vector a, const Vector b) { return a.raw - b.raw; }
    friend inline Vector operator*(const Vector a, const Vector b) { return a.raw * b.raw; }
    friend inline Vector operator/(const Vector a, const Vector b) { return a.raw / b.raw; }
    friend inline Vector operator&(const Vector a, const Vector b) { return a.raw & b.raw; }
    friend inline Vector operator|(const Vector a, const Vector b) { return a.raw | b.raw; }
    friend inline Vector operator<<(const Vector a, const int by) { return a.raw << by; }
    friend inline Vector operator>>(const Vector a, const int by) { return a.raw >> by; }
    friend inline Vector operator-(const Vector a) { return -a.raw; }
    inline Vector& operator+=(const Vector other) { raw += other.raw; return *this; }
    friend inline auto operator<(const Vector a, const Vector b) { return a.raw < b.raw; }
    friend inline auto operator>=(const Vector a, const Vector b) { return a.raw >= b.raw; }
    friend inline auto operator!=(const Vector a, const Vector b) { return a.raw != b.raw; }
};

// ---- elementwise functions

template <class T, int N>
static inline Vector<T, N> each(T (*function)(T), const Vector<T, N> value) {
    Vector<T, N> result;
    for (int lane = 0; lane < N; ++lane) result.raw[lane] = function(value.raw[lane]);
    return result;
}

// e^x as 2^n e^r; error: 1e-7 at most, and 4e-7 from 88.03 on, where n does not grow with x
template <int N>
static inline Vector<float, N> power_of_e(const Vector<float, N> value) {
    typedef Vector<float, N> V;
    typedef int Whole __attribute__((vector_size(N * sizeof(int))));
    const V exact = value * V(1.44269504f);
    // within the exponents of normal numbers; a NaN stays one
    const V wanted = V(exact.raw < V(-126.0f).raw ? V(-126.0f).raw : exact.raw > V(127.0f).raw ? V(127.0f).raw
                       : exact.raw);
    const Whole n =
        __builtin_convertvector(V(wanted.raw < V(0.0f).raw ? (wanted - V(0.5f)).raw : (wanted + V(0.5f)).raw).raw,
                                Whole);
    const V whole = __builtin_convertvector(n, typename V::Raw);
    const V r = value - whole * V(0.693359375f) - whole * V(-2.12194440e-4f);
    V sum = V(1.9875691500e-4f);
    sum = sum * r + V(1.3981999507e-3f);
    sum = sum * r + V(8.3334519073e-3f);
    sum = sum * r + V(4.1665795894e-2f);
    sum = sum * r + V(1.6666665459e-1f);
    sum = sum * r + V(5.0000001201e-1f);
    const V result = (sum * r * r + r + V(1.0f)) * same_bits<V>((n + 127) << 23);
    return V(value.raw > V(88.7228f).raw ? V(__builtin_inff()).raw : value.raw < V(-87.33f).raw ? V(0.0f).raw
             : result.raw);
}
}  // namespace host

template <class T, int N>
static inline host::Vector<T, N> fma(const host::Vector<T, N> a, const host::Vector<T, N> b,
                                     const host::Vector<T, N> c) {
    return a.raw * b.raw + c.raw;
}
#if defined(__FMA__) && !defined(__AVX512F__) && !defined(__clang__)
// This is for sums that fill 16 registers. Otherwise GCC would move some sums, and load an operand again for each
// product: more loads than a core can do. With `asm`, GCC chooses only the registers, not the form of the instruction.
static inline host::Vector<float, 8> fma(const host::Vector<float, 8> a, const host::Vector<float, 8> b,
                                         host::Vector<float, 8> sum) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
    return sum;
}
static inline host::Vector<double, 4> fma(const host::Vector<double, 4> a, const host::Vector<double, 4> b,
                                          host::Vector<double, 4> sum) {
    asm("vfmadd231pd %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
    return sum;
}
#endif
#if defined(__AVX512F__) && !defined(__clang__)
// Without this, GCC would load a vector again for each product that uses it. That is as many loads as multiply-adds,
// although a core can do only half as many loads as multiply-adds.
#define IN_REGISTER host::in_register
namespace host {
template <class T, int N>
static inline Vector<T, N> in_register(Vector<T, N> value) {
    // other sizes fill no register, or several
    if constexpr (sizeof value >= 16 && sizeof value <= 64) asm("" : "+v"(value.raw));
    return value;
}
}  // namespace host
#endif
template <class T, int N, class M>
static inline host::Vector<T, N> select(const host::Vector<T, N> a, const host::Vector<T, N> b, const M chosen) {
    return chosen ? b.raw : a.raw;
}
template <class T, int N>
static inline host::Vector<T, N> clamp(const host::Vector<T, N> value, const host::Vector<T, N> low,
                                       const host::Vector<T, N> high) {
    return value.raw < low.raw ? low.raw : value.raw > high.raw ? high.raw : value.raw;
}
template <class T, int N>
static inline host::Vector<T, N> fabs(const host::Vector<T, N> value) {
    return value.raw < host::Vector<T, N>(0).raw ? -value.raw : value.raw;
}
template <class T, int N>
static inline host::Vector<T, N> copysign(const host::Vector<T, N> size, const host::Vector<T, N> sign) {
    host::Vector<T, N> result;
    for (int lane = 0; lane < N; ++lane) result.raw[lane] = copysign(size.raw[lane], sign.raw[lane]);
    return result;
}
template <int N>
static inline host::Vector<double, N> exp(const host::Vector<double, N> value) {
    return host::each<double, N>(exp, value);
}
template <int N>
static inline host::Vector<float, N> exp(const host::Vector<float, N> value) { return host::power_of_e(value); }
template <int N>
static inline host::Vector<double, N> tanh(const host::Vector<double, N> value) {
    return host::each<double, N>(tanh, value);
}
template <int N>
static inline host::Vector<float, N> tanh(const host::Vector<float, N> value) {
    typedef host::Vector<float, N> V;
    const V small = value * value,
        near = value * (V(1.0f) + small * (V(-0.333333333f) + small * (V(0.133333333f) + small * V(-0.053968254f))));
    const V far = V(1.0f) - V(2.0f) / (exp(value + value) + V(1.0f));
    return small.raw < V(0.04f).raw ? near.raw : far.raw;
}
template <int N>
static inline host::Vector<double, N> erf(const host::Vector<double, N> value) {
    return host::each<double, N>(erf, value);
}
template <int N>
static inline host::Vector<float, N> erf(const host::Vector<float, N> value) {
    return host::each<float, N>(erf, value);
}

template <class T>
static inline T min(const T a, const T b) { return b < a ? b : a; }
template <class T>
static inline T max(const T a, const T b) { return a < b ? b : a; }

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
// Add products of pairs of bfloat16 to sums, and round sums to bfloat16; subnormals count as zero.
#define MULTIPLY_PAIRS multiply_pairs
#define HOST_PAIRS(N, HALF) \
    static inline host::Vector<float, N> multiply_pairs(const host::Vector<float, N> a, \
                                                         const host::Vector<float, N> b, \
                                                         host::Vector<float, N> sums) { \
        asm("vdpbf16ps %2, %1, %0" : "+v"(sums.raw) : "v"(a.raw), "v"(b.raw)); \
        return sums; \
    } \
    static inline host::Vector<unsigned short, N> rounded_pairs(const host::Vector<float, N> value) { \
        HALF half; \
        asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(value.raw)); \
        host::Vector<unsigned short, N> result; \
        memcpy(&result, &half, sizeof result); \
        return result; \
    }
HOST_PAIRS(16, __m256i)
HOST_PAIRS(8, __m128i)
HOST_PAIRS(4, __m128i)
#endif

// ---- 16-bit floats, as bits

typedef unsigned short half;

namespace host {
#if defined(__ARM_FP16_FORMAT_IEEE) || (defined(__clang__) && defined(__F16C__))
typedef __fp16 Half;  // here GCC before 13 and Clang before 15 lack _Float16
#define HAS_HALF
#elif defined(__FLT16_MAX__)
typedef _Float16 Half;
#define HAS_HALF
#endif
#ifdef HAS_HALF
static inline float of_half(const half bits) {
    Half value;
    memcpy(&value, &bits, sizeof value);
    return (float)value;
}
static inline half to_half(const float value) {
    const Half rounded = (Half)value;
    half bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}
#else
static inline float of_half(const half bits) {
    const unsigned size = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    const float subnormal = (float)size * 0x1p-24f;
    // added to the exponent; infinities and NaNs get the largest exponent
    const unsigned shift = size < 0x7c00u ? 112u << 23 : 224u << 23;
    return same_bits<float>(sign | (size < 0x400u ? same_bits<unsigned>(subnormal) : (size << 13) + shift));
}
// to nearest, ties to even
static inline half to_half(const float value) {
    const unsigned bits = same_bits<unsigned>(value), size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    if (size > 0x7f800000u) return sign | 0x7e00u;   // a NaN
    if (size >= 0x47800000u) return sign | 0x7c00u;  // 65536 and more are infinite
    // adding 0.5 rounds to multiples of 2^-24: the spacing of subnormal halves, and of floats in [0.5, 1)
    if (size < 0x38800000u) return sign | (same_bits<unsigned>(same_bits<float>(size) + 0.5f) - 0x3f000000u);
    return sign | ((size + 0xfffu + (size >> 13 & 1u) - (112u << 23)) >> 13);
}
#endif

template <int N>
struct Halves {
    static inline Vector<float, N> load(const half* from) {
        Vector<float, N> result;
        for (int lane = 0; lane < N; ++lane) result.raw[lane] = of_half(from[lane]);
        return result;
    }
    static inline void store(const Vector<float, N> value, half* to) {
        for (int lane = 0; lane < N; ++lane) to[lane] = to_half(value.raw[lane]);
    }
};
#ifdef __F16C__
template <>
struct Halves<8> {
    static inline Vector<float, 8> load(const half* from) {
        return (Vector<float, 8>::Raw)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
    }
    static inline void store(const Vector<float, 8> value, half* to) {
        _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)value.raw, 0));
    }
};
#endif
#ifdef __AVX512F__
template <>
struct Halves<16> {
    static inline Vector<float, 16> load(const half* from) {
        return (Vector<float, 16>::Raw)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    }
    static inline void store(const Vector<float, 16> value, half* to) {
        _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)value.raw, 0));
    }
};
#endif

// ---- bytes: by intrinsics, because GCC would widen them one by one, or half a vector at a time

template <int N>
struct Bytes {
    typedef typename Vector<short, N>::Raw Shorts;
    typedef typename Vector<int, N>::Raw Ints;
    static inline Vector<float, N> to_float(const Vector<signed char, N> value) {
        const Ints wide = __builtin_convertvector(__builtin_convertvector(value.raw, Shorts), Ints);
        return __builtin_convertvector(wide, typename Vector<float, N>::Raw);
    }
    static inline Vector<short, N> to_short(const Vector<signed char, N> value) {
        return __builtin_convertvector(value.raw, Shorts);
    }
};
#ifdef __AVX512F__
template <>
inline Vector<float, 16> Bytes<16>::to_float(const Vector<signed char, 16> value) {
    typedef Vector<float, 16>::Raw Floats;
    return __builtin_convertvector((Ints)_mm512_cvtepi8_epi32((__m128i)value.raw), Floats);
}
#endif
#ifdef __AVX2__
template <>
inline Vector<short, 16> Bytes<16>::to_short(const Vector<signed char, 16> value) {
    return (Shorts)_mm256_cvtepi8_epi16((__m128i)value.raw);
}
template <>
inline Vector<float, 8> Bytes<8>::to_float(const Vector<signed char, 8> value) {
    typedef Vector<float, 8>::Raw Floats;
    const __m128i low = {same_bits<long long>(value.raw), 0};
    return __builtin_convertvector((Ints)_mm256_cvtepi8_epi32(low), Floats);
}
#endif

// ---- streaming stores, piece by piece

template <class V>
static inline void store_streaming(const V value, V* to) {
#if defined(__clang__)
    __builtin_nontemporal_store(value.raw, &to->raw);
#elif defined(__SSE2__)
    char* at = (char*)to;
    const char* from = (const char*)&value;
    size_t done = 0;
#ifdef __AVX512F__
    for (; done + 64 <= sizeof value; done += 64)
        _mm512_stream_si512((__m512i*)(at + done), _mm512_loadu_si512(from + done));
#endif
#ifdef __AVX__
    for (; done + 32 <= sizeof value; done += 32)
        _mm256_stream_si256((__m256i*)(at + done), _mm256_loadu_si256((const __m256i*)(from + done)));
#endif
    for (; done + 16 <= sizeof value; done += 16)
        _mm_stream_si128((__m128i*)(at + done), _mm_loadu_si128((const __m128i*)(from + done)));
    if (done < sizeof value) memcpy(at + done, from + done, sizeof value - done);
#else
    *to = value;
#endif
}

// ---- work groups

template <class... A, int... I>
static inline void walk(void (*entry)(A...), const int64_t* arguments, const long first, const long last,
                        Sequence<int, I...>) {
    for (group = first; group < last; ++group) entry((A)arguments[I]...);
#ifdef __SSE2__
    _mm_sfence();  // makes streaming stores visible to all threads
#endif
}
template <class... A>
static inline void walk(void (*entry)(A...), const int64_t* arguments, const long first, const long last,
                        const long count) {
    groups = count;
    walk(entry, arguments, first, last, FirstNumbers<sizeof...(A)>());
}
}  // namespace host

#define HOST_WIDTH(N) \
    typedef host::Vector<float, N> float##N; \
    typedef host::Vector<double, N> double##N; \
    typedef host::Vector<unsigned short, N> ushort##N; \
    typedef host::Vector<short, N> short##N; \
    typedef host::Vector<unsigned char, N> uchar##N; \
    typedef host::Vector<signed char, N> char##N; \
    typedef host::Vector<unsigned int, N> uint##N; \
    typedef host::Vector<unsigned long, N> ulong##N; \
    template <class T> \
    static inline host::Vector<T, N> vload##N(const long at, const T* from) { \
        typedef host::Vector<T, N> V; \
        return V((typename V::Raw) * (const typename V::Loose*)(from + at * N)); \
    } \
    template <class T> \
    static inline void vstore##N(const host::Vector<T, N> value, const long at, T* to) { \
        *(typename host::Vector<T, N>::Loose*)(to + at * N) = value.raw; \
    } \
    static inline float##N vload_half##N(const long at, const half* from) { \
        return host::Halves<N>::load(from + at * N); \
    } \
    static inline void vstore_half##N##_rte(const float##N value, const long at, half* to) { \
        host::Halves<N>::store(value, to + at * N); \
    } \
    static inline float##N as_float##N(const uint##N value) { return host::same_bits<float##N>(value); } \
    static inline uint##N as_uint##N(const float##N value) { return host::same_bits<uint##N>(value); } \
    static inline char##N as_char##N(const uchar##N value) { return host::same_bits<char##N>(value); } \
    static inline ushort##N as_ushort##N(const short##N value) { return host::same_bits<ushort##N>(value); } \
    static inline float##N convert_float##N(const char##N value) { return host::Bytes<N>::to_float(value); } \
    static inline short##N convert_short##N(const char##N value) { return host::Bytes<N>::to_short(value); } \
    static inline ushort##N convert_ushort##N(const uchar##N value) { \
        return __builtin_convertvector(value.raw, ushort##N::Raw); \
    } \
    static inline uint##N convert_uint##N(const ushort##N value) { \
        return __builtin_convertvector(value.raw, uint##N::Raw); \
    } \
    static inline ushort##N convert_ushort##N(const uint##N value) { \
        return __builtin_convertvector(value.raw, ushort##N::Raw); \
    }
HOST_WIDTH(2)
HOST_WIDTH(4)
HOST_WIDTH(8)
HOST_WIDTH(16)

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
static inline float vload_half(const long at, const half* from) { return host::of_half(from[at]); }
static inline void vstore_half_rte(const float value, const long at, half* to) { to[at] = host::to_half(value); }
static inline float as_float(const uint bits) { return host::same_bits<float>(bits); }
static inline uint as_uint(const float value) { return host::same_bits<uint>(value); }
static inline long get_group_id(int) { return host::group; }
static inline long get_num_groups(int) { return host::groups; }

// ---- names of OpenCL C as macros

#define __kernel
#define __global
#define restrict __restrict
#define reqd_work_group_size(...) used
#define s0 first()
#define s0101 template repeated<4>()
#define s01010101 template repeated<8>()
#define s01230123 template repeated<8>()
#define s0101010101010101 template repeated<16>()
#define s0123012301230123 template repeated<16>()
#define s0123456701234567 template repeated<16>()
#define HOST_LIST(...) __VA_ARGS__
#define HOST_LIST_OF(TYPE) HOST_LIST  // (uint4)(0, 1, 2, 3) without its type
#define shuffle2(A, B, INDICES) lanes(__builtin_shufflevector((A).raw, (B).raw, HOST_LIST_OF INDICES))
#define __builtin_nontemporal_store(VALUE, TO) host::store_streaming(VALUE, TO)
#define HOST_WALK(ENTRY_NAME) \
    void ENTRY_NAME##__walk(const int64_t* arguments, long first, long last, long groups) { \
        host::walk(ENTRY_NAME, arguments, first, last, groups); \
    }

