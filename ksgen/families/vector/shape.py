"""What follows from a vector kernel and its constants: planes, tiles and columns, and what a work group keeps beside the arrays."""

from dataclasses import dataclass

from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import Planes, round_up
from ksgen.families.vector.spread import period_of
from ksgen.spec import KernelSpec
from ksgen.spec.storage import ALIGNMENT, SCALE_BYTES

LINE_BYTES = 64  # of a cache
MOST_LANES = 16  # of a vector, in float32
PLANE_BYTES = 512 * 1024  # of a plane's weights that stay in a second-level cache while all rows of a block go by
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
    pairs: int = 0  # 1: inputs are multiplied two at a time, by dot products of pairs; 0: one at a time, as the sums' type


@dataclass(frozen=True)
class Ahead:
    """What a tile fetches of the inputs that come next, while it is multiplied: `rows` of `run` lines, some with every `step`-th input."""

    rows: int
    run: int
    apart: int  # elements, from one line of a row to the next
    inputs: int  # of a sum

    @property
    def lines(self) -> int:
        return self.rows * self.run

    @property
    def step(self) -> int:
        return next((step for step in (4, 2) if self.inputs // step >= self.lines), 1)

    @property
    def each(self) -> int:
        return divide_up(self.lines, self.inputs // self.step) if self.inputs >= self.step else 0


@dataclass(frozen=True)
class Shape(Planes):
    """Everything that follows; sizes in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorConstants
    reads: str = ""  # the layout of inputs, where the kernel's is that of outputs alone: lanes lie along the batch then

    @property
    def x_layout(self) -> str:
        return self.reads or self.kernel.layout

    @property
    def columns_from(self) -> str:
        return "bsl_planes" if self.x_layout == "bsl" and self.turns else self.x_layout

    @property
    def planes(self) -> int:
        a, _, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            return a * self.planes_j
        return a // self.scope if self.turns else a * d

    @property
    def inputs(self) -> int:
        """Of a sum, as they are multiplied: one by one, or two at a time."""
        return divide_up(self.kernel.pattern.c, 2) if self.constants.pairs else self.kernel.pattern.c

    @property
    def is_short(self) -> bool:
        """Whether lanes along the outputs are neighbouring (k, j): vectors hold all j, or the vectors of a tile do together."""
        d, lanes = self.kernel.pattern.d, self.constants.lanes
        return d <= lanes or (d % lanes > 0 and self.tile_lanes % d == 0)

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
        return self.plane_columns if self.turns and not self.is_split else 1

    @property
    def plane_columns(self) -> int:
        """Those that share what a work group copies."""
        return self.scope * self.kernel.pattern.d * self.tiles if self.turns else self.tiles

    @property
    def columns_at_once(self) -> int:
        """Columns that a tile's rows are multiplied with before the next rows, where lanes lie along the outputs: all of one where pairs
        are copied and the plane's weights stay in a second-level cache, so that only one tile's copy is kept; else one after the other."""
        held = self.tiles * self.column * self.weight_bytes <= PLANE_BYTES
        return self.tiles if self.constants.panel and self.constants.pairs and held else 1

    @property
    def turns(self) -> bool:
        """Whether inputs of whole planes are turned, or their outputs."""
        return not self.is_along_outputs and "bsf" in (self.x_layout, self.kernel.layout)

    @property
    def is_split(self) -> bool:
        """Whether there are more parts than planes, each with outputs that it stores one by one instead of turning them: of few entries."""
        return self.turns and self.constants.parts > self.planes

    @property
    def column_weights(self) -> int:
        """Packed weights of a column."""
        return self.inputs * (self.tile_lanes if self.is_along_outputs else self.constants.height)

    @property
    def weight_bytes(self) -> int:
        """Of one weight, as it is packed."""
        return self.kernel.weight_item_bytes if self.kernel.is_quantized else self.real_bytes

    @property
    def column(self) -> int:
        """From one column's packed weights to the next one's: reals; or values, behind which lie their scales."""
        if not self.kernel.is_quantized:
            return self.column_weights
        scales = SCALE_BYTES * (self.column_weights // self.inputs)
        return round_up(self.scales * self.weight_bytes + scales, ALIGNMENT) // self.weight_bytes

    @property
    def scales(self) -> int:
        """Values of a column in front of its scales: whole vectors of them."""
        return round_up(self.column_weights, MOST_LANES) if self.kernel.is_quantized else 0

    @property
    def packed_bytes(self) -> int:
        return self.columns * self.column * self.weight_bytes

    @property
    def registers(self) -> int:
        """Sums, the shorter side of what they are multiplied from, and one of the longer side."""
        height, width = self.constants.height, self.constants.width
        return height * width + min(height, width) + self.period

    @property
    def period(self) -> int:
        return period_of(self.run, self.constants.lanes) if self.is_along_outputs else 1

    # ---- how inputs lie

    @property
    def reaches(self) -> bool:
        """Whether the vectors that the inputs of one l are read as reach beyond them, so that the last ones of an array are copied."""
        d, lanes = self.kernel.pattern.d, self.constants.lanes
        return self.is_along_outputs and (d < lanes and lanes % d > 0 if self.is_short else d % lanes > 0)

    @property
    def x_row(self) -> int:
        """From one batch entry's inputs to the next one's, where lanes lie along the outputs."""
        if not self.constants.panel:
            return self.kernel.pattern.in_features // (2 if self.constants.pairs else 1)
        row = self.inputs * (self.run if self.is_short else self.constants.lanes)
        return spaced(round_up(row, self.constants.lanes), self)

    @property
    def x_step(self) -> int:
        """From one l to the next."""
        d = self.kernel.pattern.d
        if self.is_along_outputs:
            return self.constants.lanes if self.constants.panel and not self.is_short else d
        return self.tile_lanes * (d if self.x_layout == "bsf" else 1)

    @property
    def unit(self) -> int:
        """Batch entries of which blocks are made."""
        return self.constants.height if self.is_along_outputs else self.constants.lanes

    @property
    def tile_entries(self) -> int:
        """Batch entries of a tile."""
        return self.constants.height if self.is_along_outputs else self.tile_lanes

    @property
    def step(self) -> int:
        """Batch entries by which blocks of a factor alone differ: whole tiles, where a block is made of them."""
        is_whole = not self.is_along_outputs and self.constants.block % self.tile_lanes == 0
        return self.tile_lanes if is_whole else self.unit

    @property
    def ahead(self) -> Ahead:
        """A tile's share of what comes next."""
        _, _, c, d = self.kernel.pattern.shape
        line = LINE_BYTES // self.kernel.x_item_bytes
        if self.is_along_outputs:
            lines, apart = (divide_up(c * d, line), line) if self.is_short else (c, d)
            rows = self.constants.height if self.kernel.layout == "bsf" else 0  # else few entries, far apart: nothing is fetched
            return Ahead(rows, divide_up(lines, self.tiles), apart, self.inputs)
        if self.columns_from == "bsl_planes":
            return Ahead(0, 0, line, self.inputs)
        if self.x_layout == "bsl":
            chunks = divide_up(self.constants.block, self.tile_lanes)
            return Ahead(divide_up(c, self.tiles * chunks), divide_up(self.constants.block, line), line, self.inputs)
        return Ahead(self.tile_lanes, divide_up(divide_up(self.scope * c * d, line), self.plane_columns), line, self.inputs)

    # ---- how outputs leave

    @property
    def waits(self) -> bool:
        """Whether a tile's outputs wait until the next one is multiplied, and are stored past the caches meanwhile."""
        is_beside = self.is_along_outputs == (self.kernel.layout == "bsf")  # its vectors lie as they are stored
        return bool(self.constants.past) and is_beside

    @property
    def waiting_vectors(self) -> int:
        return self.constants.height * self.constants.width

    @property
    def waiting_each(self) -> int:
        """Vectors that are stored at a time: between some inputs, or all at the end where there are too few of them."""
        steps = self.inputs // self.ahead.step
        return divide_up(self.waiting_vectors, steps) if steps else 0

    @property
    def waiting_step(self) -> int:
        """Inputs between two such times: a power of two."""
        spare = max(1, self.inputs // self.ahead.step // self.waiting_vectors)
        return int(self.ahead.step * (1 << (spare.bit_length() - 1)))

    # ---- what a work group keeps

    @property
    def turned(self) -> int:
        """Where the outputs of a chunk begin that are still to be turned."""
        return self.scope * self.inputs * self.kernel.pattern.d * self.tile_lanes

    @property
    def waiting(self) -> int:
        """Where a tile's outputs wait: behind all else. With an epilogue, their raw sums lie right before them."""
        _, b, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            is_kept = (self.constants.panel or self.reaches) and self.columns_at_once == 1
            rows = max(self.constants.block, self.constants.height) if is_kept else self.constants.height
            used = rows * self.x_row + self.constants.lanes
        elif self.turns:
            outputs = round_up(self.scope * b * d, self.constants.lanes) if self.kernel.layout == "bsf" else 0
            used = self.turned + outputs * self.tile_lanes
        else:
            used = self.inputs * self.tile_lanes
        return round_up(used, LINE_BYTES) + (self.kept if self.waits and self.kernel.epilogue.words else 0)

    @property
    def kept(self) -> int:
        return round_up(self.waiting_vectors * self.constants.lanes, LINE_BYTES)

    @property
    def widened(self) -> int:
        """Where a column's weights of eight bits lie as reals, and behind them their scales: behind all else."""
        return self.waiting + (self.kept if self.waits else 0)

    @property
    def slot(self) -> int:
        widens = self.kernel.is_quantized and not self.is_along_outputs  # else each weight is widened in a register
        return self.widened + (round_up(self.scales + self.constants.height, LINE_BYTES) if widens else 0)


def lie_in_pairs(kernel: KernelSpec) -> bool:
    """Whether 16-bit inputs that are multiplied two at a time lie beside each other in rows, where a pair can be read as a real."""
    return kernel.layout == "bsf" and kernel.pattern.d == 1 and kernel.pattern.c % 2 == 0 and kernel.stride == "dense"


def needs_panel(kernel: KernelSpec, pairs: int) -> bool:
    """Where inputs are neither reals nor pairs as they lie, or do not lie in rows."""
    if kernel.layout == "bsl":
        return True
    return kernel.x_item_bytes < 4 and not (pairs and lie_in_pairs(kernel))


def spaced(elements: int, shape: Shape) -> int:
    """A distance of at least so many elements whose multiples meet in many sets of a cache."""
    return elements + (shape.constants.lanes if elements * shape.real_bytes % CONFLICTING_BYTES == 0 else 0)
