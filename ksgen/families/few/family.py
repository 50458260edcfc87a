"""The product for small batches on a GPU. Weights are read once, straight to registers, and lanes share their rows.

Decides the tiles of `few.cu.j2`; its design is docs/kernels/few.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.few.counts import work_of
from ksgen.families.few.defaults import MOST_BATCH, best, entries_for, shapes
from ksgen.families.few.shape import FewConstants, FewTiling
from ksgen.families.gpus import begins_early
from ksgen.families.rules import Rule
from ksgen.families.shaped import Packing
from ksgen.families.tiles import MOST_THREADS, PACK_THREADS, WARP, epilogue_constexprs, given_scales, pattern_constexprs
from ksgen.spec import KernelSpec
from ksgen.words import counted

RULES: tuple[Rule[FewConstants], ...] = (
    Rule("every constant is at least 1", lambda k, c: all(value >= 1 for name, value in vars(c).items() if name != "early")),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    Rule("tile_batch is at most 32", lambda k, c: c.tile_batch <= MOST_BATCH),
    Rule("thread_out is at most 8", lambda k, c: c.thread_out <= 8),
    Rule("steps is at most 8", lambda k, c: c.steps <= 8),
    Rule("lanes_in is a power of two up to 32", lambda k, c: WARP % c.lanes_in == 0),
    Rule("tile_out is a multiple of thread_out", lambda k, c: c.tile_out % c.thread_out == 0, lambda k, c: c.thread_out),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("a block has at most 1024 threads", lambda k, c: FewTiling(k, c).threads <= MOST_THREADS, lambda k, c: FewTiling(k, c).threads),
)


def picture(kernel: KernelSpec, constants: FewConstants) -> str:
    """Drawing of a tile's rows of weights, and of the warps that share them."""
    shape, own = FewTiling(kernel, constants), constants
    tiles = f"{counted(shape.tiles_out, 'tile')} along k, {shape.tiles_d} along j, {kernel.pattern.a} along i"
    return draw(
        f"The weights of a tile of Y, in {counted(shape.stages, 'stage')}. There are {tiles}, and as many along s as the batch has.",
        DrawnSide(own.tile_out * own.tile_d, "rows (k, j)", shape.warps_out),
        DrawnSide(shape.tile_in, "inputs l of a stage", own.warps_in),
        lambda row, column: f"warp {row * own.warps_in + column}",
        f"A warp: {shape.groups} groups of {counted(own.lanes_in, 'lane')}, each with {counted(own.thread_out, 'row')} of one j.",
    )


def words_of_start(early: int) -> dict[str, Any]:
    """Template variables of an early start.

    Such a kernel waits, and reads nothing through restricted pointers, because nvcc would move those reads before the
    wait.
    """
    return {"early": ("early",) * early, "unwritten": "" if early else "RESTRICT "}


def words_of_storage(kernel: KernelSpec) -> dict[str, str]:
    """Template variables for the types of X and of weights, packed and read."""
    return {
        "weight": "given" if kernel.is_quantized else "stored",  # type of a packed weight
        "piece": "Values" if kernel.is_quantized else "Piece",  # type of one load of weights
        "of_pieces": "X" if kernel.is_quantized else "W, or of X",
        "of_storage": "quantized" if kernel.is_quantized else "same",
        "of_inputs": "bytes" if kernel.has_bytes_in else "same",
    }


class Few(Packing[FewConstants]):
    """Products at the bandwidth of memory for batches of 1 to 32 rows; correct for any batch."""

    name = "few"
    constants_type = FewConstants
    listed = RULES
    for_few = True
    why = "small batches, as in decoding: each weight is read once, to registers; plain multiply-adds, from sm_80 on"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "multiply" and not kernel.arithmetic.is_complex and limits.async_copies and not limits.is_cpu

    def shape(self, kernel: KernelSpec, constants: FewConstants) -> FewTiling:
        return FewTiling(kernel, constants)

    def packed_for(self, kernel: KernelSpec, constants: FewConstants) -> object:
        return None  # rows are padded to whole pieces for every tile: one copy of the weights serves every batch

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> FewConstants:
        return replace(best(kernel, limits, entries_for(batch or kernel.batch)), early=int(begins_early(limits.target)))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[FewConstants]:
        for tile_batch in (1, 2, 4, 8, 16, 32):
            for found in shapes(kernel, tile_batch):
                constants = replace(found, early=int(begins_early(limits.target)))
                if self.keeps_rules(kernel, constants) and self.fits(kernel, constants, limits):
                    yield constants

    def work(self, kernel: KernelSpec, constants: FewConstants, batch: int) -> Work:
        return work_of(kernel, constants, batch, self.memory_bytes(kernel, constants, batch))

    def words(self, kernel: KernelSpec, constants: FewConstants) -> Mapping[str, Any]:
        own = {"picture": picture(kernel, constants), **words_of_start(constants.early)}
        return {**own, "variants": ("bsf",), **words_of_storage(kernel)}  # tiles of several j, in both layouts

    def geometry(self, kernel: KernelSpec, constants: FewConstants, batch: int) -> Geometry:
        return replace(super().geometry(kernel, constants, batch), starts_early=bool(constants.early))

    def constexprs(self, kernel: KernelSpec, constants: FewConstants) -> list[Constexpr]:
        return constexprs_of(kernel, FewTiling(kernel, constants))


def constexprs_of(kernel: KernelSpec, shape: FewTiling) -> list[Constexpr]:
    """Constants in the source of one factor."""
    constants = shape.constants
    return [
        *pattern_constexprs(kernel),
        *epilogue_constexprs(kernel),
        Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per thread block"),
        Constexpr("TILE_OUT", constants.tile_out, "outputs k per thread block, for each of its j"),
        Constexpr("TILE_D", constants.tile_d, "neighbouring j per thread block"),
        Constexpr("THREAD_OUT", constants.thread_out, "rows of weights, of neighbouring k, that a lane reads at a time"),
        Constexpr("LANES_IN", constants.lanes_in, "lanes of a warp that share a row"),
        Constexpr("WARPS_IN", constants.warps_in, "warps that share a row"),
        Constexpr("STEPS", constants.steps, "pieces of each of its rows that a lane loads at a time"),
        Constexpr("VECTOR", shape.vector, "neighbouring l of one piece"),
        Constexpr("PIECES", shape.pieces, "pieces per row"),
        Constexpr("SHARERS", shape.sharers, "lanes that share a row, in all its warps"),
        Constexpr("GROUPS", shape.groups, "groups of lanes in a warp, with rows of their own"),
        Constexpr("THREADS", shape.threads, "threads per block"),
        Constexpr("TILE_IN", shape.tile_in, "inputs l per stage"),
        Constexpr("STAGES", shape.stages, "stages until all pieces are read"),
        Constexpr("TILES_OUT", shape.tiles_out, "tiles along the outputs"),
        Constexpr("TILES_D", shape.tiles_d, "tiles along j"),
        Constexpr("X_VECTOR", shape.x_vector, "neighbouring l of X that a thread copies at a time"),
        Constexpr("X_ROUNDS", shape.x_rounds, "rounds of the block's threads until a stage of X is copied"),
        Constexpr("X_PLANE", shape.x_plane, "elements of shared memory from one j to the next"),
        Constexpr("X_ENTRY", shape.x_entry, "elements of shared memory from one row of the batch to the next"),
        Constexpr("PANEL", shape.panel, "elements of X per stage"),
        Constexpr("SUMS", shape.sums, "sums per thread: its rows of weights times the block's rows of the batch"),
        Constexpr("SHUFFLES", shape.shuffles, "rounds of shuffles in which the lanes of a row add up their sums"),
        Constexpr("HALVINGS", shape.halvings, "first rounds, in which each lane keeps half of its sums"),
        Constexpr("HELD", shape.held, "sums per lane at the end"),
        Constexpr("SAME", shape.same, "lanes that have the same sums"),
        Constexpr("PART", shape.part, "sums per tile"),
        Constexpr("PACK_THREADS", PACK_THREADS, "threads per block of the packing kernel"),
        given_scales(kernel),
        Constexpr("SCALES", shape.scales // shape.weight_bytes, "packed weights in front of their scales", "long long"),
    ]
