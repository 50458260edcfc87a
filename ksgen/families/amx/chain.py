"""Chains of the amx family: all factors of a layer are applied to a block of the batch while it is in a core's
second-level cache.

Decides the tiles of `amx_chain.cl.j2`; its design is docs/kernels/amx.md. Never renders, compiles or runs. Weights are
packed as for each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from ksgen.families.amx.cycles import (
    BETWEEN,
    DOT_MULTIPLY_ADDS,
    SECOND_LEVEL_BYTES,
    Held,
    dots,
    factor_cycles,
)
from ksgen.families.amx.defaults import in_place, least_of, outputs_and_depths, past_of
from ksgen.families.amx.family import RULES, factor_constexprs, factor_words, of_lanes, tile_picture
from ksgen.families.amx.shape import LANES, LINE_BYTES, PAIR, AmxConstants, AmxTiling, has_tiles_for
from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.chains import factor_kernels, listed, numbers_of, own_of_factors, places, rule_of_tiles, tiles_of
from ksgen.families.rules import Rule
from ksgen.families.shaped import PackedElsewhere
from ksgen.families.signature import PRODUCT_WITH_WORKSPACE
from ksgen.families.tiles import Constants, divide_up, row_constexprs
from ksgen.families.vector.cycles import LAUNCH, TASK
from ksgen.families.vector.defaults import MANY, alike
from ksgen.families.vector.family import GROUPS_AT_ONCE, output_reads
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

# rows of the batch: more than for a single product, because all weights pass once per block
BLOCKS = (256, 192, 128, 96, 64, 32)
_WORDS = ("outputs", "panel", "depth")  # of each factor, in `tiles`


@dataclass(frozen=True)
class AmxChainConstants(Constants):
    """Constants that a search may change."""

    block: int  # rows of the batch that a work group takes at a time
    tiles: str  # of each factor: `_WORDS`
    past: int  # 1: the layer's outputs leave by streaming stores; 0: they go into the caches

    @property
    def parsed(self) -> list[AmxConstants]:
        """Constants of each factor by itself. Intermediates are read at once, so they stay in the cache."""
        each = ((numbers_of(self.tiles, words, _WORDS), is_last) for words, is_last in listed(self.tiles))
        return [AmxConstants(block=self.block, parts=1, past=self.past if is_last else 0, **numbers) for numbers, is_last in each]


def _tiles(kernel: KernelSpec, each: list[AmxConstants]) -> str:
    return tiles_of(kernel, (f"{own.outputs} {own.panel} {own.depth}" for own in each))


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
class AmxChainTiling:
    """Sizes derived from a chain and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: AmxChainConstants

    @cached_property
    def factors(self) -> list[AmxFactor]:
        own = zip(places(self.kernel), factor_kernels(self.kernel), self.constants.parsed, strict=True)
        return [AmxFactor(kernel, constants, at.at == 0) for at, kernel, constants in own]

    @property
    def registers(self) -> int:
        return self.factors[0].registers

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def pitch(self) -> int:
        """Elements from one feature of an intermediate to the next, in batch-size-last: an odd number of lines, so that
        features use many sets of a cache."""
        return pitch_of(self.kernel, self.constants.block)

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        return between_of(self.kernel, self.constants.block)

    @property
    def places(self) -> int:
        """Number of buffers for intermediates: one, or two that alternate, so that a factor reads one and writes the
        other."""
        return min(2, len(self.factors) - 1)

    @property
    def work_space(self) -> int:
        """Elements of the panel and sums of the largest factor."""
        return max(factor.slot for factor in self.factors)

    @property
    def slot(self) -> int:
        return self.work_space + self.places * self.between

    @property
    def packed_bytes(self) -> int:
        return sum(factor.packed_bytes for factor in self.factors)

    @property
    def held(self) -> Held:
        """Bytes that a block passes over: the private buffer, inputs and outputs, and the weights of all factors."""
        return Held(self.slot * 4 + passing_bytes(self.kernel, self.constants.block, self.constants.past), self.packed_bytes)


def pitch_of(kernel: KernelSpec, block: int) -> int:
    return (divide_up(block * kernel.item_bytes, LINE_BYTES) | 1) * LINE_BYTES // kernel.item_bytes


def between_of(kernel: KernelSpec, block: int) -> int:
    rows = block if kernel.layout == "bsf" else pitch_of(kernel, block)
    features = max((each.pattern.out_features for each in places(kernel) if not each.is_last), default=0)
    return round_up(divide_up(features * rows * kernel.item_bytes, 4), LINE_BYTES)


def passing_bytes(kernel: KernelSpec, block: int, past: int) -> int:
    """Bytes of a block's inputs and of the next block's, which are prefetched, and of outputs without streaming
    stores."""
    return block * kernel.item_bytes * (2 * kernel.in_features + (0 if past else kernel.pattern.out_features))


def chain_cycles(shape: AmxChainTiling, batch: int) -> float:
    """Cycles of all cores together, for one launch."""
    found, held = float(LAUNCH), shape.held
    fits = held.kept + held.weights <= SECOND_LEVEL_BYTES
    for factor, at in zip(shape.factors, places(shape.kernel), strict=True):
        found += factor_cycles(factor, held, batch)
        found += TASK * divide_up(batch, shape.constants.block)
        if not at.is_last and not fits:
            found += BETWEEN * batch * at.pattern.out_features * shape.kernel.item_bytes / LINE_BYTES
    return found


def _is_one_layer(kernel: KernelSpec) -> bool:
    return kernel.job == CHAIN and not kernel.is_group and kernel.out_layout is None and not kernel.is_strided


_RULES: tuple[Rule[AmxChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.job == CHAIN),
    Rule("job is that of one layer, of dense arrays in one layout", lambda k, c: _is_one_layer(k)),
    rule_of_tiles(RULES),
)


class AmxChain(PackedElsewhere[AmxChainConstants]):
    """All factors of a layer in one launch, by products of matrix tiles."""

    name = "amx_chain"
    signature = PRODUCT_WITH_WORKSPACE
    constants_type = AmxChainConstants
    listed = _RULES
    packed_by = "amx"
    why = "all factors of one layer in one launch, of dense arrays in one layout: processors that have matrix tiles"
    by_default = False  # no machine with tiles has timed it

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return _is_one_layer(kernel) and not kernel.is_quantized and has_tiles_for(kernel, limits)

    def shape(self, kernel: KernelSpec, constants: AmxChainConstants) -> AmxChainTiling:
        return AmxChainTiling(kernel, constants)

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AmxChainConstants:
        """Block with the fewest expected cycles per core, and the best constants of each factor in it.

        A long block exceeds the second-level cache, and for a short one all weights pass more often.
        """
        batch = kernel.batch or alike(batch or MANY)
        most = round_up(divide_up(batch, limits.multiprocessors), PAIR)  # so that every core has one
        found = [_of_block(kernel, block, batch) for block in dict.fromkeys(min(each, most) for each in BLOCKS)]
        return min(found, key=lambda constants: chain_cycles(AmxChainTiling(kernel, constants), batch))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[AmxChainConstants]:
        """Yield blocks, kinds of stores, and limits of each factor's outputs and depth."""
        batch = kernel.batch or MANY
        found: dict[AmxChainConstants, None] = {}
        for block in BLOCKS:
            best = _of_block(kernel, block, batch)
            for most_outputs in (64, 128, 256):
                for most_depth in (2, 4, 8):
                    own = [_at_most(*each, most_outputs, most_depth) for each in own_of_factors(kernel, best)]
                    for past in (0, 1):
                        found[AmxChainConstants(block, _tiles(kernel, own), past)] = None
                        copied = [replace(each, panel=1) for each in own]
                        found[AmxChainConstants(block, _tiles(kernel, copied), past)] = None
        yield from found

    # ---- a launch

    def geometry(self, kernel: KernelSpec, constants: AmxChainConstants, batch: int) -> Geometry:
        slot = AmxChainTiling(kernel, constants).slot
        return Geometry(divide_up(batch, constants.block), 1, 0, at_once=GROUPS_AT_ONCE, group_bytes=slot * kernel.real_bytes)

    def work(self, kernel: KernelSpec, constants: AmxChainConstants, batch: int) -> Work:
        shape = AmxChainTiling(kernel, constants)
        weights = sum(pattern.weight_count for pattern in kernel.factors) * kernel.item_bytes
        moved = kernel.bytes(batch) - weights + shape.packed_bytes + output_reads(kernel, constants.past, batch)
        products = sum(dots(factor, batch) for factor in shape.factors)
        return Work(divide_up(batch, constants.block), moved, moved, 0, products * DOT_MULTIPLY_ADDS, cycles=chain_cycles(shape, batch))

    # ---- the source

    def words(self, kernel: KernelSpec, constants: AmxChainConstants) -> Mapping[str, Any]:
        shape = AmxChainTiling(kernel, constants)
        whole = factor_words(shape.factors[-1])
        return whole | {
            "picture": tile_picture(shape.factors[-1]),
            "factors": [self._factor(shape, number) for number in range(len(shape.factors))],
        }

    def _factor(self, shape: AmxChainTiling, number: int) -> dict[str, Any]:
        """Template variables of one factor: its constants and snippets, where its inputs come from and its outputs
        go."""
        own, is_last = shape.factors[number], number + 1 == len(shape.factors)
        words, activation = factor_words(own), own.kernel.epilogue.activation
        pitch = "0" if own.is_bsf else str(shape.pitch)  # of rows of features, constants know it
        places = [f"(GLOBAL stored*)(own + {shape.work_space + each * shape.between})" for each in range(2)]
        return words | {
            "number": number + 1,
            "kernel": own.kernel,
            "constexprs": factor_constexprs(own),
            "variants": (*of_lanes(own), activation, *words["variants"]),
            "from_there": f"{places[(number - 1) % 2]}, {pitch}" if number else "x + first * X_ENTRY, batch",
            "to_there": "y + first * Y_ENTRY, batch" if is_last else f"{places[number % 2]}, {pitch}",
            "added": words["block_arguments"],
        }

    def constexprs(self, kernel: KernelSpec, constants: AmxChainConstants) -> list[Constexpr]:
        shape = AmxChainTiling(kernel, constants)
        return [
            Constexpr("BATCH", kernel.batch or 0, "rows of the batch, index s; 0: known at the call", "long long"),
            Constexpr("LANES", LANES, "lanes of a vector, and sums in a row of a tile"),
            Constexpr("BLOCK", constants.block, "rows of the batch that a work group takes at a time, at most"),
            Constexpr("UNIT", PAIR, "rows of the batch of which blocks are whole multiples"),
            *row_constexprs(kernel),
            Constexpr("SLOT", shape.slot, "elements of a work group's private buffer", "long long"),
        ]


def _of_block(kernel: KernelSpec, block: int, batch: int) -> AmxChainConstants:
    """Constants with the best tiles of each factor in such a block, by the model."""
    factors = factor_kernels(kernel)
    least = [AmxConstants(block, PAIR, 1, 1, 0, 1) for _ in factors]
    shape = AmxChainTiling(kernel, AmxChainConstants(block, _tiles(kernel, least), 0))
    past, weights = past_of(factors[-1], batch), shape.packed_bytes
    kept = shape.places * shape.between * 4 + passing_bytes(kernel, block, past)
    best: list[AmxConstants] = []
    for factor in factors:
        panels = (2, 1) if least_of(factor).planes > 1 else (1,)
        every = product(outputs_and_depths(factor), panels)
        tried = [AmxConstants(block, outputs, 1, panel, 0, depth) for (outputs, depth), panel in every]
        options = [AmxFactor(factor, own, not best) for own in tried]
        found = min(options, key=lambda own: factor_cycles(own, Held(kept + own.slot * 4, weights), batch))
        best.append(in_place(factor, found.constants))
    return AmxChainConstants(block, _tiles(kernel, best), past)


def _at_most(kernel: KernelSpec, own: AmxConstants, outputs: int, depth: int) -> AmxConstants:
    return replace(own, outputs=min(own.outputs, outputs), depth=min(own.depth, depth))
