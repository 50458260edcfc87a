"""Shared parts of GPU families that compute all factors of a layer, or of several layers on one X, in one launch.

A block takes a tile of the batch through all factors, with the intermediates in shared memory. This module has the
constants of each factor, rules, a ring of weights' stages and template variables. It never decides a tile. Weights are
packed as for each factor alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from ksgen.families.base import Constexpr, Geometry, Limits
from ksgen.families.chains import FactorPlace, listed, numbers_of, own_of_factors, places, rule_of_tiles
from ksgen.families.gpus import PORTABLE, REGISTERS
from ksgen.families.rules import Rule
from ksgen.families.shaped import PackedElsewhere, Packing
from ksgen.families.signature import each_chains
from ksgen.families.tiles import Constants, divide_up, epilogue_constexprs
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN
from ksgen.values import cached_property

BLOCKS = (3, 2, 1)  # per multiprocessor


@dataclass(frozen=True)
class GpuChainConstants(Constants):
    """Constants that a search may change; a family defines the words that `tiles` has per factor."""

    tile_batch: int  # rows of the batch per block
    tiles: str  # of each factor
    stages: int  # of packed weights in shared memory
    min_blocks: int  # blocks that must fit a multiprocessor: bounds the registers

    @property
    @abstractmethod
    def parsed(self) -> list[Any]:
        """Constants of each factor by itself."""

    def numbers(self, names: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yield the numbers that `tiles` has for each factor, under these names."""
        for words, _ in listed(self.tiles):
            yield numbers_of(self.tiles, words, names)


ConstantsT = TypeVar("ConstantsT", bound=GpuChainConstants)
FactorT = TypeVar("FactorT", bound="Factor")


class Factor(Protocol):
    """A factor in a chain: a shape that knows where its inputs are."""

    @property
    def kernel(self) -> KernelSpec: ...
    @property
    def constants(self) -> Any: ...
    @property
    def threads(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def tiles_of_batch(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    def x_bytes_moved(self, batch: int) -> float: ...
    def y_bytes_moved(self, batch: int) -> float: ...


def stages_of(factor: Factor) -> int:
    """Number of pipeline stages that one block executes over all its tiles of outputs."""
    return factor.tiles_of_batch * factor.steps


@dataclass(frozen=True)
class GpuChainShape(Generic[FactorT]):
    """Sizes derived from a chain and its constants."""

    kernel: KernelSpec
    constants: Any

    @property
    @abstractmethod
    def factors(self) -> list[FactorT]: ...

    @cached_property
    def places(self) -> list[FactorPlace]:
        """Position of each factor in the chains."""
        return places(self.kernel)

    @property
    @abstractmethod
    def buffer_sizes(self) -> list[list[int]]:
        """Sizes of each chain's buffers in shared memory, in the order of use.

        While one is written, the previous one is read.
        """

    @property
    def resident_size(self) -> int:
        """Size of what is in front of these buffers until all chains are done."""
        return 0

    @property
    @abstractmethod
    def shared_bytes(self) -> int: ...

    @cached_property
    def halves(self) -> tuple[int, int]:
        """Sizes of the two halves between which consecutive buffers alternate: a factor reads from one and writes to
        the other. A chain begins when the last buffer of the previous chain has been read."""
        one, other = ([size for each in self.buffer_sizes for size in each[first::2]] for first in (0, 1))
        return max(one, default=0), max(other, default=0)

    @property
    def ring(self) -> int:
        """Offset of the ring of stages."""
        return self.resident_size + sum(self.halves)

    def place(self, number: int) -> int:
        """Offset of one of a chain's buffers."""
        return self.resident_size + number % 2 * self.halves[0]

    def of_ends(self, factors: Sequence[FactorT]) -> tuple[list[FactorT], list[FactorT]]:
        """Factors that read X, and factors that write an output."""
        ends = list(zip(factors, self.places, strict=True))
        return [each for each, at in ends if at.at == 0], [each for each, at in ends if at.is_last]

    @property
    def threads(self) -> int:
        return self.factors[0].threads

    @property
    def registers(self) -> int:
        return max(factor.registers for factor in self.factors)

    @property
    def first_stages(self) -> list[int]:
        """Number of each factor's first stage, counted over all factors."""
        return list(accumulate(map(stages_of, self.factors[:-1]), initial=0))

    @property
    def packed_bytes(self) -> int:
        return sum(factor.packed_bytes for factor in self.factors)

    @property
    def waits(self) -> float:
        """Waits of one block for stages of weights; stages in flight together count as one wait."""
        at_a_time: int = self.constants.stages - 1
        return sum(map(stages_of, self.factors)) / at_a_time

    def memory_bytes(self, batch: int) -> int:
        """X, packed weights and Y, each once."""
        weights = self.kernel.weight_bytes
        return self.kernel.bytes(batch) - weights + self.packed_bytes


def rules_of(rules: tuple[Rule[Any], ...], shape: Callable[[KernelSpec, Any], GpuChainShape[Any]]) -> tuple[Rule[Any], ...]:
    """Rules of a chain whose factors keep `rules`."""

    def registers(kernel: KernelSpec, constants: GpuChainConstants) -> int:
        own = shape(kernel, constants)
        return min(255, own.registers) * own.threads * constants.min_blocks

    return (
        Rule("job is chain", lambda k, c: k.job == CHAIN),
        rule_of_tiles(rules),
        Rule("tiles has as many warps for all factors", lambda k, c: len({each.threads for each in shape(k, c).factors}) == 1),
        Rule("stages is at least 2", lambda k, c: c.stages >= 2),
        Rule("min_blocks is at least 1", lambda k, c: c.min_blocks >= 1),
        Rule(
            "min_blocks blocks have at most 1536 threads",
            lambda k, c: shape(k, c).threads * c.min_blocks <= PORTABLE.threads,
            lambda k, c: shape(k, c).threads * c.min_blocks,
        ),
        Rule("the registers of min_blocks blocks are at most 65536", lambda k, c: registers(k, c) <= REGISTERS, registers),
    )


class GpuChain(PackedElsewhere[ConstantsT]):
    """Base of the families that compute all factors of a layer in one launch."""

    alone: Packing[Any]  # the family of each factor by itself, which `packed_by` names

    def shape(self, kernel: KernelSpec, constants: ConstantsT) -> GpuChainShape[Any]:
        raise NotImplementedError

    def fits(self, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> bool:
        """Whether `min_blocks` blocks fit a multiprocessor, and one block of each factor alone, whose source packs its
        weights."""
        if self.shape(kernel, constants).shared_bytes > limits.shared_bytes_for(constants.min_blocks):
            return False
        if any(self.alone.shared_bytes(*own) > limits.shared_bytes for own in own_of_factors(kernel, constants)):
            return False
        return self.keeps_rules(kernel, constants)

    # ---- costs

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        shape = self.shape(kernel, constants)
        return Geometry(divide_up(batch, constants.tile_batch), shape.threads, shape.shared_bytes)

    # ---- the source

    def words(self, kernel: KernelSpec, constants: ConstantsT) -> Mapping[str, Any]:
        shape = self.shape(kernel, constants)
        pictures = [self.picture(own, f"Factor {n}: a tile of its outputs") for n, own in enumerate(shape.factors, 1)]
        return {
            "picture": "//\n".join(pictures),
            "weights_of_all": ", ".join(f"weights_{number}" for number in range(1, len(shape.factors) + 1)),
            "results": each_chains(kernel, "y"),
            "layers": layers_of(kernel),
            "factors": [self._factor(shape, at) for at in range(len(shape.factors))],
        }

    def _factor(self, shape: GpuChainShape[Any], at: int) -> dict[str, Any]:
        """Template variables of one factor: its constants, its own copies and the destination of its outputs."""
        own, where, is_last = shape.factors[at], shape.places[at], shape.places[at].is_last
        copies = self.copies_x(shape, at)
        return {
            "number": at + 1,
            "layer": layers_of(shape.kernel)[where.chain]["name"],
            "kernel": own.kernel,
            "constexprs": [*self.constexprs_of(shape, at), *self._places_of(shape, at)],
            "variants": self.variants(own),
            "copied": ("x",) if copies else (),
            "read": () if copies else ("x",),
            "kept": () if is_last else (at + 2,),  # number of the next factor in the chain
            "next_layout": "" if is_last else shape.factors[at + 1].kernel.layout,
            "then": () if at + 1 == len(shape.factors) else (at + 2,),  # number of the next factor in any chain
            "stored": ("y",) if is_last else (),
        }

    def _places_of(self, shape: GpuChainShape[Any], at: int) -> list[Constexpr]:
        return [
            Constexpr("PASSES", shape.factors[at].tiles_of_batch, "tiles of outputs, computed sequentially"),
            Constexpr(
                "FIRST_STAGE",
                shape.first_stages[at],
                "number of its first stage, among the stages of all factors",
            ),
        ]

    def copies_x(self, shape: Any, at: int) -> bool:
        """Whether a factor copies X from memory itself."""
        return bool(shape.places[at].at == 0)

    def picture(self, own: Any, heading: str) -> str:
        """Drawing of a factor's tile."""
        raise NotImplementedError

    def variants(self, own: Any) -> tuple[str, ...]:
        """Names of the variants of snippets in a factor's source."""
        return ()

    def constexprs_of(self, shape: Any, at: int) -> list[Constexpr]:
        """Constants of a factor, without those that all families have."""
        raise NotImplementedError

    def of_all_factors(self, kernel: KernelSpec, constants: ConstantsT) -> list[Constexpr]:
        return [
            Constexpr("BATCH", kernel.batch or 0, "rows of the batch, index s; 0: known at the call", "long long"),
            *epilogue_constexprs(kernel),
            Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per thread block"),
            Constexpr("STAGES", constants.stages, "stages of packed weights in shared memory"),
            Constexpr("MIN_BLOCKS", constants.min_blocks, "thread blocks that must fit a multiprocessor"),
            Constexpr("THREADS", self.shape(kernel, constants).threads, "threads per block"),
        ]


def layers_of(kernel: KernelSpec) -> list[dict[str, str]]:
    """Template variables of each layer: its name, and the arguments for its outputs and what is added to them."""
    names = each_chains(kernel, "layer")
    given = {"bias": kernel.epilogue.bias, "residual": kernel.epilogue.residual}
    added = [each_chains(kernel, name) if wanted else ["0"] * len(names) for name, wanted in given.items()]
    return [
        {"name": name, "outputs": f"{y}, {y}_pitch, {bias}, {residual}, {f'{residual}_pitch' if kernel.epilogue.residual else 0}"}
        for name, y, bias, residual in zip(names, each_chains(kernel, "y"), *added, strict=True)
    ]
