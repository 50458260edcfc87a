"""Estimated cycles of a processor's cores for a vector kernel: the products, loads and cache misses of its tiles, as
terms of the cost model.

The model assumes a core as built since 2015. The core does two vector operations and two loads per cycle, with results
after four cycles. It takes 64 bytes per cycle from its L2 cache. The model ranks constants of one kernel, and
measures nothing.
"""

from dataclasses import dataclass
from math import gcd, prod

from ksgen.families.tiles import divide_up
from ksgen.families.traffic import bytes_of_exchanged_row
from ksgen.families.vector.planes import Planes
from ksgen.families.vector.shape import LINE_BYTES, VectorTiling
from ksgen.order import Order

LATENCY = 4  # cycles until a sum can be added to again
AT_ONCE = 2  # vector operations, and loads, per cycle
# an L1 cache: its size, the lines of a set, and the distance of lines that share a set
FIRST_LEVEL_BYTES, WAYS, SET_BYTES = 32 * 1024, 8, 4096
SECOND_LEVEL_RATE, BEYOND_RATE = 64, 8  # bytes per cycle, from the L2 cache, and from beyond it
SECOND_LEVEL = 1024 * 1024  # bytes of inputs that an L2 cache holds, in addition to outputs and weights
TILE, TASK, LAUNCH = 12, 300, 5000  # additional cycles to begin a tile, a block of the batch, a launch
COPY, TRANSPOSE = 4, 20  # cycles per vector that is copied in a cache, or transposed with its neighbours
RAGGED = 200  # cycles per vector that is stored element by element, if a block ends within a tile
ELEMENT = 4  # cycles per element that is moved by itself, to another line than its neighbours
EXPOSED = 0.3  # share of the shorter of memory's and the cores' time that the longer one does not hide
NOT_HIDDEN = 0.75  # share of a multiply-add's time that loads do not hide


@dataclass(frozen=True)
class Tile:
    """Work of a tile in one step along l, or along the batch."""

    height: int
    width: int
    registers: int  # vector registers of the processor
    shuffles: int = 0  # operands that are spread over the lanes, per step
    products: int = 1  # vector products per sum

    @property
    def step(self) -> float:
        """Cycles of one step."""
        operations = (self.products * self.height * self.width + self.shuffles) / AT_ONCE
        loads = (self.height + self.width) / AT_ONCE
        spilled = max(0, self.height * self.width + min(self.height, self.width) + 1 - self.registers)
        return max(operations, NOT_HIDDEN * operations + loads, LATENCY) + 2 * spilled

    @property
    def sums(self) -> int:
        return self.height * self.width


def tile_of(shape: Planes) -> Tile:
    constants = shape.constants
    is_spread = shape.is_along_outputs and shape.run > 1 and shape.run % constants.lanes
    transposed = 3 * min(constants.height, constants.width) if shape.kernel.arithmetic.is_complex else 0
    shuffles = transposed + (constants.height * shape.period if is_spread else 0)
    registers = 32 if constants.lanes * shape.real_bytes >= 64 else 16
    return Tile(constants.height, constants.width, registers, shuffles, shape.kernel.arithmetic.reals_per_number)


def multiply_cycles(shape: VectorTiling, batch: int) -> float:
    """Cycles of all cores together, for one launch of a factor."""
    blocks = divide_up(batch, shape.constants.block)
    # the kernel divides the batch into blocks in the same way
    block = min(divide_up(divide_up(batch, shape.step), blocks) * shape.step, batch)
    tasks = blocks * shape.constants.parts
    return blocks * (max(_tiles(shape, block), _missed(shape, block)) + _moved(shape, block)) + TASK * tasks + LAUNCH


def _tiles(shape: VectorTiling, block: int) -> float:
    """Cycles of a block's multiply-adds and stores."""
    tile = tile_of(shape)
    ragged = 0 if shape.is_along_outputs else divide_up(block % shape.tile_lanes, shape.constants.lanes) * tile.height
    return shape.columns * (_across(shape, block) * (shape.inputs * tile.step + tile.sums + TILE) + RAGGED * ragged)


def _across(shape: VectorTiling, block: int) -> int:
    """Tiles of a column in a block."""
    return divide_up(block, shape.constants.height if shape.is_along_outputs else shape.tile_lanes)


def _missed(shape: VectorTiling, block: int) -> float:
    """Cycles of reads that miss the L1 cache from tile to tile."""
    weights = shape.column_weights * shape.real_bytes  # bytes of a column
    tiles, planes = _across(shape, block), divide_up(shape.columns, shape.tiles)
    if not shape.is_along_outputs:
        chunk = shape.inputs * shape.tile_lanes * shape.real_bytes
        again = 1 if chunk + weights <= FIRST_LEVEL_BYTES else shape.tiles
        return tiles * (shape.columns * weights / SECOND_LEVEL_RATE + planes * chunk * again / _rate(chunk))
    row = row_bytes(shape)
    if shape.columns_at_once > 1:
        return (shape.columns * weights * tiles + planes * block * row) / SECOND_LEVEL_RATE
    tile_rows = shape.constants.height * row
    weights_again = 1 if weights + tile_rows <= FIRST_LEVEL_BYTES else tiles
    rows_stay = block * row + weights <= FIRST_LEVEL_BYTES and not conflicts(shape)
    rows_again = 1 if rows_stay else shape.tiles
    read = planes * block * row * rows_again
    if conflicts(shape):
        read += shape.columns * tiles * shape.constants.height * shape.kernel.pattern.c * LINE_BYTES
    rate = _rate(block * (row if shape.constants.panel else shape.kernel.in_features * shape.real_bytes))
    return shape.columns * weights * weights_again / SECOND_LEVEL_RATE + read / rate


def _rate(held_bytes: float) -> int:
    """Bytes per cycle at which `held_bytes` bytes are read repeatedly."""
    return SECOND_LEVEL_RATE if held_bytes <= SECOND_LEVEL else BEYOND_RATE


def row_bytes(shape: VectorTiling) -> int:
    """Bytes of the cache lines that hold one row's inputs of a plane."""
    _, _, c, d = shape.kernel.pattern.shape
    if shape.constants.panel:
        return shape.x_row * shape.real_bytes
    apart = d * shape.real_bytes
    return c * (apart if apart < LINE_BYTES else max(LINE_BYTES, shape.run * shape.real_bytes))


def conflicts(shape: VectorTiling) -> bool:
    """Whether a tile's rows evict each other from the L1 cache, because of the distance between them."""
    if shape.constants.panel or not shape.is_along_outputs:
        return False
    sets = SET_BYTES // gcd(SET_BYTES, shape.x_row * shape.real_bytes)
    return shape.constants.height > WAYS * sets // 2


def _moved(shape: VectorTiling, block: int) -> float:
    """Cycles of copies of a block's inputs and outputs. Each part of a plane copies the plane's inputs."""
    kernel, pattern = shape.kernel, shape.kernel.pattern
    inputs = int(pattern.in_features * block * max(1.0, shape.constants.parts / shape.planes))
    return (
        inputs * _input_cycles(shape)
        + pattern.out_features * block * _output_cycles(shape)
        + unused_line_cycles(shape, pattern.inputs, shape.x_layout, kernel.x_item_bytes, block)
        + unused_line_cycles(shape, pattern.outputs, kernel.layout, kernel.item_bytes, block)
    )


def _input_cycles(shape: VectorTiling) -> float:
    """Cycles to copy an input into the order in which tiles read it."""
    inputs, lanes = shape.kernel.pattern.inputs, shape.constants.lanes
    if shape.is_along_outputs:
        if shape.kernel.layout == "bsl" or (inputs.is_exchanged and shape.piece == 1):
            return ELEMENT
        return COPY / lanes if shape.constants.panel else 0.0
    if shape.x_layout == "bsl":
        return COPY / lanes
    is_apart = inputs.is_exchanged and shape.run_in % lanes > 0
    return max(TRANSPOSE / lanes, ELEMENT if is_apart else 0)


def _output_cycles(shape: VectorTiling) -> float:
    """Cycles to store an output, in addition to those of its tile."""
    if shape.is_along_outputs:
        return 0.0 if shape.is_in_rows else ELEMENT
    if shape.kernel.layout == "bsl":
        return 0.0
    is_apart = shape.kernel.pattern.outputs.is_exchanged and not shape.stays_in_vectors
    return TRANSPOSE / shape.constants.lanes + (ELEMENT if is_apart else 0)


def unused_line_cycles(shape: Planes, order: Order, layout: str, item_bytes: int, block: int) -> float:
    """Cycles for the parts of cache lines that a plane does not use, if features in batch-size-first are exchanged.

    The next planes read the same lines of the block, from the L2 cache if it holds a plane's lines.
    """
    if not order.is_exchanged or layout == "bsl":
        return 0.0
    _, inner, d = order.sizes
    plane = (1, inner, shape.run) if shape.is_along_outputs else (shape.scope, inner, d)
    row, lines = order.count * item_bytes, bytes_of_exchanged_row(order, plane, item_bytes, LINE_BYTES)
    return block * (lines - row) / _rate(block * lines * prod(plane) / order.count)
