"""The gradient by plain multiply-adds, for every pattern, batch, layout and device.

This module has its constants and rules, the sizes derived from them, and the tiles to choose from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd
from typing import Any

from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Constexpr, Limits, named
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.gradient.parts import MOST_TILE, Parts, Side, SideImage, heading, lane_runs
from ksgen.families.rules import Rule, at_most, multiple, positive
from ksgen.families.simt.defaults import neighbours, planes_of_search
from ksgen.families.simt.shape import LANES_OUT, PlainTile, eight_read_cycles, four_read_cycles, is_narrow
from ksgen.families.tiles import MOST_THREADS, Constants, CopyPlan, power_of_two_in
from ksgen.spec import KernelSpec

# sums per thread, by `copy`; elements that are copied through registers need registers, too
MOST_SUMS = {"async": 72, "registers": 48}
THREADS = (1, 2, 4, 6, 8, 12)  # sums per thread, along one side
LANES_IN = 8  # a warp's lanes along the inputs


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
    parts: int  # parts of the batch, at most; each has its own blocks
    min_blocks: int  # blocks that must fit on a multiprocessor: bounds the registers
    copy: str  # "async": cp.async (sm_80 and later, 32 and 64-bit types); "registers": loads, then stores


@cache
def find_image(tile: int, tile_batch: int, tile_d: int, vector: int, item_bytes: int, is_bsf: bool) -> SideImage:
    """Layout whose copies have the fewest bank conflicts; then the least memory, and the longest runs of lanes."""
    real_bytes = max(4, item_bytes)
    banks, group = CYCLE_BYTES // real_bytes, 16 // real_bytes
    run = tile * tile_d if is_bsf else tile_batch

    def passes(image: SideImage) -> int:
        """Passes of shared memory for one element per lane, of the lanes that are served at once."""
        count = [0] * banks
        for lane in range(banks):
            line, at = lane // image.lane_run, lane % image.lane_run * vector
            s, j, feature = (line, at % tile_d, at // tile_d) if is_bsf else (at, 0, line)
            count[(j * image.plane + s * image.next_row + feature) % banks] += 1
        return max(count)

    pads = range(0, banks, group)
    images = [
        SideImage(tile + pad, 1, tile_batch * (tile + pad) + (0 if tile_d == 1 else more), lane_run)
        for lane_run, pad, more in product(lane_runs(run, vector, item_bytes), pads, pads if tile_d > 1 else (0,))
    ]
    return min(images, key=lambda image: (passes(image), image.plane, -image.lane_run))


@dataclass(frozen=True)
class GradientTiling(PlainTile, Parts):
    """Sizes derived from a kernel and its constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: GradientConstants

    why = "the weights' gradient by plain multiply-adds, on every device"
    most_blocks = 8

    @staticmethod
    def is_for(kernel: KernelSpec, limits: Limits) -> bool:
        """Whether the device can compute the kernel by this tiling."""
        return True

    @staticmethod
    def planes(kernel: KernelSpec) -> tuple[int, ...]:
        """Numbers of j per tile that a default may have, the wanted one first."""
        return (1 if kernel.layout == "bsl" else neighbours(kernel.pattern.d), 1)

    @property
    def group_in(self) -> int:
        return gcd(self.group, self.constants.thread_in)

    # ---- warps

    @property
    def warps_in(self) -> int:
        return self.constants.tile_in // (LANES_IN * self.constants.thread_in)

    @property
    def warps(self) -> int:
        return self.constants.tile_d * self.warps_in * self.warps_out

    # ---- the two operands

    @property
    def copy(self) -> str:
        return self.constants.copy

    def side(self, name: str, features: int, tile: int) -> Side:
        constants, vector = self.constants, self._vector(name, features, tile)
        # elements that an asynchronous copy moves together stay contiguous
        scattered = 1 if constants.copy == "async" else vector
        image = find_image(tile, constants.tile_batch, constants.tile_d, scattered, self.kernel.item_bytes, self.is_bsf)
        lines, run = (constants.tile_batch, tile * constants.tile_d) if self.is_bsf else (tile, constants.tile_batch)
        lane_run = image.lane_run if scattered == vector else power_of_two_in(run // vector, 8)
        plan = CopyPlan(lines, run, vector, lane_run, self.warps)
        return Side(name, image, plan, plan.line_rounds * plan.run_rounds * plan.vector)

    def _vector(self, name: str, features: int, tile: int) -> int:
        """Neighbours that one copy moves.

        They may not straddle a row, an i or a ragged edge. If they are copied asynchronously, they must be contiguous
        in shared memory, too.
        """
        if not self.is_bsf:
            return 1 if self.copy == "async" else self.group
        if self.copy == "async" and self.kernel.pattern.d > 1:
            return 1
        whole = gcd(self.whole_run(features), tile * self.constants.tile_d, self.run_of(name))
        return self.group if whole % self.group == 0 else 1

    # ---- shared memory

    @property
    def shared_reals(self) -> int:
        return max(self.constants.stages * self.stage, self.sum_threads)

    # ---- costs

    @property
    def products(self) -> int:
        """Multiply-adds per product of two elements."""
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
        """Estimated registers per thread: sums, two sets of operands (complex: one), copied elements, addresses."""
        constants, words = self.constants, self.real_bytes // 4
        sums = constants.thread_in * constants.thread_out
        held, addresses = 0, 52
        if constants.copy == "registers":
            held = (self.x.held + self.dy.held) * words  # one register per 16-bit element
            is_spread = self.is_bsf and self.kernel.pattern.d > 1  # over several planes
            addresses = {2: 64, 4: 60}.get(self.kernel.item_bytes, 42) if is_spread else 42
        sets = 1 if self.kernel.arithmetic.is_complex else 2
        return words * (sums + sets * (constants.thread_in + constants.thread_out)) + held + addresses

    # ---- the source

    @property
    def picture(self) -> str:
        constants = self.constants
        return draw(
            heading(self),
            DrawnSide(constants.tile_in, "inputs l", self.warps_in),
            DrawnSide(constants.tile_out, "outputs k", self.warps_out),
            lambda row, column: f"warp {row + self.warps_in * column}",
            f"A warp: 8 lanes along l by 4 along k, with {constants.thread_in} x {constants.thread_out} sums each.",
        )

    def own_variables(self) -> dict[str, Any]:
        return {}

    def own_constexprs(self) -> list[Constexpr]:
        constants = self.constants
        return [
            named(constants, "THREAD_OUT", "sums per thread, along the outputs"),
            named(constants, "THREAD_IN", "sums per thread, along the inputs"),
            named(self, "GROUP", "elements of a 16-byte access to shared memory"),
            named(self, "GROUP_IN", "the same for X: at most the inputs of a thread"),
            named(self, "GROUP_OUT", "the same for dY: at most the outputs of a thread"),
            named(self, "WARPS_IN", "warps of a plane along the inputs"),
            Constexpr("WARPS_PER_PLANE", self.warps_in * self.warps_out, "warps of a plane"),
            Constexpr("SHARED_ELEMENTS", self.shared_reals, "elements of shared memory per block"),
        ]

    # ---- constants

    @staticmethod
    def choices(kernel: KernelSpec, tile_d: int, limits: Limits) -> Iterator[GradientConstants]:
        """The tiles from which a default is chosen."""
        copy = "registers" if is_narrow(kernel) or not limits.async_copies else "async"
        most_sums = MOST_SUMS[copy] // max(2 if limits.is_cpu else 1, kernel.real_bytes // 4)
        return _tiles(most_sums, [tile_d], (16, 8), [(3 if copy == "async" else 2, copy)])

    @staticmethod
    def tiles_of_search(kernel: KernelSpec, limits: Limits) -> Iterator[GradientConstants]:
        """The tiles that a search tries if the rules allow them."""
        copies = ["registers"] if is_narrow(kernel) or not limits.async_copies else ["async", "registers"]
        return _tiles(MOST_SUMS["async"], planes_of_search(kernel), (8, 16, 32), product((2, 3, 4), copies))

    def cost(self) -> float:
        """Relative cost: multiply-adds, padding included, and the loads, copies and waits per multiply-add."""
        constants = self.constants
        tile_out, tile_in = constants.tile_out, constants.tile_in
        loads = 1 / constants.thread_out + 1 / constants.thread_in
        return self.padding * (1 + loads + 16 / tile_out + 16 / tile_in) + 1 / constants.tile_batch


def _tiles(
    most_sums: int, planes: Iterable[int], batches: Iterable[int], pipelines: Iterable[tuple[int, str]]
) -> Iterator[GradientConstants]:
    """Yield the tiles with these numbers of j, rows of the batch, stages and copies, and at most so many sums."""
    for thread_out, thread_in, warps_out, warps_in, tile_d, tile_batch, (stages, copy) in product(
        THREADS, THREADS, (1, 2, 3, 4), (1, 2, 3, 4), planes, batches, pipelines
    ):
        tile_out, tile_in = LANES_OUT * thread_out * warps_out, LANES_IN * thread_in * warps_in
        if max(tile_out, tile_in) <= MOST_TILE and thread_out * thread_in <= most_sums:
            yield GradientConstants(tile_out, tile_in, tile_d, tile_batch, thread_out, thread_in, stages, 1, 1, copy)


RULES: tuple[Rule[GradientConstants], ...] = (
    Rule("job is gradient", lambda k, c: k.job == "gradient"),
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    positive("every constant is at least 1"),
    Rule("thread_in is at most 16", lambda k, c: c.thread_in <= 16),
    Rule("thread_out is at most 16", lambda k, c: c.thread_out <= 16),
    multiple("tile_in", "8 * thread_in", lambda k, c: LANES_IN * c.thread_in),
    multiple("tile_out", "4 * thread_out", lambda k, c: LANES_OUT * c.thread_out),
    Rule("tile_batch is a multiple of 8", lambda k, c: c.tile_batch % 8 == 0),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: GradientTiling(k, c).threads),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("stages is 2 with copy=registers", lambda k, c: c.copy != "registers" or c.stages == 2),
    Rule("copy is registers in a 16-bit precision", lambda k, c: c.copy != "async" or not is_narrow(k)),
)
