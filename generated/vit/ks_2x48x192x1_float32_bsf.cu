// ks_2x48x192x1_float32_bsf   ksgen 0.1.0, simt.cu.j2 8f617903, spec a793a835
// Y = X K^T, support I_2 ⊗ 1_{48x192} ⊗ I_1, float32, batch-size-first.
// Edit the template, not this file.
//
// Indices: block i of A on the diagonal, output k of B, input l of C, interleaved matrix j of D, row s of the batch.

// Y[s, (i, k, j)] = sum over l < C of X[s, (i, l, j)] * W[i, k, l, j]
//
// Every thread block computes a tile: TILE_BATCH x TILE_OUT outputs for each of TILE_D neighbouring j of one i. It
// walks over l in steps of TILE_IN: a stage of X and of W is copied to shared memory while an earlier one is
// multiplied. Sums live in registers, THREAD_BATCH x THREAD_OUT per thread. The kernel comes first. Its functions
// follow: place, load, multiply, store.
//
// A tile of Y. Tiles: 1 along k, 1 along j, 2 along i; along s, as many as the batch needs.
//
//                          48 outputs k
//                          +--------+
// 128 rows s of the batch  | warp 0 |
//                          +--------+
//                          | warp 1 |
//                          +--------+
//
// A warp: 8 lanes along s by 4 along k, with 8 x 12 sums each.

// To launch by hand: grid and block have one dimension. Pass arrays as pointers, and the batch as a 64-bit integer.
// For more than 49152 bytes of shared memory, first set cudaFuncAttributeMaxDynamicSharedMemorySize of the kernel.
//   ks_2x48x192x1_float32_bsf_pack<<<72, 256>>>(w, packed): w is (A, B, C, D) of float32, packed has 73728 bytes
//   ks_2x48x192x1_float32_bsf<<<2 * tiles, 64, 23040>>>(x, packed, y, batch): tiles = batch / 128, rounded up

// ---- constants: the pattern, the chosen tiling, and values derived from them
constexpr int A                =        2;  // diagonal blocks, index i
constexpr int B                =       48;  // outputs of each small dense block, index k
constexpr int C                =      192;  // inputs of each small dense block, index l
constexpr int D                =        1;  // interleaved dense blocks per diagonal block, index j
constexpr long long BATCH      =        0;  // rows of the batch, index s; 0: known at the call
constexpr int HAS_BIAS         =        0;  // whether a bias is added, one element per output feature
constexpr int HAS_RESIDUAL     =        0;  // whether a residual is added, an array like Y
constexpr int TILE_BATCH       =      128;  // rows of the batch per thread block
constexpr int TILE_OUT         =       48;  // outputs k per thread block, for each of its j
constexpr int TILE_IN          =       16;  // inputs l per stage
constexpr int TILE_D           =        1;  // neighbouring j per thread block: one plane of shared memory each
constexpr int THREAD_BATCH     =        8;  // sums per thread, along the batch
constexpr int THREAD_OUT       =       12;  // sums per thread, along the outputs
constexpr int STAGES           =        2;  // stages of X and W in shared memory
constexpr int MIN_BLOCKS       =        3;  // thread blocks that must fit on a multiprocessor: bounds the registers
constexpr int GROUP            =        4;  // elements of a 16-byte access to shared memory
constexpr int GROUP_OUT        =        4;  // elements of one access to weights: at most the outputs of a thread
constexpr int THREADS          =       64;  // threads per block
constexpr int WARPS_BATCH      =        2;  // warps of a plane along the batch
constexpr int WARPS_PER_PLANE  =        2;  // warps of a plane
constexpr int STEPS            =       12;  // stages until all C inputs are read
constexpr int TILES_OUT        =        1;  // tiles along the outputs
constexpr int TILES_D          =        1;  // tiles along j
constexpr int X_PITCH          =      132;  // elements of shared memory from one l to the next
constexpr int X_PLANE          =      132;  // elements from one j to the next
constexpr int W_BASE           =     2112;  // offset of a stage's weights, in elements
constexpr int W_STAGE          =      768;  // elements of weights per stage
constexpr int STAGE            =     2880;  // elements per stage
constexpr int SHARED_ELEMENTS  =     5760;  // elements of shared memory per block
constexpr int X_LINES          =      128;  // lines of the X tile: its rows of the batch; `run` is an offset in a line
constexpr int X_VECTOR         =        1;  // contiguous elements that one copy of X moves
constexpr int X_LANE_RUN       =        8;  // lanes of a warp that copy one line together
constexpr int X_LANE_LINES     =        4;  // lines that a warp copies at once
constexpr int X_WARPS_RUN      =        1;  // warps that copy one line together
constexpr int X_LINE_STEP      =        8;  // lines that the block copies at once
constexpr int X_LINE_ROUNDS    =       16;  // rounds until all lines are copied
constexpr int X_RUN_STEP       =        8;  // elements of a line that the block copies at once
constexpr int X_RUN_ROUNDS     =        2;  // rounds until a line is copied
constexpr int W_ROUNDS         =        3;  // copies of weights per thread and stage
constexpr int PACK_THREADS     =      256;  // threads per block of the packing kernel
constexpr int Y_PLANE          =      132;  // elements from one (k, j) to the next, while sums become rows of Y
constexpr int Y_LANE_RUN       =        8;  // lanes of a warp that store one line of Y together
constexpr int Y_LANE_LINES     =        4;  // rows of the batch that a warp stores at once
constexpr int Y_WARPS_RUN      =        2;  // warps that store one line together
constexpr int Y_LINE_STEP      =        4;  // rows of the batch that the block stores at once
constexpr int Y_LINE_ROUNDS    =       32;  // rounds until all rows of the tile are stored
constexpr int Y_AT_ONCE        =       16;  // residuals that a thread loads at once
constexpr int Y_RUN_STEP       =       16;  // elements of a line that the block stores at once
constexpr int Y_RUN_ROUNDS     =        1;  // rounds until a line is stored

// ---- definitions that the kernel uses
#define ENTRY(THREADS_PER_BLOCK, BLOCKS_PER_SM) \
    extern "C" __global__ __launch_bounds__(THREADS_PER_BLOCK, BLOCKS_PER_SM)
#define DEVICE __device__ __forceinline__
#define RESTRICT __restrict__
#define ALIGNED(BYTES) __align__(BYTES)
#define UNROLL _Pragma("unroll")
#define GLOBAL  // only OpenCL names a pointer's address space
#define SHARED
extern __shared__ __align__(16) unsigned char shared_memory[];  // sized at the launch
#define SHARED_MEMORY(NAME)                                                                               \
    static_assert(SHARED_ELEMENTS * sizeof(real) <= 227 * 1024, "more shared memory than a block can have"); \
    real* const NAME = reinterpret_cast<real*>(shared_memory)
typedef long long extent;  // offsets into X and Y can exceed 32 bits
DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DEVICE extent block_index() { return static_cast<extent>(blockIdx.x); }
DEVICE unsigned opaque(unsigned value) {  // hides a value from the compiler
    asm volatile("" : "+r"(value));
    return value;
}

typedef float stored;
typedef float real;

typedef struct {
    int block;           // i
    int first_j;         // j of the tile's first plane
    int first_out;       // k of its first output
    int weights;         // index of the tile's packed weights, counted over (i, tiles of j, tiles of k)
    extent first_batch;  // s of its first row of the batch
    int batch_left;      // rows of the batch from `first_batch` on, at most TILE_BATCH
} Tile;
typedef unsigned TileIndex;  // 32 bits suffice for tile counts; a 64-bit division would branch, and spill registers
DEVICE int batch_left(const extent batch, const extent first_batch) {
    return batch - first_batch < TILE_BATCH ? (int)(batch - first_batch) : TILE_BATCH;
}
// Compute the same tile again after the multiplication, from two of its numbers. So only these two stay in registers
// during the multiplication.
DEVICE Tile place_again(const Tile tile, const extent batch) {
    const TileIndex weights = opaque((TileIndex)tile.weights), rest = weights / TILES_OUT;
    const extent first_batch = (extent)opaque((TileIndex)(tile.first_batch / TILE_BATCH)) * TILE_BATCH;
    const Tile same =
        {(int)(rest / TILES_D), (int)(rest % TILES_D) * TILE_D, (int)(weights % TILES_OUT) * TILE_OUT, (int)weights,
         first_batch, batch_left(batch, first_batch)};
    return same;
}
// tiles along j vary fastest: they share memory sectors
DEVICE Tile find_tile(const TileIndex block, const extent batch) {
    const TileIndex batch_tiles = (TileIndex)((batch + TILE_BATCH - 1) / TILE_BATCH);
    const int planes = (int)(block % TILES_D);
    const int out = (int)(block / TILES_D % TILES_OUT);
    const TileIndex rest = block / (TILES_D * TILES_OUT);
    const int i = (int)(rest / batch_tiles);
    const extent first_batch = (extent)(rest % batch_tiles) * TILE_BATCH;
    const Tile tile =
        {i, planes * TILE_D, out * TILE_OUT, (i * TILES_D + planes) * TILES_OUT + out, first_batch,
         batch_left(batch, first_batch)};
    return tile;
}

typedef struct ALIGNED(GROUP * sizeof(real)) { real at[GROUP]; } Group;  // one access to shared memory
DEVICE void multiply_tile(real sums[THREAD_OUT][THREAD_BATCH], GLOBAL const stored* x,
                          GLOBAL const real* weights, SHARED real* shared, const Tile tile, const extent batch,
                          const extent x_pitch, const int own_x, const int own_w);
DEVICE void store_tile(GLOBAL stored* y, real sums[THREAD_OUT][THREAD_BATCH], SHARED real* shared, const Tile tile,
                       const extent batch, const extent y_pitch, const int plane, const int own_batch,
                       const int own_out, GLOBAL const stored* bias, GLOBAL const stored* residual,
                       const extent residual_pitch);

ENTRY(THREADS, MIN_BLOCKS)
void ks_2x48x192x1_float32_bsf(
    GLOBAL const stored* RESTRICT x, GLOBAL const real* RESTRICT weights,
    GLOBAL stored* RESTRICT y,
    const extent batch_of_call) {
    SHARED_MEMORY(shared);
    const extent batch = BATCH > 0 ? BATCH : batch_of_call;
    const extent x_pitch = 384;
    const extent y_pitch = 96;
    const Tile tile = find_tile(block_index(), batch);
    // A warp is 8 lanes along the batch by 4 along the outputs. Lanes n and n + 1 (n even) read the same X, lanes n and
    // n + 2 (n / 2 even) the same W. Because such neighbours read the same 16 bytes, shared memory answers a warp's
    // read in two cycles instead of four.
    const int lane = thread_index() % 32;
    const int lane_batch = lane / 2 % 8, lane_out = lane % 2 + lane / 16 * 2;
    const int warp = thread_index() / 32;
    const int plane = warp / WARPS_PER_PLANE;           // index of the warp's j among those of the tile
    // the thread's first row of the batch, within the tile
    const int own_batch = warp % WARPS_PER_PLANE % WARPS_BATCH * 8 * THREAD_BATCH + lane_batch * GROUP;
    // the thread's first output, within the tile
    const int own_out = warp % WARPS_PER_PLANE / WARPS_BATCH * 4 * THREAD_OUT + lane_out * GROUP_OUT;

    real sums[THREAD_OUT][THREAD_BATCH];
    UNROLL for (int n = 0; n < THREAD_OUT; ++n)
        UNROLL for (int m = 0; m < THREAD_BATCH; ++m) sums[n][m] = 0;
    multiply_tile(sums, x, weights + (extent)tile.weights * STEPS * W_STAGE, shared, tile, batch, x_pitch,
                  plane * X_PLANE + own_batch, W_BASE + plane * (TILE_IN * TILE_OUT) + own_out);
    store_tile(y, sums, shared, place_again(tile, batch), batch, y_pitch, plane, own_batch,
               own_out, 0, 0, 0);
}

// ---- definitions that the functions below use
DEVICE void wait_for_block() { __syncthreads(); }

// Update two neighbouring sums. On sm_100 and sm_103, one instruction does both, but nvcc does not emit it by itself.
// On sm_120 it becomes two.
DEVICE void multiply_add_pair(float* sums, const float* x, const float w) {
#if __CUDA_ARCH__ >= 1000
    asm("{\n"
        ".reg .b64 x, w, sums;\n"
        "mov.b64 x, { %2, %3};\n"
        "mov.b64 w, { %4, %4};\n"
        "mov.b64 sums, { %0, %1};\n"
        "fma.rn.f32x2 sums, x, w, sums;\n"
        "mov.b64 { %0, %1}, sums;\n"
        "}" : "+f"(sums[0]), "+f"(sums[1]) : "f"(x[0]), "f"(x[1]), "f"(w));
#else
    sums[0] = fmaf(x[0], w, sums[0]);
    sums[1] = fmaf(x[1], w, sums[1]);
#endif
}
DEVICE void copy_async_4(void* shared, const void* global, const bool valid) {  // writes zeros if not valid
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void copy_async_16(void* shared, const void* global, const bool valid) {  // writes zeros if not valid
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE real widen(const stored value) { return value; }
typedef stored given;  // a weight before packing
DEVICE real weight_of(GLOBAL const given* w, const extent at, const extent feature) { return widen(w[at]); }
DEVICE stored narrow(const real value) { return value; }

DEVICE real activate(real value) { return value; }
DEVICE real finish(real value, const stored bias, const stored residual) {
    if (HAS_BIAS) value += widen(bias);
    value = activate(value);
    if (HAS_RESIDUAL) value += widen(residual);
    return value;
}

DEVICE void copy_element(void* to, const stored* from, const bool valid) { copy_async_4(to, from, valid); }

typedef struct ALIGNED(GROUP * sizeof(stored)) { stored at[GROUP]; } StoredGroup;  // one wide access to X or Y
typedef struct ALIGNED(GROUP_OUT * sizeof(real)) { real at[GROUP_OUT]; } GroupOut;

DEVICE bool is_aligned(GLOBAL const void* pointer) { return (size_t)pointer % sizeof(StoredGroup) == 0; }

// ---- place: offsets of elements in this layout
// X[s * x_pitch + (i * C + l) * D + j]: (l, j) is contiguous.
// A line of the X tile is one row of the batch. `run` is an element's index within its line, along l and the tile's j.
// For each `run`, shared memory holds the rows of the batch contiguously, so the copy transposes. X_PLANE puts element
// `run` of row `line` into bank (GROUP * run + line) % 32, if `real` has 4 bytes.
DEVICE extent x_next_line(const extent x_pitch) { return x_pitch; }
DEVICE extent along_run(const int run) { return TILE_D == D ? run : run / TILE_D * (extent)D + run % TILE_D; }
DEVICE extent x_offset(const Tile tile, const extent x_pitch, const int line, const int run) {
    return (tile.first_batch + line) * x_pitch + (extent)tile.block * C * D + tile.first_j + along_run(run);
}
DEVICE extent x_next_step(const extent x_pitch) { return (extent)TILE_IN * D; }
DEVICE extent x_in_line(const Tile tile, const extent x_pitch, const int first_in, const int line, const int run,
                        const int rounds) {
    const bool is_constant = TILE_D == D || X_RUN_STEP % TILE_D == 0;
    return is_constant ? along_run(rounds * X_RUN_STEP) : along_run(run) - along_run(run - rounds * X_RUN_STEP);
}
DEVICE bool x_inside(const Tile tile, const int first_in, const int line, const int run) {
    return (C % TILE_IN == 0 || first_in + run / TILE_D < C) && (D % TILE_D == 0 || tile.first_j + run % TILE_D < D) &&
        line < tile.batch_left;
}
DEVICE bool x_is_wide(GLOBAL const stored* x, const extent batch, const extent x_pitch) {
    return X_VECTOR > 1 && x_pitch % X_VECTOR == 0 && is_aligned(x);
}
DEVICE int x_place(const int line, const int run) { return run * X_PLANE + line; }
// A warp copies X_LANE_LINES lines at a time, with X_LANE_RUN lanes per line. X_WARPS_RUN warps share a line.
DEVICE int x_line(const int round) {
    const int warp = thread_index() / 32;
    return warp / X_WARPS_RUN * X_LANE_LINES + thread_index() % 32 / X_LANE_RUN + round * X_LINE_STEP;
}
DEVICE int x_run(const int round) {
    const int warp = thread_index() / 32;
    return (warp % X_WARPS_RUN * X_LANE_RUN + thread_index() % X_LANE_RUN) * X_VECTOR + round * X_RUN_STEP;
}

// ---- load: from global to shared memory
DEVICE void copy_x(real* to, const stored* from, const Tile tile, const extent x_pitch, const int first_in,
                   const bool wide) {
    to += x_place(x_line(0), x_run(0));
    UNROLL for (int p = 0; p < X_LINE_ROUNDS; ++p) {
        UNROLL for (int q = 0; q < X_RUN_ROUNDS; ++q) {
            const int line = x_line(p);
            const int run = x_run(q);
            if ((p + 1) * X_LINE_STEP > X_LINES && line >= X_LINES) continue;
            real* const place = to + x_place(p * X_LINE_STEP, q * X_RUN_STEP);
            const stored* address = from + x_in_line(tile, x_pitch, first_in, line, run, q);
            if (X_VECTOR > 1 && wide)
                copy_async_16(place, address, x_inside(tile, first_in, line, run));
            else
                UNROLL for (int e = 0; e < X_VECTOR; ++e)
                    copy_element(place + x_place(0, e), address + e, x_inside(tile, first_in, line, run + e));
        }
        // advance in each round: multiplying `x_pitch` by the round's number would take twice the instructions
        from += X_LINE_STEP * x_next_line(x_pitch);
    }
}
DEVICE void copy_weights(real* to, const real* from) {
    const int warp = thread_index() / 32;
    UNROLL for (int q = 0; q < W_ROUNDS; ++q) {  // rounds are 512 bytes apart, an immediate offset in the instruction
        const int at = ((warp * W_ROUNDS + q) * 32 + thread_index() % 32) * GROUP;
        if (W_STAGE % (THREADS * GROUP) == 0 || at < W_STAGE) copy_async_16(to + at, from + at, true);
    }
}

// ---- multiply: add the products of one stage to the sums, and loop over the stages
DEVICE void multiply_stage(real sums[THREAD_OUT][THREAD_BATCH], SHARED const real* x, SHARED const real* w) {
    UNROLL for (int l = 0; l < TILE_IN; ++l) {
        real own_x[THREAD_BATCH];
        real own_w[THREAD_OUT];
        UNROLL for (int q = 0; q < THREAD_BATCH / GROUP; ++q) {
            const Group group = *(SHARED const Group*)(x + l * X_PITCH + q * 8 * GROUP);
            UNROLL for (int e = 0; e < GROUP; ++e) own_x[q * GROUP + e] = group.at[e];
        }
        UNROLL for (int q = 0; q < THREAD_OUT / GROUP_OUT; ++q) {
            const GroupOut group = *(SHARED const GroupOut*)(w + l * TILE_OUT + q * 4 * GROUP_OUT);
            UNROLL for (int e = 0; e < GROUP_OUT; ++e) own_w[q * GROUP_OUT + e] = group.at[e];
        }
        UNROLL for (int n = 0; n < THREAD_OUT; ++n)
            UNROLL for (int m = 0; m < THREAD_BATCH; m += 2) multiply_add_pair(sums[n] + m, own_x + m, own_w[n]);
    }
}
// Multiply all stages. If WIDE, lines are aligned, and each copy moves a group. Each case has a loop of its own,
// without branches for the other case.
template <bool WIDE>
DEVICE void multiply_stages(real sums[THREAD_OUT][THREAD_BATCH], const stored* from, const real* weights, real* shared,
                            const Tile tile, const extent x_pitch, const int own_x, const int own_w) {
    const extent next_step = x_next_step(x_pitch);
    // If one copy moves several elements of X, addresses are computed as multiples of next_step. Else they advance by
    // it. With the opposite choice, ptxas spills.
    constexpr bool BY_MULTIPLES = X_VECTOR > 1;
    // STAGES - 1 stages are in flight while one is multiplied. Every step commits one group, even an empty one,
    // because the wait counts groups.
    UNROLL for (int step = 0; step < STAGES - 1; ++step) {
        if (step < STEPS) {
            copy_x(shared + step * STAGE, BY_MULTIPLES ? from + step * next_step : from, tile, x_pitch,
                   step * TILE_IN, WIDE);
            copy_weights(shared + step * STAGE + W_BASE, weights);
            from += BY_MULTIPLES ? 0 : next_step;
            weights += W_STAGE;
        }
        copy_async_commit();
    }
    // In float32, the loop is unrolled STAGES times if STAGES divides STEPS. If there are two loops (X_VECTOR > 1),
    // only the WIDE one is unrolled. Stages of an unrolled loop have constant addresses in shared memory. In other
    // cases unrolling makes ptxas spill.
    constexpr bool IS_UNROLLED = sizeof(real) == 4 && STEPS % STAGES == 0 && (WIDE || X_VECTOR == 1);
    constexpr int UNROLLED = IS_UNROLLED ? STAGES : 1;
    _Pragma("unroll 1") for (int first = 0; first < STEPS; first += UNROLLED)
        UNROLL for (int e = 0; e < UNROLLED; ++e) {
            const int step = first + e, ahead = step + STAGES - 1;
            const int read = IS_UNROLLED ? e : step % STAGES,
                written = IS_UNROLLED ? (e + STAGES - 1) % STAGES : ahead % STAGES;
            copy_async_wait<STAGES - 2>();
            wait_for_block();  // this step's stage is complete, and all threads have read the stage to be overwritten
            // if unrolled, the first step of each outer iteration always copies, and the others share one condition
            if (IS_UNROLLED ? e == 0 || first + UNROLLED < STEPS : ahead < STEPS) {
                real* const to = shared + written * STAGE;
                copy_x(to, BY_MULTIPLES ? from + ahead * next_step : from, tile, x_pitch, ahead * TILE_IN,
                       WIDE);
                copy_weights(to + W_BASE, weights);
                from += BY_MULTIPLES ? 0 : next_step;
                weights += W_STAGE;
            }
            copy_async_commit();
            multiply_stage(sums, shared + read * STAGE + own_x, shared + read * STAGE + own_w);
        }
}
DEVICE void multiply_tile(real sums[THREAD_OUT][THREAD_BATCH], const stored* x, const real* weights, real* shared,
                          const Tile tile, const extent batch, const extent x_pitch, const int own_x, const int own_w) {
    const stored* const from = x + x_offset(tile, x_pitch, x_line(0), x_run(0));
    if (X_VECTOR > 1 && x_is_wide(x, batch, x_pitch))
        multiply_stages<true>(sums, from, weights, shared, tile, x_pitch, own_x, own_w);
    else
        multiply_stages<false>(sums, from, weights, shared, tile, x_pitch, own_x, own_w);
}

// ---- store: from the sums to Y
// Store one feature of a thread's rows of the batch, which are Y_LINE_STEP apart. A row is stored if it lies fewer than
// `left` rows of the batch after the thread's first one. Residuals of Y_AT_ONCE rows are loaded before the first is
// added, so that a thread waits for them together.
DEVICE void store_lines(GLOBAL stored* to, SHARED const real* from, const extent y_pitch, const stored own_bias,
                        GLOBAL const stored* residual, const extent residual_pitch, const extent left) {
    for (int first = 0; first < Y_LINE_ROUNDS; first += Y_AT_ONCE) {
        stored own_residual[Y_AT_ONCE];
        UNROLL for (int p = 0; p < Y_AT_ONCE; ++p) {
            own_residual[p] = HAS_RESIDUAL && (first + p) * Y_LINE_STEP < left ? *residual : (stored)0;
            residual += Y_LINE_STEP * residual_pitch;
        }
        UNROLL for (int p = 0; p < Y_AT_ONCE; ++p) {
            if ((first + p) * Y_LINE_STEP < left)
                *to = narrow(finish(from[(first + p) * Y_LINE_STEP], own_bias, own_residual[p]));
            to += Y_LINE_STEP * y_pitch;
        }
    }
}
// Sums go through shared memory in slices: GROUP_OUT outputs of every thread. They are written with the batch
// contiguous, and read along (k, j). So a warp stores Y_LANE_RUN neighbouring features of each of Y_LANE_LINES rows of
// the batch. `run` counts the pairs (output of the slice, j), with j fastest.
DEVICE void store_tile(GLOBAL stored* y, real sums[THREAD_OUT][THREAD_BATCH], SHARED real* shared, const Tile tile,
                       const extent batch, const extent y_pitch, const int plane, const int own_batch,
                       const int own_out, GLOBAL const stored* bias, GLOBAL const stored* residual,
                       const extent residual_pitch) {
    const int warp = thread_index() / 32;
    const int own_in_slice = own_out / (4 * THREAD_OUT) * (4 * GROUP_OUT) + own_out % (4 * THREAD_OUT);
    UNROLL for (int slice = 0; slice < THREAD_OUT / GROUP_OUT; ++slice) {
        wait_for_block();  // the stages, or the previous slice, have been read
        UNROLL for (int e = 0; e < GROUP_OUT; ++e)
            UNROLL for (int q = 0; q < THREAD_BATCH / GROUP; ++q) {
                Group group;
                UNROLL for (int m = 0; m < GROUP; ++m) group.at[m] = sums[slice * GROUP_OUT + e][q * GROUP + m];
                *(SHARED Group*)(shared + ((own_in_slice + e) * TILE_D + plane) * Y_PLANE + own_batch + q * 8 * GROUP) =
                    group;
            }
        wait_for_block();
        const int line = warp / Y_WARPS_RUN * Y_LANE_LINES + thread_index() % 32 / Y_LANE_RUN;
        const extent s = tile.first_batch + line;
        // Whether all rows that threads store are in the batch, so that no row needs a bounds check. With
        // `tile.batch_left` here, ptxas spills, although the copies read it, too.
        const bool is_whole = Y_LINE_ROUNDS * Y_LINE_STEP == TILE_BATCH && tile.first_batch + TILE_BATCH <= batch;
        UNROLL for (int q = 0; q < Y_RUN_ROUNDS; ++q) {
            const int run = warp % Y_WARPS_RUN * Y_LANE_RUN + thread_index() % Y_LANE_RUN + q * Y_RUN_STEP;
            const int n = run / TILE_D;
            const int k =
                tile.first_out + n / (4 * GROUP_OUT) * (4 * THREAD_OUT) + slice * 4 * GROUP_OUT + n % (4 * GROUP_OUT);
            const int j = tile.first_j + run % TILE_D;
            if ((B % TILE_OUT != 0 && k >= B) || (D % TILE_D != 0 && j >= D)) continue;
            const extent feature = ((extent)tile.block * B + k) * D + j;
            const stored own_bias = HAS_BIAS ? bias[feature] : (stored)0;
            GLOBAL stored* const to = y + s * y_pitch + feature;
            GLOBAL const stored* const own_residual = residual + s * residual_pitch + feature;
            SHARED const real* const from = shared + run * Y_PLANE + line;
            if (is_whole)
                store_lines(to, from, y_pitch, own_bias, own_residual, residual_pitch, TILE_BATCH);
            else
                store_lines(to, from, y_pitch, own_bias, own_residual, residual_pitch,
                            min(batch - s, (extent)(TILE_BATCH - line)));
        }
    }
}

// ---- pack: W (A, B, C, D) into the order in which tiles read it, zeros beyond the ragged edges
ENTRY(PACK_THREADS, 1)
void ks_2x48x192x1_float32_bsf_pack(
    GLOBAL const given* RESTRICT w, GLOBAL real* RESTRICT packed) {
    const extent at = block_index() * PACK_THREADS + thread_index();
    const int k_in_tile = (int)(at % TILE_OUT);
    const int l_in_stage = (int)(at / TILE_OUT % TILE_IN);
    const int plane = (int)(at / (TILE_OUT * TILE_IN) % TILE_D);
    const extent stage = at / W_STAGE;
    const extent tile = stage / STEPS;
    const int l = (int)(stage % STEPS) * TILE_IN + l_in_stage;
    const int k = (int)(tile % TILES_OUT) * TILE_OUT + k_in_tile;
    const int j = (int)(tile / TILES_OUT % TILES_D) * TILE_D + plane;
    const extent i = tile / TILES_OUT / TILES_D;
    if (i >= A) return;
    packed[at] = k < B && l < C && j < D ? weight_of(w, ((i * B + k) * C + l) * D + j, (i * B + k) * D + j) : (real)0;
}
