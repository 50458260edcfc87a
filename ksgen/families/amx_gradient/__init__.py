"""The gradient family for matrix tiles: the weights' gradient, for every pattern, batch and layout.

Decides the tiles of `amx_gradient.cl.j2`; its design is docs/kernels/amx.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from ksgen.families.amx.cycles import DOT_MULTIPLY_ADDS
from ksgen.families.amx.shape import INPUTS, LANES, PAIR, ROWS, TILE_ITEMS, TILE_SUMS, has_tiles_for
from ksgen.families.amx_gradient.cycles import dots, gradient_cycles
from ksgen.families.amx_gradient.defaults import default
from ksgen.families.amx_gradient.shape import AmxGradientConstants, AmxGradientTiling
from ksgen.families.base import Constexpr, Geometry, Limits, Pass, Work
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.rules import Rule
from ksgen.families.shaped import Shaped
from ksgen.families.signature import GRADIENT
from ksgen.families.tiles import pattern_constexprs, row_constexprs
from ksgen.families.vector_gradient import SHARED_OUT
from ksgen.families.vector_gradient.defaults import TASKS
from ksgen.spec import KernelSpec
from ksgen.spec.precision import on_tiles

__all__ = ["AmxGradient", "AmxGradientConstants", "AmxGradientTiling"]

_RULES: tuple[Rule[AmxGradientConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    Rule("precision is one that matrix tiles multiply", lambda k, c: k.arithmetic.tiles is not None, lambda k, c: ", ".join(on_tiles())),
    Rule("every constant is at least 1", lambda k, c: min(asdict(c).values()) >= 1),
    Rule("block is a multiple of 32", lambda k, c: c.block % INPUTS == 0),
    Rule("outputs is a multiple of 32", lambda k, c: c.outputs % PAIR == 0),
    Rule(
        "pieces is at most the columns that work groups take apart",
        lambda k, c: c.pieces <= AmxGradientTiling(k, c).units,
        lambda k, c: AmxGradientTiling(k, c).units,
    ),
)


class AmxGradient(Shaped[AmxGradientConstants]):
    """Sums over the batch by a processor's matrix tiles."""

    name = "amx_gradient"
    signature = GRADIENT
    constants_type = AmxGradientConstants
    listed = _RULES
    why = "the weights' gradient by matrix tiles: processors that have them"
    by_default = False  # no machine with tiles has timed it

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "gradient" and has_tiles_for(kernel, limits)

    def shape(self, kernel: KernelSpec, constants: AmxGradientConstants) -> AmxGradientTiling:
        return AmxGradientTiling(kernel, constants)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AmxGradientConstants:
        return default(kernel, limits, batch)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[AmxGradientConstants]:
        for block, outputs, (parts, pieces) in product((64, 128, 256, 512), (32, 64, 128, 256), SHARED_OUT):
            constants = AmxGradientConstants(block, outputs, parts, pieces)
            if outputs - PAIR < kernel.pattern.b and self.keeps_rules(kernel, constants):
                yield constants

    def packed_bytes(self, kernel: KernelSpec, constants: AmxGradientConstants) -> int:
        return AmxGradientTiling(kernel, constants).part_bytes * constants.parts

    def geometry(self, kernel: KernelSpec, constants: AmxGradientConstants, batch: int) -> Geometry:
        shape = AmxGradientTiling(kernel, constants)
        parts = shape.parts(batch)
        return Geometry(
            parts * constants.pieces, 1, 0, parts * shape.part_bytes, at_once=TASKS, group_bytes=shape.slot * kernel.real_bytes,
            after=(Pass("sum", self.pack_geometry(kernel, constants)),),
        )  # fmt: skip

    def pack_geometry(self, kernel: KernelSpec, constants: AmxGradientConstants) -> Geometry:
        shape = AmxGradientTiling(kernel, constants)
        return Geometry(shape.units * shape.tiles, 1, 0)

    def work(self, kernel: KernelSpec, constants: AmxGradientConstants, batch: int) -> Work:
        shape = AmxGradientTiling(kernel, constants)
        parts, moved = shape.parts(batch), kernel.bytes(batch)
        return Work(
            parts * constants.pieces, moved, moved, 0, dots(shape, batch) * DOT_MULTIPLY_ADDS, cycles=gradient_cycles(shape, batch),
            passed_bytes=parts * shape.part_bytes,
        )  # fmt: skip

    def words(self, kernel: KernelSpec, constants: AmxGradientConstants) -> Mapping[str, Any]:
        shape = AmxGradientTiling(kernel, constants)
        is_split = shape.products.parts > 1
        return {
            "reals": "lanes",
            "lanes": LANES,
            "layout": kernel.layout,
            "operand": shape.products.operand.name,
            "variants": ("split",) if is_split else (),
            "inputs_lie": "woven" if shape.is_woven else "apart",
            "mending": "split" if is_split else "none",
            "picture": draw(
                "Tiles that are multiplied at a time: 2 x 2 tiles of 16 x 16 sums, for all rows of a block.",
                DrawnSide(PAIR, "outputs k", 2), DrawnSide(PAIR, "inputs l", 2), lambda row, column: f"tile {2 * row + column}",
            ),
        }  # fmt: skip

    def constexprs(self, kernel: KernelSpec, constants: AmxGradientConstants) -> list[Constexpr]:
        shape = AmxGradientTiling(kernel, constants)
        return [
            *pattern_constexprs(kernel),
            Constexpr("LANES", LANES, "lanes of a vector, and sums in a row of a tile"),
            Constexpr("BLOCK", constants.block, "rows of the batch whose sums stay in tiles, at most"),
            Constexpr("UNIT", INPUTS, "rows of the batch of which blocks are whole multiples"),
            Constexpr("OUTPUTS", constants.outputs, "outputs per j that are copied and multiplied together"),
            Constexpr("PARTS", constants.parts, "parts of the batch, at most, with sums of their own"),
            Constexpr("PIECES", constants.pieces, "pieces of the weights, one per work group"),
            Constexpr("COLUMNS", shape.units, "columns: a plane's inputs with one group of its outputs"),
            Constexpr("GROUPS", shape.groups, "groups of a plane's outputs"),
            Constexpr("PLANES_J", shape.planes_j, "planes per i"),
            Constexpr("RUN", shape.run, "neighbouring j per plane"),
            Constexpr("TILES_OUT", shape.tiles_out, "tiles of a group's outputs, of one j"),
            Constexpr("TILES_IN", shape.tiles_in, "tiles of an (i, j)'s inputs"),
            Constexpr("STEPS", shape.steps, "tiles along a block of the batch, 32 rows each"),
            Constexpr("SHARES", shape.shares, "shares of a step's products, which are multiplied sequentially"),
            Constexpr("COMPONENTS", shape.products.parts, "16-bit operands per element"),
            Constexpr("TILE_ITEMS", TILE_ITEMS, "operands per tile"),
            Constexpr("TILE_SUMS", TILE_SUMS, "sums per tile"),
            Constexpr("STEP_ITEMS", shape.step_items, "operands from one step's tiles to the next"),
            Constexpr("SQUARE", shape.square, "vectors that are interleaved with each other"),
            Constexpr("X_BASE", shape.x_base, "offset of X in the private buffer, in operands, behind dY", "long long"),
            Constexpr("PART", shape.part, "sums per part of the batch", "long long"),
            Constexpr("SLOT", shape.slot, "elements of a work group's private buffer", "long long"),
            *row_constexprs(kernel, "dY"),
            Constexpr("IS_BATCH_LAST", kernel.layout != "bsf", "whether the rows of the batch are contiguous per feature"),
            Constexpr("ROWS", ROWS, "rows of a tile"),
        ]
