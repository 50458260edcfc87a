"""Sizes derived from a vector kernel and its constants: planes, tiles and columns, and the private buffer of a work
group."""

from dataclasses import dataclass, replace
from typing import ClassVar

from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import Planes, digits_of_plane, period_of, round_up, run_of_plane, scopes_of
from ksgen.order import Order
from ksgen.spec import KernelSpec
from ksgen.spec.storage import ALIGNMENT, SCALE_BYTES
from ksgen.values import cached_property

LINE_BYTES = 64  # per line of a cache
MOST_LANES = 16  # lanes of a vector, in float32
PACKED_AT_ONCE = 2**14  # bytes, half of an L1 cache
# bytes of a plane's weights that stay in an L2 cache while all rows of a block are multiplied
PLANE_BYTES = 512 * 1024
# bytes of weights beyond which a part of them stays in an L2 cache for all blocks, in a launch of its own per factor
LARGE_BYTES = 3 * PLANE_BYTES
TILE_BYTES = 24 * 1024  # bytes of a tile's inputs that stay in an L1 cache together with the weights of a column
# most bytes of a plane's inputs and outputs for which it gets more blocks on the diagonal; with these, its exchanged
# outputs are whole vectors in memory
EXCHANGED_BYTES = 512 * 1024
CONFLICTING_BYTES = 1024  # rows whose distance is a multiple of this share few sets of an L1 cache


@dataclass(frozen=True)
class VectorConstants(Constants):
    """Constants that a search may change."""

    at_launch: ClassVar[tuple[str, ...]] = ("block", "parts", "streaming")

    along: str  # "outputs": lanes are neighbouring outputs; "batch": lanes are neighbouring rows of the batch
    lanes: int  # lanes of a vector register, in the type of the sums
    height: int  # rows of the batch per tile; outputs, if lanes are along the batch
    width: int  # vectors per row of a tile
    block: int  # rows of the batch that a work group takes at a time
    parts: int  # parts of a block's columns, one per work group
    panel: int  # 1: inputs are first copied to contiguous memory; 0: they are read in place
    streaming: int  # 1: outputs leave by streaming stores; 0: they go into the caches
    # 1: inputs are multiplied two at a time, by dot products of pairs; 0: one at a time, in the sums' type
    pairs: int = 0


@dataclass(frozen=True)
class Ahead:
    """Prefetches of a tile's next inputs: `rows` of `run` cache lines, a few at every `step`-th input."""

    rows: int
    run: int
    apart: int  # elements, from one line of a row to the next
    inputs: int  # per sum

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
class VectorTiling(Planes):
    """Sizes derived from a vector kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorConstants
    reads: str = ""  # layout of the inputs, if it differs from that of the outputs; lanes are along the batch then

    @property
    def x_layout(self) -> str:
        return self.reads or self.kernel.layout

    @property
    def columns_from(self) -> str:
        """Method by which inputs become columns of neighbouring rows of the batch, if lanes are along the batch."""
        in_planes = self.transposes or self.kernel.reads_exchanged
        return "bsl_planes" if self.x_layout == "bsl" and in_planes else self.x_layout

    @property
    def matrices(self) -> int:
        """Number of pairs (i, j) per plane, if lanes are along the batch. A plane's inputs are copied together."""
        return self.scope * self.kernel.pattern.d if self.transposes else 1

    @property
    def together(self) -> int:
        """Inputs l that a lane multiplies at a time."""
        return 2 if self.constants.pairs else 1

    @property
    def inputs(self) -> int:
        """Inputs of a sum that are multiplied in turn: single inputs, or pairs of them."""
        return divide_up(self.kernel.pattern.c, self.together)

    @property
    def is_short(self) -> bool:
        """Whether lanes along the outputs are neighbouring (k, j): a vector holds all j, or a tile's vectors do."""
        d, lanes = self.kernel.pattern.d, self.constants.lanes
        return d <= lanes or (d % lanes > 0 and self.tile_lanes % d == 0)

    # ---- columns: the tiles of all planes

    @cached_property
    def tiles(self) -> int:
        _, b, _, d = self.kernel.pattern.shape
        if not self.is_along_outputs:
            return divide_up(b, self.constants.height)
        return divide_up(b * d, self.tile_lanes) if self.is_short else divide_up(b, self.constants.width)

    @property
    def packed_planes(self) -> int:
        """Planes per i of packed weights. Planes of one i share weights that are tied along d."""
        return 1 if "d" in self.kernel.tie else self.planes_j if self.is_along_outputs else self.kernel.pattern.d

    @property
    def packed_columns(self) -> int:
        """Columns of packed weights. Planes share the columns of tied weights."""
        return self.tiles * self.packed_planes * (1 if "a" in self.kernel.tie else self.kernel.pattern.a)

    @property
    def is_broadcast(self) -> bool:
        """Whether all lanes of a vector have one weight, because it is tied along d."""
        return self.is_along_outputs and not self.is_short and "d" in self.kernel.tie

    @property
    def column_unit(self) -> int:
        return 1 if self.is_split else super().column_unit

    @property
    def columns_at_once(self) -> int:
        """Columns that are multiplied with a tile's rows before the next rows, if lanes are along the outputs."""
        return self.tiles if self.is_by_rows else 1

    @property
    def is_by_rows(self) -> bool:
        """Whether a tile's rows are multiplied with all columns of a plane, if lanes are along the outputs.

        They are if the plane's weights stay in an L2 cache and pairs are copied. With vectors of AVX2 they also are in
        batch-size-first, if the rows' inputs stay in the L1 cache and are more than a column's weights. A copy holds
        one tile's rows then.
        """
        constants = self.constants
        if not self.is_along_outputs or self.tiles * self.column * self.weight_bytes > PLANE_BYTES:
            return False
        if not self.has_avx2_vectors or self.kernel.layout == "bsl":
            return bool(constants.panel and constants.pairs)
        row = min(self.run, constants.lanes)  # inputs of one l
        stay = constants.height * self.inputs * row * self.real_bytes <= TILE_BYTES
        return stay and constants.height * row > constants.width * constants.lanes

    @property
    def is_split(self) -> bool:
        """Whether there are more parts than planes, for small batches.

        Each part stores its outputs one by one and transposes none.
        """
        return self.transposes and self.constants.parts > self.planes

    @property
    def column_outputs(self) -> int:
        """Outputs of a column (a tile of one plane) for one row of the batch."""
        return self.tile_lanes if self.is_along_outputs else self.constants.height

    @property
    def column_weights(self) -> int:
        """Packed weights per column."""
        return self.inputs * (self.constants.width if self.is_broadcast else self.column_outputs)

    @property
    def tile_elements(self) -> int:
        """Elements that a tile's weights take, or its inputs if these take more."""
        return max(self.column, self.inputs * self.x_step)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one packed weight."""
        return self.kernel.weight_item_bytes if self.kernel.is_quantized else self.real_bytes

    @property
    def column(self) -> int:
        """Distance between the packed weights of neighbouring columns: elements, or quantized values with scales."""
        if not self.kernel.is_quantized:
            return self.column_weights
        scales = SCALE_BYTES * (self.column_weights // self.inputs)
        return round_up(self.scales_offset * self.weight_bytes + scales, ALIGNMENT) // self.weight_bytes

    @property
    def scales_offset(self) -> int:
        """Values of a column before its scales, padded to whole vectors; 0 if weights have no scales."""
        return round_up(self.column_weights, MOST_LANES) if self.kernel.is_quantized else 0

    @property
    def packed_bytes(self) -> int:
        return self.packed_columns * self.column * self.weight_bytes

    @property
    def pack_inputs(self) -> int:
        """Inputs whose packed weights are written together: they fill half of an L1 cache."""
        return max(1, PACKED_AT_ONCE // (self.tile_lanes * self.weight_bytes))

    @property
    def pack_run(self) -> int:
        """Neighbouring outputs of a tile whose weights are neighbours too: all j of one k, or a vector of them.

        One if tiles begin or end between them, or if weights are quantized or tied along d: these are packed one by
        one.
        """
        if "d" in self.kernel.tie:
            return 1
        d = self.kernel.pattern.d
        run = d if self.is_short else self.constants.lanes
        is_whole = (self.tile_lanes if self.is_short else d) % run == 0
        return run if is_whole and not self.kernel.is_quantized else 1

    @property
    def square(self) -> int:
        """Inputs l of as many k, each with all j, that packing transposes in registers; 0 if it takes each alone."""
        _, _, c, d = self.kernel.pattern.shape
        are_apart = d > 1 and not self.is_along_outputs
        is_odd = self.constants.pairs and c % 2
        return 0 if self.kernel.is_quantized or "d" in self.kernel.tie or are_apart or is_odd else super().square

    @property
    def first_packed(self) -> str:
        """Expression for the first input l whose weights packing takes alone."""
        if not self.square:
            return "first" if self.is_along_outputs else "0"
        return "max(first, lane < vectors * LANES ? whole : 0)" if self.is_along_outputs else "whole"

    @property
    def registers(self) -> int:
        """Vector registers of a tile: sums, the shorter side of the operands, and one period of the longer side."""
        height, width = self.constants.height, self.constants.width
        return height * width + min(height, width) + self.period

    @property
    def period(self) -> int:
        return period_of(self.run, self.constants.lanes) if self.is_along_outputs else 1

    # ---- layout of inputs

    @property
    def reaches(self) -> bool:
        """Whether vector loads of one l's inputs reach beyond them, so that the last inputs of an array are copied."""
        d, lanes = self.kernel.pattern.d, self.constants.lanes
        return self.is_along_outputs and (d < lanes and lanes % d > 0 if self.is_short else d % lanes > 0)

    @property
    def x_row(self) -> int:
        """Elements from one row of the batch to the next, if lanes are along the outputs."""
        if not self.constants.panel:
            return self.kernel.pattern.in_features // (2 if self.constants.pairs else 1)
        row = self.inputs * (self.run if self.is_short else self.constants.lanes)
        return spaced(round_up(row, self.constants.lanes), self)

    @property
    def x_step(self) -> int:
        """Elements from one l to the next."""
        d = self.kernel.pattern.d
        if self.is_along_outputs:
            return self.constants.lanes if self.constants.panel and not self.is_short else d
        return self.tile_lanes * (d if self.x_layout == "bsf" and self.j_step == 1 else 1)

    @property
    def j_step(self) -> int:
        """Transposed inputs from one j to the next.

        If vectors hold j alone, the inputs of one j are neighbours. In X's order, a tile would read inputs that share
        few sets of the L1 cache. A gap of one input keeps the vectors of a square in different sets, too.
        """
        is_apart = self.kernel.pattern.d % self.constants.lanes == 0 and not self.constants.pairs
        return self.inputs + 1 if is_apart and self.transposes and self.x_layout == "bsf" else 1

    @property
    def unit(self) -> int:
        """Blocks have a multiple of this number of rows of the batch."""
        return self.constants.height if self.is_along_outputs else self.constants.lanes

    @property
    def tile_rows(self) -> int:
        """Rows of the batch per tile."""
        return self.constants.height if self.is_along_outputs else self.tile_lanes

    @property
    def step(self) -> int:
        """Rows of the batch by which blocks of a single factor differ: whole tiles, if a block consists of them."""
        is_whole = not self.is_along_outputs and self.constants.block % self.tile_lanes == 0
        return self.tile_lanes if is_whole else self.unit

    @property
    def ahead(self) -> Ahead:
        """A tile's share of the prefetches of the next inputs."""
        _, _, c, d = self.kernel.pattern.shape
        line = LINE_BYTES // self.kernel.x_item_bytes
        if self.is_along_outputs:
            lines, apart = (divide_up(c * d, line), line) if self.is_short else (c, d)
            # else the batch has few rows: nothing is prefetched
            rows = self.constants.height if self.is_in_rows and not self.kernel.reads_exchanged else 0
            return Ahead(rows, divide_up(lines, self.tiles), apart, self.inputs)
        if self.columns_from == "bsl_planes" or self.kernel.reads_exchanged:
            return Ahead(0, 0, line, self.inputs)
        if self.x_layout == "bsl":
            chunks = divide_up(self.constants.block, self.tile_lanes)
            return Ahead(divide_up(c, self.tiles * chunks), divide_up(self.constants.block, line), line, self.inputs)
        return Ahead(
            self.tile_lanes, divide_up(divide_up(self.scope * c * d, line), self.plane_columns), line, self.inputs
        )

    # ---- how outputs leave

    @property
    def waits(self) -> bool:
        """Whether a tile's outputs leave by streaming stores while the next tile is multiplied."""
        is_contiguous = self.is_along_outputs == (self.kernel.layout == "bsf")  # its vectors are contiguous in Y
        return bool(self.constants.streaming) and is_contiguous and not self.kernel.pattern.outputs.is_exchanged

    @property
    def is_in_rows(self) -> bool:
        """Whether vectors of outputs are contiguous in rows of Y; else outputs are stored one by one."""
        return self.kernel.layout == "bsf" and not self.kernel.pattern.outputs.is_exchanged

    @cached_property
    def scope(self) -> int:
        """Blocks on the diagonal per plane.

        If features are exchanged, it is the least number with which a plane's features are whole vectors in memory.
        That holds for inputs and outputs if possible, else for outputs. If no number that fits achieves that for
        exchanged outputs, it is the largest one that fits.
        """
        (_, b, c, d), most = self.kernel.pattern.shape, self.constants.lanes
        inputs, outputs = self.kernel.pattern.inputs, self.kernel.pattern.outputs
        if not (inputs.is_exchanged or outputs.is_exchanged):
            return super().scope
        bytes_of_one = (b + c) * d * self.tile_lanes * self.real_bytes
        common = set(scopes_of(inputs, most)).intersection(scopes_of(outputs, most))
        fitting = sorted(each for each in common if each == 1 or each * bytes_of_one <= EXCHANGED_BYTES)

        def least(*orders: Order) -> int | None:
            return next((each for each in fitting if all(self._is_whole(order, each) for order in orders)), None)

        if outputs.is_exchanged:
            return least(inputs, outputs) or least(outputs) or fitting[-1]
        usual = super().scope
        return usual if self._is_whole(inputs, usual) else least(inputs) or usual

    def _is_whole(self, order: Order, scope: int) -> bool:
        """Whether a plane with `scope` blocks on the diagonal has whole vectors of neighbouring features in memory."""
        return not order.is_exchanged or run_of_plane(order, scope) % self.constants.lanes == 0

    @property
    def splits_pairs(self) -> bool:
        """Whether the second input of a pair may come before the first one in X. Inputs are copied one by one then."""
        units = [digit.unit for digit in self.kernel.pattern.inputs.digits if digit.name == "l"]
        is_in_order = units == sorted(units, reverse=True) or not any(unit % 2 for unit in units if unit > 1)
        return bool(self.constants.pairs) and not is_in_order

    @property
    def piece_unit(self) -> int:
        return self.constants.lanes * (self.together if self.kernel.pattern.d == 1 else 1)

    @property
    def run_in(self) -> int:
        return 1 if self.splits_pairs else super().run_in

    @property
    def input_digits(self) -> list[dict[str, int]]:
        inputs = self.kernel.pattern.inputs
        return digits_of_plane(replace(inputs, text="") if self.splits_pairs else inputs, self.scope)

    @property
    def plane_digits(self) -> list[dict[str, int]]:
        """Digits of a plane's outputs, in the order in which they are stored."""
        return digits_of_plane(self.kernel.pattern.outputs, self.scope)

    @property
    def stays_in_vectors(self) -> bool:
        """Whether a plane has whole vectors of neighbouring outputs in memory."""
        return run_of_plane(self.kernel.pattern.outputs, self.scope) % self.constants.lanes == 0

    @property
    def waiting_vectors(self) -> int:
        return self.constants.height * self.constants.width

    @property
    def waiting_each(self) -> int:
        """Vectors that are stored at a time: some between inputs, or all at the end if there are too few inputs."""
        steps = self.inputs // self.ahead.step
        return divide_up(self.waiting_vectors, steps) if steps else 0

    @property
    def waiting_step(self) -> int:
        """Inputs between two stores of a finished tile's vectors, which are stored during the next tile.

        It is a power of two.
        """
        spare = max(1, self.inputs // self.ahead.step // self.waiting_vectors)
        return int(self.ahead.step * (1 << (spare.bit_length() - 1)))

    # ---- the private buffer of a work group

    @property
    def transposed_offset(self) -> int:
        """Offset of a chunk's outputs that are still to be transposed, which follow its inputs."""
        inputs = self.j_step if self.j_step > 1 else self.inputs
        return self.scope * inputs * self.kernel.pattern.d * self.tile_lanes

    @property
    def waiting_offset(self) -> int:
        """Offset of a tile's waiting outputs, which follow everything else.

        With an epilogue, their raw sums are right before them.
        """
        _, b, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            is_kept = (self.constants.panel or self.reaches) and self.columns_at_once == 1
            rows = max(self.constants.block, self.constants.height) if is_kept else self.constants.height
            used = rows * self.x_row + self.constants.lanes
        elif self.transposes:
            outputs = round_up(self.scope * b * d, self.constants.lanes) if self.kernel.layout == "bsf" else 0
            used = self.transposed_offset + outputs * self.tile_lanes
        else:
            used = self.inputs * self.tile_lanes
        return round_up(used, LINE_BYTES) + (self.kept if self.waits and self.kernel.epilogue.words else 0)

    @property
    def kept(self) -> int:
        return round_up(self.waiting_vectors * self.constants.lanes, LINE_BYTES)

    @property
    def widened_offset(self) -> int:
        """Offset of a column's widened weights of eight bits, with their scales. They follow everything else."""
        return self.waiting_offset + (self.kept if self.waits else 0)

    @property
    def slot(self) -> int:
        widens = self.kernel.is_quantized and not self.is_along_outputs  # else each weight is widened in a register
        return self.widened_offset + (round_up(self.scales_offset + self.constants.height, LINE_BYTES) if widens else 0)


def lie_in_pairs(kernel: KernelSpec) -> bool:
    """Whether pairs of 16-bit inputs are contiguous in rows, and readable as one element of the sums' type."""
    is_whole = kernel.pattern.d == 1 and kernel.pattern.c % 2 == 0
    return kernel.layout == "bsf" and is_whole and kernel.stride == "dense" and not kernel.reads_exchanged


def needs_panel(kernel: KernelSpec, pairs: int) -> bool:
    """Whether inputs must be copied: exchanged, not in rows, or neither elements of the sums' type nor contiguous
    pairs."""
    if kernel.layout == "bsl" or kernel.reads_exchanged:
        return True
    return kernel.x_item_bytes < 4 and not (pairs and lie_in_pairs(kernel))


def spaced(elements: int, shape: VectorTiling) -> int:
    """A distance of at least `elements` elements whose multiples use many sets of a cache."""
    return elements + (shape.constants.lanes if elements * shape.real_bytes % CONFLICTING_BYTES == 0 else 0)
