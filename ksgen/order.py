"""Defines the order in which a factor's inputs, or its outputs, lie in memory: the digits of their index.

Three indices count the outputs (i, k, j) and the inputs (i, l, j) of a pattern. An order lists digits of these indices,
from the most to the least significant one. An index may be divided into several digits. Never touches arrays.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isqrt, prod
from operator import mul
from typing import NamedTuple

from ksgen.errors import PatternError
from ksgen.values import excerpt

__all__ = ["Digit", "Order", "Place"]
_PIECE = re.compile(r"([iklj])([0-9]{0,2})(?::0*([1-9][0-9]{0,9}))?", re.ASCII)


class Digit(NamedTuple):
    """One digit of a feature's place in memory.

    Args:
        name: Index that it counts: "i", "j", "k" or "l".
        unit: Step of the index between neighbouring values of the digit.
        size: Number of the digit's values.

    Examples:
        >>> from ksgen import Pattern
        >>> Pattern(2, 4, 3, 1, store="k1:2.i.k2").outputs.digits[:2]
        (Digit(name='k', unit=2, size=2), Digit(name='i', unit=1, size=2))
    """

    name: str
    unit: int
    size: int


class Place(NamedTuple):
    """Term of one digit in a feature's place in memory: index / unit % size * features.

    Args:
        name: Index that the digit counts.
        unit: Step of the index between neighbouring values of the digit.
        size: Number of the digit's values.
        is_part: Whether there are digits above this one, so that it is taken modulo `size`.
        features: Distance of neighbouring values of the digit, in features.

    Examples:
        >>> from ksgen import Pattern
        >>> Pattern(2, 4, 3, 5).outputs.places[0]
        Place(name='i', unit=1, size=2, is_part=False, features=20)
    """

    name: str
    unit: int
    size: int
    is_part: bool
    features: int

    @property
    def is_divided(self) -> bool:
        """Whether there are digits below this one."""
        return self.unit > 1

    def of(self, index: int) -> int:
        """Compute the value of the term.

        Args:
            index: Value of the term's index.

        Returns:
            The term, counted in features.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(2, 4, 3, 5).outputs.places[0].of(1)
            20
        """
        return index // self.unit % self.size * self.features


def inverse_of(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and axes that undo `reshape(shape).transpose(axes)`: the permuted shape, and the inverse permutation."""
    return tuple(shape[axis] for axis in axes), tuple(axes.index(axis) for axis in range(len(axes)))


@dataclass(frozen=True, slots=True)
class Order:
    """Order of a factor's inputs or outputs in memory.

    Args:
        features: "inputs" or "outputs".
        sizes: Number of values of each index, from the most significant one: (i, l, j) or (i, k, j).
        text: Digits from the most to the least significant one, such as "i.j.k"; empty for the natural order.

    Examples:
        >>> from ksgen import Pattern
        >>> order = Pattern(2, 4, 3, 5, store="i.j.k").outputs
        >>> order.exchange(), order.place_of(1, 2, 3)
        (((2, 4, 5), (0, 2, 1)), 34)
    """

    features: str
    sizes: tuple[int, int, int]
    text: str

    @property
    def names(self) -> str:
        """Names of the three indices, from the most significant one."""
        return "ilj" if self.features == "inputs" else "ikj"

    @property
    def natural(self) -> str:
        """The order of features that are not exchanged."""
        return ".".join(self.names)

    @property
    def is_exchanged(self) -> bool:
        """Whether features lie in another order than the natural one."""
        return bool(self.text)

    @property
    def is_divided(self) -> bool:
        """Whether an index has several digits."""
        return len({digit.name for digit in self.digits}) < len(self.digits)

    @property
    def count(self) -> int:
        """Number of features."""
        return prod(self.sizes)

    @property
    def digits(self) -> tuple[Digit, ...]:
        """Digits of a feature's place in memory, from the most significant one."""
        return _read_digits(self.text or self.natural, self)

    @property
    def places(self) -> list[Place]:
        """Terms whose sum is a feature's place in memory, one per digit."""
        found, features = [], self.count
        for digit in self.digits:
            features //= digit.size
            found.append(self.term(digit, features))
        return found

    def term(self, digit: Digit, features: int) -> Place:
        """Describe a digit of these features as a term of a place or of an index.

        Args:
            digit: Digit of this order.
            features: Distance of the digit's neighbouring values.

        Returns:
            The term.

        Examples:
            >>> from ksgen import Pattern
            >>> order = Pattern(2, 4, 3, 1, store="k1:2.i.k2").outputs
            >>> order.term(order.digits[0], 4)
            Place(name='k', unit=2, size=2, is_part=False, features=4)
        """
        size = self.sizes[self.names.index(digit.name)]
        return Place(*digit, digit.unit * digit.size < size, features)

    def weight_of(self, digit: Digit) -> int:
        """Compute the distance of a digit's neighbouring values in the natural order.

        Args:
            digit: Digit of this order.

        Returns:
            The distance, in features.

        Examples:
            >>> from ksgen import Pattern
            >>> order = Pattern(2, 4, 3, 5, store="i.j.k").outputs
            >>> [order.weight_of(digit) for digit in order.digits]
            [20, 1, 5]
        """
        return digit.unit * prod(self.sizes[self.names.index(digit.name) + 1 :])

    @property
    def run(self) -> int:
        """Length of the runs of features, in the natural order, that are contiguous in memory.

        Runs begin at multiples of this length, in both orders.
        """
        if not self.text:
            return self.count
        *_, last = self.digits
        least = [name for name, size in zip(self.names, self.sizes, strict=True) if size > 1][-1]
        return last.size if (last.name, last.unit) == (least, 1) else 1

    def place_of(self, *indices: int) -> int:
        """Compute a feature's place in memory.

        Args:
            indices: Values of the three indices.

        Returns:
            The place, counted in features.

        Examples:
            >>> from ksgen import Pattern
            >>> pattern = Pattern(2, 4, 3, 5, load="l.i.j")
            >>> pattern.outputs.place_of(1, 2, 3), pattern.inputs.place_of(1, 2, 3)
            (33, 28)
        """
        values = dict(zip(self.names, indices, strict=True))
        return sum(each.of(values[each.name]) for each in self.places)

    def exchange(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Compute the permutation of features from the natural order to that in memory.

        Returns:
            A shape and an order of its axes: features in memory are `natural.reshape(shape).transpose(axes).ravel()`.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(2, 4, 3, 1, store="k1:2.i.k2").outputs.exchange()
            ((2, 2, 2), (1, 0, 2))
        """
        natural = self._sorted(self.digits)
        return tuple(digit.size for digit in natural), tuple(natural.index(digit) for digit in self.digits)

    def to_natural(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Compute the permutation of features from memory to the natural order: the inverse of `exchange`.

        Returns:
            A shape and an order of its axes: features in the natural order are
            `memory.reshape(shape).transpose(axes).ravel()`.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(2, 4, 3, 5, load="l.i.j").inputs.to_natural()
            ((3, 2, 5), (1, 0, 2))
        """
        return inverse_of(*self.exchange())

    def text_of(self, shape: Sequence[int], axes: Sequence[int]) -> str | None:
        """Text of the order of these features that `exchange` describes by a shape and an order of its axes.

        Args:
            shape: Sizes of any digits of a feature's index, from the most significant one.
            axes: Order of these digits in memory.

        Returns:
            The text, or None if a digit begins every m features, an index every n, and neither of m and n divides the
            other.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(4, 6, 5, 1).outputs.text_of((2, 12), (1, 0))
            'i2:2.k.i1:2'
            >>> Pattern(4, 6, 5, 1).outputs.text_of((3, 8), (1, 0)) is None
            True
        """
        natural = Order(self.features, self.sizes, "").digits
        given = [Digit(str(axis), 1, size) for axis, size in enumerate(shape)]
        steps = list(_steps(natural, given))
        if any(high % low for low, high in steps):
            return None
        memory = [given[axis] for axis in axes]
        begins = {digit.name: begin for digit, begin in zip(reversed(memory), _ends(memory), strict=False)}
        pairs = [(_part(given, *step), _part(natural, *step)) for step in steps]
        pairs.sort(key=lambda pair: pair[0].unit * begins[pair[0].name], reverse=True)
        return self._written([digit for _, digit in pairs])

    def of_sorted_block(self) -> str:
        """Write the order of a factor with permuted weights.

        The weights were permuted along k or l, into the order in which the digits of that index lie in memory.

        Returns:
            The text of the order.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(4, 6, 5, 1, store="k2:3.i.k1").outputs.of_sorted_block()
            'k1:3.i.k2:2'
        """
        digits, below = list(self.digits), 1
        for number in reversed(range(len(digits))):
            if digits[number].name == self.names[1]:
                digits[number] = digits[number]._replace(unit=below)
                below *= digits[number].size
        return self._written(digits)

    def renamed(self, features: str) -> str:
        """Write the same order for the transposed factor, whose outputs are these inputs, or the reverse.

        Args:
            features: What the features are called in that factor: "inputs" or "outputs".

        Returns:
            The text of the order.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(2, 4, 3, 5, store="i.j.k").outputs.renamed("inputs")
            'i.j.l'
        """
        inner, other = self.names[1], "k" if self.names[1] == "l" else "l"
        return self.text.replace(inner, other) if features != self.features else self.text

    def repeated(self, count: int) -> str:
        """Write the order of `count` concatenated arrays of these features.

        The index i then has `count` times as many values.

        Args:
            count: Number of arrays.

        Returns:
            The text of the order; empty if it is the natural one.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(4, 6, 5, 1, store="k.i").outputs.repeated(3)
            'i1:3.k.i2:4'
        """
        return self._written((Digit("i", self.sizes[0], count), *self.digits)) if self.text else ""

    def normalized(self) -> str:
        """Write this order in its only form: neighbouring digits are merged, and the natural order is empty.

        Returns:
            The text of the order.

        Raises:
            PatternError: The text is not an order of the features.

        Examples:
            >>> from ksgen.order import Order
            >>> Order("outputs", (2, 4, 5), "j.i.k1:2.k2").normalized()
            'j.i.k'
        """
        if not isinstance(self.text, str):
            raise self._refused("")
        return self._written(_read_digits(self.text, self)) if self.text else ""

    def _refused(self, accepted: str) -> PatternError:
        inner, what = self.names[1], "load" if self.features == "inputs" else "store"
        usual = f": digits such as i.j.{inner}, or {inner}1:4.i.{inner}2 with a divided {inner}, each once"
        return PatternError(f"{what}={excerpt(self.text)}; accepted{accepted or usual}")

    def before(self, then: "Order") -> str:
        """Write the order in which to store these outputs, so that the next factor can read them in its natural order.

        Args:
            then: Order in which the next factor reads these outputs now. `undivided` returns None for it.

        Returns:
            The text of the order.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(4, 6, 16, 1).outputs.before(Pattern(2, 5, 12, 1, load="l.i.j").inputs)
            'k2:2.i.k1:3'
        """
        pairs = sorted(self.digits_of(then), key=lambda each: then.weight_of(each[1]), reverse=True)
        return self._written([digit for digit, _ in pairs])

    def digits_of(self, then: "Order") -> list[tuple[Digit, Digit]]:
        """Digits of these outputs, each with the digit of a next factor's inputs that counts the same features.

        Args:
            then: Order in which the next factor reads these outputs. `undivided` returns None for it.

        Returns:
            Both digits of each pair, from the pair with the least distance in memory.

        Examples:
            >>> from ksgen import Pattern
            >>> outputs = Pattern(4, 6, 16, 1, store="k1:2.i.k2").outputs
            >>> for mine, read in outputs.digits_of(Pattern(2, 5, 12, 1).inputs):
            ...     print(mine.name, mine.unit, mine.size, "is", read.name, read.unit, read.size)
            k 1 3 is l 1 3
            i 1 4 is l 3 4
            k 3 2 is i 1 2
        """
        return [(_part(self.digits, *step), _part(then.digits, *step)) for step in _steps(self.digits, then.digits)]

    def undivided(self, then: "Order") -> tuple[int, int] | None:
        """Find two distances in memory of which the smaller one does not divide the larger one.

        They are neighbours among the distances, in features, at which digits of either order begin or end.

        Args:
            then: Order in which a next factor reads these outputs.

        Returns:
            The first such distances; None if each distance divides the next one.

        Examples:
            >>> from ksgen import Pattern
            >>> Pattern(1, 6, 2, 1, store="k1:3.k2").outputs.undivided(Pattern(2, 5, 3, 1).inputs)
            >>> Pattern(2, 3, 2, 1).outputs.undivided(Pattern(3, 5, 2, 1).inputs)
            (2, 3)
        """
        return next(((low, high) for low, high in _steps(self.digits, then.digits) if high % low), None)

    def _sorted(self, digits: Sequence[Digit]) -> list[Digit]:
        """Digits in the natural order."""
        return sorted(digits, key=lambda digit: (self.names.index(digit.name), -digit.unit))

    def _written(self, given: Sequence[Digit]) -> str:
        """Digits as text, with neighbours merged that count like one digit; empty for the natural order."""
        digits: list[Digit] = []
        for digit in given:
            if digits and digits[-1].name == digit.name and digits[-1].unit == digit.unit * digit.size:
                digit = Digit(digit.name, digit.unit, digits.pop().size * digit.size)
            digits.append(digit)
        if digits == self._sorted(digits):
            return ""
        names = []
        for digit in digits:
            units = sorted((each.unit for each in digits if each.name == digit.name), reverse=True)
            number = units.index(digit.unit) + 1
            names.append(digit.name if len(units) == 1 else f"{digit.name}{number}:{digit.size}")
        return ".".join(names)


def _ends(digits: Sequence[Digit]) -> Iterable[int]:
    """Distances in memory, in features, at which digits begin or end."""
    return accumulate((digit.size for digit in reversed(digits)), mul, initial=1)


def _steps(first: Sequence[Digit], second: Sequence[Digit]) -> Iterable[tuple[int, int]]:
    """Neighbouring distances at which digits of either order begin or end, in pairs."""
    return pairwise(sorted({*_ends(first), *_ends(second)}))


def _part(digits: Sequence[Digit], low: int, high: int) -> Digit:
    """Part of the digit that has the distances from `low` to `high` in memory."""
    ends: Iterator[tuple[int, int]] = pairwise(_ends(digits))
    digit, begin = next(
        (digit, begin) for digit, (begin, end) in zip(reversed(digits), ends, strict=True) if begin <= low < end
    )
    return Digit(digit.name, digit.unit * (low // begin), high // low)


def _digits_to_try(index: str, size: int, given: Mapping[int, int | None]) -> str:
    """Suggest at most two first digits of an index; the undivided index if there are none.

    Their sizes divide the index's number of values, and are nearest to the first given size.
    """
    wanted = next((part for part in given.values() if part), 2)
    lows = [each for each in range(2, isqrt(size) + 1) if size % each == 0] if given else []
    near = sorted({*lows, *(size // each for each in lows)}, key=lambda each: (abs(each - wanted), each))[:2]
    return " or ".join(f"{index}1:{each}" for each in sorted(near)) or index


@lru_cache(maxsize=1024)
def _read_digits(text: str, order: Order) -> tuple[Digit, ...]:
    """Digits of an order, from the most significant one, without digits of only one value."""
    names = order.names
    found = [_PIECE.fullmatch(each) for each in text.split(".")]
    parts: dict[str, dict[int, int | None]] = {index: {} for index in names}  # sizes by number, from the largest unit
    for each in found:
        if each is None or each[1] not in names or int(each[2] or 0) in parts[each[1]]:
            raise order._refused("")
        parts[each[1]][int(each[2] or 0)] = int(each[3]) if each[3] else None
    units: dict[tuple[str, int], Digit] = {}
    for index, size in zip(names, order.sizes, strict=True):
        known = [part for part in parts[index].values() if part is not None]
        rest, left = divmod(size, prod(known))
        unknown = len(parts[index]) - len(known)
        if left or unknown > 1 or (unknown == 0 and rest > 1):
            raise order._refused(
                f" for {index}, which has {size} values: digits whose sizes have that product, with one size left out "
                f"at most; try {_digits_to_try(index, size, parts[index])}"
            )
        unit = size
        for number in sorted(parts[index]):
            digit_size = parts[index][number] or rest
            unit //= digit_size
            units[index, number] = Digit(index, unit, digit_size)
    named = (units[each[1], int(each[2] or 0)] for each in found if each)
    return tuple(digit for digit in named if digit.size > 1) or (Digit(names[1], 1, 1),)
