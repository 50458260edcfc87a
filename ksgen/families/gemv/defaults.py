"""Default constants of the gemv family (small batches) before any search, for one factor and for two.

A cost model estimates the cycles of a multiprocessor.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import inf

from ksgen.families.base import Limits
from ksgen.families.chains import factor_kernels
from ksgen.families.expected import SMALL, resident_blocks
from ksgen.families.gemv.chain_shape import GemvChainConstants, GemvChainTiling, most_alike
from ksgen.families.gemv.counts import cache_bytes, chain_cache_bytes, first_read_cycles, waits, x_read_cycles
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.gpus import gpu_of
from ksgen.families.tiles import WARP, divide_up
from ksgen.spec import KernelSpec

MOST_SUMS = 32  # per thread; also the most pieces of X that a thread multiplies per stage
MOST_WARPS = 16  # per block
# estimated registers per thread, and per block; ptxas may take up to 1.5 times as many
MOST_REGISTERS, MOST_OF_BLOCK = 160, 45000
ROUNDS = 32  # most rounds in which a block copies one stage of X
WAIT_CYCLES = 1000  # latency of a load of weights
MEMORY_CYCLE_BYTES = 13  # bytes per cycle from memory, per multiprocessor, if the GPU's rates are unknown
BLOCK_CYCLE_BYTES = 32  # most bytes per cycle from the L2 cache, per multiprocessor
BLOCK_CYCLES = 64  # to start a block
WIDENING = 3  # instructions to widen one weight of eight bits
COPYING, STORING = 12, 20  # instructions per element of X and of Y
SCHEDULERS = 4  # warps that a multiprocessor issues for at once
REMEMBERED = 1024  # cached kernels
MOST_COPIES = 64  # copies of X per thread of a chain, at most

AnyTiling = GemvTiling | GemvChainTiling


def rows_for(batch: int | None) -> int:
    """Rows of the batch per block: the least number of `SMALL` that is not below `batch`, else the largest one.

    If the batch size is unknown, it is the largest one.
    """
    return next((size for size in SMALL if batch and batch <= size), SMALL[-1])


def factor_options(kernel: KernelSpec, tile_batch: int) -> Iterator[GemvConstants]:
    """Yield constants that leave few lanes idle, except at ragged edges or if a pattern has too few rows for a warp."""
    _, b, _, d = kernel.pattern.shape
    pieces = GemvTiling.of(kernel, GemvConstants(1, 1, 1, 1, 1, 1, 1)).pieces
    lanes = [each for each in (32, 16, 8, 4, 2, 1) if each < 2 * pieces]
    for lanes_in, warps_in, steps in product(lanes, (1, 2, 4, 8, 16), (1, 2, 3, 4)):
        sharers = lanes_in * warps_in
        if (sharers * steps >= 2 * pieces and sharers * steps > 1) or (warps_in > 1 and lanes_in < WARP):
            continue
        for thread_out, warps_out in product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
            has_many_sums = max(thread_out, steps) > max(1, MOST_SUMS // tile_batch)
            if has_many_sums or thread_out >= 2 * b or warps_in * warps_out > MOST_WARPS:
                continue
            groups = warps_out * WARP // lanes_in
            for tile_d in sorted({min(d, groups, most) for most in (1, 2, 4, 8, 16, groups)}):
                tile_out = min(groups // tile_d, divide_up(b, thread_out)) * thread_out
                found = GemvConstants(tile_batch, tile_out, tile_d, thread_out, lanes_in, warps_in, steps)
                tiling = GemvTiling.of(kernel, found)
                if tiling.warps_out == warps_out and tiling.x_rounds <= ROUNDS and _fits_registers(tiling):
                    yield found


def _fits_registers(tiling: AnyTiling) -> bool:
    return tiling.registers <= min(MOST_REGISTERS, MOST_OF_BLOCK // tiling.threads)


def expected_cycles(kernel: KernelSpec, constants: GemvConstants, limits: Limits, batch: int) -> float:
    """Estimated cycles of the busiest multiprocessor: the longest of its resources, plus the waits for stages."""
    tiling = GemvTiling.of(kernel, constants)
    blocks_each = divide_up(tiling.grid(batch), limits.multiprocessors)
    copying = tiling.stages * tiling.x_rounds * COPYING
    issued = blocks_each * (tiling.warps * (_instructions(tiling) + copying) / SCHEDULERS + BLOCK_CYCLES)
    shared = blocks_each * _shared_cycles(tiling)
    moved = _moving_cycles(tiling, limits, batch, cache_bytes(kernel, constants, batch))
    return max(issued, shared, moved) + _waves(tiling, limits, batch) * tiling.stages * WAIT_CYCLES


def _waves(tiling: AnyTiling, limits: Limits, batch: int) -> float:
    """Rounds of the blocks that fit at a time; infinite if not even one fits."""
    resident = resident_blocks(limits.target, limits, tiling.threads, tiling.registers, tiling.shared_bytes)
    return divide_up(tiling.grid(batch), limits.multiprocessors * resident) if resident else inf


def _moving_cycles(tiling: AnyTiling, limits: Limits, batch: int, cached: float) -> float:
    """Cycles of the busiest multiprocessor to move its bytes from memory, and its part of `cached` from the cache."""
    blocks, rates = tiling.grid(batch), gpu_of(limits.target).rates
    per_cycle = rates.memory_gb_s / rates.ghz / rates.multiprocessors if rates else MEMORY_CYCLE_BYTES
    least = tiling.kernel.bytes(batch) / limits.multiprocessors / per_cycle
    return max(least, divide_up(blocks, limits.multiprocessors) * cached / blocks / BLOCK_CYCLE_BYTES)


def _instructions(tiling: GemvTiling) -> int:
    """Instructions of one thread for a factor whose sums become Y, without copies of X."""
    ends = adding_instructions(tiling) + STORING * divide_up(tiling.part, tiling.threads)
    return tiling.stages * stage_instructions(tiling) + ends + 60


def _shared_cycles(tiling: GemvTiling) -> int:
    """Shared-memory cycles in which one block reads the inputs of a factor whose sums become Y."""
    reads = tiling.warps * tiling.stages * tiling.constants.steps * tiling.constants.tile_batch
    return reads * x_read_cycles(tiling)


def stage_instructions(tiling: GemvTiling) -> int:
    """Instructions of one thread to multiply the pieces of one stage."""
    constants, widening = tiling.constants, WIDENING if tiling.kernel.is_quantized else 1
    of_x, of_weights = 1 + tiling.vector, 2 + widening * tiling.vector
    products = tiling.sums * tiling.vector
    return constants.steps * (products + constants.tile_batch * of_x + constants.thread_out * of_weights)


def adding_instructions(tiling: GemvTiling) -> int:
    """Instructions of one thread to add up the partial sums of the lanes that share its rows."""
    return 3 * tiling.held * (1 + tiling.shuffles)


@lru_cache(maxsize=REMEMBERED)
def best(kernel: KernelSpec, limits: Limits, tile_batch: int) -> GemvConstants:
    """Fastest constants for blocks of `tile_batch` rows of the batch, or of fewer rows if no such constants exist."""

    def cost(each: GemvConstants) -> tuple[float, int]:
        return expected_cycles(kernel, each, limits, tile_batch), GemvTiling.of(kernel, each).threads

    found = min(factor_options(kernel, tile_batch), key=cost, default=None)
    # with so few rows of weights, a block has too few threads to copy X for that many rows of the batch
    return best(kernel, limits, tile_batch // 2) if found is None else found


@lru_cache(maxsize=64)
def chain_options(kernel: KernelSpec, shared_bytes: int, tile_batch: int) -> tuple[GemvChainConstants, ...]:
    """Constants that fit the GPU; cached because batches of several sizes, and groups, compare the same ones."""
    return tuple(each_chain_option(kernel, shared_bytes, tile_batch))


def each_chain_option(kernel: KernelSpec, shared_bytes: int, tile_batch: int) -> Iterator[GemvChainConstants]:
    """Yield each tile of the second factor, with the fastest distribution of the first factor's rows over lanes."""
    found: dict[tuple[int, int], tuple[int, int, int] | None] = {}
    for last in factor_options(factor_kernels(kernel)[1], tile_batch):
        threads = GemvChainConstants.of(last, 1, 1, 1).threads
        key = threads, last.tile_d
        if key not in found:
            found[key] = _best_first(kernel, last)
        if (first := found[key]) is None:
            continue
        constants = GemvChainConstants.of(last, *first)
        tiling = GemvChainTiling.of(kernel, constants)
        if _fits_registers(tiling) and tiling.shared_bytes <= shared_bytes:
            yield constants


def _best_first(kernel: KernelSpec, last: GemvConstants) -> tuple[int, int, int] | None:
    """Fastest (thread_out, lanes_in, steps) of the first factor; None if its copies or registers are too many."""
    least = GemvChainTiling.of(kernel, GemvChainConstants.of(last, 1, 1, 1))
    pieces, alike, most = least.first.pieces, most_alike(kernel), max(1, MOST_SUMS // last.tile_batch)
    found: tuple[float, tuple[int, int, int]] | None = None
    for thread_out, lanes_in, steps in product((1, 2, 4, 8), (32, 16, 8, 4, 2, 1), (1, 2, 3, 4)):
        is_long = lanes_in >= 2 * pieces or (lanes_in * steps >= 2 * pieces and lanes_in * steps > 1)
        if is_long or max(thread_out, steps) > most or thread_out >= 2 * kernel.pattern.c:
            continue
        if thread_out > 1 and alike != inf and alike % thread_out:
            continue
        tiling = GemvChainTiling.of(kernel, GemvChainConstants.of(last, thread_out, lanes_in, steps))
        if tiling.first.x_copies > MOST_COPIES * tiling.threads or not _fits_registers(tiling):
            continue
        issued, shared = _first_cycles(tiling)
        waiting = tiling.passes * tiling.first.stages * WAIT_CYCLES
        cost = max(issued * divide_up(tiling.threads // WARP, SCHEDULERS), shared) + waiting
        if found is None or cost < found[0]:
            found = cost, (thread_out, lanes_in, steps)
    return found and found[1]


def _first_cycles(tiling: GemvChainTiling) -> tuple[float, float]:
    """Cycles of a block for the first factor: instructions issued per warp, and cycles of shared memory."""
    first = tiling.first
    stage = tiling.passes * first.stages
    copies = COPYING * divide_up(first.x_copies, tiling.threads)
    issued = stage * stage_instructions(first) + tiling.passes * (adding_instructions(first) + 60) + copies
    reads = tiling.threads // WARP * stage * first.constants.steps * first.constants.tile_batch
    return issued, reads * first_read_cycles(first, tiling.constants.tile_d)


def chain_cycles(kernel: KernelSpec, constants: GemvChainConstants, limits: Limits, batch: int) -> float:
    """Estimated cycles of the busiest multiprocessor, as for one factor."""
    tiling = GemvChainTiling.of(kernel, constants)
    last: GemvTiling = tiling.last
    blocks_each = divide_up(tiling.grid(batch), limits.multiprocessors)
    of_first, shared_by_first = _first_cycles(tiling)
    # each scheduler issues for one warp at a time
    issued = (of_first + _instructions(last)) * divide_up(blocks_each * last.warps, SCHEDULERS)
    shared = blocks_each * (shared_by_first + _shared_cycles(last))
    moved = _moving_cycles(tiling, limits, batch, chain_cache_bytes(tiling, batch))
    waiting = _waves(tiling, limits, batch) * (1 + waits(tiling)) * WAIT_CYCLES
    return max(issued + blocks_each * BLOCK_CYCLES, shared, moved) + waiting


@lru_cache(maxsize=REMEMBERED)
def has_chain(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether any constants fit this GPU.

    No constants are compared, so this takes milliseconds where `best_chain` takes up to a second.
    """
    return next(each_chain_option(kernel, limits.shared_bytes, 1), None) is not None


@lru_cache(maxsize=REMEMBERED)
def best_chain(kernel: KernelSpec, limits: Limits, rows: int) -> GemvChainConstants | None:
    """Fastest constants for blocks of at most `rows` rows of the batch; None if none fit."""
    sizes = [size for size in reversed(SMALL) if size <= rows]
    options = (each for size in sizes for each in chain_options(kernel, limits.shared_bytes, size))
    return min(options, key=lambda each: (chain_cycles(kernel, each, limits, rows), each.threads), default=None)
