"""The tensor-core family: warp-wide matrix instructions (`mma.sync`) on sm_80 and later. Operands are 16-bit, tf32, or
floats in eight bits.

Decides the tiles of `mma.cu.j2`; its design is docs/kernels.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, Limits, Work
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.expected import fastest
from ksgen.families.gpus import PORTABLE, REGISTERS
from ksgen.families.mma.defaults import default, others, promotion
from ksgen.families.mma.shape import COLUMNS, ROWS, MmaConstants, MmaTiling
from ksgen.families.operands import CHUNK, FREE_OF_CONFLICTS, has_products, is_precise, multiplies_bytes
from ksgen.families.rules import Rule
from ksgen.families.shaped import Packing
from ksgen.families.tiles import MOST_THREADS, PACK_THREADS, epilogue_constexprs, given_scales, pattern_constexprs
from ksgen.spec import KernelSpec
from ksgen.spec.precision import on_tensor_cores
from ksgen.words import counted

MOST_SUMS = 192  # accumulators per thread that leave registers for fragments
LEAST_COPIED = 4  # bytes of the smallest asynchronous copy


def _plane_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    tile_d, d = constants.tile_d, kernel.pattern.d
    return kernel.layout == "bsl" or tile_d == d or (tile_d < d and tile_d % MmaTiling(kernel, constants).vector == 0)


def _warps_d_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    return constants.warps_d in (1, constants.tile_d / MmaTiling(kernel, constants).vector)


def _batch_unit(kernel: KernelSpec, constants: MmaConstants) -> int:
    """Rows of the batch of which a tile has a whole multiple."""
    at_once = 1 if kernel.layout == "bsf" else MmaTiling(kernel, constants).vector
    return constants.warps_batch * COLUMNS * at_once


def _resident_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    has_passes = kernel.layout == "bsf" and constants.tile_out < kernel.pattern.b
    return constants.resident == 0 or (has_passes and constants.resident == 1)


def _registers(kernel: KernelSpec, constants: MmaConstants) -> int:
    shape = MmaTiling(kernel, constants)
    return min(255, shape.registers) * shape.threads * constants.min_blocks


RULES: tuple[Rule[MmaConstants], ...] = (
    Rule(
        "precision is one that tensor cores multiply",
        lambda k, c: k.has_bytes_in or has_products(k),
        lambda k, c: ", ".join(on_tensor_cores()),
    ),
    Rule("X is not in eight bits, or in floats of them", lambda k, c: not k.has_bytes_in or multiplies_bytes(k)),
    Rule(
        "every constant but promote and resident is at least 1",
        lambda k, c: all(v >= 1 for n, v in vars(c).items() if n not in ("promote", "resident")),
    ),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is d, or less and a multiple of 16 bytes", _plane_rule),
    Rule("tile_d is at most 16 for each of warps_d", lambda k, c: c.tile_d <= 16 * c.warps_d),
    Rule("warps_d is 1, or each warp has 16 bytes of the tile's j", _warps_d_rule),
    Rule("resident is 0, or 1 in bsf with tile_out less than b", _resident_rule),
    Rule("tile_out is a multiple of 16 * warps_out", lambda k, c: c.tile_out % (ROWS * c.warps_out) == 0, lambda k, c: ROWS * c.warps_out),
    Rule(
        "tile_batch is a multiple of 8 * warps_batch (in bsl of as many 16-byte chunks)",
        lambda k, c: c.tile_batch % _batch_unit(k, c) == 0,
        _batch_unit,
    ),
    Rule(
        "tile_in is a multiple of the inputs after which the lanes' order starts again",
        lambda k, c: c.tile_in % MmaTiling(k, c).super_in == 0,
        lambda k, c: MmaTiling(k, c).super_in,
    ),
    Rule("a block has at most 1024 threads", lambda k, c: MmaTiling(k, c).threads <= MOST_THREADS, lambda k, c: MmaTiling(k, c).threads),
    Rule(
        "a thread has at most 192 sums", lambda k, c: MmaTiling(k, c).promoted_sums <= MOST_SUMS, lambda k, c: MmaTiling(k, c).promoted_sums
    ),
    Rule(
        "min_blocks blocks have at most 1536 threads",
        lambda k, c: MmaTiling(k, c).threads * c.min_blocks <= PORTABLE.threads,
        lambda k, c: MmaTiling(k, c).threads * c.min_blocks,
    ),
    Rule("the registers of min_blocks blocks are at most 65536", lambda k, c: _registers(k, c) <= REGISTERS, _registers),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("promote is 0, or a multiple of tile_in", lambda k, c: c.promote >= 0 and c.promote % c.tile_in == 0),
    Rule("X is read from shared memory with no bank conflicts", lambda k, c: MmaTiling(k, c).x_wavefronts == FREE_OF_CONFLICTS),
)


def _picture(shape: MmaTiling) -> str:
    """Drawing of a tile of Y and its warps."""
    tiles = f"{counted(shape.tiles_out, 'tile')} along k, {shape.tiles_d} along j, {shape.kernel.pattern.a} along i"
    return tile_picture(shape, f"A tile of Y. There are {tiles}, and as many along s as the batch has.")


def tile_picture(shape: MmaTiling, title: str) -> str:
    constants, rows, columns = shape.constants, ROWS * shape.row_tiles, COLUMNS * shape.column_tiles
    return draw(
        title,
        DrawnSide(constants.tile_out, "outputs k", constants.warps_out),
        DrawnSide(constants.tile_batch, "rows s of the batch", constants.warps_batch),
        lambda row, column: f"warp {column + constants.warps_batch * row}",
        f"A warp: {rows} x {columns} sums for each of {shape.warp_d} j, by {shape.row_tiles} x {shape.column_tiles} instructions "
        f"of {ROWS} x {COLUMNS}.",
    )


def variants_of(shape: MmaTiling) -> tuple[str, ...]:
    """Names of the variants of snippets in its source."""
    has = {
        "unsplit": shape.packed_parts < shape.components,
        "complex_split": shape.components == 2 and shape.halves == 2,
        "split": shape.components == 2,
        "mma_promoted": shape.constants.promote,
        "resident": shape.constants.resident,
        "widened_bytes": shape.widens_bytes,
        f"widened_{shape.operand}": shape.widens_bytes,
    }
    return tuple(name for name, is_so in has.items() if is_so)


def wide_bytes(shape: MmaTiling) -> int:
    """Bytes of one copy of X_VECTOR neighbours; 16 if they are too small for an asynchronous copy."""
    wide = shape.x_vector * shape.kernel.x_item_bytes
    return wide if wide >= LEAST_COPIED else CHUNK


class Mma(Packing[MmaConstants]):
    """Products by warp-wide matrix instructions, with float32 sums."""

    name = "mma"
    constants_type = MmaConstants
    listed = RULES
    why = "tensor cores multiply 16-bit and tf32 operands, and X and weights that are both e4m3 or both e5m2, from sm_80 on"
    on_tensor_cores = True

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "multiply" and limits.tensor_cores and has_products(kernel) and is_precise(kernel, limits)

    def shape(self, kernel: KernelSpec, constants: MmaConstants) -> MmaTiling:
        return MmaTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> MmaConstants:
        return fastest(self, kernel, limits, batch, lambda: self._options(kernel, limits))

    def _options(self, kernel: KernelSpec, limits: Limits) -> Iterator[MmaConstants]:
        yield default(kernel, limits)
        yield from (each for each in others(kernel, limits) if self.keeps_rules(kernel, each))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[MmaConstants]:
        """Yield every combination that the rules, the shared memory and the registers allow."""
        d, vector = kernel.pattern.d, CHUNK // kernel.x_item_bytes
        runs = [(1, 1)] if kernel.layout == "bsl" else [(run, 1) for run in sorted({d, *(run for run in (vector, 2 * vector) if run < d)})]
        if kernel.layout == "bsf":
            runs += [(vector * warps, warps) for warps in (2, 3, 4) if vector * warps <= d]
        promote = promotion(kernel, limits)  # less often would be faster, but less precise than promised
        shapes = product(runs, (1, 2, 3, 4), (1, 2, 3, 4, 6, 8), (1, 2, 4, 8), (1, 2, 4), (8, 16, 32, 64), (0, 1))
        for (tile_d, warps_d), row_tiles, column_tiles, warps_batch, warps_out, tile_in, resident in shapes:
            tile_batch, tile_out = COLUMNS * column_tiles * warps_batch, ROWS * row_tiles * warps_out
            least = MmaConstants(tile_batch, tile_out, tile_in, tile_d, warps_batch, warps_out, 2, 0, 1, warps_d, resident)
            if not self._is_valid(kernel, least, limits):
                continue  # constants that need more are not valid either
            for stages, min_blocks in product((2, 3, 4, 5), (1, 2, 3)):
                constants = replace(least, stages=stages, promote=promote, min_blocks=min_blocks)
                if self._is_valid(kernel, constants, limits):
                    yield constants

    def _is_valid(self, kernel: KernelSpec, constants: MmaConstants, limits: Limits) -> bool:
        return self.keeps_rules(kernel, constants) and self.fits(kernel, constants, limits)

    def work(self, kernel: KernelSpec, constants: MmaConstants, batch: int) -> Work:
        shape = MmaTiling(kernel, constants)
        blocks = self.geometry(kernel, constants, batch).grid
        stages = blocks * shape.passes * shape.steps
        x = (
            stages * constants.tile_batch * constants.tile_in * constants.tile_d * kernel.x_item_bytes
        )  # bytes that all passes read; a resident X is copied in only once
        w = stages * shape.w_bytes
        y = blocks * shape.passes * constants.tile_batch * constants.tile_out * constants.tile_d
        multiply_adds = y * shape.steps * constants.tile_in * kernel.arithmetic.products
        return Work(
            blocks,
            self.memory_bytes(kernel, constants, batch),
            round(shape.tiles_out // shape.passes * shape.x_bytes_moved(batch) + shape.y_bytes_moved(batch)) + w,
            x // shape.passes + w + x * constants.warps_out + w * constants.warps_batch,  # each warp reads its own part of both
            multiply_adds,
            stages / (constants.stages - 1),
            stages=stages,
            products=multiply_adds // (ROWS * COLUMNS * shape.k_step),
        )

    def words(self, kernel: KernelSpec, constants: MmaConstants) -> Mapping[str, Any]:
        shape = MmaTiling(kernel, constants)
        return {
            "wide_bytes": wide_bytes(shape),
            "operand": shape.operand,
            "of_inputs": "bytes" if kernel.has_bytes_in else "same",
            "tile_index": "block_index(), 0" if constants.resident else "block_index()",
            "variants": variants_of(shape),
            "picture": _picture(shape),
        }

    def constexprs(self, kernel: KernelSpec, constants: MmaConstants) -> list[Constexpr]:
        shape = MmaTiling(kernel, constants)
        always = [
            *pattern_constexprs(kernel),
            *epilogue_constexprs(kernel),
            Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per thread block"),
            Constexpr("TILE_OUT", constants.tile_out, "outputs k per thread block, for each of its j"),
            Constexpr("TILE_IN", constants.tile_in, "inputs l per stage"),
            Constexpr("TILE_D", constants.tile_d, "neighbouring j per thread block"),
            Constexpr("WARPS_BATCH", constants.warps_batch, "warps along the batch"),
            Constexpr("WARPS_OUT", constants.warps_out, "warps along the outputs"),
            Constexpr("WARP_D", shape.warp_d, "neighbouring j per warp"),
            Constexpr(
                "STAGES",
                constants.stages,
                "stages in shared memory: of X and W, or of W alone if X is resident",
            ),
            Constexpr("MIN_BLOCKS", constants.min_blocks, "thread blocks that must fit a multiprocessor"),
            Constexpr("THREADS", shape.threads, "threads per block"),
            Constexpr("X_VECTOR", shape.x_vector, "neighbours that one copy of X moves"),
            Constexpr("Y_VECTOR", shape.y_vector, "neighbours that one store of Y moves"),
            Constexpr("K_STEP", shape.k_step, "inputs of one matrix instruction"),
            Constexpr(
                "LANE_INPUTS",
                shape.lane_inputs,
                "inputs of one instruction that a lane holds per row of the batch",
            ),
            Constexpr("HALVES", shape.halves, "real numbers per element"),
            Constexpr(
                "WORD_INPUTS",
                shape.word_inputs,
                "inputs per word of an operand; of complex numbers, a word is half of one",
            ),
            Constexpr("COMPONENTS", shape.components, "parts into which an operand is split"),
            Constexpr(
                "PACKED_PARTS",
                shape.packed_parts,
                "parts in which weights are packed; 1 of 2: lanes split them",
            ),
            Constexpr("ROW_TILES", shape.row_tiles, "matrix instructions of a warp along its outputs, 16 each"),
            Constexpr(
                "COLUMN_TILES",
                shape.column_tiles,
                "matrix instructions of a warp along its rows of the batch, 8 each",
            ),
            Constexpr("SUPER_IN", shape.super_in, "inputs after which the lanes' order repeats"),
            Constexpr("SUPER_STEPS", shape.super_steps, "matrix instructions for SUPER_IN inputs"),
            Constexpr("RUN_OUT", shape.run_out, "neighbouring outputs per lane"),
            Constexpr("STEPS", shape.steps, "stages until all C inputs are read"),
            Constexpr("TILES_OUT", shape.tiles_out, "tiles along the outputs"),
            Constexpr("TILES_D", shape.tiles_d, "tiles along j"),
            Constexpr("X_LINES", shape.x_lines, "lines of the X tile"),
            Constexpr("X_RUN", shape.x_run, "elements per line"),
            Constexpr("X_PITCH", shape.x_pitch, "bytes of shared memory from one line to the next, free of bank conflicts"),
            Constexpr("PASSES", shape.passes, "tiles of outputs per block, computed sequentially"),
            Constexpr("X_STAGES", shape.x_stages, "stages of X in shared memory"),
            Constexpr("X_STAGE", shape.x_stage, "bytes from one stage of X to the next"),
            Constexpr("W_BASE", shape.w_base, "offset of the weights' stages, in bytes"),
            Constexpr("W_BYTES", shape.w_bytes, "bytes of packed weights per stage"),
            Constexpr("SHARED_BYTES", shape.shared_bytes, "bytes of shared memory per block"),
            Constexpr("PACK_THREADS", PACK_THREADS, "threads per block of the packing kernel"),
            given_scales(kernel),
            Constexpr("SCALES", shape.scales, "bytes of packed weights before their scales", "long long"),
        ]
        special = [Constexpr("VECTOR", shape.vector, "rows of the batch per 16-byte chunk")]
        if kernel.layout == "bsf":
            special = [
                Constexpr(
                    "GROUP_CHUNKS",
                    shape.group_chunks,
                    "neighbouring chunks that a lane reads per row of the batch",
                ),
                Constexpr("GROUP_INPUTS", shape.group_inputs, "inputs per group of chunks, each with its TILE_D j"),
                Constexpr(
                    "SUPER_GROUPS",
                    shape.super_groups,
                    "groups of chunks that a lane reads until its order repeats",
                ),
            ]
        if constants.promote:
            special.append(Constexpr("PROMOTE", constants.promote, "inputs after which sums leave the tensor cores"))
        return always + special
