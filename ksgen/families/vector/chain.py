"""Chains of the vector family: all factors of a layer are applied to a block of the batch while it is in a processor's
cache.

Decides the tiles of `vector_chain.cl.j2`; its design is docs/kernels.md. Never renders, compiles or runs. Weights are
packed as for each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.chains import FactorPlace, factor_kernels, listed, places, rule_of_tiles, tiles_of, transposes
from ksgen.families.rules import Rule
from ksgen.families.shaped import Shaped
from ksgen.families.signature import PRODUCT_WITH_WORKSPACE, each_chains
from ksgen.families.tiles import Constants, divide_up, epilogue_constexprs
from ksgen.families.vector.defaults import MANY, MOST_ROWS, alike, along_batch
from ksgen.families.vector.defaults import default as factor_default
from ksgen.families.vector.family import (
    GROUPS_AT_ONCE,
    OF_LANES,
    OF_ROWS,
    RULES,
    Vector,
    factor_constexprs,
    factor_words,
    out_of_block,
    output_reads,
    variants_of,
    x_of_block,
)
from ksgen.families.vector.planes import round_up, tile_picture
from ksgen.families.vector.shape import LINE_BYTES, VectorConstants, VectorTiling, spaced
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

BLOCK_BYTES = 512 * 1024  # of a block's inputs and outputs of its widest factor


@dataclass(frozen=True)
class VectorChainConstants(Constants):
    """Constants that a search may change."""

    block: int  # rows of the batch that a work group takes at a time
    tiles: str  # of each factor: along, lanes, height, width, panel; chain by chain in a group
    past: int  # 1: the layer's outputs leave by streaming stores; 0: they go into the caches
    pairs: int = 0  # 1: inputs are multiplied two at a time, and intermediates have the type of X

    @property
    def parsed(self) -> list[VectorConstants]:
        """Constants of each factor by itself."""
        return [self._parsed(words, is_last) for words, is_last in listed(self.tiles)]

    def _parsed(self, words: str, is_last: bool) -> VectorConstants:
        past = self.past if is_last else 0  # an intermediate is read at once: it stays in the cache
        try:
            along, lanes, height, width, panel = words.split()
            return VectorConstants(along, int(lanes), int(height), int(width), self.block, 1, int(panel), past, self.pairs)
        except ValueError:
            raise ConstantsError(f"tiles={self.tiles!r}: {words!r} is not along, lanes, height, width and panel") from None


def _words_of(constants: list[VectorConstants]) -> list[str]:
    return [f"{each.along} {each.lanes} {each.height} {each.width} {each.panel}" for each in constants]


@dataclass(frozen=True)
class VectorChainTiling:
    """Sizes derived from a chain and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorChainConstants

    @cached_property
    def factors(self) -> list[VectorTiling]:
        own = zip(places(self.kernel), factor_kernels(self.kernel), self.constants.parsed, strict=True)
        reads = self.kernel.layout
        return [VectorTiling(kernel, constants, reads if transposes(self.kernel, at) else "") for at, kernel, constants in own]

    @property
    def unit(self) -> int:
        return lcm(*(factor.unit for factor in self.factors))

    @property
    def pitch(self) -> int:
        """Elements from one feature of an intermediate to the next, in batch-size-last."""
        return spaced(self.constants.block, self.factors[0])

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        rows = {"bsf": self.constants.block, "bsl": self.pitch}
        own = zip(places(self.kernel), factor_kernels(self.kernel), strict=True)
        sizes = [each.pattern.out_features * rows[factor.layout] for each, factor in own if not each.is_last]
        reals = divide_up(max(sizes, default=0), 2 if self.constants.pairs else 1)
        return round_up(reals + LINE_BYTES, LINE_BYTES) if sizes else 0

    @property
    def places(self) -> int:
        """Number of buffers for intermediates: at most two, which alternate."""
        return min(2, max(map(len, self.kernel.chains)) - 1)

    @property
    def registers(self) -> int:
        return max(factor.registers for factor in self.factors)

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def panels(self) -> int:
        return max(factor.slot for factor in self.factors)

    @property
    def slot(self) -> int:
        return self.panels + self.places * self.between


def _block(kernel: KernelSpec, shapes: list[VectorTiling], most: int) -> int:
    """Rows of the batch per block, at most `most`: whole tiles of every factor, because a partial tile costs as much as
    a whole one.

    A factor's inputs and outputs of one block stay in the cache. Batch-size-last is the exception, because shorter
    pieces of rows cost more.
    """
    features = max(each.pattern.in_features + each.pattern.out_features for each in places(kernel))
    held = MOST_ROWS if "bsf" not in (kernel.layout, kernel.y_layout) else min(MOST_ROWS, BLOCK_BYTES // (4 * features))
    whole, unit = lcm(*(shape.tile_entries for shape in shapes)), lcm(*(shape.unit for shape in shapes))
    if whole <= min(2 * MOST_ROWS, most):
        return max(1, min(held, most) // whole) * whole
    return max(unit, min(held, most) // unit * unit)


def _alone(kernel: KernelSpec, at: FactorPlace, factor: KernelSpec, limits: Limits, batch: int) -> VectorConstants:
    """Default constants of a factor by itself; lanes are along the batch in the factor that changes the layout."""
    found = factor_default(factor, limits, batch)
    if not transposes(kernel, at) or found.along == "batch":
        return found
    return replace(along_batch(factor, limits, found.lanes, batch), pairs=found.pairs)


def _transposing(kernel: KernelSpec, constants: VectorChainConstants) -> list[VectorConstants]:
    """Constants of the factors that change the layout."""
    return [own for at, own in zip(places(kernel), constants.parsed, strict=True) if transposes(kernel, at)]


_RULES: tuple[Rule[VectorChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.job == CHAIN),
    rule_of_tiles(RULES),
    Rule(
        "pairs is 0 where tiles reads the X of slices where it lies",
        lambda k, c: (
            not c.pairs or k.stride == "dense" or all(own.panel for at, own in zip(places(k), c.parsed, strict=True) if at.at == 0)
        ),
    ),
    Rule("tiles has the same lanes for all factors", lambda k, c: len({each.lanes for each in c.parsed}) == 1),
    Rule(
        "tiles has lanes along the batch in the factor that turns one layout into the other",
        lambda k, c: all(own.along == "batch" for own in _transposing(k, c)),
    ),
)


class VectorChain(Shaped[VectorChainConstants]):
    """All factors of a layer in one launch, on processors."""

    name = "vector_chain"
    signature = PRODUCT_WITH_WORKSPACE
    constants_type = VectorChainConstants
    listed = _RULES
    why = "all factors of a layer in one launch, block by block: processors"
    packs = False
    packed_by = "vector"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return limits.is_cpu and kernel.job == CHAIN

    def shape(self, kernel: KernelSpec, constants: VectorChainConstants) -> VectorChainTiling:
        return VectorChainTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> VectorChainConstants:
        batch = kernel.batch or alike(batch or MANY)
        factors = list(zip(places(kernel), factor_kernels(kernel), strict=True))
        alone = [_alone(kernel, at, factor, limits, batch) for at, factor in factors]
        pairs = int(any(each.pairs for each in alone))
        alone = [replace(each, parts=1, pairs=pairs) for each in alone]
        copied = [each.layout == "bsl" or (pairs and at.at == 0 and kernel.stride != "dense") for at, each in factors]
        alone = [replace(each, panel=1) if is_copied else each for each, is_copied in zip(alone, copied, strict=True)]
        shapes = [VectorTiling(factor, own) for (_, factor), own in zip(factors, alone, strict=True)]
        block = _block(kernel, shapes, divide_up(batch, 2 * limits.multiprocessors))
        return VectorChainConstants(block, tiles_of(kernel, _words_of(alone)), alone[-1].past, pairs)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[VectorChainConstants]:
        usual = self.default(kernel, limits)
        unit = VectorChainTiling(kernel, usual).unit
        for block in sorted({max(unit, entries // unit * unit) for entries in (16, 24, 32, 48, 64, 96, 128, 192, 256, 384)}):
            yield from (replace(usual, block=block, past=past) for past in (0, 1))

    def packed_bytes(self, kernel: KernelSpec, constants: VectorChainConstants) -> int:
        return 0

    def geometry(self, kernel: KernelSpec, constants: VectorChainConstants, batch: int) -> Geometry:
        shape = VectorChainTiling(kernel, constants)
        return Geometry(
            divide_up(batch, constants.block), 1, 0, at_once=GROUPS_AT_ONCE, group_bytes=shape.slot * shape.factors[0].real_bytes
        )

    def work(self, kernel: KernelSpec, constants: VectorChainConstants, batch: int) -> Work:
        alone = Vector()
        each = [alone.work(factor, own, batch) for factor, own in zip(factor_kernels(kernel), constants.parsed, strict=True)]
        moved = kernel.bytes(batch) + output_reads(kernel, constants.past, batch)
        return Work(
            divide_up(batch, constants.block), moved, moved, 0, sum(work.multiply_adds for work in each),
            cycles=sum(work.cycles for work in each),
        )  # fmt: skip

    def pack_geometry(self, kernel: KernelSpec, constants: VectorChainConstants) -> Geometry:
        return Geometry(0, 1, 0)

    def words(self, kernel: KernelSpec, constants: VectorChainConstants) -> Mapping[str, Any]:
        shape = VectorChainTiling(kernel, constants)
        words = factor_words(shape.factors[-1])  # its activation is that of every last factor
        between = ("activated", *(f"between_{each}" for each in variants_of(shape.factors[0], kernel.between)))
        tiles = [tile_picture(f"A tile of factor {n}", each.constants, OF_ROWS, OF_LANES) for n, each in enumerate(shape.factors, 1)]
        return {
            **words,
            "variants": (*words["variants"], *(between if kernel.between != "none" else ())),
            "picture": "//\n".join(tiles),
            "results": each_chains(kernel, "y"),
            "factors": [self._factor(shape, number, place) for number, place in enumerate(places(kernel))],
        }

    def _factor(self, shape: VectorChainTiling, number: int, at: FactorPlace) -> dict[str, Any]:
        """Template variables of one factor: its constants and snippets, where its inputs come from and its outputs
        go."""
        own = shape.factors[number]
        is_first, is_last = at.at == 0, at.is_last
        between, is_kept, widen = ("between", "outputs", "widen") if shape.constants.pairs else ("real", "lanes", "")
        place = f"own + {shape.panels} + {{}} * (extent){shape.between}"
        if shape.constants.pairs:
            place = f"(GLOBAL between*)({place})"
        pitch_in = own.kernel.pattern.in_features if own.x_layout == "bsf" else shape.pitch
        pitch_out = own.kernel.pattern.out_features if own.kernel.layout == "bsf" else shape.pitch
        return factor_words(own) | {
            "number": number + 1,
            "n": f"_{number + 1}",
            "kernel": own.kernel,
            "along": own.constants.along,
            "constexprs": factor_constexprs(own),
            "source": between if not is_first else "byte" if own.kernel.has_bytes_in else "stored",
            "target": "stored" if is_last else between,
            "kept": "outputs" if is_last else is_kept,
            "as_kept": "as_outputs" if is_last or shape.constants.pairs else "",
            "widen": widen if not is_first else "widen_byte" if own.kernel.has_bytes_in else "widen",
            # an intermediate's buffer has room behind it
            "is_last_block": "block + 1 == blocks" if is_first else "false",
            "from_there": f"{x_of_block(shape.kernel)}, x_pitch" if is_first else f"{place.format((at.at - 1) % 2)}, {pitch_in}",
            "to_there": out_of_block(shape.kernel, at.chain) if is_last else f"{place.format(at.at % 2)}, {pitch_out}, 0, 0, 0",
        }

    def constexprs(self, kernel: KernelSpec, constants: VectorChainConstants) -> list[Constexpr]:
        shape = VectorChainTiling(kernel, constants)
        return [
            Constexpr("BATCH", kernel.batch or 0, "rows of the batch, index s; 0: known at the call", "long long"),
            *epilogue_constexprs(kernel),
            Constexpr("LANES", shape.factors[0].constants.lanes, "lanes per vector register"),
            Constexpr("IS_PAST", constants.past, "whether the layer's outputs leave by streaming stores"),
            Constexpr("BLOCK", constants.block, "rows of the batch that a work group takes at a time, at most"),
            Constexpr("UNIT", shape.unit, "rows of the batch of which blocks are whole multiples"),
            Constexpr("SLOT", shape.slot, "elements of a work group's private buffer", "long long"),
        ]
