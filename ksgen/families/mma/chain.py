"""The tensor-core family's chains: a block of threads takes a tile of the batch through all factors of a layer, and what lies between
them stays in its shared memory.

Decides the tiles of `mma_chain.cu.j2`; its design is docs/kernels/mma.md. Never renders, compiles or runs. Weights are packed as for
each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.chains import factor_kernels, listed, rule_of_tiles, tiles_of
from ksgen.families.expected import fastest
from ksgen.families.gpus import PORTABLE, REGISTERS
from ksgen.families.mma.defaults import MOST_REGISTERS, WARPS, planes, promotion
from ksgen.families.mma.family import RULES, Mma, tile_picture, variants_of, wide_bytes
from ksgen.families.mma.shape import COLUMNS, ROWS, MmaConstants, Shape, padded_chunks
from ksgen.families.operands import CHUNK, is_precise
from ksgen.families.rules import Rule
from ksgen.families.shaped import Shaped
from ksgen.families.tiles import MOST_THREADS, Constants, divide_up, epilogue_constexprs
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

MOST_SUMS = 128  # accumulators a thread
TILES_BATCH = (16, 32, 48, 64, 96, 128)  # batch entries a block
WARPS_OF_BLOCK = (4, 8)
STRETCHES = (1, 2, 4)  # of the inputs after which the lanes' order starts again, at most so many a stage
STAGES = (4, 3, 2)
REMEMBERED = 4096  # tiles of factors
BLOCKS = (3, 2, 1)  # a multiprocessor
_WORDS = ("tile_out", "tile_in", "tile_d", "warps_batch", "warps_out", "warps_d", "promote")  # of a factor, in `tiles`
_OF_FACTOR = (  # the constants of a factor alone that its text in a chain takes as they are
    "A", "B", "C", "D", "TILE_OUT", "TILE_IN", "TILE_D", "WARPS_BATCH", "WARPS_OUT", "WARP_D", "X_VECTOR", "Y_VECTOR", "K_STEP",
    "LANE_INPUTS", "COMPONENTS", "PACKED_PARTS", "ROW_TILES", "COLUMN_TILES", "SUPER_IN", "SUPER_STEPS", "RUN_OUT", "STEPS", "TILES_OUT",
    "TILES_D", "X_LINES", "X_RUN", "W_BYTES", "VECTOR", "GROUP_CHUNKS", "GROUP_INPUTS", "SUPER_GROUPS", "PROMOTE",
)  # fmt: skip


@dataclass(frozen=True)
class MmaChainConstants(Constants):
    """The constants that a search may change."""

    tile_batch: int  # batch entries a block
    tiles: str  # of each factor: tile_out, tile_in, tile_d, warps_batch, warps_out, warps_d, promote
    stages: int  # of packed weights in shared memory
    min_blocks: int  # blocks that must fit a multiprocessor: bounds the registers

    @property
    def parsed(self) -> list[MmaConstants]:
        """The constants of each factor by itself."""
        return [self._parsed(words) for words, _ in listed(self.tiles)]

    def _parsed(self, words: str) -> MmaConstants:
        try:
            values = dict(zip(_WORDS, map(int, words.split()), strict=True))
        except ValueError:
            raise ConstantsError(f"tiles={self.tiles!r}: {words!r} is not {', '.join(_WORDS)}") from None
        return MmaConstants(tile_batch=self.tile_batch, stages=2, min_blocks=1, **values)


def _words_of(own: MmaConstants) -> str:
    return " ".join(str(getattr(own, name)) for name in _WORDS)


@dataclass(frozen=True)
class Within(Shape):
    """A factor in a chain: all of its inputs lie in shared memory, in the order in which its tiles take them."""

    @property
    def slots(self) -> int:
        """Of inputs, those beyond ragged edges included."""
        own = self.constants
        return self.kernel.pattern.a * self.tiles_d * self.steps * own.tile_in * own.tile_d

    @cached_property
    def x_pitch(self) -> int:
        """Bytes from one line to the next: in batch-size-first a line is a batch entry with all its features."""
        run = self.slots if self.is_bsf else self.constants.tile_batch
        return CHUNK * padded_chunks(run * self.kernel.item_bytes // CHUNK, self.x_strides)

    @property
    def x_stage(self) -> int:
        return self.x_run * self.kernel.item_bytes if self.is_bsf else self.constants.tile_in * self.x_pitch

    @property
    def passes(self) -> int:
        return self.kernel.pattern.a * self.tiles_d * self.tiles_out

    @property
    def stages_of_weights(self) -> int:
        return self.passes * self.steps

    @property
    def held_bytes(self) -> int:
        """Of shared memory, for its inputs."""
        return (self.constants.tile_batch if self.is_bsf else self.slots) * self.x_pitch


@dataclass(frozen=True)
class ChainShape:
    """What follows from a chain and its constants; sizes in bytes."""

    kernel: KernelSpec
    constants: MmaChainConstants

    @cached_property
    def factors(self) -> list[Within]:
        return [Within(*own) for own in _own(self.kernel, self.constants)]

    @property
    def threads(self) -> int:
        return self.factors[0].threads

    @property
    def slot(self) -> int:
        """Of the ring, for any factor's stage."""
        return max(factor.w_bytes for factor in self.factors)

    @cached_property
    def halves(self) -> tuple[int, int]:
        """What a factor reads lies in one half, and what it writes in the other."""
        held = [factor.held_bytes for factor in self.factors]
        return max(held[0::2]), max(held[1::2], default=0)

    def place(self, factor: int) -> int:
        """Where its inputs begin."""
        return factor % 2 * self.halves[0]

    @property
    def ring(self) -> int:
        return sum(self.halves)

    @property
    def shared_bytes(self) -> int:
        return self.ring + self.constants.stages * self.slot

    @property
    def registers(self) -> int:
        return max(factor.registers for factor in self.factors)

    @property
    def first_stages(self) -> list[int]:
        """Of each factor's weights, counted over all."""
        return list(accumulate((factor.stages_of_weights for factor in self.factors[:-1]), initial=0))


def _own(kernel: KernelSpec, constants: MmaChainConstants) -> list[tuple[KernelSpec, MmaConstants]]:
    return list(zip(factor_kernels(kernel), constants.parsed, strict=True))


def _registers(kernel: KernelSpec, constants: MmaChainConstants) -> int:
    shape = ChainShape(kernel, constants)
    return min(255, shape.registers) * shape.threads * constants.min_blocks


_RULES: tuple[Rule[MmaChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.job == CHAIN),
    rule_of_tiles(RULES, _own),
    Rule("tiles has as many warps for all factors", lambda k, c: len({own.threads for own in ChainShape(k, c).factors}) == 1),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("min_blocks is at least 1", lambda k, c: c.min_blocks >= 1),
    Rule(
        "min_blocks blocks have at most 1536 threads",
        lambda k, c: ChainShape(k, c).threads * c.min_blocks <= PORTABLE.threads,
        lambda k, c: ChainShape(k, c).threads * c.min_blocks,
    ),
    Rule("the registers of min_blocks blocks are at most 65536", lambda k, c: _registers(k, c) <= REGISTERS, _registers),
)


class MmaChain(Shaped[MmaChainConstants]):
    """All factors of a layer in one launch."""

    name = "mma_chain"
    constants_type = MmaChainConstants
    listed = _RULES
    why = "all factors of a layer in one launch, what lies between them in shared memory: tensor cores, from sm_80 on"
    packs = False
    packed_by = "mma"
    on_tensor_cores = True

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.job != CHAIN or kernel.beside or not limits.tensor_cores or kernel.arithmetic.operand is None:
            return False
        return all(map(is_precise, factor_kernels(kernel))) and any(self._found(kernel, limits))

    def shape(self, kernel: KernelSpec, constants: MmaChainConstants) -> ChainShape:
        return ChainShape(kernel, constants)

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> MmaChainConstants:
        return fastest(self, kernel, limits, batch, lambda: self._found(kernel, limits))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[MmaChainConstants]:
        yield from self._found(kernel, limits)

    def _found(self, kernel: KernelSpec, limits: Limits) -> Iterator[MmaChainConstants]:
        """For every tile of the batch and as many warps: the best tiles of the factors, and what stages and blocks there is room for."""
        for tile_batch, warps, stretches in product(TILES_BATCH, WARPS_OF_BLOCK, STRETCHES):
            best = [best_of_factor(factor, tile_batch, warps, stretches) for factor in factor_kernels(kernel)]
            if None in best:
                continue
            tiles = tiles_of(kernel, (_words_of(own) for own in best if own))
            for stages, blocks in product(STAGES, BLOCKS):
                constants = MmaChainConstants(tile_batch, tiles, stages, blocks)
                if self.fits(kernel, constants, limits):
                    yield constants

    def fits(self, kernel: KernelSpec, constants: MmaChainConstants, limits: Limits) -> bool:
        """Whether as many blocks fit a multiprocessor as the constants say, and a block of each factor alone."""
        shape = ChainShape(kernel, constants)
        if shape.shared_bytes > limits.shared_bytes_for(constants.min_blocks):
            return False
        if any(Shape(each.kernel, each.constants).shared_bytes > limits.shared_bytes for each in shape.factors):
            return False  # whose texts pack their weights
        return self.keeps_rules(kernel, constants)

    # ---- costs

    def packed_bytes(self, kernel: KernelSpec, constants: MmaChainConstants) -> int:
        return 0

    def pack_geometry(self, kernel: KernelSpec, constants: MmaChainConstants) -> Geometry:
        return Geometry(0, 1, 0)

    def geometry(self, kernel: KernelSpec, constants: MmaChainConstants, batch: int) -> Geometry:
        shape = ChainShape(kernel, constants)
        return Geometry(divide_up(batch, constants.tile_batch), shape.threads, shape.shared_bytes)

    def work(self, kernel: KernelSpec, constants: MmaChainConstants, batch: int) -> Work:
        shape = ChainShape(kernel, constants)
        first, last, blocks = shape.factors[0], shape.factors[-1], self.geometry(kernel, constants, batch).grid
        packed = sum(factor.packed_bytes for factor in shape.factors)
        held = sum(factor.held_bytes for factor in shape.factors)  # each written once
        read = sum(factor.stages_of_weights * _read_bytes(factor) for factor in shape.factors)
        return Work(
            blocks,
            kernel.bytes(batch) - sum(pattern.weight_count for pattern in kernel.factors) * kernel.item_bytes + packed,
            round(first.x_bytes_moved(batch) + last.y_bytes_moved(batch)) + blocks * packed,
            blocks * (held + packed + read),
            blocks * sum(map(_multiply_adds, shape.factors)) * kernel.arithmetic.products,
            blocks * (1 + sum(factor.stages_of_weights for factor in shape.factors) / (constants.stages - 1)),
        )

    # ---- the text

    def words(self, kernel: KernelSpec, constants: MmaChainConstants) -> Mapping[str, Any]:
        shape = ChainShape(kernel, constants)
        numbers = range(1, len(shape.factors) + 1)
        pictures = [tile_picture(factor, f"Factor {n}: a tile of what it gives") for n, factor in zip(numbers, shape.factors, strict=True)]
        return {
            "operand": shape.factors[0].operand,
            "variants": ("mma", *variants_of(shape.factors[0])),
            "wide_bytes": wide_bytes(shape.factors[0]),
            "picture": "//\n".join(pictures),
            "weights_of_all": ", ".join(f"weights_{number}" for number in numbers),
            "factors": [self._factor(shape, at) for at in range(len(shape.factors))],
        }

    def _factor(self, shape: ChainShape, at: int) -> dict[str, Any]:
        """What the template spells of one factor: its constants, what it copies itself and where its outputs go."""
        own, is_last = shape.factors[at], at + 1 == len(shape.factors)
        return {
            "number": at + 1,
            "kernel": own.kernel,
            "constexprs": self._constexprs_of(shape, at),
            "variants": variants_of(own),
            "copied": () if at else ("x",),
            "kept": () if is_last else ("next",),
            "stored": ("y",) if is_last else (),
        }

    def _constexprs_of(self, shape: ChainShape, at: int) -> list[Constexpr]:
        own = shape.factors[at]
        known = {each.name: each for each in Mma().constexprs(own.kernel, own.constants)}
        found = [known[name] for name in _OF_FACTOR if name in known]
        found += [
            Constexpr("PASSES", own.passes, "tiles of outputs, one after the other"),
            Constexpr("X_PLACE", shape.place(at), "where the inputs begin in shared memory, in bytes"),
            Constexpr("X_PITCH", own.x_pitch, "bytes from one line of them to the next, free of bank conflicts"),
            Constexpr("X_STAGE", own.x_stage, "bytes from the inputs of one stage to the next"),
            Constexpr("FIRST_STAGE", shape.first_stages[at], "of its weights, among the stages of all factors"),
        ]
        if at + 1 == len(shape.factors):
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
            Constexpr("NEXT_PLACE", shape.place(at + 1), "where they begin in shared memory, in bytes"),
            Constexpr("NEXT_PITCH", after.x_pitch, "bytes from one line of them to the next"),
        ]

    def constexprs(self, kernel: KernelSpec, constants: MmaChainConstants) -> list[Constexpr]:
        shape = ChainShape(kernel, constants)
        return [
            Constexpr("BATCH", kernel.batch or 0, "batch entries, index s; 0: known at the call", "long long"),
            *epilogue_constexprs(kernel),
            Constexpr("TILE_BATCH", constants.tile_batch, "batch entries per thread block"),
            Constexpr("STAGES", constants.stages, "stages of packed weights in shared memory"),
            Constexpr("MIN_BLOCKS", constants.min_blocks, "thread blocks that must fit a multiprocessor"),
            Constexpr("THREADS", shape.threads, "threads per block"),
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
    return factor.stages_of_weights * own.tile_in * own.tile_batch * own.tile_out * own.tile_d


@lru_cache(REMEMBERED)
def best_of_factor(kernel: KernelSpec, tile_batch: int, warps: int, stretches: int) -> MmaConstants | None:
    """The tile of a factor with the least padding and the most products for each fragment read, of so many batch entries and warps, and of
    at most so many stretches of inputs a stage; None where there is none."""

    def cost(own: MmaConstants) -> tuple[float, ...]:
        shape = Within(kernel, own)
        padding = _multiply_adds(shape) / (kernel.pattern.weight_count * tile_batch)
        return (padding * (1 + 1 / shape.row_tiles + 1 / shape.column_tiles), shape.passes * shape.steps, -shape.sums)

    return min(_tiles_of_factor(kernel, tile_batch, warps, stretches), key=cost, default=None)


def _tiles_of_factor(kernel: KernelSpec, tile_batch: int, warps: int, stretches: int) -> Iterator[MmaConstants]:
    chunk, whole = CHUNK // kernel.item_bytes, planes(kernel)
    unit = COLUMNS * (1 if kernel.layout == "bsf" else chunk)
    threads = [each for each in (*WARPS, (1, 8, 1), (2, 4, 1)) if each[0] * each[1] * each[2] == warps]
    for (along_batch, along_out, along_d), rows in product(dict.fromkeys(threads), (1, 2, 3, 4)):
        if tile_batch % (unit * along_batch):
            continue
        warp_d = whole if along_d == 1 else chunk
        if along_d > 1 and (kernel.layout == "bsl" or warp_d * along_d > kernel.pattern.d):
            continue
        own = MmaConstants(
            tile_batch, ROWS * rows * along_out, 0, warp_d * along_d, along_batch, along_out, 2, promotion(kernel), 1, along_d
        )
        least = Within(kernel, own).super_in
        for count in range(1, stretches + 1):
            found = replace(own, tile_in=count * least)
            shape = Within(kernel, found)
            fits = shape.promoted_sums <= MOST_SUMS and shape.registers <= MOST_REGISTERS and shape.threads <= MOST_THREADS
            if fits and all(rule.holds(kernel, found) for rule in RULES):
                yield found
