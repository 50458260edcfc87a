"""Bytes that small-batch kernels move: between the second-level cache and blocks, and to and from shared memory."""

from functools import lru_cache
from math import gcd

from ksgen.families.banks import CYCLE_BYTES, WORD, read_cycles, write_cycles
from ksgen.families.base import Work
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.tiles import WARP, divide_up
from ksgen.families.traffic import array_bytes, entry_bytes
from ksgen.spec import KernelSpec
from ksgen.spec.storage import SCALE_BYTES

REMEMBERED = 4096  # cached counts, one per kernel and constants


def cache_bytes(kernel: KernelSpec, constants: GemvConstants, batch: int) -> float:
    """Bytes that all blocks move: X once per tile of outputs, weights once per tile of the batch, outputs once."""
    shape, own, (_, b, c, _) = GemvTiling(kernel, constants), constants, kernel.pattern.shape
    inputs = run_bytes_of(kernel, c, c, own.tile_d, batch, own.tile_batch, kernel.x_item_bytes)
    outputs = output_bytes(kernel, constants, batch)
    return (
        shape.tiles_out * inputs
        + divide_up(batch, own.tile_batch) * row_bytes(shape, b, own.tile_out, own.tile_d)
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
        return a * entry_bytes(features, d * batch, tile, tile_d * batch, size)
    return array_bytes(kernel, features, tile, tile_d, batch, tile_batch, size)


def output_bytes(kernel: KernelSpec, constants: GemvConstants, batch: int) -> float:
    """Bytes of Y, and of the residual if there is one."""
    arrays, own = 2 if kernel.epilogue.residual else 1, constants
    return arrays * run_bytes_of(
        kernel, kernel.pattern.b, own.tile_out, own.tile_d, batch, own.tile_batch, kernel.item_bytes
    )


def row_bytes(shape: GemvTiling, outputs: int, tile_out: int, tile_d: int) -> float:
    """Bytes of all weights and their scales, read once in tiles of `tile_out` outputs k by `tile_d` neighbouring j."""
    a, _, _, d = shape.kernel.pattern.shape
    row = shape.pieces * shape.vector
    # scales count once: for further rows of the batch, the block reads them from its own cache
    scales = a * outputs * d * SCALE_BYTES if shape.kernel.is_quantized else 0
    return a * entry_bytes(outputs, d * row, tile_out, tile_d * row, shape.weight_bytes) + scales


def work_of(kernel: KernelSpec, constants: GemvConstants, batch: int, memory_bytes: int) -> Work:
    shape, own, real = GemvTiling(kernel, constants), constants, kernel.real_bytes
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


@lru_cache(REMEMBERED)
def x_read_cycles(shape: GemvTiling) -> int:
    """Shared-memory cycles of one warp whose lanes each read one piece of X."""
    size, lanes, tile_d = shape.kernel.x_item_bytes, shape.constants.lanes_in, shape.constants.tile_d
    piece, plane = shape.vector * size, shape.x_plane * size
    return read_cycles([lane // lanes % tile_d * plane + lane % lanes * piece for lane in range(WARP)], piece)


@lru_cache(REMEMBERED)
def copy_cycles(kernel: KernelSpec, constants: GemvConstants) -> int:
    """Shared-memory cycles in which the threads of one block write X of one stage."""
    shape, size = GemvTiling(kernel, constants), kernel.x_item_bytes
    runs = shape.tile_in // shape.x_vector

    def place(at: int) -> int:
        if kernel.layout == "bsf":
            (s, rest), step = divmod(at, runs * constants.tile_d), shape.x_vector
        else:
            (rest, s), step = divmod(at, constants.tile_batch), 1
        inputs, j = divmod(rest, constants.tile_d)
        return (s * shape.x_entry + j * shape.x_plane + inputs * step) * size

    every = range(constants.tile_batch * constants.tile_d * runs)
    return sum(
        write_cycles([place(at) for at in every[first : first + WARP]], shape.x_vector * size)
        for first in every[::WARP]
    )


@lru_cache(REMEMBERED)
def part_cycles(kernel: KernelSpec, constants: GemvConstants) -> int:
    """Shared-memory cycles in which one block writes its tile's sums; in batch-size-last, a lane's are contiguous."""
    shape, own, real = GemvTiling(kernel, constants), constants, kernel.real_bytes
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
