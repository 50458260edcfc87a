"""X from shared memory: 16-bit types in batch-size-last and, for d = 1, in batch-size-first. In batch-size-first it
also multiplies X and weights in eight bits.

The boxes of X are operand A unchanged: along the batch in batch-size-last, along the inputs in batch-size-first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Limits, TensorMap, named
from ksgen.families.mma.defaults import BYTES_PROMOTE, bytes_promotion
from ksgen.families.operands import multiplies_bytes
from ksgen.families.ptx import WgmmaInstruction
from ksgen.families.rules import Rule
from ksgen.families.tiles import Constants, divide_up
from ksgen.families.wgmma.block import LINE, ROWS, Block, deepest, feature_sizes, has_boxes, takes_rows
from ksgen.spec import KernelSpec

MOST_SUMS = {1: 200, 2: 200, 3: 120}  # per thread, by the number of warpgroups that multiply
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)  # outputs per tile that a search tries
STAGE_INPUTS = 64  # by default, approximately
# With at most so many stages, at most two are in flight. Twice as many stages of half as many inputs took 0.92 to 0.95
# of the time on an H100.
FEW_STAGES = 3


@dataclass(frozen=True)
class SharedConstants(Constants):
    """Constants that a search may change."""

    tile_batch: int  # rows of the batch per tile
    tile_out: int  # outputs k per tile
    tile_in: int  # inputs l per stage
    groups_batch: int  # warpgroups that multiply, along the batch
    stages: int  # stages of X and W in shared memory
    # blocks with neighbouring tiles along the batch: each loads a part of their W for all of them
    cluster_batch: int = 1
    # blocks with neighbouring tiles along the outputs: each loads a part of their X for all of them
    cluster_out: int = 1
    x_from: str = "shared"

    entry_family: ClassVar[str] = "wgmma_shared"
    on_tensor_cores: ClassVar[bool] = True
    not_in_entries: ClassVar[tuple[str, ...]] = ("x_from",)

    tile_d: ClassVar[int] = 1  # constants of the other blocks
    groups_d: ClassVar[int] = 1


@dataclass(frozen=True)
class SharedBlock(Block):
    kernel: KernelSpec
    constants: SharedConstants

    why = (
        "wgmma of sm_90a with X from shared memory: 16-bit types in bsl, and in bsf with d = 1; there also X and "
        "weights in e4m3 or e5m2, with y in 16 bits; rows of X in whole 16 bytes"
    )
    constants_type = SharedConstants

    @staticmethod
    def is_for(kernel: KernelSpec) -> bool:
        is_bsf, pattern, operand = kernel.layout == "bsf", kernel.pattern, kernel.arithmetic.operand
        has_rows = pattern.d == 1 and takes_rows(kernel) if is_bsf else not pattern.outputs.is_divided
        if kernel.is_quantized and not (is_bsf and multiplies_bytes(kernel)):
            return False
        is_16_bits = operand is not None and kernel.item_bytes == operand.item_bytes == 2
        has_lines = not (is_bsf and kernel.reads_exchanged) or pattern.inputs.run * kernel.x_item_bytes % LINE == 0
        return is_16_bits and has_rows and has_lines and has_boxes(pattern.inputs, is_bsf, kernel.x_item_bytes)

    @classmethod
    def fits_device(cls, family: Any, kernel: KernelSpec, limits: Limits) -> bool:
        return not kernel.reads_exchanged or bool(_depths(kernel))

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        return (
            Rule("tile_out is a multiple of 16 in bsl", lambda k, c: k.layout == "bsf" or c.tile_out % 16 == 0),
            Rule("tile_in is 128 with X in eight bits", lambda k, c: not k.has_bytes_in or c.tile_in == BYTES_PROMOTE),
            Rule(
                "tile_in is a multiple of 16 in bsl, of 64 in bsf", lambda k, c: c.tile_in % cls.of(k, c).unit_in == 0
            ),
            Rule(
                "sums fit a thread's registers",
                lambda k, c: cls.of(k, c).held <= MOST_SUMS[c.groups_batch],
                lambda k, c: cls.of(k, c).held,
            ),
        )

    @property
    def instruction(self) -> WgmmaInstruction:
        return WgmmaInstruction(self.operand, self.constants.tile_out, a_in_registers=False)

    @property
    def unit_in(self) -> int:
        """Inputs of which a stage has a multiple."""
        return LINE // self.kernel.x_item_bytes if self.is_bsf else self.k_step

    @property
    def promote(self) -> int:
        """Inputs after which tensor-core sums are added to plain ones: all inputs of a stage; 0: never."""
        return bytes_promotion(self.kernel)

    @property
    def held(self) -> int:
        return self.sums * (2 if self.promote else 1)

    @property
    def y_bytes(self) -> int:
        """Bytes of shared memory for Y: a tile in batch-size-last, stored as boxes; none in batch-size-first."""
        return 0 if self.is_bsf else self.constants.tile_batch * self.constants.tile_out * self.kernel.item_bytes

    def maps(self, batch: int) -> tuple[TensorMap, ...]:
        if self.is_bsf:
            return super().maps(batch)
        item_bytes = self.kernel.item_bytes
        sizes, strides = feature_sizes(self.kernel.pattern.outputs, batch, self.is_bsf, item_bytes)
        box = (ROWS, 1, self.constants.tile_out, 1)
        return (*super().maps(batch), TensorMap("y", item_bytes, sizes, strides, box, LINE))

    # ---- the source

    def own_variables(self, variants: tuple[str, ...]) -> dict[str, Any]:
        conditions = {"promoted": self.promote, "multiplied_bytes": self.kernel.has_bytes_in}
        return {
            "variants": ("plain_order", *(name for name, holds in conditions.items() if holds), *variants),
            "product": self.instruction.along_inputs if self.is_bsf else f"{self.instruction.name}<true, false>",
            "schedule": "streaming",
            "walk": "promoted" if self.promote else "ahead",
            "store": "rows" if self.is_bsf else "boxes_residual" if self.kernel.epilogue.residual else "boxes",
            "out": "rows" if self.is_bsf else "boxes",
        }

    def own_constexprs(self) -> list[Constexpr]:
        found = [Constexpr("PLANES", 1, "neighbouring j of a warpgroup")]
        if self.is_bsf:
            found += [
                Constexpr("SWAPS_ROWS", 0, "whether neighbouring lanes read rows 0, 4, 1, 5 ... of eight"),
                named(self, "Y_VECTOR", "contiguous elements that one store of Y moves"),
            ]
        if self.promote:
            found.append(named(self, "PROMOTE", "inputs after which sums leave the tensor cores"))
        return found

    # ---- constants

    @classmethod
    def options(cls, family: Any, kernel: KernelSpec, limits: Limits) -> Iterator[SharedConstants]:
        """Yield the rule's choice, then tiles of two or three warpgroups with the most stages that fit, in all clusters
        that pay.

        The rule takes the fewest tiles along the outputs, the least padding, then the most rows of the batch, and
        stages that fill the memory.
        """
        chosen = _start(family, cls.constants_type, kernel, limits)
        yield chosen
        for groups, rows, width, tile_in in product((2, 3), (1, 2), WIDTHS, sorted({chosen.tile_in, STAGE_INPUTS})):
            tile = chosen.changed(
                tile_batch=ROWS * rows * groups, tile_out=width, tile_in=tile_in, groups_batch=groups, stages=2
            )
            if width < kernel.pattern.b + 16 and family.is_able(kernel, tile, limits):
                yield from family.in_clusters(kernel, _finest(family, kernel, tile, limits))

    @classmethod
    def tiles(cls, kernel: KernelSpec, limits: Limits) -> Iterator[SharedConstants]:
        """Yield every tile that a search tries if the rules allow it."""
        for groups, rows, width, tile_in, stages in product(
            (1, 2, 3), (1, 2, 3), WIDTHS, (16, 32, 48, 64, 96, 128), (2, 3, 4, 5, 6, 8)
        ):
            if width < kernel.pattern.b + 16:
                yield cls.constants_type(ROWS * rows * groups, width, tile_in, groups, stages)


def _start(family: Any, kind: type[SharedConstants], kernel: KernelSpec, limits: Limits) -> SharedConstants:
    b, c = kernel.pattern.b, kernel.pattern.c
    depth = min(_depths(kernel), key=lambda each: (divide_up(c, each) * each, abs(each - STAGE_INPUTS)))
    sizes = product((2, 1), range(16, 257, 16))
    candidates = [kind(2 * ROWS * rows, width, depth, 2, 2) for rows, width in sizes]
    small = (each for each in candidates if each.tile_batch * each.tile_out <= 2 * ROWS * 256)
    able = [each for each in small if family.is_able(kernel, each, limits)]
    if not able:
        raise ConstantsError(f"{kernel.name}: no tile of {family.name} fits; tried {candidates[-1]}")

    def cost(constants: SharedConstants) -> tuple[int, int, int]:
        tiles = divide_up(b, constants.tile_out)
        return tiles, tiles * constants.tile_out, -constants.tile_batch

    return deepest(family, kernel, min(able, key=cost), limits)


def _depths(kernel: KernelSpec) -> list[int]:
    """Candidates for a default's inputs per stage.

    They are multiples of `unit_in` whose boxes hold whole digits of exchanged inputs.
    """
    unit = SharedBlock(kernel, SharedConstants(ROWS, 16, 64, 1, 2)).unit_in
    depths = range(unit, 2 * STAGE_INPUTS + 1, unit)
    return [each for each in depths if SharedBlock(kernel, SharedConstants(ROWS, 16, each, 1, 2)).x_features]


def _finest(family: Any, kernel: KernelSpec, constants: SharedConstants, limits: Limits) -> SharedConstants:
    """The same constants with as many stages as fit; if stages are few, with half the inputs per stage."""
    found = deepest(family, kernel, constants, limits)
    half = constants.changed(tile_in=constants.tile_in // 2)
    is_halved = found.stages <= FEW_STAGES and family.is_able(kernel, half, limits)
    return deepest(family, kernel, half, limits) if is_halved else found
