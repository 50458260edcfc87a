"""What a warp, or a warpgroup, has to do together and alike."""

from tests.ptx.mistakes.mistake import EITHER, MATRICES, SHARED_A, Mistake

COLLECTIVES = [
    Mistake(
        "wgmma by three of four warps",
        SHARED_A,
        "wgmma_fence();",
        "if (threadIdx.x >= 96) return;\n    wgmma_fence();",
        "deadlock",
        "warp 3 has come to 0 of 2 wgmma",
        orders=EITHER,
    ),
    Mistake(
        "wgmma by some lanes",
        SHARED_A,
        "wgmma_fence();",
        "if (threadIdx.x == 5) return;\n    wgmma_fence();",
        "collective",
        "wait for wgmma_fence",
    ),
    Mistake(
        "a product less in one warp",
        SHARED_A,
        "step < STEPS;",
        "step < STEPS - (threadIdx.x >= 96);",
        "deadlock",
        "warp 3 has come to 1 of 2 wgmma",
        orders=EITHER,
    ),
    Mistake(
        "lanes with two descriptors",
        SHARED_A,
        "b + base +",
        "b + base + (threadIdx.x == 9) +",
        "collective",
        "lanes 0 and 9 differ",
    ),
    Mistake(
        "warps with two descriptors",
        SHARED_A,
        "b + base +",
        "b + base + (threadIdx.x / 32 == 2) +",
        "collective",
        "wgmma differs from another warp's of the warpgroup in B's descriptor",
        orders=EITHER,
    ),
    Mistake(
        "warps of which one adds",
        SHARED_A,
        "step > 0);",
        "step > 0 || threadIdx.x < 32);",
        "collective",
        "wgmma differs from another warp's of the warpgroup in whether it adds",
        orders=EITHER,
    ),
    Mistake(
        "ldmatrix by some lanes",
        MATRICES,
        "unsigned words[4];",
        "unsigned words[4];\n    if (threadIdx.x == 7) return;",
        "collective",
        "wait for ldmatrix",
    ),
    Mistake(
        "mma by some lanes",
        "mma f16",
        "float sums[4] =",
        "if (g == 2) return;\n    float sums[4] =",
        "collective",
        "wait for mma",
    ),
]
