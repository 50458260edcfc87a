"""Default constants of the tensor-core gradient before any search, chosen by rule."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ksgen.errors import ConstantsError
from ksgen.families.base import Limits
from ksgen.families.gpus import PORTABLE
from ksgen.families.gradient.defaults import GPU_WARPS, LONE
from ksgen.families.gradient.family import fits
from ksgen.families.gradient_mma.shape import STRETCH, GradientMmaConstants, GradientMmaTiling
from ksgen.families.mma.shape import COLUMNS, ROWS
from ksgen.families.simt.defaults import neighbours
from ksgen.families.tiles import divide_up
from ksgen.spec import KernelSpec

MOST_SUMS = 64  # accumulators per thread, and as many plain ones
MOST_REGISTERS = 236  # estimated, of 255 per thread


def parts(kernel: KernelSpec, constants: GradientMmaConstants) -> int:
    """Parts of the batch that fill the device.

    The sums of all parts are at most those of twice as many warps, under 35 MB.
    """
    shape = GradientMmaTiling(kernel, constants)
    return divide_up(GPU_WARPS, shape.tiles * shape.warps)


def batch_promotion(kernel: KernelSpec, limits: Limits) -> int:
    """Rows of the batch after which tensor-core sums are added to plain ones."""
    return kernel.arithmetic.promotion(limits.has_fine_sums).batch


def default(kernel: KernelSpec, limits: Limits) -> GradientMmaConstants:
    """Tile with the least padding, operand reads and copies, and as many parts of the batch as fill the device.

    Two blocks share a multiprocessor, unless a lone block is much better.
    """
    budget = replace(limits, shared_bytes=min(limits.shared_bytes, PORTABLE.shared_bytes))
    planes = 1 if kernel.layout == "bsl" else neighbours(kernel.pattern.d)
    promote = batch_promotion(kernel, limits)
    for tile_d in dict.fromkeys((planes, min(planes, 4), 1)):
        choices = sorted(_choices(kernel, tile_d, promote), key=lambda constants: _cost(kernel, constants))
        choices = [constants for constants in choices if GradientMmaTiling(kernel, constants).registers <= MOST_REGISTERS]
        lone = next((constants for constants in choices if fits(GradientMmaTiling(kernel, constants), budget, 1)), None)
        if lone is None:
            continue
        pair = next((constants for constants in choices if fits(GradientMmaTiling(kernel, constants), budget, 2)), lone)
        chosen = pair if _cost(kernel, pair) <= LONE * _cost(kernel, lone) else lone
        blocks = max(count for count in range(1, 7) if count == 1 or fits(GradientMmaTiling(kernel, chosen), budget, count))
        return replace(chosen, parts=parts(kernel, chosen), min_blocks=blocks)
    raise ConstantsError(f"{kernel.name}: no tile fits {budget.shared_bytes} bytes of shared memory and {limits.threads} threads")


def _choices(kernel: KernelSpec, tile_d: int, promote: int) -> Iterator[GradientMmaConstants]:
    tile_batch = STRETCH // kernel.item_bytes
    goes_through_registers = kernel.layout == "bsf" and kernel.item_bytes == 2
    for rows, columns, warps_out, warps_in in product((1, 2, 3, 4), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4)):
        tile_out, tile_in = ROWS * rows * warps_out, COLUMNS * columns * warps_in
        if 4 * kernel.arithmetic.halves * rows * columns > MOST_SUMS or max(tile_out, tile_in) > 128:
            continue
        for stages in (2,) if goes_through_registers else (4, 3, 2):
            yield GradientMmaConstants(tile_out, tile_in, tile_d, tile_batch, warps_out, warps_in, stages, promote, 1, 1)


def _cost(kernel: KernelSpec, constants: GradientMmaConstants) -> float:
    """Relative cost: matrix instructions, padding included, and the reads, copies and waits per instruction."""
    b, c = kernel.pattern.b, kernel.pattern.c
    tile_out, tile_in = constants.tile_out, constants.tile_in
    padding = divide_up(b, tile_out) * tile_out / b * divide_up(c, tile_in) * tile_in / c
    reads = ROWS / (tile_out // constants.warps_out) + ROWS / (tile_in // constants.warps_in)
    return padding * (1 + reads + 64 / tile_out + 64 / tile_in) * (1 + 0.2 / constants.stages)
