"""The amx family: a processor's matrix tiles, for every pattern, batch and layout, and for all factors of a layer in
one launch.

Decides the tiles of `amx.cl.j2`; its design is docs/kernels/amx.md. Never renders, compiles or runs. Weights are packed
as for each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from ksgen.families.amx.chain import DOT_MULTIPLY_ADDS, AmxChainConstants, AmxChainTiling, dots, multiply_cycles
from ksgen.families.amx.defaults import BLOCKS, default, least_of, of_block, reads_in_place
from ksgen.families.amx.shape import (
    AHEAD_INPUTS,
    INPUTS,
    LANES,
    LINE_BYTES,
    ON_TILES,
    PAIR,
    TILE_ITEMS,
    AmxConstants,
    AmxTiling,
    are_timed,
    has_tiles_for,
    intensity,
)
from ksgen.families.base import Constexpr, Geometry, Limits, Work, named
from ksgen.families.chains import rule_of_tiles
from ksgen.families.rules import Rule, no_more, positive
from ksgen.families.tiles import batch_constexpr, divide_up, epilogue_constexprs, pattern_constexprs, row_constexprs
from ksgen.families.vector.chain import ProcessorProduct
from ksgen.families.vector.defaults import MANY, alike
from ksgen.families.vector.planes import round_up, variants_of
from ksgen.spec import KernelSpec

AnyAmxConstants = AmxConstants | AmxChainConstants


RULES: tuple[Rule[AmxConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    ON_TILES,
    positive("every constant but panel and streaming is at least 1", "panel", "streaming"),
    Rule("panel is 0, 1 or 2", lambda k, c: c.panel in (0, 1, 2)),
    Rule("streaming is 0 or 1", lambda k, c: c.streaming in (0, 1)),
    no_more("depth", "the tiles along the inputs", lambda k, c: AmxTiling(k, c).steps),
    Rule("block is a multiple of 32", lambda k, c: c.block % PAIR == 0),
    Rule("outputs is a multiple of 32", lambda k, c: c.outputs % PAIR == 0),
    Rule(
        "panel is 1 or 2, except in bsf for 16-bit types, one interleaved matrix, and 32 inputs or more",
        lambda k, c: c.panel >= 1 or reads_in_place(k),
    ),
    no_more("parts", "the groups of outputs", lambda k, c: AmxTiling(k, c).columns),
)


def _is_one_layer(kernel: KernelSpec) -> bool:
    return not kernel.is_group and kernel.out_layout is None and not kernel.is_strided


_CHAIN_RULES: tuple[Rule[AmxChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.is_chain),
    Rule("job is that of one layer, of dense arrays in one layout", lambda k, c: _is_one_layer(k)),
    rule_of_tiles(RULES),
)


# rows of the batch up to which tiles are no default unless the precision names `amx`, and up to which they need more
# multiply-adds per input or output
FEW_ROWS, SOME_ROWS = 4, 256
INTENSITY, INTENSITY_OF_MANY = 32, 16
INTENSITY_OF_EXCHANGED = 48  # in batch-size-first, if features are exchanged: 26 and 32 lost, 51 won


class Amx(ProcessorProduct[AnyAmxConstants]):
    """Products of matrix tiles on a processor: of one factor, or of all factors of a layer."""

    name = "amx"
    rules: Mapping[Any, Any] = {AmxConstants: RULES, AmxChainConstants: _CHAIN_RULES}
    tilings: ClassVar[dict[Any, Any]] = dict.fromkeys(rules, AmxChainTiling)
    why = "matrix tiles, of one layer of dense arrays in one layout: processors that have them"

    def supports(self, kernel: KernelSpec, limits: Limits) -> bool:
        is_able = kernel.job != "gradient" and not kernel.is_quantized
        return is_able and _is_one_layer(kernel) and has_tiles_for(kernel, limits)

    def is_default(self, kernel: KernelSpec, batch: int) -> bool:
        """Whether tiles were timed, and are faster than vectors at a batch.

        Vectors are faster for a few rows, because a tile has 16. They are also faster with few multiply-adds per
        element, because tiles copy and store elements more slowly. Exchanged elements of rows are the slowest.
        """
        least = INTENSITY if batch <= SOME_ROWS else INTENSITY_OF_MANY
        if kernel.is_exchanged and kernel.layout == "bsf":
            least = INTENSITY_OF_EXCHANGED
        return batch > FEW_ROWS and are_timed(kernel) and intensity(kernel) >= least

    def takes(self, kernel: KernelSpec, batch: int, aligned: bool) -> bool:
        return not kernel.is_strided

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AnyAmxConstants:
        return default(kernel, limits, kernel.batch or alike(batch or MANY))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyAmxConstants]:
        return iter(dict.fromkeys(_space_of_chain(kernel))) if kernel.is_chain else self._space_of_factor(kernel)

    def _space_of_factor(self, kernel: KernelSpec) -> Iterator[AnyAmxConstants]:
        least = least_of(kernel)
        depths = sorted({divide_up(least.steps, divide_up(least.steps, depth)) for depth in (2, 4, 6, 8)})
        for block, outputs, parts, panel, streaming, depth in product(
            (32, 64, 96, 128), (32, 64, 128, 256), sorted({1, 4, 16, least.planes}), (0, 1, 2), (0, 1), depths
        ):
            constants = AmxConstants(block, outputs, parts, panel, streaming, depth)
            if outputs - PAIR < kernel.pattern.b and self.keeps_rules(kernel, constants):
                yield constants

    def work(self, kernel: KernelSpec, constants: AnyAmxConstants, batch: int) -> Work:
        shape = AmxChainTiling(kernel, constants)
        weights = sum(pattern.weight_count for pattern in kernel.factors) * kernel.item_bytes
        moved = kernel.bytes(batch) - weights + shape.packed_bytes + self.output_reads(kernel, constants, batch)
        products = sum(dots(factor, batch) for factor in shape.factors)
        return Work(
            divide_up(batch, constants.block) * shape.parts, moved, moved, 0, products * DOT_MULTIPLY_ADDS,
            cycles=multiply_cycles(shape, batch),
        )  # fmt: skip

    def packed_for(self, kernel: KernelSpec, constants: AnyAmxConstants) -> object:
        # packed weights do not depend on constants, so that every batch and every chain uses one copy
        return None

    def packs_adjoint(self, kernel: KernelSpec) -> bool:
        return not kernel.is_chain

    def pack_geometry(self, kernel: KernelSpec, constants: AnyAmxConstants) -> Geometry:
        return Geometry(0 if kernel.is_chain else AmxChainTiling(kernel, constants).factors[0].packed_tiles, 1, 0)

    def variables(self, kernel: KernelSpec, constants: AnyAmxConstants) -> dict[str, Any]:
        shape = AmxChainTiling(kernel, constants)
        last = shape.factors[-1]
        rows, columns = ("rows s of the batch", "outputs k") if last.is_bsf else ("outputs k", "rows s of the batch")
        of_lanes = () if kernel.is_chain else variants_of(kernel, kernel.epilogue.activation)
        of_tiles = (*(("split",) if last.is_split else ()), *(("tiles",) if kernel.dtype == "bfloat16" else ()))
        return {
            "accumulator": "lanes",
            "lanes": LANES,
            "shape": last,
            "operand": last.products.operand.name,
            "added": _added(last.kernel),
            "variants": (*of_lanes, *of_tiles),
            "picture": last.picture("all j of a plane sequentially", rows, columns),
            "factors": [self._factor(shape, number) for number in range(len(shape.factors))],
        }

    def _factor(self, shape: AmxChainTiling, number: int) -> dict[str, Any]:
        """Template variables of a chain's factor: constants and snippets, the places of its inputs and outputs."""
        factor, is_last = shape.factors[number], number + 1 == len(shape.factors)
        activation = factor.kernel.epilogue.activation
        pitch = "0" if factor.is_bsf else str(shape.pitch)  # in batch-size-first, constants of the source are the pitch
        places = [f"(GLOBAL stored*)(own + {shape.panels + each * shape.between})" for each in range(2)]
        return {
            "shape": factor,
            "constexprs": factor_constexprs(factor),
            "added": _added(factor.kernel),
            "variants": (*variants_of(factor.kernel, activation), activation),
            "from_there": f"{places[(number - 1) % 2]}, {pitch}" if number else "x + first * X_BATCH_STRIDE, batch",
            "to_there": "y + first * Y_BATCH_STRIDE, batch" if is_last else f"{places[number % 2]}, {pitch}",
        }

    def constexprs(self, kernel: KernelSpec, constants: AnyAmxConstants) -> list[Constexpr]:
        shape = AmxChainTiling(kernel, constants)
        return [
            *([] if kernel.is_chain else factor_constexprs(shape.factors[0])),
            batch_constexpr(kernel),
            Constexpr("LANES", LANES, "lanes of a vector, and sums in a row of a tile"),
            named(constants, "BLOCK", "rows of the batch that a work group takes at a time, at most"),
            Constexpr("UNIT", PAIR, "rows of the batch per unit; blocks are whole units"),
            *row_constexprs(kernel),
            named(shape, "SLOT", "elements of a work group's private buffer", "long long"),
        ]


def _space_of_chain(kernel: KernelSpec) -> Iterator[AmxChainConstants]:
    """Yield constants with every block and kind of stores, and several limits on each factor's outputs and depth."""
    for block in BLOCKS:
        best = of_block(kernel, block, kernel.batch or MANY).parsed
        for outputs, depth in product((64, 128, 256), (2, 4, 8)):
            limited = [replace(each, outputs=min(each.outputs, outputs), depth=min(each.depth, depth)) for each in best]
            for streaming in (0, 1):
                yield AmxChainConstants.of(kernel, block, limited, streaming)
                yield AmxChainConstants.of(kernel, block, [replace(each, panel=1) for each in limited], streaming)


def _added(kernel: KernelSpec) -> str:
    """Arguments for the bias, and for the residual of a block's first row."""
    bias = "bias" if kernel.epilogue.bias else "0"
    residual = "residual + first * Y_BATCH_STRIDE" if kernel.epilogue.residual else "0"
    return f"{bias}, {residual}"


def factor_constexprs(shape: AmxTiling) -> list[Constexpr]:
    """Constants of a factor."""
    kernel, constants, pattern = shape.kernel, shape.constants, shape.kernel.pattern
    in_place = pattern.c // INPUTS if not constants.panel else shape.steps
    return [
        *(each for each in pattern_constexprs(kernel) if each.name != "BATCH"),
        *epilogue_constexprs(kernel),
        Constexpr("IS_STREAMING", constants.streaming, "whether outputs use streaming stores"),
        named(constants, "OUTPUTS", "outputs per j whose sums wait until the sums of all j are complete"),
        named(constants, "PARTS", "parts of a block's groups of outputs, one per work group"),
        named(shape, "PLANES", "planes of inputs, which are copied sequentially"),
        named(shape, "PLANES_J", "planes per i"),
        named(shape, "RUN", "neighbouring j per plane"),
        Constexpr("PLACES_J", divide_up(shape.run, LANES), "groups of sixteen j, which are interleaved together"),
        named(shape, "GROUPS", "groups of a plane's outputs"),
        named(shape, "TILES", "tiles of the outputs of one (i, j)"),
        named(shape, "STEPS", "steps along the inputs, of 32 inputs each"),
        named(constants, "DEPTH", "steps whose inputs stay in the L1 cache for all outputs of a group"),
        named(shape, "CHUNKS", "chunks of DEPTH steps"),
        named(shape, "SHARES", "shares of a step's products, after each of which vector instructions run"),
        Constexpr(
            "FETCHED_SUMS",
            divide_up(PAIR, shape.constants.depth * shape.shares),
            "rows of the next sums that are prefetched with each share of a step",
        ),
        named(shape, "INPUTS_PASS", "whether a block's inputs of DEPTH steps exceed the L1 cache"),
        named(shape, "WEIGHTS_PASS", "whether the weights of two tiles exceed the L1 cache"),
        Constexpr(
            "STEPS_IN_PLACE", in_place, "steps whose rows of X are read in place, or all steps if inputs are copied"
        ),
        Constexpr("COPIED_FROM", 0 if constants.panel else in_place * INPUTS, "first input that is copied"),
        Constexpr("IS_IN_PLACE", not constants.panel, "whether whole tiles of X are read in place"),
        Constexpr("COMPONENTS", shape.products.parts, "16-bit operands per element"),
        Constexpr("TILE_ITEMS", TILE_ITEMS, "operands per tile"),
        named(shape, "STEP_ITEMS", "operands from one step's tiles to the next"),
        named(shape, "SQUARE", "vectors that are interleaved with each other"),
        named(shape, "SQUARES", "two by two tiles of a group"),
        named(shape, "VECTORS", "vectors of sums that are stored together"),
        named(shape, "LINE_VECTORS", "vectors of sums that become a cache line of outputs"),
        Constexpr(
            "SPAN",
            LANES if shape.is_bsf and shape.square > 1 else LANES * shape.line_vectors,
            "elements of a row of sums in VECTORS vectors, per j",
        ),
        Constexpr("J_SUMS", shape.j_sums, "sums from one j to the next"),
        Constexpr(
            "K_SUMS",
            PAIR * (constants.block if shape.is_bsf else 1),
            "sums from 32 elements of a row of sums to the next 32",
        ),
        Constexpr("ROW_SUMS", shape.sums_row, "sums from one row to the next"),
        Constexpr(
            "Y_COLUMN", pattern.d if shape.is_bsf else 1, "elements of Y from one element of a row of sums to the next"
        ),
        named(shape, "UNITS", "multiples of 32 elements of a row of sums that are stored with each share of a step"),
        Constexpr("ALL_UNITS", 2**31 - 1, "no limit: all units are stored"),
        Constexpr(
            "PANELS",
            max(1, constants.panel),
            "panels of copied inputs; 2: the next plane is copied while this one is multiplied",
        ),
        Constexpr("PANEL", round_up(shape.panel, LINE_BYTES), "elements per panel", "long long"),
        Constexpr("J_ITEMS", shape.j_items, "operands of a panel from one j to the next", "long long"),
        named(
            shape,
            "COPIED",
            f"{'inputs of one row' if shape.is_bsf else 'rows of one input'} of the batch that are copied at a time",
        ),
        Constexpr("INPUT_GROUPS", shape.halves, "groups of 16 inputs that are copied into a panel together"),
        named(shape, "COPIED_ROWS", "rows that are copied at a time"),
        Constexpr(
            "COPY_UNITS",
            divide_up(shape.copies * shape.copy_every, shape.plane_shares),
            "multiples of COPIED that are copied together while tiles are multiplied",
        ),
        named(shape, "COPY_EVERY", "shares of steps per copy, if panels alternate"),
        named(shape, "COPY_LINES", "cache lines of later inputs that are prefetched with each copy"),
        Constexpr("AHEAD_INPUTS", AHEAD_INPUTS, "inputs between a copied row of one input and the prefetched one"),
        Constexpr("SUMS", shape.panels, "offset of waiting sums in the private buffer", "long long"),
        Constexpr(
            "GROUP_SUMS", round_up(shape.sums, LINE_BYTES), "elements from one group's sums to the next", "long long"
        ),
        named(shape, "SUMS_ROW", "elements from one row of sums to the next", "long long"),
        named(shape, "AHEAD_LINES", "cache lines of the next inputs that are prefetched with two by two tiles"),
        named(shape, "AHEAD_RUN", "prefetched lines per row"),
        named(shape, "AHEAD_APART", "elements from one prefetched line of a row to the next"),
        named(shape, "K_RUN", "neighbouring outputs k that are stored together"),
        named(shape, "IN_RUN", "neighbouring inputs that are copied together"),
        named(pattern, "IN_FEATURES", "inputs per row of the batch"),
        named(pattern, "OUT_FEATURES", "outputs per row of the batch"),
        named(shape, "X_ROW", "elements of X from one row of the batch to the next, in batch-size-first"),
        named(shape, "Y_ROW", "elements of Y from one row of the batch to the next, in batch-size-first"),
    ]
