"""Chains of the SIMT family: a block takes a tile of the batch through all factors of a layer, or of several layers on
one X. The intermediates stay in its shared memory.

Decides the tiles of `simt_chain.cu.j2`; its design is docs/kernels/simt.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Constexpr, Limits, Work
from ksgen.families.chains import factor_kernels, is_single, own_of_factors, places, tiles_of
from ksgen.families.expected import fastest
from ksgen.families.gpu_chain import BLOCKS, GpuChain, GpuChainConstants, GpuChainShape, rules_of, stages_of
from ksgen.families.rules import Rule
from ksgen.families.simt.family import RULES, Simt, tile_picture
from ksgen.families.simt.shape import LANES_BATCH, LANES_OUT, SimtConstants, SimtTiling, products_of
from ksgen.families.tiles import divide_up
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN
from ksgen.values import cached_property

LEAST_ITEM = 4  # bytes of the smallest asynchronous copy; 16-bit types use tensor cores instead
GROUPS_BATCH = (1, 2)  # 16-byte groups of a thread's sums along the batch
THREADS_OUT = (1, 2, 3, 4, 6, 8)  # its sums along the outputs
TILES_BATCH = (1, 2, 4)  # rows of the batch per block, in units of the fewest that its warps can have
WARPS = (4, 8, 16)  # per block
MOST_STAGE = (4096, 8192, 16384)  # bytes per stage, at most
MOST_IN = 32  # inputs per stage, at most
STAGES = (8, 6, 4, 3, 2)
REMEMBERED = 4096  # cached tiles of factors
LANES = 128  # float32 multiply-adds per multiprocessor and cycle
CACHE_BYTES = 24  # from the second-level cache, per multiprocessor and cycle
BARRIER = 40  # cycles between stages in which nothing is multiplied
_WORDS = ("tile_out", "tile_in", "tile_d", "thread_batch", "thread_out")  # of a factor, in `tiles`
_OF_FACTOR = (  # constants of a single factor that its part of a chain's source has unchanged
    "A", "B", "C", "D", "TILE_OUT", "TILE_IN", "TILE_D", "THREAD_BATCH", "THREAD_OUT", "GROUP_OUT", "WARPS_BATCH", "WARPS_PER_PLANE",
    "STEPS", "TILES_OUT", "TILES_D", "X_PLANE", "W_STAGE", "W_ROUNDS", "X_LINES", "X_VECTOR", "X_LANE_RUN", "X_LANE_LINES", "X_WARPS_RUN",
    "X_LINE_STEP", "X_LINE_ROUNDS", "X_RUN_STEP", "X_RUN_ROUNDS", "Y_PLANE", "Y_LANE_RUN", "Y_LANE_LINES", "Y_WARPS_RUN",
    "Y_LINE_STEP", "Y_LINE_ROUNDS", "Y_RUN_STEP", "Y_RUN_ROUNDS",
)  # fmt: skip


@dataclass(frozen=True)
class SimtChainConstants(GpuChainConstants):
    """Constants of a chain; `tiles` has the `_WORDS` of each factor."""

    @property
    def parsed(self) -> list[SimtConstants]:
        each = self.numbers(_WORDS)
        return [SimtConstants(tile_batch=self.tile_batch, stages=2, min_blocks=1, copy="async", **numbers) for numbers in each]


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

    @property
    def intermediate_elements(self) -> int:
        """Elements of the intermediate that stay in shared memory for the next factor."""
        return self.kernel.pattern.out_features * self.constants.tile_batch

    @property
    def intermediate_traffic(self) -> tuple[int, int]:
        """Bytes and cycles of shared memory in which a block writes the intermediate."""
        cycles = self.sum_cycles(self.kernel.pattern.d * self.constants.tile_batch)
        return self.intermediate_elements * self.real_bytes, self.tiles_of_batch * cycles


@dataclass(frozen=True)
class SimtChainTiling(GpuChainShape[SimtFactor]):
    """Sizes of a chain, in elements of the sums' type."""

    @cached_property
    def factors(self) -> list[SimtFactor]:
        each = zip(own_of_factors(self.kernel, self.constants), self.places, strict=True)
        return [SimtFactor(*own, is_first=where.at == 0) for own, where in each]

    @property
    def buffer_sizes(self) -> list[list[int]]:
        """Sizes of the buffers that the factors write: intermediates, and a slice of sums that become rows of Y for
        each chain's last factor."""
        found: list[list[int]] = [[] for _ in self.kernel.chains]
        for factor, where in zip(self.factors, self.places, strict=True):
            found[where.chain].append(factor.transposed_elements if where.is_last else factor.intermediate_elements)
        return found

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


def _divide(kernel: KernelSpec, constants: SimtChainConstants) -> bool:
    later = [own for own, where in zip(own_of_factors(kernel, constants), places(kernel), strict=True) if where.at]
    return all(each.pattern.c % own.tile_in == 0 and each.pattern.d % own.tile_d == 0 for each, own in later)


_DIVIDE: Rule[SimtChainConstants] = Rule(
    "tiles has a tile_in that divides c and a tile_d that divides d, from a chain's factor 2 on", _divide
)


class SimtChain(GpuChain[SimtChainConstants]):
    """Fused multiply-adds on CUDA cores."""

    name = "simt_chain"
    constants_type = SimtChainConstants
    alone = Simt()
    packed_by = alone.name
    listed = (*rules_of(RULES, SimtChainTiling), _DIVIDE)
    why = "all factors of one or more layers in one launch, intermediates in shared memory: float32, float64, sm_80 on"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.has_bytes_in:  # one launch per factor serves these
            return False
        if kernel.job != CHAIN or not limits.async_copies or limits.is_cpu or kernel.item_bytes < LEAST_ITEM:
            return False
        if kernel.arithmetic.is_complex or is_single(kernel):
            return False
        return any(self.space(kernel, limits))

    def shape(self, kernel: KernelSpec, constants: SimtChainConstants) -> SimtChainTiling:
        return SimtChainTiling(kernel, constants)

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> SimtChainConstants:
        return fastest(self, kernel, limits, batch, lambda: self.space(kernel, limits))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[SimtChainConstants]:
        """Yield the best tiles for every tile of the batch, number of warps and size of a stage.

        Each comes with all numbers of stages and blocks that fit.
        """
        least, factors = LANES_BATCH * 16 // kernel.real_bytes, factor_kernels(kernel)
        for times, warps, most in product(TILES_BATCH, WARPS, MOST_STAGE):
            best = [best_of_factor(each, ends, times * least, warps, most) for each, ends in zip(factors, _ends(kernel), strict=True)]
            if None in best:
                continue
            tiles = tiles_of(kernel, (" ".join(str(getattr(own, name)) for name in _WORDS) for own in best))
            for stages, blocks in product(STAGES, BLOCKS):
                constants = SimtChainConstants(times * least, tiles, stages, blocks)
                if self.fits(kernel, constants, limits):
                    yield constants

    # ---- costs

    def work(self, kernel: KernelSpec, constants: SimtChainConstants, batch: int) -> Work:
        shape, blocks = SimtChainTiling(kernel, constants), self.geometry(kernel, constants, batch).grid
        first, last = shape.of_ends(shape.factors)
        between = [factor for factor, where in zip(shape.factors, shape.places, strict=True) if not where.is_last]
        inside = [factor.inside(blocks * stages_of(factor)) for factor in shape.factors]
        written = [factor.intermediate_traffic for factor in between]
        inside += [(blocks * size, blocks * cycles) for size, cycles in written]
        for each in last:
            found = batch * each.kernel.pattern.out_features
            inside.append(each.transpose_traffic(blocks * each.tiles_of_batch, found))
        moved = sum(each.tiles_out * each.x_bytes_moved(batch) for each in first) + sum(each.y_bytes_moved(batch) for each in last)
        shared, cycles = map(sum, zip(*inside, strict=True))
        return Work(
            blocks,
            shape.memory_bytes(batch),
            round(moved) + blocks * shape.packed_bytes,
            shared,
            blocks * sum(stages_of(factor) * factor.multiply_adds for factor in shape.factors),
            blocks * shape.waits,
            returned_bytes=CYCLE_BYTES * cycles - shared,
        )

    # ---- the source

    def words(self, kernel: KernelSpec, constants: SimtChainConstants) -> Mapping[str, Any]:
        return {**super().words(kernel, constants), "products": products_of(kernel, "async")}

    def picture(self, own: SimtFactor, heading: str) -> str:
        return tile_picture(own, heading)

    def constexprs_of(self, shape: SimtChainTiling, at: int) -> list[Constexpr]:
        own = shape.factors[at]
        known = {each.name: each for each in Simt().constexprs(own.kernel, own.constants)}
        found = [known[name] for name in _OF_FACTOR if name in known]
        found.append(Constexpr("X_PITCH", own.x_pitch, "elements of shared memory from one l to the next"))
        found.append(Constexpr("W_BASE", own.w_base, "offset of a stage's weights, in elements"))
        if number := shape.places[at].at:
            place = shape.place(number - 1)
            found.append(Constexpr("X_PLACE", place, "offset of the inputs in shared memory, in elements"))
        return [*found, Constexpr("OUT_PLACE", shape.place(number), "offset of the outputs that it writes there")]

    def constexprs(self, kernel: KernelSpec, constants: SimtChainConstants) -> list[Constexpr]:
        shape = SimtChainTiling(kernel, constants)
        return [
            *self.of_all_factors(kernel, constants),
            Constexpr("GROUP", shape.factors[0].group, "elements of a 16-byte access to shared memory"),
            Constexpr("RING", shape.ring, "offset of the stages in shared memory, in elements"),
            Constexpr("SLOT", shape.slot, "elements of the largest stage"),
            Constexpr("SHARED_REALS", shape.shared_reals, "elements of shared memory per block"),
        ]


def _ends(kernel: KernelSpec) -> list[tuple[bool, bool]]:
    """Two flags per factor: whether it is its chain's first, and whether it is the last."""
    return [(where.at == 0, where.is_last) for where in places(kernel)]


@lru_cache(REMEMBERED)
def best_of_factor(kernel: KernelSpec, ends: tuple[bool, bool], tile_batch: int, warps: int, most: int) -> SimtConstants | None:
    """Tile of a factor that takes a block the fewest cycles; None if there is none.

    Tiles have `tile_batch` rows of the batch, `warps` warps and stages of at most `most` bytes. `ends` says whether the
    factor reads X, and whether it writes Y.
    """
    is_first, is_last = ends

    def cost(own: SimtConstants) -> tuple[float, ...]:
        shape = SimtFactor(kernel, own, is_first)
        stages = stages_of(shape)
        multiplying = stages * shape.multiply_adds * (kernel.real_bytes // 4) / LANES
        moved = is_first * shape.tiles_out * shape.x_bytes_moved(tile_batch) + is_last * shape.y_bytes_moved(tile_batch)
        cycles = max(multiplying, shape.inside(stages)[1]) + stages * BARRIER + moved / CACHE_BYTES
        return (cycles, shape.stage, own.thread_batch * own.thread_out)

    return min(_tiles_of_factor(kernel, is_first, tile_batch, warps, most), key=cost, default=None)


def _tiles_of_factor(kernel: KernelSpec, is_first: bool, tile_batch: int, warps: int, most: int) -> Iterator[SimtConstants]:
    c, d = kernel.pattern.c, kernel.pattern.d
    planes = [1] if kernel.layout == "bsl" else [each for each in range(1, warps + 1) if d % each == 0]
    inputs = [each for each in range(1, MOST_IN + 1) if c % each == 0 or (is_first and each in (8, 16))]
    for groups, thread_out, tile_d in product(GROUPS_BATCH, THREADS_OUT, planes):
        thread_batch = groups * 16 // kernel.real_bytes
        warps_out, over = divmod(warps * LANES_BATCH * thread_batch, tile_batch * tile_d)
        if over or not warps_out or tile_batch % (LANES_BATCH * thread_batch):
            continue
        for tile_in in inputs:
            own = SimtConstants(tile_batch, LANES_OUT * thread_out * warps_out, tile_in, tile_d, thread_batch, thread_out, 2, 1, "async")
            stage = SimtFactor(kernel, own, is_first).stage
            if stage * kernel.real_bytes <= most and all(rule.holds(kernel, own) for rule in RULES):
                yield own
