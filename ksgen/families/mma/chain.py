"""The tensor-core family's chains: a block of threads takes a tile of the batch through all factors of a layer, or of several on one X,
and what lies between them stays in its shared memory.

Decides the tiles of `mma_chain.cu.j2`; its design is docs/kernels/mma.md. Never renders, compiles or runs. Weights are packed as for
each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, Limits, Work
from ksgen.families.chains import factor_kernels, is_single, own_of_factors, places, tiles_of
from ksgen.families.expected import fastest
from ksgen.families.gpu_chain import BLOCKS, GpuChain, GpuChainConstants, GpuChainShape, rules_of, stages_of
from ksgen.families.mma.defaults import MOST_REGISTERS, WARPS, planes, promotion
from ksgen.families.mma.family import RULES, Mma, tile_picture, variants_of, wide_bytes
from ksgen.families.mma.shape import COLUMNS, ROWS, MmaConstants, Shape, padded_chunks
from ksgen.families.operands import CHUNK, is_precise
from ksgen.families.rules import Rule
from ksgen.families.tiles import MOST_THREADS
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

MOST_SUMS = 128  # accumulators a thread
TILES_BATCH = (16, 32, 48, 64, 96, 128)  # batch entries a block
WARPS_OF_BLOCK = (4, 8)
STRETCHES = (1, 2, 4)  # of the inputs after which the lanes' order starts again, at most so many a stage
STAGES = (4, 3, 2)
STREAM_REGISTERS = 32  # a thread: where X comes in stages, its places are found while the sums are held; ptxas took up to 30
REMEMBERED = 4096  # tiles of factors
_WORDS = ("tile_out", "tile_in", "tile_d", "warps_batch", "warps_out", "warps_d", "promote")  # of a factor, in `tiles`
_OF_FACTOR = (  # the constants of a factor alone that its text in a chain takes as they are
    "A", "B", "C", "D", "TILE_OUT", "TILE_IN", "TILE_D", "WARPS_BATCH", "WARPS_OUT", "WARP_D", "X_VECTOR", "Y_VECTOR", "K_STEP",
    "LANE_INPUTS", "HALVES", "WORD_INPUTS", "COMPONENTS", "PACKED_PARTS", "ROW_TILES", "COLUMN_TILES", "SUPER_IN", "SUPER_STEPS", "RUN_OUT",
    "STEPS", "TILES_OUT",
    "TILES_D", "X_LINES", "X_RUN", "W_BYTES", "VECTOR", "GROUP_CHUNKS", "GROUP_INPUTS", "SUPER_GROUPS", "PROMOTE",
)  # fmt: skip


@dataclass(frozen=True)
class MmaChainConstants(GpuChainConstants):
    """`tiles` has `_WORDS` of each factor."""

    stream: int = 0  # 1: X comes in stages, again for each tile of the first factor's outputs; 0: it lies in shared memory whole

    @property
    def parsed(self) -> list[MmaConstants]:
        return [MmaConstants(tile_batch=self.tile_batch, stages=2, min_blocks=1, **each) for each in self.numbers(_WORDS)]


def _words_of(own: MmaConstants) -> str:
    return " ".join(str(getattr(own, name)) for name in _WORDS)


@dataclass(frozen=True)
class Within(Shape):
    """A factor in a chain: its inputs lie in shared memory, in the order in which its tiles take them: all, or stages of X."""

    streamed: int = 0  # stages of X there instead; 0: all of it

    @property
    def slots(self) -> int:
        """Of inputs, those beyond ragged edges included."""
        own = self.constants
        return self.kernel.pattern.a * self.tiles_d * self.steps * own.tile_in * own.tile_d

    @cached_property
    def x_pitch(self) -> int:
        """Bytes from one line to the next: in batch-size-first a line is a batch entry with all its features."""
        if self.streamed:
            return super().x_pitch
        run = self.slots if self.is_bsf else self.constants.tile_batch
        return CHUNK * padded_chunks(run * self.kernel.item_bytes // CHUNK, self.x_strides)

    @property
    def x_stage(self) -> int:
        return self.x_run * self.kernel.item_bytes if self.is_bsf else self.constants.tile_in * self.x_pitch

    @property
    def held_bytes(self) -> int:
        """Of shared memory, for its inputs."""
        if self.streamed:
            return self.streamed * self.x_bytes
        return (self.constants.tile_batch if self.is_bsf else self.slots) * self.x_pitch

    @property
    def written_bytes(self) -> int:
        """The same without what keeps lines apart."""
        return self.constants.tile_batch * self.slots * self.kernel.item_bytes * self.readings

    @property
    def readings(self) -> int:
        """How often a block copies each of its inputs."""
        return self.tiles_out if self.streamed else 1

    @property
    def order(self) -> tuple[int, ...]:
        """Where each input lies there: equal for factors that can read the same X."""
        _, _, c, d = self.kernel.pattern.shape
        inputs = self.steps * self.constants.tile_in
        others = () if (inputs, self.constants.tile_d) == (c, d) else (c, d, inputs, self.constants.tile_d)
        return (self.x_pitch, *others)  # features as they are numbered, where there is nothing else to say


@dataclass(frozen=True)
class ChainShape(GpuChainShape[Within]):
    """Sizes in bytes."""

    @cached_property
    def factors(self) -> list[Within]:
        each = zip(own_of_factors(self.kernel, self.constants), self.places, strict=True)
        return [Within(*own, self.constants.stages * self.constants.stream * (where.at == 0)) for own, where in each]

    @property
    def held(self) -> list[list[int]]:
        """What factors read: of a group, without X."""
        found: list[list[int]] = [[] for _ in self.kernel.chains]
        for factor, where in zip(self.factors, self.places, strict=True):
            if where.at or not self.kernel.is_group:
                found[where.chain].append(factor.held_bytes)
        return found

    @cached_property
    def orders(self) -> dict[tuple[int, ...], tuple[int, int]]:
        """Of a group's X: where each order begins, and which factor copies it. It stays there until all chains are done."""
        found: dict[tuple[int, ...], tuple[int, int]] = {}
        begin = 0
        for at, (factor, where) in enumerate(zip(self.factors, self.places, strict=True)):
            if where.at == 0 and not factor.streamed and factor.order not in found:
                found[factor.order] = begin, at
                begin += factor.held_bytes
        return found

    @property
    def stays(self) -> int:
        if not self.kernel.is_group:
            return 0
        if self.constants.stream:
            return max(each.held_bytes for each, where in zip(self.factors, self.places, strict=True) if where.at == 0)
        return sum(self.factors[at].held_bytes for _, at in self.orders.values())

    @property
    def x_slot(self) -> int:
        """Of X in stages, for any chain's first factor."""
        return max((each.x_bytes for each in self.factors if each.streamed), default=0)

    def x_place(self, at: int) -> int:
        """Where a factor's inputs begin."""
        if self.factors[at].streamed and self.kernel.is_group:
            return 0
        number = self.places[at].at
        if not self.kernel.is_group:
            return self.place(number)
        return self.place(number - 1) if number else self.orders[self.factors[at].order][0]

    @property
    def registers(self) -> int:
        """Factors up to the last that reads X in stages load some, for themselves or for those behind them."""
        last = max((at for at, factor in enumerate(self.factors) if factor.streamed), default=-1)
        return max(factor.registers + STREAM_REGISTERS * (at <= last) for at, factor in enumerate(self.factors))

    @property
    def slot(self) -> int:
        """Of the ring, for any factor's stage."""
        return max(factor.w_bytes for factor in self.factors)

    @property
    def shared_bytes(self) -> int:
        stages: int = self.constants.stages
        return self.ring + stages * self.slot


class MmaChain(GpuChain[MmaChainConstants]):
    """All factors of a layer in one launch."""

    name = "mma_chain"
    constants_type = MmaChainConstants
    alone = Mma()
    packed_by = alone.name
    listed = (*rules_of(RULES, ChainShape), Rule("stream is 0 or 1", lambda k, c: c.stream in (0, 1)))
    why = "all factors of a layer, or of several on one X, in one launch, what lies between in shared memory: tensor cores, from sm_80 on"
    on_tensor_cores = True

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.has_bytes_in:  # which a launch for each factor takes
            return False
        if kernel.job != CHAIN or is_single(kernel) or not limits.tensor_cores or kernel.arithmetic.operand is None:
            return False
        return all(is_precise(each, limits) for each in factor_kernels(kernel)) and any(self.space(kernel, limits))

    def shape(self, kernel: KernelSpec, constants: MmaChainConstants) -> ChainShape:
        return ChainShape(kernel, constants)

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> MmaChainConstants:
        return fastest(self, kernel, limits, batch, lambda: self.space(kernel, limits))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[MmaChainConstants]:
        """For every tile of the batch and as many warps: the best tiles of the factors, and what stages and blocks there is room for."""
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
        shape, blocks = ChainShape(kernel, constants), self.geometry(kernel, constants, batch).grid
        read = sum(stages_of(factor) * _read_bytes(factor) for factor in shape.factors)
        first, last = shape.of_ends(shape.factors)
        copying = first if constants.stream else [shape.factors[at] for _, at in shape.orders.values()]
        later = [factor for factor, where in zip(shape.factors, shape.places, strict=True) if where.at]
        written = [*copying, *later]  # whose inputs are written to shared memory, once
        moved = sum(each.x_bytes_moved(batch) * each.readings for each in copying) + sum(each.y_bytes_moved(batch) for each in last)
        return Work(
            blocks,
            shape.memory_bytes(batch),
            round(moved) + blocks * shape.packed_bytes,
            blocks * (sum(each.written_bytes for each in written) + shape.packed_bytes + read),
            blocks * sum(map(_multiply_adds, shape.factors)) * kernel.arithmetic.products,
            blocks * (max(1.0, shape.waits) if constants.stream else 1 + shape.waits),  # X in stages comes with those of weights
        )

    # ---- the text

    def words(self, kernel: KernelSpec, constants: MmaChainConstants) -> Mapping[str, Any]:
        first = ChainShape(kernel, constants).factors[0]
        variants = ("mma", *variants_of(first))
        own = {"operand": first.operand, "variants": variants, "wide_bytes": wide_bytes(first)}
        return {**super().words(kernel, constants), **own, "streamed": ("x",) if constants.stream else ()}

    def _factor(self, shape: Any, at: int) -> dict[str, Any]:
        streams = bool(shape.factors[at].streamed)
        return {**super()._factor(shape, at), "streamed": ("x",) if streams else (), "whole": () if streams else ("x",)}

    def copies_x(self, shape: ChainShape, at: int) -> bool:
        return at in [copying for _, copying in shape.orders.values()]

    def picture(self, own: Within, heading: str) -> str:
        return tile_picture(own, heading)

    def variants(self, own: Within) -> tuple[str, ...]:
        return (own.kernel.layout, *variants_of(own))

    def constexprs_of(self, shape: ChainShape, at: int) -> list[Constexpr]:
        own = shape.factors[at]
        known = {each.name: each for each in Mma().constexprs(own.kernel, own.constants)}
        found = [known[name] for name in _OF_FACTOR if name in known]
        found += [
            Constexpr("X_PLACE", shape.x_place(at), "where the inputs begin in shared memory, in bytes"),
            Constexpr("X_PITCH", own.x_pitch, "bytes from one line of them to the next, free of bank conflicts"),
            Constexpr("X_SLOT", shape.x_slot, "bytes from one stage of X to the next, where it comes in stages"),
            Constexpr("X_STAGE", own.x_stage, "bytes from the inputs of one stage to the next"),
        ]
        if shape.places[at].is_last:
            return found
        after = shape.factors[at + 1]
        a, _, c, d = after.kernel.pattern.shape
        return [
            *found,
            Constexpr("KEEP_VECTOR", min(own.y_vector, after.x_vector), "neighbours that are neighbours for the next factor too"),
            Constexpr("NEXT_A", a, "the next factor's a"),
            Constexpr("NEXT_C", c, "and its c"),
            Constexpr("NEXT_D", d, "and its d"),
            Constexpr("NEXT_TILE_D", after.constants.tile_d, "neighbouring j of its tiles"),
            Constexpr("NEXT_TILES_D", after.tiles_d, "tiles along j"),
            Constexpr("NEXT_INPUTS", after.steps * after.constants.tile_in, "inputs l of its tiles, those beyond its c included"),
            Constexpr("NEXT_SLOTS", after.slots, "inputs of all its tiles"),
            Constexpr("NEXT_PLACE", shape.x_place(at + 1), "where they begin in shared memory, in bytes"),
            Constexpr("NEXT_PITCH", after.x_pitch, "bytes from one line of them to the next"),
        ]

    def constexprs(self, kernel: KernelSpec, constants: MmaChainConstants) -> list[Constexpr]:
        shape = ChainShape(kernel, constants)
        return [
            *self.of_all_factors(kernel, constants),
            Constexpr("RING", shape.ring, "where the weights' stages begin in shared memory, in bytes"),
            Constexpr("W_SLOT", shape.slot, "bytes of a stage of weights, the largest"),
            Constexpr("SHARED_BYTES", shape.shared_bytes, "bytes of shared memory per block"),
        ]


def _read_bytes(factor: Within) -> int:
    """Of a stage: each warp reads its own part of X and of the weights."""
    own = factor.constants
    return own.tile_batch * own.tile_in * own.tile_d * factor.kernel.item_bytes * own.warps_out + factor.w_bytes * own.warps_batch


def _multiply_adds(factor: Within) -> int:
    own = factor.constants
    return stages_of(factor) * own.tile_in * own.tile_batch * own.tile_out * own.tile_d


def _best_of_all(kernel: KernelSpec, limits: Limits, tile_batch: int, warps: int, stretches: int) -> list[MmaConstants]:
    """The best tile of each factor; none where one has none. Chains of a group read the X of those before them, if they can."""
    best: list[MmaConstants] = []
    orders: tuple[tuple[int, ...], ...] = ()
    for factor, where in zip(factor_kernels(kernel), places(kernel), strict=True):
        known = orders if where.at == 0 else ()
        asked = (factor, promotion(factor, limits), tile_batch, warps, stretches)
        own = best_of_factor(*asked, known) or best_of_factor(*asked)
        if not own:
            return []
        best.append(own)
        orders += (Within(factor, own).order,) if where.at == 0 else ()
    return best


@lru_cache(REMEMBERED)
def best_of_factor(
    kernel: KernelSpec, promote: int, tile_batch: int, warps: int, stretches: int, orders: tuple[tuple[int, ...], ...] = ()
) -> MmaConstants | None:
    """The tile of a factor with the least padding and the most products for each fragment read, of so many batch entries and warps, of
    at most so many stretches of inputs a stage, and, if any are given, that reads X in one of the orders; None where there is none."""

    def cost(own: MmaConstants) -> tuple[float, ...]:
        shape = Within(kernel, own)
        padding = _multiply_adds(shape) / (kernel.pattern.weight_count * tile_batch)
        return (padding * (1 + 1 / shape.row_tiles + 1 / shape.column_tiles), stages_of(shape), -shape.sums)

    found = _tiles_of_factor(kernel, promote, tile_batch, warps, stretches)
    return min((own for own in found if not orders or Within(kernel, own).order in orders), key=cost, default=None)


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
        least = Within(kernel, own).super_in
        for count in range(1, stretches + 1):
            found = replace(own, tile_in=count * least)
            shape = Within(kernel, found)
            fits = shape.promoted_sums <= MOST_SUMS and shape.registers <= MOST_REGISTERS and shape.threads <= MOST_THREADS
            if fits and all(rule.holds(kernel, found) for rule in RULES):
                yield found
