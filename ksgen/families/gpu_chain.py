"""Shared parts of GPU families that compute one factor, or all factors of a layer or of several layers on one X, in one
launch.

A block takes a tile of the batch through all factors, with the intermediates in shared memory. This module has the
constants of each factor, rules, a ring of weights' stages and template variables. It never decides a tile. Weights are
packed as for each factor alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, ClassVar, Generic, TypeVar

from ksgen.families.base import Constexpr, Limits, named
from ksgen.families.chains import (
    FactorPlace,
    listed,
    numbers_of,
    own_of_factors,
    places,
    rule_of_tiles,
    spelled,
    tiles_of,
)
from ksgen.families.family import PackingFamily
from ksgen.families.gpus import PORTABLE, REGISTERS
from ksgen.families.rules import Rule, at_most
from ksgen.families.signature import each_chains
from ksgen.families.tiles import Constants, Sized, batch_constexpr, divide_up, epilogue_constexprs
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

BLOCKS = (3, 2, 1)  # blocks per multiprocessor that a search tries
REMEMBERED = 4096  # cached constants of factors
SHARED = 64  # cached lists of sizes: combinations that share one follow each other, and a list takes kilobytes


@dataclass(frozen=True)
class GpuChainConstants(Constants):
    """Constants that a search may change; a family defines the constants that `tiles` has per factor."""

    tile_batch: int  # rows of the batch per block
    tiles: str  # constants of each factor, as text
    stages: int  # stages of packed weights in shared memory
    min_blocks: int  # blocks that must fit on a multiprocessor: bounds the registers

    names: ClassVar[tuple[str, ...]]  # of a factor's constants in `tiles`
    searched: ClassVar[tuple[int, ...]]  # numbers of stages that a search tries
    of_factor: ClassVar[Callable[..., Any]]  # makes a factor's constants from these and `tile_batch`

    @property
    def parsed(self) -> tuple[Any, ...]:
        """Constants of each factor by itself."""
        kind: Any = type(self)
        return _parsed(kind, self.tile_batch, self.tiles)

    @classmethod
    def tiles_with(cls, kernel: KernelSpec, each: Iterable[Any]) -> str:
        """Value of `tiles` for factors with these constants."""
        return tiles_of(kernel, (spelled(own, cls.names) for own in each))


@lru_cache(REMEMBERED)
def _parsed(kind: Any, tile_batch: int, tiles: str) -> tuple[Any, ...]:
    """Constants of each factor, cached because all combinations of other constants share them."""
    each = (numbers_of(tiles, words, kind.names) for words, _ in listed(tiles))
    return tuple(kind.of_factor(tile_batch=tile_batch, **numbers) for numbers in each)


ConstantsT = TypeVar("ConstantsT")
FactorT = TypeVar("FactorT", bound=Any)


@dataclass(frozen=True)
class GpuChainShape(Sized, Generic[FactorT]):
    """Sizes derived from a chain and its constants."""

    kernel: KernelSpec
    constants: Any

    of_factor: ClassVar[Any]  # class of a factor's sizes, which takes the factor's role as its last argument

    @abstractmethod
    def role_of(self, where: FactorPlace) -> int:
        """What distinguishes the sizes of a factor at this place."""

    @cached_property
    def factors(self) -> list[FactorT]:
        roles = tuple(map(self.role_of, self.places))
        return _sizes_of_factors(self.of_factor, own_of_factors(self.kernel, self.constants), roles)

    @property
    def places(self) -> tuple[FactorPlace, ...]:
        """Position of each factor in the chains."""
        return places(self.kernel)

    @abstractmethod
    def buffer_size(self, factor: FactorT, where: FactorPlace) -> int:
        """Size of the factor's buffer in shared memory, which holds its inputs or its outputs; 0 if it has none."""

    @property
    def buffer_sizes(self) -> list[list[int]]:
        """Sizes of each chain's buffers in shared memory, in the order of use.

        While one is written, the previous one is read.
        """
        found: list[list[int]] = [[] for _ in self.kernel.chains]
        for factor, where in zip(self.factors, self.places, strict=True):
            if size := self.buffer_size(factor, where):
                found[where.chain].append(size)
        return found

    @property
    def resident_size(self) -> int:
        """Size of the data that stays in front of these buffers until all chains are done."""
        return 0

    @property
    @abstractmethod
    def shared_bytes(self) -> int: ...

    @property
    @abstractmethod
    def constexprs(self) -> list[Constexpr]:
        """Constants of all factors, without those that all families have."""

    @cached_property
    def ping_pong_sizes(self) -> tuple[int, int]:
        """Sizes of the two halves between which consecutive buffers alternate: a factor reads from one and writes to
        the other. A chain begins when the last buffer of the previous chain has been read."""
        one, other = ([size for each in self.buffer_sizes for size in each[first::2]] for first in (0, 1))
        return max(one, default=0), max(other, default=0)

    @property
    def ring(self) -> int:
        """Offset of the ring of stages."""
        return self.resident_size + sum(self.ping_pong_sizes)

    def place(self, number: int) -> int:
        """Offset of one of a chain's buffers."""
        return self.resident_size + number % 2 * self.ping_pong_sizes[0]

    def grid(self, batch: int) -> int:
        return divide_up(batch, self.constants.tile_batch)

    @property
    def threads(self) -> int:
        return int(self.factors[0].threads)

    @property
    def registers(self) -> int:
        return int(max(factor.registers for factor in self.factors))

    @property
    def first_stages(self) -> list[int]:
        """Number of each factor's first stage, counted over all factors."""
        return list(accumulate((each.block_stages for each in self.factors[:-1]), initial=0))

    @property
    def packed_bytes(self) -> int:
        return sum(factor.packed_bytes for factor in self.factors)


@lru_cache(SHARED)
def _sizes_of_factors(kind: Any, each: tuple[tuple[KernelSpec, Any], ...], roles: tuple[int, ...]) -> list[Any]:
    """Sizes of each factor, of the class `kind`, which takes the factor's role in the chain as its last argument."""
    return [kind(*own, role) for own, role in zip(each, roles, strict=True)]


def rules_of_blocks(shape: Callable[[KernelSpec, Any], Any]) -> tuple[Rule[Any], ...]:
    """Rules of the blocks that share a multiprocessor, and of stages."""

    def threads(kernel: KernelSpec, constants: Any) -> int:
        return int(shape(kernel, constants).threads * constants.min_blocks)

    def registers(kernel: KernelSpec, constants: Any) -> int:
        return int(min(255, shape(kernel, constants).registers) * threads(kernel, constants))

    return (
        at_most("min_blocks blocks have at most 1536 threads", PORTABLE.threads, threads),
        at_most("the registers of min_blocks blocks are at most 65536", REGISTERS, registers),
        Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    )


def rules_of_chain(
    rules: tuple[Rule[Any], ...], shape: Callable[[KernelSpec, Any], GpuChainShape[Any]]
) -> tuple[Rule[Any], ...]:
    """Rules of a chain whose factors keep `rules`."""
    return (
        Rule("job is chain", lambda k, c: k.is_chain),
        rule_of_tiles(rules),
        Rule(
            "tiles has the same number of warps for all factors",
            lambda k, c: len({each.threads for each in shape(k, c).factors}) == 1,
        ),
        Rule("min_blocks is at least 1", lambda k, c: c.min_blocks >= 1),
        *rules_of_blocks(shape),
    )


def ends_of(kernel: KernelSpec, factors: Sequence[FactorT]) -> tuple[list[FactorT], list[FactorT]]:
    """Factors that read X, and factors that write an output."""
    if len(factors) == 1:
        return list(factors), list(factors)
    ends = list(zip(factors, places(kernel), strict=True))
    return [each for each, at in ends if at.at == 0], [each for each, at in ends if at.is_last]


class GpuProduct(PackingFamily[ConstantsT]):
    """Base of the families that compute one factor, or all factors of a layer, in one launch."""

    repeated: ClassVar[tuple[str, ...]]  # constants of a factor's own source that a chain's source repeats for it

    def fits(self, kernel: KernelSpec, constants: Any, limits: Limits) -> bool:
        """Whether `min_blocks` blocks fit a multiprocessor, and one block of each factor alone, which packs weights."""
        if not kernel.is_chain:
            return super().fits(kernel, constants, limits)
        if self.shape(kernel, constants).shared_bytes > limits.shared_bytes_for(constants.min_blocks):
            return False
        if _shared_bytes_alone(self, own_of_factors(kernel, constants)) > limits.shared_bytes:
            return False
        return self.keeps_rules(kernel, constants)

    def has_chain(self, kernel: KernelSpec, limits: Limits) -> bool:
        """Whether any constants take a layer's factors through shared memory; else each factor has a launch."""
        is_single = not kernel.is_group and len(kernel.factors) == 1  # its factor changes the layout
        return not kernel.has_bytes_in and not is_single and _has_able(self, kernel, limits)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[ConstantsT]:
        """Yield every combination that the rules, the shared memory and the registers allow."""
        if not kernel.is_chain:
            return self.space_of_factor(kernel, limits)
        return self.space_of_chain(kernel, limits)

    def space_of_chain(self, kernel: KernelSpec, limits: Limits, is_distinct: bool = False) -> Iterator[Any]:
        """Yield every combination of a chain's constants that fits; `is_distinct`: that the cost model distinguishes.

        The cost model does not know `min_blocks`, so the first that fits of constants that differ in it alone will do.
        """
        for least in self.options_of_chain(kernel, limits):
            able = [each for each in least if self.fits(kernel, each, limits)]  # else more stages or blocks do not fit
            found = set()
            for stages, blocks, each in product(type(least[0]).searched, BLOCKS, able):
                constants = each.changed(stages=stages, min_blocks=blocks)
                if (stages, each) not in found and self.fits(kernel, constants, limits):
                    yield constants
                    if is_distinct:
                        found.add((stages, each))

    def space_of_factor(self, kernel: KernelSpec, limits: Limits) -> Iterator[Any]:
        raise NotImplementedError

    def options_of_chain(self, kernel: KernelSpec, limits: Limits) -> Iterator[Sequence[Any]]:
        """Yield different tiles of all factors, each as constants with the fewest stages and blocks."""
        raise NotImplementedError

    # ---- the source

    def variables(self, kernel: KernelSpec, constants: Any) -> dict[str, Any]:
        if not kernel.is_chain:
            return {"picture": self.picture(self.shape(kernel, constants))}
        shape = self.shape(kernel, constants)
        pictures = [self.picture(own, f"Factor {n}: a tile of its outputs") for n, own in enumerate(shape.factors, 1)]
        return {
            "picture": "//\n".join(pictures),
            "layers": layers_of(kernel),
            "factors": [self._factor(shape, at) for at in range(len(shape.factors))],
        }

    def _factor(self, shape: GpuChainShape[Any], at: int) -> dict[str, Any]:
        """Variables of one factor: its constants, its own copies and the destination of its outputs."""
        own, where = shape.factors[at], shape.places[at]
        alone = {each.name: each for each in self.constexprs_of_factor(own.kernel, own.constants)}
        return {
            "number": at + 1,
            "layer": each_chains(shape.kernel, "layer")[where.chain],
            "shape": own,
            "kernel": own.kernel,
            "constexprs": [
                *(alone[name] for name in self.repeated if name in alone),
                *self.constexprs_in_chain(shape, at),
                Constexpr("PASSES", own.tiles_of_batch, "tiles of outputs, computed sequentially"),
                Constexpr(
                    "FIRST_STAGE", shape.first_stages[at], "number of its first stage, among the stages of all factors"
                ),
            ],
            "variants": self.variants_in_chain(own),
            "copies_x": self.copies_x(shape, at),
            "is_last": where.is_last,  # of its chain
        }

    def copies_x(self, shape: Any, at: int) -> bool:
        """Whether a factor copies X from memory itself."""
        return bool(shape.places[at].at == 0)

    def picture(self, own: Any, heading: str = "") -> str:
        """Drawing of a factor's tile; without a heading, of a factor alone."""
        raise NotImplementedError

    def variants_in_chain(self, own: Any) -> tuple[str, ...]:
        """Names of the variants of snippets in a factor's source."""
        return ()

    def constexprs_of_factor(self, kernel: KernelSpec, constants: Any) -> list[Constexpr]:
        raise NotImplementedError

    def constexprs_in_chain(self, shape: Any, at: int) -> list[Constexpr]:
        """Constants of a factor that its own source lacks, or has with other values."""
        raise NotImplementedError

    def constexprs(self, kernel: KernelSpec, constants: Any) -> list[Constexpr]:
        """Constants of a source: of its only factor, or of all factors."""
        if not kernel.is_chain:
            return self.constexprs_of_factor(kernel, constants)
        shape = self.shape(kernel, constants)
        return [
            batch_constexpr(kernel),
            *epilogue_constexprs(kernel),
            named(constants, "TILE_BATCH", "rows of the batch per thread block"),
            named(constants, "STAGES", "stages of packed weights in shared memory"),
            named(constants, "MIN_BLOCKS", "thread blocks that must fit on a multiprocessor: bounds the registers"),
            named(shape, "THREADS", "threads per block"),
            *shape.constexprs,
        ]


@lru_cache(REMEMBERED)
def _has_able(family: GpuProduct[Any], kernel: KernelSpec, limits: Limits) -> bool:
    """Whether any tiles of all factors fit, cached because several questions about a kernel begin with this one."""
    options = family.options_of_chain(kernel, limits)
    return any(family.fits(kernel, each, limits) for least in options for each in least)


@lru_cache(REMEMBERED)
def _shared_bytes_alone(family: GpuProduct[Any], each: tuple[tuple[KernelSpec, Any], ...]) -> int:
    """Most shared memory of a factor alone, cached because combinations of other constants share it."""
    return max(family.shared_bytes(*own) for own in each)


def layers_of(kernel: KernelSpec) -> list[dict[str, Any]]:
    """Variables of each layer: its name, and the arguments for its outputs and what is added to them."""
    names = each_chains(kernel, "layer")
    given = {"bias": kernel.epilogue.bias, "residual": kernel.epilogue.residual}
    added = [each_chains(kernel, name) if wanted else ["0"] * len(names) for name, wanted in given.items()]
    return [
        {
            "name": name,
            "outputs": f"{y}, {y}_pitch, {bias}, {residual}, {f'{residual}_pitch' if kernel.epilogue.residual else 0}",
        }
        for name, y, bias, residual in zip(names, each_chains(kernel, "y"), *added, strict=True)
    ]
