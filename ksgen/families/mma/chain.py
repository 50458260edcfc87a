"""Chains of the tensor-core family: a block takes a tile of the batch through all factors of a layer, or of several
layers on one X. The intermediates stay in its shared memory.

Decides the tiles of `mma_chain.cu.j2`; its design is docs/kernels/mma.md. Never renders, compiles or runs. Weights are
packed as for each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, Limits, Work
from ksgen.families.chains import factor_kernels, is_single, own_of_factors, places, tiles_of
from ksgen.families.expected import fastest
from ksgen.families.gpu_chain import BLOCKS, GpuChain, GpuChainConstants, GpuChainShape, rules_of, stages_of
from ksgen.families.mma.defaults import MOST_REGISTERS, WARPS, planes, promotion
from ksgen.families.mma.family import RULES, Mma, tile_picture, variants_of, wide_bytes
from ksgen.families.mma.shape import COLUMNS, ROWS, MmaConstants, MmaTiling, padded_chunks
from ksgen.families.operands import CHUNK, is_precise
from ksgen.families.rules import Rule
from ksgen.families.tiles import MOST_THREADS
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN
from ksgen.values import cached_property

MOST_SUMS = 128  # accumulators per thread
TILES_BATCH = (16, 32, 48, 64, 96, 128)  # rows of the batch per block
WARPS_OF_BLOCK = (4, 8)
STRETCHES = (1, 2, 4)  # multiples of the inputs after which the lanes' order repeats, per stage at most
STAGES = (4, 3, 2)
# per thread: if X comes in stages, its addresses are computed while the sums are live; ptxas took up to 30
STREAM_REGISTERS = 32
REMEMBERED = 4096  # cached tiles of factors
_WORDS = ("tile_out", "tile_in", "tile_d", "warps_batch", "warps_out", "warps_d", "promote")  # of a factor, in `tiles`
_OF_FACTOR = (  # constants of a single factor that its part of a chain's source has unchanged
    "A", "B", "C", "D", "TILE_OUT", "TILE_IN", "TILE_D", "WARPS_BATCH", "WARPS_OUT", "WARP_D", "X_VECTOR", "Y_VECTOR", "K_STEP",
    "LANE_INPUTS", "HALVES", "WORD_INPUTS", "COMPONENTS", "PACKED_PARTS", "ROW_TILES", "COLUMN_TILES", "SUPER_IN", "SUPER_STEPS", "RUN_OUT",
    "STEPS", "TILES_OUT",
    "TILES_D", "X_LINES", "X_RUN", "W_BYTES", "VECTOR", "GROUP_CHUNKS", "GROUP_INPUTS", "SUPER_GROUPS", "PROMOTE",
)  # fmt: skip


@dataclass(frozen=True)
class MmaChainConstants(GpuChainConstants):
    """Constants of a chain; `tiles` has the `_WORDS` of each factor."""

    stream: int = 0  # 1: X comes in stages, again for each tile of the first factor's outputs; 0: all of X is resident

    @property
    def parsed(self) -> list[MmaConstants]:
        return [MmaConstants(tile_batch=self.tile_batch, stages=2, min_blocks=1, **each) for each in self.numbers(_WORDS)]


def _words_of(own: MmaConstants) -> str:
    return " ".join(str(getattr(own, name)) for name in _WORDS)


@dataclass(frozen=True)
class MmaFactor(MmaTiling):
    """A factor in a chain.

    Its inputs are in shared memory in the order in which its tiles read them: all of them, or stages of X.
    """

    streamed: int = 0  # stages of X in shared memory; 0: all of X

    @property
    def slots(self) -> int:
        """Inputs of all tiles, including those beyond ragged edges."""
        own = self.constants
        return self.kernel.pattern.a * self.tiles_d * self.steps * own.tile_in * own.tile_d

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
    def written_bytes(self) -> int:
        """Bytes of inputs that a block writes to shared memory, without the padding of lines."""
        return self.constants.tile_batch * self.slots * self.kernel.item_bytes * self.readings

    @property
    def readings(self) -> int:
        """Number of times that a block copies each of its inputs."""
        return self.tiles_out if self.streamed else 1

    @property
    def order(self) -> tuple[int, ...]:
        """Key of the order of inputs in shared memory: equal for factors that can read the same X."""
        _, _, c, d = self.kernel.pattern.shape
        inputs = self.steps * self.constants.tile_in
        others = () if (inputs, self.constants.tile_d) == (c, d) else (c, d, inputs, self.constants.tile_d)
        return (self.x_pitch, *others)  # nothing more, if features keep their order


@dataclass(frozen=True)
class MmaChainTiling(GpuChainShape[MmaFactor]):
    """Sizes of a chain, in bytes."""

    @cached_property
    def factors(self) -> list[MmaFactor]:
        each = zip(own_of_factors(self.kernel, self.constants), self.places, strict=True)
        return [MmaFactor(*own, self.constants.stages * self.constants.stream * (where.at == 0)) for own, where in each]

    @property
    def buffer_sizes(self) -> list[list[int]]:
        """Sizes of the buffers that the factors read; in a group, without X."""
        found: list[list[int]] = [[] for _ in self.kernel.chains]
        for factor, where in zip(self.factors, self.places, strict=True):
            if where.at or not self.kernel.is_group:
                found[where.chain].append(factor.input_bytes)
        return found

    @cached_property
    def orders(self) -> dict[tuple[int, ...], tuple[int, int]]:
        """Offset of X in each order, and the factor that copies it.

        A group's X stays there until all chains are done.
        """
        found: dict[tuple[int, ...], tuple[int, int]] = {}
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


class MmaChain(GpuChain[MmaChainConstants]):
    """All factors of a layer in one launch, on tensor cores."""

    name = "mma_chain"
    constants_type = MmaChainConstants
    alone = Mma()
    packed_by = alone.name
    listed = (*rules_of(RULES, MmaChainTiling), Rule("stream is 0 or 1", lambda k, c: c.stream in (0, 1)))
    why = "all factors of one or more layers in one launch, intermediates in shared memory: tensor cores, from sm_80 on"
    on_tensor_cores = True

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.has_bytes_in:  # one launch per factor serves these
            return False
        if kernel.job != CHAIN or is_single(kernel) or not limits.tensor_cores or kernel.arithmetic.operand is None:
            return False
        return all(is_precise(each, limits) for each in factor_kernels(kernel)) and any(self.space(kernel, limits))

    def shape(self, kernel: KernelSpec, constants: MmaChainConstants) -> MmaChainTiling:
        return MmaChainTiling(kernel, constants)

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> MmaChainConstants:
        return fastest(self, kernel, limits, batch, lambda: self.space(kernel, limits))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[MmaChainConstants]:
        """Yield the best tiles for every tile of the batch, number of warps and length of a stage.

        Each comes with all numbers of stages and blocks that fit.
        """
        for tile_batch, warps, stretches in product(TILES_BATCH, WARPS_OF_BLOCK, STRETCHES):
            if not (best := _best_of_all(kernel, limits, tile_batch, warps, stretches)):
                continue
            tiles = tiles_of(kernel, map(_words_of, best))
            for stages, blocks, stream in product(STAGES, BLOCKS, (0, 1)):
                constants = MmaChainConstants(tile_batch, tiles, stages, blocks, stream)
                if self.fits(kernel, constants, limits):
                    yield constants

    # ---- costs

    def work(self, kernel: KernelSpec, constants: MmaChainConstants, batch: int) -> Work:
        shape, blocks = MmaChainTiling(kernel, constants), self.geometry(kernel, constants, batch).grid
        read = sum(stages_of(factor) * _read_bytes(factor) for factor in shape.factors)
        first, last = shape.of_ends(shape.factors)
        copying = first if constants.stream else [shape.factors[at] for _, at in shape.orders.values()]
        later = [factor for factor, where in zip(shape.factors, shape.places, strict=True) if where.at]
        written = [*copying, *later]  # factors whose inputs are written to shared memory, once
        moved = sum(each.x_bytes_moved(batch) * each.readings for each in copying) + sum(each.y_bytes_moved(batch) for each in last)
        return Work(
            blocks,
            shape.memory_bytes(batch),
            round(moved) + blocks * shape.packed_bytes,
            blocks * (sum(each.written_bytes for each in written) + shape.packed_bytes + read),
            blocks * sum(map(_multiply_adds, shape.factors)) * kernel.arithmetic.products,
            blocks * (max(1.0, shape.waits) if constants.stream else 1 + shape.waits),  # X in stages comes with those of weights
        )

    # ---- the source

    def words(self, kernel: KernelSpec, constants: MmaChainConstants) -> Mapping[str, Any]:
        first = MmaChainTiling(kernel, constants).factors[0]
        variants = ("mma", *variants_of(first))
        own = {"operand": first.operand, "variants": variants, "wide_bytes": wide_bytes(first)}
        return {**super().words(kernel, constants), **own, "streamed": ("x",) if constants.stream else ()}

    def _factor(self, shape: Any, at: int) -> dict[str, Any]:
        streams = bool(shape.factors[at].streamed)
        return {**super()._factor(shape, at), "streamed": ("x",) if streams else (), "whole": () if streams else ("x",)}

    def copies_x(self, shape: MmaChainTiling, at: int) -> bool:
        return at in [copying for _, copying in shape.orders.values()]

    def picture(self, own: MmaFactor, heading: str) -> str:
        return tile_picture(own, heading)

    def variants(self, own: MmaFactor) -> tuple[str, ...]:
        return (own.kernel.layout, *variants_of(own))

    def constexprs_of(self, shape: MmaChainTiling, at: int) -> list[Constexpr]:
        own = shape.factors[at]
        known = {each.name: each for each in Mma().constexprs(own.kernel, own.constants)}
        found = [known[name] for name in _OF_FACTOR if name in known]
        found += [
            Constexpr("X_PLACE", shape.x_place(at), "offset of the inputs in shared memory, in bytes"),
            Constexpr("X_PITCH", own.x_pitch, "bytes from one line of inputs to the next, free of bank conflicts"),
            Constexpr("X_SLOT", shape.x_slot, "bytes from one stage of X to the next, if X comes in stages"),
            Constexpr("X_STAGE", own.x_stage, "bytes from the inputs of one stage to the next"),
        ]
        if shape.places[at].is_last:
            return found
        after = shape.factors[at + 1]
        a, _, c, d = after.kernel.pattern.shape
        return [
            *found,
            Constexpr(
                "KEEP_VECTOR",
                min(own.y_vector, after.x_vector),
                "neighbouring outputs that are neighbouring inputs of the next factor",
            ),
            Constexpr("NEXT_A", a, "the next factor's a"),
            Constexpr("NEXT_C", c, "the next factor's c"),
            Constexpr("NEXT_D", d, "the next factor's d"),
            Constexpr("NEXT_TILE_D", after.constants.tile_d, "neighbouring j of the next factor's tiles"),
            Constexpr("NEXT_TILES_D", after.tiles_d, "the next factor's tiles along j"),
            Constexpr(
                "NEXT_INPUTS",
                after.steps * after.constants.tile_in,
                "inputs l of the next factor's tiles, those beyond its c included",
            ),
            Constexpr("NEXT_SLOTS", after.slots, "inputs of all the next factor's tiles"),
            Constexpr(
                "NEXT_PLACE",
                shape.x_place(at + 1),
                "offset of the next factor's inputs in shared memory, in bytes",
            ),
            Constexpr("NEXT_PITCH", after.x_pitch, "bytes from one line of the next factor's inputs to the next"),
        ]

    def constexprs(self, kernel: KernelSpec, constants: MmaChainConstants) -> list[Constexpr]:
        shape = MmaChainTiling(kernel, constants)
        return [
            *self.of_all_factors(kernel, constants),
            Constexpr("RING", shape.ring, "offset of the weights' stages in shared memory, in bytes"),
            Constexpr("W_SLOT", shape.slot, "bytes of the largest stage of weights"),
            Constexpr("SHARED_BYTES", shape.shared_bytes, "bytes of shared memory per block"),
        ]


def _read_bytes(factor: MmaFactor) -> int:
    """Bytes of shared memory that a block's warps read per stage: each warp reads its own part of X and of the
    weights."""
    own = factor.constants
    return own.tile_batch * own.tile_in * own.tile_d * factor.kernel.item_bytes * own.warps_out + factor.w_bytes * own.warps_batch


def _multiply_adds(factor: MmaFactor) -> int:
    own = factor.constants
    return stages_of(factor) * own.tile_in * own.tile_batch * own.tile_out * own.tile_d


def _best_of_all(kernel: KernelSpec, limits: Limits, tile_batch: int, warps: int, stretches: int) -> list[MmaConstants]:
    """Best tile of each factor; empty if a factor has none.

    Later chains of a group read the X of earlier ones, if they can.
    """
    best: list[MmaConstants] = []
    orders: tuple[tuple[int, ...], ...] = ()
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
    kernel: KernelSpec, promote: int, tile_batch: int, warps: int, stretches: int, orders: tuple[tuple[int, ...], ...] = ()
) -> MmaConstants | None:
    """Tile of a factor with the least padding and the most products per fragment read; None if there is none.

    Tiles have `tile_batch` rows of the batch and `warps` warps. A stage has at most `stretches` times the inputs after
    which the lanes' order repeats. If `orders` are given, the tile reads X in one of them.
    """

    def cost(own: MmaConstants) -> tuple[float, ...]:
        shape = MmaFactor(kernel, own)
        padding = _multiply_adds(shape) / (kernel.pattern.weight_count * tile_batch)
        return (padding * (1 + 1 / shape.row_tiles + 1 / shape.column_tiles), stages_of(shape), -shape.sums)

    found = _tiles_of_factor(kernel, promote, tile_batch, warps, stretches)
    return min((own for own in found if not orders or MmaFactor(kernel, own).order in orders), key=cost, default=None)


def _tiles_of_factor(kernel: KernelSpec, promote: int, tile_batch: int, warps: int, stretches: int) -> Iterator[MmaConstants]:
    chunk, whole = CHUNK // kernel.item_bytes, planes(kernel)
    unit = COLUMNS * (1 if kernel.layout == "bsf" else chunk)
    threads = [each for each in (*WARPS, (1, 8, 1), (2, 4, 1)) if each[0] * each[1] * each[2] == warps]
    for (along_batch, along_out, along_d), rows in product(dict.fromkeys(threads), (1, 2, 3, 4)):
        if tile_batch % (unit * along_batch):
            continue
        warp_d = whole if along_d == 1 else chunk
        if along_d > 1 and (kernel.layout == "bsl" or warp_d * along_d > kernel.pattern.d):
            continue
        own = MmaConstants(tile_batch, ROWS * rows * along_out, 0, warp_d * along_d, along_batch, along_out, 2, promote, 1, along_d)
        least = MmaFactor(kernel, own).super_in
        for count in range(1, stretches + 1):
            found = replace(own, tile_in=count * least)
            shape = MmaFactor(kernel, found)
            fits = shape.promoted_sums <= MOST_SUMS and shape.registers <= MOST_REGISTERS and shape.threads <= MOST_THREADS
            if fits and all(rule.holds(kernel, found) for rule in RULES):
                yield found
