"""What follows from a vector kernel and its constants: planes, tiles and columns, and what a work group keeps beside the arrays."""

from dataclasses import dataclass

from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import Planes, round_up
from ksgen.spec import KernelSpec

LINE_BYTES = 64  # of a cache
CONFLICTING_BYTES = 1024  # rows a multiple of this apart meet in few sets of a first-level cache


@dataclass(frozen=True)
class VectorConstants(Constants):
    """The constants that a search may change."""

    along: str  # "outputs": lanes are neighbouring outputs; "batch": neighbouring batch entries
    lanes: int  # of a vector register, in the type of the sums
    height: int  # batch entries a tile, or outputs where lanes lie along the batch
    width: int  # vectors a tile
    block: int  # batch entries that a work group takes at a time
    parts: int  # of a block's columns, each a work group's
    panel: int  # 1: inputs are copied beside each other first; 0: they are read where they lie
    past: int  # 1: outputs are stored past the caches; 0: into them


@dataclass(frozen=True)
class Shape(Planes):
    """Everything that follows; sizes in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorConstants

    @property
    def planes(self) -> int:
        a, _, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            return a * self.planes_j
        return a // self.scope if self.kernel.layout == "bsf" else a * d

    # ---- columns: the tiles of all planes

    @property
    def tiles(self) -> int:
        """Tiles of an (i, j), or of a plane whose lanes lie along the outputs."""
        _, b, _, d = self.kernel.pattern.shape
        if not self.is_along_outputs:
            return divide_up(b, self.constants.height)
        return divide_up(b * d, self.tile_lanes) if self.is_short else divide_up(b, self.constants.width)

    @property
    def columns(self) -> int:
        a, _, _, d = self.kernel.pattern.shape
        return self.tiles * (a * self.planes_j if self.is_along_outputs else a * d)

    @property
    def column_unit(self) -> int:
        """Columns that one work group takes together: all of a plane where its outputs are turned."""
        is_turned = not self.is_along_outputs and self.kernel.layout == "bsf"
        return self.scope * self.kernel.pattern.d * self.tiles if is_turned else 1

    @property
    def column_weights(self) -> int:
        """Packed weights of a column."""
        return self.kernel.pattern.c * (self.tile_lanes if self.is_along_outputs else self.constants.height)

    @property
    def packed_bytes(self) -> int:
        return self.columns * self.column_weights * self.real_bytes

    @property
    def registers(self) -> int:
        """Sums, the shorter side of what they are multiplied from, and one of the longer side."""
        height, width = self.constants.height, self.constants.width
        return height * width + min(height, width) + 1

    # ---- how inputs lie

    @property
    def x_row(self) -> int:
        """From one batch entry's inputs to the next one's, where lanes lie along the outputs."""
        if not self.constants.panel:
            return self.kernel.pattern.in_features
        row = self.kernel.pattern.c * self.run if self.is_short else self.kernel.pattern.c * self.constants.lanes
        return spaced(round_up(row, self.constants.lanes), self)

    @property
    def entries(self) -> int:
        """Of the batch, that a panel has room for: whole chunks, each as wide as a tile."""
        return round_up(self.constants.block, self.tile_lanes)

    @property
    def x_step(self) -> int:
        """From one l to the next."""
        d = self.kernel.pattern.d
        if self.is_along_outputs:
            return self.constants.lanes if self.constants.panel and not self.is_short else d
        return self.tile_lanes * (d if self.kernel.layout == "bsf" else 1)

    @property
    def unit(self) -> int:
        """Batch entries of which blocks are made."""
        return self.constants.height if self.is_along_outputs else self.constants.lanes

    # ---- what a work group keeps

    @property
    def turned(self) -> int:
        """Where the outputs of a plane begin that are still to be turned."""
        return self.scope * self.kernel.pattern.c * self.kernel.pattern.d * self.entries

    @property
    def slot(self) -> int:
        _, b, c, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            rows = max(self.constants.block, self.constants.height) if self.constants.panel else self.constants.height
            used = rows * self.x_row + self.constants.lanes
        elif self.kernel.layout == "bsf":
            used = self.turned + round_up(self.scope * b * d, self.constants.lanes) * self.tile_lanes
        else:
            used = c * self.entries
        return round_up(used, LINE_BYTES)


def spaced(elements: int, shape: Shape) -> int:
    """A distance of at least so many elements whose multiples meet in many sets of a cache."""
    return elements + (shape.constants.lanes if elements * shape.real_bytes % CONFLICTING_BYTES == 0 else 0)
