"""Estimated cycles of a processor's cores for a gradient: as `vector/cycles.py`, for sums over the batch."""

from ksgen.families.tiles import divide_up
from ksgen.families.vector.cycles import (
    COPY,
    ELEMENT,
    FIRST_LEVEL_BYTES,
    LAUNCH,
    SECOND_LEVEL_BYTES,
    TASK,
    TILE,
    TRANSPOSE,
    tile_of,
)
from ksgen.families.vector_gradient.shape import VectorGradientTiling

ACROSS = 6  # cycles to add up the lanes of a sum


def gradient_cycles(shape: VectorGradientTiling, batch: int) -> float:
    """Cycles of all cores together, for one launch."""
    constants, pattern = shape.constants, shape.kernel.pattern
    blocks, tiles = divide_up(batch, constants.block), shape.columns * shape.rows
    block = min(divide_up(divide_up(batch, shape.unit), blocks) * shape.unit, batch)  # as the kernel shares them out
    tile, lanes = tile_of(shape), constants.lanes
    steps = divide_up(block, shape.unit)
    after = 2 if shape.is_along_outputs else ACROSS  # sums are read and written, or added up first
    outputs = steps * constants.width * lanes * shape.real_bytes  # of a column, which its tiles share
    inputs = steps * constants.height * (1 if shape.is_along_outputs else lanes) * shape.real_bytes
    again = 1 if outputs + inputs <= FIRST_LEVEL_BYTES else shape.rows
    missed = shape.columns * outputs * again + tiles * inputs
    sharing = max(1.0, constants.pieces / divide_up(shape.columns, shape.plane_columns))  # pieces that each copy a plane's inputs
    moved = block * (sharing * pattern.in_features + pattern.out_features)
    is_scattered = shape.is_along_outputs and shape.kernel.layout == "bsl"
    copied = moved * (ELEMENT if is_scattered else (TRANSPOSE if shape.is_transposed else COPY) / lanes)
    parts = shape.parts(batch)
    added = parts * shape.part / lanes * 2
    each = tiles * (steps * tile.step + after * tile.sums + TILE) + missed / SECOND_LEVEL_BYTES + copied
    return blocks * each + added + TASK * (blocks + parts * constants.pieces) + LAUNCH
