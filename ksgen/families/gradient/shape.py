"""Sizes derived from a SIMT gradient kernel and its constants: pitches, and the walk of a block's warps over a tile."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd

from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.gradient.parts import Parts, Side, SideImage, lane_runs
from ksgen.families.simt.shape import eight_read_cycles, four_read_cycles
from ksgen.families.tiles import Constants, CopyPlan, power_of_two_in
from ksgen.spec import KernelSpec

LANES_IN, LANES_OUT = 8, 4  # a warp's lanes along the inputs and along the outputs


@dataclass(frozen=True)
class GradientConstants(Constants):
    """Constants that a search may change."""

    tile_out: int  # outputs k per block, for each of its j
    tile_in: int  # inputs l per block
    tile_d: int  # neighbouring j per block (1 in bsl)
    tile_batch: int  # rows of the batch per stage
    thread_out: int  # sums per thread, along the outputs
    thread_in: int  # sums per thread, along the inputs
    stages: int  # stages of X and dY in shared memory
    parts: int  # parts of the batch, at most: each has blocks of its own
    min_blocks: int  # blocks that must fit a multiprocessor: bounds the registers
    copy: str  # "async": cp.async (sm_80 and later, 32 and 64-bit types); "registers": loads, then stores


@cache
def find_image(tile: int, tile_batch: int, tile_d: int, vector: int, item_bytes: int, is_bsf: bool) -> SideImage:
    """Layout whose copies have the fewest bank conflicts; then the least memory, and the longest runs of lanes."""
    real_bytes = max(4, item_bytes)
    banks, group = CYCLE_BYTES // real_bytes, 16 // real_bytes
    run = tile * tile_d if is_bsf else tile_batch

    def passes(image: SideImage) -> int:
        """Passes of shared memory for one element per lane, for the lanes that it serves at once."""
        count = [0] * banks
        for lane in range(banks):
            line, at = lane // image.lane_run, lane % image.lane_run * vector
            s, j, feature = (line, at % tile_d, at // tile_d) if is_bsf else (at, 0, line)
            count[(j * image.plane + s * image.next_entry + feature) % banks] += 1
        return max(count)

    pads = range(0, banks, group)
    images = [
        SideImage(tile + pad, 1, tile_batch * (tile + pad) + (0 if tile_d == 1 else more), lane_run)
        for lane_run, pad, more in product(lane_runs(run, vector, item_bytes), pads, pads if tile_d > 1 else (0,))
    ]
    return min(images, key=lambda image: (passes(image), image.plane, -image.lane_run))


@dataclass(frozen=True)
class GradientTiling(Parts):
    """Sizes derived from a kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: GradientConstants

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

    # ---- the two operands

    @property
    def copy(self) -> str:
        return self.constants.copy

    def side(self, name: str, features: int, tile: int) -> Side:
        constants = self.constants
        vector = self._vector(features, tile)
        scattered = 1 if constants.copy == "async" else vector  # a wide asynchronous copy stays in one piece
        image = find_image(tile, constants.tile_batch, constants.tile_d, scattered, self.kernel.item_bytes, self.is_bsf)
        lines, run = (constants.tile_batch, tile * constants.tile_d) if self.is_bsf else (tile, constants.tile_batch)
        lane_run = image.lane_run if scattered == vector else power_of_two_in(run // vector, 8)
        plan = CopyPlan(lines, run, vector, lane_run, self.warps)
        return Side(name, image, plan, plan.line_rounds * plan.run_rounds * plan.vector)

    def _vector(self, features: int, tile: int) -> int:
        """Neighbours that one copy moves.

        They may not straddle a row, an i or a ragged edge. If they are copied asynchronously, they must be contiguous
        in shared memory.
        """
        d, tile_d = self.kernel.pattern.d, self.constants.tile_d
        if self.constants.copy == "async":
            return self.group if self.is_bsf and d == 1 and features % self.group == 0 else 1
        if not self.is_bsf:
            return self.group
        whole = features * d if tile_d == d else gcd(d, tile_d)
        return self.group if whole % self.group == 0 and (tile * tile_d) % self.group == 0 else 1

    # ---- shared memory

    @property
    def shared_reals(self) -> int:
        return max(self.constants.stages * self.stage, self.sum_threads)

    @property
    def shared_bytes(self) -> int:
        return self.shared_reals * self.real_bytes

    # ---- costs

    @property
    def products(self) -> int:
        """Multiply-adds per product."""
        return 1

    @property
    def step_shared_bytes(self) -> int:
        """Bytes that are written to and read from shared memory in one step."""
        constants = self.constants
        copied = constants.tile_d * (constants.tile_in + constants.tile_out)
        reads = LANES_IN * constants.thread_in + LANES_OUT * constants.thread_out  # by a warp, for one row of the batch
        return constants.tile_batch * (copied + self.warps * reads) * self.real_bytes

    @property
    def kept_bytes(self) -> int:
        return self.real_bytes

    @property
    def step_shared_cycles(self) -> int:
        """Shared-memory cycles of one step: writes of both operands, and reads by all warps."""
        x, dy = self.group_in * self.real_bytes, self.group_out * self.real_bytes
        constants = self.constants
        reads = constants.thread_in // self.group_in * eight_read_cycles(x)
        reads += constants.thread_out // self.group_out * four_read_cycles(dy)
        return self.write_cycles(self.x) + self.write_cycles(self.dy) + constants.tile_batch * self.warps * reads

    @property
    def registers(self) -> int:
        """Estimated registers per thread: sums, two sets of operands (one of complex numbers), elements on their way
        through registers, and addresses."""
        constants, words = self.constants, self.real_bytes // 4
        sums = constants.thread_in * constants.thread_out
        held, addresses = 0, 52
        if constants.copy == "registers":
            held = (self.x.held + self.dy.held) * words  # 16-bit elements have a register each
            spread = self.is_bsf and self.kernel.pattern.d > 1  # over several planes
            addresses = {2: 64, 4: 60}.get(self.kernel.item_bytes, 42) if spread else 42
        sets = 1 if self.kernel.arithmetic.is_complex else 2
        return words * (sums + sets * (constants.thread_in + constants.thread_out)) + held + addresses
