"""Constants and sizes of all factors of one launch by matrix tiles, and estimated cycles of a processor's cores.

The factors are applied to a block of the batch while it is in a core's L2 cache. A single factor is a chain of one. The
rates were measured on two cores of a Xeon with tiles (docs/kernels/amx-counts.md). The estimates are only for ranking
the constants of one kernel: launches take one to two times the estimated time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ksgen.families.amx.shape import (
    LANES,
    LINE_BYTES,
    PAIR,
    ROWS,
    TILE_ITEMS,
    AmxConstants,
    AmxTiling,
    TilePlanes,
    spread,
)
from ksgen.families.chains import listed, numbers_of, own_of_factors, places, spelled, tiles_of
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.chain import LaunchTiling
from ksgen.families.vector.cycles import ELEMENT, LAUNCH, TASK
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

DOT = 16  # cycles per product of two tiles
# cycles per component of an input that is copied into the panel, and per output that is finished and stored. The first
# number is for batch-size-first, where j are interleaved; the second is for batch-size-last, along the batch
INTERLEAVED, ALONG = 1.0, 0.3
PIECE, PAGE_BYTES = 70, 4096  # cycles per piece of a row in batch-size-last, if rows have PAGE_BYTES or more
APART = 1.25  # multiplies the cycles of copies that overlap no products, because they wait for memory
TILE_BYTES = 2 * TILE_ITEMS
DOT_MULTIPLY_ADDS = ROWS * TILE_ITEMS
SECOND_LEVEL_BYTES = 1792 * 1024  # for panels, weights and sums, out of an L2 cache's 2 MB
FETCHED, THIRD_LEVEL = 1.8, 6.0  # cycles per line of operands from the second level, and from farther away
AGAIN = 1.7  # cycles per line of sums that tiles load or store: no product overlaps them
# cycles to write a line of an intermediate and to read it again, if a block's data exceed the L2 cache
BETWEEN = 2 * THIRD_LEVEL
MEMORY = 12.4  # cycles of a core per line that is copied from memory or to it


class Resident(NamedTuple):
    """Bytes that stay in a core's L2 cache, and bytes of weights that are read repeatedly."""

    kept: int  # panels, sums, prefetched inputs, and intermediates
    weights: int


def dots(shape: AmxTiling, batch: int) -> int:
    """Products of two tiles in one launch."""
    return divide_up(batch, ROWS) * shape.packed_tiles * shape.steps * shape.products.products


def factor_cycles(shape: AmxTiling, held: Resident, batch: int) -> float:
    """Cycles of one factor, without the memory traffic of X and Y.

    Vector instructions copy inputs and store outputs between products. Their cycles are added nevertheless, because
    products wait for their operands.
    """
    products, copied = dots(shape, batch), copy_cycles(shape, batch)
    stored = (_element_cycles(shape) + exchange_cycles(shape, "outputs")) * batch * shape.kernel.pattern.out_features
    return (
        product_cycles(shape, held) * products
        + copied * (shape.copied_meanwhile + APART * (1 - shape.copied_meanwhile))
        + stored
        + piece_cycles(shape, batch)
    )


def _element_cycles(shape: AmxTiling) -> float:
    return INTERLEAVED if shape.is_bsf else ALONG


def _input_copies(shape: AmxTiling) -> float:
    """Number of times that inputs are copied: once by each part that has outputs of their plane."""
    return max(1.0, shape.constants.parts / shape.planes)


def copy_cycles(shape: AmxTiling, batch: int) -> float:
    inputs = divide_up(batch, ROWS) * ROWS * shape.kernel.in_features * _input_copies(shape)
    copied = _element_cycles(shape) * shape.products.parts + exchange_cycles(shape, "inputs")
    return copied * inputs if shape.constants.panel else 0.0


def exchange_cycles(shape: TilePlanes, features: str) -> float:
    """Additional cycles per feature if features are exchanged in batch-size-first, else 0.

    Runs of a whole vector are moved at once. Features of shorter runs take as long as if they were moved one by one.
    """
    order = getattr(shape.kernel.pattern, features)
    if not (shape.is_bsf and order.is_exchanged):
        return 0.0
    run = shape.k_run if features == "outputs" else shape.in_run
    return ELEMENT / LANES if run == LANES else ELEMENT


def piece_cycles(shape: AmxTiling, batch: int) -> float:
    """Cycles to begin pieces of rows in batch-size-last, if each row lies in pages of its own.

    Each block of the batch has a piece of every row.
    """
    kernel = shape.kernel
    if shape.is_bsf or batch * kernel.item_bytes < PAGE_BYTES:
        return 0.0
    rows = kernel.in_features * _input_copies(shape) + kernel.pattern.out_features
    return PIECE * rows * divide_up(batch, shape.constants.block)


def product_cycles(shape: AmxTiling, held: Resident) -> float:
    """Average cycles per product: for multiplying or for loading operands, whichever takes longer, and for sums.

    Lines that exceed the L2 cache come from beyond it. If they were written, they leave it before they are read again.
    """
    constants, outputs = shape.constants, round_up(shape.kernel.pattern.b, PAIR)
    step_products = (PAIR // ROWS) ** 2 * shape.products.products  # of two by two tiles
    # cache lines per product from beyond the L1 cache: of two tiles of an operand; of inputs, of weights, of inputs
    # that are copied into panels, and of sums that wait until those of all j are complete
    pair = PAIR // ROWS * (shape.tile_bytes // LINE_BYTES) / step_products
    inputs = pair if shape.inputs_pass else pair * PAIR / min(constants.outputs, outputs)
    weights = pair if shape.weights_pass else pair * PAIR / constants.block
    copied = pair * PAIR / outputs if constants.panel else 0.0
    sums = 2 * PAIR / (shape.steps * step_products)
    again = (2 * shape.chunks - 1) * 2 * PAIR / (shape.steps * step_products)  # of sums that tiles load or store
    room = SECOND_LEVEL_BYTES - held.kept
    inputs_fit, weights_fit = shape.group_weights <= room, held.weights <= room
    operands = (FETCHED if inputs_fit else THIRD_LEVEL) * inputs
    operands += (FETCHED if weights_fit else THIRD_LEVEL) * (copied + weights)
    evicted = (0.0 if inputs_fit else sums) + (0.0 if weights_fit else copied)
    return max(DOT, operands) + AGAIN * again + MEMORY * evicted


_NAMES = ("outputs", "panel", "depth")  # constants of each factor, in `tiles`


@dataclass(frozen=True)
class AmxChainConstants(Constants):
    """Constants of several factors that a search may change."""

    entry_family: ClassVar[str] = "amx_chain"

    block: int  # rows of the batch that a work group takes at a time
    tiles: str  # each factor's constants, named by `_NAMES`
    streaming: int  # 1: the layer's outputs leave by streaming stores; 0: they go into the caches

    @classmethod
    def of(cls, kernel: KernelSpec, block: int, factors: list[AmxConstants], streaming: int) -> "AmxChainConstants":
        """Constants of a chain from those of each factor alone."""
        return cls(block, tiles_of(kernel, (spelled(each, _NAMES) for each in factors)), streaming)

    @property
    def parsed(self) -> list[AmxConstants]:
        """Constants of each factor alone. Intermediates are read immediately, so they have no streaming stores."""
        factors = ((numbers_of(self.tiles, words, _NAMES), is_last) for words, is_last in listed(self.tiles))
        return [
            AmxConstants(block=self.block, parts=1, streaming=self.streaming if is_last else 0, **numbers)
            for numbers, is_last in factors
        ]


@dataclass(frozen=True)
class AmxChainTiling(LaunchTiling):
    """Sizes derived from the factors of one launch and their constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: AmxConstants | AmxChainConstants

    @cached_property
    def factors(self) -> Sequence[AmxTiling]:
        factors = zip(own_of_factors(self.kernel, self.constants), places(self.kernel), strict=True)
        is_chain = self.kernel.is_chain
        return [AmxTiling(*each, place.at if is_chain else None, place.is_last) for each, place in factors]

    @property
    def pitch(self) -> int:
        """Elements from one feature of an intermediate to the next, in batch-size-last."""
        return spread(self.constants.block, self.kernel.item_bytes)

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        inner = [each for each in self.factors if not each.is_last]
        elements = (
            each.y_row * self.constants.block if each.is_bsf else each.kernel.out_features * self.pitch
            for each in inner
        )
        return round_up(divide_up(max(elements, default=0) * self.kernel.item_bytes, 4), LINE_BYTES)

    @property
    def held(self) -> Resident:
        """Resident bytes: the private buffer, a block's inputs and outputs, and the weights of all factors."""
        if not self.kernel.is_chain:
            factor = self.factors[0]
            # a block reads one plane's weights if there are at least as many parts as planes, else those of all planes
            weights = factor.packed_bytes
            if factor.constants.parts >= factor.planes:
                weights = factor.run * factor.tiles * factor.steps * factor.tile_bytes
            return Resident(factor.slot * 4 + factor.ahead_bytes, weights)
        return Resident(
            self.slot * 4 + passing_bytes(self.kernel, self.constants.block, self.constants.streaming),
            self.packed_bytes,
        )


def passing_bytes(kernel: KernelSpec, block: int, streaming: int) -> int:
    """Bytes of a block's inputs, of the next block's, which are prefetched, and of outputs without streaming stores."""
    return block * kernel.item_bytes * (2 * kernel.in_features + (0 if streaming else kernel.pattern.out_features))


def multiply_cycles(shape: AmxChainTiling, batch: int) -> float:
    """Cycles of all cores together, for one launch."""
    held, tasks = shape.held, divide_up(batch, shape.constants.block) * shape.parts
    cycles = sum(factor_cycles(factor, held, batch) + TASK * tasks for factor in shape.factors) + LAUNCH
    if held.kept + held.weights <= SECOND_LEVEL_BYTES:
        return cycles
    features = sum(each.pattern.out_features for each in places(shape.kernel) if not each.is_last)  # of intermediates
    return cycles + BETWEEN * batch * features * shape.kernel.item_bytes / LINE_BYTES
