"""Default constants of the vector family that batches share, so that a kernel needs few sources.

`defaults.py` has constants by rule for each batch. A batch takes the constants of an anchor instead, unless the cost
model expects its own to gain enough. Never renders, compiles or measures.
"""

from functools import lru_cache

from ksgen.families.base import Limits
from ksgen.families.chains import own_of_factors
from ksgen.families.tiles import divide_up
from ksgen.families.vector.chain import VectorChainConstants
from ksgen.families.vector.cycles import LAUNCH, multiply_cycles
from ksgen.families.vector.defaults import FEW, MANY, alike, default_by_rule
from ksgen.families.vector.shape import VectorConstants, VectorTiling
from ksgen.spec import KernelSpec

# batches whose constants others take, in the order in which these are considered
ANCHORS = (MANY, FEW, 64, 4, 2)
CHAIN_ANCHORS = (FEW, MANY, 4, 2)  # short blocks are as fast as long ones where intermediates stay in the cache
MOST_REPEATED = 4  # most d with which a tile of four rows copies few inputs for rows that a batch does not have
LEAST_GAIN = 1.1  # expected time over that of its own constants from which a batch has a source of its own
REMEMBERED = 4096  # cached choices

AnyVectorConstants = VectorConstants | VectorChainConstants


def default(kernel: KernelSpec, limits: Limits, batch: int | None) -> AnyVectorConstants:
    """Default constants at a batch; None stands for a large one."""
    return shared(kernel, limits, kernel.batch or alike(batch or MANY))


@lru_cache(REMEMBERED)
def shared(kernel: KernelSpec, limits: Limits, batch: int) -> AnyVectorConstants:
    """Constants of the first anchor that are about as fast at a batch as its own; its own if there is none.

    An anchor considers only the anchors before it, so the order of calls makes no difference.
    """
    own = default_by_rule(kernel, limits, batch)
    if kernel.batch:  # its source serves no other batch
        return own
    anchors, least = CHAIN_ANCHORS if kernel.is_chain else ANCHORS, least_of(kernel)
    own_shapes = shapes_of(kernel, own)
    most = LEAST_GAIN * expected_cycles(own_shapes, limits, batch)
    for anchor in anchors[: anchors.index(batch)] if batch in anchors else anchors:
        found = shared(kernel, limits, anchor)
        shapes = shapes_of(kernel, found)
        may_share = found.streaming == own.streaming and fits_registers(shapes, limits)
        if not may_share or not are_comparable(own_shapes, shapes, max(batch, least)):
            continue
        if batch < least == anchor or expected_cycles(shapes, limits, batch) <= most:
            return found
    return own


def least_of(kernel: KernelSpec) -> int:
    """Batch whose tiles serve all smaller ones: reading the weights takes longer than multiplying the rows."""
    return 4 if kernel.layout == "bsf" and all(each.d <= MOST_REPEATED for each in kernel.factors) else 2


def shapes_of(kernel: KernelSpec, constants: AnyVectorConstants) -> list[VectorTiling]:
    return [VectorTiling(*each) for each in own_of_factors(kernel, constants)]


def are_comparable(shapes: list[VectorTiling], others: list[VectorTiling], most_rows: int) -> bool:
    """Whether the cost model compares other constants with a batch's own.

    Lanes must be along the same dimension. Vectors that reach beyond a row's end must be copied by both or by neither.
    The model underestimates rows that a batch lacks, and inputs that more parts copy again.
    """
    return all(
        own.constants.along == other.constants.along
        and (own.constants.panel == other.constants.panel or not own.reaches)
        and other.tile_rows <= max(own.tile_rows, most_rows)
        and (other.is_along_outputs or other.constants.parts <= max(own.constants.parts, other.planes))
        for own, other in zip(shapes, others, strict=True)
    )


def fits_registers(shapes: list[VectorTiling], limits: Limits) -> bool:
    return max(each.registers for each in shapes) <= limits.vector_registers


def expected_cycles(shapes: list[VectorTiling], limits: Limits, batch: int) -> float:
    """Cycles until the last core ends, if all tasks are equally long."""
    constants, cores = shapes[0].constants, limits.multiprocessors
    tasks = divide_up(batch, constants.block) * constants.parts
    cycles = sum(multiply_cycles(each, batch) - LAUNCH for each in shapes)
    return LAUNCH + cycles * divide_up(tasks, cores) / tasks
