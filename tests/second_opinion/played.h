// What the simulator has no instructions for, from what it has: asynchronous copies by loads and stores that are done at once,
// tensor cores by shuffles and float64, whose sums are exact before they are rounded. Fragments lie as the PTX manual says.
#define KSGEN_PTX
#define PLAYED __device__ __forceinline__

template <typename Word>
PLAYED void copy_now(void* to, const void* from, const bool valid) {
    *static_cast<Word*>(to) = valid ? *static_cast<const Word*>(from) : Word{};
}
PLAYED void copy_async_4(void* to, const void* from, const bool valid) { copy_now<float>(to, from, valid); }
PLAYED void copy_async_8(void* to, const void* from, const bool valid) { copy_now<float2>(to, from, valid); }
PLAYED void copy_async_16(void* to, const void* from, const bool valid) { copy_now<float4>(to, from, valid); }
PLAYED void copy_async_commit() {}
template <int PENDING>
PLAYED void copy_async_wait() {}

PLAYED float half_to_float(unsigned short value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}
PLAYED unsigned short float_to_half(float value) {
    unsigned short narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return narrow;
}
PLAYED unsigned float_to_tf32(float value) { return (__float_as_uint(value) + 0x1000u) & 0xffffe000u; }
PLAYED unsigned short float_to_bfloat16(float value) {  // to nearest, ties to even; every NaN becomes 0x7fff
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
PLAYED void multiply_add_pair(float* sums, const float* x, const float w) {
    sums[0] = fmaf(x[0], w, sums[0]);
    sums[1] = fmaf(x[1], w, sums[1]);
}
PLAYED unsigned pack_f16(float low, float high) { return float_to_half(low) | static_cast<unsigned>(float_to_half(high)) << 16; }
PLAYED unsigned pack_bf16(float low, float high) {
    return float_to_bfloat16(low) | static_cast<unsigned>(float_to_bfloat16(high)) << 16;
}
PLAYED unsigned shared_address(const void* shared) { return static_cast<unsigned>(__cvta_generic_to_shared(shared)); }

struct HalfWord {  // two values of a register, the one with the smaller k below
    static constexpr int VALUES = 2;
    static PLAYED double value(unsigned word, int k) { return half_to_float(static_cast<unsigned short>(word >> 16 * k)); }
};
struct BrainWord {
    static constexpr int VALUES = 2;
    static PLAYED double value(unsigned word, int k) { return __uint_as_float(k == 0 ? word << 16 : word & 0xffff0000u); }
};
struct TensorWord {
    static constexpr int VALUES = 1;
    static PLAYED double value(unsigned word, int) { return __uint_as_float(word & 0xffffe000u); }
};
// Lane 4 g + t holds of A the rows g and g + 8, of B the column g, at the k of t and of t + 4; of the sums the columns 2 t and 2 t + 1.
template <typename Word>
PLAYED void mma_played(float (&sums)[4], const unsigned (&a)[4], const unsigned b0, const unsigned b1) {
    const int lane = static_cast<int>(threadIdx.x) % 32, own_rows = lane / 4 * 4, own_columns = lane % 4 * 8;
    double exact[4] = {sums[0], sums[1], sums[2], sums[3]};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        unsigned rows[4], columns[2][2];
#pragma unroll
        for (int n = 0; n < 4; ++n) rows[n] = __shfl_sync(0xffffffffu, a[n], own_rows + t);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            columns[n][0] = __shfl_sync(0xffffffffu, b0, own_columns + 4 * n + t);
            columns[n][1] = __shfl_sync(0xffffffffu, b1, own_columns + 4 * n + t);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int k = 0; k < Word::VALUES; ++k)
                    exact[n] += Word::value(rows[n / 2 + 2 * half], k) * Word::value(columns[n % 2][half], k);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) sums[n] = static_cast<float>(exact[n]);
}
PLAYED void mma_f16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_played<HalfWord>(sums, a, b0, b1); }
PLAYED void mma_bf16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_played<BrainWord>(sums, a, b0, b1); }
PLAYED void mma_tf32(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_played<TensorWord>(sums, a, b0, b1); }

PLAYED unsigned shared_half(const unsigned address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
}
template <bool TRANSPOSED>
PLAYED void ldmatrix_x4(unsigned (&words)[4], const unsigned row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int line = TRANSPOSED ? lane % 4 * 2 : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2;
        const unsigned low = __shfl_sync(0xffffffffu, row, 8 * m + line) + 2 * column;
        const unsigned high = TRANSPOSED ? __shfl_sync(0xffffffffu, row, 8 * m + line + 1) + 2 * column : low + 2;
        words[m] = shared_half(low) | shared_half(high) << 16;
    }
}
PLAYED void store_words(void* to, unsigned w0, unsigned w1, unsigned w2, unsigned w3) {
    *static_cast<uint4*>(to) = uint4{w0, w1, w2, w3};
}
PLAYED void store_words(void* to, unsigned w0, unsigned w1) { *static_cast<uint2*>(to) = uint2{w0, w1}; }
