"""The family of Hopper's warpgroups: the kernels that it supports, its rules, defaults, launches and work.

X reaches the tensor cores from shared memory, from registers, or from shared memory between two permutations
(`x_from`). Decides the tiles of `wgmma.cu.j2`; its design is docs/kernels/wgmma.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ksgen.errors import ConstantsError
from ksgen.families.base import MAP_ALIGNMENT, Constexpr, Geometry, Limits, TensorMap, Work, named
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.expected import fastest
from ksgen.families.family import PackingFamily
from ksgen.families.kinds import OfKinds
from ksgen.families.ptx import Box
from ksgen.families.rules import Rule, multiple, positive
from ksgen.families.signature import operands_of
from ksgen.families.tiles import WARP, divide_up, packing_constexprs, product_constexprs, read_constants
from ksgen.families.wgmma import cluster
from ksgen.families.wgmma.block import (
    MOST_BOX,
    MOST_COLUMNS,
    MOST_EXTENT,
    MOST_STRIDE,
    REGISTERS,
    ROWS,
    WARPGROUP,
    Block,
)
from ksgen.families.wgmma.permuted import PermutedBlock
from ksgen.families.wgmma.registers import RegistersBlock
from ksgen.families.wgmma.shared import SharedBlock
from ksgen.spec import KernelSpec
from ksgen.values import excerpt

MOST_STAGES = 16
Y_DIMENSIONS = 4  # of the map of Y, if boxes store it


class Wgmma(OfKinds, PackingFamily[Any]):
    """Multiply by wgmma: tensor maps load X to shared memory, and wgmma reads it there or from registers."""

    name = "wgmma"
    tilings: ClassVar[dict[Any, Any]] = {
        each.constants_type: each for each in (SharedBlock, RegistersBlock, PermutedBlock)
    }
    by_warpgroups = True

    def __init__(self, only: type[Any] | None = None) -> None:
        super().__init__(only)
        common = self._common_rules()
        self.rules = {kind: (*common, *block.rules()) for kind, block in self.tilings.items()}

    def operands(self, kernel: KernelSpec, constants: Any) -> tuple[str, ...]:
        return operands_of(self.tilings[type(constants)].signature, kernel)

    def constants(self, values: Mapping[str, Any]) -> Any:
        """Read constants.

        Values from before `x_from` existed belong to the only block, if the family is restricted to one.
        """
        kinds = {each.constants_type.x_from: each.constants_type for each in self.asked}
        x_from = values.get("x_from", next(iter(kinds)) if len(kinds) == 1 else None)
        if x_from not in kinds:
            raise ConstantsError(f"{self.name} constant x_from={excerpt(x_from)}; accepted: {', '.join(kinds)}")
        return read_constants(self.name, (kinds[x_from],), values)

    def suits(self, tiling: Any, kernel: KernelSpec, limits: Limits) -> bool:
        is_usual = kernel.job == "multiply" and not kernel.is_strided and limits.warpgroups
        return is_usual and tiling.is_for(kernel) and bool(tiling.fits_device(self, kernel, limits))

    def takes(self, kernel: KernelSpec, batch: int, aligned: bool) -> bool:
        pattern, item_bytes = kernel.pattern, kernel.item_bytes
        extents = (batch, pattern.in_features, pattern.out_features)
        pitch = max(extents[1:]) if kernel.layout == "bsf" else max(pattern.c, pattern.b) * pattern.d * batch
        if kernel.is_exchanged and kernel.layout == "bsl":
            pitch = max(extents[1:]) * batch  # at most
        stride = pitch * item_bytes
        whole = kernel.layout == "bsf" or batch * item_bytes % MAP_ALIGNMENT == 0
        return aligned and whole and not kernel.is_strided and max(extents) <= MOST_EXTENT and stride <= MOST_STRIDE

    def _common_rules(self) -> tuple[Rule[Any], ...]:
        of = self.shape

        return (
            Rule(
                "x_from is that of its constants", lambda k, c: c.x_from == type(c).x_from, lambda k, c: type(c).x_from
            ),
            Rule(
                "the kernel is one that x_from is for",
                lambda k, c: self.tilings[type(c)].is_for(k),
                lambda k, c: self.tilings[type(c)].why,
            ),
            positive("every constant but promote and resident is at least 1", "promote", "resident"),
            Rule(
                "one to three warpgroups multiply",
                lambda k, c: of(k, c).groups in REGISTERS,
                lambda k, c: of(k, c).groups,
            ),
            multiple("tile_batch", "64 * groups_batch", lambda kernel, constants: int(ROWS * constants.groups_batch)),
            Rule("tile_batch is at most 256 in bsf", lambda k, c: of(k, c).box_batch <= MOST_BOX),
            Rule(
                "tile_out is a multiple of 8, up to 256",
                lambda k, c: c.tile_out % 8 == 0 and c.tile_out <= MOST_COLUMNS,
            ),
            Rule("tile_in is at most 256", lambda k, c: c.tile_in <= MOST_BOX),
            Rule("stages is 2 to 16", lambda k, c: 2 <= c.stages <= MOST_STAGES),
            Rule(
                "boxes of X hold whole digits of exchanged inputs",
                lambda k, c: not k.reads_exchanged or of(k, c).x_features is not None,
            ),
            Rule("the warpgroups' registers fit a multiprocessor", lambda k, c: of(k, c).fits_registers),
            *cluster.rules(of),
        )

    # ---- constants

    def default_of(self, tiling: Any, kernel: KernelSpec, limits: Limits, batch: int | None) -> Any:
        row = tiling.constants_type.entry_family
        return fastest(self, kernel, limits, batch, lambda: tiling.options(self, kernel, limits), row=row)

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[Any]:
        """Yield every combination that the rules and the shared memory allow."""
        for constants in (each for block in self.able(kernel, limits) for each in block.tiles(kernel, limits)):
            if self.is_able(kernel, constants, limits):
                yield from self.in_clusters(kernel, constants, cluster.MOST_BLOCKS)

    def in_clusters(self, kernel: KernelSpec, constants: Any, most: int = cluster.MOST_BY_DEFAULT) -> Iterator[Any]:
        """Yield the constants with each cluster of at most `most` blocks that a search tries."""
        for batch, out in cluster.tried(self.shape(kernel, constants), most):
            changed = constants.changed(cluster_batch=batch, cluster_out=out)
            if all(rule.holds(kernel, changed) for rule in cluster.rules(self.shape)):
                yield changed

    # ---- launches

    def geometry(self, kernel: KernelSpec, constants: Any, batch: int) -> Geometry:
        block: Block = self.shape(kernel, constants)
        pattern, cluster_batch = block.kernel.pattern, block.constants.cluster_batch
        tiles_batch = divide_up(batch, block.constants.tile_batch * cluster_batch) * cluster_batch
        tiles = pattern.a * block.tiles_d * (block.tiles_out // block.passes) * tiles_batch
        found = Geometry(tiles, block.threads, block.shared_bytes, at_once=1, cluster=block.cluster, starts_early=True)
        return block.with_passes(found, batch)

    def maps(self, kernel: KernelSpec, constants: Any, batch: int) -> tuple[TensorMap, ...]:
        block: Block = self.shape(kernel, constants)
        return block.maps(batch)

    def work(self, kernel: KernelSpec, constants: Any, batch: int) -> Work:
        block = self.shape(kernel, constants)
        blocks = self.geometry(kernel, constants, batch).grid
        tiles = blocks * block.passes
        x, w = blocks * block.steps * block.x_bytes, tiles * block.steps * block.w_bytes
        tile = block.constants.tile_batch * block.constants.tile_out * block.constants.tile_d
        groups_batch = block.constants.groups_batch * block.row_tiles
        x_moved = block.tiles_out // block.passes * block.x_bytes_moved(batch) / block.constants.cluster_out
        y_moved = block.y_bytes_moved(batch)
        # each instruction reads all of its operand B from shared memory
        read = w * groups_batch * kernel.arithmetic.products // kernel.arithmetic.parts
        # Y's tile is written and read; with a residual, the residual's too
        y_accesses = 4 if block.kernel.epilogue.residual else 2
        multiply_adds = tiles * tile * block.steps * block.constants.tile_in * kernel.arithmetic.products
        return Work(
            blocks,
            self.memory_bytes(block.kernel, constants, batch),
            round(x_moved + y_moved) + w // block.constants.cluster_batch,
            (1 + block.passes) * x + w + read + y_accesses * tiles * block.y_passed_bytes,
            multiply_adds,
            tiles * block.steps * max(1 / (block.constants.stages - 1), block.waits),
            stages=tiles * block.steps,
            passed_bytes=block.passed_bytes(batch),
            scattered_bytes=round(x_moved * (block.in_rows - 1) + y_moved * (block.in_pieces - 1)),
            products=multiply_adds * (WARPGROUP // WARP) // (ROWS * block.constants.tile_out * block.k_step),
        )

    # ---- sources

    def variables(self, kernel: KernelSpec, constants: Any) -> dict[str, Any]:
        block = self.shape(kernel, constants)
        image = "bsl" if not block.is_bsf else "flat" if block.is_flat else "slab"
        picture = draw(
            "A tile of Y. A cell is one instruction's result, for one of the tile's j. Each block walks over tiles.",
            DrawnSide(constants.tile_batch, "rows s of the batch", constants.tile_batch // ROWS),
            DrawnSide(constants.tile_out, "outputs k", 1),
            lambda row, _: f"warpgroup {row // block.row_tiles}",
        )
        common = cluster.variables(block, image) | {
            "operand": block.operand,
            "wgmma": block.instruction,
            "picture": picture,
            "boxes": [Box(len(block.x_map[0]))],
            "stored_boxes": [Box(Y_DIMENSIONS)],
            "from_registers": constants.x_from == "registers",
            "is_permuted": constants.x_from == "permuted",
        }
        return {**common, **block.own_variables(common["variants"])}

    def constexprs(self, kernel: KernelSpec, constants: Any) -> list[Constexpr]:
        block = self.shape(kernel, constants)
        copying, multiplying = REGISTERS[block.groups]
        return [
            *product_constexprs(block.kernel),
            named(constants, "TILE_BATCH", "rows of the batch per tile"),
            named(constants, "TILE_OUT", "outputs k per tile, for each of its j: columns of an instruction"),
            named(constants, "TILE_IN", "inputs l per stage"),
            named(constants, "TILE_D", "neighbouring j per tile"),
            *cluster.constexprs(block),
            named(block, "GROUPS", "warpgroups that multiply"),
            named(constants, "STAGES", "stages in the ring in shared memory"),
            named(block, "THREADS", "threads per block: one more warpgroup copies"),
            Constexpr(
                "COPYING_REGISTERS", copying, "registers per thread of the warpgroup that copies; 0: as launched"
            ),
            Constexpr(
                "MULTIPLYING_REGISTERS",
                multiplying,
                "registers per thread of the warpgroups that multiply; 0: as launched",
            ),
            named(block, "ROW_TILES", "instructions of a warpgroup along the batch, 64 rows each"),
            named(block, "K_STEP", "inputs of one instruction"),
            named(block, "COMPONENTS", "parts that an operand is split into"),
            named(block, "LANE_INPUTS", "inputs of one instruction that a lane holds per row of the batch"),
            named(block, "RUN_OUT", "neighbouring outputs of a lane"),
            named(block, "STEPS", "stages until all C inputs are read"),
            named(block, "TILES_OUT", "tiles along the outputs"),
            named(block, "TILES_D", "tiles along j"),
            named(block, "STEP_BYTES", "bytes of operand B of one instruction"),
            named(block, "X_BYTES", "bytes of X per stage"),
            named(block, "W_BYTES", "bytes of packed weights per stage"),
            named(block, "STAGE_BYTES", "bytes from one stage to the next: whole periods of a swizzle"),
            named(block, "Y_BYTES", "bytes in which Y waits to be stored"),
            named(block, "SHARED_BYTES", "bytes of shared memory per block"),
            *packing_constexprs(kernel),
            Constexpr("SCALES", block.scales_offset, "bytes of packed weights in front of their scales", "long long"),
            *block.own_constexprs(),
        ]
