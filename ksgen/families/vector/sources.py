"""Sources of the vector family that batches share, so that a kernel needs few of them.

Launches with the same tiles share a source, because blocks, parts and streaming stores are arguments of a launch.
`defaults.py` has constants by rule for each batch. A batch takes the tiles of an anchor instead, unless the cost model
expects its own to gain enough. Never renders, compiles or measures.
"""

from functools import lru_cache

from ksgen.families.base import Limits
from ksgen.families.tiles import divide_up
from ksgen.families.vector import defaults
from ksgen.families.vector.chain import AnyVectorConstants, VectorChainConstants
from ksgen.families.vector.cycles import LAUNCH, multiply_cycles
from ksgen.families.vector.shape import VectorTiling
from ksgen.spec import KernelSpec

# batches whose tiles others take; each may take those of the ones before it, of larger batches first
ANCHORS = (64, defaults.MANY, defaults.FEW, 4, 2)
CHAIN_ANCHORS = (defaults.FEW, defaults.MANY, 64, 4, 2)
# up to this anchor, a rule decides for smaller batches, because the cost model does not know copies of rows that a
# batch lacks; measured with 32 registers
SMALL = 4
# most inputs that a small batch may copy for such rows, relative to the weights; most d in batch-size-last
MOST_LACKED, MOST_LACKED_D = 0.035, 4
# expected time over that of its own tiles from which a batch has a source of its own, and from which the largest has
LEAST_GAIN, LEAST_GAIN_OF_MANY = 1.1, 1.05
REMEMBERED = 4096  # cached choices


@lru_cache(REMEMBERED)
def shared(kernel: KernelSpec, limits: Limits, batch: int) -> AnyVectorConstants:
    """Constants of a batch size, with the tiles of the first anchor that are about as fast at it, else with its own.

    Anchors are batch sizes whose tiles, and so sources, other batch sizes share. An anchor considers only the anchors
    before it, so the result does not depend on the order of calls.
    """
    own = defaults.default_by_rule(kernel, limits, batch)
    if kernel.batch:  # its source serves no other batch
        return own
    anchors = CHAIN_ANCHORS if kernel.is_chain else ANCHORS
    before = anchors[: anchors.index(batch)] if batch in anchors else anchors
    for anchor in sorted(before, key=lambda anchor: anchor < batch):  # tiles of larger batches first
        if anchor <= SMALL < batch:  # low tiles are 1.05 to 1.5 times slower for more rows: they read all weights again
            continue
        found = defaults.fitted(kernel, limits, shared(kernel, limits, anchor), batch)
        if is_about_as_fast(kernel, limits, own, found, batch, by_rule=batch < anchor <= SMALL):
            return found
    return own


def is_about_as_fast(
    kernel: KernelSpec, limits: Limits, own: AnyVectorConstants, found: AnyVectorConstants, batch: int, by_rule: bool
) -> bool:
    """Whether constants with the tiles of an anchor are about as fast at a batch as its own.

    `by_rule`: whether a rule for small batches decides, in place of the cost model.
    """
    if found == own and not by_rule:
        return True
    own_shapes, shapes = defaults.shapes_of(kernel, own), defaults.shapes_of(kernel, found)
    if found.streaming != own.streaming or not are_comparable(own_shapes, shapes, limits):
        return False
    pairs = list(zip(own_shapes, shapes, strict=True))
    if by_rule:
        lacked = ((other, other.tile_rows - max(batch, own.tile_rows)) for own, other in pairs)
        return limits.vector_registers == 32 and all(lacks_few_rows(*each, batch) for each in lacked)
    if not all(other.tile_rows <= max(own.tile_rows, batch) for own, other in pairs):
        return False
    most = LEAST_GAIN_OF_MANY if batch == defaults.MANY else LEAST_GAIN
    return expected_cycles(shapes, limits, batch) <= most * expected_cycles(own_shapes, limits, batch)


def source_constants(kernel: KernelSpec, constants: AnyVectorConstants) -> AnyVectorConstants:
    """Constants of the source for a launch with such constants: the same tiles, with those of `at_launch` by rule.

    Blocks are as long as those of a large batch, or longer if the launch's are. Private buffers and prefetches depend
    on that. Streaming stores are possible if the launch or a large batch uses them. Tiles of a small batch have none by
    rule, because they take time to compile. Of parts, the source depends only on whether they exceed planes.
    """
    shapes, batch = defaults.shapes_of(kernel, constants), kernel.batch or defaults.MANY
    last = shapes[-1]
    is_low = last.period == 1 and last.tile_rows <= (SMALL if last.is_along_outputs else 2 * defaults.FEW)
    may_stream = (kernel.is_chain or not is_low) and defaults.streams_outputs(last.kernel, last.constants, batch)
    streaming = max(constants.streaming, int(may_stream))
    if isinstance(constants, VectorChainConstants):
        block = max(constants.block, defaults.common_block(kernel, shapes, batch))
        return constants.changed(block=block, streaming=streaming)
    block, parts = max(constants.block, defaults.largest_block(last)), last.planes + 1 if last.is_split else 1
    return constants.changed(block=block, parts=parts, streaming=streaming)


def are_comparable(shapes: list[VectorTiling], others: list[VectorTiling], limits: Limits) -> bool:
    """Whether the cost model compares other constants with a batch's own.

    It does if lanes are along the same dimension, registers suffice, and both multiply pairs or neither does. Vectors
    that reach beyond a row's end must be copied by both or by neither.
    """
    return all(
        (own.constants.along, own.constants.pairs) == (other.constants.along, other.constants.pairs)
        and (own.constants.panel == other.constants.panel or not own.reaches)
        and other.registers <= max(own.registers, limits.vector_registers)
        for own, other in zip(shapes, others, strict=True)
    )


def lacks_few_rows(shape: VectorTiling, rows: int, batch: int) -> bool:
    """Whether a tile with `rows` more rows than a small batch copies few inputs for them.

    Then reading the weights dominates. In batch-size-last, inputs are copied one by one. As many rows as the batch has
    cost little with a small d and without pairs.
    """
    kernel, constants = shape.kernel, shape.constants
    if rows <= 0 or not shape.is_along_outputs:
        return rows <= 0
    if kernel.layout == "bsl":
        return rows <= batch and kernel.pattern.d <= MOST_LACKED_D and not constants.pairs
    copied = rows * kernel.pattern.in_features * max(1.0, constants.parts / shape.planes)
    return bool(copied <= MOST_LACKED * kernel.pattern.weight_count)


def expected_cycles(shapes: list[VectorTiling], limits: Limits, batch: int) -> float:
    """Cycles from the launch until the last core ends, if all tasks are equally long."""
    constants, cores = shapes[0].constants, limits.multiprocessors
    tasks = divide_up(batch, constants.block) * constants.parts
    cycles = sum(multiply_cycles(each, batch) - LAUNCH for each in shapes)
    return cycles * divide_up(tasks, cores) / tasks
