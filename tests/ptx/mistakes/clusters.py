"""Blocks that leave too early, and addresses of other blocks where none will do."""

from tests.ptx.mistakes.mistake import EITHER, Mistake

LAST_WAIT = "= sum;\n    if (threadIdx.x == 0) mbarrier_wait(empty, (rows - 1) % 2);"
LAST_WAIT_OF_ONE = LAST_WAIT.replace("threadIdx.x == 0", "threadIdx.x == 0 && blockIdx.x % 2 == 0")
TELL_BOTH = "if (threadIdx.x < 2) mbarrier_arrive_cluster(cluster_address(empty, threadIdx.x));"
BRING = "copy_bulk_multicast(shared_address(row + 32 * rank), x + 64 * r + 32 * rank, 128, full, 3);"

CLUSTERS = [
    Mistake(
        "blocks leave when they are ready",
        "cluster",
        LAST_WAIT,
        "= sum;",
        "cluster",
        r"mbarrier_arrive_cluster reaches cluster block \d, whose threads have all exited",
        orders=EITHER,
    ),
    Mistake(
        "blocks leave when they are ready, as a race",
        "cluster",
        LAST_WAIT,
        "= sum;",
        "race|cluster",
        "whose threads have all exited|a block that may have ended|the block may end before",
        "race",
        EITHER,
    ),
    Mistake(
        "a block leaves too early",
        "cluster",
        LAST_WAIT,
        LAST_WAIT_OF_ONE,
        "cluster",
        "block 1, whose threads have",
        orders=("reverse",),
    ),
    Mistake(
        "a block leaves too early, as a race",
        "cluster",
        LAST_WAIT,
        LAST_WAIT_OF_ONE,
        "race",
        "the block may end before thread 1 read at line .* at byte 264 .* of cluster block 1",
        "race",
    ),
    Mistake(
        "blocks leave after a barrier that orders no memory",
        "cluster",
        LAST_WAIT,
        "= sum;\n    cluster_sync_relaxed();",
        "race",
        "the block may end before",
        "race",
        EITHER,
    ),
    Mistake(
        "a block leaves before its copy lands",
        "cluster",
        "mbarrier_wait(full, r % 2);",
        "if (rank == 1 && r == rows - 1) return;\n        mbarrier_wait(full, r % 2);",
        "cluster",
        "copy_bulk reaches cluster block 1, whose threads have all exited",
        orders=EITHER,
    ),
    Mistake(
        "blocks that do not exist",
        "cluster",
        "128, full, 3);",
        "128, full, 7);",
        "cluster",
        "for blocks 0x7 of a cluster of 2",
    ),
    Mistake(
        "a copy for no block",
        "cluster",
        "128, full, 3);",
        "128, full, 0);",
        "cluster",
        "for blocks 0x0 of a cluster of 2",
    ),
    Mistake(
        "a copy to one block with the barrier of another",
        "cluster",
        BRING,
        BRING.replace(
            "_multicast(shared_address(row + 32 * rank)", "(cluster_address(shared_address(row + 32 * rank), 1 - rank)"
        ).replace(", 3)", ")"),
        "cluster",
        "copy_bulk to cluster block 1 with a barrier of block 0",
    ),
    Mistake(
        "an arrival by a block's own instruction at another block",
        "cluster",
        TELL_BOTH,
        TELL_BOTH.replace("arrive_cluster", "arrive"),
        "cluster",
        "mbarrier_arrive at byte 264 of .* by an address of the cluster's",
    ),
    Mistake(
        "a wait at another block",
        "cluster",
        "mbarrier_wait(full, r % 2);",
        "mbarrier_wait(cluster_address(full, 1 - rank), r % 2);",
        "cluster",
        "mbarrier_wait at byte 256 of .* by an address of the cluster's",
    ),
    Mistake(
        "a box stored from another block",
        "panels",
        "store_box(to, shared_address(s + half * bytes)",
        "store_box(to, cluster_address(shared_address(s + half * bytes), 1 - rank)",
        "cluster",
        "store_box at byte 0 of .* by an address of the cluster's",
    ),
    Mistake(
        "the other block is not told",
        "cluster",
        TELL_BOTH,
        TELL_BOTH.replace("threadIdx.x));", "rank));"),
        "race",
        "of cluster block 1",
        "race",
    ),
]
