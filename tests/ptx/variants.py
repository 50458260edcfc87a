"""The cases with one change each after which they are as right as before: the emulator lets them pass."""

from dataclasses import dataclass, field
from typing import Any

from tests.ptx.mistakes.clusters import BRING
from tests.ptx.mistakes.mistake import BOX, REGISTER_A, SHARED_A


@dataclass(frozen=True)
class Variant:
    """A right case and the words that were changed."""

    name: str
    case: str
    was: str
    becomes: str
    builds: tuple[str, ...] = ("none", "race")
    launch: dict[str, Any] = field(default_factory=dict)


VARIANTS = [
    Variant(
        "a producer returns before the blocks meet",
        "cluster",
        "const unsigned rank = cluster_rank();",
        "const unsigned rank = cluster_rank();\n    if (threadIdx.x >= 32) return;",
        launch={"block": 64},
    ),
    Variant(
        "who touches no memory need not wait for the grid before",
        "grids",
        "    wait_for_previous_grid();",
        "    if (threadIdx.x >= 32) return;\n    wait_for_previous_grid();",
        launch={"block": 64},
    ),
    Variant(
        "nothing to wait for where a launch does not begin early",
        "grids",
        "    wait_for_previous_grid();",
        "    ",
        launch={"early": False},
    ),
    Variant("a fence of the proxies shows the barriers too", "ring", "fence_mbarrier_init();", "fence_proxy_async();"),
    Variant(
        "copies to both blocks by their addresses",
        "cluster",
        BRING,
        "for (int to = 0; to < 2; ++to) {\n"
        "                const unsigned place = cluster_address(shared_address(row + 32 * rank), to);\n"
        "                copy_bulk(place, x + 64 * r + 32 * rank, 128, cluster_address(full, to));\n"
        "            }",
    ),
    Variant(
        "copies that are waited for in addition",
        "arrivals",
        "copy_async_arrive(full);",
        "copy_async_commit();\n        copy_async_arrive(full);\n        copy_async_wait<0>();\n        sum += 0 * "
        "row[threadIdx.x];",
    ),
    Variant(
        "copies that are waited for in addition, afterwards",
        "arrivals",
        "copy_async_arrive(full);\n        mbarrier_wait(full, r % 2);",
        "copy_async_commit();\n        copy_async_arrive(full);\n        mbarrier_wait(full, r % 2);\n        "
        "copy_async_wait<0>();",
    ),
    Variant(
        "who stores fences for all, after the barrier",
        BOX,
        "fence_proxy_async();\n    __syncthreads();\n    if (threadIdx.x == 0) {",
        "__syncthreads();\n    if (threadIdx.x == 0) {\n        fence_proxy_async();",
    ),
    Variant(
        "who multiplies fences, after the barrier",
        SHARED_A,
        "fence_proxy_async();\n    __syncthreads();",
        "__syncthreads();\n    fence_proxy_async();",
    ),
    Variant(
        "one warp fences for all, between barriers",
        SHARED_A,
        "fence_proxy_async();\n    __syncthreads();",
        "__syncthreads();\n    if (threadIdx.x < 32) fence_proxy_async();\n    __syncthreads();",
    ),
    Variant(
        "load over fenced writes",
        BOX,
        "mbarrier_init(full, 1);",
        "s[5] = 1;\n        fence_proxy_async();\n        mbarrier_init(full, 1);",
    ),
    Variant(
        "unset sums, after the fence",
        SHARED_A,
        "    float sums[SUMS];\n    for (int i = 0; i < SUMS; ++i) sums[i] = 0;\n    wgmma_hold(sums);\n    "
        "wgmma_fence();\n",
        "    wgmma_fence();\n    float sums[SUMS];\n",
    ),
    Variant(
        "a fence for each of a group's registers",
        f"{REGISTER_A}, 2 at once",
        "            wgmma_hold(own);\n",
        "            wgmma_hold(own);\n            wgmma_fence();\n",
    ),
    Variant(
        "warps that commit their products one by one or together",
        SHARED_A,
        "step > 0);",
        "step > 0);\n        if (threadIdx.x < 32) wgmma_commit();",
    ),
]
