"""Memory touched in an early launch before the grid before it was waited for."""

from tests.ptx.mistakes.mistake import BOX, EITHER, Mistake

WAIT = "wait_for_previous_grid();"
STORE = """    for (int i = threadIdx.x; i < bytes; i += 32) image[i] = s[i];
    for (int i = threadIdx.x; i < bytes; i += 32) s[i] ^= 1;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
"""
STORE_OF_ANOTHER = "    fence_proxy_async();\n    __syncthreads();\n    if (threadIdx.x == 1) {\n"

GRIDS = [
    Mistake(
        "grid before not waited for by a bulk copy",
        "grids",
        WAIT,
        "",
        "grid",
        r"copy_bulk before wait_for_previous_grid\(\)",
    ),
    Mistake(
        "grid before waited for by one thread alone",
        "grids",
        WAIT,
        f"if (threadIdx.x == 0) {WAIT}",
        "grid",
        r"access before wait_for_previous_grid\(\) to byte \d+ of argument 1",
        orders=EITHER,
    ),
    Mistake(
        "grid before waited for after a read",
        "grids",
        f"    {WAIT}",
        f"    const float early = y[threadIdx.x];\n    {WAIT}\n    y[threadIdx.x] = early;",
        "grid",
        r"access before wait_for_previous_grid\(\) to byte \d+ of argument 1",
        orders=EITHER,
    ),
    Mistake(
        "grid before not waited for by a block",
        "grids",
        f"    {WAIT}",
        f"    if (blockIdx.x == 2) return;\n    {WAIT}",
        "grid",
        "no thread of the block has called wait_for_previous_grid",
        orders=EITHER,
    ),
    Mistake(
        "grid before not waited for by a box", BOX, "full, 1);", "full, 1);  ", "grid", "load_box before", early=True
    ),
    Mistake(
        "grid before waited for by another thread than stores a box",
        BOX,
        "        mbarrier_init(full, 1);",
        f"        {WAIT}\n        mbarrier_init(full, 1);",
        "grid",
        "store_box before",
        also=(STORE, STORE_OF_ANOTHER),
        early=True,
    ),
    Mistake(
        "grid before not waited for by a copy",
        "arrivals",
        "full, 32);",
        "full, 32);  ",
        "grid",
        "copy_async before",
        early=True,
    ),
    Mistake(
        "barriers used before the block has met",
        "grids",
        "    __syncthreads();\n",
        "",
        "mbarrier",
        "nothing was initialised at byte 128",
        orders=("reverse", 1, 2),
    ),
    Mistake(
        "barriers used before the cluster has met",
        "cluster",
        "cluster_sync_relaxed();",
        WAIT,
        "mbarrier",
        "nothing was initialised at byte 256",
        orders=("forward", "reverse", 1, 2),
        early=True,
    ),
]
