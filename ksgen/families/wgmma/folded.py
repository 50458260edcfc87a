"""X from shared memory with all j of an i as one block: few j, 16-bit types in batch-size-first.

The inputs (l, j) of an i are neighbours in memory, and so are its outputs (k, j). The kernel multiplies them as one
block with zeros where j differs: d times the multiply-adds, and nothing in registers or permuted. It pays where memory
bounds.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ksgen.families.base import Constexpr
from ksgen.families.wgmma.shared import SharedBlock, SharedConstants
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

MOST_FOLDED = 4  # j: with more, the zeros take longer than lanes that read X


def with_one_block(kernel: KernelSpec) -> KernelSpec:
    """Kernel of the same arrays with all j of an i in one block."""
    a, b, c, d = kernel.pattern.shape
    return replace(kernel, chains=Pattern(a, b * d, c * d, 1))


@dataclass(frozen=True)
class FoldedConstants(SharedConstants):
    """Constants of the product with one block for all j."""

    x_from: str = "folded"

    entry_family: ClassVar[str] = "wgmma_folded"


@dataclass(frozen=True)
class FoldedBlock(SharedBlock):
    """Block of the product with one block for all j, which is its `kernel`."""

    d: int  # of the pattern

    why = "wgmma of sm_90a with zeros where j differs: 16-bit types in bsf, d of 2 to 4; rows of X in whole 16 bytes"
    constants_type = FoldedConstants

    @classmethod
    def of(cls, kernel: KernelSpec, constants: Any) -> Self:
        return cls(with_one_block(kernel), constants, kernel.pattern.d)

    @staticmethod
    def is_for(kernel: KernelSpec) -> bool:
        is_asked = kernel.layout == "bsf" and 1 < kernel.pattern.d <= MOST_FOLDED and not kernel.is_quantized
        return is_asked and SharedBlock.is_for(with_one_block(kernel))

    @classmethod
    def multiplied(cls, kernel: KernelSpec) -> KernelSpec:
        return with_one_block(kernel)

    def own_words(self, variants: tuple[str, ...]) -> dict[str, Any]:
        return super().own_words(("folded", *variants))

    def own_constexprs(self) -> list[Constexpr]:
        return [*super().own_constexprs(), Constexpr("FOLDED", self.d, "index j of the pattern, which B and C count too")]
