"""Default constants of the SIMT gradient before any search, chosen by rule for a GPU and for a processor."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ksgen.errors import ConstantsError
from ksgen.families.base import Limits
from ksgen.families.gpus import PORTABLE
from ksgen.families.gradient.family import fits
from ksgen.families.gradient.shape import LANES_IN, LANES_OUT, GradientConstants, GradientTiling
from ksgen.families.simt.defaults import neighbours
from ksgen.families.simt.shape import is_narrow
from ksgen.families.tiles import divide_up
from ksgen.spec import KernelSpec

GPU_WARPS = 16 * 132  # so many keep a large GPU busy: sixteen per multiprocessor
CPU_BLOCKS = 16
MOST_SUMS = {"async": 72, "registers": 48}  # sums per thread, in addition to what waits in registers
MOST_TILE = 128  # along one side
THREADS = (1, 2, 4, 6, 8, 12)  # sums per thread, along one side
LONE = 1.25  # factor by which the cost of a block may be worse if it shares its multiprocessor with another


def parts(kernel: KernelSpec, constants: GradientConstants, limits: Limits) -> int:
    """Parts of the batch that fill the device.

    The sums of all parts are at most those of twice as many warps, under 40 MB.
    """
    shape = GradientTiling(kernel, constants)
    return divide_up(CPU_BLOCKS, shape.tiles) if limits.is_cpu else divide_up(GPU_WARPS, shape.tiles * shape.warps)


def default(kernel: KernelSpec, limits: Limits) -> GradientConstants:
    """Tile with the least padding, operand loads and copies, and as many parts of the batch as fill the device.

    Two blocks share a multiprocessor, so that one multiplies while the other waits, unless a lone block is much better.
    """
    budget = replace(limits, shared_bytes=min(limits.shared_bytes, PORTABLE.shared_bytes))
    planes = 1 if kernel.layout == "bsl" else neighbours(kernel.pattern.d)
    for tile_d in dict.fromkeys((planes, 1)):
        choices = sorted(_choices(kernel, tile_d, limits), key=lambda constants: _cost(kernel, constants))
        lone = next((constants for constants in choices if fits(GradientTiling(kernel, constants), budget, 1)), None)
        if lone is None:
            continue
        pair = next((constants for constants in choices if fits(GradientTiling(kernel, constants), budget, 2)), lone)
        chosen = pair if _cost(kernel, pair) <= LONE * _cost(kernel, lone) else lone
        blocks = max(count for count in range(1, 9) if count == 1 or fits(GradientTiling(kernel, chosen), budget, count))
        return replace(chosen, parts=parts(kernel, chosen, limits), min_blocks=1 if limits.is_cpu else blocks)
    raise ConstantsError(f"{kernel.name}: no tile fits {budget.shared_bytes} bytes of shared memory and {limits.threads} threads")


def _choices(kernel: KernelSpec, tile_d: int, limits: Limits) -> Iterator[GradientConstants]:
    copy = "registers" if is_narrow(kernel) or not limits.async_copies else "async"
    most_sums = MOST_SUMS[copy] // max(2 if limits.is_cpu else 1, kernel.real_bytes // 4)
    for thread_out, thread_in, warps_out, warps_in, tile_batch in product(THREADS, THREADS, (1, 2, 3, 4), (1, 2, 3, 4), (16, 8)):
        if thread_out * thread_in > most_sums:
            continue
        tile_out, tile_in = LANES_OUT * thread_out * warps_out, LANES_IN * thread_in * warps_in
        if max(tile_out, tile_in) <= MOST_TILE:
            stages = 3 if copy == "async" else 2
            yield GradientConstants(tile_out, tile_in, tile_d, tile_batch, thread_out, thread_in, stages, 1, 1, copy)


def _cost(kernel: KernelSpec, constants: GradientConstants) -> float:
    """Relative cost: multiply-adds, padding included, and the loads, copies and waits per multiply-add."""
    b, c = kernel.pattern.b, kernel.pattern.c
    tile_out, tile_in = constants.tile_out, constants.tile_in
    padding = divide_up(b, tile_out) * tile_out / b * divide_up(c, tile_in) * tile_in / c
    loads = 1 / constants.thread_out + 1 / constants.thread_in
    return padding * (1 + loads + 16 / tile_out + 16 / tile_in) + 1 / constants.tile_batch
