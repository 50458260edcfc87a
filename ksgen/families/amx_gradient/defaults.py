"""Default constants of a gradient by matrix tiles before any search, chosen by rule: no processor with tiles has
measured them."""

from dataclasses import replace

from ksgen.families.amx.shape import INPUTS, PAIR
from ksgen.families.amx_gradient.shape import AmxGradientConstants, AmxGradientTiling
from ksgen.families.base import Limits
from ksgen.families.tiles import divide_up
from ksgen.families.vector.defaults import MANY
from ksgen.families.vector.planes import round_up
from ksgen.families.vector_gradient.defaults import shared_out
from ksgen.spec import KernelSpec

KEPT_BYTES = 768 * 1024  # of a work group's private buffer: with its sums it stays in the second-level cache
MOST_OUTPUTS = 256  # per j that share a copy of its inputs
BLOCKS = (512, 384, 256, 192, 128, 96, 64, 32)  # longer ones add to the sums in memory less often


def default(kernel: KernelSpec, limits: Limits, batch: int | None) -> AmxGradientConstants:
    """Choose constants by rule. Batches between two powers of two share their constants, and so their source."""
    batch = kernel.batch or 1 << ((batch or MANY) - 1).bit_length()
    outputs = min(MOST_OUTPUTS, round_up(kernel.pattern.b, PAIR))
    found = AmxGradientConstants(INPUTS, outputs, 1, 1)
    while found.outputs > PAIR and not _fits(AmxGradientTiling(kernel, found)):
        found = replace(found, outputs=found.outputs - PAIR)
    block = next((block for block in BLOCKS if _fits(AmxGradientTiling(kernel, replace(found, block=block)))), INPUTS)
    found = replace(found, block=min(block, round_up(batch, INPUTS)))
    shape = AmxGradientTiling(kernel, found)
    parts, pieces = shared_out(kernel, limits, batch, divide_up(batch, found.block), shape.part, shape.units)
    return replace(found, parts=parts, pieces=pieces)


def _fits(shape: AmxGradientTiling) -> bool:
    """Whether a block's operands stay in the second-level cache."""
    return shape.slot * 4 <= KEPT_BYTES
