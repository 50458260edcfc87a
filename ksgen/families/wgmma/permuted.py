"""X from shared memory between two permutations: large b and c with d > 1, 16-bit types in batch-size-first.

X is permuted so that the inputs of each j are neighbours, multiplied as with d = 1, and Y is permuted back. These are
three launches; the permuted X and Y are their workspace.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from ksgen.families.base import Constexpr, Geometry, Pass, TensorMap
from ksgen.families.operands import CHUNK
from ksgen.families.signature import PRODUCT_WITH_WORKSPACE
from ksgen.families.tiles import divide_up
from ksgen.families.wgmma.registers import MOST_FLAT
from ksgen.families.wgmma.shared import SharedBlock, SharedConstants
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec

PERMUTE_THREADS = 256  # per block of a permuting launch
MOST_NEIGHBOURS = 8  # threads with contiguous parts of X: a line of 128 bytes
WORKSPACE_LINE = 128  # bytes; X in the workspace is padded to a multiple, and Y follows


@lru_cache(1024)
def with_blocks_apart(kernel: KernelSpec) -> KernelSpec:
    """Kernel that multiplies the permuted arrays: each (i, j) is a block on its diagonal, and it has no epilogue."""
    a, b, c, d = kernel.pattern.shape
    return replace(kernel, chains=Pattern(a * d, b, c, 1), epilogue=Epilogue())


def part_d(d: int) -> int:
    """Neighbouring j per thread, for 8 features each: all of them if they are few, else a chunk."""
    return d if d <= MOST_FLAT else 8


@dataclass(frozen=True)
class PermutedConstants(SharedConstants):
    """Constants of the kernel between the permutations."""

    x_from: str = "permuted"

    entry_family: ClassVar[str] = "wgmma_permuted"


@dataclass(frozen=True)
class PermutedBlock(SharedBlock):
    """Block of the kernel between the permutations. `kernel` describes that kernel, and `whole` the call's."""

    whole: KernelSpec

    why = "Hopper's wgmma between two permutations: 16-bit types in bsf with d > 1, large b and c"
    constants_type = PermutedConstants
    signature = PRODUCT_WITH_WORKSPACE

    @classmethod
    def of(cls, kernel: KernelSpec, constants: Any) -> Self:
        return cls(with_blocks_apart(kernel), constants, kernel)

    @staticmethod
    def is_for(kernel: KernelSpec) -> bool:
        _, b, c, d = kernel.pattern.shape
        vector = CHUNK // kernel.item_bytes
        has_chunks = b % vector == c % vector == 0 and (1 < d <= MOST_FLAT or d % vector == 0)
        is_usual = kernel.layout == "bsf" and not (kernel.is_quantized or kernel.is_exchanged)
        return SharedBlock.is_for(with_blocks_apart(kernel)) and is_usual and has_chunks

    def with_passes(self, geometry: Geometry, batch: int) -> Geometry:
        pattern, item_bytes = self.whole.pattern, self.whole.item_bytes
        x_bytes, y_bytes = (batch * features * item_bytes for features in (pattern.in_features, pattern.out_features))
        part_bytes = CHUNK * part_d(pattern.d)
        x_pass, y_pass = (
            Geometry(divide_up(size // part_bytes, PERMUTE_THREADS), PERMUTE_THREADS, 0) for size in (x_bytes, y_bytes)
        )
        return geometry._replace(
            workspace_bytes=divide_up(x_bytes, WORKSPACE_LINE) * WORKSPACE_LINE + y_bytes,
            before=(Pass("permute_x", x_pass),),
            after=(Pass("permute_y", y_pass),),
        )

    def maps(self, batch: int) -> tuple[TensorMap, ...]:
        return tuple(replace(each, operand="workspace") for each in super().maps(batch))

    def passed_bytes(self, batch: int) -> int:
        # arrays of Y's size: sums and residual are read, Y is written
        outputs = 3 if self.whole.epilogue.residual else 2
        features = 2 * self.whole.pattern.in_features + outputs * self.whole.pattern.out_features
        return batch * features * self.whole.item_bytes

    def own_variables(self, variants: tuple[str, ...]) -> dict[str, Any]:
        common = super().own_variables(variants)
        return {
            **common,
            "store": "workspace",
            "out": "workspace",
            "variants": ("later", "permuted", *common["variants"]),
        }

    def own_constexprs(self) -> list[Constexpr]:
        d, epilogue, part = self.whole.pattern.d, self.whole.epilogue, part_d(self.whole.pattern.d)
        neighbours = max(count for count in range(1, MOST_NEIGHBOURS + 1) if d // part % count == 0)
        return [
            *super().own_constexprs(),
            Constexpr("INTERLEAVED", d, "interleaved matrices of the pattern, index j, which A includes"),
            Constexpr("PERMUTE_THREADS", PERMUTE_THREADS, "threads per block of the permuting kernels"),
            Constexpr("PART_D", part, "neighbouring j that a thread permutes, of 8 features"),
            Constexpr("NEIGHBOURS", neighbours, "threads side by side along j"),
            Constexpr("FINISHES", epilogue != Epilogue(), "whether the entry that permutes Y applies an epilogue"),
            Constexpr("ADDS_BIAS", epilogue.bias, "whether the entry that permutes Y adds a bias"),
            Constexpr("ADDS_RESIDUAL", epilogue.residual, "whether the entry that permutes Y adds a residual"),
        ]
