// ks_1x128x128x3_bfloat16_bsl   ksgen 0.1.0, mma.cu.j2 0acc27b4, spec 4ebd21a6
// Y = X K^T, support I_1 ⊗ 1_{128x128} ⊗ I_3, bfloat16, batch-size-last.
// Edit the template, not this file.
//
// Indices: block i of A on the diagonal, output k of B, input l of C, interleaved matrix j of D, row s of the batch.
// These are logical indices. In memory, X and Y are (features, batch).

// Y[s, (i, k, j)] = sum over l < C of X[s, (i, l, j)] * W[i, k, l, j]
//
// Every thread block computes a tile on tensor cores: TILE_OUT outputs k by TILE_BATCH rows s of the batch, for each of
// TILE_D neighbouring j of one i. Packed weights are operand A of the matrix instructions, X is operand B. The block
// walks over l in steps of TILE_IN inputs: a stage of X and of packed weights is copied to shared memory while an
// earlier one is multiplied. If X is resident, its stages stay in shared memory, and the block walks over all PASSES
// tiles of outputs. Lanes read X in 16-byte chunks, without a transposition. This is possible because inputs may have
// any order along an instruction's K dimension if both operands share it, and rows of operand A may be outputs in any
// order. Weights are packed in these orders (`input_of`, `out_of`). Below, g and t are PTX's groupID and
// threadID_in_group of a lane: lane 4g + t of its warp. The kernel comes first. Its functions follow: place and read,
// load, multiply, store. The packing kernel is last.
//
// A tile of Y. Tiles: 1 along k, 3 along j, 1 along i; along s, as many as the batch needs.
//
//                128 rows s of the batch
//                +--------+--------+
// 128 outputs k  | warp 0 | warp 1 |
//                +--------+--------+
//                | warp 2 | warp 3 |
//                +--------+--------+
//
// A warp: 64 x 64 sums, by 4 x 8 instructions of 16 x 8.

// To launch by hand: grid and block have one dimension. Pass arrays as pointers, and the batch as a 64-bit integer.
// For more than 49152 bytes of shared memory, first set cudaFuncAttributeMaxDynamicSharedMemorySize of the kernel.
//   ks_1x128x128x3_bfloat16_bsl_pack<<<96, 256>>>(w, packed): w is (A, B, C, D) of bfloat16, packed has 98304 bytes
//   ks_1x128x128x3_bfloat16_bsl<<<3 * tiles, 128, 33792>>>(x, packed, y, batch): tiles = batch / 128, rounded up

// ---- constants: the pattern, the chosen tiling, and values derived from them
constexpr int A                =        1;  // diagonal blocks, index i
constexpr int B                =      128;  // outputs of each small dense block, index k
constexpr int C                =      128;  // inputs of each small dense block, index l
constexpr int D                =        3;  // interleaved dense blocks per diagonal block, index j
constexpr long long BATCH      =        0;  // rows of the batch, index s; 0: known at the call
constexpr int HAS_BIAS         =        0;  // whether a bias is added, one element per output feature
constexpr int HAS_RESIDUAL     =        0;  // whether a residual is added, an array like Y
constexpr int TILE_BATCH       =      128;  // rows of the batch per thread block
constexpr int TILE_OUT         =      128;  // outputs k per thread block, for each of its j
constexpr int TILE_IN          =       32;  // inputs l per stage
constexpr int TILE_D           =        1;  // neighbouring j per thread block; a plane is the part of a tile with one j
constexpr int WARPS_BATCH      =        2;  // warps along the batch
constexpr int WARPS_OUT        =        2;  // warps along the outputs
constexpr int WARP_D           =        1;  // neighbouring j per warp
constexpr int STAGES           =        2;  // stages in shared memory: of X and W, or of W alone if X is resident
constexpr int MIN_BLOCKS       =        2;  // thread blocks that must fit on a multiprocessor: bounds the registers
constexpr int THREADS          =      128;  // threads per block
constexpr int X_VECTOR         =        8;  // contiguous elements that one copy of X moves
constexpr int Y_VECTOR         =        8;  // contiguous elements that one store of Y moves
constexpr int K_STEP           =       16;  // inputs of one matrix instruction
constexpr int ELEMENT_FLOATS   =        1;  // floats per element: 2 for a complex number
constexpr int WORD_INPUTS      =        2;  // inputs per word of an operand; a complex number fills two words
constexpr int COMPONENTS       =        1;  // parts into which an operand is split
constexpr int PACKED_PARTS     =        1;  // parts of packed weights; if fewer than COMPONENTS, lanes split them
constexpr int ROW_TILES        =        4;  // matrix instructions of a warp along its outputs, 16 each
constexpr int COLUMN_TILES     =        8;  // matrix instructions of a warp along its rows of the batch, 8 each
constexpr int SUPER_IN         =       16;  // inputs per period of the order in which lanes hold inputs
constexpr int SUPER_STEPS      =        1;  // matrix instructions for SUPER_IN inputs
constexpr int RUN_OUT          =        1;  // neighbouring outputs per lane
constexpr int STEPS            =        4;  // stages until all C inputs are read
constexpr int TILES_OUT        =        1;  // tiles along the outputs
constexpr int TILES_D          =        3;  // tiles along j
constexpr int X_LINES          =       32;  // lines of the X tile: its inputs l; `run` is an offset in a line
constexpr int X_RUN            =      128;  // elements per line
constexpr int X_PITCH          =      272;  // bytes of shared memory from one line to the next, free of bank conflicts
constexpr int PASSES           =        1;  // tiles of outputs per block, computed sequentially
constexpr int X_STAGE          =     8704;  // bytes from one stage of X to the next
constexpr int W_BASE           =    17408;  // offset of the weights' stages, in bytes
constexpr int W_BYTES          =     8192;  // bytes of packed weights per stage
constexpr int SHARED_BYTES     =    33792;  // bytes of shared memory per block
constexpr int PACK_THREADS     =      256;  // threads per block of the packing kernel
constexpr int VECTOR           =        8;  // rows of the batch per 16-byte chunk

// ---- definitions that the kernel uses
#define ENTRY(THREADS_PER_BLOCK, BLOCKS_PER_SM) \
    extern "C" __global__ __launch_bounds__(THREADS_PER_BLOCK, BLOCKS_PER_SM)
#define DEVICE __device__ __forceinline__
#define RESTRICT __restrict__
#define ALIGNED(BYTES) __align__(BYTES)
#define UNROLL _Pragma("unroll")
struct ALIGNED(16) Chunk { unsigned word[4]; };
extern __shared__ __align__(16) unsigned char shared_memory[];  // sized at the launch
typedef long long extent;  // offsets into X and Y can exceed 32 bits
DEVICE extent block_index() { return static_cast<extent>(blockIdx.x); }
DEVICE void wait_for_block() { __syncthreads(); }

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

typedef unsigned short stored;  // the bits of a bfloat16

typedef struct {
    int block;           // i
    int first_j;         // j of the tile's first plane
    int first_out;       // k of its first output
    int weights;         // index of the tile's packed weights, counted over (i, tiles of j, tiles of k)
    extent first_batch;  // s of its first row of the batch
    int batch_left;      // rows of the batch from `first_batch` on, at most TILE_BATCH
} Tile;
typedef extent TileIndex;
DEVICE int batch_left(const extent batch, const extent first_batch) {
    return batch - first_batch < TILE_BATCH ? (int)(batch - first_batch) : TILE_BATCH;
}
// tiles along the outputs vary fastest, so that X is read from memory once
DEVICE Tile find_tile(const TileIndex block, const extent batch) {
    const TileIndex batch_tiles = (TileIndex)((batch + TILE_BATCH - 1) / TILE_BATCH);
    const int out = (int)(block % TILES_OUT);
    const TileIndex rest = block / TILES_OUT;
    const int matrix = (int)(rest / batch_tiles);
    const extent first_batch = (extent)(rest % batch_tiles) * TILE_BATCH;
    const Tile tile =
        {matrix / D, matrix % D, out * TILE_OUT, matrix * TILES_OUT + out, first_batch, batch_left(batch, first_batch)};
    return tile;
}

// A lane's four sums of a matrix instruction, at (row, column): (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1).
typedef float Sums[WARP_D][ROW_TILES][COLUMN_TILES][ELEMENT_FLOATS][4];
DEVICE void clear_sums(Sums& sums) {
    UNROLL for (int j = 0; j < WARP_D; ++j)
        UNROLL for (int m = 0; m < ROW_TILES; ++m)
            UNROLL for (int n = 0; n < COLUMN_TILES; ++n)
                UNROLL for (int f = 0; f < ELEMENT_FLOATS; ++f)
                    UNROLL for (int q = 0; q < 4; ++q) sums[j][m][n][f][q] = 0;
}
struct Totals {
    static constexpr int AT_ONCE = 1;  // stages per turn of the loop over them
    Sums current;
    DEVICE void clear() { clear_sums(current); }
    DEVICE void end_stage(int) {}
    DEVICE const Sums& end() const { return current; }
};
static_assert(SHARED_BYTES <= 227 * 1024, "more shared memory than a block can have");

DEVICE bool x_is_wide(const stored* x, const extent batch, const extent x_pitch);
DEVICE const stored* first_x(const stored* x, const Tile tile, const extent x_pitch,
                                     const int first_in);
DEVICE const stored* next_stage(const stored* from, const stored* x, const Tile tile,
                                        const extent x_pitch, const int first_in);
DEVICE void load_x(unsigned char* to, const stored* from, const stored* x, const Tile tile,
                   const extent x_pitch, const int first_in, const bool wide);
DEVICE int first_chunk();
DEVICE void load_packed(unsigned char* to, const Chunk* from);
DEVICE void multiply_stage(Sums& sums, const unsigned char* x_stage, const unsigned char* packed);
DEVICE void store_tile(stored* y, const Sums& sums, const Tile tile, const extent batch, const extent y_pitch,
                       const stored* bias, const stored* residual,
                       const extent residual_pitch);

ENTRY(THREADS, MIN_BLOCKS)
void ks_1x128x128x3_bfloat16_bsl(
    const stored* RESTRICT x, const Chunk* RESTRICT weights,
    stored* RESTRICT y,
    const extent batch_of_call) {
    const extent batch = BATCH > 0 ? BATCH : batch_of_call;
    const extent x_pitch = batch;
    const extent y_pitch = batch;
    Tile tile = find_tile(block_index(), batch);
    const bool wide = x_is_wide(x, batch, x_pitch);
    // what this thread copies first of the next stage: to advance it takes fewer instructions than to compute it again
    const stored* next_x = first_x(x, tile, x_pitch, 0);
    const Chunk* next_weights = weights + static_cast<extent>(tile.weights) * STEPS * (W_BYTES / 16) + first_chunk();
    const auto load_stage = [&](const int stage, const int slot) {
        if (stage < STEPS) {
            load_x(shared_memory + (PASSES > 1 ? stage : slot) * X_STAGE, next_x, x, tile, x_pitch, stage * TILE_IN,
                   wide);
            next_x = next_stage(next_x, x, tile, x_pitch, (stage + 1) * TILE_IN);
        }
        if (stage < PASSES * STEPS) load_packed(shared_memory + W_BASE + slot * W_BYTES, next_weights);
        next_weights += W_BYTES / 16;
        copy_async_commit();  // one group per call, possibly empty, because `copy_async_wait` counts groups
    };

    // STAGES - 1 stages are in flight while one is multiplied; with several passes, also while a tile is stored.
    UNROLL for (int stage = 0; stage < STAGES - 1; ++stage) load_stage(stage, stage);
    int slot = STAGES - 1;  // of the ring, for the next stage to be copied
    _Pragma("unroll 1") for (int pass = 0; pass < PASSES; ++pass) {
        Totals sums;
        sums.clear();
        _Pragma("unroll Totals::AT_ONCE") for (int step = 0; step < STEPS; ++step) {
            const int stage = pass * STEPS + step;
            copy_async_wait<STAGES - 2>();
            wait_for_block();  // this step's stage is complete, and all threads have read the stage to be overwritten
            load_stage(stage + STAGES - 1, slot);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
            multiply_stage(sums.current, shared_memory + (PASSES > 1 ? step : slot) * X_STAGE,
                           shared_memory + W_BASE + slot * W_BYTES);
            sums.end_stage(step);
        }
        store_tile(y, sums.end(), tile, batch,
                   y_pitch, 0, 0, 0);
        tile.first_out += TILE_OUT;
    }
}

// ---- definitions that the functions below use
#define GLOBAL  // only OpenCL names a pointer's address space
DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DEVICE float float_of(unsigned int bits) { return __uint_as_float(bits); }

DEVICE unsigned short float_to_bfloat16(float value) {  // to nearest, ties to even; every NaN becomes 0x7fff
#if __CUDA_ARCH__ >= 800
    unsigned short narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return narrow;
#else
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
#endif
}
DEVICE void copy_async_16(void* shared, const void* global, const bool valid) {  // writes zeros if not valid
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(valid ? 16 : 0) : "memory");
}
// sums (16 x 8) += A (16 x 16) B (16 x 8), two bf16 per register; sm_80 and later.
DEVICE void mma_bf16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// One wide store in PTX, because nvcc may emit narrower ones for four scalar stores, or for one of a vector type. No
// load in this kernel depends on it, so the compiler may move loads across it.
DEVICE void store_words(void* to, unsigned w0, unsigned w1, unsigned w2, unsigned w3) {
    asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4};" ::"l"(to), "r"(w0), "r"(w1), "r"(w2), "r"(w3));
}
DEVICE void store_words(void* to, unsigned w0, unsigned w1) {
    asm volatile("st.global.v2.u32 [%0], { %1, %2};" ::"l"(to), "r"(w0), "r"(w1));
}

typedef float real;
DEVICE real widen(const stored value) { return float_of((unsigned int)value << 16); }
typedef stored given;  // a weight before packing
DEVICE real weight_of(GLOBAL const given* w, const extent at, const extent feature) { return widen(w[at]); }
DEVICE stored narrow(const real value) { return float_to_bfloat16(value); }

DEVICE real activate(real value) { return value; }
DEVICE real finish(real value, const stored bias, const stored residual) {
    if (HAS_BIAS) value += widen(bias);
    value = activate(value);
    if (HAS_RESIDUAL) value += widen(residual);
    return value;
}

DEVICE bool is_aligned(const void* pointer, const int bytes) { return reinterpret_cast<size_t>(pointer) % bytes == 0; }
DEVICE void copy_element(void* to, const stored* from, const bool valid) {  // elements are too small for `cp.async`
    *static_cast<stored*>(to) = valid ? *from : stored(0);
}
struct ALIGNED(Y_VECTOR * sizeof(stored)) Run { stored at[Y_VECTOR]; };  // neighbouring elements of Y, bias or residual
// Read the first `count` elements. If `wide`, they are aligned, and one load reads all Y_VECTOR.
DEVICE Run read_run(const stored* from, const bool wide, const int count = Y_VECTOR) {
    if (wide) return *reinterpret_cast<const Run*>(from);
    Run run = {};
    UNROLL for (int e = 0; e < Y_VECTOR; ++e)
        if (e < count) run.at[e] = from[e];
    return run;
}
// Store Y_VECTOR neighbouring elements of Y by one instruction.
DEVICE void write_wide(stored* to, const stored (&values)[Y_VECTOR]) {
    constexpr int WORDS = Y_VECTOR / 2;
    const auto word = [&](const int at) {
        const int first = 2 * at < Y_VECTOR ? 2 * at : 0;
        return static_cast<unsigned>(values[first + 1 < Y_VECTOR ? first + 1 : 0]) << 16 | values[first];
    };
    if constexpr (WORDS == 4) store_words(to, word(0), word(1), word(2), word(3));
    if constexpr (WORDS == 2) store_words(to, word(0), word(1));
    if constexpr (WORDS == 1) *reinterpret_cast<unsigned*>(to) = word(0);
}

// Join two elements into a word; each is the lower or the upper half of a word of X. Neighbours in X are in one word,
// but the two elements of an operand's word may come from different words.
DEVICE unsigned pair(const unsigned first, const bool first_upper, const unsigned second, const bool second_upper) {
    return __byte_perm(first, second, (first_upper ? 0x32 : 0x10) | (second_upper ? 0x7600 : 0x5400));
}
DEVICE unsigned pack_weights(const float (&values)[2], const int) {
    return static_cast<unsigned>(narrow(values[1])) << 16 | narrow(values[0]);
}
DEVICE float unscaled(const float sum) { return sum; }
DEVICE float component_of(const real value, const int) { return value; }
// A lane's sum at row g (`row` is 0) or g + 8 (1), and at column 2t (`column` is 0) or 2t + 1 (1).
DEVICE real sum_of(const float (&sums)[ELEMENT_FLOATS][4], const int row, const int column) {
    return unscaled(sums[0][row * 2 + column]);
}
// Set one word of a lane's operand: two inputs, taken from elements `first` and `second` of the chunks it has read.
template <int WORDS>
DEVICE void set_operand_word(unsigned (&x)[COMPONENTS][WORDS], const int word, const unsigned* words, const int first,
                             const int second) {
    if (first % 2 == 0 && second == first + 1) x[0][word] = words[first / 2];  // neighbours, as with one j
    else x[0][word] = pair(words[first / 2], first % 2, words[second / 2], second % 2);
}
// Read operand A of one instruction: four words per lane, for each part.
DEVICE void load_weights(unsigned (&w)[COMPONENTS][4], const Chunk* from) {
    UNROLL for (int part = 0; part < COMPONENTS; ++part) {
        const Chunk chunk = from[part * (TILE_OUT / 16) * 32];
        UNROLL for (int r = 0; r < 4; ++r) w[part][r] = chunk.word[r];
    }
}
DEVICE void multiply_add_tile(float (&sums)[ELEMENT_FLOATS][4], const unsigned (&w)[COMPONENTS][4],
                              const unsigned (&x)[COMPONENTS][2]) {
    mma_bf16(sums[0], w[0], x[0][0], x[0][1]);
}

// A lane's g and t; its warp's first row of the batch, first output and first j, as indices within the tile.
DEVICE int lane_g() { return thread_index() % 32 / 4; }
DEVICE int lane_t() { return thread_index() % 4; }
DEVICE int warp_batch() { return thread_index() / 32 % WARPS_BATCH * (TILE_BATCH / WARPS_BATCH); }
DEVICE int warp_out() { return thread_index() / 32 / WARPS_BATCH % WARPS_OUT * (TILE_OUT / WARPS_OUT); }
DEVICE int warp_plane() { return thread_index() / 32 / (WARPS_BATCH * WARPS_OUT) * WARP_D; }

// Output of a lane's sums in one half of a row tile, as an index within the warp's outputs. Half 0 is row g of an
// instruction, half 1 is row g + 8.
DEVICE constexpr int out_of(const int g, const int row_tile, const int row_half) {
    const int q = 2 * row_tile + row_half;
    return (q / RUN_OUT * 8 + g) * RUN_OUT + q % RUN_OUT;
}

// ---- place and read: offsets of X in memory and in a stage, and the part of X that a lane reads
// X[((i * C + l) * D + j) * x_pitch + s]: a line of the X tile is one l. `run` is an offset in a line, along
// the batch.

// Whether one copy can move X_VECTOR elements: only if X and its lines are aligned, and lines are whole copies.
DEVICE bool x_is_wide(const stored* x, const extent batch, const extent x_pitch) {
    return batch % X_VECTOR == 0 && x_pitch % X_VECTOR == 0 && is_aligned(x, 16);
}
DEVICE extent next_line(const extent x_pitch) { return D * x_pitch; }
DEVICE const stored* x_at(const stored* x, const Tile tile, const extent x_pitch, const int first_in,
    const int line, const int run) {
    const extent first_feature = (static_cast<extent>(tile.block) * C + first_in + line) * D + tile.first_j;
    return x + first_feature * x_pitch + tile.first_batch + run;
}
DEVICE bool run_is_inside(const Tile tile, const int, const int run) { return run < tile.batch_left; }
DEVICE int lines_inside(const Tile, const int first_in) { return C % TILE_IN == 0 ? TILE_IN : C - first_in; }
// Input in element e of lane t's operand, as an index within the stage. `in_stage` is the instruction's number within
// the stage, times K_STEP.
DEVICE constexpr int input_of(const int in_stage, const int t, const int e) { return in_stage + 4 * e + t; }
// A chunk has one input for VECTOR neighbouring rows of the batch. Element e of a chunk is for matrix instruction e.
// Chunk t is column 2t and chunk 4 + t is column 2t + 1, so that four lanes store neighbours.
DEVICE void load_fragments(unsigned (&x)[SUPER_STEPS][WARP_D][COLUMN_TILES][COMPONENTS][2], const unsigned char* stage,
                           const int first) {
    const unsigned char* const chunks =
        stage + (warp_batch() + (lane_g() % 2 * 4 + lane_g() / 2) * VECTOR) * static_cast<int>(sizeof(stored));
    UNROLL for (int group = 0; group < COLUMN_TILES / VECTOR; ++group)
        UNROLL for (int k_half = 0; k_half < 2; k_half += ELEMENT_FLOATS) {  // a chunk of complex numbers has both
            unsigned words[WORD_INPUTS * 4];
            UNROLL for (int e = 0; e < WORD_INPUTS; ++e) {
                const int line = input_of(first, lane_t(), k_half * WORD_INPUTS + e);
                const Chunk chunk = *reinterpret_cast<const Chunk*>(chunks + line * X_PITCH + group * 8 * 16);
                UNROLL for (int r = 0; r < 4; ++r) words[e * 4 + r] = chunk.word[r];
            }
            UNROLL for (int v = 0; v < VECTOR; ++v)
                UNROLL for (int also = 0; also < ELEMENT_FLOATS; ++also)
                    set_operand_word(x[0][0][group * VECTOR + v], k_half + also, words, v,
                                     (WORD_INPUTS - 1) * VECTOR + v);
        }
}

// ---- load: from global to shared memory
template <int WIDTH>
DEVICE void copy_x(unsigned char* to, const stored* from, const bool inside) {
    if constexpr (WIDTH > 1) copy_async_16(to, from, inside);
    else copy_element(to, from, inside);
}
// The line, and the offset in it, of a thread's first copy of a stage.
template <int WIDTH>
DEVICE int first_line() { return thread_index() / (X_RUN / WIDTH); }
template <int WIDTH>
DEVICE int first_run() { return thread_index() % (X_RUN / WIDTH) * WIDTH; }
// The address from which it makes this copy, if copies are wide.
DEVICE const stored* first_x(const stored* x, const Tile tile, const extent x_pitch,
                                     const int first_in) {
    return x_at(x, tile, x_pitch, first_in, first_line<X_VECTOR>(), first_run<X_VECTOR>());
}
template <int WIDTH>
DEVICE void load_lines(unsigned char* stage, const stored* from, const stored* x, const Tile tile,
                       const extent x_pitch, const int first_in) {
    constexpr int SIZE = static_cast<int>(sizeof(stored));
    constexpr int AT_ONCE = THREADS * WIDTH / X_RUN;  // lines that all threads copy in a round
    int line = first_line<WIDTH>(), run = first_run<WIDTH>();
    if constexpr (AT_ONCE > 0) {  // a round copies whole lines, so only the line changes; a few threads may be idle
        if (THREADS * WIDTH % X_RUN != 0 && line >= AT_ONCE) return;
        unsigned char* const to = stage + line * X_PITCH + run * SIZE;
        const int lines = run_is_inside(tile, first_in, run) ? lines_inside(tile, first_in) - line : 0;
        constexpr int ROUNDS = WIDTH > 1 ? (X_LINES + AT_ONCE - 1) / AT_ONCE : 1;
        _Pragma("unroll ROUNDS") for (int first = 0; first < X_LINES; first += AT_ONCE) {
            if (X_LINES % AT_ONCE == 0 || line + first < X_LINES)
                copy_x<WIDTH>(to + first * X_PITCH, from, first < lines);
            from += AT_ONCE * next_line(x_pitch);
        }
    } else {
        const int lines = lines_inside(tile, first_in);
        constexpr int STEP = THREADS * WIDTH;
        _Pragma("unroll 1") while (line < X_LINES) {
            copy_x<WIDTH>(stage + line * X_PITCH + run * SIZE, x_at(x, tile, x_pitch, first_in, line, run),
                          run_is_inside(tile, first_in, run) && line < lines);
            run += STEP % X_RUN;
            line += STEP / X_RUN + (run >= X_RUN);
            run -= run >= X_RUN ? X_RUN : 0;
        }
    }
}
DEVICE void load_x(unsigned char* to, const stored* from, const stored* x, const Tile tile,
                   const extent x_pitch, const int first_in, const bool wide) {
    if (X_VECTOR > 1 && wide) {
        load_lines<X_VECTOR>(to, from, x, tile, x_pitch, first_in);
    } else {
        const stored* const element = x_at(x, tile, x_pitch, first_in, first_line<1>(), first_run<1>());
        load_lines<1>(to, element, x, tile, x_pitch, first_in);
    }
}
DEVICE const stored* next_stage(const stored* from, const stored*, const Tile,
                                        const extent x_pitch, const int) {
    return from + TILE_IN * next_line(x_pitch);
}
// A warp copies neighbouring chunks, so that offsets in its instructions serve most of them.
constexpr int CHUNKS = W_BYTES / 16;
constexpr int CHUNKS_OF_WARP = (CHUNKS + THREADS - 1) / THREADS * 32;
DEVICE int first_chunk() { return thread_index() / 32 * CHUNKS_OF_WARP + thread_index() % 32; }
DEVICE void load_packed(unsigned char* to, const Chunk* from) {
    to += first_chunk() * 16;
    UNROLL for (int at = 0; at < CHUNKS_OF_WARP; at += 32) {
        if (CHUNKS % THREADS == 0 || first_chunk() + at < CHUNKS) copy_async_16(to + at * 16, from + at, true);
    }
}

// ---- multiply: one stage in shared memory into the sums
DEVICE void multiply_stage(Sums& sums, const unsigned char* x_stage, const unsigned char* packed) {
    constexpr int OPERANDS = PACKED_PARTS * (TILE_OUT / 16), STEPS_OF_STAGE = TILE_IN / K_STEP;
    const Chunk* const weights = reinterpret_cast<const Chunk*>(packed) +
                                 (warp_plane() * STEPS_OF_STAGE * OPERANDS + warp_out() / 16) * 32 +
                                 thread_index() % 32;
    UNROLL for (int first = 0; first < TILE_IN; first += SUPER_IN) {
        unsigned x[SUPER_STEPS][WARP_D][COLUMN_TILES][COMPONENTS][2];
        load_fragments(x, x_stage, first);
        UNROLL for (int s = 0; s < SUPER_STEPS; ++s)
            UNROLL for (int j = 0; j < WARP_D; ++j)
                UNROLL for (int m = 0; m < ROW_TILES; ++m) {
                    unsigned w[COMPONENTS][4];
                    load_weights(w, weights + ((j * STEPS_OF_STAGE + first / K_STEP + s) * OPERANDS + m) * 32);
                    UNROLL for (int n = 0; n < COLUMN_TILES; ++n) multiply_add_tile(sums[j][m][n], w, x[s][j][n]);
                }
    }
}

// ---- store: from the sums to Y
// First row of the batch in a chunk of Y, counted from the lane's first row.
DEVICE constexpr int line_of(const int run, const int column) {
    return (run * Y_VECTOR / VECTOR * 8 + 4 * column) * VECTOR + run * Y_VECTOR % VECTOR;
}
// A lane has VECTOR neighbouring rows of the batch per output, one from each of VECTOR matrix instructions. They form
// chunks of Y, and share a bias. All chunks of an output's residual are read before the first one is needed.
DEVICE void store_tile(stored* y, const Sums& sums, const Tile tile, const extent batch, const extent y_pitch,
                       const stored* bias, const stored* residual,
                       const extent residual_pitch) {
    const bool chunks_are_whole = batch % Y_VECTOR == 0 && y_pitch % Y_VECTOR == 0 && residual_pitch % Y_VECTOR == 0;
    const bool wide = chunks_are_whole && is_aligned(y, 16) && is_aligned(residual, 16);
    const int first_line = warp_batch() + lane_t() * VECTOR;
    UNROLL for (int q = 0; q < 2 * ROW_TILES; ++q) {
        const int k = tile.first_out + warp_out() + out_of(lane_g(), q / 2, q % 2);
        if (k >= B) continue;
        const extent feature = (static_cast<extent>(tile.block) * B + k) * D + tile.first_j;
        const extent y_offset = feature * y_pitch + tile.first_batch + first_line;
        const extent residual_offset = feature * residual_pitch + tile.first_batch + first_line;
        const stored own_bias = HAS_BIAS ? bias[feature] : stored(0);
        Run own_residual[COLUMN_TILES / Y_VECTOR][2] = {};
        UNROLL for (int run = 0; run < COLUMN_TILES / Y_VECTOR; ++run)
            UNROLL for (int column = 0; column < 2; ++column) {
                const int line = line_of(run, column), left = tile.batch_left - first_line - line;
                if (HAS_RESIDUAL && left > 0)
                    own_residual[run][column] = read_run(residual + residual_offset + line, wide, left);
            }
        UNROLL for (int run = 0; run < COLUMN_TILES / Y_VECTOR; ++run)
            UNROLL for (int column = 0; column < 2; ++column) {
                const int line = line_of(run, column), left = tile.batch_left - first_line - line;
                if (left <= 0) continue;
                stored values[Y_VECTOR];
                UNROLL for (int e = 0; e < Y_VECTOR; ++e) {
                    const real sum = sum_of(sums[0][q / 2][run * Y_VECTOR + e], q % 2, column);
                    values[e] = narrow(finish(sum, own_bias,
                                              own_residual[run][column].at[e]));
                }
                if (wide) write_wide(y + y_offset + line, values);
                else UNROLL for (int e = 0; e < Y_VECTOR; ++e)
                    if (e < left) y[y_offset + line + e] = values[e];
            }
    }
}

// ---- pack: W (A, B, C, D) into operand A of every instruction, four words per lane, zeros beyond the ragged edges
DEVICE float weight_at(const given* w, const extent i, const int k, const int l, const int j,
                       const int component) {
    return k < B && l < C && j < D
        ? component_of(weight_of(w, ((i * B + k) * C + l) * D + j, (i * B + k) * D + j), component) : 0.0f;
}
ENTRY(PACK_THREADS, 1)
void ks_1x128x128x3_bfloat16_bsl_pack(
    const given* RESTRICT w, unsigned* RESTRICT packed) {
    const extent at = block_index() * PACK_THREADS + thread_index();
    // A lane's words of operand A are rows g and g + 8 in the lower half of the instruction's K dimension, then in the
    // upper half. Complex numbers have their real parts in the lower half, and their imaginary parts in the upper one.
    const int word = static_cast<int>(at % 4);
    const int lane = static_cast<int>(at / 4 % 32);
    const int row_tile = static_cast<int>(at / 128 % (TILE_OUT / 16));
    const int part = static_cast<int>(at / (8 * TILE_OUT) % PACKED_PARTS);
    const int in_stage =
        static_cast<int>(at / (8 * TILE_OUT * PACKED_PARTS) % (TILE_IN / K_STEP)) * K_STEP;
    const int plane = static_cast<int>(at / (8 * TILE_OUT * PACKED_PARTS * (TILE_IN / K_STEP)) % TILE_D);
    const extent stage = at / (W_BYTES / 4);
    const extent tile = stage / STEPS;
    const extent i = tile / TILES_OUT / TILES_D;
    if (i >= A) return;
    const int k = static_cast<int>(tile % TILES_OUT) * TILE_OUT + row_tile / ROW_TILES * (ROW_TILES * 16) +
                  out_of(lane / 4, row_tile % ROW_TILES, word % 2);
    const int j = static_cast<int>(tile / TILES_OUT % TILES_D) * TILE_D + plane;
    const int first = static_cast<int>(stage % STEPS) * TILE_IN;
    float values[WORD_INPUTS];
    UNROLL for (int e = 0; e < WORD_INPUTS; ++e) {
        values[e] =
            weight_at(w, i, k, first + input_of(in_stage, lane % 4, word / 2 * WORD_INPUTS / ELEMENT_FLOATS + e), j,
                      word / 2);
    }
    packed[at] = pack_weights(values, part);
}
