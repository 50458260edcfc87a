"""Constants and sizes of all factors of one launch.

A block takes a tile of the batch through all factors of a layer, or of several layers on one X. The intermediates stay
in its shared memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any, ClassVar

from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Constexpr, named
from ksgen.families.chains import FactorPlace, factor_kernels, own_of_factors, places
from ksgen.families.gpu_chain import BLOCKS, REMEMBERED, SHARED, GpuChainConstants, GpuChainShape, rules_of_chain
from ksgen.families.rules import Rule, first_broken
from ksgen.families.simt.shape import LANES_BATCH, LANES_OUT, RULES, SimtConstants, SimtTiling
from ksgen.families.tiles import divide_up
from ksgen.spec import KernelSpec

GROUPS_BATCH = (1, 2)  # 16-byte groups of a thread's sums along the batch
THREADS_OUT = (1, 2, 3, 4, 6, 8)  # its sums along the outputs
TILES_BATCH = (1, 2, 4)  # rows of the batch per block, in units of the fewest that its warps can have
WARPS = (4, 8, 16)  # per block
MOST_STAGE = (4096, 8192, 16384)  # bytes per stage, at most
STAGES = (8, 6, 4, 3, 2)
MOST_IN = 32  # inputs per stage, at most
LANES = 128  # float32 multiply-adds per multiprocessor and cycle
CACHE_BYTES = 24  # from the L2 cache, per multiprocessor and cycle
BARRIER = 40  # cycles between stages in which nothing is multiplied


@dataclass(frozen=True)
class SimtChainConstants(GpuChainConstants):
    """Constants of several factors; `tiles` has the `names` of each."""

    entry_family: ClassVar[str] = "simt_chain"
    template: ClassVar[str] = "simt_chain"
    copy: ClassVar[str] = "async"
    names: ClassVar[tuple[str, ...]] = ("tile_out", "tile_in", "tile_d", "thread_batch", "thread_out")
    searched: ClassVar[tuple[int, ...]] = STAGES
    of_factor: ClassVar[Any] = partial(SimtConstants, stages=2, min_blocks=1, copy="async")


@dataclass(frozen=True)
class SimtFactor(SimtTiling):
    """A factor in a chain.

    The first factor copies X stage by stage, as alone. The inputs of the others are in shared memory, one feature's
    tile of the batch after another, so that their stages hold weights alone.
    """

    is_first: bool

    @property
    def x_pitch(self) -> int:
        return super().x_pitch if self.is_first else self.kernel.pattern.d * self.constants.tile_batch

    @property
    def w_base(self) -> int:
        return super().w_base if self.is_first else 0

    @property
    def copied(self) -> int:
        return super().copied if self.is_first else self.w_stage

    @property
    def copy_cycles(self) -> int:
        return super().copy_cycles if self.is_first else divide_up(self.w_stage * self.real_bytes, CYCLE_BYTES)


@dataclass(frozen=True)
class SimtChainTiling(GpuChainShape[SimtFactor]):
    """Sizes of a chain, in elements of the sums' type."""

    of_factor = SimtFactor

    def role_of(self, where: FactorPlace) -> bool:
        return where.at == 0

    def buffer_size(self, factor: SimtFactor, where: FactorPlace) -> int:
        """Size of the buffer that a factor writes: an intermediate, or a slice of sums that become rows of Y."""
        return factor.transposed_elements if where.is_last else factor.intermediate_elements

    @property
    def slot(self) -> int:
        """Elements of the largest stage, which each slot of the ring can hold."""
        return max(factor.stage for factor in self.factors)

    @property
    def shared_reals(self) -> int:
        stages: int = self.constants.stages
        return self.ring + stages * self.slot

    @property
    def shared_bytes(self) -> int:
        return self.shared_reals * self.kernel.real_bytes

    @property
    def constexprs(self) -> list[Constexpr]:
        return [
            named(self.factors[0], "GROUP", "elements of a 16-byte access to shared memory"),
            named(self, "RING", "offset of the stages in shared memory, in elements"),
            named(self, "SLOT", "elements of the largest stage"),
            Constexpr("SHARED_ELEMENTS", self.shared_reals, "elements of shared memory per block"),
        ]


def _divide(kernel: KernelSpec, constants: SimtChainConstants) -> bool:
    later = [own for own, where in zip(own_of_factors(kernel, constants), places(kernel), strict=True) if where.at]
    return all(each.pattern.c % own.tile_in == 0 and each.pattern.d % own.tile_d == 0 for each, own in later)


CHAIN_RULES: tuple[Rule[SimtChainConstants], ...] = (
    *rules_of_chain(RULES, SimtChainTiling.of),
    Rule("tiles has a tile_in that divides c and a tile_d that divides d, from a chain's factor 2 on", _divide),
)


def options(kernel: KernelSpec) -> Iterator[list[SimtChainConstants]]:
    """Yield the best tiles of all factors for each `tile_batch`, number of warps and size of a stage.

    Equal tiles are yielded once.
    """
    least, ends = LANES_BATCH * 16 // kernel.real_bytes, [(where.at == 0, where.is_last) for where in places(kernel)]
    for times, warps in product(TILES_BATCH, WARPS):
        asked = [(*each, times * least, warps) for each in zip(factor_kernels(kernel), ends, strict=True)]
        best = ([best_of_factor(*each, most) for each in asked] for most in MOST_STAGE)
        for tiles in dict.fromkeys(SimtChainConstants.tiles_with(kernel, each) for each in best if None not in each):
            yield [SimtChainConstants(times * least, tiles, min(STAGES), min(BLOCKS))]


@lru_cache(REMEMBERED)
def best_of_factor(
    kernel: KernelSpec, ends: tuple[bool, bool], tile_batch: int, warps: int, most: int
) -> SimtConstants | None:
    """Tile of a factor that takes a block the fewest cycles; None if there is none.

    Tiles have `tile_batch` rows of the batch, `warps` warps and stages of at most `most` bytes. `ends` says whether the
    factor reads X, and whether it writes Y.
    """
    tiles = _tiles_of_factor(kernel, *ends, tile_batch, warps)
    return next((own for (_, stage, _), own in tiles if stage * kernel.real_bytes <= most), None)


@lru_cache(SHARED)
def _tiles_of_factor(
    kernel: KernelSpec, is_first: bool, is_last: bool, tile_batch: int, warps: int
) -> list[tuple[tuple[float, int, int], SimtConstants]]:
    """All tiles with stages of at most `MOST_STAGE` bytes, those that take a block the fewest cycles first."""
    c, d = kernel.pattern.c, kernel.pattern.d
    planes = [1] if kernel.layout == "bsl" else [each for each in range(1, warps + 1) if d % each == 0]
    inputs = [each for each in range(1, MOST_IN + 1) if c % each == 0 or (is_first and each in (8, 16))]
    found = []
    for groups, thread_out, tile_d in product(GROUPS_BATCH, THREADS_OUT, planes):
        thread_batch = groups * 16 // kernel.real_bytes
        warps_out, over = divmod(warps * LANES_BATCH * thread_batch, tile_batch * tile_d)
        if over or not warps_out or tile_batch % (LANES_BATCH * thread_batch):
            continue
        for tile_in in inputs:
            own = SimtConstants(
                tile_batch, LANES_OUT * thread_out * warps_out, tile_in, tile_d, thread_batch, thread_out, 2, 1, "async"
            )
            shape = SimtFactor(kernel, own, is_first)
            if shape.stage * kernel.real_bytes > MOST_STAGE[-1]:
                break  # more inputs take more bytes
            if first_broken(RULES, kernel, own):
                continue
            stages = shape.block_stages
            multiplying = stages * shape.multiply_adds * (kernel.real_bytes // 4) / LANES
            moved = is_first * shape.tiles_out * shape.x_bytes_moved(tile_batch)
            moved += is_last * shape.y_bytes_moved(tile_batch)
            cycles = max(multiplying, shape.inside(stages)[1]) + stages * BARRIER + moved / CACHE_BYTES
            found.append(((cycles, shape.stage, thread_batch * thread_out), own))
    return sorted(found, key=lambda each: each[0])
