"""Default constants of a processor's gradients before any search, chosen by rule."""

from dataclasses import replace
from itertools import takewhile

from ksgen.families.amx.shape import INPUTS, PAIR
from ksgen.families.base import Limits
from ksgen.families.cpu_gradient.tiles import AmxGradientConstants, AmxGradientTiling
from ksgen.families.cpu_gradient.vectors import (
    PANEL_BYTES,
    VectorGradientConstants,
    VectorGradientTiling,
    vectors_of_outputs,
)
from ksgen.families.tiles import divide_up
from ksgen.families.vector.defaults import complex_registers, cost, prefers_outputs
from ksgen.families.vector.planes import lanes_of, round_up
from ksgen.spec import KernelSpec

TASKS = 4  # work groups per core, so that other cores can take the work of one that starts late
COLUMN_BYTES = 24 * 1024  # bytes of dY that stay in an L1 cache while lanes are along the outputs
# the same with vectors of AVX2, and bytes of a block's inputs, but at least LEAST_ROWS rows
AVX2_COLUMN_BYTES, AVX2_INPUT_BYTES, LEAST_ROWS = 16 * 1024, 128 * 1024, 128
AVX2_ROWS = 48  # most rows of a block with vectors of AVX2, if the inputs are columns
# bytes of a work group's private buffer with matrix tiles: it stays in the L2 cache, together with its sums
KEPT_BYTES = 768 * 1024
MOST_OUTPUTS = 256  # outputs per j that share a copy of the inputs
# rows of the batch per block with matrix tiles: longer blocks add to the sums in memory less often
BLOCKS = (512, 384, 256, 192, 128, 96, 64, 32)
# least and most vectors per block, if lanes are along the batch: enough to amortize adding up across lanes, few enough
# for an L1 cache
VECTORS = (16, 64)
# rows of the batch up to which a tile's height fills whole squares: storing the weights takes longer than multiplying
FEW_ROWS = 32
SPARE = 8  # factor by which X and dY must outweigh the parts' sums


def tile_sizes(kernel: KernelSpec, along: str, lanes: int, limits: Limits) -> list[tuple[int, int]]:
    """(height, width) of tiles whose sums and operands fit the vector registers."""
    registers = limits.vector_registers

    def used(height: int, width: int) -> int:
        kept = height if along == "batch" else min(height, width)
        if kernel.arithmetic.is_complex:
            return complex_registers(height, width, kept)
        return height * width + kept + 1

    widths = range(1, min(vectors_of_outputs(kernel, along, lanes), registers) + 1)
    return [
        (height, width)
        for height in range(min(kernel.pattern.c, registers), 0, -1)
        for width in takewhile(lambda width: used(height, width) <= registers, widths)  # noqa: B023 (used at once)
    ]


def default_by_vectors(kernel: KernelSpec, limits: Limits, batch: int) -> VectorGradientConstants:
    """Choose constants by rule."""
    lanes = lanes_of(kernel, limits)
    along = "outputs" if prefers_outputs(kernel, lanes, batch) else "batch"
    outputs = vectors_of_outputs(kernel, along, lanes)
    constants = VectorGradientConstants(
        along, lanes, 1, 1, 2 * lanes, 1, 1, int(multiplies_pairs(kernel, limits, along))
    )
    sizes = tile_sizes(kernel, along, lanes, limits)
    if (square := VectorGradientTiling(kernel, constants).square) and batch <= FEW_ROWS and along == "outputs":
        sizes = [size for size in sizes if size[0] % square == 0] or sizes
    sides = outputs, kernel.pattern.c
    if not VectorGradientTiling(kernel, constants).has_input_columns:
        costs = {size: cost(size, *sides, limits.vector_sums) for size in sizes}
    else:  # inputs come from the L2 cache, and outputs from the L1 cache
        costs = {size: cost(size[::-1], *sides[::-1], limits.vector_sums) for size in sizes}
    height, width = min(costs, key=lambda size: costs[size])
    constants = replace(constants, height=height, width=width)
    constants = replace(constants, block=_block(kernel, constants, batch))
    shape = VectorGradientTiling(kernel, constants)
    parts, pieces = shared_out(shape, limits, batch)
    if shape.planes % (2 * limits.multiprocessors) == 0:  # pieces that share a plane would each copy its inputs
        pieces = min(pieces, shape.planes)
    return replace(constants, parts=parts, pieces=pieces)


def multiplies_pairs(kernel: KernelSpec, limits: Limits, along: str) -> bool:
    """Whether the processor multiplies two rows of the batch at a time, and a copy can make these pairs contiguous."""
    are_contiguous = (kernel.layout == "bsf" or along == "batch") and not kernel.pattern.outputs.is_exchanged
    return limits.multiplies_pairs(kernel.arithmetic.operand) and are_contiguous


def _block(kernel: KernelSpec, constants: VectorGradientConstants, batch: int) -> int:
    shape = VectorGradientTiling(kernel, constants)
    _, b, c, d = kernel.pattern.shape
    if shape.is_along_outputs:
        row_bytes = shape.tile_lanes * shape.real_bytes
        rows = COLUMN_BYTES // row_bytes
        if shape.has_avx2_vectors:
            most = max(LEAST_ROWS, AVX2_INPUT_BYTES // (c * d * shape.real_bytes))
            rows = min(AVX2_COLUMN_BYTES // row_bytes, AVX2_ROWS if shape.has_input_columns else most)
        return min(rows * shape.together, round_up(batch, shape.unit))
    (least, most), features = VECTORS, shape.scope * (b + c) * d if shape.transposes else 1
    vectors = PANEL_BYTES // (features * constants.lanes * shape.real_bytes)
    return min(max(least, min(vectors, most)) * shape.unit, round_up(batch, shape.unit))


def shared_out(shape: VectorGradientTiling | AmxGradientTiling, limits: Limits, batch: int) -> tuple[int, int]:
    """Numbers of parts of the batch and of pieces of the weights. Parts come first, while their sums are small compared
    with X and dY; then pieces; then more parts if both are too few.
    """
    kernel, blocks = shape.kernel, divide_up(batch, shape.constants.block)
    tasks = TASKS * limits.multiprocessors
    features = kernel.pattern.in_features + kernel.pattern.out_features
    most = min(blocks, batch * features // (SPARE * shape.part))
    parts = max(count for count in range(1, tasks + 1) if tasks % count == 0 and (count <= most or count == 1))
    pieces = min(divide_up(tasks, parts), shape.units)
    return max(parts, min(blocks, divide_up(tasks, pieces))), pieces


def default_by_tiles(kernel: KernelSpec, limits: Limits, batch: int) -> AmxGradientConstants:
    """Choose constants by rule."""
    outputs = min(MOST_OUTPUTS, round_up(kernel.pattern.b, PAIR))
    chosen = AmxGradientConstants(INPUTS, outputs, 1, 1)
    while chosen.outputs > PAIR and not _fits(AmxGradientTiling(kernel, chosen)):
        chosen = replace(chosen, outputs=chosen.outputs - PAIR)
    block = next((each for each in BLOCKS if _fits(AmxGradientTiling(kernel, replace(chosen, block=each)))), INPUTS)
    chosen = replace(chosen, block=min(block, round_up(batch, INPUTS)))
    shape = AmxGradientTiling(kernel, chosen)
    parts, pieces = shared_out(shape, limits, batch)
    return replace(chosen, parts=parts, pieces=pieces)


def _fits(shape: AmxGradientTiling) -> bool:
    """Whether a block's operands stay in the L2 cache."""
    return shape.slot * 4 <= KEPT_BYTES
