"""Default constants of two factors for small batches, before any search.

A model estimates the cycles of a multiprocessor, as for one factor.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import inf

from ksgen.families.base import Limits
from ksgen.families.chains import factor_kernels
from ksgen.families.expected import resident_blocks
from ksgen.families.gemv.chain_counts import cache_bytes, first_read_cycles, waits
from ksgen.families.gemv.chain_shape import GemvChainConstants, GemvChainTiling, most_alike
from ksgen.families.gemv.counts import x_read_cycles
from ksgen.families.gemv.defaults import (
    BLOCK_CYCLE_BYTES,
    BLOCK_CYCLES,
    COPYING,
    MOST_OF_BLOCK,
    MOST_REGISTERS,
    MOST_SUMS,
    SCHEDULERS,
    STORING,
    WAIT_CYCLES,
    adding_instructions,
    memory_cycle_bytes,
    shapes,
    stage_instructions,
)  # fmt: skip
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.gpus import gpu_of
from ksgen.families.tiles import WARP, divide_up
from ksgen.spec import KernelSpec

REMEMBERED = 1024  # cached kernels
MOST_COPIES = 64  # copies of X per thread, at most


def options(kernel: KernelSpec, limits: Limits, tile_batch: int) -> Iterator[GemvChainConstants]:
    """Yield each tile of the second factor, with the fastest distribution of the first factor's rows over lanes."""
    found: dict[tuple[int, int], tuple[int, int, int] | None] = {}
    for last in shapes(factor_kernels(kernel)[1], tile_batch):
        threads = GemvChainConstants.of(last, 1, 1, 1).threads
        key = threads, last.tile_d
        if key not in found:
            found[key] = _best_first(kernel, last)
        if (first := found[key]) is None:
            continue
        constants = GemvChainConstants.of(last, *first)
        shape = GemvChainTiling(kernel, constants)
        if (
            shape.registers <= min(MOST_REGISTERS, MOST_OF_BLOCK // threads)
            and shape.shared_bytes <= limits.shared_bytes
        ):
            yield constants


def _best_first(kernel: KernelSpec, last: GemvConstants) -> tuple[int, int, int] | None:
    """Fastest (thread_out, lanes_in, steps) of the first factor; None if its copies or registers are too many."""
    least = GemvChainTiling(kernel, GemvChainConstants.of(last, 1, 1, 1))
    pieces, alike, most = least.first.pieces, most_alike(kernel), max(1, MOST_SUMS // last.tile_batch)
    found: tuple[float, tuple[int, int, int]] | None = None
    for thread_out, lanes_in, steps in product((1, 2, 4, 8), (32, 16, 8, 4, 2, 1), (1, 2, 3, 4)):
        is_long = lanes_in >= 2 * pieces or (lanes_in * steps >= 2 * pieces and lanes_in * steps > 1)
        if is_long or max(thread_out, steps) > most or thread_out >= 2 * kernel.pattern.c:
            continue
        if thread_out > 1 and alike != inf and alike % thread_out:
            continue
        shape = GemvChainTiling(kernel, GemvChainConstants.of(last, thread_out, lanes_in, steps))
        if shape.first.x_copies > MOST_COPIES * shape.threads or shape.registers > min(
            MOST_REGISTERS, MOST_OF_BLOCK // shape.threads
        ):
            continue
        issued, shared = _first_cycles(shape)
        cost = (
            max(issued * divide_up(shape.threads // WARP, SCHEDULERS), shared)
            + shape.passes * shape.first.stages * WAIT_CYCLES
        )
        if found is None or cost < found[0]:
            found = cost, (thread_out, lanes_in, steps)
    return found and found[1]


def _first_cycles(shape: GemvChainTiling) -> tuple[float, float]:
    """Cycles of a block for the first factor: instructions issued per warp, and cycles of shared memory."""
    own = shape.first
    stage = shape.passes * own.stages
    copies = COPYING * divide_up(own.x_copies, shape.threads)
    issued = stage * stage_instructions(own) + shape.passes * (adding_instructions(own) + 60) + copies
    reads = shape.threads // WARP * stage * own.constants.steps * own.constants.tile_batch
    return issued, reads * first_read_cycles(own, shape.constants.tile_d)


def expected_cycles(kernel: KernelSpec, constants: GemvChainConstants, limits: Limits, batch: int) -> float:
    """Estimated cycles of the busiest multiprocessor, as for one factor."""
    shape, rates = GemvChainTiling(kernel, constants), gpu_of(limits.target).rates
    last: GemvTiling = shape.last
    resident = resident_blocks(limits.target, limits, shape.threads, shape.registers, shape.shared_bytes)
    if not resident:
        return inf
    blocks = last.grid(batch)
    each, waves = divide_up(blocks, limits.multiprocessors), divide_up(blocks, limits.multiprocessors * resident)
    ends = adding_instructions(last) + STORING * divide_up(last.part, shape.threads)
    issued, shared = _first_cycles(shape)
    issued += last.stages * stage_instructions(last) + ends + 60
    shared += last.warps * last.stages * constants.steps * constants.tile_batch * x_read_cycles(last)
    least = kernel.bytes(batch) / limits.multiprocessors / memory_cycle_bytes(rates)
    moved = max(least, each * cache_bytes(shape, batch) / blocks / BLOCK_CYCLE_BYTES)
    issued *= divide_up(each * last.warps, SCHEDULERS)  # each scheduler issues for one warp at a time
    return max(issued + each * BLOCK_CYCLES, each * shared, moved) + waves * (1 + waits(shape)) * WAIT_CYCLES


@lru_cache(maxsize=REMEMBERED)
def is_possible(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether any constants fit this GPU.

    No constants are compared, so this takes milliseconds where `best` takes up to a second.
    """
    return next(options(kernel, limits, 1), None) is not None


@lru_cache(maxsize=REMEMBERED)
def best(kernel: KernelSpec, limits: Limits, entries: int) -> GemvChainConstants | None:
    """Fastest constants for blocks of at most `entries` rows of the batch; None if none fit."""
    sizes = [size for size in (32, 16, 8, 4, 2, 1) if size <= entries]
    found = [each for size in sizes for each in options(kernel, limits, size)]
    if not found:
        return None
    return min(found, key=lambda each: (expected_cycles(kernel, each, limits, entries), each.threads))
