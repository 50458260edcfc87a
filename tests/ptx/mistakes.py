"""The cases with one mistake each, and how the emulator tells."""

from dataclasses import dataclass

WRONG = "wrong result"  # what is caught by the output alone


@dataclass(frozen=True)
class Mistake:
    """A right case, the words that were changed, and how that shows."""

    name: str
    case: str
    right: str
    wrong: str
    kind: str
    message: str = ""
    build: str = "none"
    order: str | int = "forward"


SHARED_A = "wgmma bf16 A 128 along m B 0 48"
REGISTERS = "wgmma bf16, A in registers"
MATRICES = "matrices load=False store=True"
MISTAKES = [
    # asynchronous data before it was waited for
    Mistake(
        "bulk copy not waited for",
        "ring",
        "mbarrier_wait(full + 8 * s, row / STAGES % 2);",
        "",
        "mbarrier",
        "more arrivals than the barrier's 1, while 128 bytes are due",
    ),
    Mistake(
        "bulk copy not waited for, as a race", "ring", "mbarrier_wait(full + 8 * s, row / STAGES % 2);", "", "race", "which thread", "race"
    ),
    Mistake(
        "copies' arrival not waited for",
        "arrivals",
        "mbarrier_wait(full, r % 2);",
        "",
        "async",
        "every thread exited while copy_async_arrive was under way",
    ),
    Mistake(
        "box not waited for", "box swizzle=128", "mbarrier_wait(full, 0);", "", "async", "every thread exited while load_box was under way"
    ),
    Mistake("sums read before the wait", SHARED_A, "wgmma_wait<0>();", "", WRONG),
    Mistake(
        "stage overwritten while it is read",
        "batched",
        "if (round >= STAGES) mbarrier_wait(empty + 8 * s, (round / STAGES - 1) % 2);",
        "",
        "mbarrier",
        "more arrivals than the barrier's 1, while 11264 bytes are due",
    ),
    Mistake(
        "wait for the phase before",
        "ring",
        "mbarrier_wait(full + 8 * s, row / STAGES % 2);",
        "mbarrier_wait(full + 8 * s, 1 - row / STAGES % 2);",
        "mbarrier",
        "more arrivals",
    ),
    Mistake(
        "output buffer overwritten while a box leaves",
        "batched",
        "if (threadIdx.x % 128 == 0) bulk_wait_read<0>();\n        barrier",
        "barrier",
        "race",
        "which",
        "race",
    ),
    Mistake(
        "exit before a box has left",
        "box swizzle=128",
        "bulk_wait_read<0>();",
        "",
        "async",
        "the thread exits while store_box may still read",
    ),
    # fences and proxies
    Mistake(
        "box of unfenced writes",
        "box swizzle=128",
        "fence_proxy_async();",
        "",
        "proxy",
        "store_box at line .* reads byte .* no fence_proxy_async since",
    ),
    Mistake("wgmma of unfenced writes", SHARED_A, "fence_proxy_async();", "", "proxy", "wgmma at line .* reads byte"),
    Mistake(
        "epilogue without its fence", "batched", "        fence_proxy_async();\n        barrier", "        barrier", "proxy", "store_box"
    ),
    Mistake("mbarrier that the engine has not seen", "ring", "fence_mbarrier_init();", "", "mbarrier", "no fence_mbarrier_init"),
    Mistake("wgmma without a fence", SHARED_A, "wgmma_fence();", "", "wgmma", "no wgmma_fence since the start"),
    Mistake(
        "A's registers without a fence",
        REGISTERS,
        "        wgmma_fence();\n",
        "        if (step == 0) wgmma_fence();\n",
        "wgmma",
        "no wgmma_fence since",
    ),
    # registers in flight
    Mistake(
        "sums touched in flight",
        SHARED_A,
        "wgmma_commit();",
        "wgmma_commit();\n    sums[3] = 1;",
        "wgmma",
        "the sums of the wgmma at line .* were written",
    ),
    Mistake(
        "A touched in flight",
        REGISTERS,
        "wgmma_commit();",
        "wgmma_commit();\n        a[step % 2][1] = 7;",
        "wgmma",
        "the registers that hold A of the wgmma at line",
    ),
    Mistake("A loaded too early", REGISTERS, "a[step % 2][i] =", "a[0][i] =", "wgmma", "hold A of the wgmma"),
    # barriers that never complete
    Mistake(
        "no arrival at empty",
        "ring",
        "mbarrier_arrive(empty + 8 * s);",
        "",
        "deadlock",
        r"threads 0 wait for mbarrier_wait at line \d+ \(phase 0: 32 of 32 arrivals and 0 bytes are missing\)",
    ),
    Mistake(
        "too many bytes expected",
        "ring",
        "4 * ROW);\n            copy",
        "4 * ROW + 16);\n            copy",
        "deadlock",
        "threads 32-63 wait for mbarrier_wait .*0 of 1 arrivals and 16 bytes are missing",
    ),
    Mistake(
        "a count of half the arrivals",
        "ring",
        "mbarrier_init(empty + 8 * s, 32);",
        "mbarrier_init(empty + 8 * s, 16);",
        "deadlock",
        "16 of 16 arrivals",
    ),
    Mistake("never initialised", "ring", "mbarrier_init(empty + 8 * s, 32);", "", "mbarrier", "nothing was initialised at byte"),
    Mistake(
        "initialised twice", "ring", "mbarrier_init(empty + 8 * s, 32);", "mbarrier_init(full, 1);", "mbarrier", "holds a barrier already"
    ),
    Mistake(
        "written over",
        "ring",
        "    __syncthreads();\n",
        "    __syncthreads();\n    stages[STAGES * ROW] = 0;\n",
        "mbarrier",
        "the barrier at byte 256 .* was written over",
    ),
    Mistake(
        "one barrier in two places of the ring", "ring", "row % STAGES;\n            if", "0;\n            if", "mbarrier", "more arrivals"
    ),
    # collectives
    Mistake(
        "wgmma by three of four warps",
        SHARED_A,
        "wgmma_fence();",
        "if (threadIdx.x >= 96) return;\n    wgmma_fence();",
        "deadlock",
        "warp 3 has not committed",
    ),
    Mistake(
        "wgmma by some lanes",
        SHARED_A,
        "wgmma_fence();",
        "if (threadIdx.x == 5) return;\n    wgmma_fence();",
        "collective",
        "wait for wgmma_fence",
    ),
    Mistake("lanes with two descriptors", SHARED_A, "b + base +", "b + base + (threadIdx.x == 9) +", "collective", "lanes 0 and 9 differ"),
    Mistake(
        "ldmatrix by some lanes",
        MATRICES,
        "unsigned words[4];",
        "unsigned words[4];\n    if (threadIdx.x == 7) return;",
        "collective",
        "wait for ldmatrix",
    ),
    Mistake("mma by some lanes", "mma f16", "float sums[4] =", "if (g == 2) return;\n    float sums[4] =", "collective", "wait for mma"),
    # memory
    Mistake(
        "ldmatrix of a misaligned row",
        MATRICES,
        "16 * threadIdx.x;",
        "16 * threadIdx.x + 2 * (threadIdx.x == 3);",
        "misaligned",
        "ldmatrix at byte 50 ",
    ),
    Mistake(
        "stmatrix past the end",
        MATRICES,
        "stmatrix_x4<TRANSPOSES_STORE>(row",
        "stmatrix_x4<TRANSPOSES_STORE>(row + 16",
        "out-of-bounds",
        "stmatrix of 16 bytes at byte 512",
    ),
    Mistake(
        "neighbour's matrix without a barrier",
        MATRICES,
        "s[i] = x[i];\n    __syncwarp();",
        "s[i] = x[i];",
        "race",
        "ldmatrix|which",
        "race",
    ),
    Mistake("bulk copy of 8 bytes", "ring", "x + row * ROW, 4 * ROW, full", "x + row * ROW, 8, full", "misaligned", "copy_bulk of 8 bytes"),
    Mistake(
        "bulk copy past the end",
        "ring",
        "x + row * ROW, 4 * ROW, full",
        "x + row * ROW + 4, 4 * ROW, full",
        "out-of-bounds",
        "copy_bulk of 128 bytes from byte 1040",
    ),
    Mistake(
        "box at 64 bytes",
        "box swizzle=128",
        "load_box(shared_address(s)",
        "load_box(shared_address(s) + 64",
        "misaligned",
        "load_box at byte 64",
    ),
    Mistake(
        "box past the end of shared memory",
        "box swizzle=128",
        "load_box(shared_address(s)",
        "load_box(shared_address(s) + 1024",
        "out-of-bounds",
        "load_box of 768 bytes",
    ),
    Mistake(
        "a box of three coordinates",
        "box swizzle=128",
        "x0, x1, x2, x3);\n    }\n    __syncthreads();\n    mbarrier",
        "x0, x1, x2);\n    }\n    __syncthreads();\n    mbarrier",
        "tensor-map",
        "3 coordinates for a map of 4 dimensions",
    ),
    Mistake("descriptor past the end", SHARED_A, "b + base +", "b + base + 700 +", "out-of-bounds", "wgmma at line .* reads byte"),
    Mistake(
        "sums never set",
        "mma f16",
        " = {y[g * 8 + 2 * t], y[g * 8 + 2 * t + 1], y[(g + 8) * 8 + 2 * t], y[(g + 8) * 8 + 2 * t + 1]};",
        ";",
        WRONG,
    ),
    # registers and clusters
    Mistake(
        "more registers than there are",
        "batched",
        "registers_increase<232>();",
        "registers_increase<240>();",
        "deadlock",
        r"registers_increase at line \d+ \(to 240 a thread; the block holds \d+ of 64512\)",
    ),
    Mistake(
        "an odd number of registers",
        "batched",
        "registers_increase<232>();",
        "registers_increase<230>();",
        "registers",
        "registers_increase<230>: multiples of 8",
    ),
    Mistake(
        "a block leaves too early",
        "cluster",
        "= sum;\n    cluster_sync();",
        "= sum;\n    if (blockIdx.x % 2 == 0) cluster_sync();",
        "deadlock",
        "cluster block 0: threads 0-31 wait for cluster_sync",
    ),
    Mistake("blocks that do not exist", "cluster", "128, full, 3);", "128, full, 7);", "cluster", "for blocks 0x7 of a cluster of 2"),
    Mistake(
        "the other block is not told",
        "cluster",
        "if (threadIdx.x < 2) mbarrier_arrive_cluster(cluster_address(empty, threadIdx.x));",
        "if (threadIdx.x < 2) mbarrier_arrive_cluster(cluster_address(empty, rank));",
        "race",
        "of cluster block 1",
        "race",
    ),
]
