"""X from registers: batch-size-first with few j or whole chunks of them, and float32 in batch-size-last.

wgmma takes operand A from shared memory only if its inputs are contiguous there. If they are d apart, or along the
batch in 32 bits, lanes read X in its stored order and keep it as fragments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Limits, named
from ksgen.families.mma.defaults import promotion
from ksgen.families.operands import CHUNK, is_precise
from ksgen.families.ptx import WgmmaInstruction
from ksgen.families.rules import Rule, multiple
from ksgen.families.tiles import WARP, Constants, divide_up, least_padded
from ksgen.families.traffic import SECTOR
from ksgen.families.wgmma import cluster
from ksgen.families.wgmma.block import (
    LINE,
    MOST_BOX,
    MOST_COLUMNS,
    ROWS,
    SPANS,
    Block,
    Reads,
    are_free_of_conflicts,
    deepest,
    has_boxes,
    takes_rows,
    whole_periods,
)
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

MOST_FLAT = 12  # largest d, if it is not a multiple of 16 bytes: a tile then has sums of all j
# registers per thread for sums and fragments, by the number of warpgroups that multiply
HELD = {1: 208, 2: 220, 3: 132}
MOST_OUT_OF_THREE = 192  # outputs of an instruction that fit 128 registers as ptxas allocates them
SPARE = 16  # registers that blocks in clusters need for addresses; with fewer, ptxas spills some
STAGE_TARGET = 32 * 1024  # bytes of X per stage, approximately: few barriers, several stages
TOGETHER = [(2, 1), (3, 1), (1, 2), (1, 3)]  # two or three warpgroups that multiply: along the batch, along j
GROUPS = [(1, 1), *TOGETHER]  # groups that a search tries
# the cost model's waits per instruction: for its fragments, then for the instruction; fitted to an H100's times
INSTRUCTION_WAITS = 0.15
# Costs of storing a piece of a sector, and of loading a box's row: the bytes of whole sectors that take as long. They
# were fitted to 73 times of kernels, in which a row takes longer than in a test of boxes alone.
PIECE, BOX_ROW = 128, 88
WANTED_STAGES = 4  # by default


@dataclass(frozen=True)
class RegistersConstants(Constants):
    """Constants that a search may change."""

    tile_batch: int  # rows of the batch per tile
    tile_out: int  # outputs k per tile, for each of its j
    tile_in: int  # inputs l per stage
    tile_d: int  # neighbouring j per tile (1 in bsl)
    groups_batch: int  # warpgroups that multiply, along the batch
    groups_d: int  # warpgroups that multiply, along j
    stages: int  # stages in shared memory: of X and W, or of W alone if X is resident
    promote: int  # inputs after which tensor-core sums are added to plain ones; 0: never
    # tiles of X in shared memory, each for all outputs; 0: X is in the stages, and is read again for each tile of
    # outputs
    resident: int = 0
    # warpgroups along j that join their chunks of Y in shared memory, so that runs are stored whole; 1: each stores its
    # own chunks
    join_d: int = 1
    # blocks with neighbouring tiles along the batch: each loads a part of their W for all of them
    cluster_batch: int = 1
    # blocks with neighbouring tiles along the outputs: each loads a part of their X for all of them
    cluster_out: int = 1
    x_from: str = "registers"

    entry_family: ClassVar[str] = "wgmma_registers"
    on_tensor_cores: ClassVar[bool] = True
    not_in_entries: ClassVar[tuple[str, ...]] = ("x_from",)

    @property
    def in_entries(self) -> dict[str, Any]:
        found = super().in_entries
        if self.join_d == 1:  # entries keep the names that they had without this constant
            del found["join_d"]
        return found


@dataclass(frozen=True)
class RegistersBlock(Block):
    kernel: KernelSpec
    constants: RegistersConstants

    why = "Hopper's wgmma with X from registers: bsf, and float32 arrays in bsl"
    constants_type = RegistersConstants

    @staticmethod
    def is_for(kernel: KernelSpec) -> bool:
        operand, inputs = kernel.arithmetic.operand, kernel.pattern.inputs
        has_inputs = has_boxes(inputs, kernel.layout == "bsf", kernel.item_bytes)
        if operand is None or kernel.arithmetic.is_complex or kernel.is_quantized or not has_inputs:
            return False
        if kernel.layout == "bsl":
            return kernel.item_bytes == operand.item_bytes == 4
        d = kernel.pattern.d
        return takes_rows(kernel) and (d <= MOST_FLAT or d % (CHUNK // kernel.item_bytes) == 0)

    @classmethod
    def fits_device(cls, family: Any, kernel: KernelSpec, limits: Limits) -> bool:
        return is_precise(kernel, limits) and _start(family, kernel, limits) is not None

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        of = cls.of
        return (
            Rule("tile_d is 1 in bsl, and in bsf d or a shorter run of 16, 32, 64 or 128 bytes", _planes_rule),
            Rule("warpgroups along j have whole 16-byte chunks of their own", _groups_rule),
            Rule(
                "tile_batch is 128 * groups_batch in bsl",
                lambda k, c: k.layout == "bsf" or of(k, c).row_tiles == 2,
                lambda k, c: 2 * ROWS * c.groups_batch,
            ),
            multiple(
                "tile_in", "the period of the lanes' order of inputs and of X's layout", lambda k, c: of(k, c).unit_in
            ),
            Rule("resident is 0, or in bsf 1 or 2 where outputs take several tiles", _resident_rule),
            Rule("join_d is 1, or groups_d if its warpgroups' chunks of Y are all j or whole sectors", _join_rule),
            Rule("promote is 0, or a multiple of tile_in", lambda k, c: c.promote >= 0 and c.promote % c.tile_in == 0),
            Rule(
                "sums and fragments fit a thread's registers",
                lambda k, c: of(k, c).held <= HELD[of(k, c).groups],
                lambda k, c: of(k, c).held,
            ),
            Rule(
                "tile_out is at most 192 where three warpgroups multiply",
                lambda k, c: of(k, c).groups < 3 or c.tile_out <= MOST_OUT_OF_THREE,
            ),
            Rule(
                "X is read from shared memory with no bank conflicts",
                lambda k, c: are_free_of_conflicts(of(k, c).reads),
            ),
        )

    @property
    def instruction(self) -> WgmmaInstruction:
        return WgmmaInstruction(self.operand, self.constants.tile_out, a_in_registers=True)

    @cached_property
    def swaps_rows(self) -> bool:
        """Whether neighbouring lanes read rows 0, 4, 1, 5 ... of eight, which an odd number of chunks per lane
        requires."""
        return self.is_flat and self.group_chunks % 2 == 1

    @property
    def reads(self) -> Reads:
        tile_batch, rounds = self.constants.tile_batch, self.constants.tile_in // self.group_inputs // 4
        return Reads(self.is_bsf, tile_batch, self.panel_bytes, self.span, self.group_chunks, rounds, self.swaps_rows)

    @property
    def own_chunks(self) -> int:
        """Neighbouring chunks of X that a lane reads: those with its warpgroup's j."""
        return self.group_chunks // self.constants.groups_d

    @property
    def fragment(self) -> int:
        """Registers of one set of fragments, which covers one period of the lanes' order."""
        return 4 * self.components * self.planes * self.row_tiles * self.super_steps

    @property
    def promoted_sums(self) -> int:
        return self.sums * (2 if self.constants.promote else 1)

    @property
    def held(self) -> int:
        """Registers of the sums, of one set of fragments, of the chunks that become fragments, and of addresses."""
        chunks = self.own_chunks * self.super_groups * self.row_tiles if self.is_bsf else 2
        return self.promoted_sums + self.fragment + (4 + 1) * chunks

    @property
    def fragment_sets(self) -> int:
        """Sets of fragments: two if they fit, so that one is loaded while the other is multiplied."""
        return 2 if self.held + self.fragment <= HELD[self.groups] else 1

    @property
    def passes(self) -> int:
        return self.tiles_out if self.constants.resident else 1

    @property
    def stage_bytes(self) -> int:
        return whole_periods(self.w_bytes) if self.constants.resident else super().stage_bytes

    @property
    def join_bytes(self) -> int:
        """Bytes of the buffer in which `join_d` warps join chunks of Y, for one output and all rows of each lane."""
        return 2 * self.row_tiles * WARP * int(self.constants.join_d) * CHUNK

    @property
    def y_bytes(self) -> int:
        warps = ROWS // 16 * int(self.constants.groups_batch)
        return warps * self.join_bytes if self.constants.join_d > 1 else 0

    @property
    def y_passed_bytes(self) -> int:
        constants = self.constants
        tile = int(constants.tile_batch * constants.tile_out * constants.tile_d)
        return tile * self.kernel.item_bytes if constants.join_d > 1 else 0

    @property
    def x_start(self) -> int:
        """Offset of the resident tiles of X, which follow the stages and their barriers."""
        return whole_periods(super().shared_bytes)

    @property
    def x_barriers(self) -> int:
        """Offset of the barriers of resident tiles: one per stage of a tile, and one for the tile."""
        return self.x_start + self.constants.resident * self.steps * self.x_bytes

    @property
    def shared_bytes(self) -> int:
        resident = self.constants.resident
        return self.x_barriers + 8 * resident * (self.steps + 1) if resident else super().shared_bytes

    @property
    def waits(self) -> float:
        """A warpgroup waits for each instruction's fragments, then for the instruction."""
        return INSTRUCTION_WAITS * int(self.constants.tile_in) / self.k_step

    @property
    def in_pieces(self) -> float:
        """A lane stores a piece of a sector if warpgroups divide the j, or if a tile has only some of them.

        Warpgroups that join their chunks store runs of chunks: two are a sector, but three share one with another run.
        """
        run_bytes, groups_d = int(self.constants.tile_d) * self.kernel.item_bytes, int(self.constants.groups_d)
        if self.constants.join_d > 1:
            return divide_up(run_bytes, SECTOR) * SECTOR / run_bytes
        if self.constants.tile_d == self.kernel.pattern.d or not self.is_bsf:
            return max(1, PIECE * groups_d / run_bytes) if groups_d > 1 else 1
        piece = PIECE * (2 if self.kernel.pattern.d * self.kernel.item_bytes >= LINE else 1)
        return piece * groups_d / max(SECTOR, run_bytes)

    @property
    def in_rows(self) -> float:
        """A box whose rows have only some of the j is loaded row by row."""
        return 1 if self.is_flat or not self.is_bsf else max(1, BOX_ROW / max(SECTOR, self.span))

    @property
    def unit_in(self) -> int:
        """Inputs of which a stage has a multiple: the period of the lanes' order and of X's layout."""
        unit = self.super_in
        while self.is_bsf and unit * self.constants.tile_d * self.kernel.item_bytes % self.panel_bytes:
            unit *= 2
        return unit

    # ---- the source

    def own_variables(self, variants: tuple[str, ...]) -> dict[str, Any]:
        constants, schedule = self.constants, "resident" if self.constants.resident else "streaming"
        conditions = {"resident": constants.resident, "promoted": constants.promote, "split": self.components == 2}
        return {
            "product": self.instruction.along_inputs,
            "variants": (*variants, *(name for name, holds in conditions.items() if holds)),
            "schedule": schedule,
            "walk": schedule,
            "store": "joined" if constants.join_d > 1 else self.kernel.layout,
            "out": "rows",
        }

    def own_constexprs(self) -> list[Constexpr]:
        constants = self.constants
        found = [
            named(constants, "GROUPS_BATCH", "warpgroups that multiply, along the batch"),
            named(self, "PLANES", "neighbouring j of a warpgroup"),
            named(self, "SUPER_IN", "inputs per period of the order in which lanes hold inputs"),
            named(self, "SUPER_STEPS", "instructions for SUPER_IN inputs of one j"),
            named(self, "FRAGMENT_SETS", "sets of fragments of X: 2 are read and multiplied alternately"),
        ]
        if self.is_bsf:
            found += [
                named(self, "PANEL_BYTES", "bytes of a row of X's image"),
                named(self, "SPAN", "bytes over which the image's 16-byte chunks are permuted"),
                named(self, "SWAPS_ROWS", "whether neighbouring lanes read rows 0, 4, 1, 5 ... of eight"),
                named(self, "GROUP_CHUNKS", "neighbouring chunks of a row that hold whole inputs"),
                named(self, "OWN_CHUNKS", "chunks of a group that a lane reads"),
                named(self, "GROUP_INPUTS", "inputs of a group of chunks, each with its TILE_D j"),
                named(self, "SUPER_GROUPS", "groups of chunks that a lane reads for SUPER_IN inputs"),
                named(self, "Y_VECTOR", "contiguous elements that one store of Y moves"),
            ]
        else:
            found.append(named(self, "Y_VECTOR", "rows of the batch that one store of Y moves"))
        if constants.resident:
            found += [
                named(constants, "RESIDENT", "tiles of X in shared memory, for all outputs: stages are of W alone"),
                named(self, "X_START", "byte at which tiles of X begin"),
                named(self, "X_BARRIERS", "byte at which the barriers of X begin"),
            ]
        if constants.join_d > 1:
            found += [
                named(constants, "JOIN_D", "warpgroups along j that join their chunks of Y into whole sectors"),
                named(self, "JOIN_BYTES", "bytes in which JOIN_D warps join chunks, for one output of each lane"),
            ]
        if constants.promote:
            found.append(named(constants, "PROMOTE", "inputs after which sums leave the tensor cores"))
        return found

    # ---- constants

    @classmethod
    def options(cls, family: Any, kernel: KernelSpec, limits: Limits) -> Iterator[RegistersConstants]:
        """Yield the rule's choice, then alternatives for every number of j per tile and every arrangement of two or
        three warpgroups, streaming and resident.

        The rule takes the fewest tiles along the outputs, since each reads X again; then the least padding, and stages
        that fill the memory. One warpgroup multiplies while another reads. An alternative has the widest tile and the
        deepest stages that fit, in all clusters that pay. All join chunks of Y if they may.
        """
        start, promote = _start(family, kernel, limits), promotion(kernel, limits)
        if start is None:
            raise ConstantsError(f"{kernel.name}: no tile of {family.name} fits")
        start = _joined(family, kernel, start, limits)
        yield _deepened(family, kernel, _widest(family, kernel, start, limits), limits)
        for tile_d, (batch, along_d), rows, resident in product(_runs(kernel), TOGETHER, (1, 2), (0, 1, 2)):
            narrow = RegistersConstants(ROWS * rows * batch, 8, MOST_BOX, tile_d, batch, along_d, 2, promote)
            narrow = narrow.changed(tile_in=RegistersBlock.of(kernel, narrow).unit_in)
            if not family.is_able(kernel, narrow, limits):
                continue
            narrow = _joined(family, kernel, narrow, limits)
            for spare in (0, SPARE):
                wide = _widest(family, kernel, narrow, limits, spare).changed(resident=resident)
                for each in _divisible(kernel, wide) if spare else [wide]:
                    if family.is_able(kernel, each, limits):
                        deep = _deepened(family, kernel, each, limits)
                        yield from family.in_clusters(kernel, deep) if spare else [deep]

    @classmethod
    def tiles(cls, kernel: KernelSpec, limits: Limits) -> Iterator[RegistersConstants]:
        """Yield every tile that a search tries if the rules allow it."""
        promote = promotion(kernel, limits)  # less often would be faster, but less precise than promised
        widths = (8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
        for resident, tile_d, (batch, along_d), rows, width, tile_in, stages in product(
            (0, 1, 2), _runs(kernel), GROUPS, (1, 2), widths, (8, 16, 32, 64, 128), (2, 3, 4, 5, 6, 8)
        ):
            if width < kernel.pattern.b + 8:
                apart = RegistersConstants(
                    ROWS * rows * batch, width, tile_in, tile_d, batch, along_d, stages, promote, resident
                )
                yield from {apart: None, apart.changed(join_d=along_d): None}


def _planes_rule(kernel: KernelSpec, constants: RegistersConstants) -> bool:
    tile_d, d, vector = constants.tile_d, kernel.pattern.d, CHUNK // kernel.item_bytes
    if kernel.layout == "bsl":
        return tile_d == 1
    has_runs, block = tile_d * kernel.item_bytes in SPANS, RegistersBlock.of(kernel, constants)
    if kernel.reads_exchanged and d == 1:
        return block.is_flat or block.has_short_runs
    if kernel.reads_exchanged:
        return has_runs and kernel.pattern.inputs.run % tile_d == 0
    return tile_d == d or (tile_d < d and d % vector == 0 and has_runs)


def _resident_rule(kernel: KernelSpec, constants: RegistersConstants) -> bool:
    has_passes = kernel.layout == "bsf" and constants.tile_out < kernel.pattern.b
    return constants.resident == 0 or (has_passes and constants.resident in (1, 2))


def _groups_rule(kernel: KernelSpec, constants: RegistersConstants) -> bool:
    vector = CHUNK // kernel.item_bytes
    return constants.groups_d == 1 or (kernel.layout == "bsf" and constants.tile_d % (vector * constants.groups_d) == 0)


def _join_rule(kernel: KernelSpec, constants: RegistersConstants) -> bool:
    tile_d, d, item_bytes = constants.tile_d, kernel.pattern.d, kernel.item_bytes
    if constants.join_d == 1:
        return True
    has_chunks = tile_d * item_bytes == CHUNK * constants.groups_d and not kernel.pattern.outputs.is_exchanged
    has_sectors = tile_d == d or (tile_d * item_bytes % SECTOR == 0 and d * item_bytes % SECTOR == 0)
    return kernel.layout == "bsf" and constants.join_d == constants.groups_d and has_chunks and has_sectors


def _joined(family: Any, kernel: KernelSpec, constants: RegistersConstants, limits: Limits) -> RegistersConstants:
    """The same constants, with all warpgroups along j joining their chunks of Y if they may."""
    joined = constants.changed(join_d=constants.groups_d)
    return joined if family.is_able(kernel, joined, limits) else constants


def _widest(
    family: Any, kernel: KernelSpec, start: RegistersConstants, limits: Limits, spare: int = 0
) -> RegistersConstants:
    """Tile with the fewest tiles along the outputs, then the least padding, that leaves `spare` registers."""
    b = kernel.pattern.b
    widths = [start.changed(tile_out=width) for width in range(8, min(MOST_COLUMNS, b + 7) + 1, 8)]
    most = HELD[RegistersBlock.of(kernel, start).groups] - spare
    able = (each for each in widths if family.is_able(kernel, each, limits))
    lean = [each for each in able if RegistersBlock.of(kernel, each).held <= most]
    return min(lean, key=lambda each: (divide_up(b, each.tile_out), each.tile_out), default=start)


def _divisible(kernel: KernelSpec, constants: RegistersConstants) -> dict[RegistersConstants, None]:
    """The tile, and narrower ones whose number along the outputs a cluster divides."""
    b = kernel.pattern.b
    tiles = divide_up(b, constants.tile_out)
    counts = (divide_up(tiles, blocks) * blocks for blocks in cluster.ALONG_OUT if blocks <= cluster.MOST_BY_DEFAULT)
    return dict.fromkeys(constants.changed(tile_out=divide_up(divide_up(b, count), 8) * 8) for count in counts)


def _start(family: Any, kernel: KernelSpec, limits: Limits) -> RegistersConstants | None:
    """Narrowest tile of two warpgroups, or of one if a large d without divisors leaves no room for two.

    None if none fits.
    """
    rows, (tile_d, groups_d), promote = 2 if kernel.layout == "bsl" else 1, _planes(kernel), promotion(kernel, limits)
    for groups_batch in (2, 1)[groups_d - 1 :]:
        start = RegistersConstants(ROWS * rows * groups_batch, 8, MOST_BOX, tile_d, groups_batch, groups_d, 2, promote)
        start = start.changed(tile_in=RegistersBlock.of(kernel, start).unit_in)
        if family.is_able(kernel, start, limits):
            return start
    return None


def _deepened(family: Any, kernel: KernelSpec, constants: RegistersConstants, limits: Limits) -> RegistersConstants:
    """The same tile with the stages that pad c the least, the longest ones of several, and as many as fit.

    WANTED_STAGES stages must fit, with at most STAGE_TARGET bytes of X each. If none does, the length stays.
    """
    c, unit = kernel.pattern.c, constants.tile_in
    deeper = [constants.changed(tile_in=unit << shift, stages=WANTED_STAGES) for shift in range(6)]
    short = (each for each in deeper if RegistersBlock.of(kernel, each).x_bytes <= STAGE_TARGET)
    able = {each.tile_in: each for each in short if family.is_able(kernel, each, limits)}
    chosen = able[least_padded(c, able)] if able else constants
    return deepest(family, kernel, chosen, limits)


def _runs(kernel: KernelSpec) -> list[int]:
    """Numbers of neighbouring j per tile that a search tries."""
    d, vector = kernel.pattern.d, CHUNK // kernel.item_bytes
    return [1] if kernel.layout == "bsl" else sorted({d, *(run for run in (vector, 2 * vector, 4 * vector) if run < d)})


def _planes(kernel: KernelSpec) -> tuple[int, int]:
    """Neighbouring j per tile, and warpgroups that share them: all j, or runs of 32 or 16 bytes if d is too large.

    An exchange of inputs may divide j into shorter runs.
    """
    d, vector = kernel.pattern.d, CHUNK // kernel.item_bytes
    if kernel.reads_exchanged and d > 1:
        d = kernel.pattern.inputs.run
    if kernel.layout == "bsl" or d < vector or (d % vector and d <= MOST_FLAT):
        return (1 if kernel.layout == "bsl" else d), 1
    if d == vector:
        return d, 1
    return (2 * vector, 2) if d % (2 * vector) == 0 else (vector, 1)
