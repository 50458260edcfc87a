"""Sizes of a kernel that multiplies by matrix tiles, derived from its constants.

They describe tiles, planes, groups of outputs, and the private buffer of a work group.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.base import Limits
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.rules import Rule
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec
from ksgen.spec.precision import BF16, TileProducts, on_tiles
from ksgen.values import cached_property

ROWS, ROW_BYTES = 16, 64  # rows of a tile, and bytes per row
LANES = ROW_BYTES // 4  # sums of a tile's row, which are one vector
INPUTS = ROW_BYTES // 2  # 16-bit operands of a tile's row
TILE_ITEMS = ROWS * INPUTS
TILE_SUMS = ROWS * LANES
PAIR = 2 * ROWS  # rows, or columns, of the two by two tiles that are multiplied at a time
LINE_BYTES = 64  # bytes per cache line
MOST_RUN = 48  # largest d for which a plane holds all j
FIRST_LEVEL_BYTES = 42 * 1024  # for inputs, weights and sums, out of an L1 cache's 48 KB
SUMS_BYTES = 4 * PAIR * PAIR  # of two by two tiles
AHEAD_INPUTS = 16  # in batch-size-last, inputs between a row that is copied and the one that is prefetched meanwhile


@dataclass(frozen=True)
class AmxConstants(Constants):
    """Constants that a search may change."""

    block: int  # rows of the batch that a work group takes at a time
    outputs: int  # outputs per j whose sums wait until the sums of all j of the plane are complete
    parts: int  # parts of a block's groups of outputs, one per work group
    panel: int  # panels of tiles into which inputs are copied: 2 alternate; 0: inputs are read in place
    streaming: int  # 1: outputs leave by streaming stores; 0: they go into the caches
    depth: int  # tiles along the inputs that stay in the L1 cache for all outputs of a group


def products_of(kernel: KernelSpec) -> TileProducts:
    """Products by which tiles multiply the elements of a kernel's arrays."""
    if kernel.arithmetic.tiles is None:
        raise ConstantsError(
            f"{kernel.name}: matrix tiles have no products in {kernel.precision}; accepted: {', '.join(on_tiles())}"
        )
    return kernel.arithmetic.tiles


def has_tiles_for(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether a processor has the tiles that multiply the elements of a kernel's arrays."""
    tiles = kernel.arithmetic.tiles
    return limits.is_cpu and tiles is not None and tiles.operand.name in limits.tiles


def are_timed(kernel: KernelSpec) -> bool:
    """Whether tiles of a kernel's operands were ever timed. If not, launchers use them only by wisdom or by name."""
    tiles = kernel.arithmetic.tiles
    return tiles is not None and tiles.operand is BF16


ON_TILES: Rule[Any] = Rule(
    "precision is one that matrix tiles multiply",
    lambda k, c: k.arithmetic.tiles is not None,
    lambda k, c: ", ".join(on_tiles()),
)


def intensity(kernel: KernelSpec) -> float:
    """Multiply-adds per input or output of a factor, of all factors together; b * c / (b + c) of one factor."""
    factors = kernel.factors
    return sum(each.weight_count for each in factors) / sum(each.in_features + each.out_features for each in factors)


def spread(elements: int, item_bytes: int) -> int:
    """Elements from one row of an intermediate to the next.

    Rows are an odd number of cache lines apart, so that they use many sets of a cache.
    """
    return (divide_up(elements * item_bytes, LINE_BYTES) | 1) * LINE_BYTES // item_bytes


class TilePlanes:
    """Shared sizes of kernels by tiles: the tiles of an (i, j)'s products, and the planes that are copied at a time."""

    kernel: KernelSpec
    constants: Any  # has outputs

    @property
    def is_bsf(self) -> bool:
        return self.kernel.layout == "bsf"

    @property
    def registers(self) -> int:
        """Tile registers: four of sums, and two of each operand."""
        return 8

    @cached_property
    def products(self) -> TileProducts:
        return products_of(self.kernel)

    @property
    def is_split(self) -> bool:
        """Whether an element is split into several operands; sums that are not finite are then computed again."""
        return self.products.parts > 1

    @property
    def step_items(self) -> int:
        """16-bit operands from one step's tile to the next; the parts of a tile follow each other."""
        return TILE_ITEMS * self.products.parts

    @property
    def shares(self) -> int:
        """Shares of a step's products of two by two tiles; vector instructions may run between shares."""
        return 2 * self.products.parts

    def picture(self, order: str, rows: str, columns: str) -> str:
        """Drawing of the tiles that are multiplied at a time, in an order that the heading names."""
        heading = f"Tiles that are multiplied at a time: 2 x 2 tiles of 16 x 16 sums, for {order}."
        down, across = DrawnSide(PAIR, rows, 2), DrawnSide(PAIR, columns, 2)
        return draw(heading, down, across, lambda row, column: f"tile {2 * row + column}")

    # ---- planes: units of copies

    @property
    def run(self) -> int:
        """Neighbouring j per plane."""
        return min(self.kernel.pattern.d, LANES) if self.is_bsf else 1

    @property
    def planes_j(self) -> int:
        """Planes per i."""
        return divide_up(self.kernel.pattern.d, self.run)

    @property
    def planes(self) -> int:
        return self.kernel.pattern.a * self.planes_j

    @property
    def groups(self) -> int:
        """Groups of a plane's outputs."""
        return divide_up(self.kernel.pattern.b, self.constants.outputs)

    @property
    def is_interleaved(self) -> bool:
        """Whether vectors hold whole runs of j in their stored order."""
        return self.run == self.kernel.pattern.d and LANES % self.run == 0

    @property
    def inputs_lie(self) -> str:
        """Method by which vectors of inputs are loaded in batch-size-first."""
        return "interleaved" if self.is_interleaved else "apart"

    @property
    def square(self) -> int:
        """Number of vectors that are interleaved with each other: one per j of whole runs, else LANES, a square."""
        return self.run if self.is_interleaved else LANES

    # ---- exchanged features

    @property
    def k_run(self) -> int:
        """Neighbouring outputs k of one j that are contiguous in Y if outputs are exchanged, at most a vector."""
        last = self.kernel.pattern.outputs.digits[-1]
        return gcd(last.size, LANES) if (last.name, last.unit) == ("k", 1) else 1

    @property
    def in_run(self) -> int:
        """Neighbouring inputs of a vector, all of one i, that are contiguous in X if inputs are exchanged."""
        _, _, c, d = self.kernel.pattern.shape
        return gcd(self.kernel.pattern.inputs.run, c * d, LANES) if self.is_interleaved else 1


@dataclass(frozen=True)
class AmxTiling(TilePlanes):
    """Sizes derived from a kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: AmxConstants
    at: int | None = None  # place in a chain, from 0; from 1 on, inputs are in the cache, and none are prefetched
    is_last: bool = True  # whether outputs are those of the launch, and no intermediates

    # ---- tiles

    @property
    def steps(self) -> int:
        """Tiles along the inputs."""
        return divide_up(self.kernel.pattern.c, INPUTS)

    @property
    def chunks(self) -> int:
        """Chunks of DEPTH tiles along the inputs."""
        return divide_up(self.steps, self.constants.depth)

    # ---- what stays in the L1 cache

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile of an operand, with all parts into which the operand is split."""
        return 2 * self.step_items

    @property
    def inputs_pass(self) -> bool:
        """Whether a block's inputs of DEPTH steps leave the L1 cache before they are read again."""
        tiles = (self.constants.block + PAIR) // ROWS * self.constants.depth
        sums = self.constants.block // PAIR * SUMS_BYTES
        return tiles * self.tile_bytes + sums > FIRST_LEVEL_BYTES

    @property
    def weights_pass(self) -> bool:
        """Whether the weights of two tiles leave the L1 cache while the inputs of two tiles pass."""
        tiles = 2 * PAIR // ROWS * self.constants.depth * self.tile_bytes
        return self.constants.block > PAIR and tiles + 2 * SUMS_BYTES > FIRST_LEVEL_BYTES

    @property
    def tiles(self) -> int:
        """Tiles of the outputs of one (i, j)."""
        return divide_up(self.kernel.pattern.b, ROWS)

    @property
    def packed_tiles(self) -> int:
        """Tiles along the outputs of all (i, j)."""
        return self.kernel.pattern.a * self.kernel.pattern.d * self.tiles

    @property
    def packed_bytes(self) -> int:
        return self.packed_tiles * self.steps * self.step_items * 2

    @property
    def group_weights(self) -> int:
        """Bytes of the weights of one group of outputs."""
        return self.run * min(self.tiles, self.constants.outputs // ROWS) * self.steps * self.tile_bytes

    # ---- groups of outputs

    @property
    def columns(self) -> int:
        """Groups of outputs of all planes, which are divided among parts."""
        return self.planes * self.groups

    # ---- planes

    @property
    def run(self) -> int:
        """Neighbouring j per plane.

        16-bit elements take whole cache lines of j, or all j: partial lines would be read and written twice.
        """
        d = self.kernel.pattern.d
        if not self.is_bsf or self.kernel.item_bytes * LANES >= LINE_BYTES:
            return super().run
        return d if d <= MOST_RUN else PAIR

    # ---- rows of the batch in batch-size-first

    @property
    def x_row(self) -> int:
        """Elements from one row of inputs to the next."""
        features = self.kernel.in_features
        return spread(features, self.kernel.item_bytes) if self.at else features

    @property
    def y_row(self) -> int:
        """Elements from one row of outputs to the next."""
        features = self.kernel.out_features
        return features if self.is_last else spread(features, self.kernel.item_bytes)

    # ---- prefetches of the next inputs

    @property
    def squares(self) -> int:
        """Two by two tiles of a group, counted once per chunk."""
        return self.run * self.constants.outputs // PAIR * (self.constants.block // PAIR) * self.chunks

    @property
    def ahead_run(self) -> int:
        """Lines per row of the next plane: a row is one of the batch, or an input in batch-size-last."""
        line = LINE_BYTES // self.kernel.item_bytes
        if not self.is_bsf:
            return divide_up(self.constants.block, line)
        _, _, c, d = self.kernel.pattern.shape
        return divide_up(c * d, line) if self.run == d else c

    @property
    def ahead_apart(self) -> int:
        """Elements from one prefetched line of a row to the next."""
        line = LINE_BYTES // self.kernel.item_bytes
        return line if not self.is_bsf or self.run == self.kernel.pattern.d else self.kernel.pattern.d

    @property
    def ahead_lines(self) -> int:
        """Lines that are prefetched with two by two tiles; 0 if panels alternate: the next inputs are then copied."""
        if self.constants.panel == 2 or self.at:
            return 0
        rows = self.constants.block if self.is_bsf else self.kernel.pattern.c
        return divide_up(rows * self.ahead_run, self.groups * self.squares)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of a plane's inputs that are prefetched before they are copied: 32 rows of the batch, or a block.

        In batch-size-last, only some inputs are prefetched if panels alternate.
        """
        rows, inputs = self.constants.block, self.kernel.pattern.c
        if self.constants.panel == 2:
            rows, inputs = (PAIR, inputs) if self.is_bsf else (rows, min(AHEAD_INPUTS, inputs))
        return rows * self.run * inputs * self.kernel.item_bytes

    # ---- copies of inputs

    @property
    def copied(self) -> int:
        """Inputs of one row of the batch that are copied at a time, for all j of the plane.

        In batch-size-last, rows of the batch, for two inputs.
        """
        return PAIR if not self.is_bsf or self.square < LANES else LANES * self.halves

    @property
    def halves(self) -> int:
        """Groups of sixteen inputs that are put into a panel together: two fill a tile's row with 16-bit inputs."""
        return 1 if self.is_split else 2

    @property
    def copied_rows(self) -> int:
        return 1 if self.is_bsf else 2

    @property
    def copies(self) -> int:
        """Copies per plane."""
        return self.constants.block * self.steps * INPUTS // (self.copied * self.copied_rows)

    @property
    def plane_shares(self) -> int:
        """Number of shares (see `shares`) in which all products of a plane are computed."""
        pairs = divide_up(self.kernel.pattern.b, PAIR) * (self.constants.block // PAIR)
        return self.shares * self.run * pairs * self.steps

    @property
    def copied_meanwhile(self) -> float:
        """Share of inputs that are copied while tiles are multiplied.

        In a chain, no products overlap the copy of the first plane, because it waits for the previous factor's outputs.
        """
        if self.constants.panel < 2:
            return 0.0
        return 1.0 if self.at is None else (self.planes - 1) / self.planes

    @property
    def copy_every(self) -> int:
        """Shares of steps per copy of the next plane, so that it is complete when this plane is done."""
        return max(1, self.plane_shares // self.copies)

    @property
    def copy_lines(self) -> int:
        """Cache lines that each copy prefetches: 32 rows of the batch ahead, or in batch-size-last `AHEAD_INPUTS`."""
        if self.at:
            return 0
        line = LINE_BYTES // self.kernel.item_bytes
        if not self.is_bsf:
            return 2 * divide_up(self.copied, line)
        if self.constants.panel < 2:
            return 0
        return self.copied if self.run < self.kernel.pattern.d else divide_up(self.copied * self.run, line)

    # ---- stores of sums

    @property
    def outputs_lie(self) -> str:
        """Method by which outputs are stored."""
        in_rows = "exchanged" if self.kernel.pattern.outputs.is_exchanged else self.inputs_lie
        return in_rows if self.is_bsf else "bsl"

    @property
    def line_vectors(self) -> int:
        """Vectors of sums that become one cache line of outputs."""
        return LINE_BYTES // (LANES * self.kernel.item_bytes)

    @property
    def vectors(self) -> int:
        """Vectors of sums that are stored together."""
        return self.line_vectors if not self.is_bsf else max(self.square, self.line_vectors)

    @property
    def units(self) -> int:
        """Units of 32 elements of a row of sums that are stored with each share of a step.

        They suffice to store a group while the next one is multiplied.
        """
        rows, columns = self.constants.block, self.constants.outputs
        if not self.is_bsf:
            rows, columns = columns, rows
        return divide_up(rows * columns // PAIR, self.squares * self.constants.depth * self.shares)

    # ---- the private buffer of a work group

    @property
    def j_items(self) -> int:
        """Operands of a panel from one j to the next."""
        items = self.constants.block // ROWS * self.chunks * self.constants.depth * self.step_items
        return items + LINE_BYTES // 2 * self._padding

    @property
    def j_sums(self) -> int:
        """Sums from one j to the next."""
        return self.constants.outputs * self.constants.block + LANES * self._padding

    @property
    def _padding(self) -> int:
        """Cache lines of padding after each j of a plane.

        All j of an input are copied together, and all j of an output are stored together. They would share a set of
        the caches if they were a power of two apart.
        """
        return int(self.run > 1)

    @property
    def panel(self) -> int:
        return self.run * self.j_items // 2

    @property
    def sums_row(self) -> int:
        """Elements from one row of sums to the next.

        A row of sums is a row of the batch. In batch-size-last it is an output, padded so that rows use many sets of a
        cache.
        """
        return PAIR if self.is_bsf else self.constants.block + LANES

    @property
    def sums(self) -> int:
        if self.is_bsf:
            return self.run * self.j_sums
        return self.constants.outputs * self.sums_row

    @property
    def slot(self) -> int:
        return self.panels + 2 * round_up(self.sums, LINE_BYTES)

    @property
    def panels(self) -> int:
        return max(1, self.constants.panel) * round_up(self.panel, LINE_BYTES)
