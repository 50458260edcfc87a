"""Sizes derived from a SIMT kernel and its constants (pitches, planes, walks over a tile), and the constants' rules."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd

from ksgen.families.banks import CYCLE_BYTES, Image, line_cycles, read_cycles, write_cycles
from ksgen.families.rules import Rule, at_most, multiple, positive
from ksgen.families.tiles import MOST_THREADS, WARP, Constants, CopyPlan, Tiled, divide_up, power_of_two_in
from ksgen.families.traffic import Moved
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

LANES_BATCH, LANES_OUT = 8, 4  # a warp's lanes along the batch and along the outputs
# instructions that compute the address of a copy; it needs none at a constant distance from another copy
ADDRESS = 2
# registers per thread for the places of exchanged inputs that have no constant distances, in batch-size-first
PLACES = 24


@dataclass(frozen=True)
class RunPlan(CopyPlan):
    """Walk in which `warps_run` warps share a line: the number that takes the fewest instructions."""

    repeats: int  # steps along a run that are multiples of this number have a constant distance in global memory

    @property
    def warps_run(self) -> int:
        most = super().warps_run

        def instructions(warps_run: int) -> int:
            step = warps_run * self.lane_run * self.vector
            of_a_copy = 1 if step % self.repeats == 0 else 1 + ADDRESS
            rounds = divide_up(self.lines, self.warps // warps_run * self.lane_lines)
            return rounds * (ADDRESS + self.run // step * of_a_copy)

        return min((each for each in range(1, most + 1) if most % each == 0), key=instructions)


@dataclass(frozen=True)
class SimtConstants(Constants):
    """Constants that a search may change."""

    tile_batch: int  # rows of the batch per block
    tile_out: int  # outputs k per block, for each of its j
    tile_in: int  # inputs l per stage
    tile_d: int  # neighbouring j per block (1 in bsl)
    thread_batch: int  # sums per thread, along the batch
    thread_out: int  # sums per thread, along the outputs
    stages: int  # stages of X and W in shared memory
    min_blocks: int  # blocks that must fit on a multiprocessor: bounds the registers
    copy: str  # "async": cp.async (sm_80 and later, elements of 4, 8 or 16 bytes); "registers": loads, then stores


class PlainTile(Tiled):
    """Sizes of tiles whose warps have four lanes along the outputs, each with `thread_out` of them."""

    @property
    def shared_reals(self) -> int:
        """Elements of shared memory per block."""
        raise NotImplementedError

    @cached_property
    def group(self) -> int:
        """Elements of a 16-byte access to shared memory."""
        return 16 // self.real_bytes

    @cached_property
    def group_out(self) -> int:
        return gcd(self.group, self.constants.thread_out)

    @cached_property
    def warps_out(self) -> int:
        return int(self.constants.tile_out // (LANES_OUT * self.constants.thread_out))

    @property
    def shared_bytes(self) -> int:
        return self.shared_reals * self.real_bytes


@dataclass(frozen=True)
class SimtTiling(Moved, PlainTile):
    """Sizes derived from a kernel and its constants, in elements of the sums' type unless they say bytes."""

    kernel: KernelSpec
    constants: SimtConstants

    @cached_property
    def warps_batch(self) -> int:
        return self.constants.tile_batch // (LANES_BATCH * self.constants.thread_batch)

    @cached_property
    def warps(self) -> int:
        return self.constants.tile_d * self.warps_batch * self.warps_out

    @property
    def x_plane(self) -> int:
        """Elements from one j of a stage to the next."""
        return self.constants.tile_batch if self.kernel.layout == "bsl" else self.y_plane

    @property
    def x_pitch(self) -> int:
        """Elements from one l of a stage to the next: all j of an l come before those of the next l."""
        return self.constants.tile_d * self.x_plane

    @cached_property
    def y_plane(self) -> int:
        """Elements from one j to the next, for sums that become rows of Y in batch-size-first.

        This is the least number from `tile_batch` on that is `group` modulo the number of elements in 128 bytes.
        """
        rows, banks = self.constants.tile_batch, CYCLE_BYTES // self.real_bytes
        return rows + (self.group - rows) % banks

    @property
    def y_pitch(self) -> int:
        return self.constants.tile_d * self.y_plane

    @cached_property
    def slice_out(self) -> int:
        """Outputs that the store takes through shared memory at a time, as one slice."""
        return self.warps_out * LANES_OUT * self.group_out

    @property
    def w_base(self) -> int:
        return self.constants.tile_in * self.x_pitch

    @cached_property
    def w_stage(self) -> int:
        return self.constants.tile_d * self.constants.tile_in * self.constants.tile_out

    @property
    def stage(self) -> int:
        return self.w_base + self.w_stage

    @property
    def copied(self) -> int:
        """Elements that are copied to one stage, without the padding between them."""
        return self.constants.tile_batch * self.constants.tile_in * self.constants.tile_d + self.w_stage

    @property
    def transposed_elements(self) -> int:
        """Elements of one slice of sums that becomes rows of Y; 0 in batch-size-last."""
        return self.slice_out * self.y_pitch if self.kernel.layout == "bsf" else 0

    @property
    def intermediate_elements(self) -> int:
        """Elements of an intermediate that stay in shared memory for the next factor."""
        return self.kernel.pattern.out_features * self.constants.tile_batch

    @cached_property
    def shared_reals(self) -> int:
        return max(self.constants.stages * self.stage, self.transposed_elements)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one stage, including those of padding."""
        constants = self.constants
        return constants.tile_in * constants.tile_batch * constants.tile_out * constants.tile_d

    @property
    def w_rounds(self) -> int:
        return divide_up(self.w_stage, self.group * self.threads)

    @property
    def packed_bytes(self) -> int:
        blocks = 1 if "a" in self.kernel.tie else self.kernel.pattern.a
        tiles = blocks * (1 if "d" in self.kernel.tie else self.tiles_d) * self.tiles_out
        return tiles * self.steps * self.w_stage * self.real_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes that a thread of the packing kernel writes."""
        return self.real_bytes

    @cached_property
    def x_plan(self) -> CopyPlan:
        constants = self.constants
        if self.kernel.layout == "bsl":
            lane_run = power_of_two_in(constants.tile_batch // self.group, WARP)
            return CopyPlan(constants.tile_in, constants.tile_batch, self.group, lane_run, self.warps)
        run = constants.tile_d * constants.tile_in
        if constants.copy == "async":
            is_contiguous = constants.tile_d == self.kernel.pattern.d and not self.kernel.reads_exchanged
            repeats = 1 if is_contiguous else constants.tile_d
            return RunPlan(constants.tile_batch, run, 1, power_of_two_in(run, 8), self.warps, repeats)
        whole = gcd(self.whole_run(self.kernel.pattern.c), run, self.kernel.pattern.inputs.run)
        vector = self.group if whole % self.group == 0 else 1
        lane_run = power_of_two_in(run // vector, 8 if vector == 1 else 4)
        return CopyPlan(constants.tile_batch, run, vector, lane_run, self.warps)

    @cached_property
    def x_has_constant_steps(self) -> bool:
        """Whether a thread's inputs of a stage lie at constant distances in a row of X, if inputs are exchanged.

        This is so if all its copies have one j, and the divisions of l into stages, rounds and digits divide each
        other.
        """
        if not (self.is_bsf and self.kernel.reads_exchanged):
            return True
        step, tile_d = self.x_plan.run_step, self.constants.tile_d
        digits = [digit.unit for digit in self.kernel.pattern.inputs.digits if digit.name == "l"]
        units = sorted({step // tile_d, self.constants.tile_in, *digits})
        return step % tile_d == 0 and not any(high % low for low, high in pairwise(units))

    @cached_property
    def y_plan(self) -> CopyPlan:
        run = self.slice_out * self.constants.tile_d
        return CopyPlan(
            self.constants.tile_batch, run, 1, power_of_two_in(run, 8 if self.kernel.item_bytes > 2 else 16), self.warps
        )

    @property
    def y_at_once(self) -> int:
        """Rows whose residuals a thread loads before it adds the first, in batch-size-first; at most 64 bytes."""
        return min(64 // self.real_bytes, self.y_plan.line_rounds)

    # ---- cycles of shared memory

    @cached_property
    def copy_cycles(self) -> int:
        """Shared-memory cycles in which a block writes one stage."""
        x, at_once = self.x_plan, 1  # in batch-size-first, neighbours of a run are apart
        next_line, next_run = 1, self.x_plane
        if self.kernel.layout == "bsl":
            at_once, next_line, next_run = x.vector, self.x_pitch, 1
        image = Image(1, 0, next_line, next_run, self.real_bytes)
        along = line_cycles(write_cycles, image, x.lane_run, x.vector, at_once * self.real_bytes, x.run, at_once)
        return x.warp_steps * along + divide_up(self.w_stage * self.real_bytes, CYCLE_BYTES)

    @cached_property
    def read_cycles(self) -> int:
        """Shared-memory cycles in which one warp reads its operands for one input."""
        of_x = self.constants.thread_batch // self.group * eight_read_cycles(self.group * self.real_bytes)
        return of_x + self.constants.thread_out // self.group_out * four_read_cycles(self.group_out * self.real_bytes)

    def sum_cycles(self, pitch: int) -> int:
        """Shared-memory cycles in which a block writes its sums, with `pitch` elements from one output to the next."""
        writes = self.warps * self.constants.thread_out * (self.constants.thread_batch // self.group)
        return writes * _sum_cycles(self.group_out * pitch * self.real_bytes, self.group * self.real_bytes)

    @cached_property
    def transpose_read_cycles(self) -> int:
        """Shared-memory cycles in which a block reads its sums as rows of Y, for a tile without ragged edges."""
        y, image = self.y_plan, Image(1, 0, 1, self.y_plane, self.real_bytes)
        slices = self.constants.thread_out // self.group_out
        return slices * y.warp_steps * line_cycles(read_cycles, image, y.lane_run, 1, self.real_bytes, y.run, 1)

    def inside(self, stages: int) -> tuple[int, int]:
        """Bytes and cycles of shared memory for `stages` stages: copies into them, and reads by all warps."""
        constants = self.constants
        reads = stages * self.warps * constants.tile_in  # by warps, each for one input
        lanes = LANES_BATCH * constants.thread_batch + LANES_OUT * constants.thread_out
        moved = (stages * self.copied + reads * lanes) * self.real_bytes
        return moved, stages * self.copy_cycles + reads * self.read_cycles

    def keep_traffic(self, blocks: int) -> tuple[int, int]:
        """Bytes and cycles of shared memory in which blocks write an intermediate."""
        cycles = self.sum_cycles(self.kernel.pattern.d * self.constants.tile_batch)
        return blocks * self.intermediate_elements * self.real_bytes, blocks * self.tiles_of_batch * cycles

    def transpose_traffic(self, tiles: int, outputs: int) -> tuple[int, int]:
        """Bytes and cycles of shared memory in which the sums of `tiles` tiles become rows of Y; 0 in batch-size-last.

        All sums are written. Only the `outputs` sums that are elements of Y are read.
        """
        if self.kernel.layout == "bsl":
            return 0, 0
        sums = tiles * self.constants.tile_batch * self.constants.tile_out * self.constants.tile_d
        cycles = tiles * self.sum_cycles(self.y_pitch) + tiles * self.transpose_read_cycles * outputs // sums
        return (sums + outputs) * self.real_bytes, cycles

    @cached_property
    def registers(self) -> int:
        """Estimated registers per thread: sums, two sets of operands (complex: one), copied elements, addresses."""
        constants, words = self.constants, self.real_bytes // 4
        sums = constants.thread_batch * constants.thread_out
        held = 0
        if constants.copy == "registers":
            plan = self.x_plan
            elements = plan.line_rounds * plan.run_rounds * plan.vector
            # inputs of eight bits take a register each
            held = elements if self.kernel.has_bytes_in else elements * self.kernel.item_bytes // 4
            held += self.w_rounds * 4
        # with 12 or more outputs per thread, a copy that transposes takes more registers for addresses
        addresses = 32 if self.kernel.layout == "bsl" or constants.thread_out < 12 else 72
        addresses += 0 if self.x_has_constant_steps else PLACES
        addresses += 16 if words > 1 else 0
        sets = 1 if self.kernel.arithmetic.is_complex else 2
        return words * (sums + sets * (constants.thread_batch + constants.thread_out)) + held + addresses


def _lane_batch(lane: int) -> int:
    return lane // 2 % 8


def _lane_out(lane: int) -> int:
    return lane % 2 + lane // 16 * 2


@cache
def eight_read_cycles(size: int) -> int:
    """Shared-memory cycles of a warp's read of X: eight groups of `size` bytes along the batch.

    Lanes that differ only along the outputs share a group.
    """
    return read_cycles([_lane_batch(lane) * size for lane in range(WARP)], size)


@cache
def four_read_cycles(size: int) -> int:
    """Shared-memory cycles of a warp's read of weights: four groups of `size` bytes along the outputs.

    Lanes that differ only along the batch share a group.
    """
    return read_cycles([_lane_out(lane) * size for lane in range(WARP)], size)


@cache
def _sum_cycles(next_out: int, size: int) -> int:
    return write_cycles([_lane_out(lane) * next_out + _lane_batch(lane) * size for lane in range(WARP)], size)


def products_of(kernel: KernelSpec, copy: str) -> str:
    """Variant of the products: `pairs` for real float32 sums with asynchronous copies, else `each`.

    Only CUDA has asynchronous copies.
    """
    is_float32 = kernel.arithmetic.sums == "float32" and not kernel.arithmetic.is_complex
    return "pairs" if copy == "async" and is_float32 else "each"


def is_narrow(kernel: KernelSpec) -> bool:
    """Whether elements of X are smaller than the smallest asynchronous copy, 4 bytes: registers then hold and widen
    them.
    """
    return kernel.x_item_bytes < 4


RULES: tuple[Rule[SimtConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    positive("every constant is at least 1"),
    multiple("thread_batch", "a 16-byte group", lambda k, c: SimtTiling.of(k, c).group),
    Rule("thread_batch is at most 16", lambda k, c: c.thread_batch <= 16),
    Rule("thread_out is at most 16", lambda k, c: c.thread_out <= 16),
    multiple("tile_batch", "8 * thread_batch", lambda k, c: LANES_BATCH * c.thread_batch),
    multiple("tile_out", "4 * thread_out", lambda k, c: LANES_OUT * c.thread_out),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: SimtTiling.of(k, c).threads),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("stages is 2 with copy=registers", lambda k, c: c.copy != "registers" or c.stages == 2),
    Rule(
        "copy is registers in a 16-bit precision, and with X in eight bits",
        lambda k, c: c.copy != "async" or not is_narrow(k),
    ),
)
