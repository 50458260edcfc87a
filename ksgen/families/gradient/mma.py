"""The gradient on tensor cores, by `mma.sync` in 16-bit and tf32 precisions.

This module has its constants and rules, the sizes derived from them, and the tiles to choose from.

dY is operand A (rows: outputs), X is operand B (columns: inputs). Both are in shared memory with the batch contiguous.
A lane reads both in 16-byte chunks. Along the K dimension of `mma`, rows of the batch may have any order that both
operands share. So the words of a chunk are a lane's operands, unchanged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd
from typing import Any, ClassVar

from ksgen.families.banks import CYCLE_BYTES, Image, image_cycles, write_cycles
from ksgen.families.base import Constexpr, Limits, named
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.gpus import PORTABLE, REGISTERS
from ksgen.families.gradient.parts import MOST_TILE, Parts, Side, SideImage, heading, lane_runs, registers_taken
from ksgen.families.mma.shape import COLUMNS, ROWS
from ksgen.families.operands import CHUNK, tensor_operand
from ksgen.families.rules import Rule, at_most, multiple, positive
from ksgen.families.simt.defaults import neighbours, planes_of_search
from ksgen.families.tiles import MOST_THREADS, WARP, Constants, CopyPlan, divide_up, power_of_two_in
from ksgen.spec import KernelSpec
from ksgen.spec.precision import on_tensor_cores

STRETCH = 64  # bytes of a line that four lanes read at once
FEW_PLANES = 2  # most planes for which the order of chunks depends on the feature
DEFAULT_SUMS = 64  # most accumulators per thread in a default, which has the same number of plain sums
MOST_SUMS = 96  # most accumulators per thread
MOST_REGISTERS = 236  # estimated, of 255 per thread


@dataclass(frozen=True)
class GradientMmaConstants(Constants):
    """Constants that a search may change."""

    tile_out: int  # outputs k per block, for each of its j
    tile_in: int  # inputs l per block
    tile_d: int  # neighbouring j per block (1 in bsl)
    tile_batch: int  # rows of the batch per stage
    warps_out: int  # warps of a plane along the outputs
    warps_in: int  # warps of a plane along the inputs
    stages: int  # stages of X and dY in shared memory
    promote: int  # rows of the batch after which tensor-core sums are added to plain ones
    parts: int  # parts of the batch, at most; each has its own blocks
    min_blocks: int  # blocks that must fit on a multiprocessor: bounds the registers

    entry_family: ClassVar[str] = "gradient_mma"
    template: ClassVar[str] = "gradient_mma"
    on_tensor_cores: ClassVar[bool] = True


@cache
def find_image(pitch: int, tile: int, tile_d: int, vector: int, item_bytes: int, is_spread: bool) -> tuple[int, int]:
    """Distance of planes, and lanes that copy a line together, of a batch-size-first tile.

    Copies have the fewest bank conflicts; then the memory is the least, and the runs of lanes are the longest. Sizes
    count what is copied at once. That is a word, which holds one or two rows of the batch, or a complex number, which
    is two words.
    """
    unit = max(4, item_bytes)
    of_chunk = CHUNK // unit

    def cycles(plane: int, lane_run: int) -> int:
        image = Image(tile_d, plane, 1, pitch, unit, of_chunk if is_spread else 0)
        return image_cycles(write_cycles, image, lane_run, vector, unit)

    planes = [tile * pitch + pad for pad in (range(0, CYCLE_BYTES // unit, of_chunk) if tile_d > 1 else (0,))]
    choices = product(planes, lane_runs(tile * tile_d, vector, item_bytes))
    return min(choices, key=lambda choice: (cycles(*choice), choice[0], -choice[1]))


@dataclass(frozen=True)
class GradientMmaTiling(Parts):
    """Sizes derived from a kernel and its constants, in stored elements unless they say bytes."""

    kernel: KernelSpec
    constants: GradientMmaConstants

    why = "the weights' gradient on tensor cores, from sm_80 on"
    most_blocks = 6

    @staticmethod
    def is_for(kernel: KernelSpec, limits: Limits) -> bool:
        """Whether the device can compute the kernel by this tiling."""
        return limits.tensor_cores and kernel.arithmetic.operand is not None

    @staticmethod
    def planes(kernel: KernelSpec) -> tuple[int, ...]:
        """Numbers of j per tile that a default may have, the wanted one first."""
        wanted = 1 if kernel.layout == "bsl" else neighbours(kernel.pattern.d)
        return (wanted, min(wanted, 4), 1)

    @property
    def copy(self) -> str:
        """Path of copies: registers for 16-bit bsf, which is transposed; asynchronous copies move at least 4 bytes."""
        return "registers" if self.is_bsf and self.kernel.item_bytes == 2 else "async"

    @property
    def is_spread(self) -> bool:
        """Whether the order of chunks of the batch depends on the feature, so that a copy's words go to other banks.

        With more planes, the pitch of the planes is enough.
        """
        return self.is_bsf and self.copy == "async" and self.constants.tile_d <= FEW_PLANES

    @property
    def group(self) -> int:
        """Elements of a chunk."""
        return CHUNK // self.kernel.item_bytes

    @property
    def components(self) -> int:
        """Parts that an operand is split into."""
        return self.kernel.arithmetic.parts

    @property
    def products(self) -> int:
        """Multiply-adds per product of two elements: several if operands are split."""
        return self.kernel.arithmetic.products

    # ---- warps

    @property
    def warps(self) -> int:
        return self.constants.tile_d * self.constants.warps_out * self.constants.warps_in

    @property
    def row_tiles(self) -> int:
        """Matrix instructions of a warp along its outputs."""
        return self.constants.tile_out // (ROWS * self.constants.warps_out)

    @property
    def column_tiles(self) -> int:
        """Matrix instructions of a warp along its inputs."""
        return self.constants.tile_in // (COLUMNS * self.constants.warps_in)

    @property
    def sums(self) -> int:
        """Accumulators per thread, without the plain ones to which they are promoted."""
        return 4 * self.kernel.arithmetic.reals_per_number * self.row_tiles * self.column_tiles

    # ---- the two operands

    @property
    def pitch(self) -> int:
        """Elements per line: 64 bytes more than a multiple of 128, so that lanes of two lines read different banks."""
        bytes_ = self.constants.tile_batch * self.kernel.item_bytes
        return (bytes_ + (STRETCH - bytes_) % CYCLE_BYTES) // self.kernel.item_bytes

    def side(self, name: str, features: int, tile: int) -> Side:
        batch, tile_d = self.constants.tile_batch, self.constants.tile_d
        if not self.is_bsf:
            lane_run = power_of_two_in(batch // self.group, WARP)
            image = SideImage(1, self.pitch, tile * self.pitch, lane_run)
            return Side(name, image, CopyPlan(tile, batch, self.group, lane_run, self.warps), 0)
        together = 2 if self.copy == "registers" else 1  # rows of the batch per word
        # neighbours that one load moves: they may not straddle a row, an i or a ragged edge
        whole = gcd(self.group, self.whole_run(features), tile * tile_d, self.run_of(name))
        vector = 1 if self.copy == "async" else whole
        pitch = self.pitch // together
        plane, lane_run = find_image(pitch, tile, tile_d, vector, self.kernel.item_bytes, self.is_spread)
        image = SideImage(1, self.pitch, plane * together, lane_run)
        plan = CopyPlan(batch // together, tile * tile_d, vector, lane_run, self.warps)
        return Side(name, image, plan, plan.line_rounds * plan.run_rounds * 2 * max(1, vector // 2), together)

    # ---- shared memory

    @property
    def shared_bytes(self) -> int:
        return max(self.constants.stages * self.stage * self.kernel.item_bytes, self.sum_threads * self.real_bytes)

    # ---- costs

    @property
    def read_bytes(self) -> int:
        """Bytes read from shared memory per step: each warp reads its own part of both operands."""
        constants = self.constants
        read = constants.tile_d * (constants.tile_in * constants.warps_out + constants.tile_out * constants.warps_in)
        return constants.tile_batch * read * self.kernel.item_bytes

    @property
    def step_shared_bytes(self) -> int:
        """Bytes written to and read from shared memory per step."""
        constants = self.constants
        written = constants.tile_d * (constants.tile_in + constants.tile_out)
        return constants.tile_batch * written * self.kernel.item_bytes + self.read_bytes

    @property
    def kept_bytes(self) -> int:
        return self.kernel.item_bytes

    @property
    def chunk(self) -> int:
        return self.group if self.is_spread else 0

    @property
    def step_shared_cycles(self) -> int:
        """Shared-memory cycles of one step; the pitch keeps reads free of conflicts."""
        return self.write_cycles(self.x) + self.write_cycles(self.dy) + divide_up(self.read_bytes, CYCLE_BYTES)

    @property
    def registers(self) -> int:
        """Estimated registers per thread: both kinds of sums, dY's chunks and operands, a column of X, addresses."""
        operands = 8 * self.row_tiles + 8
        if self.components == 2:
            operands += operands // 2  # not all are split at once
        if self.kernel.arithmetic.is_complex:
            operands += 16  # rows in the order in which they are multiplied, with swapped halves
        if self.copy == "registers":
            held = self.x.held + self.dy.held
            return 2 * self.sums + operands + held + (80 if self.kernel.pattern.d > 1 else 52)
        return 2 * self.sums + operands + (56 if self.is_bsf else 44)

    # ---- the source

    @property
    def picture(self) -> str:
        constants, rows, columns = self.constants, ROWS * self.row_tiles, COLUMNS * self.column_tiles
        return draw(
            heading(self),
            DrawnSide(constants.tile_out, "outputs k", constants.warps_out),
            DrawnSide(constants.tile_in, "inputs l", constants.warps_in),
            lambda row, column: f"warp {column + constants.warps_in * row}",
            f"A warp: {rows} x {columns} sums, by {self.row_tiles} x {self.column_tiles} instructions of {ROWS} x "
            f"{COLUMNS}.",
        )

    def own_variables(self) -> dict[str, Any]:
        is_split, is_complex = self.components == 2, self.kernel.arithmetic.is_complex
        operand = tensor_operand(self.kernel).name
        load = "gradient_mma/load_registers" if self.copy == "registers" else "gradient/load_async"
        has = {"complex_split": is_split and is_complex, "split": is_split, "spread": self.is_spread}
        variants = (self.kernel.arithmetic.name, *(name for name, is_so in has.items() if is_so))
        conjugated = ", conjugated" if is_complex else ""
        return {"load": load, "operand": operand, "variants": variants, "conjugated": conjugated}

    def own_constexprs(self) -> list[Constexpr]:
        constants = self.constants
        return [
            named(constants, "WARPS_OUT", "warps of a plane along the outputs"),
            named(constants, "WARPS_IN", "warps of a plane along the inputs"),
            named(constants, "PROMOTE", "rows of the batch after which sums leave the tensor cores"),
            named(self, "GROUP", "elements of a 16-byte chunk"),
            Constexpr(
                "ELEMENT_FLOATS", self.kernel.arithmetic.reals_per_number, "floats per element: 2 for a complex number"
            ),
            named(self, "COMPONENTS", "parts into which an operand is split"),
            named(self, "ROW_TILES", "matrix instructions of a warp along its outputs, 16 each"),
            named(self, "COLUMN_TILES", "matrix instructions of a warp along its inputs, 8 each"),
            Constexpr(
                "SHARED_ELEMENTS", self.shared_bytes // self.real_bytes, "sums that a block's shared memory can hold"
            ),
        ]

    # ---- constants

    @staticmethod
    def choices(kernel: KernelSpec, tile_d: int, limits: Limits) -> Iterator[GradientMmaConstants]:
        """The tiles from which a default is chosen."""
        goes_through_registers = kernel.layout == "bsf" and kernel.item_bytes == 2
        stages = (2,) if goes_through_registers else (4, 3, 2)
        tiles = _tiles(kernel, limits, DEFAULT_SUMS, [tile_d], (1,), stages)
        return (each for each in tiles if GradientMmaTiling(kernel, each).registers <= MOST_REGISTERS)

    @staticmethod
    def tiles_of_search(kernel: KernelSpec, limits: Limits) -> Iterator[GradientMmaConstants]:
        """The tiles that a search tries if the rules allow them."""
        return _tiles(kernel, limits, MOST_SUMS, planes_of_search(kernel), (1, 2), (2, 3, 4, 5))

    def cost(self) -> float:
        """Relative cost: matrix instructions, padding included, and the reads, copies and waits per instruction."""
        constants = self.constants
        tile_out, tile_in = constants.tile_out, constants.tile_in
        reads = ROWS / (tile_out // constants.warps_out) + ROWS / (tile_in // constants.warps_in)
        return self.padding * (1 + reads + 64 / tile_out + 64 / tile_in) * (1 + 0.2 / constants.stages)


def _tiles(
    kernel: KernelSpec, limits: Limits, most_sums: int, planes: Iterable[int], stretches: Iterable[int],
    stages: Iterable[int],
) -> Iterator[GradientMmaConstants]:  # fmt: skip
    """Yield the tiles with these numbers of j, stretches of the batch and stages, and at most so many sums."""
    promote = kernel.arithmetic.promotion(limits.has_fine_sums).batch
    for rows, columns, warps_out, warps_in, tile_d, stretch, stage in product(
        (1, 2, 3, 4), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4), planes, stretches, stages
    ):
        tile_out, tile_in = ROWS * rows * warps_out, COLUMNS * columns * warps_in
        sums = 4 * kernel.arithmetic.reals_per_number * rows * columns
        if max(tile_out, tile_in) <= MOST_TILE and sums <= most_sums:
            tile_batch = STRETCH // kernel.item_bytes * stretch
            yield GradientMmaConstants(tile_out, tile_in, tile_d, tile_batch, warps_out, warps_in, stage, promote, 1, 1)


def _registers(kernel: KernelSpec, constants: GradientMmaConstants) -> int:
    tiling = GradientMmaTiling(kernel, constants)
    return registers_taken(min(255, tiling.registers), tiling.threads, constants.min_blocks)


RULES: tuple[Rule[GradientMmaConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    Rule(
        "precision is one that tensor cores multiply",
        lambda k, c: k.arithmetic.operand is not None,
        lambda k, c: ", ".join(on_tensor_cores()),
    ),
    positive("every constant is at least 1"),
    multiple("tile_out", "16 * warps_out", lambda k, c: ROWS * c.warps_out),
    multiple("tile_in", "8 * warps_in", lambda k, c: COLUMNS * c.warps_in),
    Rule(
        "tile_batch is a multiple of 64 bytes",
        lambda k, c: c.tile_batch * k.item_bytes % STRETCH == 0,
        lambda k, c: STRETCH // k.item_bytes,
    ),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: GradientMmaTiling(k, c).threads),
    at_most("a thread has at most 96 sums", MOST_SUMS, lambda k, c: GradientMmaTiling(k, c).sums),
    at_most(
        "min_blocks blocks have at most 1536 threads",
        PORTABLE.threads,
        lambda k, c: GradientMmaTiling(k, c).threads * c.min_blocks,
    ),
    at_most("the registers of min_blocks blocks are at most 65536", REGISTERS, _registers),
    Rule(
        "stages is at least 2, and 2 in 16-bit bsf",
        lambda k, c: c.stages == 2 or (c.stages > 2 and GradientMmaTiling(k, c).copy == "async"),
    ),
    Rule("promote is a multiple of tile_batch", lambda k, c: c.promote % c.tile_batch == 0),
)
