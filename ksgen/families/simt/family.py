"""The SIMT family: plain fused multiply-adds, for every pattern, batch, layout and device.

Decides the tiles of `simt.cu.j2`; its design is docs/kernels.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Constexpr, Limits, Work
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.expected import WORTH_A_CLASS, fastest
from ksgen.families.gpus import PORTABLE
from ksgen.families.rules import Rule
from ksgen.families.shaped import Packing
from ksgen.families.simt.defaults import cpu_default, gpu_default, neighbours, others, smaller, whole_rounds
from ksgen.families.simt.shape import LANES_BATCH, LANES_OUT, SimtConstants, SimtTiling, is_narrow, products_of
from ksgen.families.tiles import MOST_THREADS, PACK_THREADS, WARP, epilogue_constexprs, given_scales, pattern_constexprs
from ksgen.spec import KernelSpec
from ksgen.words import counted

RULES: tuple[Rule[SimtConstants], ...] = (
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    Rule("every constant is at least 1", lambda k, c: all(v >= 1 for v in vars(c).values() if not isinstance(v, str))),
    Rule(
        "thread_batch is a multiple of a 16-byte group",
        lambda k, c: c.thread_batch % SimtTiling(k, c).group == 0,
        lambda k, c: SimtTiling(k, c).group,
    ),
    Rule("thread_batch is at most 16", lambda k, c: c.thread_batch <= 16),
    Rule("thread_out is at most 16", lambda k, c: c.thread_out <= 16),
    Rule(
        "tile_batch is a multiple of 8 * thread_batch",
        lambda k, c: c.tile_batch % (LANES_BATCH * c.thread_batch) == 0,
        lambda k, c: LANES_BATCH * c.thread_batch,
    ),
    Rule(
        "tile_out is a multiple of 4 * thread_out",
        lambda k, c: c.tile_out % (LANES_OUT * c.thread_out) == 0,
        lambda k, c: LANES_OUT * c.thread_out,
    ),
    Rule("a block has at most 1024 threads", lambda k, c: SimtTiling(k, c).threads <= MOST_THREADS, lambda k, c: SimtTiling(k, c).threads),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("stages is 2 with copy=registers", lambda k, c: c.copy != "registers" or c.stages == 2),
    Rule("copy is registers in a 16-bit precision, and with X in eight bits", lambda k, c: c.copy != "async" or not is_narrow(k)),
)


def _picture(shape: SimtTiling) -> str:
    """Drawing of a tile of Y and its warps."""
    tiles = f"{counted(shape.tiles_out, 'tile')} along k, {shape.tiles_d} along j, {shape.kernel.pattern.a} along i"
    heading = f"A tile of Y, for one of its {shape.constants.tile_d} j. There are {tiles}, and as many along s as the batch has."
    return tile_picture(shape, heading)


def tile_picture(shape: SimtTiling, heading: str) -> str:
    constants = shape.constants
    return draw(
        heading,
        DrawnSide(constants.tile_batch, "rows s of the batch", shape.warps_batch),
        DrawnSide(constants.tile_out, "outputs k", shape.warps_out),
        lambda row, column: f"warp {row + shape.warps_batch * column}",
        f"A warp: 8 lanes along s by 4 along k, with {constants.thread_batch} x {constants.thread_out} sums each.",
    )


class Simt(Packing[SimtConstants]):
    """Fused multiply-adds on CUDA cores, or on any OpenCL device."""

    name = "simt"
    constants_type = SimtConstants
    listed = RULES
    why = "plain multiply-adds: every device, and all there is for float32 and float64"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "multiply"

    def shape(self, kernel: KernelSpec, constants: SimtConstants) -> SimtTiling:
        return SimtTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> SimtConstants:
        if limits.is_cpu:
            return self._fitted(kernel, limits, cpu_default(kernel))
        return fastest(self, kernel, limits, batch, lambda: self._options(kernel, limits), WORTH_A_CLASS)

    def _options(self, kernel: KernelSpec, limits: Limits) -> Iterator[SimtConstants]:
        chosen = whole_rounds(kernel, limits, self._fitted(kernel, limits, gpu_default(kernel, limits)))
        yield chosen
        for each in others(kernel, limits, chosen):
            if self.keeps_rules(kernel, each) and self.fits(kernel, each, limits):
                yield each

    def _fitted(self, kernel: KernelSpec, limits: Limits, chosen: SimtConstants) -> SimtConstants:
        """Reduce shared memory and threads until the constants fit the device."""
        budget = min(limits.shared_bytes, PORTABLE.shared_bytes)
        threads = min(limits.threads, MOST_THREADS)
        while self.shared_bytes(kernel, chosen) > budget or self.geometry(kernel, chosen, 1).block > threads:
            chosen = smaller(kernel, chosen, budget)
        return chosen

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[SimtConstants]:
        """Yield every combination that the rules, the shared memory and the registers allow."""
        for constants in self._shapes(kernel, limits):
            if not self.keeps_rules(kernel, constants):
                continue
            for min_blocks in (1,) if limits.is_cpu else (1, 2, 3):  # a processor knows no launch bounds
                bounded = replace(constants, min_blocks=min_blocks)
                if not self.fits(kernel, bounded, limits):
                    break  # nor do more blocks
                yield bounded

    def _shapes(self, kernel: KernelSpec, limits: Limits) -> Iterator[SimtConstants]:
        """Yield combinations whose blocks have whole warps, and no more threads than the device allows."""
        pipelines = [(stages, "async") for stages in (2, 3, 4)] if limits.async_copies and not is_narrow(kernel) else []
        planes = [1] if kernel.layout == "bsl" else sorted({1, 2, 3, 4, 6, 8, 12, 16, neighbours(kernel.pattern.d)})
        along_batch = list(product((32, 64, 128, 256), (4, 8, 16)))
        along_outputs = list(product((4, 8, 16, 32, 48, 64, 96, 128), (1, 2, 4, 8, 12)))
        for (tile_batch, thread_batch), (tile_out, thread_out), tile_d in product(along_batch, along_outputs, planes):
            warps_batch, over_batch = divmod(tile_batch, LANES_BATCH * thread_batch)
            warps_out, over_out = divmod(tile_out, LANES_OUT * thread_out)
            if over_batch or over_out or WARP * tile_d * warps_batch * warps_out > limits.threads:
                continue
            for tile_in, (stages, copy) in product((4, 8, 16, 32), [(2, "registers"), *pipelines]):
                yield SimtConstants(tile_batch, tile_out, tile_in, tile_d, thread_batch, thread_out, stages, 1, copy)

    def work(self, kernel: KernelSpec, constants: SimtConstants, batch: int) -> Work:
        shape = SimtTiling(kernel, constants)
        blocks = self.geometry(kernel, constants, batch).grid
        stages = blocks * shape.steps
        inside, transposed = shape.inside(stages), shape.transpose_traffic(blocks, batch * kernel.pattern.out_features)
        shared = inside[0] + transposed[0]
        return Work(
            blocks,
            self.memory_bytes(kernel, constants, batch),
            round(shape.tiles_out * shape.x_bytes_moved(batch) + shape.y_bytes_moved(batch)) + stages * shape.w_stage * shape.real_bytes,
            shared,
            stages * shape.multiply_adds,
            stages / (constants.stages - 1 if constants.copy == "async" else 1),
            returned_bytes=CYCLE_BYTES * (inside[1] + transposed[1]) - shared,
            stages=stages,
            synchronous=stages if constants.copy == "registers" else 0,
            products=stages * shape.multiply_adds // WARP,
        )

    def words(self, kernel: KernelSpec, constants: SimtConstants) -> Mapping[str, Any]:
        group = "InputGroup" if kernel.has_bytes_in else "StoredGroup"
        return {"picture": _picture(SimtTiling(kernel, constants)), "x_group": group, "products": products_of(kernel, constants.copy)}

    def constexprs(self, kernel: KernelSpec, constants: SimtConstants) -> list[Constexpr]:
        shape = SimtTiling(kernel, constants)
        x, y = shape.x_plan, shape.y_plan
        tuned = [
            *pattern_constexprs(kernel),
            *epilogue_constexprs(kernel),
            Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per thread block"),
            Constexpr("TILE_OUT", constants.tile_out, "outputs k per thread block, for each of its j"),
            Constexpr("TILE_IN", constants.tile_in, "inputs l per stage"),
            Constexpr("TILE_D", constants.tile_d, "neighbouring j per thread block: one plane of shared memory each"),
            Constexpr("THREAD_BATCH", constants.thread_batch, "sums per thread, along the batch"),
            Constexpr("THREAD_OUT", constants.thread_out, "sums per thread, along the outputs"),
            Constexpr("STAGES", constants.stages, "stages of X and W in shared memory"),
            Constexpr("MIN_BLOCKS", constants.min_blocks, "thread blocks that must fit a multiprocessor"),
        ]
        derived = [
            Constexpr("GROUP", shape.group, "elements of a 16-byte access to shared memory"),
            Constexpr(
                "GROUP_OUT",
                shape.group_out,
                "elements of one access to weights: fewer, if a thread has fewer outputs",
            ),
            Constexpr("THREADS", shape.threads, "threads per block"),
            Constexpr("WARPS_BATCH", shape.warps_batch, "warps of a plane along the batch"),
            Constexpr("WARPS_PER_PLANE", shape.warps_batch * shape.warps_out, "warps of a plane"),
            Constexpr("STEPS", shape.steps, "stages until all C inputs are read"),
            Constexpr("TILES_OUT", shape.tiles_out, "tiles along the outputs"),
            Constexpr("TILES_D", shape.tiles_d, "tiles along j"),
            Constexpr("X_PITCH", shape.x_pitch, "elements of shared memory from one l to the next"),
            Constexpr("X_PLANE", shape.x_plane, "elements from one j to the next"),
            Constexpr("W_BASE", shape.w_base, "offset of a stage's weights, in elements"),
            Constexpr("W_STAGE", shape.w_stage, "elements of weights per stage"),
            Constexpr("STAGE", shape.stage, "elements per stage"),
            Constexpr("SHARED_REALS", shape.shared_reals, "elements of shared memory per block"),
            Constexpr("X_LINES", x.lines, "lines of the X tile"),
            Constexpr("X_VECTOR", x.vector, "neighbours that one copy of X moves"),
            Constexpr("X_LANE_RUN", x.lane_run, "lanes of a warp along a line"),
            Constexpr("X_LANE_LINES", x.lane_lines, "lines that a warp copies at once"),
            Constexpr("X_WARPS_RUN", x.warps_run, "warps along a line"),
            Constexpr("X_LINE_STEP", x.line_step, "lines that the block copies at once"),
            Constexpr("X_LINE_ROUNDS", x.line_rounds, "rounds until all lines are copied"),
            Constexpr("X_RUN_STEP", x.run_step, "elements of a line that the block copies at once"),
            Constexpr("X_RUN_ROUNDS", x.run_rounds, "rounds until a line is copied"),
            Constexpr("W_ROUNDS", shape.w_rounds, "copies of weights per thread and stage"),
            Constexpr("PACK_THREADS", PACK_THREADS, "threads per block of the packing kernel"),
            given_scales(kernel),
        ]
        if constants.copy == "registers":
            held = x.line_rounds * x.run_rounds * x.vector
            derived.append(Constexpr("X_HELD", held, "elements of X that a thread holds while it copies them"))
        if kernel.layout == "bsf":
            derived += [
                Constexpr("Y_PLANE", shape.y_plane, "elements of shared memory from one j of a stored slice to the next"),
                Constexpr("Y_LANE_RUN", y.lane_run, "lanes of a warp along a line of Y"),
                Constexpr("Y_LANE_LINES", y.lane_lines, "rows of the batch that a warp stores at once"),
                Constexpr("Y_WARPS_RUN", y.warps_run, "warps along a line"),
                Constexpr("Y_LINE_STEP", y.line_step, "rows of the batch that the block stores at once"),
                Constexpr("Y_LINE_ROUNDS", y.line_rounds, "rounds until all rows of the batch are stored"),
                Constexpr("Y_RUN_STEP", y.run_step, "elements of a line that the block stores at once"),
                Constexpr("Y_RUN_ROUNDS", y.run_rounds, "rounds until a line is stored"),
            ]
        return tuned + derived
