"""What follows from a kernel for few batch entries and its constants: who reads which weights, and where X lies in shared memory."""

from dataclasses import dataclass
from functools import cached_property

from ksgen.families.tiles import WARP, Constants, Tiled, divide_up
from ksgen.spec import KernelSpec
from ksgen.spec.storage import SCALE_BYTES

ACCESS = 16  # bytes of the widest load
PADDED = 1.1  # of a row of weights, at most, where its pieces are that wide


@dataclass(frozen=True)
class FewConstants(Constants):
    """The constants that a search may change."""

    tile_batch: int  # batch entries a block
    tile_out: int  # outputs k a block, for each of its j
    tile_d: int  # neighbouring j a block
    thread_out: int  # rows of weights, those of neighbouring k, that a lane reads at a time
    lanes_in: int  # lanes of a warp that share a row
    warps_in: int  # warps that share it
    steps: int  # pieces of each of its rows that a lane asks for at a time
    early: int = 0  # 1: the launch begins while the grid before it ends, and waits for it by itself: sm_90 and later


@dataclass(frozen=True)
class Shape(Tiled):
    """Everything that follows from a kernel and its constants: sizes in elements, unless they say bytes."""

    kernel: KernelSpec
    constants: FewConstants

    # ---- rows of weights

    @cached_property
    def vector(self) -> int:
        """Neighbouring l of one load: 16 bytes, or fewer where rows of whole ones were more than a tenth longer."""
        c, found = self.kernel.pattern.c, ACCESS // self.kernel.x_item_bytes
        while found > 1 and divide_up(c, found) * found > PADDED * c:
            found //= 2
        return found

    @cached_property
    def pieces(self) -> int:
        """Of a row."""
        return divide_up(self.kernel.pattern.c, self.vector)

    @property
    def rows(self) -> int:
        a, b, _, d = self.kernel.pattern.shape
        return a * b * d

    @property
    def weight_bytes(self) -> int:
        """Of one weight, as it is packed."""
        return self.kernel.weight_item_bytes

    @property
    def scales(self) -> int:
        """Bytes of packed weights in front of their scales, where they have such."""
        return divide_up(self.rows * self.pieces * self.vector * self.weight_bytes, ACCESS) * ACCESS

    @property
    def packed_bytes(self) -> int:
        if self.kernel.is_quantized:
            return self.scales + SCALE_BYTES * self.rows
        return self.rows * self.pieces * self.vector * self.weight_bytes

    @property
    def word_bytes(self) -> int:
        """That a thread of the packing kernel writes."""
        return self.weight_bytes

    # ---- threads

    @cached_property
    def sharers(self) -> int:
        """Lanes that share a row."""
        return self.constants.lanes_in * self.constants.warps_in

    @cached_property
    def groups(self) -> int:
        """Of a warp, with rows of their own."""
        return WARP // self.constants.lanes_in

    @property
    def warps_out(self) -> int:
        own = self.constants
        return divide_up(own.tile_out // own.thread_out * own.tile_d, self.groups)

    @property
    def warps(self) -> int:
        return self.warps_out * self.constants.warps_in

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def grid(self, batch: int) -> int:
        return self.tiles_of_batch * divide_up(batch, self.constants.tile_batch)

    # ---- stages

    @cached_property
    def tile_in(self) -> int:
        """Inputs l of a stage."""
        return self.constants.steps * self.sharers * self.vector

    @cached_property
    def stages(self) -> int:
        return divide_up(self.pieces, self.constants.steps * self.sharers)

    @cached_property
    def x_vector(self) -> int:
        """Neighbouring l that a thread copies of X at a time."""
        is_whole = self.kernel.layout == "bsf" and self.kernel.pattern.d == 1 and self.kernel.pattern.c % self.vector == 0
        return self.vector if is_whole else 1

    @property
    def x_rounds(self) -> int:
        """Of the block's threads, until a stage of X is copied."""
        own = self.constants
        return divide_up(own.tile_batch * own.tile_d * self.tile_in // self.x_vector, self.threads)

    @property
    def x_width(self) -> int:
        """Inputs l that lie in shared memory at a time."""
        return self.tile_in

    @property
    def x_planes(self) -> int:
        """Runs of such, of a batch entry."""
        return self.constants.tile_d

    @cached_property
    def x_plane(self) -> int:
        """From one j of a batch entry to the next: eight lanes that read 16 bytes each meet each bank once; nor do neighbouring j meet
        in one bank."""
        if self.x_planes == 1:
            return self.x_width
        lanes = self.constants.lanes_in if self.constants.lanes_in < 8 else 1
        return self.x_width + (self.vector * lanes - self.x_width) % (8 * self.vector)

    @property
    def x_entry(self) -> int:
        """From one batch entry to the next; a piece further, so that writes of neighbouring entries meet several banks."""
        return self.x_planes * self.x_plane + (self.vector if self.constants.tile_batch > 1 else 0)

    @property
    def panel(self) -> int:
        """X of a stage."""
        return self.constants.tile_batch * self.x_entry

    # ---- sums

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.constants.thread_out * self.constants.tile_batch

    @property
    def turns(self) -> int:
        """In which lanes add up what they found of the same rows."""
        return self.constants.lanes_in.bit_length() - 1

    @property
    def halvings(self) -> int:
        """Turns in which each lane keeps half of its sums, the first of them."""
        return min(self.turns, (self.sums & -self.sums).bit_length() - 1)

    @property
    def held(self) -> int:
        """Sums that a lane has at the end."""
        return self.sums >> self.halvings

    @property
    def same(self) -> int:
        """Lanes that have the same."""
        return self.constants.lanes_in >> self.halvings

    @property
    def part(self) -> int:
        """Sums of a tile."""
        own = self.constants
        return own.tile_batch * own.tile_out * own.tile_d

    @property
    def panels(self) -> int:
        return min(2, self.stages)

    @property
    def shared_bytes(self) -> int:
        return max(self.panels * self.panel * self.kernel.x_item_bytes, self.constants.warps_in * self.part * self.kernel.real_bytes)

    @property
    def registers(self) -> int:
        """An estimate for one thread."""
        return self.registers_of(self.x_rounds)

    def registers_of(self, rounds: int) -> int:
        """Of one that copies X in so many rounds: sums, two stages of weights or one, a step's as reals where they are stored as fewer
        bytes, pieces of X that ptxas reads ahead, what is held of X and where it lies, and addresses."""
        own, real, size = self.constants, self.kernel.real_bytes // 4, self.kernel.x_item_bytes
        piece = max(1, self.vector * size // 4)
        weights = (2 if self.stages > 1 else 1) * own.steps * own.thread_out * max(1, self.vector * self.weight_bytes // 4)
        is_widened = self.kernel.is_quantized or (size == 2 and own.tile_batch > 1)
        widened = self.vector * own.thread_out if is_widened else 0
        held = rounds * max(1, self.x_vector * size // 4)
        if self.stages > 1:
            pieces, places = max(4, own.tile_batch * (5 if rounds > 2 else 3) // 8), 5 * rounds
        else:
            pieces, places = 2, rounds * (2 if self.x_vector > 1 else 1) // 2
        widened += self.vector if self.kernel.has_bytes_in else 0  # of X, a piece at a time
        return real * self.sums + weights + widened + pieces * piece + held + places + 24
