"""The constants of a kernel for few batch entries before any search: by a rule of how many cycles a multiprocessor takes."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import inf

from ksgen.families.base import Limits
from ksgen.families.expected import resident_blocks
from ksgen.families.few.counts import cache_bytes, x_read_cycles
from ksgen.families.few.shape import FewConstants, Shape
from ksgen.families.gpus import Rates, gpu_of
from ksgen.families.tiles import WARP, divide_up
from ksgen.spec import KernelSpec

MOST_BATCH = 32  # entries a block
MOST_SUMS = 32  # of a thread; and so many pieces of X, at most, that it multiplies in a stage
MOST_WARPS = 16  # of a block
MOST_REGISTERS, MOST_OF_BLOCK = 160, 45000  # of a thread and of a block, by the estimate, which ptxas may exceed by half
ROUNDS = 32  # in which a block copies a stage of X, at most
WAIT_CYCLES = 1000  # from asking for weights until they are there
MEMORY_CYCLE_BYTES = 13  # of a multiprocessor, where nobody has looked it up
BLOCK_CYCLE_BYTES = 32  # that one multiprocessor takes from the second-level cache, at most
BLOCK_CYCLES = 64  # to begin a block
WIDENING = 3  # instructions for a weight of eight bits
COPYING, STORING = 12, 20  # for an element of X and of Y
SCHEDULERS = 4  # warps that a multiprocessor serves at once
REMEMBERED = 1024  # kernels


def entries_for(batch: int | None) -> int:
    """Of a block: a power of two that holds the batch; the most, where nobody knows it."""
    return next((size for size in (1, 2, 4, 8, 16) if batch and batch <= size), MOST_BATCH)


def shapes(kernel: KernelSpec, tile_batch: int) -> Iterator[FewConstants]:
    """Combinations in which hardly a lane is there for nothing but ragged edges, unless a pattern has too few rows for a warp."""
    _, b, _, d = kernel.pattern.shape
    pieces = Shape(kernel, FewConstants(1, 1, 1, 1, 1, 1, 1)).pieces
    lanes = [each for each in (32, 16, 8, 4, 2, 1) if each < 2 * pieces]
    for lanes_in, warps_in, steps in product(lanes, (1, 2, 4, 8, 16), (1, 2, 3, 4)):
        sharers = lanes_in * warps_in
        if (sharers * steps >= 2 * pieces and sharers * steps > 1) or (warps_in > 1 and lanes_in < WARP):
            continue
        for thread_out, warps_out in product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
            if max(thread_out, steps) > max(1, MOST_SUMS // tile_batch) or thread_out >= 2 * b or warps_in * warps_out > MOST_WARPS:
                continue
            groups = warps_out * WARP // lanes_in
            for tile_d in sorted({min(d, groups, most) for most in (1, 2, 4, 8, 16, groups)}):
                tile_out = min(groups // tile_d, divide_up(b, thread_out)) * thread_out
                found = FewConstants(tile_batch, tile_out, tile_d, thread_out, lanes_in, warps_in, steps)
                shape = Shape(kernel, found)
                has_room = shape.registers <= min(MOST_REGISTERS, MOST_OF_BLOCK // shape.threads)
                if shape.warps_out == warps_out and shape.x_rounds <= ROUNDS and has_room:
                    yield found


def expected_cycles(kernel: KernelSpec, constants: FewConstants, limits: Limits, batch: int) -> float:
    """Of the multiprocessor that is busy for longest: for its instructions or for what it reads, and to wait for each stage once."""
    shape, rates = Shape(kernel, constants), gpu_of(limits.target).rates
    many = limits.multiprocessors
    resident = resident_blocks(limits.target, limits, shape.threads, shape.registers, shape.shared_bytes)
    if not resident:
        return inf
    blocks = shape.grid(batch)
    each, waves = divide_up(blocks, many), divide_up(blocks, many * resident)
    stage = stage_instructions(shape) + shape.x_rounds * COPYING
    ends = adding_instructions(shape) + STORING * divide_up(shape.part, shape.threads)
    issued = each * (shape.warps * (shape.stages * stage + ends + 60) / SCHEDULERS + BLOCK_CYCLES)
    shared = each * shape.warps * shape.stages * constants.steps * constants.tile_batch * x_read_cycles(shape)
    least = kernel.bytes(batch) / many / memory_cycle_bytes(rates)
    moved = max(least, each * cache_bytes(kernel, constants, batch) / blocks / BLOCK_CYCLE_BYTES)
    return max(issued, shared, moved) + waves * shape.stages * WAIT_CYCLES


def stage_instructions(shape: Shape) -> int:
    """Of a thread, to multiply the pieces of a stage."""
    own, widening = shape.constants, WIDENING if shape.kernel.is_quantized else 1
    step = shape.sums * shape.vector + own.tile_batch * (1 + shape.vector) + own.thread_out * (2 + widening * shape.vector)
    return own.steps * step


def adding_instructions(shape: Shape) -> int:
    """To add up what lanes found of the same rows."""
    return 3 * shape.held * (1 + shape.turns)


def memory_cycle_bytes(rates: Rates | None) -> float:
    """Of a multiprocessor's share of memory."""
    return rates.memory_gb_s / rates.ghz / rates.multiprocessors if rates else MEMORY_CYCLE_BYTES


@lru_cache(maxsize=REMEMBERED)
def best(kernel: KernelSpec, limits: Limits, tile_batch: int) -> FewConstants:
    found = list(shapes(kernel, tile_batch))
    if not found:  # of so few rows, that too few threads copy X
        return best(kernel, limits, tile_batch // 2)
    return min(found, key=lambda each: (expected_cycles(kernel, each, limits, tile_batch), Shape(kernel, each).threads))
