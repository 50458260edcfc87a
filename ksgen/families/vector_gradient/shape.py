"""What follows from a processor's gradient kernel and its constants: tiles and columns, and how operands lie in a work group's memory."""

from dataclasses import dataclass

from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import Planes, round_up
from ksgen.families.vector.shape import LINE_BYTES
from ksgen.spec import KernelSpec


@dataclass(frozen=True)
class VectorGradientConstants(Constants):
    """The constants that a search may change."""

    along: str  # "outputs": lanes are neighbouring outputs; "batch": neighbouring batch entries
    lanes: int  # of a vector register, in the type of the sums
    height: int  # inputs a tile
    width: int  # vectors of outputs a tile, or outputs where lanes lie along the batch
    block: int  # batch entries whose sums stay in registers
    parts: int  # of the batch, at most: each has sums of its own
    pieces: int  # of the weights, each a work group's
    pairs: int = 0  # 1: two batch entries are multiplied at a time, by dot products of pairs; 0: one at a time, as the sums' type


@dataclass(frozen=True)
class Shape(Planes):
    """Everything that follows; sizes in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorGradientConstants

    @property
    def is_transposed(self) -> bool:
        """Whether rows become columns on their way in."""
        return not self.is_along_outputs and self.kernel.layout == "bsf"

    # ---- columns: tiles that share their outputs

    @property
    def tiles(self) -> int:
        """Columns of an (i, j), or of a plane whose lanes lie along the outputs."""
        _, b, _, d = self.kernel.pattern.shape
        return divide_up(b * d, self.tile_lanes) if self.is_along_outputs and self.is_short else divide_up(b, self.constants.width)

    @property
    def columns(self) -> int:
        a, _, _, d = self.kernel.pattern.shape
        return self.tiles * a * (self.planes_j if self.is_along_outputs else d)

    @property
    def plane_columns(self) -> int:
        """Columns of what shares its inputs."""
        return self.scope * self.kernel.pattern.d * self.tiles if self.is_transposed else self.tiles

    @property
    def column_unit(self) -> int:
        """Columns that one work group takes together: all of a plane where its operands are turned."""
        return self.plane_columns if self.is_transposed else 1

    @property
    def units(self) -> int:
        return self.columns // self.column_unit

    @property
    def rows(self) -> int:
        """Tiles of a column."""
        return divide_up(self.kernel.pattern.c, self.constants.height)

    @property
    def tile(self) -> int:
        """Sums of a tile, as they are kept."""
        sums = self.constants.height * self.constants.width
        return sums * self.constants.lanes if self.is_along_outputs else round_up(sums, self.constants.lanes)

    @property
    def registers(self) -> int:
        """Sums, the side of a tile that is held, and one of the other."""
        constants = self.constants
        held = constants.width if self.is_along_outputs else constants.height
        return constants.height * constants.width + held + 1

    # ---- parts of the batch

    @property
    def together(self) -> int:
        """Batch entries that a real holds."""
        return 2 if self.constants.pairs else 1

    @property
    def block_rows(self) -> int:
        """Reals that hold a block's entries."""
        return divide_up(self.constants.block, self.together)

    @property
    def unit(self) -> int:
        """Batch entries of which blocks are made."""
        return self.together * (1 if self.is_along_outputs else self.constants.lanes)

    @property
    def part(self) -> int:
        """The sums that one part of the batch leaves."""
        return self.columns * self.rows * self.tile

    @property
    def part_bytes(self) -> int:
        return self.part * self.real_bytes

    def parts(self, batch: int) -> int:
        """`parts_of` of the text counts them alike."""
        return min(self.constants.parts, divide_up(batch, self.constants.block))

    # ---- how operands lie in what a work group keeps

    @property
    def x_row(self) -> int:
        """From one batch entry's inputs to the next one's, where lanes lie along the outputs."""
        return self._spread(self.kernel.pattern.c * self.run)

    @property
    def pitch(self) -> int:
        """From one column of batch entries to the next one, where lanes lie along the batch."""
        return self._spread(self.block_rows)

    def _spread(self, elements: int) -> int:
        """An odd number of cache lines, whose multiples meet in all of a cache's sets alike; whole vectors."""
        line = max(LINE_BYTES // self.real_bytes, self.constants.lanes)
        return (divide_up(elements, line) | 1) * line

    @property
    def x_step(self) -> int:
        """From one l to the next; and from one k to the next, where lanes lie along the batch."""
        if self.is_along_outputs:
            return self.run
        return self.pitch * (self.kernel.pattern.d if self.is_transposed else 1)

    @property
    def dy_base(self) -> int:
        """Where dY begins, behind X."""
        if self.is_along_outputs:
            return self.block_rows * self.x_row
        return self.kernel.pattern.c * (self.scope * self.kernel.pattern.d if self.is_transposed else 1) * self.pitch

    @property
    def slot(self) -> int:
        """What a work group keeps."""
        _, b, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            dy = self.block_rows * self.tile_lanes
        else:
            dy = (self.scope * b * d if self.is_transposed else self.constants.width) * self.pitch
        return round_up(self.dy_base + dy, LINE_BYTES)
