"""The kernels' texts: a test renders one behind its includes, runs it, and breaks it to see that it is caught."""

# Four matrices through registers: y is x with each matrix as it was, or transposed once by the load or by the store.
MATRICES = """
extern "C" __global__ void matrices(const unsigned short* x, unsigned short* y) {
    unsigned short* s = reinterpret_cast<unsigned short*>(shared_memory);
    for (int i = threadIdx.x; i < 256; i += 32) s[i] = x[i];
    __syncwarp();
    const unsigned row = shared_address(s) + 16 * threadIdx.x;
    unsigned words[4];
    ldmatrix_x4<TRANSPOSES_LOAD>(words, row);
    __syncwarp();
    stmatrix_x4<TRANSPOSES_STORE>(row, words);
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) y[i] = s[i];
}
"""

# One product a warp. The fragments' elements, from the manual: A by (g, t), its rows g and g + 8; B by (t, g).
MMA = """
extern "C" __global__ void product(const unsigned* a, const unsigned* b, float* y) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const unsigned own_a[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
    float sums[4] = {y[g * 8 + 2 * t], y[g * 8 + 2 * t + 1], y[(g + 8) * 8 + 2 * t], y[(g + 8) * 8 + 2 * t + 1]};
    mma_OPERAND(sums, own_a, b[g * 8 + t], b[g * 8 + t + 4]);
    y[g * 8 + 2 * t] = sums[0];
    y[g * 8 + 2 * t + 1] = sums[1];
    y[(g + 8) * 8 + 2 * t] = sums[2];
    y[(g + 8) * 8 + 2 * t + 1] = sums[3];
}
"""

NARROW = """
extern "C" __global__ void narrow(const float* x, unsigned* f16, unsigned* bf16, unsigned* tf32, unsigned short* one) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    f16[i] = pack_f16(x[i], -x[i]);
    bf16[i] = pack_bf16(x[i], -x[i]);
    tf32[i] = float_to_tf32(x[i]);
    one[i] = float_to_bfloat16(x[i]);
}
"""

PARTS = """
extern "C" __global__ void parts(const unsigned* x, unsigned* upper, unsigned* middle) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    upper[i] = upper_tf32(x[i]);
    middle[i] = __float_as_uint(middle_of_tf32(x[i]));
}
"""

HALVES = """
extern "C" __global__ void halves(const float* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = half_to_float(float_to_half(x[i]));
}
"""

POWERS = """
extern "C" __global__ void powers(const float* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = exp2_of_negative(x[i]);
}
"""

PAIRS = """
extern "C" __global__ void pairs(const float* x, const float* w, float* y) {
    float sums[2] = {y[2 * threadIdx.x], y[2 * threadIdx.x + 1]};
    multiply_add_pair(sums, x + 2 * threadIdx.x, w[threadIdx.x]);
    y[2 * threadIdx.x] = sums[0];
    y[2 * threadIdx.x + 1] = sums[1];
}
"""

# Copies of each size in two groups, zeros from `count` on, and wide stores of a neighbour's.
COPIES = """
extern "C" __global__ void copies(const float* x, float* y, int count) {
    float* const s = reinterpret_cast<float*>(shared_memory);
    const int i = threadIdx.x;
    copy_async_16(s + 4 * i, x + 4 * i, 4 * i < count);
    copy_async_commit();
    copy_async_8(s + 128 + 2 * i, x + 128 + 2 * i, true);
    copy_async_4(s + 192 + i, x + 192 + i, true);
    copy_async_commit();
    copy_async_wait<1>();
    __syncwarp();
    const unsigned* const words = reinterpret_cast<const unsigned*>(s);
    const unsigned* const four = words + 4 * (i ^ 1);
    store_words(y + 4 * i, four[0], four[1], four[2], four[3]);
    copy_async_wait<0>();
    __syncwarp();
    store_words(y + 128 + 2 * i, words[128 + 2 * (i ^ 1)], words[129 + 2 * (i ^ 1)]);
    y[192 + i] = s[192 + (i ^ 1)];
}
"""

EIGHT_BITS = """
extern "C" __global__ void eight_bits(const unsigned short* x, unsigned* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = e4m3_to_f16(x[i]);
}
"""

# Rows of 32 floats by bulk copies through a ring of two stages: one warp copies, the other one adds them up.
RING = """
constexpr int STAGES = 2, ROW = 32;

extern "C" __global__ void ring(const float* x, float* y, int rows) {
    float* const stages = reinterpret_cast<float*>(shared_memory);
    const unsigned full = shared_address(shared_memory + STAGES * ROW * 4), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, 32);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int row = 0; threadIdx.x == 0 && row < rows; ++row) {
            const int s = row % STAGES;
            if (row >= STAGES) mbarrier_wait(empty + 8 * s, (row / STAGES - 1) % 2);
            mbarrier_arrive_expect(full + 8 * s, 4 * ROW);
            copy_bulk(shared_address(stages + s * ROW), x + row * ROW, 4 * ROW, full + 8 * s);
        }
        return;
    }
    float sum = 0;
    for (int row = 0; row < rows; ++row) {
        const int s = row % STAGES;
        mbarrier_wait(full + 8 * s, row / STAGES % 2);
        sum += stages[s * ROW + threadIdx.x - 32];
        mbarrier_arrive(empty + 8 * s);
    }
    y[threadIdx.x - 32] = sum;
}
"""

# The same sum with every thread copying its own element, and an mbarrier in the place of a wait.
ARRIVALS = """
extern "C" __global__ void arrivals(const float* x, float* y, int rows) {
    float* const row = reinterpret_cast<float*>(shared_memory);
    const unsigned full = shared_address(shared_memory + 128);
    if (threadIdx.x == 0) mbarrier_init(full, 32);
    __syncthreads();
    float sum = 0;
    for (int r = 0; r < rows; ++r) {
        copy_async_4(row + threadIdx.x, x + 32 * r + threadIdx.x, true);
        copy_async_arrive(full);
        mbarrier_wait(full, r % 2);
        sum += row[threadIdx.x ^ 1];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}
"""

# Rows of 32 floats, one a block, by bulk copies: a launch that may begin while the one before it ends.
GRIDS = """
extern "C" __global__ void grids(const float* x, float* y) {
    float* const row = reinterpret_cast<float*>(shared_memory);
    const unsigned full = shared_address(shared_memory + 128);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous_grid();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, 128);
        copy_bulk(shared_address(row), x + 32 * blockIdx.x, 128, full);
        allow_next_grid();
    }
    mbarrier_wait(full, 0);
    y[32 * blockIdx.x + threadIdx.x] = -row[threadIdx.x];
}
"""

# A box of an array into shared memory and out again, to the same place of another array, and its image too.
BOX = """
extern "C" __global__ void box(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to,
    unsigned char* image,
                               int bytes, int x0, int x1, int x2, int x3) {
    unsigned char* const s = shared_memory;
    const unsigned full = shared_address(s + bytes);
    if (threadIdx.x == 1) prefetch_map(from);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect(full, bytes);
        load_box(shared_address(s), from, full, x0, x1, x2, x3);
    }
    __syncthreads();
    mbarrier_wait(full, 0);
    x0 = x0 < 0 ? 0 : x0;  // nothing is stored below 0
    x1 = x1 < 0 ? 0 : x1;
    x2 = x2 < 0 ? 0 : x2;
    x3 = x3 < 0 ? 0 : x3;
    for (int i = threadIdx.x; i < bytes; i += 32) image[i] = s[i];
    for (int i = threadIdx.x; i < bytes; i += 32) s[i] ^= 1;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        store_box(to, shared_address(s), x0, x1, x2, x3);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
"""

# Products of a warpgroup. The operands' images come ready from the host; descriptors are relative to shared memory.
WGMMA = """
extern "C" __global__ __launch_bounds__(128) void product(const uint4* images, int chunks, unsigned long long a,
    unsigned long long b,
                                                          int a_step, int b_step, float* y) {
    uint4* const s = reinterpret_cast<uint4*>(shared_memory);
    for (int i = threadIdx.x; i < chunks; i += 128) s[i] = images[i];
    fence_proxy_async();
    __syncthreads();
    const unsigned long long base = shared_address(shared_memory) >> 4;
    float sums[SUMS];
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
    wgmma_hold(sums);
    wgmma_fence();
    for (int step = 0; step < STEPS; ++step) {
        CALL(sums, a + base + (step * a_step >> 4), b + base + (step * b_step >> 4), step > 0);
    }
    wgmma_commit();
    wgmma_hold(sums);
    wgmma_wait<0>();
    wgmma_hold(sums);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = threadIdx.x / 32 * 16;
    for (int i = 0; i < SUMS; ++i) y[(row + g + i / 2 % 2 * 8) * 2 * SUMS + i / 4 * 8 + 2 * t + i % 2] = sums[i];
}
"""

# The same with A in registers, AT_ONCE instructions a group, each lane's words by the manual's fragment.
WGMMA_REGISTERS = """
extern "C" __global__ __launch_bounds__(128) void product(const unsigned* x, const uint4* images, int chunks,
    unsigned long long b,
                                                          int b_step, float* y) {
    uint4* const s = reinterpret_cast<uint4*>(shared_memory);
    for (int i = threadIdx.x; i < chunks; i += 128) s[i] = images[i];
    fence_proxy_async();
    __syncthreads();
    const unsigned long long base = shared_address(shared_memory) >> 4;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = threadIdx.x / 32 * 16;
    const int pitch = 8 * STEPS;  // words of a row of A
    float sums[SUMS];
    unsigned a[2 * AT_ONCE][4];
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
    #pragma unroll
    for (int first = 0; first < STEPS; first += AT_ONCE) {
        #pragma unroll
        for (int step = first; step < first + AT_ONCE; ++step) {
            unsigned(&own)[4] = a[step % (2 * AT_ONCE)];
            for (int i = 0; i < 4; ++i) own[i] = x[(row + g + i % 2 * 8) * pitch + step * 8 + t + i / 2 * 4];
            wgmma_hold(own);
        }
        wgmma_hold(sums);
        wgmma_fence();
        #pragma unroll
        for (int step = first; step < first + AT_ONCE; ++step) {
            CALL(sums, a[step % (2 * AT_ONCE)], b + base + (step * b_step >> 4), true);
        }
        wgmma_commit();
        wgmma_hold(sums);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_hold(sums);
    for (int i = 0; i < SUMS; ++i) y[(row + g + i / 2 % 2 * 8) * 2 * SUMS + i / 4 * 8 + 2 * t + i % 2] = sums[i];
}
"""

# Y[(i, k, j), s] = sum over l of X[(i, l, j), s] W[i, k, l, j] in bfloat16, a whole kernel as Hopper wants it: one
# warpgroup brings X by boxes and packed weights by bulk copies, two multiply 64 rows of the batch each, and boxes take
# Y away.
BATCHED_SHARED_BYTES = 2 * (2 * 4096 + 4096) + 2 * 7168 + 4 * 8
BATCHED = """
constexpr int A = 2, B = 48, C = 80, D = 2, DEPTH = 32, STEPS = (C + DEPTH - 1) / DEPTH, STAGES = 2, GROUPS = 2;
constexpr unsigned X_BYTES = GROUPS * DEPTH * 128, W_BYTES = B * DEPTH * 2, STAGE = X_BYTES + 4096, Y_BYTES = 7168;

DEVICE unsigned long long descriptor(unsigned address, unsigned leading, unsigned stride, unsigned swizzle) {
    return static_cast<unsigned long long>((address & 0x3ffffu) >> 4) |
           static_cast<unsigned long long>(leading >> 4) << 16 |
           static_cast<unsigned long long>(stride >> 4) << 32 | static_cast<unsigned long long>(swizzle) << 62;
}

extern "C" __global__ __launch_bounds__(384, 1) void batched(const __grid_constant__ TensorMap x,
    const __grid_constant__ TensorMap y,
                                                             const unsigned char* packed, int batch) {
    const unsigned stages = shared_address(shared_memory), out = stages + STAGES * STAGE, full = out + GROUPS * Y_BYTES;
    const unsigned empty = full + 8 * STAGES;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, tiles_batch = (batch + 127) / 128, tiles =
        tiles_batch * A * D;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, 4 * GROUPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (group == GROUPS) {
        registers_decrease<40>();
        if (threadIdx.x != 128 * GROUPS) return;
        int round = 0;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int first = tile % tiles_batch * 128, j = tile / tiles_batch % D, i = tile / tiles_batch / D;
            for (int step = 0; step < STEPS; ++step, ++round) {
                const int s = round % STAGES;
                if (round >= STAGES) mbarrier_wait(empty + 8 * s, (round / STAGES - 1) % 2);
                mbarrier_arrive_expect(full + 8 * s, X_BYTES + W_BYTES);
                for (int g = 0; g < GROUPS; ++g) {
                    load_box(stages + s * STAGE + g * DEPTH * 128, x, full + 8 * s, first + 64 * g, j, step * DEPTH, i);
                }
                copy_bulk(stages + s * STAGE + X_BYTES, packed + ((i * D + j) * STEPS + step) * W_BYTES, W_BYTES,
                    full + 8 * s);
            }
        }
        return;
    }
    registers_increase<232>();
    float sums[B / 2];
    int round = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int first = tile % tiles_batch * 128, j = tile / tiles_batch % D, i = tile / tiles_batch / D;
        for (int step = 0; step < STEPS; ++step, ++round) {
            const int s = round % STAGES;
            mbarrier_wait(full + 8 * s, round / STAGES % 2);
            wgmma_hold(sums);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < DEPTH / 16; ++k) {
                const unsigned own_x = stages + s * STAGE + group * DEPTH * 128 + k * 2048;
                const unsigned own_w = stages + s * STAGE + X_BYTES + k * B * 32;
                wgmma_ss_bf16<true, false>(sums, descriptor(own_x, 0, 1024, 1), descriptor(own_w, 128, 256, 0),
                    step + k > 0);
            }
            wgmma_commit();
            wgmma_hold(sums);
            wgmma_wait<0>();
            wgmma_hold(sums);
            if (lane == 0) mbarrier_arrive(empty + 8 * s);
        }
        const unsigned own_out = out + group * Y_BYTES;
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
        barrier_sync(1 + group, 128);
        #pragma unroll
        for (int v = 0; v < B / 8; v += 2) {
            const int n = 8 * (v + lane / 16) + lane % 8, chunk = 2 * (threadIdx.x / 32 % 4) + lane / 8 % 2;
            const unsigned four[4] = {pack_bf16(sums[4 * v], sums[4 * v + 1]), pack_bf16(sums[4 * v + 2],
                sums[4 * v + 3]),
                                      pack_bf16(sums[4 * v + 4], sums[4 * v + 5]), pack_bf16(sums[4 * v + 6],
                                          sums[4 * v + 7])};
            stmatrix_x4<true>(own_out + n * 128 + ((chunk ^ n % 8) << 4), four);
        }
        fence_proxy_async();
        barrier_sync(1 + group, 128);
        if (threadIdx.x % 128 == 0) {
            store_box(y, own_out, first + 64 * group, j, 0, i);
            bulk_commit();
        }
    }
    if (threadIdx.x % 128 == 0) bulk_wait<0>();
}
"""
