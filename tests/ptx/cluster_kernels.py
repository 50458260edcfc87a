"""The texts of kernels for clusters of blocks."""

# Each block of a cluster of two brings half of the row, for both.
CLUSTER = """
extern "C" __global__ __cluster_dims__(2, 1, 1) void halves(const float* x, float* y, int rows) {
    float* const row = reinterpret_cast<float*>(shared_memory);
    const unsigned full = shared_address(shared_memory + 256), empty = full + 8;
    const unsigned rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 2);
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    float sum = 0;
    for (int r = 0; r < rows; ++r) {
        if (threadIdx.x == 0) {
            if (r > 0) mbarrier_wait(empty, (r - 1) % 2);
            mbarrier_arrive_expect(full, 256);
            copy_bulk_multicast(shared_address(row + 32 * rank), x + 64 * r + 32 * rank, 128, full, 3);
        }
        mbarrier_wait(full, r % 2);
        sum += row[threadIdx.x] + row[threadIdx.x + 32];
        __syncwarp();
        if (threadIdx.x < 2) mbarrier_arrive_cluster(cluster_address(empty, threadIdx.x));
    }
    y[blockIdx.x * 32 + threadIdx.x] = sum;
    if (threadIdx.x == 0) mbarrier_wait(empty, (rows - 1) % 2);
}
"""

# A box of three dimensions for each block of a cluster of two, of which either brings a half for both.
PANELS = """
extern "C" __global__ __cluster_dims__(2, 1, 1) void panels(const __grid_constant__ TensorMap from,
    const __grid_constant__ TensorMap to,
                                                            int bytes) {
    unsigned char* const s = shared_memory;
    const unsigned full = shared_address(s + 2 * bytes), rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, 2 * bytes);
        load_box_multicast(shared_address(s + rank * bytes), from, full, 3, 0, static_cast<int>(rank), 0);
    }
    mbarrier_wait(full, 0);
    for (int i = threadIdx.x; i < 2 * bytes; i += 32) s[i] ^= 1;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int half = 0; half < 2; ++half) store_box(to, shared_address(s + half * bytes), 0, half,
            4 * static_cast<int>(rank));
        bulk_commit();
        bulk_wait_read<0>();
    }
}
"""
