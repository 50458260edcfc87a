"""Derived sizes of a kernel for small batches: the weights that each lane reads, and the layout of X in shared
memory."""

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from ksgen.families.tiles import WARP, Constants, Tiled, divide_up
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.spec.storage import SCALE_BYTES
from ksgen.values import cached_property

ACCESS = 16  # bytes of the widest load
PADDED = 1.1  # longest padded row of weights, relative to c; pieces are narrower if rows would be longer


@dataclass(frozen=True)
class GemvConstants(Constants):
    """Constants that a search may change."""

    entry_family: ClassVar[str] = "few"

    tile_batch: int  # rows of the batch per block
    tile_out: int  # outputs k per block, for each of its j
    tile_d: int  # neighbouring j per block
    thread_out: int  # rows of weights, with neighbouring k, that a lane reads at a time
    lanes_in: int  # lanes of a warp that share a row
    warps_in: int  # warps that share a row
    steps: int  # pieces that a lane loads at a time, of each of its rows
    # 1: the launch begins before the previous grid ends, and the kernel waits for that grid; sm_90 and later
    early: int = 0


@dataclass(frozen=True)
class GemvTiling(Tiled):
    """Sizes derived from a kernel and its constants, in elements unless they say bytes."""

    kernel: KernelSpec
    constants: GemvConstants

    # ---- rows of weights

    @cached_property
    def vector(self) -> int:
        """Neighbouring l per load: 16 bytes, or fewer if padding would lengthen rows by more than a tenth."""
        c, found = self.kernel.pattern.c, ACCESS // self.kernel.x_item_bytes
        while found > 1 and divide_up(c, found) * found > PADDED * c:
            found //= 2
        return found

    @cached_property
    def pieces(self) -> int:
        """Pieces per row of weights; a lane loads one piece at a time."""
        return divide_up(self.kernel.pattern.c, self.vector)

    @property
    def rows(self) -> int:
        a, b, _, d = self.kernel.pattern.shape
        return a * b * d

    @property
    def row_step(self) -> int:
        """Rows of weights from one output k to the next one."""
        return self.kernel.pattern.d

    @property
    def weight_bytes(self) -> int:
        """Bytes of one packed weight."""
        return self.kernel.weight_item_bytes

    @property
    def scales_offset(self) -> int:
        """Bytes of packed weights before their scales, if they have scales."""
        return divide_up(self.rows * self.pieces * self.vector * self.weight_bytes, ACCESS) * ACCESS

    @property
    def packed_bytes(self) -> int:
        if self.kernel.is_quantized:
            return self.scales_offset + SCALE_BYTES * self.rows
        return self.rows * self.pieces * self.vector * self.weight_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes that a thread of the packing kernel writes."""
        return self.weight_bytes

    # ---- threads

    @cached_property
    def sharers(self) -> int:
        """Lanes that share a row."""
        return self.constants.lanes_in * self.constants.warps_in

    @cached_property
    def groups(self) -> int:
        """Groups of lanes in a warp; each group has its own rows."""
        return WARP // self.constants.lanes_in

    @cached_property
    def warps_out(self) -> int:
        constants = self.constants
        return divide_up(constants.tile_out // constants.thread_out * constants.tile_d, self.groups)

    @cached_property
    def warps(self) -> int:
        return self.warps_out * self.constants.warps_in

    # ---- stages

    @cached_property
    def tile_in(self) -> int:
        """Inputs l per stage."""
        return self.constants.steps * self.sharers * self.vector

    @cached_property
    def stages(self) -> int:
        return divide_up(self.pieces, self.constants.steps * self.sharers)

    @cached_property
    def x_vector(self) -> int:
        """Neighbouring l of X that a thread copies at a time."""
        return self.x_vector_of(self.kernel.pattern)

    def x_vector_of(self, pattern: Pattern) -> int:
        """Neighbouring l that a thread copies at a time from inputs in the order of `pattern`."""
        is_whole = self.kernel.layout == "bsf" and pattern.d == 1 and pattern.c % self.vector == 0
        return gcd(self.vector, pattern.inputs.run) if is_whole else 1

    @cached_property
    def x_rounds(self) -> int:
        """Rounds of the block's threads until one stage of X is copied."""
        constants = self.constants
        return divide_up(constants.tile_batch * constants.tile_d * self.tile_in // self.x_vector, self.threads)

    @property
    def x_width(self) -> int:
        """Inputs l in shared memory at a time, for one row of the batch and one j."""
        return self.tile_in

    @property
    def x_planes(self) -> int:
        """Runs of `x_width` inputs in shared memory, per row of the batch."""
        return self.constants.tile_d

    @cached_property
    def x_plane(self) -> int:
        """Elements of shared memory from one j of X to the next, for the same row of the batch.

        Padding spreads the 16-byte reads of eight lanes over different banks, even if the lanes read neighbouring j.
        """
        if self.x_planes == 1:
            return self.x_width
        lanes = self.constants.lanes_in if self.constants.lanes_in < 8 else 1
        return self.x_width + (self.vector * lanes - self.x_width) % (8 * self.vector)

    @property
    def x_row(self) -> int:
        """Elements from one row of the batch to the next.

        One piece of padding spreads writes of neighbouring rows over several banks.
        """
        return self.x_planes * self.x_plane + (self.vector if self.constants.tile_batch > 1 else 0)

    @property
    def panel(self) -> int:
        """Elements of X per stage."""
        return self.constants.tile_batch * self.x_row

    # ---- sums

    @property
    def sums(self) -> int:
        """Sums per thread."""
        return self.constants.thread_out * self.constants.tile_batch

    @property
    def shuffles(self) -> int:
        """Rounds of shuffles in which lanes add up the partial sums of the same rows."""
        return self.constants.lanes_in.bit_length() - 1

    @property
    def halvings(self) -> int:
        """Number of first rounds in which each lane keeps half of its sums."""
        return min(self.shuffles, (self.sums & -self.sums).bit_length() - 1)

    @property
    def held(self) -> int:
        """Sums per lane after the last round."""
        return self.sums >> self.halvings

    @property
    def same(self) -> int:
        """Lanes that have the same sums after the last round."""
        return self.constants.lanes_in >> self.halvings

    @property
    def part(self) -> int:
        """Sums per tile."""
        constants = self.constants
        return constants.tile_batch * constants.tile_out * constants.tile_d

    @property
    def panels(self) -> int:
        return min(2, self.stages)

    @cached_property
    def shared_bytes(self) -> int:
        return max(
            self.panels * self.panel * self.kernel.x_item_bytes,
            self.constants.warps_in * self.part * self.kernel.real_bytes,
        )

    @cached_property
    def registers(self) -> int:
        """Estimated registers per thread."""
        return self.registers_of(self.x_rounds)

    def registers_of(self, rounds: int) -> int:
        """Estimated registers of a thread that copies X in `rounds` rounds.

        Counts sums, one or two stages of weights, and weights widened from fewer bytes. Also counts pieces of X that
        ptxas reads ahead, copies of X in flight, and addresses.
        """
        constants, real, size = self.constants, self.kernel.real_bytes // 4, self.kernel.x_item_bytes
        piece = max(1, self.vector * size // 4)
        words = max(1, self.vector * self.weight_bytes // 4)
        weights = (2 if self.stages > 1 else 1) * constants.steps * constants.thread_out * words
        is_widened = self.kernel.is_quantized or (size == 2 and constants.tile_batch > 1)
        widened = self.vector * constants.thread_out if is_widened else 0
        copied = rounds * max(1, self.x_vector * size // 4)
        if self.stages > 1:
            pieces_ahead, addresses = max(4, constants.tile_batch * (5 if rounds > 2 else 3) // 8), 5 * rounds
        else:
            pieces_ahead, addresses = 2, rounds * (2 if self.x_vector > 1 else 1) // 2
        widened += self.vector if self.kernel.has_bytes_in else 0  # one piece of X at a time
        return real * self.sums + weights + widened + pieces_ahead * piece + copied + addresses + 24
