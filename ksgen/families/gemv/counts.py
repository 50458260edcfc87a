"""Bytes, instructions and waits of blocks for small batches: traffic of the L2 cache and of shared memory.

A block of two factors computes the elements of the intermediate that it needs by itself.
"""

from dataclasses import replace
from functools import lru_cache
from math import gcd

from ksgen.families.banks import CYCLE_BYTES, WORD, copy_cycles, read_cycles, write_cycles
from ksgen.families.base import Work
from ksgen.families.gemv.chain_shape import First, GemvChainConstants, GemvChainTiling
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.tiles import WARP, divide_up
from ksgen.families.traffic import array_bytes, bytes_of_exchanged_row, bytes_of_row
from ksgen.order import Order
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.spec.storage import SCALE_BYTES

REMEMBERED = 4096  # cached counts, one per kernel and constants


def cache_bytes(kernel: KernelSpec, constants: GemvConstants, batch: int) -> float:
    """Bytes that all blocks move: X once per tile of outputs, weights once per tile of the batch, outputs once."""
    tiling, (_, b, c, _) = GemvTiling.of(kernel, constants), kernel.pattern.shape
    order, size = kernel.pattern.inputs, kernel.x_item_bytes
    inputs = run_bytes_of(kernel, c, c, constants.tile_d, batch, constants.tile_batch, size, order)
    weights = weight_bytes_moved(tiling, b, constants.tile_out, constants.tile_d)
    tiles = divide_up(batch, constants.tile_batch)
    return tiling.tiles_out * inputs + tiles * weights + output_bytes(kernel, constants, batch)


def run_bytes_of(
    kernel: KernelSpec, features: int, tile: int, tile_d: int, batch: int, tile_batch: int, size: int, order: Order,
    tile_i: int = 1,
) -> float:  # fmt: skip
    """Bytes of X or Y, moved once, by tiles that hold `tile_i` of the i of exchanged features.

    If a tile holds the whole batch of an array in batch-size-last, neighbouring features are contiguous.
    """
    (a, _, _, d), is_bsf = kernel.pattern.shape, kernel.layout == "bsf"
    if order.is_exchanged and (is_bsf or batch <= tile_batch):
        rows, item_bytes = (batch, size) if is_bsf else (1, batch * size)
        return rows * bytes_of_exchanged_row(order, (tile_i, tile, tile_d), item_bytes)
    if not is_bsf and batch <= tile_batch:
        return a * bytes_of_row(features, d * batch, tile, tile_d * batch, size)
    return array_bytes(kernel, features, tile, tile_d, batch, tile_batch, size)


def output_bytes(kernel: KernelSpec, constants: GemvConstants, batch: int) -> float:
    """Bytes of Y, and of the residual if there is one."""
    arrays, pattern = 2 if kernel.epilogue.residual else 1, kernel.pattern
    tile = constants.tile_out, constants.tile_d, batch, constants.tile_batch
    return arrays * run_bytes_of(kernel, pattern.b, *tile, kernel.item_bytes, pattern.outputs)


def weight_bytes_moved(tiling: GemvTiling, outputs: int, tile_out: int, tile_d: int) -> float:
    """Bytes of all weights and their scales, read once in tiles of `tile_out` outputs k by `tile_d` neighbouring j."""
    a, _, _, d = tiling.kernel.pattern.shape
    row = tiling.pieces * tiling.vector
    # scales count once: for further rows of the batch, the block reads them from its own cache
    scales = a * outputs * d * SCALE_BYTES if tiling.kernel.is_quantized else 0
    return a * bytes_of_row(outputs, d * row, tile_out, tile_d * row, tiling.weight_bytes) + scales


def work_of(kernel: KernelSpec, constants: GemvConstants, batch: int, memory_bytes: int) -> Work:
    tiling = GemvTiling.of(kernel, constants)
    blocks = tiling.grid(batch)
    stages = blocks * tiling.stages
    kept = stages * constants.tile_batch * constants.tile_d * tiling.tile_in * kernel.x_item_bytes
    reads = stages * tiling.warps * constants.steps * constants.tile_batch  # by whole warps, one piece of X per lane
    piece = tiling.vector * kernel.x_item_bytes
    part_bytes, cycles = _part_traffic(tiling, blocks, batch)
    shared = kept + reads * min(tiling.groups, constants.tile_d) * constants.lanes_in * piece + part_bytes
    cycles += stages * stage_copy_cycles(kernel, constants) + reads * x_read_cycles(tiling)
    return Work(
        blocks,
        memory_bytes,
        round(cache_bytes(kernel, constants, batch)),
        shared,
        stages * tiling.warps * WARP * constants.steps * tiling.sums * tiling.vector,
        stages,
        returned_bytes=round(CYCLE_BYTES * cycles) - shared,
    )


def _part_traffic(tiling: GemvTiling, blocks: int, batch: int) -> tuple[int, float]:
    """Bytes and cycles of shared memory in which blocks write the partial sums of rows, and read them to add them."""
    constants, real = tiling.constants, tiling.kernel.real_bytes
    parts, row_bytes = blocks * constants.warps_in, constants.warps_in * tiling.rows * real
    written, added = row_bytes * divide_up(batch, constants.tile_batch) * constants.tile_batch, row_bytes * batch
    cycles = written * part_cycles(tiling.kernel, constants) / (constants.warps_in * tiling.part * real)
    return written + added, cycles + parts * divide_up(divide_up(added, parts), WARP * real) * (real // WORD)


def x_read_cycles(tiling: GemvTiling) -> int:
    """Shared-memory cycles of one warp whose lanes each read one piece of X."""
    constants, size = tiling.constants, tiling.kernel.x_item_bytes
    return _read_cycles(constants.lanes_in, constants.tile_d, tiling.x_plane * size, tiling.vector * size)


@lru_cache(REMEMBERED)
def _read_cycles(lanes: int, tile_d: int, plane: int, piece: int) -> int:
    return read_cycles([lane // lanes % tile_d * plane + lane % lanes * piece for lane in range(WARP)], piece)


@lru_cache(REMEMBERED)
def stage_copy_cycles(kernel: KernelSpec, constants: GemvConstants) -> int:
    """Shared-memory cycles in which the threads of one block write X of one stage."""
    tiling, size = GemvTiling.of(kernel, constants), kernel.x_item_bytes
    runs = tiling.tile_in // tiling.x_vector

    def place(at: int) -> int:
        if kernel.layout == "bsf":
            (s, rest), step = divmod(at, runs * constants.tile_d), tiling.x_vector
        else:
            (rest, s), step = divmod(at, constants.tile_batch), 1
        inputs, j = divmod(rest, constants.tile_d)
        return (s * tiling.x_row + j * tiling.x_plane + inputs * step) * size

    return copy_cycles(place, constants.tile_batch * constants.tile_d * runs, tiling.x_vector * size)


@lru_cache(REMEMBERED)
def part_cycles(kernel: KernelSpec, constants: GemvConstants) -> int:
    """Shared-memory cycles in which one block writes its tile's sums.

    In batch-size-last, a lane's sums are contiguous, and are written several at a time.
    """
    tiling, real = GemvTiling.of(kernel, constants), kernel.real_bytes
    wide = gcd(tiling.held, constants.tile_batch, 16 // real) if kernel.layout == "bsl" else 1

    def place(group: int, at: int) -> int:
        k = group // constants.tile_d * constants.thread_out + at // constants.tile_batch
        j, s = group % constants.tile_d, at % constants.tile_batch
        if kernel.layout == "bsf":
            return (s * constants.tile_out + k) * constants.tile_d + j
        return (k * constants.tile_d + j) * constants.tile_batch + s

    cycles = 0
    for first in range(0, tiling.warps_out * tiling.groups, tiling.groups):
        for n in range(0, tiling.held, wide):
            lanes = [(first + lane // constants.lanes_in, lane % constants.lanes_in) for lane in range(WARP)]
            asked = [
                place(group, lane // tiling.same * tiling.held + n) * real
                for group, lane in lanes
                if lane % tiling.same == 0 and group // constants.tile_d * constants.thread_out < constants.tile_out
            ]
            cycles += constants.warps_in * write_cycles(asked, wide * real)
    return cycles


SIMULATED = 64  # writes by whole warps; further ones are assumed to take as long


def chain_cache_bytes(tiling: GemvChainTiling, batch: int) -> float:
    """Bytes that all blocks move: X once per tile that reads it, weights, and Y once.

    The first factor's rows of weights count once per tile, the second factor's once per tile of the batch.
    """
    first, last, constants = tiling.first, tiling.last, tiling.constants
    tiles, own_pattern = divide_up(batch, constants.tile_batch), first.own_pattern
    blocks = last.grid(1)  # per row of the batch
    covers = blocks * first.x_planes // (own_pattern.a * own_pattern.d)  # times that all blocks together read X
    # i whose inputs are neighbours: planes of exchanged outputs may lie apart
    neighbours = first.planes_i if not first.is_exchanged or first.planes_i == own_pattern.a else 1
    order, size, inputs = own_pattern.inputs, first.kernel.x_item_bytes, neighbours * own_pattern.c
    needed = _inputs_of(first.kernel, own_pattern.a // neighbours, inputs, own_pattern.d)
    tile = own_pattern.c if order.is_exchanged else inputs
    x = run_bytes_of(needed, inputs, tile, first.planes_d, batch, constants.tile_batch, size, order, neighbours)
    outputs = first.kernel.pattern.b
    rows = last.tiles_out * weight_bytes_moved(first, outputs, outputs, constants.tile_d)
    rows += weight_bytes_moved(last, last.kernel.pattern.b, constants.tile_out, constants.tile_d)
    return covers * x + tiles * rows + output_bytes(last.kernel, constants.last, batch)


@lru_cache(REMEMBERED)
def _inputs_of(kernel: KernelSpec, a: int, c: int, d: int) -> KernelSpec:
    """Kernel with the inputs that a block of the first factor needs, as one pattern."""
    return replace(kernel, chains=Pattern(a, 1, c, d))


def multiply_adds(tiling: GemvChainTiling) -> int:
    """Multiply-adds of one block, including those of padding."""

    def products(factor: GemvTiling, stages: int) -> int:
        return stages * tiling.threads * factor.constants.steps * factor.sums * factor.vector

    return products(tiling.first, tiling.passes * tiling.first.stages) + products(tiling.last, tiling.last.stages)


def waits(tiling: GemvChainTiling) -> int:
    """Waits of one block for weights and for X; loads in flight together count as one wait.

    The second factor's first stage of weights arrives while the first factor is multiplied.
    """
    rounds = divide_up(tiling.first.x_copies, tiling.threads * tiling.first.at_once)  # of copies of X
    return rounds - 1 + tiling.passes * tiling.first.stages + tiling.last.stages - 1


def chain_work(kernel: KernelSpec, constants: GemvChainConstants, batch: int, memory_bytes: int) -> Work:
    tiling, size = GemvChainTiling.of(kernel, constants), kernel.item_bytes
    first, last = tiling.first, tiling.last
    blocks, warps = last.grid(batch), tiling.threads // WARP
    copied = first.x_copies * first.x_vector * kernel.x_item_bytes
    zeros = constants.tile_batch * constants.tile_d * (last.x_width - kernel.pattern.c) * size
    kept = constants.tile_batch * constants.tile_d * kernel.pattern.c * size
    factors: list[tuple[GemvTiling, int]] = [(first, tiling.passes * first.stages), (last, last.stages)]
    first_reads, last_reads = (
        stages * warps * factor.constants.steps * constants.tile_batch for factor, stages in factors
    )
    first_piece, last_piece = (factor.vector * factor.kernel.x_item_bytes for factor in (first, last))
    read = first_reads * _runs(first, constants.tile_d) * constants.first_lanes_in * first_piece
    read += last_reads * min(last.groups, constants.tile_d) * constants.lanes_in * last_piece
    part_bytes, cycles = _part_traffic(last, blocks, batch)
    shared = blocks * (copied + zeros + kept + read) + part_bytes
    cycles += blocks * (first_copy_cycles(first) + zeros / CYCLE_BYTES + between_cycles(tiling))
    cycles += blocks * (first_reads * first_read_cycles(first, constants.tile_d) + last_reads * x_read_cycles(last))
    return Work(
        blocks, memory_bytes, round(chain_cache_bytes(tiling, batch)), round(shared), blocks * multiply_adds(tiling),
        blocks * waits(tiling), returned_bytes=max(0, round(CYCLE_BYTES * cycles - shared)),
    )  # fmt: skip


def _planes(first: First, tile_d: int) -> list[int]:
    """Planes of X that the lanes of a block's first warp read, one per lane."""
    constants, most = first.constants, first.kernel.pattern.b
    groups = [lane // constants.lanes_in for lane in range(WARP)]
    rows = [(group // tile_d * constants.thread_out, group % tile_d) for group in groups]
    return [first.plane_of(k, j) if k < most else 0 for k, j in rows]


@lru_cache(REMEMBERED)
def _runs(first: First, tile_d: int) -> int:
    """Number of different planes of X that a block's first warp reads."""
    return len(set(_planes(first, tile_d)))


@lru_cache(REMEMBERED)
def first_read_cycles(first: First, tile_d: int) -> int:
    """Shared-memory cycles of one warp whose lanes each read one piece of X."""
    size, lanes = first.kernel.x_item_bytes, first.constants.lanes_in
    piece, apart = first.vector * size, first.x_plane * size
    planes = enumerate(_planes(first, tile_d))
    return read_cycles([plane * apart + lane % lanes * piece for lane, plane in planes], piece)


@lru_cache(REMEMBERED)
def first_copy_cycles(first: First) -> int:
    """Shared-memory cycles in which the threads of one block write X, from the first `SIMULATED` writes of warps."""
    size, width, step = first.kernel.x_item_bytes, first.x_width // first.x_vector, first.x_vector

    def place(at: int) -> int:
        if first.kernel.layout == "bsf":
            rest, run = divmod(at, width * first.planes_d)
            (s, i), (inputs, j) = divmod(rest, first.planes_i), divmod(run, first.planes_d)
        else:
            rest, s = divmod(at, first.constants.tile_batch)
            rest, j = divmod(rest, first.planes_d)
            i, inputs = divmod(rest, width)
        return (s * first.x_row + (i * first.planes_d + j) * first.x_plane + inputs * step) * size

    return copy_cycles(place, first.x_copies, step * size, SIMULATED)


@lru_cache(REMEMBERED)
def between_cycles(tiling: GemvChainTiling) -> int:
    """Shared-memory cycles in which one block writes the intermediate.

    All warps are assumed to take as long as the first one.
    """
    first, last, constants = tiling.first, tiling.last, tiling.constants
    lanes, rows = constants.first_lanes_in, constants.first_thread_out
    cycles = 0
    for n in range(first.held):
        asked = []
        for lane in range(WARP):
            group, place = divmod(lane, lanes)
            row, s = divmod(place // first.same * first.held + n, constants.tile_batch)
            k, plane = group // constants.tile_d * rows + row, group % constants.tile_d
            if place % first.same == 0 and k < tiling.kernel.pattern.c:
                asked.append((s * last.x_row + plane * last.x_plane + k) * first.kernel.item_bytes)
        cycles += write_cycles(asked, first.kernel.item_bytes) if asked else 0
    return cycles * divide_up(tiling.row_groups * lanes, WARP)
