"""What follows from a SIMT gradient kernel and its constants: sizes, pitches, how the batch is cut into parts, and how a block's
warps walk over a tile.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd

from ksgen.families.tiles import WARP, Constants, CopyPlan, Tiled, divide_up, power_of_two_in
from ksgen.spec import KernelSpec

LANES_IN, LANES_OUT = 8, 4  # a warp's lanes along the inputs and along the outputs
LEAST_BATCH = 64  # batch entries that are worth a part of their own
SUM_COLUMNS, SUM_ROWS = 32, 8  # weights a block of the second entry, and threads that share the parts of one
BANK_BYTES = 128  # that shared memory serves at once


@dataclass(frozen=True)
class GradientConstants(Constants):
    """The constants that a search may change."""

    tile_out: int  # outputs k a block, for each of its j
    tile_in: int  # inputs l a block
    tile_d: int  # neighbouring j a block (1 in bsl)
    tile_batch: int  # batch entries a stage
    thread_out: int  # sums a thread, along the outputs
    thread_in: int  # sums a thread, along the inputs
    stages: int  # stages of X and dY in shared memory
    parts: int  # parts of the batch, at most: each has blocks of its own
    min_blocks: int  # blocks that must fit a multiprocessor: bounds the registers
    copy: str  # "async": cp.async (sm_80 and later, 32 and 64-bit types); "registers": loads, then stores


@dataclass(frozen=True)
class Image:
    """How one operand's tile lies in shared memory, and how lanes copy it: an element (j, s, feature) is at
    j * plane + s * pitch + feature."""

    pitch: int
    plane: int
    lane_run: int


@dataclass(frozen=True)
class Side:
    """One operand: X, or the gradient of Y."""

    name: str
    features: int  # of an i and j
    tile: int
    image: Image
    plan: CopyPlan

    @property
    def held(self) -> int:
        """Elements that a thread holds on their way."""
        return self.plan.line_rounds * self.plan.run_rounds * self.plan.vector


@cache
def find_image(tile: int, tile_batch: int, tile_d: int, vector: int, real_bytes: int, is_bsf: bool) -> Image:
    """The image whose copies meet the fewest bank conflicts; then the least memory, and the longest runs of lanes."""
    banks, group = BANK_BYTES // real_bytes, 16 // real_bytes
    run = tile * tile_d if is_bsf else tile_batch

    def turns(image: Image) -> int:
        """That shared memory takes for one element of each of the lanes that it serves at once."""
        count = [0] * banks
        for lane in range(banks):
            line, at = lane // image.lane_run, lane % image.lane_run * vector
            s, j, feature = (line, at % tile_d, at // tile_d) if is_bsf else (at, 0, line)
            count[(j * image.plane + s * image.pitch + feature) % banks] += 1
        return max(count)

    lanes = sorted({power_of_two_in(run // vector, most) for most in (4, 8, 16, 32)}, reverse=True)
    pads = range(0, banks, group)
    images = [
        Image(tile + pad, tile_batch * (tile + pad) + (0 if tile_d == 1 else more), lane_run)
        for lane_run, pad, more in product(lanes, pads, pads if tile_d > 1 else (0,))
    ]
    return min(images, key=lambda image: (turns(image), image.plane, -image.lane_run))


@dataclass(frozen=True)
class Shape(Tiled):
    """Everything that follows from a kernel and its constants: sizes in elements of the sums' type."""

    kernel: KernelSpec
    constants: GradientConstants

    @property
    def is_bsf(self) -> bool:
        return self.kernel.layout == "bsf"

    @property
    def real_bytes(self) -> int:
        return max(4, self.kernel.item_bytes)

    @property
    def group(self) -> int:
        """Elements of a 16-byte access to shared memory."""
        return 16 // self.real_bytes

    @property
    def group_in(self) -> int:
        return gcd(self.group, self.constants.thread_in)

    @property
    def group_out(self) -> int:
        return gcd(self.group, self.constants.thread_out)

    # ---- warps

    @property
    def warps_in(self) -> int:
        return self.constants.tile_in // (LANES_IN * self.constants.thread_in)

    @property
    def warps_out(self) -> int:
        return self.constants.tile_out // (LANES_OUT * self.constants.thread_out)

    @property
    def warps(self) -> int:
        return self.constants.tile_d * self.warps_in * self.warps_out

    @property
    def threads(self) -> int:
        return WARP * self.warps

    # ---- the two operands

    @property
    def x(self) -> Side:
        return self._side("x", self.kernel.pattern.c, self.constants.tile_in)

    @property
    def dy(self) -> Side:
        return self._side("dy", self.kernel.pattern.b, self.constants.tile_out)

    def _side(self, name: str, features: int, tile: int) -> Side:
        constants = self.constants
        vector = self._vector(features, tile)
        scattered = 1 if constants.copy == "async" else vector  # a wide asynchronous copy stays in one piece
        image = find_image(tile, constants.tile_batch, constants.tile_d, scattered, self.real_bytes, self.is_bsf)
        lines, run = (constants.tile_batch, tile * constants.tile_d) if self.is_bsf else (tile, constants.tile_batch)
        lane_run = image.lane_run if scattered == vector else power_of_two_in(run // vector, 8)
        return Side(name, features, tile, image, CopyPlan(lines, run, vector, lane_run, self.warps))

    def _vector(self, features: int, tile: int) -> int:
        """Neighbours that one copy moves: they may not straddle a row, an i or a ragged edge, nor, where they are copied
        asynchronously, lie apart in shared memory."""
        d, tile_d = self.kernel.pattern.d, self.constants.tile_d
        if self.constants.copy == "async":
            return self.group if self.is_bsf and d == 1 and features % self.group == 0 else 1
        if not self.is_bsf:
            return self.group
        whole = features * d if tile_d == d else gcd(d, tile_d)
        return self.group if whole % self.group == 0 and (tile * tile_d) % self.group == 0 else 1

    # ---- shared memory

    @property
    def dy_base(self) -> int:
        return self.constants.tile_d * self.x.image.plane

    @property
    def stage(self) -> int:
        return self.dy_base + self.constants.tile_d * self.dy.image.plane

    @property
    def shared_reals(self) -> int:
        return max(self.constants.stages * self.stage, SUM_COLUMNS * SUM_ROWS)

    @property
    def shared_bytes(self) -> int:
        return self.shared_reals * self.real_bytes

    # ---- tiles, and parts of the batch

    @property
    def tiles_in(self) -> int:
        return divide_up(self.kernel.pattern.c, self.constants.tile_in)

    @property
    def tiles(self) -> int:
        return self.kernel.pattern.a * self.tiles_d * self.tiles_out * self.tiles_in

    @property
    def tile_weights(self) -> int:
        """Sums of a tile, those beyond ragged edges included."""
        return self.constants.tile_d * self.constants.tile_out * self.constants.tile_in

    @property
    def part_bytes(self) -> int:
        """The sums that one part of the batch leaves."""
        return self.tiles * self.tile_weights * self.real_bytes

    @property
    def least_steps(self) -> int:
        """Steps that a part has at least, where there are several."""
        return divide_up(LEAST_BATCH, self.constants.tile_batch)

    def part_steps(self, batch: int) -> int:
        """Steps of a part: `part_steps` of the text counts them alike."""
        steps = divide_up(batch, self.constants.tile_batch)
        return divide_up(steps, max(1, min(self.constants.parts, steps // self.least_steps)))

    def parts(self, batch: int) -> int:
        return divide_up(divide_up(batch, self.constants.tile_batch), self.part_steps(batch))

    @property
    def registers(self) -> int:
        """An estimate for one thread: the sums, two sets of operands, what is held on its way, and addresses."""
        constants, words = self.constants, self.real_bytes // 4
        sums = constants.thread_in * constants.thread_out
        held, addresses = 0, 52
        if constants.copy == "registers":
            held = (self.x.held + self.dy.held) * words  # 16-bit elements have a register each
            spread = self.is_bsf and self.kernel.pattern.d > 1  # over several planes
            addresses = {2: 64, 4: 60, 8: 42}[self.kernel.item_bytes] if spread else 42
        return words * (sums + 2 * (constants.thread_in + constants.thread_out)) + held + addresses
