"""What follows from a chain of two factors for few batch entries, and its constants: which values between them a block computes, by which
lanes, and what lies where in shared memory.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf

from ksgen.families.chains import factor_kernels
from ksgen.families.few.shape import FewConstants, Shape
from ksgen.families.tiles import WARP, Constants, divide_up
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

REMEMBERED = 1024  # kernels
ALIGNMENT = 16  # bytes, of what lies in shared memory


@dataclass(frozen=True)
class FewChainConstants(Constants):
    """The constants that a search may change: those of `few` for the second factor, and who shares the first one's rows."""

    tile_batch: int  # batch entries a block
    tile_out: int  # outputs k a block, for each of its j
    tile_d: int  # neighbouring j a block
    thread_out: int  # rows of the second factor's weights, those of neighbouring k, that a lane reads at a time
    lanes_in: int  # lanes of a warp that share such a row
    warps_in: int  # warps that share it
    steps: int  # pieces of each of its rows that a lane asks for at a time
    first_thread_out: int  # the same of the first factor, whose rows are one warp's each
    first_lanes_in: int
    first_steps: int
    early: int = 0  # 1: the launch begins while the grid before it ends, and waits for it by itself: sm_90 and later

    @classmethod
    def of(cls, last: FewConstants, thread_out: int, lanes_in: int, steps: int) -> "FewChainConstants":
        """Those of the second factor in a launch of its own, and who shares the first one's rows."""
        own = last.tile_batch, last.tile_out, last.tile_d, last.thread_out, last.lanes_in, last.warps_in, last.steps
        return cls(*own, thread_out, lanes_in, steps)

    @property
    def last(self) -> FewConstants:
        return FewConstants(self.tile_batch, self.tile_out, self.tile_d, self.thread_out, self.lanes_in, self.warps_in, self.steps)

    @property
    def threads(self) -> int:
        groups = self.tile_out // max(1, self.thread_out) * self.tile_d  # of lanes, with rows of their own
        return WARP * divide_up(groups, max(1, WARP // max(1, self.lanes_in))) * self.warps_in

    @property
    def first(self) -> FewConstants:
        """In a launch of its own: as many threads, and sums in the same order."""
        rows = self.first_thread_out * max(1, self.threads // max(1, self.first_lanes_in))
        return FewConstants(self.tile_batch, rows, 1, self.first_thread_out, self.first_lanes_in, 1, self.first_steps)

    @property
    def parsed(self) -> list[FewConstants]:
        """Those of each factor by itself."""
        return [self.first, self.last]


def is_narrow(kernel: KernelSpec) -> bool:
    """Whether what a block reads of X for one (i, j) of the second factor is some i of the first one with one j: what is so of the usual
    chains."""
    first, last = kernel.factors
    return first.a % last.a == 0 and last.d % first.d == 0


def most_alike(kernel: KernelSpec) -> float:
    """Rows of neighbouring l of the second factor that read the same X, in groups."""
    first, last = kernel.factors
    if first.a == last.a:
        return inf
    whole, rest = divmod(first.b * first.d, last.d)
    return 1 if rest else whole


@dataclass(frozen=True)
class Resident(Shape):
    """A factor whose inputs lie in shared memory as a whole."""

    @cached_property
    def x_width(self) -> int:
        return self.stages * self.tile_in


@dataclass(frozen=True)
class First(Resident):
    """The first factor, of the second one's a, d and, as outputs, inputs: rows of its weights are in the same order then. What it reads
    is not: of `own`, its own pattern, so many i and j."""

    own: Pattern

    @cached_property
    def planes_i(self) -> int:
        """i of the factor, for one of the second."""
        return self.own.a // self.kernel.pattern.a

    @cached_property
    def planes_d(self) -> int:
        """j of the factor, for a tile's."""
        return self.constants.tile_d if self.own.d % self.constants.tile_d == 0 else self.own.d

    @property
    def x_planes(self) -> int:
        return self.planes_i * self.planes_d

    @cached_property
    def x_vector(self) -> int:
        is_whole = self.kernel.layout == "bsf" and self.own.d == 1 and self.own.c % self.vector == 0
        return self.vector if is_whole else 1

    @property
    def x_copies(self) -> int:
        """By threads, of all that a block needs of X, and of the zeros behind it."""
        return self.constants.tile_batch * self.x_planes * self.x_width // self.x_vector

    @property
    def at_once(self) -> int:
        """Of a thread's copies, on their way at a time."""
        return 4 if self.x_vector > 1 else 8

    @property
    def ratio(self) -> int:
        """j of the second factor for each of this one's."""
        return self.kernel.pattern.d // self.own.d

    def plane_of(self, k: int, j: int) -> int:
        """Where row (k, j) of what lies between finds its inputs."""
        return (k * self.ratio + j // self.own.d) // self.own.b * self.planes_d + j % self.planes_d


@lru_cache(REMEMBERED)
def _factors(kernel: KernelSpec) -> tuple[KernelSpec, KernelSpec]:
    """Both, the first one as a block of the second one sees it."""
    first, last = factor_kernels(kernel)
    a, _, c, d = kernel.pattern.shape
    return replace(first, chains=Pattern(a, c, first.pattern.c, d)), last


@dataclass(frozen=True)
class ChainShape:
    """Sizes in elements, unless they say bytes."""

    kernel: KernelSpec
    constants: FewChainConstants

    @cached_property
    def last(self) -> Resident:
        return Resident(_factors(self.kernel)[1], self.constants.last)

    @cached_property
    def first(self) -> First:
        constants = replace(self.constants.first, tile_d=self.constants.tile_d)
        return First(_factors(self.kernel)[0], constants, self.kernel.factors[0])

    @cached_property
    def threads(self) -> int:
        return self.last.threads

    @property
    def row_groups(self) -> int:
        """Of the first factor, those that a block computes: of THREAD_OUT rows each, by LANES_IN lanes each."""
        return divide_up(self.kernel.pattern.c, self.constants.first_thread_out) * self.constants.tile_d

    @property
    def passes(self) -> int:
        return divide_up(self.row_groups * self.constants.first_lanes_in, self.threads)

    @property
    def x_turns(self) -> int:
        """In which X is copied, each on its way as a whole."""
        return divide_up(self.first.x_copies, self.threads * self.first.at_once)

    @property
    def between(self) -> int:
        """Bytes in front of what lies between: X, and later the sums of a row's warps."""
        parts = self.constants.warps_in * self.last.part * self.kernel.real_bytes
        return divide_up(max(self.first.panel * self.kernel.x_item_bytes, parts), ALIGNMENT) * ALIGNMENT

    @property
    def shared_bytes(self) -> int:
        return self.between + self.last.panel * self.kernel.item_bytes

    @property
    def packed_bytes(self) -> int:
        return self.first.packed_bytes + self.last.packed_bytes

    @property
    def registers(self) -> int:
        """An estimate for one thread: of whichever factor takes more, with the second one's first weights while the first is multiplied."""
        first, last = self.first, self.last
        asked = last.constants.steps * last.constants.thread_out * max(1, last.vector * last.weight_bytes // 4)
        return max(first.registers_of(first.at_once) + asked, last.registers_of(0))
