"""Bytes that blocks move between a GPU's L2 cache and themselves: whole sectors, also at an array's ends.

Each byte counts once per block that moves it. Arrays are assumed to begin at the start of a sector.
"""

from functools import cache, lru_cache
from math import gcd
from typing import Any

import numpy as np

from ksgen.families.tiles import divide_up
from ksgen.order import Order
from ksgen.reference import exchanged
from ksgen.spec import KernelSpec

SECTOR = 32  # bytes: the least that is moved
REMEMBERED = 4096  # cached rows of exchanged features


@cache
def run_bytes(size: int, step: int) -> float:
    """Bytes of the sectors that hold `size` neighbouring bytes: the mean over starts at multiples of `step`."""
    apart = gcd(step, SECTOR)
    starts = range(0, SECTOR, apart)
    return sum(divide_up(start + size, SECTOR) * SECTOR for start in starts) / len(starts)


def _pieces(size: int, tile: int) -> list[tuple[int, int]]:
    """Pieces into which tiles cut `size` elements, as (length of a piece, number of pieces)."""
    whole, rest = divmod(size, tile)
    return [(length, count) for length, count in ((tile, whole), (rest, 1 if rest else 0)) if count]


@cache
def bytes_of_row(features: int, d: int, tile: int, tile_d: int, item_bytes: int) -> float:
    """Bytes of the sectors that hold one i of a batch-size-first row, or W[i, k].

    A sector counts once per tile that has elements in it. Tiles have `tile` features of `tile_d` neighbouring j.
    """
    total = 0.0
    step = gcd(features, tile) * d * item_bytes
    for length, count in _pieces(features, tile):
        whole = run_bytes(length * d * item_bytes, step)
        for planes, tiles in _pieces(d, tile_d):
            in_pieces = length * run_bytes(planes * item_bytes, gcd(d, tile_d) * item_bytes)
            total += count * tiles * (whole if planes == d else min(whole, in_pieces))
    return total


@lru_cache(REMEMBERED)
def bytes_of_exchanged_row(order: Order, tile: tuple[int, int, int], item_bytes: int, unit: int = SECTOR) -> float:
    """Bytes of one row of exchanged features, counted in whole sectors, or in other units such as cache lines.

    A unit counts once per tile that has features in it. `tile` is (number of i, of inputs l or outputs k, of j).
    """
    tiles = np.zeros((), int)  # number of each feature's tile
    for index, size, per_tile in zip(np.ogrid[tuple(map(slice, order.sizes))], order.sizes, tile, strict=True):
        tiles = tiles * divide_up(size, per_tile) + index // per_tile
    stored = exchanged(order, tiles.reshape(1, -1))[0][:, np.newaxis]
    # a byte of each unit in which a feature may lie
    within = np.arange(order.count)[:, np.newaxis] * item_bytes + [*range(0, item_bytes, unit), item_bytes - 1]
    starts = range(0, unit, gcd(order.count * item_bytes, unit))  # of rows within units
    most = order.count * item_bytes // unit + 2  # units of a row
    # sorted here, because `np.unique` imports `numpy.ma`
    units = (np.sort(stored * most + (start + within) // unit, axis=None) for start in starts)
    moved = sum(1 + int(np.count_nonzero(np.diff(each))) for each in units)
    return moved * unit / len(starts)


@cache
def line_bytes(batch: int, tile_batch: int, item_bytes: int) -> float:
    """Bytes of one feature of a batch-size-last array."""
    step = gcd(batch, tile_batch) * item_bytes
    return sum(count * run_bytes(length * item_bytes, step) for length, count in _pieces(batch, tile_batch))


class Moved:
    """Bytes of X and Y that a product's blocks move, each block for its own tile."""

    kernel: KernelSpec
    constants: Any  # has tile_batch, tile_out and tile_d

    def x_bytes_moved(self, batch: int) -> float:
        """Bytes of X that blocks move for one tile along the outputs."""
        constants, inputs = self.constants, self.kernel.pattern.inputs
        tile = self.kernel.pattern.c, constants.tile_d, batch, constants.tile_batch
        return array_bytes(self.kernel, self.kernel.pattern.c, *tile, self.kernel.x_item_bytes, inputs)

    def y_bytes_moved(self, batch: int) -> float:
        """Bytes of Y that blocks move, and of the residual if there is one."""
        constants, arrays = self.constants, 2 if self.kernel.epilogue.residual else 1
        tile, pattern = (constants.tile_out, constants.tile_d, batch, constants.tile_batch), self.kernel.pattern
        return arrays * array_bytes(self.kernel, pattern.b, *tile, self.kernel.item_bytes, pattern.outputs)


def array_bytes(
    kernel: KernelSpec,
    features: int,
    tile: int,
    tile_d: int,
    batch: int,
    tile_batch: int,
    item_bytes: int,
    order: Order | None = None,
) -> float:
    """Bytes of X or Y that all blocks move: each block moves a tile of features, of j and of the batch.

    In batch-size-last `order` makes no difference, because each feature is a contiguous row.
    """
    a, _, _, d = kernel.pattern.shape
    if order is not None and order.is_exchanged and kernel.layout == "bsf":
        return batch * bytes_of_exchanged_row(order, (1, tile, tile_d), item_bytes)
    if kernel.layout == "bsf":
        return a * batch * bytes_of_row(features, d, tile, tile_d, item_bytes)
    return a * features * d * line_bytes(batch, tile_batch, item_bytes)
