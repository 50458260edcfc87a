"""Sizes derived from a gradient by matrix tiles and its constants: columns, their tiles, and the private buffer of a
work group."""

from dataclasses import dataclass

from ksgen.families.amx.shape import INPUTS, LANES, LINE_BYTES, PAIR, ROWS, TILE_SUMS, TilePlanes
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec


@dataclass(frozen=True)
class AmxGradientConstants(Constants):
    """Constants that a search may change."""

    block: int  # rows of the batch whose sums stay in tiles
    outputs: int  # outputs per j that are copied and multiplied together
    parts: int  # parts of the batch, at most, with sums of their own
    pieces: int  # pieces of the weights, one per work group


@dataclass(frozen=True)
class AmxGradientTiling(TilePlanes):
    """Sizes derived from a kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: AmxGradientConstants

    # ---- columns: a plane's inputs with one group of its outputs

    @property
    def groups(self) -> int:
        """Groups of a plane's outputs."""
        return divide_up(self.kernel.pattern.b, self.constants.outputs)

    @property
    def units(self) -> int:
        """Columns, which pieces are whole multiples of."""
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
    def part(self) -> int:
        """Sums of one part of the batch."""
        return self.units * self.tiles * TILE_SUMS

    @property
    def part_bytes(self) -> int:
        return self.part * self.kernel.real_bytes

    def parts(self, batch: int) -> int:
        """Parts of a batch, as `parts_of` in the source counts them."""
        return min(self.constants.parts, divide_up(batch, self.constants.block))

    # ---- the private buffer of a work group

    @property
    def x_base(self) -> int:
        """Offset of X behind dY, in 16-bit operands."""
        return self.run * self.tiles_out * self.steps * self.step_items

    @property
    def slot(self) -> int:
        return round_up((self.x_base + self.run * self.tiles_in * self.steps * self.step_items) // 2, LINE_BYTES)
