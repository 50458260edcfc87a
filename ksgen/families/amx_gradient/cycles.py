"""Estimated cycles of a processor's cores for a gradient by matrix tiles: terms of the cost model. Never measured."""

from ksgen.families.amx.cycles import DOT, ITEM, TILE_BYTES
from ksgen.families.amx.shape import INPUTS, TILE_SUMS
from ksgen.families.amx_gradient.shape import AmxGradientTiling
from ksgen.families.tiles import divide_up
from ksgen.families.vector.cycles import LAUNCH, SECOND_LEVEL_BYTES, TASK


def dots(shape: AmxGradientTiling, batch: int) -> int:
    """Products of two tiles in one launch."""
    return divide_up(batch, INPUTS) * shape.units * shape.tiles * shape.products.products


def gradient_cycles(shape: AmxGradientTiling, batch: int) -> float:
    """Cycles of all cores together, for one launch."""
    constants, pattern = shape.constants, shape.kernel.pattern
    blocks, parts = divide_up(batch, constants.block), shape.parts(batch)
    inputs = dots(shape, batch) / 2 * TILE_BYTES * shape.products.parts / shape.products.products  # outputs stay in the first-level cache
    sums = blocks * shape.units * shape.tiles * TILE_SUMS * 4 * 2
    sharing = max(1.0, constants.pieces / shape.planes)  # pieces that each copy a plane's inputs
    copied = ITEM * batch * (sharing * pattern.in_features + pattern.out_features)
    added = parts * shape.part / 8
    multiplied = max(DOT * dots(shape, batch), inputs / SECOND_LEVEL_BYTES) + sums / SECOND_LEVEL_BYTES
    return multiplied + copied + added + TASK * (blocks + parts * constants.pieces) + LAUNCH
