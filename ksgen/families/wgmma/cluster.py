"""Clusters of blocks: their tiles, the parts that blocks load for each other, and the template variables of clusters.

A cluster is `cluster_batch` x `cluster_out` blocks with neighbouring tiles along the batch and along the outputs.
Blocks of one batch tile multiply the same X, and blocks of one output tile the same weights. Each loads a part for all
of them, so that a cluster reads it through the L2 cache once.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, named
from ksgen.families.rules import Rule
from ksgen.families.wgmma.block import Block
from ksgen.spec import KernelSpec

MOST_BLOCKS = 8  # largest cluster that every GPU with clusters can launch
# blocks of a cluster that a search tries; any stage of weights divides into ALONG_BATCH equal parts of whole 16 bytes
ALONG_BATCH, ALONG_OUT = (1, 2, 4, 8), (1, 2, 3, 4, 8)
BOX_ROWS = 8  # rows after which a box's swizzle repeats; parts are whole multiples of them
MOST_BY_DEFAULT = 4  # blocks of a default's cluster: an H100 took twice the expected time with clusters of eight
LEAST_SHARED = 0.2  # least share of a block's reads for which a search tries clusters


def rules(of: Callable[[Any, Any], Block]) -> tuple[Rule[Any], ...]:
    """Rules of clusters. `of` gives the block of a kernel and its constants."""

    def has_parts(kernel: KernelSpec, constants: Any) -> bool:
        rows = BOX_ROWS * int(constants.cluster_out)
        return constants.cluster_out == 1 or of(kernel, constants).box_rows % rows == 0

    return (
        Rule(
            "a cluster is at most 8 blocks, of them 1, 2, 4 or 8 along the batch",
            lambda k, c: c.cluster_batch in ALONG_BATCH and of(k, c).cluster <= MOST_BLOCKS,
        ),
        Rule(
            "cluster_out is a divisor of the tiles along the outputs",
            lambda k, c: of(k, c).tiles_out % int(c.cluster_out) == 0,
            lambda k, c: of(k, c).tiles_out,
        ),
        Rule("cluster_out divides the boxes of X into whole eights of rows", has_parts),
        Rule("cluster_out is 1 where X is resident", lambda k, c: c.cluster_out == 1 or of(k, c).passes == 1),
        Rule(
            "cluster_out is 1 where an order divides an index of the inputs",
            lambda k, c: c.cluster_out == 1 or not k.pattern.inputs.is_divided,
        ),
    )


def tried(block: Block, most: int) -> Iterator[tuple[int, int]]:
    """Yield the clusters of at most `most` blocks that a search tries if the rules allow them.

    They may have several blocks along the batch if weights are at least a fifth of each block's reads. They may have
    several along the outputs if X is.
    """
    x_bytes, w_bytes = block.x_bytes, block.passes * block.w_bytes
    least = LEAST_SHARED * (x_bytes + w_bytes)
    sizes = product(ALONG_BATCH if w_bytes >= least else (1,), ALONG_OUT if x_bytes >= least else (1,))
    return (each for each in sizes if each[0] * each[1] <= most)


def variables(block: Block, image: str) -> dict[str, Any]:
    """Template variables of clusters; `image` names the layout of X in shared memory."""
    is_clustered, constants = block.cluster > 1, block.constants
    return {
        "variants": (image, "cluster") if is_clustered else (image,),
        "blocks": "clustered" if is_clustered else "alone",
        "find_tile": "find_tile_in_cluster" if is_clustered else "find_tile",
        "copy_weights": "copy_part" if constants.cluster_batch > 1 else "copy_bulk",
        "load_x": "load_part" if constants.cluster_out > 1 else "load_box",
    }


def constexprs(block: Block) -> list[Constexpr]:
    if block.cluster == 1:
        return []
    constants = block.constants
    adjacent = Constexpr(
        "ADJACENT_J",
        block.tiles_d if block.is_bsf else 1,
        "tiles along j if these are neighbours in the order of tiles, else 1",
    )
    return [
        named(constants, "CLUSTER_BATCH", "blocks of a cluster along the batch: they share W"),
        named(constants, "CLUSTER_OUT", "blocks of a cluster along the outputs: they share X"),
        named(block, "CLUSTER", "blocks of a cluster"),
        *([adjacent] if block.passes == 1 else []),
    ]
