"""Constants and sizes of all factors of one launch by matrix tiles, and estimated cycles of a processor's cores.

The factors are applied to a block of the batch while it is in a core's second-level cache. A factor alone is a chain of
one. Figures follow Intel's description of the instructions. A product of two tiles takes 16 cycles, a load of a tile
from the first-level cache takes 8. Lines from farther away are calibrated in docs/kernels/amx.md. The model orders
constants of one kernel. It was never measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ksgen.families.amx.shape import LINE_BYTES, PAIR, ROWS, TILE_ITEMS, AmxConstants, AmxTiling
from ksgen.families.base import Work
from ksgen.families.chains import listed, numbers_of, own_of_factors, places, tiles_of
from ksgen.families.expected import unevenness
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.chain import LaunchTiling
from ksgen.families.vector.cycles import EXPOSED, LAUNCH, TASK
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

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


_WORDS = ("outputs", "panel", "depth")  # constants of each factor, in `tiles`


@dataclass(frozen=True)
class AmxChainConstants(Constants):
    """Constants of several factors that a search may change."""

    entry_family: ClassVar[str] = "amx_chain"

    block: int  # rows of the batch that a work group takes at a time
    tiles: str  # each factor's constants, named by `_WORDS`
    streaming: int  # 1: the layer's outputs leave by streaming stores; 0: they go into the caches

    @classmethod
    def of(cls, kernel: KernelSpec, block: int, factors: list[AmxConstants], streaming: int) -> "AmxChainConstants":
        """Constants of a chain whose factors have these by themselves."""
        return cls(block, tiles_of(kernel, (f"{own.outputs} {own.panel} {own.depth}" for own in factors)), streaming)

    @property
    def parsed(self) -> list[AmxConstants]:
        """Constants of each factor by itself. Intermediates are read at once, so they stay in the cache."""
        each = ((numbers_of(self.tiles, words, _WORDS), is_last) for words, is_last in listed(self.tiles))
        return [
            AmxConstants(block=self.block, parts=1, streaming=self.streaming if is_last else 0, **numbers)
            for numbers, is_last in each
        ]


@dataclass(frozen=True)
class AmxFactor(AmxTiling):
    """A factor in a chain. After the first factor, inputs are in the cache, and none are prefetched."""

    is_first: bool

    @property
    def ahead_lines(self) -> int:
        return super().ahead_lines if self.is_first else 0

    @property
    def copy_lines(self) -> int:
        return super().copy_lines if self.is_first else 0

    @property
    def copied_meanwhile(self) -> float:
        """Share of all planes but the first, which waits for the previous factor's outputs."""
        return super().copied_meanwhile * (self.planes - 1) / self.planes


@dataclass(frozen=True)
class AmxChainTiling(LaunchTiling):
    """Sizes derived from the factors of one launch and their constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: AmxConstants | AmxChainConstants

    @cached_property
    def factors(self) -> Sequence[AmxTiling]:
        own = own_of_factors(self.kernel, self.constants)
        return (
            [AmxFactor(*each, not number) for number, each in enumerate(own)] if self.is_chain else [AmxTiling(*own[0])]
        )

    @property
    def pitch(self) -> int:
        """Elements from one feature of an intermediate to the next, in batch-size-last. They are an odd number of
        lines, so that features use many sets of a cache."""
        lines = divide_up(self.constants.block * self.kernel.item_bytes, LINE_BYTES) | 1
        return lines * LINE_BYTES // self.kernel.item_bytes

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        rows = self.constants.block if self.kernel.layout == "bsf" else self.pitch
        features = max((each.pattern.out_features for each in places(self.kernel) if not each.is_last), default=0)
        return round_up(divide_up(features * rows * self.kernel.item_bytes, 4), LINE_BYTES)

    @property
    def held(self) -> Held:
        """Bytes that a block passes over: the private buffer, inputs and outputs, and the weights of all factors."""
        if not self.is_chain:
            return held_of(self.factors[0])
        return Held(
            self.slot * 4 + passing_bytes(self.kernel, self.constants.block, self.constants.streaming),
            self.packed_bytes,
        )


def passing_bytes(kernel: KernelSpec, block: int, streaming: int) -> int:
    """Bytes of a block's inputs, of the next block's, which are prefetched, and of outputs without streaming stores."""
    return block * kernel.item_bytes * (2 * kernel.in_features + (0 if streaming else kernel.pattern.out_features))


def multiply_cycles(shape: AmxChainTiling, batch: int) -> float:
    """Cycles of all cores together, for one launch."""
    held, tasks = shape.held, divide_up(batch, shape.constants.block) * shape.parts
    found = sum(factor_cycles(factor, held, batch) + TASK * tasks for factor in shape.factors) + LAUNCH
    if held.kept + held.weights <= SECOND_LEVEL_BYTES:
        return found
    between = sum(at.pattern.out_features for at in places(shape.kernel) if not at.is_last)
    return found + BETWEEN * batch * between * shape.kernel.item_bytes / LINE_BYTES
