"""The gradient family for processors: the weights' gradient, for every pattern, batch and layout, from vector registers
full of sums or by matrix tiles.

Decides the tiles of `cpu_gradient.cl.j2`; its design is docs/kernels/cpu_gradient.md and docs/kernels/amx.md. Never
renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

from ksgen.families.amx.shape import INPUTS, ON_TILES, PAIR, are_timed, has_tiles_for, intensity
from ksgen.families.base import Constexpr, Geometry, Limits, Pass, Work
from ksgen.families.cpu_gradient import defaults
from ksgen.families.cpu_gradient.tiles import AmxGradientConstants, AmxGradientTiling
from ksgen.families.cpu_gradient.vectors import VectorGradientConstants, VectorGradientTiling
from ksgen.families.kinds import OfKinds
from ksgen.families.rules import Rule, at_most, no_more, positive
from ksgen.families.signature import GRADIENT_WITH_BIAS
from ksgen.families.vector.defaults import MANY
from ksgen.families.vector.planes import LANE_RULES, lanes_of, round_up
from ksgen.spec import KernelSpec
from ksgen.spec.precision import BF16

AnyGradientConstants = VectorGradientConstants | AmxGradientConstants

LEAST_VECTORS = 8  # vectors per tile that a search tries, if a pattern allows this number
SHARED_OUT = ((1, 16), (4, 4), (16, 1))  # (parts, pieces) of 16 work groups

_VECTOR_RULES: tuple[Rule[VectorGradientConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    *LANE_RULES,
    positive("every constant but pairs is at least 1", "pairs"),
    at_most("a tile has at most 64 vectors", 64, lambda k, c: c.height * c.width),
    Rule("height is at most c", lambda k, c: c.height <= k.pattern.c),
    Rule("width is at most b along the batch", lambda k, c: c.along == "outputs" or c.width <= k.pattern.b),
    Rule("block is a multiple of lanes along the batch", lambda k, c: c.along == "outputs" or c.block % c.lanes == 0),
    Rule("pairs is 0 or 1", lambda k, c: c.pairs in (0, 1)),
    Rule(
        "pairs is 0 but in bfloat16 with four lanes or more, in bsf or with lanes along the batch",
        lambda k, c: (
            not c.pairs or (c.lanes > 2 and k.arithmetic.operand == BF16 and (k.layout == "bsf" or c.along == "batch"))
        ),
    ),
    Rule("pairs is 0 if outputs are exchanged", lambda k, c: not (c.pairs and k.pattern.outputs.is_exchanged)),
    Rule(
        "block is even with pairs, and along the batch a multiple of twice the lanes",
        lambda k, c: c.block % VectorGradientTiling(k, c).unit == 0,
    ),
    Rule(
        "along=outputs needs a d that divides the lanes, or more j than lanes",
        lambda k, c: c.along == "batch" or c.lanes % k.pattern.d == 0 or k.pattern.d > c.lanes,
    ),
    no_more("pieces", "the units of columns that work groups take", lambda k, c: VectorGradientTiling(k, c).units),
)

_TILE_RULES: tuple[Rule[AmxGradientConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    ON_TILES,
    positive("every constant is at least 1"),
    Rule("block is a multiple of 32", lambda k, c: c.block % INPUTS == 0),
    Rule("outputs is a multiple of 32", lambda k, c: c.outputs % PAIR == 0),
    no_more("pieces", "the units of columns that work groups take", lambda k, c: AmxGradientTiling(k, c).units),
)


LEAST_INTENSITY = 8  # multiply-adds per input or output from which tiles are the default in bfloat16


class CpuGradient(OfKinds):
    """Sums over the batch on a processor: by fused multiply-adds of its vector units, or by its matrix tiles.

    Without wisdom, a processor that has tiles uses them for bfloat16 if there are enough multiply-adds per element. It
    also uses them for precisions that tiles compute by products of bfloat16 (`tf32x3`, `bf16x6`).
    """

    name = "cpu_gradient"
    signature = GRADIENT_WITH_BIAS
    tilings: ClassVar[dict[Any, Any]] = {
        AmxGradientConstants: AmxGradientTiling,
        VectorGradientConstants: VectorGradientTiling,
    }
    rules: Mapping[Any, Any] = {AmxGradientConstants: _TILE_RULES, VectorGradientConstants: _VECTOR_RULES}

    def suits(self, tiling: Any, kernel: KernelSpec, limits: Limits) -> bool:
        by_tiles = has_tiles_for(kernel, limits) and not kernel.pattern.outputs.is_exchanged
        return limits.is_cpu and kernel.job == "gradient" and (tiling is VectorGradientTiling or by_tiles)

    def default_of(self, tiling: Any, kernel: KernelSpec, limits: Limits, batch: int | None) -> AnyGradientConstants:
        # batches between two powers of two share constants, and so their source
        batch = kernel.batch or min(MANY, 1 << ((batch or MANY) - 1).bit_length())
        by_rule = defaults.default_by_tiles if tiling is AmxGradientTiling else defaults.default_by_vectors
        return by_rule(kernel, limits, batch)

    def defaults(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> list[AnyGradientConstants]:
        found = super().defaults(kernel, limits, batch)
        if self.name in kernel.arithmetic.families:
            return found[:1]
        by_tiles = are_timed(kernel) and not kernel.reads_exchanged and intensity(kernel) >= LEAST_INTENSITY
        return found if by_tiles else found[::-1]

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyGradientConstants]:
        for tiling in self.able(kernel, limits):
            by_tiles = tiling is AmxGradientTiling
            yield from self._space_by_tiles(kernel) if by_tiles else self._space_by_vectors(kernel, limits)

    def _space_by_vectors(self, kernel: KernelSpec, limits: Limits) -> Iterator[VectorGradientConstants]:
        lanes = lanes_of(kernel, limits)
        for along in ("outputs", "batch"):
            sizes = defaults.tile_sizes(kernel, along, lanes, limits)
            least = min(LEAST_VECTORS, max(height * width for height, width in sizes))
            wide = [(height, width) for height, width in sizes if height * width >= least]
            pairs = (1, 0) if defaults.multiplies_pairs(kernel, limits, along) else (0,)
            for (height, width), block, (parts, pieces), paired in product(wide, (96, 192, 384), SHARED_OUT, pairs):
                constants = VectorGradientConstants(
                    along, lanes, height, width, round_up(block, lanes), parts, pieces, paired
                )
                if self.keeps_rules(kernel, constants):
                    yield constants

    def _space_by_tiles(self, kernel: KernelSpec) -> Iterator[AmxGradientConstants]:
        for block, outputs, (parts, pieces) in product((64, 128, 256, 512), (32, 64, 128, 256), SHARED_OUT):
            constants = AmxGradientConstants(block, outputs, parts, pieces)
            if outputs - PAIR < kernel.pattern.b and self.keeps_rules(kernel, constants):
                yield constants

    # ---- a launch

    def packed_bytes(self, kernel: KernelSpec, constants: AnyGradientConstants) -> int:
        return int(self.shape(kernel, constants).part_bytes * constants.parts)

    def shared_bytes(self, kernel: KernelSpec, constants: AnyGradientConstants) -> int:
        return 0

    def geometry(self, kernel: KernelSpec, constants: AnyGradientConstants, batch: int) -> Geometry:
        shape = self.shape(kernel, constants)
        parts = shape.parts(batch)
        return Geometry(
            parts * constants.pieces, 1, 0, parts * shape.part_bytes, at_once=defaults.TASKS,
            group_bytes=shape.slot * kernel.real_bytes,
            after=(Pass("sum", self.pack_geometry(kernel, constants)),),
        )  # fmt: skip

    def pack_geometry(self, kernel: KernelSpec, constants: AnyGradientConstants) -> Geometry:
        return Geometry(self.shape(kernel, constants).sum_groups, 1, 0)

    def work(self, kernel: KernelSpec, constants: AnyGradientConstants, batch: int) -> Work:
        shape, moved = self.shape(kernel, constants), kernel.bytes(batch)
        parts = shape.parts(batch)
        return Work(
            parts * constants.pieces, moved, moved + shape.sums_bytes(batch), 0, shape.multiply_adds(batch),
            cycles=shape.cycles(batch),
            passed_bytes=parts * shape.part_bytes,
        )  # fmt: skip

    def variables(self, kernel: KernelSpec, constants: AnyGradientConstants) -> dict[str, Any]:
        has_bias = kernel.epilogue.bias
        return {
            **self.shape(kernel, constants).variables,
            "by_tiles": isinstance(constants, AmxGradientConstants),
            "has_bias": has_bias,
            "extra_outputs": "GLOBAL stored* RESTRICT bias, " if has_bias else "",
        }

    def constexprs(self, kernel: KernelSpec, constants: AnyGradientConstants) -> list[Constexpr]:
        return list(self.shape(kernel, constants).constexprs)
