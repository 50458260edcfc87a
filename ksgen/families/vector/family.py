"""The vector family: a processor's vector registers full of sums, for every pattern, batch and layout.

Decides the tiles of `vector.cl.j2`; its design is docs/kernels.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.rules import Rule
from ksgen.families.shaped import Shaped
from ksgen.families.signature import PRODUCT_WITH_WORKSPACE, each_chains, layout_of
from ksgen.families.tiles import divide_up, epilogue_constexprs, given_scales, pattern_constexprs
from ksgen.families.vector.cycles import multiply_cycles
from ksgen.families.vector.defaults import default, few_sizes, multiplies_pairs, spread_sizes, tile_sizes
from ksgen.families.vector.planes import lanes_of, tile_picture
from ksgen.families.vector.shape import VectorConstants, VectorTiling, needs_panel
from ksgen.spec import KernelSpec
from ksgen.spec.precision import BF16

GROUPS_AT_ONCE = 8  # per core, so that a late one leaves its neighbours' work to others
LANES = (4, 8, 16)


RULES: tuple[Rule[VectorConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    Rule("along is outputs or batch", lambda k, c: c.along in ("outputs", "batch")),
    Rule("lanes is 2, 4, 8 or 16", lambda k, c: c.lanes in (2, *LANES)),
    Rule("lanes is at most 8 in complex numbers", lambda k, c: c.lanes <= 8 or not k.arithmetic.is_complex),
    Rule("every constant but panel and past is at least 1", lambda k, c: min(c.height, c.width, c.block, c.parts) >= 1),
    Rule("panel is 0 or 1", lambda k, c: c.panel in (0, 1)),
    Rule("past is 0 or 1", lambda k, c: c.past in (0, 1)),
    Rule("a tile has at most 64 vectors", lambda k, c: c.height * c.width <= 64, lambda k, c: c.height * c.width),
    Rule(
        "block is a multiple of a tile's rows, or of the lanes along the batch",
        lambda k, c: c.block % VectorTiling(k, c).unit == 0,
        lambda k, c: VectorTiling(k, c).unit,
    ),
    Rule(
        "along=outputs needs a d that divides a tile's lanes, or more j than lanes",
        lambda k, c: c.along == "batch" or k.pattern.d > c.lanes or c.width * c.lanes % k.pattern.d == 0,
    ),
    Rule(
        "panel is 1 along the batch, and where inputs are not reals in rows",
        lambda k, c: c.panel == 1 or not (c.along == "batch" or needs_panel(k, c.pairs)),
    ),
    Rule("pairs is 0 or 1", lambda k, c: c.pairs in (0, 1)),
    Rule("pairs is 0 but in bfloat16 with four lanes or more", lambda k, c: not c.pairs or (c.lanes > 2 and k.arithmetic.operand == BF16)),
    Rule("pairs is 0 with weights in eight bits", lambda k, c: not (c.pairs and k.is_quantized)),
    Rule(
        "parts is at most the tiles of all outputs",
        lambda k, c: c.parts <= VectorTiling(k, c).columns,
        lambda k, c: VectorTiling(k, c).columns,
    ),
)


class Vector(Shaped[VectorConstants]):
    """Products by fused multiply-adds on a processor's vector units."""

    name = "vector"
    signature = PRODUCT_WITH_WORKSPACE
    constants_type = VectorConstants
    listed = RULES
    why = "vector registers full of sums: processors"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return limits.is_cpu and kernel.job == "multiply"

    def shape(self, kernel: KernelSpec, constants: VectorConstants) -> VectorTiling:
        return VectorTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> VectorConstants:
        return default(kernel, limits, batch)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[VectorConstants]:
        lanes = lanes_of(kernel, limits)
        planes = kernel.pattern.a * kernel.pattern.d
        pairs = (1, 0) if multiplies_pairs(kernel, limits) else (0,)
        for both, along, panel, past, parts, block in product(
            pairs, ("outputs", "batch"), (0, 1), (0, 1), sorted({1, 2, 4, 8, 16, planes}), (24, 48, 96, 192, 384, 768)
        ):
            for height, width in dict.fromkeys((*tile_sizes(kernel, limits), *few_sizes(kernel, limits), *spread_sizes(kernel, limits))):
                unit = height if along == "outputs" else lanes
                constants = VectorConstants(along, lanes, height, width, divide_up(block, unit) * unit, parts, panel, past, both)
                # only the default decides when to split
                if self.keeps_rules(kernel, constants) and not VectorTiling(kernel, constants).is_split:
                    yield constants

    def packed_bytes(self, kernel: KernelSpec, constants: VectorConstants) -> int:
        return VectorTiling(kernel, constants).packed_bytes

    def geometry(self, kernel: KernelSpec, constants: VectorConstants, batch: int) -> Geometry:
        shape = VectorTiling(kernel, constants)
        grid = divide_up(batch, constants.block) * constants.parts
        return Geometry(grid, 1, 0, at_once=GROUPS_AT_ONCE, group_bytes=shape.slot * shape.real_bytes)

    def work(self, kernel: KernelSpec, constants: VectorConstants, batch: int) -> Work:
        shape = VectorTiling(kernel, constants)
        entries = (
            divide_up(batch, constants.height) * constants.height
            if shape.is_along_outputs
            else divide_up(batch, constants.lanes) * constants.lanes
        )
        lanes = shape.columns * shape.column_weights
        moved = kernel.bytes(batch) + output_reads(kernel, constants.past, batch)
        return Work(
            divide_up(batch, constants.block) * constants.parts, moved, moved, 0, entries * lanes,
            cycles=multiply_cycles(shape, batch),
        )  # fmt: skip

    def pack_geometry(self, kernel: KernelSpec, constants: VectorConstants) -> Geometry:
        return Geometry(VectorTiling(kernel, constants).columns, 1, 0)

    def words(self, kernel: KernelSpec, constants: VectorConstants) -> Mapping[str, Any]:
        is_shifted = kernel.layout == "bsl" and constants.along == "batch" and bool(constants.past)
        return factor_words(VectorTiling(kernel, constants)) | {
            "n": "",
            "source": "byte" if kernel.has_bytes_in else "stored",
            "target": "stored",
            "kept": "outputs",
            "as_kept": "as_outputs",
            "widen": "widen_byte" if kernel.has_bytes_in else "widen",
            "x_of_block": x_of_block(kernel),
            "out_of_block": out_of_block(kernel),
            "shift": "y_pitch % LINE == 0 ? (extent)((ulong)y / sizeof(stored) % LINE) : 0" if is_shifted else "0",
            "picture": tile_picture("A tile of Y", constants, OF_ROWS, OF_LANES),
        }

    def constexprs(self, kernel: KernelSpec, constants: VectorConstants) -> list[Constexpr]:
        shape = VectorTiling(kernel, constants)
        return [
            *factor_constexprs(shape),
            Constexpr("BATCH", kernel.batch or 0, "rows of the batch, index s; 0: known at the call", "long long"),
            *epilogue_constexprs(kernel),
            Constexpr("LANES", constants.lanes, "lanes per vector register"),
            Constexpr("IS_PAST", constants.past, "whether outputs leave by streaming stores"),
            Constexpr("BLOCK", constants.block, "rows of the batch that a work group takes at a time, at most"),
            Constexpr("UNIT", shape.step, "rows of the batch of which blocks are whole multiples"),
            Constexpr("SLOT", shape.slot, "elements of a work group's private buffer", "long long"),
        ]


# rows and lanes of a tile: for lanes along the outputs, and along the batch
OF_ROWS, OF_LANES = ("rows s of the batch", "outputs k"), ("outputs (k, j)", "rows s of the batch")


def output_reads(kernel: KernelSpec, past: int, batch: int) -> int:
    """Bytes that stores into the caches read first: the lines that they replace."""
    return 0 if past else batch * sum(chain.out_features for chain in kernel.chains) * kernel.item_bytes


def factor_words(shape: VectorTiling) -> dict[str, Any]:
    """Variables of a factor's template, alone or in a chain."""
    value = {1: "uchar", 2: "ushort"}.get(shape.weight_bytes, "")
    return (
        shape.words
        | {
            "weight": value if shape.kernel.is_quantized else "real",  # type of a packed weight
            "given": value if shape.kernel.is_quantized else "stored",  # type of a weight before it is packed
            "one_weight": "one_value" if shape.kernel.is_quantized else "one_stored_input",
            "of_storage": "quantized" if shape.kernel.is_quantized else "same",
            "rows": "panel" if shape.constants.panel else "in_place_pairs" if shape.constants.pairs else "in_place",
            "variants": (*variants_of(shape, shape.kernel.epilogue.activation), *(("pairs",) if shape.constants.pairs else ())),
        }
        | (_words_of_pairs(shape) if shape.constants.pairs else {})
    )


def variants_of(shape: VectorTiling, activation: str) -> tuple[str, ...]:
    """Names of the variants of snippets for an activation that vectors have of their own, if they do."""
    own = {"relu": ("relu_of_lanes",), "gelu": ("gelu_of_lanes",) if shape.real_bytes == 4 else ()}  # whose erf is vectors' own
    return own.get(activation, ())


def _words_of_pairs(shape: VectorTiling) -> dict[str, str]:
    """Template variables for copies of inputs as pairs: for a short d, the lanes that a vector of pairs takes of two
    neighbouring vectors."""
    lanes = shape.constants.lanes
    # else a vector does not hold whole l: inputs are copied one l at a time
    run = shape.run if lanes % shape.run == 0 else lanes
    firsts = [lane // run * 2 * run + lane % run for lane in range(lanes)]
    return {
        "of_pairs": "_pairs",
        "firsts": ", ".join(map(str, firsts)),
        "seconds": ", ".join(str(first + run) for first in firsts),
    }


def x_of_block(kernel: KernelSpec) -> str:
    """Expression for the first input of a block of the batch."""
    return _from_first(kernel, "x")


def out_of_block(kernel: KernelSpec, chain: int = 0) -> str:
    """Expressions for the fields of the source's `Out`: the outputs of a chain for a block, and what is added to
    them."""
    y, bias, residual = (each_chains(kernel, operand)[chain] for operand in ("y", "bias", "residual"))
    added = f"{_from_first(kernel, residual)}, {residual}_pitch" if kernel.epilogue.residual else "0, 0"
    return f"{_from_first(kernel, y)}, {y}_pitch, {bias if kernel.epilogue.bias else '0'}, {added}"


def _from_first(kernel: KernelSpec, array: str) -> str:
    return f"{array} + first * {array}_pitch" if layout_of(kernel, "x" if array == "x" else "y") == "bsf" else f"{array} + first"


def factor_constexprs(shape: VectorTiling) -> list[Constexpr]:
    """Constants of a factor, alone or in a chain."""
    kernel, constants = shape.kernel, shape.constants
    pattern, ahead = kernel.pattern, shape.ahead
    values = "values" if kernel.is_quantized else "elements"
    always = [
        *(constant for constant in pattern_constexprs(kernel) if constant.name != "BATCH"),
        Constexpr("IS_PLAIN", not kernel.epilogue.words, "whether sums are stored unchanged"),
        Constexpr("INPUTS", shape.inputs, "pairs of l per sum" if constants.pairs else "inputs l per sum"),
        Constexpr("HEIGHT", constants.height, f"{'rows of the batch' if shape.is_along_outputs else 'outputs'} per tile"),
        Constexpr("WIDTH", constants.width, "vectors per row of a tile"),
        Constexpr("PARTS", constants.parts, "parts of a block's columns, one per work group"),
        Constexpr("TILES", shape.tiles, "tiles that share their inputs"),
        Constexpr("COLUMNS", shape.columns, "tiles of all outputs"),
        Constexpr("COLUMN", shape.column, f"{values} from one tile's packed weights to the next"),
        Constexpr("SCALES", shape.scales, "values of a tile's packed weights before their scales"),
        given_scales(kernel),
        Constexpr("WIDENED", shape.widened, "offset of a tile's widened weights in the private buffer", "long long"),
        Constexpr("X_STEP", shape.x_step, "elements from one l to the next"),
        Constexpr("AHEAD_LINES", ahead.lines, "cache lines of the next inputs that a tile prefetches"),
        Constexpr("AHEAD_RUN", ahead.run, "prefetched lines per row"),
        Constexpr("AHEAD_APART", ahead.apart, "elements from one prefetched line to the next"),
        Constexpr("AHEAD_STEP", ahead.step, "inputs that are multiplied between two prefetches"),
        Constexpr("AHEAD_EACH", ahead.each, "lines per prefetch"),
        Constexpr(
            "WAITS",
            shape.waits,
            "whether a tile's outputs wait, and are stored while the next tile is multiplied",
        ),
        Constexpr("WAITING", shape.waiting, "offset of a tile's waiting outputs in the private buffer", "long long"),
        Constexpr(
            "WAITING_STEP",
            shape.waiting_step,
            "inputs that are multiplied between two stores of waiting outputs",
        ),
        Constexpr("WAITING_EACH", shape.waiting_each, "vectors per store"),
    ]
    if shape.is_along_outputs:
        return [
            *always,
            Constexpr("PLANES", shape.planes, "planes of outputs that share their inputs: one i with neighbouring j"),
            Constexpr("PERIOD", shape.period, "vectors of a tile after which the inputs repeat"),
            Constexpr("RUN", shape.run, "neighbouring j per plane"),
            Constexpr("PLANES_J", shape.planes_j, "planes per i"),
            Constexpr("STEP_OUT", constants.lanes if shape.is_short else pattern.d, "features from one vector of a tile to the next"),
            Constexpr("X_ROW", shape.x_row, "elements from one row of the batch to the next"),
            Constexpr(
                "COLUMNS_AT_ONCE",
                shape.columns_at_once,
                "columns that are multiplied with a tile's rows before the next rows",
            ),
            Constexpr("REACHES", shape.reaches, "whether vectors of inputs reach beyond a row's end: the last block's are copied"),
        ]
    return [
        *always,
        Constexpr("CHUNK", shape.tile_lanes, "rows of the batch whose inputs are copied together"),
        Constexpr("SCOPE", shape.scope if shape.transposes else 1, "blocks on the diagonal per plane"),
        Constexpr("PLANE_COLUMNS", shape.plane_columns, "tiles per plane"),
        Constexpr("COLUMN_UNIT", shape.column_unit, "tiles that one work group takes together"),
        Constexpr("IS_SPLIT", shape.is_split, "whether work groups take parts of a plane, and store outputs one by one"),
        Constexpr("TRANSPOSED", shape.transposed if kernel.layout == "bsf" else 0, "offset of a chunk's outputs in the private buffer"),
    ]
