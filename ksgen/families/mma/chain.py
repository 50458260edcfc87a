"""Constants and sizes of all factors of one launch.

A block takes a tile of the batch through all factors of a layer, or of several layers on one X. The intermediates stay
in its shared memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, ClassVar

from ksgen.families.base import Constexpr, Limits, named
from ksgen.families.chains import FactorPlace, factor_kernels, places
from ksgen.families.gpu_chain import (
    BLOCKS,
    REMEMBERED,
    SHARED,
    GpuChainConstants,
    GpuChainShape,
    ends_of,
    rules_of_chain,
)
from ksgen.families.mma.defaults import MOST_REGISTERS, WARPS, planes, promotion
from ksgen.families.mma.shape import COLUMNS, ROWS, RULES, MmaConstants, MmaTiling, padded_chunks
from ksgen.families.operands import CHUNK
from ksgen.families.rules import Rule, first_broken
from ksgen.families.tiles import MOST_THREADS
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

MOST_SUMS = 128  # accumulators per thread
TILES_BATCH = (16, 32, 48, 64, 96, 128, 192)  # rows of the batch per block
WARPS_OF_BLOCK = (4, 8)
STRETCHES = (1, 2, 4)  # most periods of the lanes' order of inputs per stage
STAGES = (4, 3, 2)
# per thread: if X comes in stages, its addresses are computed while the sums are live; ptxas took up to 30
STREAM_REGISTERS = 32

XOrder = tuple[int | str, ...]


@dataclass(frozen=True)
class MmaChainConstants(GpuChainConstants):
    """Constants of several factors; `tiles` has the `_NAMES` of each."""

    entry_family: ClassVar[str] = "mma_chain"
    template: ClassVar[str] = "mma_chain"
    on_tensor_cores: ClassVar[bool] = True

    names: ClassVar[tuple[str, ...]] = (
        "tile_out", "tile_in", "tile_d", "warps_batch", "warps_out", "warps_d", "promote",
    )  # fmt: skip
    searched: ClassVar[tuple[int, ...]] = STAGES
    of_factor: ClassVar[Any] = partial(MmaConstants, stages=2, min_blocks=1)

    stream: int = 0  # 1: X comes in stages, again for each tile of the first factor's outputs; 0: all of X is resident


@dataclass(frozen=True)
class MmaFactor(MmaTiling):
    """A factor in a chain.

    Its inputs are in shared memory in the order in which its tiles read them: all of them, or stages of X.
    """

    streamed: int = 0  # stages of X in shared memory; 0: all of X

    @cached_property
    def x_pitch(self) -> int:
        """Bytes from one line to the next. In batch-size-first, a line is a row of the batch with all its features."""
        if self.streamed:
            return super().x_pitch
        run = self.slots if self.is_bsf else self.constants.tile_batch
        return CHUNK * padded_chunks(run * self.kernel.item_bytes // CHUNK, self.x_strides)

    @property
    def x_stage(self) -> int:
        return self.x_run * self.kernel.item_bytes if self.is_bsf else self.constants.tile_in * self.x_pitch

    @property
    def input_bytes(self) -> int:
        """Bytes of shared memory for the factor's inputs."""
        if self.streamed:
            return self.streamed * self.x_bytes
        return (self.constants.tile_batch if self.is_bsf else self.slots) * self.x_pitch

    @property
    def readings(self) -> int:
        """Number of times that a block copies each of its inputs."""
        return self.tiles_out if self.streamed else 1

    @property
    def order(self) -> XOrder:
        """Key of the order of inputs in shared memory: equal for factors that can read the same X."""
        a, _, c, d = self.kernel.pattern.shape
        inputs = self.steps * self.constants.tile_in
        others = () if (inputs, self.constants.tile_d) == (c, d) else (c, d, inputs, self.constants.tile_d)
        exchanged = (a, c, d, self.kernel.pattern.load) if self.kernel.reads_exchanged else ()
        return (self.x_pitch, *others, *exchanged)  # the pitch alone, if features keep their order


@dataclass(frozen=True)
class MmaChainTiling(GpuChainShape[MmaFactor]):
    """Sizes of a chain, in bytes."""

    of_factor = MmaFactor

    def role_of(self, where: FactorPlace) -> int:
        return 0 if where.at else self.constants.stages * self.constants.stream

    def buffer_size(self, factor: MmaFactor, where: FactorPlace) -> int:
        """Size of the buffer that a factor reads; 0 for X of a group."""
        return factor.input_bytes if where.at or not self.kernel.is_group else 0

    @cached_property
    def orders(self) -> dict[XOrder, tuple[int, int]]:
        """Offset of X in shared memory for each order of its inputs, and the number of the factor that copies it.

        Offsets are in bytes. X of a group stays in shared memory until all chains are done.
        """
        found: dict[XOrder, tuple[int, int]] = {}
        begin = 0
        for at, (factor, where) in enumerate(zip(self.factors, self.places, strict=True)):
            if where.at == 0 and not factor.streamed and factor.order not in found:
                found[factor.order] = begin, at
                begin += factor.input_bytes
        return found

    @property
    def resident_size(self) -> int:
        if not self.kernel.is_group:
            return 0
        if self.constants.stream:
            return max(each.input_bytes for each, where in zip(self.factors, self.places, strict=True) if where.at == 0)
        return sum(self.factors[at].input_bytes for _, at in self.orders.values())

    @property
    def copying(self) -> list[MmaFactor]:
        """Factors that copy X from memory."""
        if self.constants.stream:
            return ends_of(self.kernel, self.factors)[0]
        return [self.factors[at] for _, at in self.orders.values()]

    @property
    def waits(self) -> float:
        """Waits of one block for stages, and for a resident X; stages in flight together count as one wait."""
        stages = sum(each.block_stages for each in self.factors) / int(self.constants.stages - 1)
        return max(1.0, stages) if self.constants.stream else 1 + stages

    @property
    def x_slot(self) -> int:
        """Bytes of the largest stage of X among the chains' first factors; 0 if X does not come in stages."""
        return max((each.x_bytes for each in self.factors if each.streamed), default=0)

    def x_place(self, at: int) -> int:
        """Offset of a factor's inputs."""
        if self.factors[at].streamed and self.kernel.is_group:
            return 0
        number = self.places[at].at
        if not self.kernel.is_group:
            return self.place(number)
        return self.place(number - 1) if number else self.orders[self.factors[at].order][0]

    @property
    def registers(self) -> int:
        """Estimated registers per thread. Factors up to the last one that reads X in stages also load stages of X."""
        last = max((at for at, factor in enumerate(self.factors) if factor.streamed), default=-1)
        return max(factor.registers + STREAM_REGISTERS * (at <= last) for at, factor in enumerate(self.factors))

    @property
    def slot(self) -> int:
        """Bytes of the largest stage of weights, which each slot of the ring can hold."""
        return max(factor.w_bytes for factor in self.factors)

    @property
    def shared_bytes(self) -> int:
        stages: int = self.constants.stages
        return self.ring + stages * self.slot

    @property
    def constexprs(self) -> list[Constexpr]:
        return [
            named(self, "RING", "offset of the weights' stages in shared memory, in bytes"),
            Constexpr("W_SLOT", self.slot, "bytes of the largest stage of weights"),
            named(self, "SHARED_BYTES", "bytes of shared memory per block"),
        ]


CHAIN_RULES: tuple[Rule[MmaChainConstants], ...] = (
    *rules_of_chain(RULES, MmaChainTiling.of),
    Rule("stream is 0 or 1", lambda k, c: c.stream in (0, 1)),
)


def options(kernel: KernelSpec, limits: Limits) -> Iterator[list[MmaChainConstants]]:
    """Yield the best tiles of all factors for each `tile_batch`, number of warps and length of a stage.

    Equal tiles are yielded once, with resident X and with X in stages.
    """
    for tile_batch, warps in product(TILES_BATCH, WARPS_OF_BLOCK):
        best = (_best_of_all(kernel, limits, tile_batch, warps, stretches) for stretches in STRETCHES)
        for tiles in dict.fromkeys(MmaChainConstants.tiles_with(kernel, each) for each in best if each):
            yield [MmaChainConstants(tile_batch, tiles, min(STAGES), min(BLOCKS), stream) for stream in (0, 1)]


def _best_of_all(kernel: KernelSpec, limits: Limits, tile_batch: int, warps: int, stretches: int) -> list[MmaConstants]:
    """Best tile of each factor; empty if a factor has none.

    The first factors of a group's later chains read X in the order of an earlier chain, if they have such a tile.
    """
    best: list[MmaConstants] = []
    orders: tuple[XOrder, ...] = ()
    for factor, where in zip(factor_kernels(kernel), places(kernel), strict=True):
        known = orders if where.at == 0 else ()
        asked = (factor, promotion(factor, limits), tile_batch, warps, stretches)
        own = best_of_factor(*asked, known) or best_of_factor(*asked)
        if not own:
            return []
        best.append(own)
        orders += (MmaFactor(factor, own).order,) if where.at == 0 else ()
    return best


@lru_cache(REMEMBERED)
def best_of_factor(
    kernel: KernelSpec, promote: int, tile_batch: int, warps: int, stretches: int, orders: tuple[XOrder, ...] = ()
) -> MmaConstants | None:
    """Tile of a factor with the least padding and the most products per fragment read; None if there is none.

    Tiles have `tile_batch` rows of the batch and `warps` warps. A stage has at most `stretches` periods of the lanes'
    order of inputs. If `orders` are given, the tile reads X in one of them.
    """
    tiles = _tiles_of_factor(kernel, promote, tile_batch, warps)
    fitting = (own for count, own in tiles if count <= stretches)
    return next((own for own in fitting if not orders or MmaFactor(kernel, own).order in orders), None)


@lru_cache(SHARED)
def _tiles_of_factor(kernel: KernelSpec, promote: int, tile_batch: int, warps: int) -> list[tuple[int, MmaConstants]]:
    """All tiles, each with the number of periods of the lanes' order per stage, those with the least cost first."""
    found = []
    for count, own in _able_tiles(_alike(kernel), promote, tile_batch, warps):
        shape = MmaFactor(kernel, own)
        padding = shape.multiply_adds / (kernel.pattern.weight_count * tile_batch)
        per_product = padding * (1 + 1 / shape.row_tiles + 1 / shape.column_tiles)
        found.append(((per_product, shape.block_stages, -shape.sums), count, own))
    return [(count, own) for _, count, own in sorted(found, key=lambda each: each[0])]


@lru_cache(REMEMBERED)
def _alike(kernel: KernelSpec) -> KernelSpec:
    """Kernel of a small pattern for which the same tiles keep the rules and fit the registers.

    These depend on b, c and orders only if a residual or exchanged inputs are read.
    """
    depends = kernel.epilogue.residual or kernel.reads_exchanged
    return kernel if depends else replace(kernel, chains=Pattern(1, 1, 1, kernel.pattern.d))


@lru_cache(REMEMBERED)
def _able_tiles(kernel: KernelSpec, promote: int, tile_batch: int, warps: int) -> list[tuple[int, MmaConstants]]:
    """Tiles that keep the rules and fit the registers, each with the number of periods per stage."""
    chunk, whole = CHUNK // kernel.item_bytes, planes(kernel)
    unit = COLUMNS * (1 if kernel.layout == "bsf" else chunk)
    threads = [each for each in (*WARPS, (1, 8, 1), (2, 4, 1)) if each[0] * each[1] * each[2] == warps]
    found = []
    for (along_batch, along_out, along_d), rows in product(dict.fromkeys(threads), (1, 2, 3, 4)):
        if tile_batch % (unit * along_batch):
            continue
        warp_d = whole if along_d == 1 else chunk
        if along_d > 1 and (kernel.layout == "bsl" or warp_d * along_d > kernel.pattern.d):
            continue
        own = MmaConstants(
            tile_batch, ROWS * rows * along_out, 0, warp_d * along_d, along_batch, along_out, 2, promote, 1, along_d
        )
        least = MmaFactor(kernel, own).super_in
        for count in range(1, STRETCHES[-1] + 1):
            shape = MmaFactor(kernel, own.changed(tile_in=count * least))
            has_registers = shape.promoted_sums <= MOST_SUMS and shape.registers <= MOST_REGISTERS
            fits = has_registers and shape.threads <= MOST_THREADS
            if fits and first_broken(RULES, kernel, shape.constants) is None:
                found.append((count, shape.constants))
    return found
