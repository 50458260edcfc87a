"""Derived sizes of a chain of two factors for small batches.

These are the elements of the intermediate that a block computes, the lanes that compute them, and the layout of shared
memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import inf, prod
from operator import mul
from typing import ClassVar

from ksgen.families.chains import factor_kernels
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.tiles import WARP, Constants, Sized, divide_up
from ksgen.order import Digit, Order, Place
from ksgen.pattern import MOST_FEATURES, Pattern
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

REMEMBERED = 1024  # cached kernels
ALIGNMENT = 16  # bytes, of each part of shared memory


@dataclass(frozen=True)
class GemvChainConstants(Constants):
    """Constants that a search may change: the second factor's, and the distribution of the first one's rows."""

    entry_family: ClassVar[str] = "few_chain"
    template: ClassVar[str] = "gemv_chain"

    tile_batch: int  # rows of the batch per block
    tile_out: int  # outputs k per block, for each of its j
    tile_d: int  # neighbouring j per block
    thread_out: int  # rows of the second factor's weights, with neighbouring k, that a lane reads at a time
    lanes_in: int  # lanes of a warp that share such a row
    warps_in: int  # warps that share such a row
    steps: int  # pieces that a lane loads at a time, of each of its rows
    first_thread_out: int  # the same as thread_out, for the first factor; one warp computes each of that factor's rows
    first_lanes_in: int
    first_steps: int
    # 1: the launch begins before the previous grid ends, and the kernel waits for that grid; sm_90 and later
    early: int = 0

    @classmethod
    def of(cls, last: GemvConstants, thread_out: int, lanes_in: int, steps: int) -> "GemvChainConstants":
        """Constants of a chain, from those of the second factor alone and the distribution of the first one's rows."""
        second = last.tile_batch, last.tile_out, last.tile_d, last.thread_out, last.lanes_in, last.warps_in, last.steps
        return cls(*second, thread_out, lanes_in, steps)

    @property
    def last(self) -> GemvConstants:
        return GemvConstants(
            self.tile_batch, self.tile_out, self.tile_d, self.thread_out, self.lanes_in, self.warps_in, self.steps
        )

    @property
    def threads(self) -> int:
        groups = self.tile_out // max(1, self.thread_out) * self.tile_d  # each group of lanes has its own rows
        return WARP * divide_up(groups, max(1, WARP // max(1, self.lanes_in))) * self.warps_in

    @property
    def first(self) -> GemvConstants:
        """Constants of the first factor in a launch of its own, with the same number of threads and order of sums."""
        rows = self.first_thread_out * max(1, self.threads // max(1, self.first_lanes_in))
        return GemvConstants(self.tile_batch, rows, 1, self.first_thread_out, self.first_lanes_in, 1, self.first_steps)

    @property
    def parsed(self) -> list[GemvConstants]:
        """Constants of each factor by itself."""
        return [self.first, self.last]


def is_narrow(kernel: KernelSpec) -> bool:
    """Whether each (i, j) of the second factor depends on X of only some i and one j of the first factor.

    This holds for the usual chains. If outputs are exchanged between the factors, it may depend on all of X, but digits
    must divide each other. It does not hold if `First` would be too large for a pattern.
    """
    first, last = kernel.factors
    if last.a * first.c * last.d > MOST_FEATURES:
        return False
    if first.outputs.is_exchanged:
        return first.outputs.undivided(last.inputs) is None
    return first.a % last.a == 0 and last.d % first.d == 0


def most_alike(kernel: KernelSpec) -> float:
    """Number of neighbouring inputs l of the second factor that depend on the same inputs of X.

    It is infinity if all l of an (i, j) do.
    """
    first, last = kernel.factors
    if first.outputs.is_exchanged:
        mine, read = _least_of_inputs(first.outputs.digits_of(last.inputs))
        return 1 if mine.name != "k" else inf if read.size == last.c else read.size
    if first.a == last.a:
        return inf
    whole, rest = divmod(first.b * first.d, last.d)
    return 1 if rest else whole


def _least_of_inputs(digits: Iterable[tuple[Digit, Digit]]) -> tuple[Digit, Digit]:
    """The digit of the first factor's outputs in which neighbouring l of the second factor differ, and that of l."""
    return next((each for each in digits if each[1].name == "l"), (Digit("k", 1, 1), Digit("l", 1, 1)))


@dataclass(frozen=True)
class ResidentTiling(GemvTiling):
    """A factor whose inputs all reside in shared memory."""

    @cached_property
    def x_width(self) -> int:
        return self.stages * self.tile_in


@dataclass(frozen=True)
class First(ResidentTiling):
    """The first factor, numbered like the second one: its pattern has the second one's a and d, and its outputs are the
    second one's inputs.

    Rows of its weights keep their order. Its inputs are numbered by the i and j of its original pattern, `own_pattern`.
    A plane of X has the inputs of one such (i, j). If outputs are exchanged, digits decide which row and which plane an
    output (k, j) needs. Otherwise planes are neighbours, and rows are numbered like outputs.
    """

    own_pattern: Pattern

    @property
    def is_exchanged(self) -> bool:
        """Whether the second factor reads the outputs in another order than that of the rows of weights."""
        return self.own_pattern.outputs.is_exchanged

    @cached_property
    def planes_i(self) -> int:
        """Number of i of this factor whose inputs a tile needs."""
        if self.is_exchanged:
            return prod(mine.size for mine, _ in self._free("i"))
        return self.own_pattern.a // self.kernel.pattern.a

    @cached_property
    def planes_d(self) -> int:
        """Number of j of this factor whose inputs a tile needs."""
        if self.is_exchanged:
            return prod(mine.size for mine, _ in self._free("j"))
        return self.constants.tile_d if self.own_pattern.d % self.constants.tile_d == 0 else self.own_pattern.d

    @property
    def x_planes(self) -> int:
        return self.planes_i * self.planes_d

    @cached_property
    def x_vector(self) -> int:
        return self.x_vector_of(self.own_pattern)

    @property
    def x_copies(self) -> int:
        """Copies of single threads for all inputs that a block needs, trailing zeros included."""
        return self.constants.tile_batch * self.x_planes * self.x_width // self.x_vector

    @property
    def at_once(self) -> int:
        """Copies that a thread has in flight at a time."""
        return 4 if self.x_vector > 1 else 8

    @property
    def ratio(self) -> int:
        """Number of j of the second factor per j of this factor."""
        return self.kernel.pattern.d // self.own_pattern.d

    def plane_of(self, k: int, j: int) -> int:
        """Plane of X that holds the inputs of row (k, j) of the intermediate."""
        own = self.own_pattern
        if self.is_exchanged:
            return sum(each.of({"l": k, "j": j}[each.name]) for each in self.plane_places)
        return (k * self.ratio + j // own.d) // own.b * self.planes_d + j % self.planes_d

    # ---- if outputs are exchanged: digits of i, l and j of the second factor, from which this factor's indices follow

    @cached_property
    def _tile_d(self) -> int:
        """The tile's j, if such tiles divide the digits; else all j of the second factor."""
        d, tile = self.kernel.pattern.d, self.constants.tile_d
        return tile if d % tile == 0 and self.own_pattern.outputs.undivided(self._read_by(tile)) is None else d

    def _read_by(self, tile_d: int) -> Order:
        """Order in which the second factor reads, with its j divided into tiles."""
        a, inputs, _, d = self.kernel.pattern.shape
        return Order("inputs", (a, inputs, d), f"i.l.j1.j2:{tile_d}")

    @property
    def _read(self) -> Order:
        return self._read_by(self._tile_d)

    @cached_property
    def _digits(self) -> list[tuple[Digit, Digit]]:
        """Digits of this factor's outputs, each with that of the second factor's inputs."""
        return self.own_pattern.outputs.digits_of(self._read)

    def _is_free(self, read: Digit) -> bool:
        """Whether a tile has inputs that differ in this digit of the second factor's i, l or j."""
        return read.name == "l" or (read.name == "j" and read.unit < self._tile_d)

    def _free(self, name: str) -> list[tuple[Digit, Digit]]:
        """Digits of this factor's i or j (`name`) that differ within a tile, from the least significant one.

        Each comes with the second factor's digit.
        """
        return sorted(each for each in self._digits if each[0].name == name and self._is_free(each[1]))

    @cached_property
    def row_step(self) -> int:
        """Rows of weights from one input l of the second factor to the next one."""
        if self.is_exchanged:
            return self.own_pattern.outputs.weight_of(_least_of_inputs(self._digits)[0])
        return self.kernel.pattern.d

    @property
    def row_places(self) -> list[Place]:
        """Terms of the row of weights that computes the second factor's input (i, l, j)."""
        outputs = self.own_pattern.outputs
        return [self._read.term(read, outputs.weight_of(mine)) for mine, read in self._digits]

    @property
    def plane_places(self) -> list[Place]:
        """Terms of the plane of X that this input (l, j) needs."""
        return [
            self._read.term(read, step * planes)
            for name, planes in (("i", self.planes_d), ("j", 1))
            for (_, read), step in self._steps(name)
        ]

    def index_places(self, name: str) -> list[Place]:
        """Terms of this factor's i or j: of the tile's i and first j, and of the number of one of its `plane`s."""
        free = self._steps(name)
        count = prod(mine.size for (mine, _), _ in free)
        fixed = [each for each in self._digits if each[0].name == name and not self._is_free(each[1])]
        return [
            *(self._read.term(read, mine.unit) for mine, read in fixed),
            *(Place("plane", step, mine.size, step * mine.size < count, mine.unit) for (mine, _), step in free),
        ]

    def _steps(self, name: str) -> list[tuple[tuple[Digit, Digit], int]]:
        """`_free` digits, each with the planes from one of its values to the next one."""
        free = self._free(name)
        return list(zip(free, accumulate((mine.size for mine, _ in free), mul, initial=1), strict=False))


@lru_cache(REMEMBERED)
def _factors(kernel: KernelSpec) -> tuple[KernelSpec, KernelSpec]:
    """Kernels of both factors, the first one in the second one's numbering, as in `First`."""
    first, last = factor_kernels(kernel)
    a, _, c, d = kernel.pattern.shape
    return replace(first, chains=Pattern(a, c, first.pattern.c, d)), last


@dataclass(frozen=True)
class GemvChainTiling(Sized):
    """Derived sizes of a chain, in elements unless they say bytes."""

    kernel: KernelSpec
    constants: GemvChainConstants

    @cached_property
    def last(self) -> ResidentTiling:
        return ResidentTiling(_factors(self.kernel)[1], self.constants.last)

    @cached_property
    def first(self) -> First:
        constants = self.constants.first.changed(tile_d=self.constants.tile_d)
        return First(_factors(self.kernel)[0], constants, self.kernel.factors[0])

    @cached_property
    def threads(self) -> int:
        return self.last.threads

    def grid(self, batch: int) -> int:
        return self.last.grid(batch)

    @property
    def row_groups(self) -> int:
        """Groups of `first_thread_out` rows of the first factor's weights that a block multiplies X by."""
        return divide_up(self.kernel.pattern.c, self.constants.first_thread_out) * self.constants.tile_d

    @property
    def passes(self) -> int:
        return divide_up(self.row_groups * self.constants.first_lanes_in, self.threads)

    @property
    def between(self) -> int:
        """Byte offset of the intermediate in shared memory.

        X lies before it, and later the partial sums of a row's warps.
        """
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
        """Estimated registers per thread, for the factor that takes more.

        The second factor's first weights are loaded while the first factor is multiplied.
        """
        first, last = self.first, self.last
        asked = last.constants.steps * last.constants.thread_out * max(1, last.vector * last.weight_bytes // 4)
        return max(first.registers_of(first.at_once) + asked, last.registers_of(0))
