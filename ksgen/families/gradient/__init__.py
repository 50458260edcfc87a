"""The SIMT gradient family: the weights' gradient by plain multiply-adds, for every pattern, batch, layout and device.

Decides the tiles of `gradient.cu.j2`; its design is docs/kernels.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, Limits
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.gradient.defaults import MOST_SUMS, MOST_TILE, THREADS, default, parts
from ksgen.families.gradient.family import GradientFamily, choices
from ksgen.families.gradient.parts import SIDES
from ksgen.families.gradient.shape import LANES_IN, LANES_OUT, GradientConstants, GradientTiling
from ksgen.families.rules import Rule
from ksgen.families.simt.defaults import neighbours
from ksgen.families.simt.shape import is_narrow
from ksgen.families.tiles import MOST_THREADS, pattern_constexprs
from ksgen.spec import KernelSpec
from ksgen.words import counted

__all__ = ["Gradient", "GradientConstants", "GradientTiling"]

_RULES: tuple[Rule[GradientConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    Rule("every constant is at least 1", lambda k, c: all(v >= 1 for v in asdict(c).values() if not isinstance(v, str))),
    Rule("thread_in is at most 16", lambda k, c: c.thread_in <= 16),
    Rule("thread_out is at most 16", lambda k, c: c.thread_out <= 16),
    Rule(
        "tile_in is a multiple of 8 * thread_in",
        lambda k, c: c.tile_in % (LANES_IN * c.thread_in) == 0,
        lambda k, c: LANES_IN * c.thread_in,
    ),
    Rule(
        "tile_out is a multiple of 4 * thread_out",
        lambda k, c: c.tile_out % (LANES_OUT * c.thread_out) == 0,
        lambda k, c: LANES_OUT * c.thread_out,
    ),
    Rule("tile_batch is a multiple of 8", lambda k, c: c.tile_batch % 8 == 0),
    Rule(
        "a block has at most 1024 threads",
        lambda k, c: GradientTiling(k, c).threads <= MOST_THREADS,
        lambda k, c: GradientTiling(k, c).threads,
    ),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("stages is 2 with copy=registers", lambda k, c: c.copy != "registers" or c.stages == 2),
    Rule("copy is registers in a 16-bit precision", lambda k, c: c.copy != "async" or not is_narrow(k)),
)


class Gradient(GradientFamily[GradientConstants]):
    """Fused multiply-adds on CUDA cores, or on any OpenCL device."""

    name = "gradient"
    constants_type = GradientConstants
    listed = _RULES
    why = "the weights' gradient by plain multiply-adds, on every device"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "gradient"

    def shape(self, kernel: KernelSpec, constants: GradientConstants) -> GradientTiling:
        return GradientTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> GradientConstants:
        return default(kernel, limits)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[GradientConstants]:
        """Every combination that the rules, the shared memory and the registers allow."""
        copies = ["registers"] if is_narrow(kernel) or not limits.async_copies else ["async", "registers"]
        planes = [1] if kernel.layout == "bsl" else sorted({1, 2, 3, 4, 6, 8, 12, 16, neighbours(kernel.pattern.d)})
        for thread_out, thread_in, warps_out, warps_in, tile_d, tile_batch, stages, copy in product(
            THREADS, THREADS, (1, 2, 3, 4), (1, 2, 3, 4), planes, (8, 16, 32), (2, 3, 4), copies
        ):
            tile_out, tile_in = LANES_OUT * thread_out * warps_out, LANES_IN * thread_in * warps_in
            if max(tile_out, tile_in) > MOST_TILE or thread_out * thread_in > MOST_SUMS["async"]:
                continue
            constants = GradientConstants(tile_out, tile_in, tile_d, tile_batch, thread_out, thread_in, stages, 1, 1, copy)
            if self.keeps_rules(kernel, constants):
                yield from choices(constants, GradientTiling(kernel, constants), limits, parts(kernel, constants, limits))

    def words(self, kernel: KernelSpec, constants: GradientConstants) -> Mapping[str, Any]:
        shape = GradientTiling(kernel, constants)
        heading = (
            f"A tile of dW, for one of its {constants.tile_d} j. There are {counted(shape.tiles, 'tile')}, each by every part of the batch."
        )
        picture = draw(
            heading,
            DrawnSide(constants.tile_in, "inputs l", shape.warps_in),
            DrawnSide(constants.tile_out, "outputs k", shape.warps_out),
            lambda row, column: f"warp {row + shape.warps_in * column}",
            f"A warp: 8 lanes along l by 4 along k, with {constants.thread_in} x {constants.thread_out} sums each.",
        )
        return {"sides": SIDES, "picture": picture}

    def constexprs(self, kernel: KernelSpec, constants: GradientConstants) -> list[Constexpr]:
        shape = GradientTiling(kernel, constants)
        return [
            *pattern_constexprs(kernel),
            Constexpr("TILE_OUT", constants.tile_out, "outputs k per thread block, for each of its j"),
            Constexpr("TILE_IN", constants.tile_in, "inputs l per thread block"),
            Constexpr("TILE_D", constants.tile_d, "neighbouring j per thread block: one plane of shared memory each"),
            Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per stage"),
            Constexpr("THREAD_OUT", constants.thread_out, "sums per thread, along the outputs"),
            Constexpr("THREAD_IN", constants.thread_in, "sums per thread, along the inputs"),
            Constexpr("STAGES", constants.stages, "stages of X and dY in shared memory"),
            Constexpr("PARTS", constants.parts, "parts of the batch, at most"),
            Constexpr("MIN_BLOCKS", constants.min_blocks, "thread blocks that must fit a multiprocessor"),
            Constexpr("GROUP", shape.group, "elements of a 16-byte access to shared memory"),
            Constexpr("GROUP_IN", shape.group_in, "the same for X: fewer, if a thread has fewer inputs"),
            Constexpr("GROUP_OUT", shape.group_out, "the same for dY: fewer, if a thread has fewer outputs"),
            Constexpr("THREADS", shape.threads, "threads per block"),
            Constexpr("WARPS_IN", shape.warps_in, "warps of a plane along the inputs"),
            Constexpr("WARPS_PER_PLANE", shape.warps_in * shape.warps_out, "warps of a plane"),
            Constexpr("TOGETHER", 1, "neighbouring lines that a thread copies at once"),
            Constexpr("DY_BASE", shape.dy_base, "offset of a stage's dY, in elements"),
            Constexpr("STAGE", shape.stage, "elements per stage"),
            Constexpr("SHARED_REALS", shape.shared_reals, "elements of shared memory per block"),
            *shape.tile_constexprs(),
            *shape.x.constexprs(constants.copy),
            *shape.dy.constexprs(constants.copy),
        ]
