"""How many cycles of a processor's cores a kernel by matrix tiles takes: terms of the cost model, and of the choice of defaults.

By what Intel states of the instructions: a product of two tiles takes 16 cycles, a tile that the first-level cache holds 8 to load. Lines
from behind it as `benchmarks/tiles` calibrates them. Good for an order among constants of one kernel. Never measured.
"""

from typing import NamedTuple

from ksgen.families.amx.shape import LINE_BYTES, PAIR, ROWS, TILE_ITEMS, Shape
from ksgen.families.base import Work
from ksgen.families.expected import unevenness
from ksgen.families.tiles import divide_up
from ksgen.families.vector.cycles import EXPOSED, LAUNCH, TASK

DOT = 16  # cycles, of a product of two tiles
TILE_BYTES = 2 * TILE_ITEMS
TILE_LINES = TILE_BYTES // LINE_BYTES
ITEM, OUTPUT = 0.4, 0.3  # cycles: an input that is copied into the panel, for each of its parts; an output that is finished and stored
DOT_MULTIPLY_ADDS = ROWS * TILE_ITEMS
FIRST_LEVEL_BYTES, SECOND_LEVEL_BYTES = 42 * 1024, 1792 * 1024  # that inputs, weights and sums may have of 48 KB and 2 MB
SECOND_LEVEL, THIRD_LEVEL = 2.2, 6.0  # cycles a line from there, where products wait for it
FETCHED = 1.3  # the same of lines that are fetched before
BETWEEN = 2 * THIRD_LEVEL  # cycles a line of what lies between factors, written and read again, where the second level does not hold it
MEMORY = 12.4  # of a core's cycles, a line that is copied from memory or to it


class Held(NamedTuple):
    """Bytes that pass a core's second-level cache again and again."""

    kept: int  # panels, sums, and what lies between factors
    weights: int


def dots(shape: Shape, batch: int) -> int:
    """Products of two tiles, of one launch."""
    return divide_up(batch, ROWS) * shape.packed_tiles * shape.steps * shape.products.products


def multiply_cycles(shape: Shape, batch: int) -> float:
    """Of all cores together, for one launch."""
    tasks = divide_up(batch, shape.constants.block) * shape.constants.parts
    return dot_cycles(shape, held_of(shape)) * dots(shape, batch) + moved_cycles(shape, batch) + TASK * tasks + LAUNCH


def moved_cycles(shape: Shape, batch: int) -> float:
    """Inputs that are copied into panels, and outputs that leave."""
    kernel, constants = shape.kernel, shape.constants
    entries = divide_up(batch, ROWS) * ROWS
    copied = entries * kernel.pattern.in_features * max(1.0, constants.parts / shape.planes)
    panel = ITEM * copied * shape.products.parts if constants.panel else 0.0
    return panel + OUTPUT * batch * kernel.pattern.out_features


def held_of(shape: Shape) -> Held:
    """Of a product alone, whose blocks go through a plane's weights."""
    return Held(shape.slot * 4, shape.run * shape.tiles * shape.steps * shape.step_items * 2)


def dot_cycles(shape: Shape, held: Held) -> float:
    """Of a product, on average, with the lines of inputs and sums that it waits for, and of weights, that are fetched before."""
    constants, parts, products = shape.constants, shape.products.parts, shape.products.products
    own = SECOND_LEVEL if held.kept <= SECOND_LEVEL_BYTES else THIRD_LEVEL
    far = FETCHED if held.kept + held.weights <= SECOND_LEVEL_BYTES else THIRD_LEVEL
    step = PAIR // ROWS * TILE_LINES * parts  # lines of two tiles of an operand
    a_step = (PAIR // ROWS) ** 2 * products  # products of two by two tiles
    rows = step / a_step / (divide_up(constants.outputs, PAIR) if fits_first_level(shape) else 1)
    columns = step / a_step / (constants.block / PAIR)
    sums = (shape.chunks - 1) / shape.chunks * TILE_LINES / (products * constants.depth)
    return max(DOT + own * (rows + sums), far * columns + FETCHED * (rows + sums)) + 0.1 * columns


def launch_cycles(work: Work, cores: int) -> float:
    """Of all cores together until a launch is done: by its instructions, and by what it reads from memory and writes there."""
    busy, moved = work.cycles * unevenness(work.blocks / cores), MEMORY * work.memory_bytes / LINE_BYTES
    return max(busy, moved) + EXPOSED * min(busy, moved)


def fits_first_level(shape: Shape) -> bool:
    """Whether a block's inputs, as deep as they are taken, stay there while weights pass (two tiles, and the next two), and sums."""
    tiles = shape.constants.block // ROWS + 2 * (PAIR // ROWS)
    return tiles * shape.constants.depth * shape.products.parts * TILE_BYTES + 2 * 4 * PAIR * shape.constants.block <= FIRST_LEVEL_BYTES
