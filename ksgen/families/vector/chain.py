"""Constants and sizes of all factors of one launch: intermediates and the private buffer of a work group. A factor
alone is a chain of one.

The factors are applied to a block of the batch while it is in a processor's cache.
"""

from dataclasses import dataclass
from math import lcm
from typing import ClassVar

from ksgen.errors import ConstantsError
from ksgen.families.chains import listed, own_of_factors, places, tiles_of, transposes
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.launch import LaunchTiling
from ksgen.families.vector.planes import round_up
from ksgen.families.vector.shape import LINE_BYTES, VectorConstants, VectorTiling, spaced
from ksgen.spec import KernelSpec
from ksgen.values import cached_property


@dataclass(frozen=True)
class VectorChainConstants(Constants):
    """Constants of several factors that a search may change."""

    entry_family: ClassVar[str] = "vector_chain"

    block: int  # rows of the batch that a work group takes at a time
    tiles: str  # each factor's along, lanes, height, width, panel; chain by chain in a group
    streaming: int  # 1: the layer's outputs leave by streaming stores; 0: they go into the caches
    pairs: int = 0  # 1: inputs are multiplied two at a time, and intermediates have the type of X

    @classmethod
    def of(cls, kernel: KernelSpec, block: int, factors: list[VectorConstants]) -> "VectorChainConstants":
        """Constants of a chain whose factors have these by themselves."""
        words = (f"{each.along} {each.lanes} {each.height} {each.width} {each.panel}" for each in factors)
        return cls(block, tiles_of(kernel, words), factors[-1].streaming, factors[-1].pairs)

    @property
    def parsed(self) -> list[VectorConstants]:
        """Constants of each factor by itself."""
        return [self._parsed(words, is_last) for words, is_last in listed(self.tiles)]

    def _parsed(self, words: str, is_last: bool) -> VectorConstants:
        streaming = self.streaming if is_last else 0  # an intermediate is read at once: it stays in the cache
        try:
            along, lanes, height, width, panel = words.split()
            return VectorConstants(
                along, int(lanes), int(height), int(width), self.block, 1, int(panel), streaming, self.pairs
            )
        except ValueError:
            raise ConstantsError(
                f"tiles={self.tiles!r}: {words!r} is not along, lanes, height, width and panel"
            ) from None


@dataclass(frozen=True)
class VectorChainTiling(LaunchTiling):
    """Sizes derived from the factors of one launch and their constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: VectorConstants | VectorChainConstants

    @cached_property
    def factors(self) -> list[VectorTiling]:
        own = zip(places(self.kernel), own_of_factors(self.kernel, self.constants), strict=True)
        reads = self.kernel.layout
        return [VectorTiling(*each, reads if transposes(self.kernel, at) else "") for at, each in own]

    @property
    def unit(self) -> int:
        """Rows of the batch of which blocks are whole multiples."""
        return lcm(*(factor.unit for factor in self.factors)) if self.is_chain else self.factors[0].step

    @property
    def pitch(self) -> int:
        """Elements from one feature of an intermediate to the next, in batch-size-last."""
        return spaced(self.constants.block, self.factors[0])

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        rows = {"bsf": self.constants.block, "bsl": self.pitch}
        own = zip(places(self.kernel), self.factors, strict=True)
        sizes = [each.pattern.out_features * rows[factor.kernel.layout] for each, factor in own if not each.is_last]
        elements = divide_up(max(sizes, default=0), 2 if self.constants.pairs else 1)
        return round_up(elements + LINE_BYTES, LINE_BYTES) if sizes else 0
