// Matrix tiles of a processor (Intel's AMX), for sources that use them: eight tiles, t = 0 to 7, of 16 rows of 64
// bytes. `HostCompiler` puts this file between the prelude and such a source. If the compiler has the instructions,
// each function is one instruction. Otherwise the functions emulate the instructions in memory, in the order and with
// the roundings of Intel's manual: slowly, for tests.

// configuration of a thread's tiles, in the format of the instructions ldtilecfg and sttilecfg
struct alignas(64) TileState {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

namespace host {

// ---- by instructions

#if defined(__AMX_TILE__) && !defined(EMULATED_TILES)
struct TileInstructions {
    static inline void read_state(TileState* to) { asm volatile("sttilecfg %0" : "=m"(*to)); }
    static inline void configure(const TileState* from) { asm volatile("ldtilecfg %0" ::"m"(*from) : "memory"); }
    static inline void release() { asm volatile("tilerelease" ::: "memory"); }
    template <int T>
    static inline void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
    template <int T>
    static inline void load(const void* from, const long stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    static inline void store(void* to, const long stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
    }
};
#endif
#if defined(__AMX_BF16__) && !defined(EMULATED_TILES)
struct tiles_bf16 : TileInstructions {
    template <int T, int A, int B>
    static inline void dot() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B)); }
};
#define HAS_TILES_OF_BF16
#endif
#if defined(__AMX_FP16__) && !defined(EMULATED_TILES)
struct tiles_f16 : TileInstructions {
    template <int T, int A, int B>
    static inline void dot() { asm volatile("tdpfp16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B)); }
};
#define HAS_TILES_OF_F16
#endif

// ---- emulated in memory

#if !defined(HAS_TILES_OF_BF16) || !defined(HAS_TILES_OF_F16)
#if !defined(__FMA__) && !defined(__AMX_TILE__)
#error "matrix tiles are emulated by the FMA units of an x86 processor: this one has none"
#endif
struct EmulatedTiles {
    TileState state;
    alignas(64) uint8_t bytes[8][16][64];
    // an instruction's operands as floats; the second index is 0 or 1 for the first or second element of a pair
    alignas(64) float rows[16][2][16], columns[16][2][16];
};
thread_local EmulatedTiles emulated;

// Per row of tile t: two chains of multiply-adds, over the first and over the second elements of all pairs in order.
// Then the sum of both chains is added to t. Meanwhile the thread flushes subnormal inputs and results to zero.
static __attribute__((noinline)) void multiply_emulated(const int t, const int pairs) {
    for (int m = 0; m < emulated.state.rows[t]; ++m) {
        float first[16] = {}, second[16] = {};
        for (int k = 0; k < pairs; ++k)
            for (int n = 0; n < 16; ++n) {
                first[n] = __builtin_fmaf(emulated.rows[m][0][k], emulated.columns[k][0][n], first[n]);
                second[n] = __builtin_fmaf(emulated.rows[m][1][k], emulated.columns[k][1][n], second[n]);
            }
        for (int n = 0; n < emulated.state.row_bytes[t] / 4; ++n) {
            float sum;
            memcpy(&sum, &emulated.bytes[t][m][4 * n], sizeof sum);
            sum += first[n] + second[n];
            memcpy(&emulated.bytes[t][m][4 * n], &sum, sizeof sum);
        }
    }
}

template <float (*WIDEN)(unsigned short)>
struct TilesEmulated {
    static void read_state(TileState* to) { *to = emulated.state; }
    static void configure(const TileState* from) {
        if (from->palette > 1) __builtin_trap();
        for (int t = 0; t < 8; ++t)
            if (from->palette && (from->rows[t] > 16 || from->row_bytes[t] > 64)) __builtin_trap();
        memset(&emulated, 0, sizeof emulated);
        if (from->palette) emulated.state = *from;
    }
    static void release() { memset(&emulated, 0, sizeof emulated); }
    template <int T>
    static void zero() {
        needs(T);
        memset(emulated.bytes[T], 0, sizeof emulated.bytes[T]);
    }
    template <int T>
    static void load(const void* from, const long stride) {
        zero<T>();
        for (int row = 0; row < emulated.state.rows[T]; ++row)
            memcpy(emulated.bytes[T][row], (const char*)from + row * stride, emulated.state.row_bytes[T]);
    }
    template <int T>
    static void store(void* to, const long stride) {
        needs(T);
        for (int row = 0; row < emulated.state.rows[T]; ++row)
            memcpy((char*)to + row * stride, emulated.bytes[T][row], emulated.state.row_bytes[T]);
    }
    template <int T, int A, int B>
    static void dot() {
        static_assert(T != A && T != B && A != B, "three different tiles");
        needs(T), needs(A), needs(B);
        const TileState& state = emulated.state;
        const int pairs = state.row_bytes[A] / 4;
        if (state.rows[T] != state.rows[A] || state.row_bytes[T] != state.row_bytes[B] || state.rows[B] != pairs)
            __builtin_trap();
        for (int row = 0; row < 16; ++row)
            for (int pair = 0; pair < 16; ++pair)
                for (int which = 0; which < 2; ++which) {
                    emulated.rows[row][which][pair] = item(A, row, 2 * pair + which);
                    emulated.columns[row][which][pair] = item(B, row, 2 * pair + which);
                }
        // the instructions round to nearest, flush subnormals, raise no flags, and do not change the thread's modes
        unsigned before;
        const unsigned mode = 0x9fc0;
        asm volatile("stmxcsr %0\n\tldmxcsr %1" : "=m"(before) : "m"(mode) : "memory");
        multiply_emulated(T, pairs);
        asm volatile("ldmxcsr %0" ::"m"(before) : "memory");
    }

private:
    static void needs(const int t) {
        // the tile is not configured
        if (!emulated.state.palette || !emulated.state.rows[t] || !emulated.state.row_bytes[t]) __builtin_trap();
    }
    static float item(const int t, const int row, const int column) {
        unsigned short bits;
        memcpy(&bits, &emulated.bytes[t][row][2 * column], sizeof bits);
        return WIDEN(bits);
    }
};
static inline float of_bf16(const unsigned short bits) { return same_bits<float>((uint32_t)bits << 16); }
#ifndef HAS_TILES_OF_BF16
typedef TilesEmulated<of_bf16> tiles_bf16;
#endif
#ifndef HAS_TILES_OF_F16
typedef TilesEmulated<of_half> tiles_f16;
#endif
#endif

// ---- configure a thread's tiles for a kernel, and restore them

static inline TileState all_tiles() {
    TileState state = {};
    state.palette = 1;
    for (int t = 0; t < 8; ++t) state.row_bytes[t] = 64, state.rows[t] = 16;
    return state;
}
template <class Tiles>
static inline TileState begin_tiles() {
    const TileState wanted = all_tiles();
    TileState before = {};
    Tiles::read_state(&before);
    if (memcmp(&before, &wanted, sizeof before)) Tiles::configure(&wanted);
    return before;
}
template <class Tiles>
static inline void end_tiles(const TileState before) {  // another library may rely on its own configuration
    const TileState wanted = all_tiles();
    if (!before.palette) Tiles::release();
    else if (memcmp(&before, &wanted, sizeof before)) Tiles::configure(&before);
}

// ---- interleave and deinterleave vectors

template <int FIRST, class T, int N, int... I>
static inline Vector<T, N> interleave(const Vector<T, N> a, const Vector<T, N> b, Sequence<int, I...>) {
    return __builtin_shufflevector(a.raw, b.raw, (I % 2 * N + I / 2 + FIRST)...);
}
template <int FIRST, class T, int N, int... I>
static inline Vector<T, N> every_second(const Vector<T, N> a, const Vector<T, N> b, Sequence<int, I...>) {
    return __builtin_shufflevector(a.raw, b.raw, (2 * I + FIRST)...);
}
}  // namespace host

#define LANES_OF(N) host::FirstNumbers<N>()
template <class T, int N>  // a0 b0 a1 b1 ... of the lower halves
static inline host::Vector<T, N> interleave_low(const host::Vector<T, N> a, const host::Vector<T, N> b) {
    return host::interleave<0>(a, b, LANES_OF(N));
}
template <class T, int N>  // the same of the upper halves
static inline host::Vector<T, N> interleave_high(const host::Vector<T, N> a, const host::Vector<T, N> b) {
    return host::interleave<N / 2>(a, b, LANES_OF(N));
}
template <class T, int N>  // a0 a2 ... b0 b2 ...
static inline host::Vector<T, N> evens(const host::Vector<T, N> a, const host::Vector<T, N> b) {
    return host::every_second<0>(a, b, LANES_OF(N));
}
template <class T, int N>  // a1 a3 ... b1 b3 ...
static inline host::Vector<T, N> odds(const host::Vector<T, N> a, const host::Vector<T, N> b) {
    return host::every_second<1>(a, b, LANES_OF(N));
}

// Rows of a tile: 32 numbers of 16 bits, or 64 / PIECE pieces of PIECE bytes. Shuffles move pieces in units as wide as
// possible: these take one step of a processor, and those of 16-bit units take two.
typedef host::Vector<ushort, 32> TileRow;
namespace host {
template <int... I>
static inline TileRow both(const Vector<ushort, 16> a, const Vector<ushort, 16> b, Sequence<int, I...>) {
    return __builtin_shufflevector(a.raw, b.raw, I...);
}
template <int S, int... I>  // piece s of S: numbers s, s + S, s + 2 S, ...
static inline TileRow sorted(const TileRow a, Sequence<int, I...>) {
    return __builtin_shufflevector(a.raw, a.raw, (I % (32 / S) * S + I / (32 / S))...);
}
template <int PIECE, class Unit, int FIRST, int... I>
static inline TileRow pieces(const TileRow a, const TileRow b, Sequence<int, I...>) {
    typedef Unit Units __attribute__((vector_size(64)));
    const int width = PIECE / (int)sizeof(Unit);
    return (TileRow::Raw)__builtin_shufflevector((Units)a.raw, (Units)b.raw,
                                                 ((I / width * 2 + FIRST) * width + I % width)...);
}
template <int S, int FIRST>
static inline TileRow pieces(const TileRow a, const TileRow b) {
    if constexpr (S == 16) return pieces<4, uint32_t, FIRST>(a, b, FirstNumbers<16>());
    else return pieces<64 / S, uint64_t, FIRST>(a, b, FirstNumbers<8>());
}
}  // namespace host
static inline TileRow tile_row(const ushort16 lower, const ushort16 upper) {
    return host::both(lower, upper, LANES_OF(32));
}
static inline void store_row(const TileRow row, ushort* to) { *(TileRow::Loose*)to = row.raw; }
template <int S>
static inline TileRow sort_row(const TileRow row) { return host::sorted<S>(row, LANES_OF(32)); }
template <int S>  // the even pieces of a row and of the next row, of S pieces each
static inline TileRow even_pieces(const TileRow a, const TileRow b) { return host::pieces<S, 0>(a, b); }
template <int S>  // the odd ones
static inline TileRow odd_pieces(const TileRow a, const TileRow b) { return host::pieces<S, 1>(a, b); }

// convert to bits of bfloat16: to nearest, ties to even; subnormals, which tiles treat as zeros, may become zeros
static inline ushort16 convert_bfloat16(const float16 value) {
#ifdef __AVX512BF16__
    ushort16 bits;
    asm("vcvtneps2bf16 %1, %0" : "=v"(bits.raw) : "v"(value.raw));
    return bits;
#else
    const uint16 bits = as_uint16(value), rounded = bits + uint16(0x7fffu) + ((bits >> 16) & uint16(1u));
    return convert_ushort16(select(rounded, bits | uint16(0x400000u), value != value) >> 16);
#endif
}

static inline TileRow convert_both_bfloat16(const float16 lower, const float16 upper) {
#ifdef __AVX512BF16__
    TileRow bits;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(bits.raw) : "v"(upper.raw), "v"(lower.raw));
    return bits;
#else
    return tile_row(convert_bfloat16(lower), convert_bfloat16(upper));
#endif
}

// store two vectors of 16-bit numbers by streaming stores; `to` is at the start of a cache line
static inline void store_both_streaming(const ushort16 lower, const ushort16 upper, ushort* to) {
    host::store_streaming(tile_row(lower, upper), (TileRow*)to);
}

// whether a lane is a NaN
static inline bool has_nan(const float16 value) {
#ifdef __AVX512F__
    unsigned short found;
    asm("vcmpunordps %1, %1, %0" : "=Yk"(found) : "v"(value.raw));
    return found != 0;
#else
    for (int lane = 0; lane < 16; ++lane)
        if (value.raw[lane] != value.raw[lane]) return true;
    return false;
#endif
}

// ---- names in sources; an OPERAND is bf16 or f16

#define tile_begin(OPERAND) host::begin_tiles<host::tiles_##OPERAND>()
#define tile_end(OPERAND, BEFORE) host::end_tiles<host::tiles_##OPERAND>(BEFORE)
#define tile_zero(OPERAND, T) host::tiles_##OPERAND::zero<T>()
#define tile_load(OPERAND, T, FROM, STRIDE) host::tiles_##OPERAND::load<T>(FROM, STRIDE)
#define tile_store(OPERAND, T, TO, STRIDE) host::tiles_##OPERAND::store<T>(TO, STRIDE)
#define tile_dot(OPERAND, T, A, B) host::tiles_##OPERAND::dot<T, A, B>()
