"""How many cycles of a processor's cores a kernel by matrix tiles takes: terms of the cost model, and of the choice of defaults.

By what Intel states of the instructions: a product of two tiles takes 16 cycles, a tile that the first-level cache holds 8 to load. Lines
from behind it as docs/kernels/amx.md calibrates them. Good for an order among constants of one kernel. Never measured.
"""

from typing import NamedTuple

from ksgen.families.amx.shape import LINE_BYTES, PAIR, ROWS, TILE_ITEMS, Shape
from ksgen.families.base import Work
from ksgen.families.expected import unevenness
from ksgen.families.tiles import divide_up
from ksgen.families.vector.cycles import EXPOSED, LAUNCH, TASK
from ksgen.families.vector.planes import round_up

DOT = 16  # cycles, of a product of two tiles
ITEM, OUTPUT = 0.3, 0.3  # cycles: an input that is copied into the panel, for each of its parts; an output that is finished and stored
FETCH, SHARE = 0.5, 8  # of vectors: a line that is fetched; a call of what works beside products
APART = 1.25  # of copies beside which nothing is multiplied: memory does not work beside them either
TILE_BYTES = 2 * TILE_ITEMS
DOT_MULTIPLY_ADDS = ROWS * TILE_ITEMS
SECOND_LEVEL_BYTES = 1792 * 1024  # that panels, weights and sums may have of 2 MB
FETCHED, THIRD_LEVEL = 1.3, 6.0  # cycles a line from the second level and from behind it, that is fetched before it is wanted
BETWEEN = 2 * THIRD_LEVEL  # cycles a line of what lies between factors, written and read again, where the second level does not hold it
MEMORY = 12.4  # of a core's cycles, a line that is copied from memory or to it


class Held(NamedTuple):
    """Bytes that pass a core's second-level cache again and again."""

    kept: int  # panels, sums, inputs that are fetched ahead, and what lies between factors
    weights: int


class Lines(NamedTuple):
    """Cache lines for each product of two tiles, from behind the first-level cache."""

    inputs: float
    weights: float
    again: float  # sums that are taken up again, soon
    sums: float  # that wait for those of all j
    copied: float  # into panels


def dots(shape: Shape, batch: int) -> int:
    """Products of two tiles, of one launch."""
    return divide_up(batch, ROWS) * shape.packed_tiles * shape.steps * shape.products.products


def multiply_cycles(shape: Shape, batch: int) -> float:
    """Of all cores together, for one launch."""
    tasks = divide_up(batch, shape.constants.block) * shape.constants.parts
    return factor_cycles(shape, held_of(shape), batch) + TASK * tasks + LAUNCH


def factor_cycles(shape: Shape, held: Held, batch: int) -> float:
    """Without the memory of X and Y. Panels that take turns are copied beside products, others before them."""
    copied, left = copy_cycles(shape, batch), OUTPUT * batch * shape.kernel.pattern.out_features
    beside, products, lines = copied * shape.copied_beside, dots(shape, batch), lines_of(shape)
    share = FETCH * (lines.inputs + lines.weights + lines.again) + SHARE / dots_of_a_share(shape)
    return (
        max(dot_cycles(shape, held) * products, beside + left + share * products)
        + APART * (copied - beside)
        + evicted_cycles(shape, held) * products
    )


def dots_of_a_share(shape: Shape) -> float:
    """Products of a share of a step, after which vectors work."""
    return (PAIR // ROWS) ** 2 * shape.products.products / shape.shares


def copy_cycles(shape: Shape, batch: int) -> float:
    kernel, constants = shape.kernel, shape.constants
    entries = divide_up(batch, ROWS) * ROWS
    copied = entries * kernel.pattern.in_features * max(1.0, constants.parts / shape.planes)
    return ITEM * copied * shape.products.parts if constants.panel else 0.0


def held_of(shape: Shape) -> Held:
    """Of a product alone, whose blocks go through a plane's weights, or through those of all planes."""
    weights = shape.plane_weights if shape.constants.parts >= shape.planes else shape.packed_bytes
    return Held(shape.slot * 4 + shape.ahead_bytes, weights)


def lines_of(shape: Shape) -> Lines:
    constants, products, lines = shape.constants, shape.products.products, shape.tile_bytes // LINE_BYTES
    a_step = (PAIR // ROWS) ** 2 * products  # products of two by two tiles
    both = PAIR // ROWS * lines / a_step  # lines of two tiles of an operand
    outputs = min(constants.outputs, round_up(shape.kernel.pattern.b, PAIR))
    return Lines(
        both if shape.inputs_pass else both * PAIR / outputs,
        both if shape.weights_pass else both * PAIR / constants.block,
        (shape.chunks - 1) * 2 * PAIR / (shape.steps * a_step),
        2 * 2 * PAIR / (shape.steps * a_step),
        both * PAIR / round_up(shape.kernel.pattern.b, PAIR) if constants.panel else 0.0,
    )


def dot_cycles(shape: Shape, held: Held) -> float:
    """Of a product, on average: itself, or the lines of its operands and sums, which are fetched a step before. What the second-level cache
    has no room for comes from behind it."""
    lines, room = lines_of(shape), SECOND_LEVEL_BYTES - held.kept
    passing = FETCHED if held.weights <= room else THIRD_LEVEL
    own = FETCHED if shape.group_weights <= room else THIRD_LEVEL
    waits = FETCHED * lines.again + own * (lines.inputs + lines.sums) + passing * (lines.copied + lines.weights)
    return max(DOT, waits) + 0.1 * lines.weights


def evicted_cycles(shape: Shape, held: Held) -> float:
    """Of a product, for what was written and leaves the second-level cache before it is wanted."""
    lines, room = lines_of(shape), SECOND_LEVEL_BYTES - held.kept
    sums = lines.sums / 2 if shape.group_weights > room else 0.0
    return MEMORY * (sums + (lines.copied if held.weights > room else 0.0))


def launch_cycles(work: Work, cores: int) -> float:
    """Of all cores together until a launch is done: by its instructions, and by what it reads from memory and writes there."""
    busy, moved = work.cycles * unevenness(work.blocks / cores), MEMORY * work.memory_bytes / LINE_BYTES
    return max(busy, moved) + EXPOSED * min(busy, moved)
