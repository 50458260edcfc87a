"""Gradients by matrix tiles: constants, sizes derived from them, expected cycles, and variables of the template.
Columns are a plane's inputs with one group of its outputs. The expected cycles were never compared with times.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from ksgen.families.amx.chain import ALONG, DOT, DOT_MULTIPLY_ADDS, TILE_BYTES, exchange_cycles
from ksgen.families.amx.shape import INPUTS, LANES, LINE_BYTES, PAIR, ROWS, TILE_ITEMS, TILE_SUMS, TilePlanes
from ksgen.families.base import Constexpr, named
from ksgen.families.cpu_gradient.vectors import GradientParts
from ksgen.families.tiles import Constants, divide_up, pattern_constexprs, row_constexprs
from ksgen.families.vector.cycles import LAUNCH, SECOND_LEVEL_RATE, TASK
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec


@dataclass(frozen=True)
class AmxGradientConstants(Constants):
    """Constants that a search may change."""

    entry_family: ClassVar[str] = "amx_gradient"

    block: int  # rows of the batch whose sums stay in tiles
    outputs: int  # outputs per j that are copied and multiplied together
    parts: int  # parts of the batch, at most, with sums of their own
    pieces: int  # pieces of the weights, one per work group


@dataclass(frozen=True)
class AmxGradientTiling(TilePlanes, GradientParts):
    """Sizes derived from a kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: AmxGradientConstants

    why = "the weights' gradient by matrix tiles: processors that have them"

    # ---- columns: a plane's inputs with one group of its outputs

    @property
    def units(self) -> int:
        """Number of columns; a piece has whole columns."""
        return self.planes * self.groups

    @property
    def tiles_out(self) -> int:
        """Tiles of a group's outputs, of one j."""
        return min(self.constants.outputs, round_up(self.kernel.pattern.b, PAIR)) // ROWS

    @property
    def tiles_in(self) -> int:
        """Tiles of an (i, j)'s inputs."""
        return divide_up(self.kernel.pattern.c, LANES)

    @property
    def tiles(self) -> int:
        """Tiles per column."""
        return self.run * self.tiles_out * self.tiles_in

    # ---- parts of the batch

    @property
    def steps(self) -> int:
        """Tiles along a block of the batch."""
        return self.constants.block // INPUTS

    @property
    def tile(self) -> int:
        return TILE_SUMS

    # ---- the private buffer of a work group

    @property
    def x_base(self) -> int:
        """Offset of X, which follows dY in the buffer, in 16-bit operands."""
        return self.run * self.tiles_out * self.steps * self.step_items

    @property
    def slot(self) -> int:
        return round_up((self.x_base + self.run * self.tiles_in * self.steps * self.step_items) // 2, LINE_BYTES)

    # ---- a launch

    @property
    def sum_tiles(self) -> int:
        return self.units * self.tiles

    def dots(self, batch: int) -> int:
        """Number of tile products in one launch."""
        return divide_up(batch, INPUTS) * self.sum_tiles * self.products.products

    def multiply_adds(self, batch: int) -> int:
        return self.dots(batch) * DOT_MULTIPLY_ADDS

    def sums_bytes(self, batch: int) -> int:
        """Bytes of sums that the blocks of the batch read and write beyond the L2 cache."""
        return 0

    def cycles(self, batch: int) -> float:
        """Cycles of all cores together, for one launch."""
        constants, pattern = self.constants, self.kernel.pattern
        blocks, parts = divide_up(batch, constants.block), self.parts(batch)
        # bytes of tiles of inputs; tiles of outputs stay in the L1 cache
        inputs = self.dots(batch) / 2 * TILE_BYTES * self.products.parts / self.products.products
        sums = blocks * self.units * self.tiles * TILE_SUMS * 4 * 2
        sharing = max(1.0, constants.pieces / self.planes)  # pieces that copy the inputs of one plane
        in_cycles = ALONG + exchange_cycles(self, "inputs")
        copied = batch * (sharing * pattern.in_features * in_cycles + pattern.out_features * ALONG)
        added = parts * self.part / 8
        multiplied = max(DOT * self.dots(batch), inputs / SECOND_LEVEL_RATE) + sums / SECOND_LEVEL_RATE
        return multiplied + copied + added + TASK * (blocks + parts * constants.pieces) + LAUNCH

    # ---- the source

    @property
    def variables(self) -> dict[str, Any]:
        return {
            "accumulator": "lanes",
            "lanes": LANES,
            "n": "",
            "operand": self.products.operand.name,
            "variants": ("split",) if self.is_split else (),
            "picture": self.picture("all rows of a block", "outputs k", "inputs l"),
        }

    @property
    def constexprs(self) -> list[Constexpr]:
        constants = self.constants
        return [
            *pattern_constexprs(self.kernel),
            Constexpr("LANES", LANES, "lanes of a vector, and sums in a row of a tile"),
            named(constants, "BLOCK", "rows of the batch whose sums stay in tiles, at most"),
            Constexpr("UNIT", INPUTS, "rows of the batch per unit; blocks are whole units"),
            named(constants, "OUTPUTS", "outputs per j that are copied and multiplied together"),
            named(constants, "PARTS", "parts of the batch, at most, with sums of their own"),
            named(constants, "PIECES", "pieces of the weights, one per work group"),
            Constexpr("COLUMNS", self.units, "columns: a plane's inputs with one group of its outputs"),
            named(self, "GROUPS", "groups of a plane's outputs"),
            named(self, "PLANES_J", "planes per i"),
            named(self, "RUN", "neighbouring j per plane"),
            named(self, "TILES_OUT", "tiles of a group's outputs, of one j"),
            named(self, "TILES_IN", "tiles of an (i, j)'s inputs"),
            named(self, "STEPS", "tiles along a block of the batch, 32 rows each"),
            named(self, "SHARES", "shares of a step's products, which are multiplied sequentially"),
            Constexpr("COMPONENTS", self.products.parts, "16-bit operands per element"),
            Constexpr("TILE_ITEMS", TILE_ITEMS, "operands per tile"),
            Constexpr("TILE_SUMS", TILE_SUMS, "sums per tile"),
            named(self, "STEP_ITEMS", "operands from one step's tiles to the next"),
            named(self, "SQUARE", "vectors that are interleaved with each other"),
            named(self, "IN_RUN", "neighbouring inputs that are copied together, if inputs are exchanged"),
            named(self, "X_BASE", "offset of X in the private buffer, in operands, behind dY", "long long"),
            named(self, "PART", "sums per part of the batch", "long long"),
            named(self.kernel.pattern, "OUT_FEATURES", "outputs per row of the batch"),
            *self.bias_constexprs(LANES),
            named(self, "SLOT", "elements of a work group's private buffer", "long long"),
            *row_constexprs(self.kernel, "dY"),
            Constexpr(
                "IS_BATCH_LAST", self.kernel.layout != "bsf", "whether the rows of the batch are contiguous per feature"
            ),
            Constexpr("ROWS", ROWS, "rows of a tile"),
        ]
