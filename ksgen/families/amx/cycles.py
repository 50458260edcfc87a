"""How many cycles of a processor's cores a kernel by matrix tiles takes: terms of the cost model.

By what Intel states of the instructions: a product of two tiles takes 16 cycles, a tile that the first-level cache holds 8 to load.
Good for an order among constants of one kernel. Never measured.
"""

from ksgen.families.amx.shape import PAIR, ROWS, TILE_ITEMS, Shape
from ksgen.families.tiles import divide_up
from ksgen.families.vector.cycles import LAUNCH, SECOND_LEVEL_BYTES, TASK

DOT = 16  # cycles, of a product of two tiles
TILE_BYTES = 2 * TILE_ITEMS
ITEM, OUTPUT = 0.4, 0.3  # cycles: an input that is copied into the panel, for each of its parts; an output that is finished and stored
DOT_MULTIPLY_ADDS = ROWS * TILE_ITEMS


def dots(shape: Shape, batch: int) -> int:
    """Products of two tiles, of one launch."""
    return divide_up(batch, ROWS) * shape.packed_tiles * shape.steps * shape.products.products


def multiply_cycles(shape: Shape, batch: int) -> float:
    """Of all cores together, for one launch."""
    kernel, constants = shape.kernel, shape.constants
    blocks = divide_up(batch, constants.block)
    entries = divide_up(batch, ROWS) * ROWS
    copied = entries * kernel.pattern.in_features * max(1.0, constants.parts / shape.planes)
    weights = blocks * shape.packed_bytes / SECOND_LEVEL_BYTES
    rows = blocks * divide_up(shape.tiles, 2) * _rows_again(shape) / SECOND_LEVEL_BYTES
    panel = ITEM * copied * shape.products.parts if constants.panel else 0.0
    outputs = OUTPUT * batch * kernel.pattern.out_features
    return max(DOT * dots(shape, batch), weights + rows) + panel + outputs + TASK * blocks * constants.parts + LAUNCH


def _rows_again(shape: Shape) -> float:
    """Bytes of a block's inputs that come from the second-level cache for two tiles of outputs: where j take turns, once a group."""
    a, _, _, d = shape.kernel.pattern.shape
    return a * d * shape.constants.block * shape.steps * TILE_BYTES / ROWS * shape.products.parts * PAIR / shape.constants.outputs
