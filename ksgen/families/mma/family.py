"""The tensor-core family: warp-wide matrix instructions (`mma.sync`) on sm_80 and later. Operands are 16-bit, tf32, or
floats in eight bits.

Decides the tiles of `mma.cu.j2`, and of `mma_chain.cu.j2` for all factors of a layer in one launch; its design is
docs/kernels/mma.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

from ksgen.families.base import Constexpr, Limits, Work, named
from ksgen.families.chains import factor_kernels
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.expected import fastest
from ksgen.families.gpu_chain import GpuProduct, ends_of
from ksgen.families.mma.chain import CHAIN_RULES, MmaChainConstants, MmaChainTiling, MmaFactor, options
from ksgen.families.mma.defaults import default, others, promotion
from ksgen.families.mma.shape import COLUMNS, ROWS, RULES, MmaConstants, MmaTiling
from ksgen.families.operands import CHUNK, has_products, is_precise
from ksgen.families.tiles import WARP, divide_up, packing_constexprs, product_constexprs
from ksgen.spec import KernelSpec

AnyMmaConstants = MmaConstants | MmaChainConstants


def variants_of(tiling: MmaTiling) -> tuple[str, ...]:
    """Names of the variants of snippets in its source."""
    has = {
        "unsplit": tiling.packed_parts < tiling.components,
        "complex_split": tiling.components == 2 and tiling.reals_per_number == 2,
        "split": tiling.components == 2,
        "mma_promoted": tiling.constants.promote,
        "resident": tiling.constants.resident,
        "widened_bytes": tiling.widens_bytes,
        f"widened_{tiling.operand}": tiling.widens_bytes,
    }
    return tuple(name for name, is_so in has.items() if is_so)


class Mma(GpuProduct[AnyMmaConstants]):
    """Multiply by one factor, or by all factors of a layer, with warp-wide matrix instructions and float32 sums."""

    name = "mma"
    tilings: ClassVar[dict[Any, Any]] = {MmaConstants: MmaTiling, MmaChainConstants: MmaChainTiling}
    rules: Mapping[Any, Any] = {MmaConstants: RULES, MmaChainConstants: CHAIN_RULES}
    repeated = (
        "A", "B", "C", "D", "TILE_OUT", "TILE_IN", "TILE_D", "WARPS_BATCH", "WARPS_OUT", "WARP_D", "X_VECTOR",
        "Y_VECTOR", "K_STEP", "LANE_INPUTS", "ELEMENT_FLOATS", "WORD_INPUTS", "COMPONENTS", "PACKED_PARTS",
        "ROW_TILES", "COLUMN_TILES", "SUPER_IN", "SUPER_STEPS", "RUN_OUT", "STEPS", "TILES_OUT", "TILES_D", "X_LINES",
        "X_RUN", "W_BYTES", "VECTOR", "GROUP_CHUNKS", "GROUP_INPUTS", "SUPER_GROUPS", "PROMOTE",
    )  # fmt: skip
    why = (
        "tensor cores multiply 16-bit and tf32 operands, and X and weights that are both e4m3 or both e5m2; all "
        "factors of layers in one launch; from sm_80 on"
    )

    def supports(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.job == "gradient" or not limits.tensor_cores or not has_products(kernel):
            return False
        if not kernel.is_chain:
            return is_precise(kernel, limits)
        return all(is_precise(each, limits) for each in factor_kernels(kernel)) and self.has_chain(kernel, limits)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AnyMmaConstants:
        return fastest(self, kernel, limits, batch, lambda: self._candidates(kernel, limits))

    def _candidates(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyMmaConstants]:
        if kernel.is_chain:
            yield from self.space_of_chain(kernel, limits, is_distinct=True)
        else:
            yield default(kernel, limits)
            yield from (each for each in others(kernel, limits) if self.keeps_rules(kernel, each))

    def options_of_chain(self, kernel: KernelSpec, limits: Limits) -> Iterator[list[MmaChainConstants]]:
        return options(kernel, limits)

    def space_of_factor(self, kernel: KernelSpec, limits: Limits) -> Iterator[MmaConstants]:
        d, vector = kernel.pattern.d, CHUNK // kernel.x_item_bytes
        runs = [(1, 1)]
        if kernel.layout == "bsf":
            runs = [(run, 1) for run in sorted({d, *(run for run in (vector, 2 * vector) if run < d)})]
            runs += [(vector * warps, warps) for warps in (2, 3, 4) if vector * warps <= d]
        promote = promotion(kernel, limits)  # rarer promotion would be faster, but less precise than promised
        sizes = product(runs, (1, 2, 3, 4), (1, 2, 3, 4, 6, 8), (1, 2, 4, 8), (1, 2, 4), (8, 16, 32, 64), (0, 1))
        for (tile_d, warps_d), row_tiles, column_tiles, warps_batch, warps_out, tile_in, resident in sizes:
            tile_batch, tile_out = COLUMNS * column_tiles * warps_batch, ROWS * row_tiles * warps_out
            least = MmaConstants(
                tile_batch, tile_out, tile_in, tile_d, warps_batch, warps_out, 2, 0, 1, warps_d, resident
            )
            if not self.is_able(kernel, least, limits):
                continue  # more stages or blocks would not be valid either
            for stages, min_blocks in product((2, 3, 4, 5), (1, 2, 3)):
                constants = least.changed(stages=stages, promote=promote, min_blocks=min_blocks)
                if self.is_able(kernel, constants, limits):
                    yield constants

    def work(self, kernel: KernelSpec, constants: AnyMmaConstants, batch: int) -> Work:
        shape, runs = self.shape(kernel, constants), divide_up(batch, constants.tile_batch)
        # `written` lists the factors whose inputs are written to shared memory; a resident X counts once per order
        last, written = ends_of(kernel, shape.factors)[1], list(shape.copying)
        if kernel.is_chain:
            written += [each for each, at in zip(shape.factors, shape.places, strict=True) if at.at]
        moved = sum(each.x_bytes_moved(batch) * each.readings for each in shape.copying)
        moved += sum(each.y_bytes_moved(batch) for each in last)
        weights = sum(each.block_stages * each.w_bytes for each in shape.factors)
        read = sum(each.block_stages * each.read_bytes for each in shape.factors)
        multiply_adds = runs * sum(each.multiply_adds for each in shape.factors) * kernel.arithmetic.products
        return Work(
            shape.grid(batch),
            self.memory_bytes(kernel, constants, batch),
            round(moved) + runs * weights,
            runs * (sum(each.written_bytes for each in written) + weights + read),
            multiply_adds,
            runs * shape.waits,
            returned_bytes=runs * sum(each.wasted_bytes for each in shape.copying),
            stages=runs * sum(each.block_stages for each in shape.factors),
            products=multiply_adds // (ROWS * COLUMNS * shape.factors[0].k_step),
            reads=runs * read // (CHUNK * WARP),
        )

    # ---- the source

    def variables(self, kernel: KernelSpec, constants: AnyMmaConstants) -> dict[str, Any]:
        first = self.shape(kernel, constants).factors[0]
        return {
            **super().variables(kernel, constants),
            "operand": first.operand,
            "variants": () if kernel.is_chain else variants_of(first),  # factors of a chain have their own
        }

    def _factor(self, shape: Any, at: int) -> dict[str, Any]:
        return {**super()._factor(shape, at), "streams_x": bool(shape.factors[at].streamed)}

    def copies_x(self, shape: MmaChainTiling, at: int) -> bool:
        return at in [copying for _, copying in shape.orders.values()]

    def picture(self, tiling: MmaTiling, heading: str = "") -> str:
        constants, rows, columns = tiling.constants, ROWS * tiling.row_tiles, COLUMNS * tiling.column_tiles
        tiles = f"{tiling.tiles_out} along k, {tiling.tiles_d} along j, {tiling.kernel.pattern.a} along i"
        of_each_j = f" for each of {tiling.warp_d} j" if tiling.warp_d > 1 else ""
        return draw(
            heading or f"A tile of Y. Tiles: {tiles}; along s, as many as the batch needs.",
            DrawnSide(constants.tile_out, "outputs k", constants.warps_out),
            DrawnSide(constants.tile_batch, "rows s of the batch", constants.warps_batch),
            lambda row, column: f"warp {column + constants.warps_batch * row}",
            f"A warp: {rows} x {columns} sums{of_each_j}, by {tiling.row_tiles} x {tiling.column_tiles} instructions "
            f"of {ROWS} x {COLUMNS}.",
        )

    def variants_in_chain(self, tiling: MmaFactor) -> tuple[str, ...]:
        return (tiling.kernel.layout, *variants_of(tiling))

    def constexprs_in_chain(self, shape: MmaChainTiling, at: int) -> list[Constexpr]:
        tiling = shape.factors[at]
        found = [
            Constexpr("X_PLACE", shape.x_place(at), "offset of the inputs in shared memory, in bytes"),
            named(tiling, "X_PITCH", "bytes from one line of inputs to the next, free of bank conflicts"),
            named(shape, "X_SLOT", "bytes per slot of the ring of X: its largest stage; 0 if all of X is resident"),
            named(tiling, "X_STAGE", "bytes from one stage of resident inputs to the next"),
        ]
        if shape.places[at].is_last:
            return found
        after = shape.factors[at + 1]
        (a, _, c, d), vector = after.kernel.pattern.shape, min(tiling.y_vector, after.x_vector)
        return [
            *found,
            Constexpr(
                "INTERMEDIATE_VECTOR", vector, "neighbouring outputs that are neighbouring inputs of the next factor"
            ),
            Constexpr("NEXT_A", a, "the next factor's a"),
            Constexpr("NEXT_C", c, "the next factor's c"),
            Constexpr("NEXT_D", d, "the next factor's d"),
            Constexpr("NEXT_TILE_D", after.constants.tile_d, "neighbouring j of the next factor's tiles"),
            Constexpr("NEXT_TILES_D", after.tiles_d, "the next factor's tiles along j"),
            Constexpr(
                "NEXT_INPUTS", after.steps * after.constants.tile_in, "the next factor's c, rounded up to whole stages"
            ),
            Constexpr("NEXT_SLOTS", after.slots, "all inputs of the next factor, (i, l, j), with those of padding"),
            Constexpr(
                "NEXT_PLACE", shape.x_place(at + 1), "offset of the next factor's inputs in shared memory, in bytes"
            ),
            Constexpr("NEXT_PITCH", after.x_pitch, "bytes from one line of the next factor's inputs to the next"),
        ]

    def constexprs_of_factor(self, kernel: KernelSpec, constants: MmaConstants) -> list[Constexpr]:
        shape = MmaTiling.of(kernel, constants)
        of_lines = "inputs l" if kernel.layout == "bsl" else "rows of the batch"
        always = [
            *product_constexprs(kernel),
            named(constants, "TILE_BATCH", "rows of the batch per thread block"),
            named(constants, "TILE_OUT", "outputs k per thread block, for each of its j"),
            named(constants, "TILE_IN", "inputs l per stage"),
            named(constants, "TILE_D", "neighbouring j per thread block; a plane is the part of a tile with one j"),
            named(constants, "WARPS_BATCH", "warps along the batch"),
            named(constants, "WARPS_OUT", "warps along the outputs"),
            named(shape, "WARP_D", "neighbouring j per warp"),
            named(constants, "STAGES", "stages in shared memory: of X and W, or of W alone if X is resident"),
            named(constants, "MIN_BLOCKS", "thread blocks that must fit on a multiprocessor: bounds the registers"),
            named(shape, "THREADS", "threads per block"),
            named(shape, "X_VECTOR", "contiguous elements that one copy of X moves"),
            named(shape, "Y_VECTOR", "contiguous elements that one store of Y moves"),
            named(shape, "K_STEP", "inputs of one matrix instruction"),
            named(shape, "LANE_INPUTS", "inputs of one instruction that a lane holds per row of the batch"),
            Constexpr("ELEMENT_FLOATS", shape.reals_per_number, "floats per element: 2 for a complex number"),
            named(shape, "WORD_INPUTS", "inputs per word of an operand; a complex number fills two words"),
            named(shape, "COMPONENTS", "parts into which an operand is split"),
            named(shape, "PACKED_PARTS", "parts of packed weights; if fewer than COMPONENTS, lanes split them"),
            named(shape, "ROW_TILES", "matrix instructions of a warp along its outputs, 16 each"),
            named(shape, "COLUMN_TILES", "matrix instructions of a warp along its rows of the batch, 8 each"),
            named(shape, "SUPER_IN", "inputs per period of the order in which lanes hold inputs"),
            named(shape, "SUPER_STEPS", "matrix instructions for SUPER_IN inputs"),
            named(shape, "RUN_OUT", "neighbouring outputs per lane"),
            named(shape, "STEPS", "stages until all C inputs are read"),
            named(shape, "TILES_OUT", "tiles along the outputs"),
            named(shape, "TILES_D", "tiles along j"),
            named(shape, "X_LINES", f"lines of the X tile: its {of_lines}; `run` is an offset in a line"),
            named(shape, "X_RUN", "elements per line"),
            named(shape, "X_PITCH", "bytes of shared memory from one line to the next, free of bank conflicts"),
            named(shape, "PASSES", "tiles of outputs per block, computed sequentially"),
            named(shape, "X_STAGE", "bytes from one stage of X to the next"),
            named(shape, "W_BASE", "offset of the weights' stages, in bytes"),
            named(shape, "W_BYTES", "bytes of packed weights per stage"),
            named(shape, "SHARED_BYTES", "bytes of shared memory per block"),
            *packing_constexprs(kernel),
            Constexpr("SCALES", shape.scales_offset, "bytes of packed weights before their scales", "long long"),
        ]
        special = [named(shape, "VECTOR", "rows of the batch per 16-byte chunk")]
        if kernel.layout == "bsf":
            special = [
                named(shape, "GROUP_CHUNKS", "neighbouring chunks that a lane reads per row of the batch"),
                named(shape, "GROUP_INPUTS", "inputs per group of chunks, each with the WARP_D j of a warp"),
                named(shape, "SUPER_GROUPS", "groups of chunks that a lane reads for SUPER_IN inputs"),
            ]
        if constants.promote:
            special.append(
                named(constants, "PROMOTE", "inputs after which tensor-core sums are added to plain float32 sums")
            )
        return always + special
