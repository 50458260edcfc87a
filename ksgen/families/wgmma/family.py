"""Shared parts of the families of warpgroup kernels: the kernels that they serve, their rules, launches and work."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from ksgen.families.base import MAP_ALIGNMENT, Constexpr, Geometry, Limits, TensorMap, Work
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.operands import FREE_OF_CONFLICTS, wavefronts
from ksgen.families.ptx import Box, Wgmma
from ksgen.families.rules import Rule
from ksgen.families.shaped import Packing
from ksgen.families.tiles import PACK_THREADS, WARP, divide_up, epilogue_constexprs, given_scales, pattern_constexprs
from ksgen.families.wgmma import cluster
from ksgen.families.wgmma.block import MOST_BOX, MOST_EXTENT, MOST_STRIDE, REGISTERS, ROWS, WARPGROUP, Block
from ksgen.spec import KernelSpec

ConstantsT = TypeVar("ConstantsT")
MOST_COLUMNS = 256  # outputs of one instruction
MOST_STAGES = 16


def takes_rows(kernel: KernelSpec) -> bool:
    """Whether the rows of X begin at multiples of 16 bytes for every i: what tensor maps ask of batch-size-first."""
    _, _, c, d = kernel.pattern.shape
    return c * d * kernel.x_item_bytes % MAP_ALIGNMENT == 0


class WarpgroupFamily(Packing[ConstantsT]):
    """Base of the kinds.

    A kind defines its constants, their `Block`, the kernels that it serves, and its own template variables.
    """

    by_default = False  # never run on a GPU
    on_tensor_cores = True
    by_warpgroups = True

    def block(self, kernel: KernelSpec, constants: ConstantsT) -> Block:
        raise NotImplementedError

    def shape(self, kernel: KernelSpec, constants: ConstantsT) -> Block:
        return self.block(kernel, constants)

    def is_for(self, kernel: KernelSpec) -> bool:
        raise NotImplementedError

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "multiply" and not kernel.is_strided and limits.warpgroups and self.is_for(kernel)

    def takes(self, kernel: KernelSpec, batch: int, aligned: bool) -> bool:
        pattern, item_bytes = kernel.pattern, kernel.item_bytes
        extents = (batch, pattern.in_features, pattern.out_features)
        stride = max(extents[1:]) * item_bytes if kernel.layout == "bsf" else max(pattern.c, pattern.b) * pattern.d * batch * item_bytes
        whole = kernel.layout == "bsf" or batch * item_bytes % MAP_ALIGNMENT == 0
        return aligned and whole and not kernel.is_strided and max(extents) <= MOST_EXTENT and stride <= MOST_STRIDE

    def common_rules(self) -> tuple[Rule[ConstantsT], ...]:
        def of(kernel: KernelSpec, constants: ConstantsT) -> Block:
            return self.block(kernel, constants)

        def group_batches(kernel: KernelSpec, constants: Any) -> int:
            return int(ROWS * constants.groups_batch)

        def whole_groups(kernel: KernelSpec, constants: Any) -> bool:
            return bool(constants.tile_batch % group_batches(kernel, constants) == 0)

        return (
            Rule("the kernel is one that this family is for", lambda k, c: self.is_for(k), lambda k, c: self.why),
            Rule("every constant but promote and resident is at least 1", _positive_rule),
            Rule("one to three warpgroups multiply", lambda k, c: of(k, c).groups in REGISTERS, lambda k, c: of(k, c).groups),
            Rule("tile_batch is a multiple of 64 * groups_batch", whole_groups, group_batches),
            Rule("tile_batch is at most 256 in bsf", lambda k, c: of(k, c).box_batch <= MOST_BOX),
            Rule("tile_out is a multiple of 8, up to 256", lambda k, c: _tile_out(c) % 8 == 0 and _tile_out(c) <= MOST_COLUMNS),
            Rule("tile_in is at most 256", lambda k, c: of(k, c).constants.tile_in <= MOST_BOX),
            Rule("stages is 2 to 16", lambda k, c: 2 <= of(k, c).constants.stages <= MOST_STAGES),
            Rule("the registers that warpgroups take are there", lambda k, c: of(k, c).fits_registers),
            *cluster.rules(of),
        )

    def reads_rule(self) -> Rule[ConstantsT]:
        def free(kernel: KernelSpec, constants: ConstantsT) -> bool:
            return all(wavefronts(reads) == FREE_OF_CONFLICTS for reads in self.block(kernel, constants).reads())

        return Rule("X is read from shared memory with no bank conflicts", free)

    # ---- launches

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        block = self.block(kernel, constants)
        pattern, along = block.kernel.pattern, block.constants.cluster_batch
        of_batch = divide_up(batch, block.constants.tile_batch * along) * along
        tiles = pattern.a * block.tiles_d * (block.tiles_out // block.passes) * of_batch
        return Geometry(tiles, block.threads, block.shared_bytes, at_once=1, cluster=block.cluster, starts_early=True)

    def maps(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> tuple[TensorMap, ...]:
        return (self.block(kernel, constants).map_x(batch),)

    def work(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Work:
        block = self.block(kernel, constants)
        blocks = self.geometry(kernel, constants, batch).grid
        tiles = blocks * block.passes
        x, w = blocks * block.steps * block.x_bytes, tiles * block.steps * block.w_bytes
        tile = block.constants.tile_batch * block.constants.tile_out * block.constants.tile_d
        groups_batch = block.constants.groups_batch * block.row_tiles
        x_moved = block.tiles_out // block.passes * block.x_bytes_moved(batch) / block.constants.cluster_out
        read = w * groups_batch * kernel.arithmetic.products // kernel.arithmetic.parts  # an instruction reads all of its operand B
        ways = 4 if block.kernel.epilogue.residual else 2  # Y's tile is written and read; with a residual, the residual's too
        multiply_adds = tiles * tile * block.steps * block.constants.tile_in * kernel.arithmetic.products
        return Work(
            blocks,
            self.memory_bytes(block.kernel, constants, batch),
            round(x_moved + block.y_bytes_moved(batch)) + w // block.constants.cluster_batch,
            (1 + block.passes) * x + w + read + ways * tiles * block.y_bytes,
            multiply_adds,
            tiles * block.steps / (block.constants.stages - 1),
            stages=tiles * block.steps,
            products=multiply_adds * (WARPGROUP // WARP) // (ROWS * block.constants.tile_out * block.k_step),
        )

    def in_clusters(self, kernel: KernelSpec, constants: Any) -> Iterator[Any]:
        """Yield the constants with the clusters that a search tries."""
        for batch, out in cluster.tried(self.block(kernel, constants)):
            changed = replace(constants, cluster_batch=batch, cluster_out=out)
            if all(rule.holds(kernel, changed) for rule in cluster.rules(self.block)):
                yield changed

    # ---- sources

    def instruction(self, kernel: KernelSpec, constants: ConstantsT) -> Wgmma:
        raise NotImplementedError

    def common_words(self, kernel: KernelSpec, constants: ConstantsT) -> dict[str, Any]:
        block = self.block(kernel, constants)
        image = "bsl" if not block.is_bsf else "flat" if block.is_flat else "slab"
        boxes = [Box(len(block.x_map[0]))]
        own = block.constants
        picture = draw(
            "A tile of Y. A cell is one instruction's, for one of the tile's j. Each block walks over tiles.",
            DrawnSide(own.tile_batch, "rows s of the batch", own.tile_batch // ROWS),
            DrawnSide(own.tile_out, "outputs k", 1),
            lambda row, _: f"warpgroup {row // block.row_tiles}",
        )
        return cluster.words(block, image) | {
            "operand": block.operand,
            "of_inputs": "bytes" if kernel.has_bytes_in else "same",
            "wgmma": self.instruction(kernel, constants),
            "picture": picture,
            "boxes": boxes,
        }

    def common_constexprs(self, kernel: KernelSpec, constants: ConstantsT) -> list[Constexpr]:
        block = self.block(kernel, constants)
        own = block.constants
        copying, multiplying = REGISTERS[block.groups]
        return [
            *pattern_constexprs(block.kernel),
            *epilogue_constexprs(block.kernel),
            Constexpr("TILE_BATCH", own.tile_batch, "rows of the batch per tile"),
            Constexpr("TILE_OUT", own.tile_out, "outputs k per tile, for each of its j: columns of an instruction"),
            Constexpr("TILE_IN", own.tile_in, "inputs l per stage"),
            Constexpr("TILE_D", own.tile_d, "neighbouring j per tile"),
            *cluster.constexprs(block),
            Constexpr("GROUPS", block.groups, "warpgroups that multiply"),
            Constexpr("STAGES", own.stages, "stages in shared memory, of what is brought step by step"),
            Constexpr("THREADS", block.threads, "threads per block: one more warpgroup copies"),
            Constexpr("COPYING_REGISTERS", copying, "registers per thread of the warpgroup that copies; 0: as launched"),
            Constexpr("MULTIPLYING_REGISTERS", multiplying, "registers per thread of the warpgroups that multiply; 0: as launched"),
            Constexpr("ROW_TILES", block.row_tiles, "instructions of a warpgroup along the batch, 64 entries each"),
            Constexpr("K_STEP", block.k_step, "inputs of one instruction"),
            Constexpr("COMPONENTS", block.components, "parts that an operand is split into"),
            Constexpr("LANE_INPUTS", block.lane_inputs, "inputs of one instruction that a lane holds of a batch entry"),
            Constexpr("RUN_OUT", block.run_out, "neighbouring outputs of a lane"),
            Constexpr("STEPS", block.steps, "stages until all C inputs are read"),
            Constexpr("TILES_OUT", block.tiles_out, "tiles along the outputs"),
            Constexpr("TILES_D", block.tiles_d, "tiles along j"),
            Constexpr("STEP_BYTES", block.step_bytes, "bytes of operand B of one instruction"),
            Constexpr("X_BYTES", block.x_bytes, "bytes of X per stage"),
            Constexpr("W_BYTES", block.w_bytes, "bytes of packed weights per stage"),
            Constexpr("STAGE_BYTES", block.stage_bytes, "bytes from one stage to the next: whole periods of a swizzle"),
            Constexpr("Y_BYTES", block.y_bytes, "bytes in which Y waits to be stored"),
            Constexpr("SHARED_BYTES", block.shared_bytes, "bytes of shared memory per block"),
            Constexpr("PACK_THREADS", PACK_THREADS, "threads per block of the packing kernel"),
            given_scales(kernel),
            Constexpr("SCALES", block.scales, "bytes of packed weights in front of their scales", "long long"),
        ]


def _positive_rule(kernel: KernelSpec, constants: Any) -> bool:
    return all(value >= 1 for name, value in vars(constants).items() if name not in ("promote", "resident"))


def _tile_out(constants: Any) -> int:
    return int(constants.tile_out)
