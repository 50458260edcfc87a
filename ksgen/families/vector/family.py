"""The vector family fills a processor's vector registers with sums. It supports every pattern, batch and layout, and
all factors of a layer in one launch.

Decides the tiles of `vector.cl.j2`, which docs/kernels/vector.md describes. Never renders, compiles or runs. Weights
are packed as for each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from ksgen.families.base import Constexpr, Geometry, Limits, Work, named
from ksgen.families.chains import FactorPlace, own_of_factors, places, rule_of_tiles, transposes
from ksgen.families.rules import Rule, at_most, multiple, no_more, positive
from ksgen.families.signature import each_chains, layout_of
from ksgen.families.tiles import batch_constexpr, divide_up, epilogue_constexprs, given_scales, pattern_constexprs
from ksgen.families.vector.chain import AnyVectorConstants, ProcessorProduct, VectorChainConstants, VectorChainTiling
from ksgen.families.vector.cycles import multiply_cycles
from ksgen.families.vector.defaults import MANY, alike, multiplies_pairs, small_batch_sizes, spread_sizes, tile_sizes
from ksgen.families.vector.planes import LANE_RULES, lanes_of, round_up, tile_picture, variants_of
from ksgen.families.vector.shape import VectorConstants, VectorTiling, needs_panel
from ksgen.families.vector.sources import shared, source_constants
from ksgen.spec import KernelSpec
from ksgen.spec.precision import BF16

MOST_ELEMENTS = 2**31 - 1  # kernels count the elements of a tile in 32 bits
RULES: tuple[Rule[VectorConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    *LANE_RULES,
    positive("every constant but panel and streaming is at least 1", "panel", "streaming", "pairs"),
    Rule("panel is 0 or 1", lambda k, c: c.panel in (0, 1)),
    Rule("streaming is 0 or 1", lambda k, c: c.streaming in (0, 1)),
    at_most("a tile has at most 64 vectors", 64, lambda k, c: c.height * c.width),
    multiple("block", "a tile's rows, or of the lanes along the batch", lambda k, c: VectorTiling(k, c).unit),
    Rule(
        "along=outputs needs a d that divides a tile's lanes, or more j than lanes",
        lambda k, c: c.along == "batch" or k.pattern.d > c.lanes or c.width * c.lanes % k.pattern.d == 0,
    ),
    Rule("panel is 1 for exchanged inputs", lambda k, c: c.panel == 1 or not k.reads_exchanged),
    Rule(
        "panel is 1 along the batch, in bsl, and for single inputs below 32 bits",
        lambda k, c: c.panel == 1 or not (c.along == "batch" or needs_panel(k, c.pairs)),
    ),
    Rule("pairs is 0 or 1", lambda k, c: c.pairs in (0, 1)),
    Rule(
        "pairs is 0 but in bfloat16 with four lanes or more",
        lambda k, c: not c.pairs or (c.lanes > 2 and k.arithmetic.operand == BF16),
    ),
    Rule("pairs is 0 with weights in eight bits", lambda k, c: not (c.pairs and k.is_quantized)),
    no_more("parts", "the tiles of all outputs", lambda k, c: VectorTiling(k, c).columns),
    at_most(
        f"a tile's weights or inputs take at most {MOST_ELEMENTS} elements",
        MOST_ELEMENTS,
        lambda k, c: VectorTiling(k, c).tile_elements,
    ),
)


_CHAIN_RULES: tuple[Rule[VectorChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.is_chain),
    rule_of_tiles(RULES),
    Rule(
        "pairs is 0 if X is strided and tiles reads it in place",
        lambda k, c: (
            not c.pairs
            or k.stride == "dense"
            or all(own.panel for place, own in zip(places(k), c.parsed, strict=True) if place.at == 0)
        ),
    ),
    Rule("tiles has the same lanes for all factors", lambda k, c: len({each.lanes for each in c.parsed}) == 1),
    Rule(
        "tiles has lanes along the batch in the factor that transposes",
        lambda k, c: all(
            own.along == "batch" for place, own in zip(places(k), c.parsed, strict=True) if transposes(k, place)
        ),
    ),
)


class Vector(ProcessorProduct[AnyVectorConstants]):
    """Products by fused multiply-adds on a processor's vector units: of one factor, or of all factors of a layer."""

    name = "vector"
    rules: Mapping[Any, Any] = {VectorConstants: RULES, VectorChainConstants: _CHAIN_RULES}
    tilings: ClassVar[dict[Any, Any]] = dict.fromkeys(rules, VectorChainTiling)
    why = "vector registers full of sums: processors"

    def supports(self, kernel: KernelSpec, limits: Limits) -> bool:
        return limits.is_cpu and kernel.job != "gradient"

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AnyVectorConstants:
        return shared(kernel, limits, kernel.batch or alike(batch or MANY))

    def source_constants(self, kernel: KernelSpec, constants: AnyVectorConstants) -> AnyVectorConstants:
        return source_constants(kernel, constants)

    def packed_for(self, kernel: KernelSpec, constants: AnyVectorConstants) -> object:
        return [(each.along, each.lanes, each.height, each.width, each.pairs) for each in constants.parsed]

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyVectorConstants]:
        return (self._space_of_chain if kernel.is_chain else self._space_of_factor)(kernel, limits)

    def _space_of_chain(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyVectorConstants]:
        usual = self.default(kernel, limits)
        unit = VectorChainTiling(kernel, usual).unit
        for block in sorted({max(unit, rows // unit * unit) for rows in (16, 24, 32, 48, 64, 96, 128, 192, 256, 384)}):
            yield from (replace(usual, block=block, streaming=streaming) for streaming in (0, 1))

    def _space_of_factor(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyVectorConstants]:
        lanes = lanes_of(kernel, limits)
        planes = kernel.pattern.a * kernel.pattern.d
        pairs = (1, 0) if multiplies_pairs(kernel, limits) else (0,)
        for paired, along, panel, streaming, parts, block in product(
            pairs, ("outputs", "batch"), (0, 1), (0, 1), sorted({1, 2, 4, 8, 16, planes}), (24, 48, 96, 192, 384, 768)
        ):
            for height, width in dict.fromkeys(
                (*tile_sizes(kernel, limits), *small_batch_sizes(kernel, limits), *spread_sizes(kernel, limits))
            ):
                unit = height if along == "outputs" else lanes
                constants = VectorConstants(
                    along, lanes, height, width, divide_up(block, unit) * unit, parts, panel, streaming, paired
                )
                # only the default decides when to split
                if self.keeps_rules(kernel, constants) and not VectorTiling(kernel, constants).is_split:
                    yield constants

    def work(self, kernel: KernelSpec, constants: AnyVectorConstants, batch: int) -> Work:
        factors = [VectorTiling(*each) for each in own_of_factors(kernel, constants)]
        moved = kernel.bytes(batch) + self.output_reads(kernel, constants, batch)
        return Work(
            divide_up(batch, constants.block) * factors[0].constants.parts, moved, moved, 0,
            sum(multiply_adds(each, batch) for each in factors),
            cycles=sum(multiply_cycles(each, batch) for each in factors),
        )  # fmt: skip

    def pack_geometry(self, kernel: KernelSpec, constants: AnyVectorConstants) -> Geometry:
        return Geometry(0 if kernel.is_chain else VectorChainTiling(kernel, constants).factors[0].packed_columns, 1, 0)

    def reads_ties(self, kernel: KernelSpec, constants: AnyVectorConstants) -> bool:
        return not constants.pairs

    def packs_adjoint(self, kernel: KernelSpec) -> bool:
        # training needs that: it uses no quantized weights, and conjugates complex ones before they are packed
        is_trained = not kernel.is_quantized and not kernel.arithmetic.is_complex
        return is_trained and not kernel.is_chain and not kernel.tied

    def variables(self, kernel: KernelSpec, constants: AnyVectorConstants) -> dict[str, Any]:
        shape = VectorChainTiling(kernel, constants)
        last = shape.factors[-1]  # its activation is that of every last factor
        variants = variants_of(kernel, kernel.epilogue.activation)
        if last.constants.pairs:
            variants += ("pairs",)
        if kernel.between != "none":
            variants += ("activated", *(f"between_{each}" for each in variants_of(kernel, kernel.between)))
        is_shifted = kernel.layout == "bsl" and last.constants.along == "batch" and constants.streaming
        name = "A tile of factor {}" if kernel.is_chain else "A tile of Y"
        pictures = [
            tile_picture(name.format(number), each.constants, OF_ROWS, OF_LANES)
            for number, each in enumerate(shape.factors, 1)
        ]
        return {
            **last.variables,
            **_variables_of_packing(last),
            "shape": last,
            "packs_adjoint": self.packs_adjoint(kernel),
            "variants": variants,
            # expressions of the row of the batch up to which a copy fills what a tile reads
            "end_of_rows": "max(count, HEIGHT)",
            "end_of_columns": "chunk + CHUNK",
            "end_of_transposed": "(count + CHUNK - 1) / CHUNK * CHUNK",
            "shift": "streams && y_pitch % LINE == 0 ? (extent)((ulong)y / sizeof(stored) % LINE) : 0"
            if is_shifted
            else "0",
            "picture": "//\n".join(pictures),
            "factors": [self._factor(shape, number, place) for number, place in enumerate(places(kernel))],
        }

    def _factor(self, shape: VectorChainTiling, number: int, place: FactorPlace) -> dict[str, Any]:
        """Variables of one factor: its constants, its inputs and weights, and the destination of its outputs."""
        factor, is_chain = shape.factors[number], shape.kernel.is_chain
        is_first, has_pairs = place.at == 0, bool(factor.constants.pairs)
        between = "between" if has_pairs else "real"
        source = between if not is_first else "byte" if factor.kernel.has_bytes_in else "stored"
        target = "stored" if place.is_last else between

        def buffer(at: int) -> str:
            own = f"own + {shape.panels} + {at % 2} * (extent){shape.between}"
            return f"(GLOBAL between*)({own})" if has_pairs else own

        pitch_in = factor.kernel.pattern.in_features if factor.x_layout == "bsf" else shape.pitch
        pitch_out = factor.kernel.pattern.out_features if factor.kernel.layout == "bsf" else shape.pitch
        # lanes that copies of pairs of neighbouring l take from two vectors; if a vector does not hold whole l, inputs
        # are copied one l at a time
        lanes = factor.constants.lanes
        run = factor.run if lanes % factor.run == 0 else lanes
        firsts = [lane // run * 2 * run + lane % run for lane in range(lanes)]
        return {
            "shape": factor,
            "n": f"_{number + 1}" if is_chain else "",  # end of the names in its part of the source
            "constexprs": factor_constexprs(factor) if is_chain else [],  # else `constexprs` has them
            "rows": "panel" if factor.constants.panel else "in_place_pairs" if has_pairs else "in_place",
            "column_at": _column_at(factor),
            "firsts": ", ".join(map(str, firsts)),
            "seconds": ", ".join(str(first + run) for first in firsts),
            "source": source,
            "target": target,
            "kept": "lanes" if target == "real" else "outputs",
            "as_kept": "" if target == "real" else "as_outputs",
            "widen": {"byte": "widen_byte", "real": ""}.get(source, "widen"),
            # the last rows of X are copied if loads reach beyond them; an intermediate's buffer is padded instead
            "is_last_block": "last == batch" if is_first else "false",
            "from_there": f"{_from_first(shape.kernel, 'x')}, x_pitch"
            if is_first
            else f"{buffer(place.at - 1)}, {pitch_in}",
            "to_there": out_of_block(shape.kernel, place.chain)
            if place.is_last
            else f"{buffer(place.at)}, {pitch_out}, 0, 0, 0, false",
        }

    def constexprs(self, kernel: KernelSpec, constants: AnyVectorConstants) -> list[Constexpr]:
        shape = VectorChainTiling(kernel, constants)
        return [
            *([] if kernel.is_chain else factor_constexprs(shape.factors[0])),
            batch_constexpr(kernel),
            *epilogue_constexprs(kernel),
            named(shape.factors[0].constants, "LANES", "lanes per vector register"),
            Constexpr("MAY_STREAM", constants.streaming, "whether a launch may use streaming stores"),
            named(shape, "UNIT", "rows of the batch per unit; blocks are whole units"),
            named(shape, "SLOT", "elements of a work group's private buffer", "long long"),
        ]


def multiply_adds(shape: VectorTiling, batch: int) -> int:
    """Multiply-adds of a factor, with those of padding."""
    rows = round_up(batch, shape.constants.height if shape.is_along_outputs else shape.constants.lanes)
    return rows * shape.columns * shape.inputs * shape.column_outputs


# rows and lanes of a tile: for lanes along the outputs, and along the batch
OF_ROWS, OF_LANES = ("rows s of the batch", "outputs k"), ("outputs (k, j)", "rows s of the batch")


def _variables_of_packing(shape: VectorTiling) -> dict[str, Any]:
    """Template variables of weights: their types, the places of tied ones, and the lanes of those that are paired."""
    kernel, pairs, is_tied = shape.kernel, shape.constants.pairs, "d" in shape.kernel.tie
    value = {1: "uchar", 2: "ushort"}.get(shape.weight_bytes, "")
    d, lanes = kernel.pattern.d, shape.constants.lanes
    words = [lane // d * d + lane % d // 2 for lane in range(lanes)]
    return {
        "weight": value if kernel.is_quantized else "real",  # type of a packed weight
        "given": value if kernel.is_quantized else "stored",  # type of a weight before it is packed
        "one_weight": "one_value" if kernel.is_quantized else "one_stored_input",
        "packed_planes": "1" if is_tied else "PLANES_J",
        "packed_lanes": "1" if shape.is_broadcast else "LANES",
        "given_d": "1" if is_tied else "D",
        "given_j": "0" if is_tied else "min(j, D - 1)",
        # type of the weights that packing transposes in squares; empty if it takes each alone
        "squares_of": ("real" if pairs else "stored") if shape.square else "",
        # function that pairs them for each j; empty if they are pairs already
        "pair_up": "pair_up" if pairs and d > 1 else "",
        # lanes of two neighbouring j of inputs 2l and 2l + 1, and then those of each j
        "words_of_firsts": ", ".join(map(str, words)),
        "words_of_seconds": ", ".join(str(word + d // 2) for word in words),
        "even_and_odd": ", ".join(str(lane + lane % 2 * lanes) for lane in range(lanes)),
    }


def _column_at(shape: VectorTiling) -> str:
    """Offset of a tile's packed weights, which planes share if they are tied."""
    tie, planes = shape.kernel.tie, "PLANES_J" if shape.is_along_outputs else "D"
    column = f"current % ({planes} * TILES)" if tie == "a" else "current % TILES"
    column = f"current / ({planes} * TILES) * TILES + {column}" if tie == "d" else column
    return f"{f'({column})' if tie else 'current'} * (extent)COLUMN"


def out_of_block(kernel: KernelSpec, chain: int) -> str:
    """Expressions for the fields of the source's `Out`: a chain's outputs for a block, and what is added."""
    y, bias, residual = (each_chains(kernel, operand)[chain] for operand in ("y", "bias", "residual"))
    added = f"{_from_first(kernel, residual)}, {residual}_pitch" if kernel.epilogue.residual else "0, 0"
    return f"{_from_first(kernel, y)}, {y}_pitch, {bias if kernel.epilogue.bias else '0'}, {added}, streams"


def _from_first(kernel: KernelSpec, array: str) -> str:
    """Expression for the first element of a block of the batch."""
    pitch = f" * {array}_pitch" if layout_of(kernel, array) == "bsf" else ""
    return f"{array} + first{pitch}"


def factor_constexprs(shape: VectorTiling) -> list[Constexpr]:
    """Constants of a factor. A source states only those that it uses."""
    kernel, constants, ahead = shape.kernel, shape.constants, shape.ahead
    values = "values" if kernel.is_quantized else "elements"
    return [
        *(constant for constant in pattern_constexprs(kernel) if constant.name != "BATCH"),
        Constexpr("IS_PLAIN", not kernel.epilogue.words, "whether sums are stored unchanged"),
        named(shape, "INPUTS", "pairs of l per sum" if constants.pairs else "inputs l per sum"),
        named(shape, "TOGETHER", "inputs l that a lane multiplies at a time"),
        named(constants, "HEIGHT", f"{'rows of the batch' if shape.is_along_outputs else 'outputs'} per tile"),
        named(constants, "WIDTH", "vectors per row of a tile"),
        named(shape, "TILES", "tiles that share their inputs"),
        named(shape, "COLUMNS", "tiles of all outputs"),
        named(shape, "COLUMN", f"{values} from one tile's packed weights to the next"),
        Constexpr("SCALES", shape.scales_offset, "values of a tile's packed weights before their scales"),
        given_scales(kernel),
        Constexpr(
            "WIDENED", shape.widened_offset, "offset of a tile's widened weights in the private buffer", "long long"
        ),
        named(shape, "X_STEP", "elements from one l to the next"),
        Constexpr("AHEAD_LINES", ahead.lines, "cache lines of the next inputs that a tile prefetches"),
        Constexpr("AHEAD_RUN", ahead.run, "prefetched lines per row"),
        Constexpr("AHEAD_APART", ahead.apart, "elements from one prefetched line to the next"),
        Constexpr("AHEAD_STEP", ahead.step, "inputs that are multiplied between two prefetches"),
        Constexpr("AHEAD_EACH", ahead.each, "lines per prefetch"),
        named(shape, "WAITS", "whether a tile's outputs wait, and are stored while the next tile is multiplied"),
        Constexpr(
            "WAITING", shape.waiting_offset, "offset of a tile's waiting outputs in the private buffer", "long long"
        ),
        named(shape, "WAITING_STEP", "inputs that are multiplied between two stores of waiting outputs"),
        named(shape, "WAITING_EACH", "vectors per store"),
        # of lanes along the outputs
        named(shape, "PLANES", "planes of outputs that share their inputs: one i with neighbouring j"),
        named(shape, "PERIOD", "vectors of a tile after which the inputs repeat"),
        named(shape, "RUN", "neighbouring j per plane"),
        named(shape, "PIECE", "neighbouring inputs that are contiguous in x"),
        named(shape, "PLANES_J", "planes per i"),
        named(shape, "PACK_INPUTS", "inputs whose packed weights are written together, in the cache"),
        named(shape, "PACK_RUN", "neighbouring outputs of a tile whose weights are neighbours too"),
        named(shape, "SQUARE", "inputs l, or pairs, whose weights packing transposes together; 0: it takes each alone"),
        named(shape, "STEP_OUT", "features from one vector of a tile to the next"),
        named(shape, "X_ROW", "elements from one row of the batch to the next"),
        named(shape, "COLUMNS_AT_ONCE", "columns that are multiplied with a tile's rows before the next rows"),
        named(shape, "REACHES", "whether vectors of inputs reach beyond a row's end: the last block's are copied"),
        # of lanes along the batch
        Constexpr("CHUNK", shape.tile_lanes, "rows of the batch whose inputs are copied together"),
        named(shape, "J_STEP", "transposed inputs from one j to the next; if one, those of one l are neighbours"),
        named(shape, "MATRICES", "(i, j) of a plane, whose inputs are copied together"),
        named(shape, "RUN_IN", "inputs of a plane that are contiguous in x"),
        Constexpr("SCOPE", shape.scope if shape.transposes else 1, "blocks on the diagonal per plane"),
        named(shape, "PLANE_COLUMNS", "tiles per plane"),
        named(shape, "COLUMN_UNIT", "tiles that one work group takes together"),
        named(shape, "IS_SPLIT", "whether work groups take parts of a plane, and store outputs one by one"),
        Constexpr("TRANSPOSED", shape.transposed_offset, "offset of a chunk's outputs in the private buffer"),
    ]
