"""The tensor-core gradient family: the weights' gradient by `mma.sync` on sm_80 and later, in 16-bit and tf32 precisions.

Decides the tiles of `gradient_mma.cu.j2`; its design is docs/kernels.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, Limits
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.gpus import PORTABLE, REGISTERS
from ksgen.families.gradient.defaults import MOST_TILE
from ksgen.families.gradient.family import GradientFamily, choices, registers_taken
from ksgen.families.gradient.parts import SIDES
from ksgen.families.gradient_mma.defaults import batch_promotion, default, parts
from ksgen.families.gradient_mma.shape import STRETCH, GradientMmaConstants, GradientMmaTiling
from ksgen.families.mma.shape import COLUMNS, ROWS
from ksgen.families.rules import Rule
from ksgen.families.simt.defaults import neighbours
from ksgen.families.tiles import MOST_THREADS, pattern_constexprs
from ksgen.spec import KernelSpec
from ksgen.spec.precision import on_tensor_cores
from ksgen.words import counted

__all__ = ["GradientMma", "GradientMmaConstants", "GradientMmaTiling"]

MOST_SUMS = 96  # accumulators a thread, and as many plain ones


def _registers(kernel: KernelSpec, constants: GradientMmaConstants) -> int:
    shape = GradientMmaTiling(kernel, constants)
    return registers_taken(min(255, shape.registers), shape.threads, constants.min_blocks)


_RULES: tuple[Rule[GradientMmaConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    Rule(
        "precision is one that tensor cores multiply",
        lambda k, c: k.arithmetic.operand is not None,
        lambda k, c: ", ".join(on_tensor_cores()),
    ),
    Rule("every constant is at least 1", lambda k, c: all(value >= 1 for value in asdict(c).values())),
    Rule("tile_out is a multiple of 16 * warps_out", lambda k, c: c.tile_out % (ROWS * c.warps_out) == 0, lambda k, c: ROWS * c.warps_out),
    Rule("tile_in is a multiple of 8 * warps_in", lambda k, c: c.tile_in % (COLUMNS * c.warps_in) == 0, lambda k, c: COLUMNS * c.warps_in),
    Rule(
        "tile_batch is a multiple of 64 bytes",
        lambda k, c: c.tile_batch * k.item_bytes % STRETCH == 0,
        lambda k, c: STRETCH // k.item_bytes,
    ),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule(
        "a block has at most 1024 threads",
        lambda k, c: GradientMmaTiling(k, c).threads <= MOST_THREADS,
        lambda k, c: GradientMmaTiling(k, c).threads,
    ),
    Rule("a thread has at most 96 sums", lambda k, c: GradientMmaTiling(k, c).sums <= MOST_SUMS, lambda k, c: GradientMmaTiling(k, c).sums),
    Rule(
        "min_blocks blocks have at most 1536 threads",
        lambda k, c: GradientMmaTiling(k, c).threads * c.min_blocks <= PORTABLE.threads,
        lambda k, c: GradientMmaTiling(k, c).threads * c.min_blocks,
    ),
    Rule("the registers of min_blocks blocks are at most 65536", lambda k, c: _registers(k, c) <= REGISTERS, _registers),
    Rule(
        "stages is at least 2, and 2 in 16-bit bsf",
        lambda k, c: c.stages == 2 or (c.stages > 2 and GradientMmaTiling(k, c).copy == "async"),
    ),
    Rule("promote is a multiple of tile_batch", lambda k, c: c.promote % c.tile_batch == 0),
)


def _picture(shape: GradientMmaTiling) -> str:
    """A tile's warps."""
    constants, rows, columns = shape.constants, ROWS * shape.row_tiles, COLUMNS * shape.column_tiles
    return draw(
        f"A tile of dW, for one of its {constants.tile_d} j. There are {counted(shape.tiles, 'tile')}, each by every part of the batch.",
        DrawnSide(constants.tile_out, "outputs k", constants.warps_out),
        DrawnSide(constants.tile_in, "inputs l", constants.warps_in),
        lambda row, column: f"warp {column + constants.warps_in * row}",
        f"A warp: {rows} x {columns} sums, by {shape.row_tiles} x {shape.column_tiles} instructions of {ROWS} x {COLUMNS}.",
    )


class GradientMma(GradientFamily[GradientMmaConstants]):
    """Warp-wide matrix instructions, whose sums are added to float32 ones."""

    name = "gradient_mma"
    constants_type = GradientMmaConstants
    why = "the weights' gradient on tensor cores, from sm_80 on"
    listed = _RULES
    on_tensor_cores = True

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "gradient" and limits.tensor_cores and kernel.arithmetic.operand is not None

    def shape(self, kernel: KernelSpec, constants: GradientMmaConstants) -> GradientMmaTiling:
        return GradientMmaTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> GradientMmaConstants:
        return default(kernel, limits)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[GradientMmaConstants]:
        """Yield every combination that the rules, the shared memory and the registers allow."""
        planes = [1] if kernel.layout == "bsl" else sorted({1, 2, 3, 4, 6, 8, 12, 16, neighbours(kernel.pattern.d)})
        promote = batch_promotion(kernel, limits)
        for row_tiles, column_tiles, warps_out, warps_in, tile_d, stretches, stages in product(
            (1, 2, 3, 4), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4), planes, (1, 2), (2, 3, 4, 5)
        ):
            tile_out, tile_in = ROWS * row_tiles * warps_out, COLUMNS * column_tiles * warps_in
            if max(tile_out, tile_in) > MOST_TILE or 4 * kernel.arithmetic.halves * row_tiles * column_tiles > MOST_SUMS:
                continue
            tile_batch = STRETCH // kernel.item_bytes * stretches
            constants = GradientMmaConstants(tile_out, tile_in, tile_d, tile_batch, warps_out, warps_in, stages, promote, 1, 1)
            if self.keeps_rules(kernel, constants):
                for choice in choices(constants, GradientMmaTiling(kernel, constants), limits, parts(kernel, constants)):
                    if self.keeps_rules(kernel, choice):
                        yield choice

    def words(self, kernel: KernelSpec, constants: GradientMmaConstants) -> Mapping[str, Any]:
        shape = GradientMmaTiling(kernel, constants)
        operand = {"float16": "f16", "bfloat16": "bf16"}.get(shape.operand, shape.operand)
        load = "gradient_mma/load_registers" if shape.copy == "registers" else "gradient/load_async"
        split = {"complex_split": kernel.arithmetic.is_complex, "split": True} if shape.components == 2 else {}
        variants = (shape.operand, *(name for name, is_so in split.items() if is_so), *(["spread"] if shape.is_spread else []))
        own = "tf32" if shape.components == 2 else operand
        conjugated = ", conjugated" if kernel.arithmetic.is_complex else ""
        return {
            "copy": shape.copy, "load": load, "sides": SIDES, "operand": own, "variants": variants, "picture": _picture(shape),
            "conjugated": conjugated,
        }  # fmt: skip

    def constexprs(self, kernel: KernelSpec, constants: GradientMmaConstants) -> list[Constexpr]:
        shape = GradientMmaTiling(kernel, constants)
        return [
            *pattern_constexprs(kernel),
            Constexpr("TILE_OUT", constants.tile_out, "outputs k per thread block, for each of its j"),
            Constexpr("TILE_IN", constants.tile_in, "inputs l per thread block"),
            Constexpr("TILE_D", constants.tile_d, "neighbouring j per thread block: one plane of shared memory each"),
            Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per stage"),
            Constexpr("WARPS_OUT", constants.warps_out, "warps of a plane along the outputs"),
            Constexpr("WARPS_IN", constants.warps_in, "warps of a plane along the inputs"),
            Constexpr("STAGES", constants.stages, "stages of X and dY in shared memory"),
            Constexpr("PROMOTE", constants.promote, "rows of the batch after which sums leave the tensor cores"),
            Constexpr("PARTS", constants.parts, "parts of the batch, at most"),
            Constexpr("MIN_BLOCKS", constants.min_blocks, "thread blocks that must fit a multiprocessor"),
            Constexpr("GROUP", shape.group, "elements of a 16-byte chunk"),
            Constexpr("HALVES", kernel.arithmetic.halves, "real numbers per element"),
            Constexpr("COMPONENTS", shape.components, "parts into which an operand is split"),
            Constexpr("ROW_TILES", shape.row_tiles, "matrix instructions of a warp along its outputs, 16 each"),
            Constexpr("COLUMN_TILES", shape.column_tiles, "matrix instructions of a warp along its inputs, 8 each"),
            Constexpr("THREADS", shape.threads, "threads per block"),
            Constexpr("TOGETHER", shape.x.together, "neighbouring lines that a thread copies at once"),
            Constexpr("DY_BASE", shape.dy_base, "offset of a stage's dY, in elements"),
            Constexpr("STAGE", shape.stage, "elements per stage"),
            Constexpr(
                "SHARED_REALS",
                shape.shared_bytes // shape.real_bytes,
                "sums that a block's shared memory can hold",
            ),
            *shape.tile_constexprs(),
            *shape.x.constexprs(shape.copy),
            *shape.dy.constexprs(shape.copy),
        ]
