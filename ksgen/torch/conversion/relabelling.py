"""Relabels the features of a chain, so that a chain that exchanges them becomes a chainable one that exchanges none.

A factor keeps the digits i and j of its inputs, sums over the digits l, and makes the digits k. Orders of features only
say where these digits lie. They can be chosen freely if each digit that a factor makes is summed by the next factor, or
is one of the chain's outputs. The order here has three parts. First come the digits of the chain's inputs; the one
that is summed last is the most significant one. Then come the digits that the next factor sums. Last come those of the
chain's outputs; the one that was made last is the most significant one. With this order all neighbours are chainable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ksgen.order import Order
from ksgen.pattern import Chain, Pattern

Copy = tuple[tuple[int, ...], tuple[int, ...]]  # shape of an array's digits, and the order of its axes in the copy


@dataclass(frozen=True)
class Relabelled:
    """A chain without exchanges. Its products are those of the given chain with permuted rows and columns."""

    chain: Chain
    given: Chain
    rows: Copy
    columns: Copy
    weights: tuple[Copy, ...]  # of each factor, to the order of the given chain

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """Permute the rows and columns of a product of the given chain."""
        (row_shape, row_axes), (column_shape, column_axes) = self.rows, self.columns
        digits = matrix.reshape(*row_shape, *column_shape)
        return digits.permute(*row_axes, *(len(row_shape) + axis for axis in column_axes)).reshape(matrix.shape)

    def to_given(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Permute the weights of each factor to those of the given chain."""
        return [
            each.reshape(shape).permute(axes).reshape(pattern.shape).contiguous()
            for each, (shape, axes), pattern in zip(weights, self.weights, self.given, strict=True)
        ]


def relabelled(chain: Chain) -> Relabelled | None:
    """Relabel the features of a chain.

    Returns None if digits of its orders do not divide each other. The result is None too if not the next factor but a
    later one sums a digit that a factor makes.
    """
    digits = _Digits()
    features = [digits.new(chain.in_features)]  # in memory, before each factor and after the last one
    factors = []
    try:
        for pattern in chain:
            i, inner, j = digits.read(features[-1], pattern.inputs)
            made = digits.new(pattern.b)
            features.append(digits.written((i, made, j), pattern.outputs))
            factors.append((i, made, inner, j))
    except _UndividedError:
        return None
    begin = {digit: at for at, each in reversed([*enumerate(features)]) for digit in each}
    end = {digit: at for at, each in enumerate(features) for digit in each}
    if any(0 < begin[digit] < end[digit] < len(chain) for digit in begin):
        return None

    def place(digit: int) -> tuple[int, int, int]:
        if begin[digit] == 0:
            return 0, -end[digit], digit
        return (2, -begin[digit], digit) if end[digit] == len(chain) else (1, 0, digit)

    patterns, weights = [], []
    for pattern, (i, made, inner, j) in zip(chain, factors, strict=True):
        kept = sorted((*i, *j), key=place)
        of_inputs = [digit for digit in kept if begin[digit] == 0]
        of_outputs = kept[len(of_inputs) :]
        patterns.append(Pattern(digits.count(of_inputs), pattern.b, pattern.c, digits.count(of_outputs)))
        own = (*of_inputs, *sorted(made, key=place), *sorted(inner, key=place), *of_outputs)
        weights.append(digits.copy(own, (*i, *made, *inner, *j)))
    rows, columns = (digits.copy(each, sorted(each, key=place)) for each in (features[-1], features[0]))
    return Relabelled(Chain(tuple(patterns), chain.name), chain, rows, columns, tuple(weights))


class _UndividedError(Exception):
    """The digits of two orders do not divide each other."""


class _Digits:
    """Sizes of digits, and lists of digits from the most significant one. A divided digit is divided in all lists."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._lists: list[list[int]] = []

    def new(self, size: int) -> list[int]:
        """Make a digit of `size` values, and return a list of it; the list is empty if `size` is 1."""
        self._sizes.append(size)
        return self._listed([len(self._sizes) - 1] if size > 1 else [])

    def read(self, memory: list[int], order: Order) -> list[list[int]]:
        """List the digits of each index of features that lie in memory in this order."""
        places = sorted(order.places, key=lambda place: -place.unit)
        for place in places:
            self._divide(memory, place.features)
        parts = [(each.name, self._part(memory, each.features, each.size)) for each in places]
        return [
            self._listed([digit for index, part in parts if index == name for digit in part]) for name in order.names
        ]

    def written(self, indices: Sequence[list[int]], order: Order) -> list[int]:
        """List the digits of features in memory, from those of each index."""
        of_index = dict(zip(order.names, indices, strict=True))
        for digit in order.digits:
            self._divide(of_index[digit.name], digit.unit)
        parts = (self._part(of_index[each.name], each.unit, each.size) for each in order.digits)
        return self._listed([digit for part in parts for digit in part])

    def count(self, digits: Sequence[int]) -> int:
        """Number of values of these digits."""
        return prod(self._sizes[digit] for digit in digits)

    def copy(self, digits: Sequence[int], to: Sequence[int]) -> Copy:
        """The copy of an array with these digits that has them in another order."""
        return tuple(self._sizes[digit] for digit in digits), tuple(digits.index(digit) for digit in to)

    def _listed(self, digits: list[int]) -> list[int]:
        self._lists.append(digits)
        return digits

    def _divide(self, digits: list[int], weight: int) -> None:
        """Divide a digit so that one begins at this weight."""
        below = 1
        for digit in reversed(digits):
            size = self._sizes[digit]
            if below < weight < below * size:
                low, rest = divmod(weight, below)
                if rest or size % low:
                    raise _UndividedError
                self._sizes[digit] = low
                self._sizes.append(size // low)
                for each in self._lists:
                    if digit in each:
                        each.insert(each.index(digit), len(self._sizes) - 1)
                return
            below *= size

    def _part(self, digits: list[int], weight: int, size: int) -> list[int]:
        """The digits from this weight on that have `size` values together."""
        found: list[int] = []
        below = 1
        for digit in reversed(digits):
            if weight <= below < weight * size:
                found.insert(0, digit)
            below *= self._sizes[digit]
        return found
