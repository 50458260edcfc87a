"""Sizes derived from a processor's gradient kernel and its constants: tiles, columns, and operands in the private
buffer of a work group."""

from dataclasses import dataclass

from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import Planes, round_up
from ksgen.families.vector.shape import LINE_BYTES
from ksgen.spec import KernelSpec


@dataclass(frozen=True)
class VectorGradientConstants(Constants):
    """Constants that a search may change."""

    along: str  # "outputs": lanes are neighbouring outputs; "batch": lanes are neighbouring rows of the batch
    lanes: int  # per vector register, in the type of the sums
    height: int  # inputs per tile
    width: int  # vectors of outputs per tile; outputs, if lanes are along the batch
    block: int  # rows of the batch whose sums stay in registers
    parts: int  # parts of the batch, at most, with sums of their own
    pieces: int  # pieces of the weights, one per work group
    # 1: two rows of the batch are multiplied at a time, by dot products of pairs; 0: one at a time, as the sums' type
    pairs: int = 0


@dataclass(frozen=True)
class VectorGradientTiling(Planes):
    """Sizes derived from a kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorGradientConstants

    @property
    def is_transposed(self) -> bool:
        """Whether copies transpose operands from rows into columns."""
        return not self.is_along_outputs and self.kernel.layout == "bsf"

    # ---- columns: tiles that share their outputs

    @property
    def tiles(self) -> int:
        """Columns per (i, j), or per plane if lanes are along the outputs."""
        _, b, _, d = self.kernel.pattern.shape
        return divide_up(b * d, self.tile_lanes) if self.is_along_outputs and self.is_short else divide_up(b, self.constants.width)

    @property
    def columns(self) -> int:
        a, _, _, d = self.kernel.pattern.shape
        return self.tiles * a * (self.planes_j if self.is_along_outputs else d)

    @property
    def plane_columns(self) -> int:
        """Columns that share their inputs."""
        return self.scope * self.kernel.pattern.d * self.tiles if self.is_transposed else self.tiles

    @property
    def column_unit(self) -> int:
        """Columns that one work group takes together: all columns of a plane whose operands are transposed, else
        one."""
        return self.plane_columns if self.is_transposed else 1

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
    def registers(self) -> int:
        """Vector registers: sums, the side of a tile that stays in registers, and one of the other side."""
        constants = self.constants
        held = constants.width if self.is_along_outputs else constants.height
        return constants.height * constants.width + held + 1

    # ---- parts of the batch

    @property
    def together(self) -> int:
        """Rows of the batch per element of a vector."""
        return 2 if self.constants.pairs else 1

    @property
    def block_rows(self) -> int:
        """Elements that hold the rows of a block."""
        return divide_up(self.constants.block, self.together)

    @property
    def unit(self) -> int:
        """Rows of the batch of which blocks are whole multiples."""
        return self.together * (1 if self.is_along_outputs else self.constants.lanes)

    @property
    def part(self) -> int:
        """Sums of one part of the batch."""
        return self.columns * self.rows * self.tile

    @property
    def part_bytes(self) -> int:
        return self.part * self.real_bytes

    def parts(self, batch: int) -> int:
        """Parts of a batch, as `parts_of` in the source counts them."""
        return min(self.constants.parts, divide_up(batch, self.constants.block))

    # ---- operands in the private buffer of a work group

    @property
    def x_row(self) -> int:
        """Elements from one row of the batch to the next, if lanes are along the outputs."""
        return self._spread(self.kernel.pattern.c * self.run)

    @property
    def pitch(self) -> int:
        """Elements from one column of rows of the batch to the next, if lanes are along the batch."""
        return self._spread(self.block_rows)

    def _spread(self, elements: int) -> int:
        """Smallest odd number of cache lines that holds `elements`, in whole vectors; its multiples use all sets of a
        cache evenly."""
        line = max(LINE_BYTES // self.real_bytes, self.constants.lanes)
        return (divide_up(elements, line) | 1) * line

    @property
    def x_step(self) -> int:
        """Elements from one l to the next; and from one k to the next, if lanes are along the batch."""
        if self.is_along_outputs:
            return self.run
        return self.pitch * (self.kernel.pattern.d if self.is_transposed else 1)

    @property
    def dy_base(self) -> int:
        """Offset of dY behind X."""
        if self.is_along_outputs:
            return self.block_rows * self.x_row
        return self.kernel.pattern.c * (self.scope * self.kernel.pattern.d if self.is_transposed else 1) * self.pitch

    @property
    def slot(self) -> int:
        """Elements of a work group's private buffer."""
        _, b, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            dy = self.block_rows * self.tile_lanes
        else:
            dy = (self.scope * b * d if self.is_transposed else self.constants.width) * self.pitch
        return round_up(self.dy_base + dy, LINE_BYTES)
