"""Launches of one factor or several on processors: constants, sizes, private buffers and geometry.

The factors are applied to a block of the batch while it is in a processor's cache. A factor alone is a chain of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar, TypeVar

from ksgen.errors import ConstantsError
from ksgen.families.base import Geometry
from ksgen.families.chains import listed, own_of_factors, places, tiles_of, transposes
from ksgen.families.family import Family
from ksgen.families.signature import PRODUCT_WITH_WORKSPACE
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.planes import round_up
from ksgen.families.vector.shape import LINE_BYTES, VectorConstants, VectorTiling, spaced
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

GROUPS_AT_ONCE = 8  # work groups per core, so that other cores can take the work of one that starts late

ConstantsT = TypeVar("ConstantsT")


class LaunchTiling:
    """Sizes derived from the factors of one launch and their constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: Any

    @property
    def factors(self) -> Sequence[Any]:
        """Sizes of each factor."""
        raise NotImplementedError

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        raise NotImplementedError

    @property
    def parts(self) -> int:
        """Parts of a block's columns, one per work group; the factors of a chain have one."""
        return int(self.factors[0].constants.parts)

    @property
    def intermediate_buffers(self) -> int:
        """Number of buffers for intermediates: at most two, because a factor reads one and writes the other."""
        return min(2, max(map(len, self.kernel.chains)) - 1)

    @property
    def panels(self) -> int:
        """Elements of the private buffer of the largest factor."""
        return int(max(factor.slot for factor in self.factors))

    @property
    def slot(self) -> int:
        """Elements of a work group's private buffer."""
        return self.panels + self.intermediate_buffers * self.between

    @property
    def registers(self) -> int:
        return int(max(factor.registers for factor in self.factors))

    @property
    def packed_bytes(self) -> int:
        return int(sum(factor.packed_bytes for factor in self.factors))


class ProcessorProduct(Family[ConstantsT]):
    """A family of products on processors. Each work group processes blocks of the batch sequentially."""

    signature = PRODUCT_WITH_WORKSPACE

    def shared_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int:
        return 0

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        shape, of_source = self.shape(kernel, constants), self.shape(kernel, self.source_constants(kernel, constants))
        grid = divide_up(batch, shape.constants.block) * shape.parts
        return Geometry(grid, 1, 0, at_once=GROUPS_AT_ONCE, group_bytes=of_source.slot * kernel.real_bytes)

    def output_reads(self, kernel: KernelSpec, constants: Any, batch: int) -> int:
        """Bytes that stores of outputs read: stores into the caches first read the lines that they replace."""
        return 0 if constants.streaming else batch * kernel.out_features * kernel.item_bytes


@dataclass(frozen=True)
class VectorChainConstants(Constants):
    """Constants of several factors that a search may change."""

    entry_family: ClassVar[str] = "vector_chain"
    at_launch: ClassVar[tuple[str, ...]] = ("block", "streaming")

    block: int  # rows of the batch that a work group takes at a time
    tiles: str  # each factor's along, lanes, height, width, panel; chain by chain in a group
    streaming: int  # 1: the layer's outputs leave by streaming stores; 0: they go into the caches
    pairs: int = 0  # 1: inputs are multiplied two at a time, and intermediates have the type of X

    @classmethod
    def of(cls, kernel: KernelSpec, block: int, factors: list[VectorConstants]) -> "VectorChainConstants":
        """Constants of a chain from those of each factor alone."""
        words = (f"{each.along} {each.lanes} {each.height} {each.width} {each.panel}" for each in factors)
        return cls(block, tiles_of(kernel, words), factors[-1].streaming, factors[-1].pairs)

    @property
    def parsed(self) -> list[VectorConstants]:
        """Constants of each factor alone."""
        found = []
        for words, is_last in listed(self.tiles):
            try:
                along, *numbers = words.split()
                lanes, height, width, panel = map(int, numbers)
            except ValueError:
                raise ConstantsError(
                    f"tiles={self.tiles!r}: {words!r} must be along, lanes, height, width and panel"
                ) from None
            streaming = self.streaming if is_last else 0  # an intermediate is read immediately: it stays in the cache
            found.append(VectorConstants(along, lanes, height, width, self.block, 1, panel, streaming, self.pairs))
        return found


AnyVectorConstants = VectorConstants | VectorChainConstants


@dataclass(frozen=True)
class VectorChainTiling(LaunchTiling):
    """Sizes derived from the factors of one launch and their constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: AnyVectorConstants

    @cached_property
    def factors(self) -> list[VectorTiling]:
        factors = zip(places(self.kernel), own_of_factors(self.kernel, self.constants), strict=True)
        reads = self.kernel.layout
        return [VectorTiling(*each, reads if transposes(self.kernel, place) else "") for place, each in factors]

    @property
    def unit(self) -> int:
        """Blocks have a multiple of this number of rows of the batch."""
        return lcm(*(factor.unit for factor in self.factors)) if self.kernel.is_chain else self.factors[0].step

    @property
    def pitch(self) -> int:
        """Elements from one feature of an intermediate to the next, in batch-size-last."""
        return spaced(self.constants.block, self.factors[0])

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        rows = {"bsf": self.constants.block, "bsl": self.pitch}
        factors = zip(places(self.kernel), self.factors, strict=True)
        sizes = [place.pattern.out_features * rows[each.kernel.layout] for place, each in factors if not place.is_last]
        elements = divide_up(max(sizes, default=0), 2 if self.constants.pairs else 1)
        return round_up(elements + LINE_BYTES, LINE_BYTES) if sizes else 0
