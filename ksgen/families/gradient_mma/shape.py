"""Sizes derived from a tensor-core gradient kernel and its constants: pitches, and the walk of a block's warps over a
tile.

dY is operand A (rows: outputs), X is operand B (columns: inputs). Both are in shared memory with the batch contiguous.
A lane reads both in 16-byte chunks. A fragment's k-index may mean any row of the batch, as long as both operands agree.
So the words of a chunk are a lane's operands, unchanged.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd

from ksgen.families.banks import CYCLE_BYTES, write_cycles
from ksgen.families.gradient.parts import Parts, Side, SideImage, lane_runs
from ksgen.families.mma.shape import COLUMNS, ROWS
from ksgen.families.operands import CHUNK
from ksgen.families.tiles import WARP, Constants, CopyPlan, divide_up, power_of_two_in
from ksgen.spec import KernelSpec

STRETCH = 64  # bytes of a line that four lanes read at once
FEW_PLANES = 2


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
    parts: int  # parts of the batch, at most: each has blocks of its own
    min_blocks: int  # blocks that must fit a multiprocessor: bounds the registers


@cache
def find_image(pitch: int, tile: int, tile_d: int, vector: int, item_bytes: int, is_spread: bool) -> SideImage:
    """Layout of a batch-size-first tile whose copies have the fewest bank conflicts; then the least memory, and the
    longest runs of lanes.

    Sizes are in units of what is copied at once. A word holds one row of the batch, or two; a complex number is two
    words.
    """
    unit = max(4, item_bytes)
    of_chunk = CHUNK // unit

    def cycles(plane: int, lane_run: int) -> int:
        addresses = []
        for lane in range(WARP):
            line, at = lane // lane_run, lane % lane_run * vector
            feature = at // tile_d
            along = line ^ (feature // 2 % 4 * of_chunk if is_spread else 0)
            addresses.append((at % tile_d * plane + feature * pitch + along) * unit)
        return write_cycles(addresses, unit)

    planes = [tile * pitch + pad for pad in (range(0, CYCLE_BYTES // unit, of_chunk) if tile_d > 1 else (0,))]
    choices = product(planes, lane_runs(tile * tile_d, vector, item_bytes))
    plane, lane_run = min(choices, key=lambda choice: (cycles(*choice), choice[0], -choice[1]))
    return SideImage(1, pitch, plane, lane_run)


@dataclass(frozen=True)
class GradientMmaTiling(Parts):
    """Everything that follows from a kernel and its constants: sizes in stored elements, unless they say bytes."""

    kernel: KernelSpec
    constants: GradientMmaConstants

    @property
    def copy(self) -> str:
        """16-bit elements that must change their order go through registers: there are no 2-byte asynchronous copies."""
        return "registers" if self.is_bsf and self.kernel.item_bytes == 2 else "async"

    @property
    def is_spread(self) -> bool:
        """Whether each feature has its own order of chunks of the batch, so that copies of words meet other banks.

        With many planes these keep the copies apart by themselves.
        """
        return self.is_bsf and self.copy == "async" and self.constants.tile_d <= FEW_PLANES

    @property
    def group(self) -> int:
        """Elements of a chunk."""
        return CHUNK // self.kernel.item_bytes

    @property
    def operand(self) -> str:
        """The precision of what is multiplied."""
        return self.kernel.arithmetic.name

    @property
    def components(self) -> int:
        """Parts that an operand is split into."""
        return self.kernel.arithmetic.parts

    @property
    def products(self) -> int:
        """Multiply-adds that stand for one."""
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
        """Accumulators a thread, without the plain ones that they are promoted to."""
        return 4 * self.kernel.arithmetic.halves * self.row_tiles * self.column_tiles

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
        vector = self._vector(features, tile)
        image = find_image(self.pitch // together, tile, tile_d, vector, self.kernel.item_bytes, self.is_spread)
        image = SideImage(1, self.pitch, image.plane * together, image.lane_run)
        plan = CopyPlan(batch // together, tile * tile_d, vector, image.lane_run, self.warps)
        return Side(name, image, plan, plan.line_rounds * plan.run_rounds * 2 * max(1, vector // 2), together)

    def _vector(self, features: int, tile: int) -> int:
        """Neighbours that one load moves. They may not straddle a row, an i or a ragged edge."""
        if self.copy == "async":
            return 1
        d, tile_d = self.kernel.pattern.d, self.constants.tile_d
        whole = features * d if tile_d == d else gcd(d, tile_d)
        return gcd(self.group, whole, tile * tile_d)

    # ---- shared memory

    @property
    def shared_bytes(self) -> int:
        return max(self.constants.stages * self.stage * self.kernel.item_bytes, self.sum_threads * self.real_bytes)

    # ---- costs

    @property
    def step_shared_bytes(self) -> int:
        """Bytes that are written to and read from shared memory in one step: each warp reads its own part of both
        operands."""
        constants = self.constants
        written = constants.tile_d * (constants.tile_in + constants.tile_out)
        read = constants.tile_d * (constants.tile_in * constants.warps_out + constants.tile_out * constants.warps_in)
        return constants.tile_batch * (written + read) * self.kernel.item_bytes

    @property
    def kept_bytes(self) -> int:
        return self.kernel.item_bytes

    @property
    def chunk(self) -> int:
        return self.group if self.is_spread else 0

    @property
    def step_shared_cycles(self) -> int:
        """Shared-memory cycles of one step; the pitch keeps reads free of conflicts."""
        constants = self.constants
        read = constants.tile_d * (constants.tile_in * constants.warps_out + constants.tile_out * constants.warps_in)
        reads = divide_up(constants.tile_batch * read * self.kernel.item_bytes, CYCLE_BYTES)
        return self.write_cycles(self.x) + self.write_cycles(self.dy) + reads

    @property
    def registers(self) -> int:
        """Estimated registers per thread: both kinds of sums, dY's chunks and operands, those of one column of X, and
        addresses."""
        operands = 8 * self.row_tiles + 8
        if self.components == 2:
            operands += operands // 2  # not all are split at once
        if self.kernel.arithmetic.is_complex:
            operands += 16  # rows in the order in which they are multiplied, with swapped halves
        if self.copy == "registers":
            held = self.x.held + self.dy.held
            return 2 * self.sums + operands + held + (80 if self.kernel.pattern.d > 1 else 52)
        return 2 * self.sums + operands + (56 if self.is_bsf else 44)
