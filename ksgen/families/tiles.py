"""Shared parts of families of tiled kernels: reading and showing constants, numbers of tiles, the copies of a block,
and constants that every source states."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import gcd
from typing import Any, ClassVar, Self, TypeVar

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr
from ksgen.spec import KernelSpec
from ksgen.values import cached_property, excerpt

WARP = 32
MOST_THREADS = 1024  # per block, on every CUDA device
PACK_THREADS = 256  # per block of a packing kernel

ConstantsT = TypeVar("ConstantsT")
# earlier names of constants, which files may have, by present name; names of entries are still derived from them
EARLIER_NAMES = {"streaming": "past"}


def divide_up(value: int, by: int) -> int:
    return -(-value // by)


def least_padded(size: int, units: Iterable[int]) -> int:
    """The unit of whose multiples the least one from `size` on is the smallest; the largest unit of several."""
    return min(units, key=lambda unit: (divide_up(size, unit) * unit, -unit))


def power_of_two_in(value: int, most: int) -> int:
    """The largest power of two that divides `value`, and is at most `most`."""
    return gcd(value, most)


class Constants:
    """A family's constants: a frozen dataclass of numbers and words."""

    # earlier name of the family, by which entries (functions of the source) are still named; empty: the family's name
    entry_family: ClassVar[str] = ""
    on_tensor_cores: ClassVar[bool] = False  # whether tensor cores multiply, and not plain instructions
    not_in_entries: ClassVar[tuple[str, ...]] = ()  # constants that `entry_family` implies
    at_launch: ClassVar[tuple[str, ...]] = ()  # constants that are arguments of a launch, after its operands
    template: ClassVar[str] = ""  # stem of the template; empty: the family's name

    @property
    def parsed(self) -> Sequence[Any]:
        """Constants of each factor: for a chain one per factor, else these constants alone."""
        return [self]

    @property
    def in_entries(self) -> dict[str, Any]:
        """Values from which the hash in an entry point's name is derived, by the earliest name of each constant."""
        return {
            EARLIER_NAMES.get(name, name): value
            for name, value in vars(self).items()
            if name not in self.not_in_entries
        }

    def changed(self, **values: Any) -> Self:
        """Copy with some constants changed, in a third of the time of `dataclasses.replace`."""
        all_values = vars(self) | values
        if len(all_values) != len(vars(self)):
            raise TypeError(f"{type(self).__name__} has no {', '.join(values.keys() - vars(self).keys())}")
        copy = object.__new__(type(self))
        vars(copy).update(all_values)
        return copy

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())


def read_constants(family: str, kinds: Sequence[type[ConstantsT]], values: Mapping[str, Any]) -> ConstantsT:
    """Read a family's constants from names and values, as the first class that has these names or had them earlier.

    `ConstantsError` if none does, or if a type does not match. A constant with a default may be missing, because values
    that are older than the constant mean its default.
    """
    given, present = values, {earlier: name for name, earlier in EARLIER_NAMES.items()}
    values = {present.get(name, name): value for name, value in given.items()}
    kind = next((kind for kind in kinds if _needed(kind) <= set(values) <= set(_wanted(kind))), None)
    if kind is None or len(values) < len(given):
        accepted = "; or ".join(", ".join(_wanted(each)) for each in kinds)
        raise ConstantsError(f"{family} constants are {accepted}; got {', '.join(map(str, given))}")
    wanted = _wanted(kind)
    for name, value in values.items():
        if type(value) is not wanted[name]:
            raise ConstantsError(
                f"{family} constant {name}={excerpt(value)} must be {'a word' if wanted[name] is str else 'an integer'}"
            )
    return kind(**values)


def _wanted(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.type for field in fields(kind)}


def _needed(kind: type[Any]) -> set[str]:
    return {field.name for field in fields(kind) if field.default is MISSING}


@dataclass(frozen=True)
class CopyPlan:
    """Walk of a block's warps over `lines` x `run` elements, `vector` neighbours of a run at a time."""

    lines: int
    run: int
    vector: int
    lane_run: int  # lanes of a warp along the run; the others are on further lines
    warps: int

    @property
    def lane_lines(self) -> int:
        return WARP // self.lane_run

    @property
    def warps_run(self) -> int:
        return gcd(self.warps, self.run // (self.lane_run * self.vector))

    @property
    def run_step(self) -> int:
        return self.warps_run * self.lane_run * self.vector

    @property
    def line_step(self) -> int:
        return self.warps // self.warps_run * self.lane_lines

    @property
    def run_rounds(self) -> int:
        return self.run // self.run_step

    @property
    def line_rounds(self) -> int:
        return divide_up(self.lines, self.line_step)

    @property
    def warp_steps(self) -> int:
        """Steps until the tile is copied; in each, one warp copies `lane_lines` lines."""
        return divide_up(self.lines, self.lane_lines)

    def constexprs(self, name: str, more: str = "") -> Iterator[Constexpr]:
        """Yield the constants of the walk over the operand `name`; `more` ends the comments on lines copied at once."""
        yield Constexpr(f"{name}_LANE_RUN", self.lane_run, "lanes of a warp that copy one line together")
        yield Constexpr(f"{name}_LANE_LINES", self.lane_lines, f"lines that a warp copies at once{more}")
        yield Constexpr(f"{name}_WARPS_RUN", self.warps_run, "warps that copy one line together")
        yield Constexpr(f"{name}_LINE_STEP", self.line_step, f"lines that the block copies at once{more}")
        yield Constexpr(f"{name}_LINE_ROUNDS", self.line_rounds, "rounds until all lines are copied")
        yield Constexpr(f"{name}_RUN_STEP", self.run_step, "elements of a line that the block copies at once")
        yield Constexpr(f"{name}_RUN_ROUNDS", self.run_rounds, "rounds until a line is copied")


class Sized:
    """Sizes derived from a kernel and its constants; the class caches the last object."""

    kernel: KernelSpec
    constants: Any
    _last: ClassVar[Any] = None

    @classmethod
    def of(cls, kernel: KernelSpec, constants: Any) -> Self:
        """The sizes of a kernel under its constants.

        Rules and the cost model ask for the sizes of the same two objects ten times in a row. They get one object,
        which computes each size once.
        """
        last = cls._last  # another thread may replace it
        if type(last) is not cls or last.kernel is not kernel or last.constants is not constants:
            last = cls._last = cls(kernel, constants)  # type: ignore[call-arg]
        return last


class Tiled(Sized):
    """Sizes of a kernel's tiles under its constants."""

    constants: Any  # has tile_in, tile_out and tile_d

    @property
    def warps(self) -> int:
        raise NotImplementedError

    @cached_property
    def is_bsf(self) -> bool:
        return self.kernel.layout == "bsf"

    @cached_property
    def real_bytes(self) -> int:
        """Bytes of one sum."""
        return self.kernel.real_bytes

    @cached_property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def factors(self) -> Sequence[Any]:
        """Sizes of each factor of the launch; a factor alone is a chain of one factor."""
        return [self]

    @cached_property
    def steps(self) -> int:
        return divide_up(self.kernel.pattern.c, self.constants.tile_in)

    @cached_property
    def tiles_out(self) -> int:
        return divide_up(self.kernel.pattern.b, self.constants.tile_out)

    @cached_property
    def tiles_d(self) -> int:
        return divide_up(self.kernel.pattern.d, self.constants.tile_d)

    @cached_property
    def tiles_of_batch(self) -> int:
        """Tiles that share one tile of the batch."""
        return self.kernel.pattern.a * self.tiles_d * self.tiles_out

    @property
    def block_stages(self) -> int:
        """Pipeline stages of a block that computes all tiles of its rows of the batch."""
        return self.tiles_of_batch * self.steps

    def whole_run(self, features: int) -> int:
        """Neighbours in a batch-size-first row that never straddle so many inputs or outputs of an i, or a ragged edge.

        If a tile has only some of the j, they are neighbouring j.
        """
        d, tile_d = self.kernel.pattern.d, self.constants.tile_d
        return features * d if tile_d == d else gcd(d, tile_d)

    def grid(self, batch: int) -> int:
        return self.tiles_of_batch * divide_up(batch, self.constants.tile_batch)


def batch_constexpr(kernel: KernelSpec) -> Constexpr:
    return Constexpr("BATCH", kernel.batch or 0, "rows of the batch, index s; 0: known at the call", "long long")


def pattern_constexprs(kernel: KernelSpec) -> list[Constexpr]:
    a, b, c, d = kernel.pattern.shape
    return [
        Constexpr("A", a, "diagonal blocks, index i"),
        Constexpr("B", b, "outputs of each small dense block, index k"),
        Constexpr("C", c, "inputs of each small dense block, index l"),
        Constexpr("D", d, "interleaved dense blocks per diagonal block, index j"),
        batch_constexpr(kernel),
    ]


def given_scales(kernel: KernelSpec) -> Constexpr:
    begin = kernel.scales_begin // kernel.weight_item_bytes
    return Constexpr("SCALES_GIVEN", begin, "values before the scales of weights that are not packed yet", "long long")


def row_constexprs(kernel: KernelSpec, result: str = "Y") -> list[Constexpr]:
    """Distances between rows of the batch in dense arrays: of X, and of Y or its gradient."""
    features = {"X": ("X", kernel.in_features), "Y": (result, kernel.pattern.out_features)}
    return [
        Constexpr(
            f"{letter}_BATCH_STRIDE", count if kernel.layout == "bsf" else 1,
            f"elements from one row of the batch of {array} to the next", "long long",
        )
        for letter, (array, count) in features.items()
    ]  # fmt: skip


def epilogue_constexprs(kernel: KernelSpec) -> list[Constexpr]:
    return [
        Constexpr("HAS_BIAS", kernel.epilogue.bias, "whether a bias is added, one element per output feature"),
        Constexpr("HAS_RESIDUAL", kernel.epilogue.residual, "whether a residual is added, an array like Y"),
    ]


def product_constexprs(kernel: KernelSpec) -> list[Constexpr]:
    """Constants of the pattern and of the epilogue."""
    return [*pattern_constexprs(kernel), *epilogue_constexprs(kernel)]


def packing_constexprs(kernel: KernelSpec) -> list[Constexpr]:
    """Constants of the packing kernel of a GPU."""
    threads = Constexpr("PACK_THREADS", PACK_THREADS, "threads per block of the packing kernel")
    return [threads, given_scales(kernel)]
