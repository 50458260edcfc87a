"""Constants and sizes of all factors of one launch by matrix tiles, and its expected cycles. A factor alone is a chain
of one.

The factors are applied to a block of the batch while it is in a core's second-level cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ksgen.families.amx.cycles import BETWEEN, SECOND_LEVEL_BYTES, Held, factor_cycles, held_of
from ksgen.families.amx.shape import LINE_BYTES, AmxConstants, AmxTiling
from ksgen.families.chains import listed, numbers_of, own_of_factors, places, tiles_of
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.vector.cycles import LAUNCH, TASK
from ksgen.families.vector.launch import LaunchTiling
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

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
