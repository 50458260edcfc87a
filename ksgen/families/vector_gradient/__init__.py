"""The gradient family for processors: the weights' gradient from vector registers full of sums, for every pattern, batch and layout.

Decides the tiles of `vector_gradient.cl.j2`; its design is docs/kernels.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from ksgen.families.base import Constexpr, Geometry, Limits, Pass, Work
from ksgen.families.rules import Rule
from ksgen.families.shaped import Shaped
from ksgen.families.signature import GRADIENT
from ksgen.families.tiles import divide_up, pattern_constexprs, row_constexprs
from ksgen.families.vector.planes import lanes_of, round_up, tile_picture
from ksgen.families.vector_gradient.cycles import gradient_cycles
from ksgen.families.vector_gradient.defaults import TASKS, default, multiplies_pairs, tile_sizes
from ksgen.families.vector_gradient.shape import VectorGradientConstants, VectorGradientTiling
from ksgen.spec import KernelSpec
from ksgen.spec.precision import BF16

__all__ = ["VectorGradient", "VectorGradientConstants", "VectorGradientTiling"]

LEAST_VECTORS = 8  # a tile of a search, where a pattern has as many

_RULES: tuple[Rule[VectorGradientConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    Rule("along is outputs or batch", lambda k, c: c.along in ("outputs", "batch")),
    Rule("lanes is 2, 4, 8 or 16", lambda k, c: c.lanes in (2, 4, 8, 16)),
    Rule("lanes is at most 8 in complex numbers", lambda k, c: c.lanes <= 8 or not k.arithmetic.is_complex),
    Rule(
        "every constant but pairs is at least 1",
        lambda k, c: all(v >= 1 for name, v in asdict(c).items() if name != "pairs" and not isinstance(v, str)),
    ),
    Rule("a tile has at most 64 vectors", lambda k, c: c.height * c.width <= 64, lambda k, c: c.height * c.width),
    Rule("height is at most c", lambda k, c: c.height <= k.pattern.c),
    Rule("width is at most b along the batch", lambda k, c: c.along == "outputs" or c.width <= k.pattern.b),
    Rule("block is a multiple of lanes along the batch", lambda k, c: c.along == "outputs" or c.block % c.lanes == 0),
    Rule("pairs is 0 or 1", lambda k, c: c.pairs in (0, 1)),
    Rule(
        "pairs is 0 but in bfloat16 with four lanes or more, and in batch-size-last with lanes along the outputs",
        lambda k, c: not c.pairs or (c.lanes > 2 and k.arithmetic.operand == BF16 and (k.layout == "bsf" or c.along == "batch")),
    ),
    Rule(
        "block is even with pairs, and along the batch a multiple of twice the lanes",
        lambda k, c: c.block % VectorGradientTiling(k, c).unit == 0,
    ),
    Rule(
        "along=outputs needs a d that divides the lanes, or more j than lanes",
        lambda k, c: c.along == "batch" or c.lanes % k.pattern.d == 0 or k.pattern.d > c.lanes,
    ),
    Rule(
        "pieces is at most the columns that work groups take apart",
        lambda k, c: c.pieces <= VectorGradientTiling(k, c).units,
        lambda k, c: VectorGradientTiling(k, c).units,
    ),
)


SHARED_OUT = [(parts, pieces) for parts, pieces in product((1, 4, 16), (1, 4, 16)) if parts * pieces == 16]  # among work groups


class VectorGradient(Shaped[VectorGradientConstants]):
    """Sums over the batch by fused multiply-adds on a processor's vector units."""

    name = "vector_gradient"
    signature = GRADIENT
    constants_type = VectorGradientConstants
    listed = _RULES
    why = "the weights' gradient from vector registers full of sums: processors"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return limits.is_cpu and kernel.job == "gradient"

    def shape(self, kernel: KernelSpec, constants: VectorGradientConstants) -> VectorGradientTiling:
        return VectorGradientTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> VectorGradientConstants:
        return default(kernel, limits, batch)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[VectorGradientConstants]:
        lanes = lanes_of(kernel, limits)
        for along in ("outputs", "batch"):
            sizes = tile_sizes(kernel, along, lanes, limits)
            least = min(LEAST_VECTORS, max(height * width for height, width in sizes))
            wide = [(height, width) for height, width in sizes if height * width >= least]
            pairs = (1, 0) if multiplies_pairs(kernel, limits, along) else (0,)
            for (height, width), block, (parts, pieces), paired in product(wide, (96, 192, 384), SHARED_OUT, pairs):
                constants = VectorGradientConstants(along, lanes, height, width, round_up(block, lanes), parts, pieces, paired)
                if self.keeps_rules(kernel, constants):
                    yield constants

    def packed_bytes(self, kernel: KernelSpec, constants: VectorGradientConstants) -> int:
        return VectorGradientTiling(kernel, constants).part_bytes * constants.parts

    def geometry(self, kernel: KernelSpec, constants: VectorGradientConstants, batch: int) -> Geometry:
        shape = VectorGradientTiling(kernel, constants)
        parts = shape.parts(batch)
        return Geometry(
            parts * constants.pieces, 1, 0, parts * shape.part_bytes, at_once=TASKS, group_bytes=shape.slot * shape.real_bytes,
            after=(Pass("sum", self.pack_geometry(kernel, constants)),),
        )  # fmt: skip

    def pack_geometry(self, kernel: KernelSpec, constants: VectorGradientConstants) -> Geometry:
        shape = VectorGradientTiling(kernel, constants)
        return Geometry(shape.columns * shape.rows, 1, 0)

    def work(self, kernel: KernelSpec, constants: VectorGradientConstants, batch: int) -> Work:
        shape = VectorGradientTiling(kernel, constants)
        parts = shape.parts(batch)
        tiles = shape.columns * shape.rows * constants.height * constants.width
        return Work(
            parts * constants.pieces,
            kernel.bytes(batch),
            kernel.bytes(batch) + 2 * divide_up(batch, constants.block) * shape.part_bytes,
            0,
            tiles * (batch * constants.lanes if shape.is_along_outputs else round_up(batch, constants.lanes)),
            cycles=gradient_cycles(shape, batch),
            passed_bytes=parts * shape.part_bytes,
        )

    def words(self, kernel: KernelSpec, constants: VectorGradientConstants) -> Mapping[str, Any]:
        picture = tile_picture("A tile of dW", constants, ("inputs l", "inputs l"), ("outputs (k, j)", "outputs k"))
        return VectorGradientTiling(kernel, constants).words | {
            "n": "",
            "source": "stored",
            "widen": "widen",
            "end_of_rows": "count",
            "end_of_columns": "end",
            "end_of_turned": "count",
            "planes": "vector_gradient/plane_" if constants.pairs else "vector/plane_",
            "of_pairs": "_pairs" if constants.pairs else "",
            "variants": ("gradient", *(("pairs",) if constants.pairs else ())),
            "picture": picture,
        }

    def constexprs(self, kernel: KernelSpec, constants: VectorGradientConstants) -> list[Constexpr]:
        shape, pattern = VectorGradientTiling(kernel, constants), kernel.pattern
        return [
            *pattern_constexprs(kernel),
            Constexpr("LANES", constants.lanes, "lanes per vector register"),
            Constexpr("HEIGHT", constants.height, "inputs per tile"),
            Constexpr("WIDTH", constants.width, "vectors of outputs per tile" if shape.is_along_outputs else "outputs per tile"),
            Constexpr("BLOCK", constants.block, "rows of the batch whose sums stay in registers, at most"),
            Constexpr("TOGETHER", shape.together, "rows of the batch per element of a vector"),
            Constexpr("UNIT", shape.unit, "rows of the batch of which blocks are whole multiples"),
            Constexpr("PARTS", constants.parts, "parts of the batch, at most, with sums of their own"),
            Constexpr("PIECES", constants.pieces, "pieces of the weights, one per work group"),
            Constexpr("TILES", shape.tiles, "columns that share their inputs"),
            Constexpr("COLUMNS", shape.columns, "columns of all outputs"),
            Constexpr("COLUMN_UNIT", shape.column_unit, "columns that one work group takes together"),
            Constexpr("PLANE_COLUMNS", shape.plane_columns, "columns whose inputs are copied together"),
            Constexpr("ROWS", shape.rows, "tiles per column"),
            Constexpr("TILE", shape.tile, "elements of a tile's sums in memory", "long long"),
            Constexpr("PART", shape.part, "sums per part of the batch", "long long"),
            Constexpr("SLOT", shape.slot, "elements of a work group's private buffer", "long long"),
            Constexpr("DY_BASE", shape.dy_base, "offset of dY in the private buffer"),
            Constexpr("X_STEP", shape.x_step, "elements from one l to the next"),
            *row_constexprs(kernel, "dY"),
            Constexpr("IN_FEATURES", pattern.in_features, "inputs per row of the batch"),
            Constexpr("OUT_FEATURES", pattern.out_features, "outputs per row of the batch"),
            *self._along(shape),
        ]

    def _along(self, shape: VectorGradientTiling) -> list[Constexpr]:
        if shape.is_along_outputs:
            step_out = shape.constants.lanes if shape.is_short else shape.kernel.pattern.d
            return [
                Constexpr("RUN", shape.run, "neighbouring j per plane"),
                Constexpr("PLANES_J", shape.planes_j, "planes per i"),
                Constexpr("STEP_OUT", step_out, "features from one vector of a tile to the next"),
                Constexpr("X_ROW", shape.x_row, "elements from one row of the batch to the next"),
            ]
        return [
            Constexpr("PITCH", shape.pitch, "elements from one column of rows of the batch to the next"),
            Constexpr("SCOPE", shape.scope if shape.is_transposed else 1, "blocks on the diagonal per plane"),
        ]
