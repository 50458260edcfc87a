// What the simulator has no instructions for, from what it has: asynchronous copies by loads and stores that are done
// at once, tensor cores by shuffles and float64, whose sums are exact before they are rounded. Fragments lie as the PTX
// manual says. tests/emulator/ptx.py makes the calls: an instruction's operands in their order, results as references
// or pointers.
#define EMULATED __device__ __forceinline__

namespace simt {
enum class Operand { TF32, F16, BF16 };
}

namespace ptx {

EMULATED unsigned r(unsigned value) { return value; }
EMULATED unsigned long long l(unsigned long long value) { return value; }
EMULATED unsigned long long l(const void* value) { return reinterpret_cast<unsigned long long>(value); }
EMULATED float f(float value) { return value; }
template <typename T, typename U>
EMULATED T& result(U& place) { return reinterpret_cast<T&>(place); }  // an integer may be signed

template <bool SKIPS_L1>
EMULATED void copy_async(unsigned to, unsigned long long from, int bytes, unsigned given) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(from);
#pragma unroll
    for (int i = 0; i < bytes / 4; ++i) {
        const unsigned word = given != 0 ? words[i] : 0;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 4 * i), "r"(word) : "memory");
    }
}
EMULATED void copy_async_commit() {}
EMULATED void copy_async_wait(unsigned) {}

EMULATED float widen_half(unsigned short value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}
EMULATED unsigned narrow_half(float value) {
    unsigned short narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return narrow;
}
template <bool TIES_TO_EVEN>
EMULATED void narrow_tf32(unsigned& to, float value) {
    const unsigned bits = __float_as_uint(value);
    to = (bits + (TIES_TO_EVEN ? 0xfffu + (bits >> 13 & 1u) : 0x1000u)) & 0xffffe000u;
}
EMULATED void logical_of_three(unsigned& to, unsigned x, unsigned y, unsigned z, unsigned table) {
    to = 0;
#pragma unroll
    for (unsigned at = 0; at < 8; ++at)
        if (table >> at & 1u) to |= (at & 4u ? x : ~x) & (at & 2u ? y : ~y) & (at & 1u ? z : ~z);
}
EMULATED void narrow_bf16(unsigned short& to, float value) {  // to nearest, ties to even; every NaN becomes 0x7fff
    const unsigned bits = __float_as_uint(value);
    to = value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
EMULATED void narrow_f16x2(unsigned& to, float high, float low) { to = narrow_half(low) | narrow_half(high) << 16; }
EMULATED void narrow_bf16x2(unsigned& to, float high, float low) {
    unsigned short upper, lower;
    narrow_bf16(upper, high);
    narrow_bf16(lower, low);
    to = lower | static_cast<unsigned>(upper) << 16;
}

struct HalfWord {  // two values of a register, the one with the smaller k below
    static constexpr int VALUES = 2;
    static EMULATED double value(unsigned word, int k) {
        return widen_half(static_cast<unsigned short>(word >> 16 * k));
    }
};
struct BrainWord {
    static constexpr int VALUES = 2;
    static EMULATED double value(unsigned word, int k) {
        return __uint_as_float(k == 0 ? word << 16 : word & 0xffff0000u);
    }
};
struct TensorWord {
    static constexpr int VALUES = 1;
    static EMULATED double value(unsigned word, int) { return __uint_as_float(word & 0xffffe000u); }
};
// Lane 4 g + t holds of A the rows g and g + 8, of B the column g, at the k of t and of t + 4; of the sums the columns
// 2 t and 2 t + 1.
template <typename Word>
EMULATED void mma_emulated(float* const (&to)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                           const float (&sums)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, own_rows = lane / 4 * 4, own_columns = lane % 4 * 8;
    double exact[4] = {sums[0], sums[1], sums[2], sums[3]};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        unsigned rows[4], columns[2][2];
#pragma unroll
        for (int n = 0; n < 4; ++n) rows[n] = __shfl_sync(0xffffffffu, a[n], own_rows + t);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            columns[n][0] = __shfl_sync(0xffffffffu, b[0], own_columns + 4 * n + t);
            columns[n][1] = __shfl_sync(0xffffffffu, b[1], own_columns + 4 * n + t);
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
    for (int n = 0; n < 4; ++n) *to[n] = static_cast<float>(exact[n]);
}
template <simt::Operand KIND>
EMULATED void multiply_fragments(float* const (&to)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                               const float (&sums)[4]) {
    if constexpr (KIND == simt::Operand::F16) mma_emulated<HalfWord>(to, a, b, sums);
    if constexpr (KIND == simt::Operand::BF16) mma_emulated<BrainWord>(to, a, b, sums);
    if constexpr (KIND == simt::Operand::TF32) mma_emulated<TensorWord>(to, a, b, sums);
}

EMULATED unsigned shared_half(const unsigned address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
}
template <int COUNT, bool TRANSPOSED, bool IS_GENERIC>
EMULATED void load_matrices(unsigned* const (&words)[4], const unsigned row) {
    static_assert(COUNT == 4 && !IS_GENERIC, "only four matrices at shared addresses are emulated");
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int line = TRANSPOSED ? lane % 4 * 2 : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2;
        const unsigned low = __shfl_sync(0xffffffffu, row, 8 * m + line) + 2 * column;
        const unsigned high = TRANSPOSED ? __shfl_sync(0xffffffffu, row, 8 * m + line + 1) + 2 * column : low + 2;
        *words[m] = shared_half(low) | shared_half(high) << 16;
    }
}

}  // namespace ptx
