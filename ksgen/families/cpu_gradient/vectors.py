"""Gradients from vector registers full of sums: constants, sizes derived from them, expected cycles, and variables of
the template. Columns are tiles that share their outputs.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from ksgen.families.base import Constexpr, named
from ksgen.families.tiles import Constants, divide_up, pattern_constexprs, row_constexprs
from ksgen.families.vector.cycles import (
    COPY,
    ELEMENT,
    FIRST_LEVEL_BYTES,
    LAUNCH,
    SECOND_LEVEL_RATE,
    TASK,
    TILE,
    TRANSPOSE,
    tile_of,
    unused_line_cycles,
)
from ksgen.families.vector.planes import Planes, round_up, tile_picture
from ksgen.families.vector.shape import LINE_BYTES
from ksgen.order import Order
from ksgen.spec import KernelSpec

# bytes of a block's copied inputs that stay in an L2 cache: with vectors of AVX2, and with others
AVX2_PANEL_BYTES, PANEL_BYTES = 256 * 1024, 512 * 1024
FETCH_STEP = 4  # rows that are multiplied between two prefetches
ACROSS = 6  # cycles to add up the lanes of a sum


class GradientParts:
    """Shared sizes of both methods: parts of the batch, each with sums of the weights and, behind them, of the bias."""

    kernel: KernelSpec
    constants: Any  # has block and parts

    @property
    def sum_tiles(self) -> int:
        """Tiles of sums per part."""
        raise NotImplementedError

    @property
    def sum_groups(self) -> int:
        """Work groups that add the parts."""
        return self.sum_tiles

    @property
    def tile(self) -> int:
        """Elements of a tile's sums in memory."""
        raise NotImplementedError

    @property
    def bias_base(self) -> int:
        """Offset of the bias's sums, which follow those of the weights."""
        return self.sum_tiles * self.tile

    @property
    def part(self) -> int:
        """Sums of one part of the batch: of the weights, and of the bias in whole cache lines."""
        bias = round_up(self.kernel.pattern.out_features, LINE_BYTES) if self.kernel.epilogue.bias else 0
        return self.bias_base + bias

    @property
    def part_bytes(self) -> int:
        return self.part * self.kernel.real_bytes

    def parts(self, batch: int) -> int:
        """Parts of a batch, as `parts_of` in the source counts them."""
        return min(int(self.constants.parts), divide_up(batch, self.constants.block))

    def bias_constexprs(self, lanes: int) -> list[Constexpr]:
        """Constants for the gradient of the bias."""
        vectors = divide_up(self.kernel.pattern.out_features, lanes)
        return [
            named(self, "BIAS_BASE", "offset of the bias's sums behind those of the weights", "long long"),
            Constexpr("OUTPUT_VECTORS", vectors, "vectors of outputs per row of the batch"),
            named(self, "SUM_GROUPS", "work groups that add the parts"),
        ]


@dataclass(frozen=True)
class VectorGradientConstants(Constants):
    """Constants that a search may change."""

    entry_family: ClassVar[str] = "vector_gradient"

    along: str  # "outputs": lanes are neighbouring outputs; "batch": lanes are neighbouring rows of the batch
    lanes: int  # per vector register, in the type of the sums
    height: int  # inputs per tile
    width: int  # vectors of outputs per tile; outputs, if lanes are along the batch
    block: int  # rows of the batch whose sums stay in registers
    parts: int  # parts of the batch, at most, with sums of their own
    pieces: int  # pieces of the weights, one per work group
    # 1: two rows of the batch are multiplied at a time, by dot products of pairs; 0: one at a time, in the sums' type
    pairs: int = 0


def vectors_of_outputs(kernel: KernelSpec, along: str, lanes: int) -> int:
    """Vectors of outputs per plane, or outputs of an (i, j) if lanes are along the batch."""
    _, b, _, d = kernel.pattern.shape
    return divide_up(b * d, lanes) if along == "outputs" and d <= lanes else b


@dataclass(frozen=True)
class VectorGradientTiling(Planes, GradientParts):
    """Sizes derived from a kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorGradientConstants

    why = "the weights' gradient from vector registers full of sums: processors"

    # ---- columns: tiles that share their outputs

    @property
    def tiles(self) -> int:
        constants = self.constants
        return divide_up(vectors_of_outputs(self.kernel, constants.along, constants.lanes), constants.width)

    @property
    def units(self) -> int:
        return self.columns // self.column_unit

    @property
    def rows(self) -> int:
        """Tiles per column."""
        return divide_up(self.kernel.pattern.c, self.constants.height)

    @property
    def tile(self) -> int:
        """Elements of a tile's sums in memory, padded to whole vectors."""
        sums = self.constants.height * self.constants.width
        return sums * self.constants.lanes if self.is_along_outputs else round_up(sums, self.constants.lanes)

    @property
    def holds_inputs(self) -> bool:
        """Whether a tile's inputs stay in registers while its outputs are read; else its outputs do."""
        return not self.is_along_outputs or self.constants.height < self.constants.width

    @property
    def registers(self) -> int:
        """Vector registers: sums, operands of the side of a tile that stays in registers, and one of the other side."""
        constants = self.constants
        return constants.height * constants.width + (constants.height if self.holds_inputs else constants.width) + 1

    @property
    def rows_at_once(self) -> int:
        """Tiles of a column whose inputs are copied together, so that they stay in the L2 cache."""
        if self.transposes or self.kernel.pattern.inputs.is_exchanged:
            return self.rows
        elements = self.block_rows * self.constants.height * (self.run if self.is_along_outputs else 1)
        panel_bytes = AVX2_PANEL_BYTES if self.has_avx2_vectors else PANEL_BYTES
        fitting = max(1, panel_bytes // (elements * self.real_bytes))
        return divide_up(self.rows, divide_up(self.rows, fitting))

    # ---- parts of the batch

    @property
    def together(self) -> int:
        """Rows of the batch per element of a vector."""
        return 2 if self.constants.pairs else 1

    @property
    def block_rows(self) -> int:
        """Elements per feature that hold the rows of a block: a pair of rows is one element."""
        return divide_up(self.constants.block, self.together)

    @property
    def unit(self) -> int:
        """Blocks have a multiple of this number of rows of the batch."""
        return self.together * (1 if self.is_along_outputs else self.constants.lanes)

    # ---- operands in the private buffer of a work group

    @property
    def has_input_columns(self) -> bool:
        """Whether the vectors of a copied input l are neighbours, for all rows: a tile then reads contiguous memory."""
        return self.is_along_outputs and self.kernel.pattern.d >= self.constants.lanes

    @property
    def x_row(self) -> int:
        """Elements from one row of the batch to the next, if lanes are along the outputs."""
        return self.constants.lanes if self.has_input_columns else self._spread(self.copied_inputs * self.run)

    @property
    def copied_inputs(self) -> int:
        """Inputs l that are copied together."""
        return min(self.kernel.pattern.c, self.rows_at_once * self.constants.height)

    @property
    def pitch(self) -> int:
        """Elements from one copied feature to the next, or from one vector of features, if its rows are neighbours."""
        return self._spread(self.block_rows * (self.constants.lanes if self.has_input_columns else 1))

    def _spread(self, elements: int) -> int:
        """Smallest odd number of cache lines for `elements`: its multiples use all sets of a cache evenly."""
        line = max(LINE_BYTES // self.real_bytes, self.constants.lanes)
        return (divide_up(elements, line) | 1) * line

    @property
    def x_step(self) -> int:
        """Elements from one l to the next; and from one k to the next, if lanes are along the batch."""
        if self.is_along_outputs and not self.has_input_columns:
            return self.run
        return self.pitch * (self.kernel.pattern.d if self.transposes else 1)

    @property
    def fetched_rows(self) -> int:
        """Rows of the batch whose outputs of the next column are prefetched at a time.

        The tiles of a column prefetch all of them, in batch-size-first. There, a column's outputs are pieces of rows.
        """
        is_in_rows = self.is_along_outputs and self.kernel.layout == "bsf"
        has_pieces = is_in_rows and not self.kernel.pattern.outputs.is_exchanged
        return divide_up(FETCH_STEP * self.together, self.rows_at_once) if has_pieces else 0

    @property
    def dy_base(self) -> int:
        """Offset of dY, which follows X."""
        if self.is_along_outputs and not self.has_input_columns:
            return self.block_rows * self.x_row
        return self.copied_inputs * (self.scope * self.kernel.pattern.d if self.transposes else 1) * self.pitch

    @property
    def slot(self) -> int:
        """Elements of a work group's private buffer."""
        _, b, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            dy = self.block_rows * self.tile_lanes
        else:
            dy = (self.scope * b * d if self.transposes else self.constants.width) * self.pitch
        return round_up(self.dy_base + dy, LINE_BYTES)

    # ---- a launch

    @property
    def sum_tiles(self) -> int:
        return self.columns * self.rows

    @property
    def j_at_once(self) -> int:
        """Tiles of neighbouring j, one per j, that a work group adds together: it stores whole cache lines of dW."""
        if self.is_along_outputs:
            return 1
        d, line = self.kernel.pattern.d, max(1, LINE_BYTES // self.kernel.item_bytes)
        return divide_up(d, divide_up(d, line))

    @property
    def sum_groups(self) -> int:
        d = self.kernel.pattern.d
        return self.sum_tiles if self.is_along_outputs else self.sum_tiles // d * divide_up(d, self.j_at_once)

    def multiply_adds(self, batch: int) -> int:
        sums = self.sum_tiles * self.constants.height * self.constants.width
        return sums * (batch * self.constants.lanes if self.is_along_outputs else round_up(batch, self.constants.lanes))

    def sums_bytes(self, batch: int) -> int:
        """Bytes of sums that the blocks of the batch read and write."""
        return 2 * divide_up(batch, self.constants.block) * self.part_bytes

    def cycles(self, batch: int) -> float:
        """Cycles of all cores together, for one launch."""
        constants, pattern = self.constants, self.kernel.pattern
        blocks, tiles = divide_up(batch, constants.block), self.columns * self.rows
        # the kernel divides the batch into blocks in the same way
        block = min(divide_up(divide_up(batch, self.unit), blocks) * self.unit, batch)
        tile, lanes = tile_of(self), constants.lanes
        steps = divide_up(block, self.unit)
        after = 2 if self.is_along_outputs else ACROSS  # sums are read and written, or added up first
        outputs = steps * constants.width * lanes * self.real_bytes  # a column's tiles share them
        inputs = steps * constants.height * (1 if self.is_along_outputs else lanes) * self.real_bytes
        again = 1 if outputs + inputs <= FIRST_LEVEL_BYTES else self.rows
        missed = self.columns * outputs * again + tiles * inputs
        # pieces that copy the inputs of one plane
        sharing = max(1.0, constants.pieces / self.planes)
        are_whole = self.run_in % lanes == 0 if self.transposes else self.piece > 1
        copied = sharing * self._copied(pattern.inputs, block, are_whole) + self._copied(pattern.outputs, block, False)
        parts = self.parts(batch)
        added = parts * self.part / lanes * 2
        block_cycles = tiles * (steps * tile.step + after * tile.sums + TILE) + missed / SECOND_LEVEL_RATE + copied
        return blocks * block_cycles + added + TASK * (blocks + parts * constants.pieces) + LAUNCH

    def _copied(self, order: Order, block: int, are_whole: bool) -> float:
        """Cycles to copy the features of a block. Exchanged ones are copied one by one, or as whole vectors."""
        kernel = self.kernel
        is_scattered = self.is_along_outputs and kernel.layout == "bsl"
        each = ELEMENT if is_scattered else (TRANSPOSE if self.transposes else COPY) / self.constants.lanes
        if order.is_exchanged and kernel.layout == "bsf" and not are_whole:
            each = max(each, ELEMENT)
        return block * order.count * each + unused_line_cycles(self, order, kernel.layout, kernel.item_bytes, block)

    # ---- the source

    @property
    def variables(self) -> dict[str, Any]:
        return super().variables | {
            # of templates that products by vectors share
            "n": "",
            "source": "stored",
            "widen": "widen",
            "end_of_rows": "count",
            "end_of_columns": "end",
            "end_of_transposed": "count",
            "variants": ("gradient", *(("pairs",) if self.constants.pairs else ())),
            "picture": tile_picture(
                "A tile of dW", self.constants, ("inputs l", "inputs l"), ("outputs (k, j)", "outputs k")
            ),
        }

    @property
    def constexprs(self) -> list[Constexpr]:
        constants, pattern = self.constants, self.kernel.pattern
        return [
            *pattern_constexprs(self.kernel),
            named(constants, "LANES", "lanes per vector register"),
            named(constants, "HEIGHT", "inputs per tile"),
            named(constants, "WIDTH", "vectors of outputs per tile" if self.is_along_outputs else "outputs per tile"),
            named(constants, "BLOCK", "rows of the batch whose sums stay in registers, at most"),
            named(self, "TOGETHER", "rows of the batch per element of a vector"),
            named(self, "UNIT", "rows of the batch per unit; blocks are whole units"),
            named(constants, "PARTS", "parts of the batch, at most, with sums of their own"),
            named(constants, "PIECES", "pieces of the weights, one per work group"),
            named(self, "TILES", "columns that share their inputs"),
            named(self, "COLUMNS", "columns of all outputs"),
            named(self, "COLUMN_UNIT", "columns that one work group takes together"),
            named(self, "PLANE_COLUMNS", "columns whose inputs are copied together"),
            named(self, "ROWS", "tiles per column"),
            named(self, "ROWS_AT_ONCE", "tiles of a column whose inputs are copied together"),
            named(self, "J_AT_ONCE", "tiles of neighbouring j that a work group adds together"),
            named(self, "TILE", "elements of a tile's sums in memory", "long long"),
            named(self, "PART", "sums per part of the batch", "long long"),
            *self.bias_constexprs(constants.lanes),
            named(self, "SLOT", "elements of a work group's private buffer", "long long"),
            named(self, "DY_BASE", "offset of dY in the private buffer"),
            Constexpr("FETCH_STEP", FETCH_STEP, "rows that are multiplied between two prefetches"),
            named(self, "FETCHED_ROWS", "rows per prefetch of the next outputs"),
            named(self, "X_STEP", "elements from one l to the next"),
            *row_constexprs(self.kernel, "dY"),
            named(self, "RUN_IN", "inputs of a plane that are contiguous in x"),
            named(pattern, "IN_FEATURES", "inputs per row of the batch"),
            named(pattern, "OUT_FEATURES", "outputs per row of the batch"),
            # of lanes along the outputs
            named(self, "RUN", "neighbouring j per plane"),
            named(self, "PIECE", "neighbouring inputs that are contiguous in x"),
            named(self, "PLANES_J", "planes per i"),
            named(self, "STEP_OUT", "features from one vector of a tile to the next"),
            named(self, "X_ROW", "elements from one row of the batch to the next"),
            named(self, "SQUARE", "inputs l whose weights are transposed together; 0: each is stored alone"),
            named(self, "PITCH", "elements from one copied feature to the next"),
            Constexpr("SCOPE", self.scope if self.transposes else 1, "blocks on the diagonal per plane"),
        ]
