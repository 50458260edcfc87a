"""What follows from a gradient by matrix tiles and its constants: columns and their tiles, and what a work group keeps."""

from dataclasses import dataclass

from ksgen.families.amx.shape import INPUTS, LANES, LINE_BYTES, PAIR, ROWS, TILE_SUMS, TilePlanes
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec


@dataclass(frozen=True)
class AmxGradientConstants(Constants):
    """The constants that a search may change."""

    block: int  # batch entries whose sums stay in tiles
    outputs: int  # of a j, that are copied and multiplied together
    parts: int  # of the batch, at most: each has sums of its own
    pieces: int  # of the weights, each a work group's


@dataclass(frozen=True)
class Shape(TilePlanes):
    """Everything that follows; sizes in elements of the sums' type."""

    kernel: KernelSpec
    constants: AmxGradientConstants

    # ---- columns: a plane's inputs with one group of its outputs

    @property
    def groups(self) -> int:
        """Groups of a plane's outputs."""
        return divide_up(self.kernel.pattern.b, self.constants.outputs)

    @property
    def units(self) -> int:
        """Columns, of which pieces are made."""
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
        """Of a column."""
        return self.run * self.tiles_out * self.tiles_in

    # ---- parts of the batch

    @property
    def steps(self) -> int:
        """Tiles along a block of the batch."""
        return self.constants.block // INPUTS

    @property
    def part(self) -> int:
        """The sums that one part of the batch leaves."""
        return self.units * self.tiles * TILE_SUMS

    @property
    def part_bytes(self) -> int:
        return self.part * self.kernel.real_bytes

    def parts(self, batch: int) -> int:
        """`parts_of` of the text counts them alike."""
        return min(self.constants.parts, divide_up(batch, self.constants.block))

    # ---- what a work group keeps

    @property
    def x_base(self) -> int:
        """Where X begins, behind dY; in 16-bit operands."""
        return self.run * self.tiles_out * self.steps * self.step_items

    @property
    def slot(self) -> int:
        return round_up((self.x_base + self.run * self.tiles_in * self.steps * self.step_items) // 2, LINE_BYTES)
