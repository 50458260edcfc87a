"""Bytes, instructions and waits of blocks for small batches: traffic of the second-level cache and of shared memory.

A block of two factors computes the elements of the intermediate that it needs by itself.
"""

from dataclasses import replace
from functools import lru_cache
from math import gcd

from ksgen.families.banks import CYCLE_BYTES, WORD, read_cycles, write_cycles
from ksgen.families.base import Work
from ksgen.families.gemv.chain_shape import First, GemvChainConstants, GemvChainTiling
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.tiles import WARP, divide_up
from ksgen.families.traffic import array_bytes, bytes_of_row
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.spec.storage import SCALE_BYTES

REMEMBERED = 4096  # cached counts, one per kernel and constants


def cache_bytes(kernel: KernelSpec, constants: GemvConstants, batch: int) -> float:
    """Bytes that all blocks move: X once per tile of outputs, weights once per tile of the batch, outputs once."""
    shape, own, (_, b, c, _) = GemvTiling.of(kernel, constants), constants, kernel.pattern.shape
    inputs = run_bytes_of(kernel, c, c, own.tile_d, batch, own.tile_batch, kernel.x_item_bytes)
    outputs = output_bytes(kernel, constants, batch)
    return (
        shape.tiles_out * inputs
        + divide_up(batch, own.tile_batch) * weight_bytes_moved(shape, b, own.tile_out, own.tile_d)
        + outputs
    )


def run_bytes_of(
    kernel: KernelSpec, features: int, tile: int, tile_d: int, batch: int, tile_batch: int, size: int
) -> float:
    """Bytes of X or Y, moved once.

    If a tile holds the whole batch of an array in batch-size-last, neighbouring j are contiguous.
    """
    a, _, _, d = kernel.pattern.shape
    if kernel.layout == "bsl" and batch <= tile_batch:
        return a * bytes_of_row(features, d * batch, tile, tile_d * batch, size)
    return array_bytes(kernel, features, tile, tile_d, batch, tile_batch, size)


def output_bytes(kernel: KernelSpec, constants: GemvConstants, batch: int) -> float:
    """Bytes of Y, and of the residual if there is one."""
    arrays, own = 2 if kernel.epilogue.residual else 1, constants
    return arrays * run_bytes_of(
        kernel, kernel.pattern.b, own.tile_out, own.tile_d, batch, own.tile_batch, kernel.item_bytes
    )


def weight_bytes_moved(shape: GemvTiling, outputs: int, tile_out: int, tile_d: int) -> float:
    """Bytes of all weights and their scales, read once in tiles of `tile_out` outputs k by `tile_d` neighbouring j."""
    a, _, _, d = shape.kernel.pattern.shape
    row = shape.pieces * shape.vector
    # scales count once: for further rows of the batch, the block reads them from its own cache
    scales = a * outputs * d * SCALE_BYTES if shape.kernel.is_quantized else 0
    return a * bytes_of_row(outputs, d * row, tile_out, tile_d * row, shape.weight_bytes) + scales


def work_of(kernel: KernelSpec, constants: GemvConstants, batch: int, memory_bytes: int) -> Work:
    shape, own, real = GemvTiling.of(kernel, constants), constants, kernel.real_bytes
    blocks, tiles = shape.grid(batch), divide_up(batch, constants.tile_batch)
    stages = blocks * shape.stages
    kept = stages * own.tile_batch * own.tile_d * shape.tile_in * kernel.x_item_bytes
    reads = stages * shape.warps * own.steps * own.tile_batch  # by whole warps, one piece of X per lane
    piece = shape.vector * kernel.x_item_bytes
    written, found = (own.warps_in * shape.rows * entries * real for entries in (tiles * own.tile_batch, batch))
    shared = kept + reads * min(shape.groups, own.tile_d) * own.lanes_in * piece + written + found
    cycles: float = stages * copy_cycles(kernel, own) + reads * x_read_cycles(shape)
    cycles += written * part_cycles(kernel, own) / (own.warps_in * shape.part * real)
    cycles += blocks * own.warps_in * divide_up(divide_up(found, blocks * own.warps_in), WARP * real) * (real // WORD)
    return Work(
        blocks,
        memory_bytes,
        round(cache_bytes(kernel, constants, batch)),
        shared,
        stages * shape.warps * WARP * own.steps * shape.sums * shape.vector,
        stages,
        returned_bytes=round(CYCLE_BYTES * cycles) - shared,
    )


def x_read_cycles(shape: GemvTiling) -> int:
    """Shared-memory cycles of one warp whose lanes each read one piece of X."""
    own, size = shape.constants, shape.kernel.x_item_bytes
    return _read_cycles(own.lanes_in, own.tile_d, shape.x_plane * size, shape.vector * size)


@lru_cache(REMEMBERED)
def _read_cycles(lanes: int, tile_d: int, plane: int, piece: int) -> int:
    return read_cycles([lane // lanes % tile_d * plane + lane % lanes * piece for lane in range(WARP)], piece)


@lru_cache(REMEMBERED)
def copy_cycles(kernel: KernelSpec, constants: GemvConstants) -> int:
    """Shared-memory cycles in which the threads of one block write X of one stage."""
    shape, size = GemvTiling.of(kernel, constants), kernel.x_item_bytes
    runs = shape.tile_in // shape.x_vector

    def place(at: int) -> int:
        if kernel.layout == "bsf":
            (s, rest), step = divmod(at, runs * constants.tile_d), shape.x_vector
        else:
            (rest, s), step = divmod(at, constants.tile_batch), 1
        inputs, j = divmod(rest, constants.tile_d)
        return (s * shape.x_row + j * shape.x_plane + inputs * step) * size

    every = range(constants.tile_batch * constants.tile_d * runs)
    return sum(
        write_cycles([place(at) for at in every[first : first + WARP]], shape.x_vector * size)
        for first in every[::WARP]
    )


@lru_cache(REMEMBERED)
def part_cycles(kernel: KernelSpec, constants: GemvConstants) -> int:
    """Shared-memory cycles in which one block writes its tile's sums; in batch-size-last, a lane's sums are
    contiguous."""
    shape, own, real = GemvTiling.of(kernel, constants), constants, kernel.real_bytes
    wide = gcd(shape.held, own.tile_batch, 16 // real) if kernel.layout == "bsl" else 1

    def place(group: int, at: int) -> int:
        k, j, s = group // own.tile_d * own.thread_out + at // own.tile_batch, group % own.tile_d, at % own.tile_batch
        return (
            (s * own.tile_out + k) * own.tile_d + j
            if kernel.layout == "bsf"
            else (k * own.tile_d + j) * own.tile_batch + s
        )

    cycles = 0
    for first in range(0, shape.warps_out * shape.groups, shape.groups):
        for n in range(0, shape.held, wide):
            lanes = [(first + lane // own.lanes_in, lane % own.lanes_in) for lane in range(WARP)]
            asked = [
                place(group, lane // shape.same * shape.held + n) * real
                for group, lane in lanes
                if lane % shape.same == 0 and group // own.tile_d * own.thread_out < own.tile_out
            ]
            cycles += own.warps_in * write_cycles(asked, wide * real)
    return cycles


SIMULATED = 64  # writes by whole warps; the others take as long


def chain_cache_bytes(shape: GemvChainTiling, batch: int) -> float:
    """Bytes that all blocks move: X once per tile that reads it, weights, and Y once. The first factor's rows count
    once per tile, the second factor's rows once per tile of the batch."""
    first, last, own = shape.first, shape.last, shape.constants
    tiles = divide_up(batch, own.tile_batch)
    covers = last.tiles_out * last.tiles_d * first.planes_d // first.own.d  # times that all blocks together read X
    needed = _inputs_of(first.kernel, first.planes_i * first.own.c, first.own.d)
    x = covers * run_bytes_of(
        needed, needed.pattern.c, needed.pattern.c, first.planes_d, batch, own.tile_batch, needed.x_item_bytes
    )
    outputs = first.kernel.pattern.b
    rows = last.tiles_out * weight_bytes_moved(first, outputs, outputs, own.tile_d)
    rows += weight_bytes_moved(last, last.kernel.pattern.b, own.tile_out, own.tile_d)
    return x + tiles * rows + output_bytes(last.kernel, own.last, batch)


@lru_cache(REMEMBERED)
def _inputs_of(kernel: KernelSpec, c: int, d: int) -> KernelSpec:
    """Kernel with the inputs that a block of the first factor needs, as one pattern."""
    return replace(kernel, chains=Pattern(kernel.pattern.a, 1, c, d))


def multiply_adds(shape: GemvChainTiling) -> int:
    """Multiply-adds of one block, including those of padding."""

    def each(factor: GemvTiling, stages: int) -> int:
        return stages * shape.threads * factor.constants.steps * factor.sums * factor.vector

    return each(shape.first, shape.passes * shape.first.stages) + each(shape.last, shape.last.stages)


def waits(shape: GemvChainTiling) -> int:
    """Waits of one block for weights and for X; loads in flight together count as one wait.

    The second factor's first stage of weights arrives while the first factor is multiplied.
    """
    return shape.copy_rounds - 1 + shape.passes * shape.first.stages + shape.last.stages - 1


def chain_work(kernel: KernelSpec, constants: GemvChainConstants, batch: int, memory_bytes: int) -> Work:
    shape, own, real, size = GemvChainTiling.of(kernel, constants), constants, kernel.real_bytes, kernel.item_bytes
    first, last = shape.first, shape.last
    tiles = divide_up(batch, own.tile_batch)
    blocks, warps = last.grid(batch), shape.threads // WARP
    copied = first.x_copies * first.x_vector * kernel.x_item_bytes
    zeros = own.tile_batch * own.tile_d * (last.x_width - kernel.pattern.c) * size
    kept = own.tile_batch * own.tile_d * kernel.pattern.c * size
    each: list[tuple[GemvTiling, int]] = [(first, shape.passes * first.stages), (last, last.stages)]
    reads, more = (stages * warps * factor.constants.steps * own.tile_batch for factor, stages in each)
    first_piece, last_piece = (factor.vector * factor.kernel.x_item_bytes for factor in (first, last))
    read = reads * _runs(first, own.tile_d) * own.first_lanes_in * first_piece
    read += more * min(last.groups, own.tile_d) * own.lanes_in * last_piece
    written, found = (own.warps_in * last.rows * entries * real for entries in (tiles * own.tile_batch, batch))
    shared = blocks * (copied + zeros + kept + read) + written + found
    cycles: float = blocks * (first_copy_cycles(first) + zeros / CYCLE_BYTES + between_cycles(shape))
    cycles += blocks * (reads * first_read_cycles(first, own.tile_d) + more * x_read_cycles(last))
    cycles += written * part_cycles(last.kernel, own.last) / (own.warps_in * last.part * real)
    cycles += blocks * own.warps_in * divide_up(divide_up(found, blocks * own.warps_in), WARP * real) * (real // WORD)
    return Work(
        blocks, memory_bytes, round(chain_cache_bytes(shape, batch)), round(shared), blocks * multiply_adds(shape),
        blocks * waits(shape), returned_bytes=max(0, round(CYCLE_BYTES * cycles - shared)),
    )  # fmt: skip


def _planes(first: First, tile_d: int) -> list[int]:
    """Planes of X that the lanes of a block's first warp read, one per lane."""
    own, most = first.constants, first.kernel.pattern.b
    groups = [lane // own.lanes_in for lane in range(WARP)]
    rows = [(group // tile_d * own.thread_out, group % tile_d) for group in groups]
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
    return read_cycles(
        [plane * apart + lane % lanes * piece for lane, plane in enumerate(_planes(first, tile_d))], piece
    )


@lru_cache(REMEMBERED)
def first_copy_cycles(first: First) -> int:
    """Shared-memory cycles in which the threads of one block write X. The first `SIMULATED` writes stand for all."""
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

    every = range(first.x_copies)
    writes = [every[at : at + WARP] for at in every[::WARP]]
    simulated = writes[:SIMULATED]
    cycles = sum(write_cycles([place(at) for at in write], step * size) for write in simulated)
    return divide_up(cycles * len(writes), len(simulated))


@lru_cache(REMEMBERED)
def between_cycles(shape: GemvChainTiling) -> int:
    """Shared-memory cycles in which one block writes the intermediate.

    The first warp's writes stand for those of all warps.
    """
    first, last, own = shape.first, shape.last, shape.constants
    lanes, rows = own.first_lanes_in, own.first_thread_out
    cycles = 0
    for n in range(first.held):
        asked = []
        for lane in range(WARP):
            group, place = divmod(lane, lanes)
            row, s = divmod(place // first.same * first.held + n, own.tile_batch)
            k, plane = group // own.tile_d * rows + row, group % own.tile_d
            if place % first.same == 0 and k < shape.kernel.pattern.c:
                asked.append((s * last.x_row + plane * last.x_plane + k) * first.kernel.item_bytes)
        cycles += write_cycles(asked, first.kernel.item_bytes) if asked else 0
    return cycles * divide_up(shape.row_groups * lanes, WARP)
