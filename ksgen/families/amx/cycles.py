"""Estimated cycles of a processor's cores for a kernel by matrix tiles: terms of the cost model, and of the choice of
defaults.

Figures follow Intel's description of the instructions. A product of two tiles takes 16 cycles, and a load of a tile
from the first-level cache takes 8. Lines from farther away are calibrated in docs/kernels/amx.md. The model orders
constants of one kernel. It was never measured.
"""

from typing import NamedTuple

from ksgen.families.amx.shape import LINE_BYTES, PAIR, ROWS, TILE_ITEMS, AmxTiling
from ksgen.families.base import Work
from ksgen.families.expected import unevenness
from ksgen.families.tiles import divide_up
from ksgen.families.vector.cycles import EXPOSED
from ksgen.families.vector.planes import round_up

DOT = 16  # cycles per product of two tiles
# cycles per input that is copied into the panel, for each of its parts; per output that is finished and stored
ITEM, OUTPUT = 0.3, 0.3
FETCH, SHARE = 0.5, 8  # vector cycles per line that is prefetched; per call of the work between products
APART = 1.25  # factor for copies that no products overlap: memory traffic does not overlap them either
TILE_BYTES = 2 * TILE_ITEMS
DOT_MULTIPLY_ADDS = ROWS * TILE_ITEMS
SECOND_LEVEL_BYTES = 1792 * 1024  # for panels, weights and sums, of 2 MB
FETCHED, THIRD_LEVEL = 1.3, 6.0  # cycles per line that is prefetched from the second level, and from farther away
BETWEEN = 2 * THIRD_LEVEL  # cycles per line of an intermediate that exceeds the second level, written and read again
MEMORY = 12.4  # cycles of a core per line that is copied from memory or to it


class Held(NamedTuple):
    """Bytes that pass a core's second-level cache repeatedly."""

    kept: int  # panels, sums, prefetched inputs, and intermediates
    weights: int


class Lines(NamedTuple):
    """Cache lines per product of two tiles, from beyond the first-level cache."""

    inputs: float
    weights: float
    again: float  # sums that are continued soon
    sums: float  # sums that wait for those of all j
    copied: float  # into panels


def dots(shape: AmxTiling, batch: int) -> int:
    """Products of two tiles in one launch."""
    return divide_up(batch, ROWS) * shape.packed_tiles * shape.steps * shape.products.products


def factor_cycles(shape: AmxTiling, held: Held, batch: int) -> float:
    """Cycles of one factor, without the memory traffic of X and Y.

    Panels that alternate are copied during products, others before them.
    """
    copied, left = copy_cycles(shape, batch), OUTPUT * batch * shape.kernel.pattern.out_features
    meanwhile, products, lines = copied * shape.copied_meanwhile, dots(shape, batch), lines_of(shape)
    share = FETCH * (lines.inputs + lines.weights + lines.again) + SHARE / (
        (PAIR // ROWS) ** 2 * shape.products.products / shape.shares
    )
    return (
        max(dot_cycles(shape, held) * products, meanwhile + left + share * products)
        + APART * (copied - meanwhile)
        + evicted_cycles(shape, held) * products
    )


def copy_cycles(shape: AmxTiling, batch: int) -> float:
    kernel, constants = shape.kernel, shape.constants
    entries = divide_up(batch, ROWS) * ROWS
    copied = entries * kernel.pattern.in_features * max(1.0, constants.parts / shape.planes)
    return ITEM * copied * shape.products.parts if constants.panel else 0.0


def held_of(shape: AmxTiling) -> Held:
    """Resident bytes of a product alone, whose blocks pass over one plane's weights, or over those of all planes."""
    weights = shape.plane_weights if shape.constants.parts >= shape.planes else shape.packed_bytes
    return Held(shape.slot * 4 + shape.ahead_bytes, weights)


def lines_of(shape: AmxTiling) -> Lines:
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


def dot_cycles(shape: AmxTiling, held: Held) -> float:
    """Cycles per product on average: its own, or those of its lines of operands and sums, which are prefetched one step
    before. Lines that exceed the second-level cache come from beyond it."""
    lines, room = lines_of(shape), SECOND_LEVEL_BYTES - held.kept
    passing = FETCHED if held.weights <= room else THIRD_LEVEL
    own = FETCHED if shape.group_weights <= room else THIRD_LEVEL
    waits = FETCHED * lines.again + own * (lines.inputs + lines.sums) + passing * (lines.copied + lines.weights)
    return max(DOT, waits) + 0.1 * lines.weights


def evicted_cycles(shape: AmxTiling, held: Held) -> float:
    """Cycles per product for written lines that leave the second-level cache before they are read again."""
    lines, room = lines_of(shape), SECOND_LEVEL_BYTES - held.kept
    sums = lines.sums / 2 if shape.group_weights > room else 0.0
    return MEMORY * (sums + (lines.copied if held.weights > room else 0.0))


def launch_cycles(work: Work, cores: int) -> float:
    """Cycles of all cores together until a launch is done: its instructions, and its reads and writes of memory."""
    busy, moved = work.cycles * unevenness(work.blocks / cores), MEMORY * work.memory_bytes / LINE_BYTES
    return max(busy, moved) + EXPOSED * min(busy, moved)
