"""Shared parts of families for processors: vectors of sums, and planes, which are outputs that share their inputs.

Lanes of a vector are along the outputs or along the batch.
"""

from functools import lru_cache
from math import gcd, prod
from typing import Any

from ksgen.families.base import Limits
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.rules import Rule
from ksgen.families.tiles import divide_up
from ksgen.order import Digit, Order
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

AVX2_BYTES = 32  # bytes of a vector


def round_up(value: int, to: int) -> int:
    return divide_up(value, to) * to


def lanes_of(kernel: KernelSpec, limits: Limits) -> int:
    """Lanes of the device's vector registers, in the type of a kernel's sums."""
    return max(2, limits.vector_bytes // kernel.real_bytes)


# rules of the lanes of products and gradients
LANE_RULES: tuple[Rule[Any], ...] = (
    Rule("along is outputs or batch", lambda k, c: c.along in ("outputs", "batch")),
    Rule("lanes is 2, 4, 8 or 16", lambda k, c: c.lanes in (2, 4, 8, 16)),
    Rule("lanes is at most 8 in complex numbers", lambda k, c: c.lanes <= 8 or not k.arithmetic.is_complex),
)

# a macro of `include/vector/tile.j2` for a vector of inputs, with its arguments
Vector = tuple[str, tuple[Any, ...]]


class Planes:
    """Distribution of a kernel's outputs over vectors; sizes in elements of the sums' type."""

    kernel: KernelSpec
    constants: Any  # has along, lanes, width and pairs

    @property
    def real_bytes(self) -> int:
        return self.kernel.real_bytes

    @property
    def has_avx2_vectors(self) -> bool:
        return bool(self.constants.lanes * self.real_bytes == AVX2_BYTES)

    @property
    def is_along_outputs(self) -> bool:
        return bool(self.constants.along == "outputs")

    @property
    def tile_lanes(self) -> int:
        """Lanes of the vectors in one row of a tile."""
        return int(self.constants.width * self.constants.lanes)

    # ---- planes: outputs that share their inputs

    @property
    def is_short(self) -> bool:
        """Whether a vector of outputs holds all j."""
        return bool(self.kernel.pattern.d <= self.constants.lanes)

    @property
    def period(self) -> int:
        """Vectors of a tile after which the inputs repeat."""
        return 1

    @property
    def run(self) -> int:
        """Neighbouring j per plane, if lanes are along the outputs."""
        return self.kernel.pattern.d if self.is_short else self.constants.lanes

    @property
    def planes_j(self) -> int:
        """Planes per i."""
        return 1 if self.is_short else divide_up(self.kernel.pattern.d, self.constants.lanes)

    @property
    def step_out(self) -> int:
        """Features from one vector of a tile to the next, if lanes are along the outputs."""
        return int(self.constants.lanes) if self.is_short else self.kernel.pattern.d

    @cached_property
    def scope(self) -> int:
        """Blocks on the diagonal whose inputs are transposed together: several small ones, so that vectors are full."""
        _, b, c, d = self.kernel.pattern.shape
        return scopes_of(self.kernel.pattern.inputs, divide_up(4 * self.constants.lanes, min(b, c) * d))[-1]

    # ---- columns: the tiles of all planes

    @property
    def x_layout(self) -> str:
        return self.kernel.layout

    @property
    def transposes(self) -> bool:
        """Whether inputs or outputs of whole planes are transposed."""
        return not self.is_along_outputs and "bsf" in (self.x_layout, self.kernel.layout)

    @property
    def tiles(self) -> int:
        """Tiles per (i, j), or per plane if lanes are along the outputs."""
        raise NotImplementedError

    @cached_property
    def columns(self) -> int:
        a, _, _, d = self.kernel.pattern.shape
        return self.tiles * a * (self.planes_j if self.is_along_outputs else d)

    @property
    def planes(self) -> int:
        a, _, _, d = self.kernel.pattern.shape
        if self.is_along_outputs:
            return a * self.planes_j
        return a // self.scope if self.transposes else a * d

    @property
    def plane_columns(self) -> int:
        """Columns that share the inputs that a work group copies."""
        return self.scope * self.kernel.pattern.d * self.tiles if self.transposes else self.tiles

    @property
    def column_unit(self) -> int:
        """Columns that one work group takes together: all columns of a plane that is transposed, else one."""
        return self.plane_columns if self.transposes else 1

    # ---- inputs and weights

    @property
    def run_in(self) -> int:
        """Inputs of a transposed plane that are contiguous in X."""
        return run_of_plane(self.kernel.pattern.inputs, self.scope)

    @property
    def piece(self) -> int:
        """Neighbours among exchanged inputs that are copied together along the outputs: whole vectors, or one input."""
        _, _, c, d = self.kernel.pattern.shape
        piece = gcd(self.kernel.pattern.inputs.run, c if d == 1 else self.run)
        return piece if self.kernel.layout == "bsf" and piece % self.piece_unit == 0 else 1

    @property
    def piece_unit(self) -> int:
        """Inputs l or j of a vector."""
        return int(self.constants.lanes)

    @property
    def input_digits(self) -> list[dict[str, int]]:
        """Digits of a transposed plane's inputs, in the order in which they are copied."""
        return digits_of_plane(self.kernel.pattern.inputs, self.scope)

    @property
    def square(self) -> int:
        """Inputs l of as many k, each with all j, that fill a square of vectors; 0 if none do."""
        d, lanes = self.kernel.pattern.d, self.constants.lanes
        is_whole = 2 * d <= lanes and lanes % d == 0
        return lanes // d if is_whole and not self.kernel.arithmetic.is_complex else 0

    # ---- variables of the templates

    @property
    def spread(self) -> dict[str, list[Any]]:
        """Vectors of a period that hold the inputs at `at`: those that are loaded, by name, and all of them.

        A complex number is two neighbours. If d is less than the lanes and does not divide them, loads may read one
        input per lane. So the memory after the d inputs must be readable.
        """
        parts = self.kernel.arithmetic.reals_per_number
        d, lanes = self.run * parts, self.constants.lanes * parts

        def repeated(inputs: int) -> Vector:
            return "repeated", (inputs, "".join(f"{lane % inputs:x}" for lane in range(lanes)))

        def vector(first: int) -> Vector:
            if first in kept and d > lanes:
                return "kept_as", (kept[first],)
            if first + lanes <= d:
                return "loaded", (lanes, first)
            wanted = [(first + lane) % d for lane in range(lanes)]
            if d < lanes:
                return "shuffled", ("head", wanted)
            return "shuffled", ("tail", [j - d + lanes if j >= first else lanes + j for j in wanted])

        if lanes % d == 0:
            own = ("of_one", ()) if d == 1 else ("loaded", (lanes, 0)) if d == lanes else repeated(d)
            return {"kept": [], "vectors": [own]}
        # loaded vectors, from which shuffles make the others
        kept = {0: "head", d - lanes: "tail"} if d > lanes else {0: "head"}
        loads = [(name, "load", (lanes, first)) for first, name in kept.items()]
        if 2 * d <= lanes:  # a load of fewer bytes straddles two cache lines less often
            loads = [("head", *repeated(1 << (d - 1).bit_length()))]
        return {"kept": loads, "vectors": [vector(number * lanes % d) for number in range(self.period)]}

    @property
    def variables(self) -> dict[str, Any]:
        """Template variables of lanes, and of copies of inputs."""
        lanes, precision = self.constants.lanes, self.kernel.arithmetic
        parts, d, of_lanes = precision.reals_per_number, self.kernel.pattern.d, range(2 * lanes)
        turns = [(half, _of_parts(low, parts), _of_parts(high, parts)) for half, low, high in _transpose_steps(lanes)]
        return {
            "accumulator": "lanes",
            "lanes": lanes,
            # type of a vector of lane numbers, the mask of a shuffle
            "mask": f"{'ulong' if precision.sums == 'float64' else 'uint'}{lanes * parts}",
            "turns": turns,
            # those of a square whose entries are runs of d lanes
            "turns_of_runs": [(half // d, low, high) for half, low, high in turns if half >= d],
            "of_pairs": "_pairs" if self.constants.pairs else "",  # end of the names of templates that copy pairs
            # indices that pick the parts of complex numbers, which alternate in a vector; `quarter_turn` multiplies by
            # i: it picks from a vector and its negative
            "parts": 2 * lanes,
            "real_parts": ", ".join(str(part // 2 * 2) for part in of_lanes),
            "imaginary_parts": ", ".join(str(part // 2 * 2 + 1) for part in of_lanes),
            "quarter_turn": ", ".join(str(part - 1 if part % 2 else 2 * lanes + part + 1) for part in of_lanes),
        }


# ---- planes of features that are exchanged


@lru_cache(1024)
def scopes_of(order: Order, most: int) -> tuple[int, ...]:
    """Numbers of blocks on the diagonal, at most `most`, that whole digits of i count, and a part of one digit more."""
    digits = [digit for digit in order.digits if digit.name == "i"]
    parts = {each.unit * part for each in digits for part in range(1, min(each.size, most) + 1) if not each.size % part}
    return tuple(sorted({1, *(part for part in parts if part <= most)}))


def _size_in_plane(digit: Digit, scope: int) -> int:
    """Number of values of a digit in a plane of `scope` blocks on the diagonal."""
    return max(1, min(digit.size, scope // digit.unit)) if digit.name == "i" else digit.size


def run_of_plane(order: Order, scope: int) -> int:
    """Features of a plane of `scope` blocks on the diagonal that are contiguous in memory."""
    run = 1
    for digit in reversed(order.digits):
        size = _size_in_plane(digit, scope)
        run *= size
        if size < digit.size:
            break
    return run


def digits_of_plane(order: Order, scope: int) -> list[dict[str, int]]:
    """Digits of a plane's features, in their order in memory.

    Each has its size, and its weight in two indices: that of the features in memory (`after`), and that of the natural
    order (`natural`).
    """
    found, after = [], scope * prod(order.sizes[1:])
    for digit in order.digits:
        if (size := _size_in_plane(digit, scope)) > 1:
            after //= size
            found.append({"after": after, "size": size, "natural": order.weight_of(digit)})
    return found or [{"after": 1, "size": 1, "natural": 1}]


def tile_picture(name: str, constants: Any, down: tuple[str, str], across: tuple[str, str]) -> str:
    """Drawing of a tile's vectors.

    `down` and `across` name its rows and lanes: first for lanes along the outputs, then for lanes along the batch.
    """
    number = 0 if constants.along == "outputs" else 1
    return draw(
        f"{name}: {constants.height} x {constants.width} vectors of {constants.lanes} lanes, all in registers.",
        DrawnSide(constants.height, down[number], constants.height),
        DrawnSide(constants.width * constants.lanes, across[number], constants.width),
        lambda row, column: f"{constants.lanes} sums",
    )


def _of_parts(lanes: list[int], parts: int) -> str:
    """Indices of lanes as indices of their parts: one per lane, or two of a complex number."""
    return ", ".join(str(lane * parts + half) for lane in lanes for half in range(parts))


def _transpose_steps(lanes: int) -> list[tuple[int, list[int], list[int]]]:
    """Steps that transpose a square of vectors: the distance of two vectors, and the lanes that each takes of both."""
    steps = []
    half = lanes // 2
    while half:
        low = [lane if not lane & half else lanes + lane - half for lane in range(lanes)]
        high = [lane + half if not lane & half else lanes + lane for lane in range(lanes)]
        steps.append((half, low, high))
        half //= 2
    return steps


def variants_of(kernel: KernelSpec, activation: str) -> tuple[str, ...]:
    """Names of the snippet variants with a version of the activation for vectors; empty if there is none."""
    # gelu of vectors has an erf of its own, in float32
    own = {"relu": ("relu_of_lanes",), "gelu": ("gelu_of_lanes",) if kernel.real_bytes == 4 else ()}
    return own.get(activation, ())


def period_of(d: int, lanes: int) -> int:
    """Vectors of neighbouring (k, j) after which the j of their lanes repeat."""
    return d // gcd(d, lanes)
