"""The SIMT family: plain fused multiply-adds, for every pattern, batch, layout and device, and for all factors of a
layer in one launch.

Decides the tiles of `simt.cu.j2` and `simt_chain.cu.j2`; docs/kernels/simt.md explains them. Never renders, compiles or
runs.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Constexpr, Limits, Work, named
from ksgen.families.chains import places
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.expected import MIN_CLASS_SAVING, fastest
from ksgen.families.gpu_chain import GpuProduct, ends_of
from ksgen.families.gpus import PORTABLE
from ksgen.families.simt.chain import CHAIN_RULES, SimtChainConstants, SimtChainTiling, options
from ksgen.families.simt.defaults import cpu_default, gpu_default, others, planes_of_search, smaller, whole_rounds
from ksgen.families.simt.shape import LANES_BATCH, LANES_OUT, RULES, SimtConstants, SimtTiling, is_narrow, products_of
from ksgen.families.tiles import MOST_THREADS, WARP, divide_up, packing_constexprs, product_constexprs
from ksgen.spec import KernelSpec

LEAST_ITEM = 4  # bytes of the smallest asynchronous copy; chains of 16-bit types use tensor cores instead
FEW_SUMS = 32  # per thread

AnySimtConstants = SimtConstants | SimtChainConstants


class Simt(GpuProduct[AnySimtConstants]):
    """Multiply by one factor, or by all factors of a layer, with fused multiply-adds on CUDA cores or by OpenCL."""

    name = "simt"
    tilings: ClassVar[dict[Any, Any]] = {SimtConstants: SimtTiling, SimtChainConstants: SimtChainTiling}
    rules: Mapping[Any, Any] = {SimtConstants: RULES, SimtChainConstants: CHAIN_RULES}
    repeated = (
        "A", "B", "C", "D", "TILE_OUT", "TILE_IN", "TILE_D", "THREAD_BATCH", "THREAD_OUT", "GROUP_OUT", "WARPS_BATCH",
        "WARPS_PER_PLANE", "STEPS", "TILES_OUT", "TILES_D", "X_PLANE", "W_STAGE", "W_ROUNDS", "X_LINES", "X_VECTOR",
        "X_LANE_RUN", "X_LANE_LINES", "X_WARPS_RUN", "X_LINE_STEP", "X_LINE_ROUNDS", "X_RUN_STEP", "X_RUN_ROUNDS",
        "X_HAS_CONSTANT_STEPS", "Y_PLANE", "Y_LANE_RUN", "Y_LANE_LINES", "Y_WARPS_RUN", "Y_LINE_STEP",
        "Y_LINE_ROUNDS", "Y_AT_ONCE", "Y_RUN_STEP", "Y_RUN_ROUNDS",
    )  # fmt: skip
    why = (
        "plain multiply-adds: every precision on every device; from sm_80 on, also all factors of layers in one launch "
        "in float32 and float64"
    )

    def supports(self, kernel: KernelSpec, limits: Limits) -> bool:
        if not kernel.is_chain:
            return kernel.job == "multiply"
        has_copies = limits.async_copies and not limits.is_cpu and kernel.item_bytes >= LEAST_ITEM
        return has_copies and not kernel.arithmetic.is_complex and self.has_chain(kernel, limits)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AnySimtConstants:
        if kernel.is_chain:
            return fastest(self, kernel, limits, batch, lambda: self.space_of_chain(kernel, limits, is_distinct=True))
        if limits.is_cpu:
            return self._fitted(kernel, limits, cpu_default(kernel))
        return fastest(self, kernel, limits, batch, lambda: self._options(kernel, limits), MIN_CLASS_SAVING)

    def _options(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnySimtConstants]:
        chosen = whole_rounds(kernel, limits, self._fitted(kernel, limits, gpu_default(kernel, limits)))
        yield chosen
        for each in others(kernel, limits, chosen):
            if self.is_able(kernel, each, limits):
                yield each

    def _fitted(self, kernel: KernelSpec, limits: Limits, chosen: SimtConstants) -> SimtConstants:
        """Reduce shared memory and threads until the constants fit the device."""
        budget = min(limits.shared_bytes, PORTABLE.shared_bytes)
        threads = min(limits.threads, MOST_THREADS)
        while self.shared_bytes(kernel, chosen) > budget or self.geometry(kernel, chosen, 1).block > threads:
            chosen = smaller(kernel, chosen, budget)
        return chosen

    def options_of_chain(self, kernel: KernelSpec, limits: Limits) -> Iterator[list[SimtChainConstants]]:
        return options(kernel)

    def space_of_factor(self, kernel: KernelSpec, limits: Limits) -> Iterator[SimtConstants]:
        for constants in self._tiles(kernel, limits):
            if not self.keeps_rules(kernel, constants):
                continue
            for min_blocks in (1,) if limits.is_cpu else (1, 2, 3):  # processors have no launch bounds
                bounded = constants.changed(min_blocks=min_blocks)
                if not self.fits(kernel, bounded, limits):
                    break  # more blocks do not fit either
                yield bounded

    def _tiles(self, kernel: KernelSpec, limits: Limits) -> Iterator[SimtConstants]:
        """Yield combinations whose blocks have whole warps, and no more threads than the device allows."""
        pipelines = [(stages, "async") for stages in (2, 3, 4)] if limits.async_copies and not is_narrow(kernel) else []
        planes = planes_of_search(kernel)
        along_batch = list(product((32, 64, 128, 256), (4, 8, 16)))
        along_outputs = list(product((4, 8, 16, 32, 48, 64, 96, 128), (1, 2, 4, 8, 12)))
        for (tile_batch, thread_batch), (tile_out, thread_out), tile_d in product(along_batch, along_outputs, planes):
            warps_batch, over_batch = divmod(tile_batch, LANES_BATCH * thread_batch)
            warps_out, over_out = divmod(tile_out, LANES_OUT * thread_out)
            if over_batch or over_out or WARP * tile_d * warps_batch * warps_out > limits.threads:
                continue
            for tile_in, (stages, copy) in product((4, 8, 16, 32), [(2, "registers"), *pipelines]):
                yield SimtConstants(tile_batch, tile_out, tile_in, tile_d, thread_batch, thread_out, stages, 1, copy)

    def work(self, kernel: KernelSpec, constants: AnySimtConstants, batch: int) -> Work:
        shape, runs = self.shape(kernel, constants), divide_up(batch, constants.tile_batch)
        first, last = ends_of(kernel, shape.factors)
        moved = sum(each.tiles_out * each.x_bytes_moved(batch) for each in first)
        moved += sum(each.y_bytes_moved(batch) for each in last)
        stages = multiply_adds = weights = shared = cycles = 0
        for each, at in zip(shape.factors, places(kernel), strict=True):
            own_stages = runs * each.block_stages
            stages += own_stages
            multiply_adds += own_stages * each.multiply_adds
            weights += own_stages * each.w_stage
            outputs, tiles = batch * each.kernel.pattern.out_features, runs * each.tiles_of_batch
            ending = each.transpose_traffic(tiles, outputs) if at.is_last else each.keep_traffic(runs)
            for own_bytes, own_cycles in (each.inside(own_stages), ending):
                shared += own_bytes
                cycles += own_cycles
        return Work(
            shape.grid(batch),
            self.memory_bytes(kernel, constants, batch),
            round(moved) + kernel.real_bytes * weights,
            shared,
            multiply_adds,
            stages / (constants.stages - 1 if constants.copy == "async" else 1),
            returned_bytes=CYCLE_BYTES * cycles - shared,
            stages=stages,
            synchronous=stages if constants.copy == "registers" else 0,
            products=multiply_adds // WARP,
        )

    # ---- the source

    def variables(self, kernel: KernelSpec, constants: AnySimtConstants) -> dict[str, Any]:
        group = "InputGroup" if kernel.has_bytes_in else "StoredGroup"
        return {
            **super().variables(kernel, constants),
            "x_group": group,
            "products": products_of(kernel, constants.copy),
            "stored_tile": "tile" if _keeps_place(kernel, constants) else "place_again(tile, batch)",
            "packed_tile": _packed_at("tile.weights", kernel.tie, "TILES_OUT", "(TILES_D * TILES_OUT)"),
            "packed_a": "1" if "a" in kernel.tie else "A",
            "packed_tiles_d": "1" if "d" in kernel.tie else "TILES_D",
            "given_at": f"((i * B + k) * C + l){'' if 'd' in kernel.tie else ' * D + j'}",
        }

    def _factor(self, shape: Any, at: int) -> dict[str, Any]:
        tie, of_j = shape.factors[at].kernel.tie, "(TILES_OUT * STEPS)"
        stage = _packed_at("own_stage", tie, of_j, "(TILES_D * TILES_OUT * STEPS)")
        return {**super()._factor(shape, at), "packed_stage": stage}

    def reads_ties(self, kernel: KernelSpec, constants: AnySimtConstants) -> bool:
        return True

    def picture(self, own: SimtTiling, heading: str = "") -> str:
        constants = own.constants
        tiles = f"{own.tiles_out} along k, {own.tiles_d} along j, {own.kernel.pattern.a} along i"
        of_its_j = f", for one of its {constants.tile_d} j" if constants.tile_d > 1 else ""
        return draw(
            heading or f"A tile of Y{of_its_j}. Tiles: {tiles}; along s, as many as the batch needs.",
            DrawnSide(constants.tile_batch, "rows s of the batch", own.warps_batch),
            DrawnSide(constants.tile_out, "outputs k", own.warps_out),
            lambda row, column: f"warp {row + own.warps_batch * column}",
            f"A warp: 8 lanes along s by 4 along k, with {constants.thread_batch} x {constants.thread_out} sums each.",
        )

    def constexprs_in_chain(self, shape: SimtChainTiling, at: int) -> list[Constexpr]:
        own = shape.factors[at]
        found = [
            named(own, "X_PITCH", "elements of shared memory from one l to the next"),
            named(own, "W_BASE", "offset of a stage's weights, in elements"),
        ]
        if number := shape.places[at].at:
            place = shape.place(number - 1)
            found.append(Constexpr("X_PLACE", place, "offset of the inputs in shared memory, in elements"))
        out_place = Constexpr("OUT_PLACE", shape.place(number), "offset of the outputs in shared memory, in elements")
        return [*found, out_place]

    def constexprs_of_factor(self, kernel: KernelSpec, constants: SimtConstants) -> list[Constexpr]:
        shape = SimtTiling.of(kernel, constants)
        x, y = shape.x_plan, shape.y_plan
        of_lines = "inputs l" if kernel.layout == "bsl" else "rows of the batch"
        tuned = [
            *product_constexprs(kernel),
            named(constants, "TILE_BATCH", "rows of the batch per thread block"),
            named(constants, "TILE_OUT", "outputs k per thread block, for each of its j"),
            named(constants, "TILE_IN", "inputs l per stage"),
            named(constants, "TILE_D", "neighbouring j per thread block: one plane of shared memory each"),
            named(constants, "THREAD_BATCH", "sums per thread, along the batch"),
            named(constants, "THREAD_OUT", "sums per thread, along the outputs"),
            named(constants, "STAGES", "stages of X and W in shared memory"),
            named(constants, "MIN_BLOCKS", "thread blocks that must fit on a multiprocessor: bounds the registers"),
        ]
        derived = [
            named(shape, "GROUP", "elements of a 16-byte access to shared memory"),
            named(shape, "GROUP_OUT", "elements of one access to weights: at most the outputs of a thread"),
            named(shape, "THREADS", "threads per block"),
            named(shape, "WARPS_BATCH", "warps of a plane along the batch"),
            Constexpr("WARPS_PER_PLANE", shape.warps_batch * shape.warps_out, "warps of a plane"),
            named(shape, "STEPS", "stages until all C inputs are read"),
            named(shape, "TILES_OUT", "tiles along the outputs"),
            named(shape, "TILES_D", "tiles along j"),
            named(shape, "X_PITCH", "elements of shared memory from one l to the next"),
            named(shape, "X_PLANE", "elements from one j to the next"),
            named(shape, "W_BASE", "offset of a stage's weights, in elements"),
            named(shape, "W_STAGE", "elements of weights per stage"),
            named(shape, "STAGE", "elements per stage"),
            Constexpr("SHARED_ELEMENTS", shape.shared_reals, "elements of shared memory per block"),
            Constexpr("X_LINES", x.lines, f"lines of the X tile: its {of_lines}; `run` is an offset in a line"),
            Constexpr("X_VECTOR", x.vector, "contiguous elements that one copy of X moves"),
            *x.constexprs("X"),
            named(shape, "W_ROUNDS", "copies of weights per thread and stage"),
            *packing_constexprs(kernel),
        ]
        if kernel.layout == "bsf" and kernel.reads_exchanged:
            about = "whether a thread's inputs of a stage lie at constant distances"
            derived.append(named(shape, "X_HAS_CONSTANT_STEPS", about))
        if constants.copy == "registers":
            held = x.line_rounds * x.run_rounds * x.vector
            derived.append(Constexpr("X_HELD", held, "elements of X that a thread holds while it copies them"))
        if kernel.layout == "bsf":
            derived += [
                named(shape, "Y_PLANE", "elements from one (k, j) to the next, while sums become rows of Y"),
                Constexpr("Y_LANE_RUN", y.lane_run, "lanes of a warp that store one line of Y together"),
                Constexpr("Y_LANE_LINES", y.lane_lines, "rows of the batch that a warp stores at once"),
                Constexpr("Y_WARPS_RUN", y.warps_run, "warps that store one line together"),
                Constexpr("Y_LINE_STEP", y.line_step, "rows of the batch that the block stores at once"),
                Constexpr("Y_LINE_ROUNDS", y.line_rounds, "rounds until all rows of the tile are stored"),
                named(shape, "Y_AT_ONCE", "residuals that a thread loads at once"),
                Constexpr("Y_RUN_STEP", y.run_step, "elements of a line that the block stores at once"),
                Constexpr("Y_RUN_ROUNDS", y.run_rounds, "rounds until a line is stored"),
            ]
        return tuned + derived


def _keeps_place(kernel: KernelSpec, constants: AnySimtConstants) -> bool:
    """Whether a thread has registers enough for the tile's place while stages are multiplied."""
    if kernel.epilogue.words or not isinstance(constants, SimtConstants):
        return False
    return constants.thread_batch * constants.thread_out <= FEW_SUMS


def _packed_at(number: str, tie: str, of_j: str, of_i: str) -> str:
    """Number of a tile or stage among packed weights, which tiles share along the axes of a tie.

    `of_j` and `of_i` are expressions for the number of tiles or stages per tile of j and per i.
    """
    if not tie:
        return number
    begin = f"{number} / {of_i} * {of_j} + " if tie == "d" else ""
    return f"({begin}{number} % {of_i if tie == 'a' else of_j})"
