"""What follows from a tensor-core gradient kernel and its constants: sizes, pitches, and how a block's warps walk over a tile.

dY is operand A (rows: outputs), X is operand B (columns: inputs), and both lie in shared memory with the batch contiguous. A
lane reads both in 16-byte chunks: which batch entry a fragment's k-index means is free, as long as both agree, so that the
words of a chunk are a lane's operands as they lie.
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
    """The constants that a search may change."""

    tile_out: int  # outputs k a block, for each of its j
    tile_in: int  # inputs l a block
    tile_d: int  # neighbouring j a block (1 in bsl)
    tile_batch: int  # batch entries a stage
    warps_out: int  # warps of a plane along the outputs
    warps_in: int  # warps of a plane along the inputs
    stages: int  # stages of X and dY in shared memory
    promote: int  # batch entries after which tensor-core sums are added to plain ones
    parts: int  # parts of the batch, at most: each has blocks of its own
    min_blocks: int  # blocks that must fit a multiprocessor: bounds the registers


@cache
def find_image(pitch: int, tile: int, tile_d: int, vector: int, item_bytes: int, is_spread: bool) -> SideImage:
    """The image of a batch-size-first tile whose copies meet the fewest bank conflicts; then the least memory, and the longest
    runs of lanes. All in units of what is copied at once: a word holds one batch entry, or two, and a complex number is two words."""
    unit = max(4, item_bytes)
    of_chunk = CHUNK // unit

    def turns(plane: int, lane_run: int) -> int:
        addresses = []
        for lane in range(WARP):
            line, at = lane // lane_run, lane % lane_run * vector
            feature = at // tile_d
            along = line ^ (feature // 2 % 4 * of_chunk if is_spread else 0)
            addresses.append((at % tile_d * plane + feature * pitch + along) * unit)
        return write_cycles(addresses, unit)

    planes = [tile * pitch + pad for pad in (range(0, CYCLE_BYTES // unit, of_chunk) if tile_d > 1 else (0,))]
    choices = product(planes, lane_runs(tile * tile_d, vector, item_bytes))
    plane, lane_run = min(choices, key=lambda choice: (turns(*choice), choice[0], -choice[1]))
    return SideImage(1, pitch, plane, lane_run)


@dataclass(frozen=True)
class Shape(Parts):
    """Everything that follows from a kernel and its constants: sizes in stored elements, unless they say bytes."""

    kernel: KernelSpec
    constants: GradientMmaConstants

    @property
    def copy(self) -> str:
        """16-bit elements that must change their order go through registers: there are no 2-byte asynchronous copies."""
        return "registers" if self.is_bsf and self.kernel.item_bytes == 2 else "async"

    @property
    def is_spread(self) -> bool:
        """Whether features have their chunks of batch entries in orders of their own, so that copies of words meet other banks: where
        there are few planes, which keep them apart by themselves."""
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
        """Elements of a line: at 64 bytes beyond a multiple of 128, so that lanes of two lines read different banks."""
        bytes_ = self.constants.tile_batch * self.kernel.item_bytes
        return (bytes_ + (STRETCH - bytes_) % CYCLE_BYTES) // self.kernel.item_bytes

    def side(self, name: str, features: int, tile: int) -> Side:
        batch, tile_d = self.constants.tile_batch, self.constants.tile_d
        if not self.is_bsf:
            lane_run = power_of_two_in(batch // self.group, WARP)
            image = SideImage(1, self.pitch, tile * self.pitch, lane_run)
            return Side(name, image, CopyPlan(tile, batch, self.group, lane_run, self.warps), 0)
        together = 2 if self.copy == "registers" else 1  # batch entries of a word
        vector = self._vector(features, tile)
        image = find_image(self.pitch // together, tile, tile_d, vector, self.kernel.item_bytes, self.is_spread)
        image = SideImage(1, self.pitch, image.plane * together, image.lane_run)
        plan = CopyPlan(batch // together, tile * tile_d, vector, image.lane_run, self.warps)
        return Side(name, image, plan, plan.line_rounds * plan.run_rounds * 2 * max(1, vector // 2), together)

    def _vector(self, features: int, tile: int) -> int:
        """Neighbours that one load moves: they may not straddle a row, an i or a ragged edge."""
        if self.copy == "async":
            return 1
        d, tile_d = self.kernel.pattern.d, self.constants.tile_d
        whole = features * d if tile_d == d else gcd(d, tile_d)
        return gcd(self.group, whole, tile * tile_d)

    # ---- shared memory

    @property
    def shared_bytes(self) -> int:
        return max(self.constants.stages * self.stage * self.kernel.item_bytes, self.sum_threads * self.real_bytes)

    # ---- what it costs

    @property
    def step_shared_bytes(self) -> int:
        """Written to and read from shared memory in one step: each warp reads its own part of both."""
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
        """In which shared memory does that: the pitch keeps reads free of conflicts."""
        constants = self.constants
        read = constants.tile_d * (constants.tile_in * constants.warps_out + constants.tile_out * constants.warps_in)
        reads = divide_up(constants.tile_batch * read * self.kernel.item_bytes, CYCLE_BYTES)
        return self.write_cycles(self.x) + self.write_cycles(self.dy) + reads

    @property
    def registers(self) -> int:
        """An estimate for one thread: both kinds of sums, dY's chunks and operands, those of one column of X, and addresses."""
        operands = 8 * self.row_tiles + 8
        if self.components == 2:
            operands += operands // 2  # not all are split at once
        if self.kernel.arithmetic.is_complex:
            operands += 16  # rows as they are multiplied, with halves in other places
        if self.copy == "registers":
            held = self.x.held + self.dy.held
            return 2 * self.sums + operands + held + (80 if self.kernel.pattern.d > 1 else 52)
        return 2 * self.sums + operands + (56 if self.is_bsf else 44)
