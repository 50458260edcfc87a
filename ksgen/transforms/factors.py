"""Computes the radices of a size, and the chain of the mixed-radix butterfly with its exact weights.

Radices are products of the primes 2, 3, 5 and 7, up to a limit. Weights are one array (a, b, c, d) per factor, in
float64 or complex128. Knows no devices.
"""

from collections.abc import Iterator
from itertools import count
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ksgen.errors import PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.values import excerpt, whole_number

Weights = tuple[NDArray[Any], ...]
PRIMES = (2, 3, 5, 7)
MOST_FEATURES = 1 << 24


def checked_size(n: object, primes: tuple[int, ...] = PRIMES) -> int:
    """The size as an int; `PatternError` unless it is a product of these primes."""
    size = whole_number(n)
    words = "a product of the primes 2, 3, 5 and 7" if primes == PRIMES else f"a power of {primes[0]}"
    if size is None or not 1 <= size <= MOST_FEATURES or prod(prime ** _power(size, prime) for prime in primes) != size:
        raise PatternError(f"n={excerpt(n)}; accepted: {words}, up to {MOST_FEATURES}")
    return size


def checked_radix(radix: object) -> int:
    """The largest radix as an int; `PatternError` if it is below the largest prime, or above 1024."""
    most = whole_number(radix)
    if most is None or not PRIMES[-1] <= most <= 1024:
        raise PatternError(f"radix={excerpt(radix)}; accepted: a whole number from {PRIMES[-1]} to 1024")
    return most


def checked_inverse(inverse: object) -> bool:
    """The flag unchanged; `PatternError` unless it is a bool."""
    if type(inverse) is not bool:
        raise PatternError(f"inverse={excerpt(inverse)}; accepted: True or False")
    return inverse


def radices(n: int, most: int) -> tuple[int, ...]:
    """Radices of at most `most`, in descending order. A size of 1 has the radix 1.

    A greedy distribution of the primes makes the radices few and similar. It does not always find the fewest radices,
    nor the smallest maximum.
    """
    primes = [prime for prime in reversed(PRIMES) for _ in range(_power(n, prime))]
    for parts in count(1):
        if found := _shared_out(tuple(primes), parts, most):
            return tuple(sorted(found, reverse=True))
    raise AssertionError  # never reached: each prime alone is at most the largest radix


def butterfly(found: tuple[int, ...], name: str) -> Chain:
    """Chain of a mixed-radix butterfly: each digit is transformed in place, the most significant first."""
    return Chain(tuple(Pattern(done, radix, radix, left) for done, radix, left in _stages(found)), name)


def _stages(radices: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Each radix between the products of the earlier and of the later ones."""
    done, left = 1, prod(radices)
    for radix in radices:
        left //= radix
        yield done, radix, left
        done *= radix


def _shared_out(primes: tuple[int, ...], parts: int, most: int) -> list[int] | None:
    """Multiply each prime into the smallest product so far; None if one product exceeds `most`."""
    products = [1] * parts
    for prime in primes:
        place = products.index(min(products))
        products[place] *= prime
    return products if max(products) <= most else None


def _power(n: int, prime: int) -> int:
    return next(power for power in count() if n % prime ** (power + 1))


def fourier(radices: tuple[int, ...], is_inverse: bool) -> Weights:
    """One Fourier matrix per digit, times the twiddle factors (roots of unity) of that digit and the remaining ones."""
    found = []
    for done, radix, left in _stages(radices):
        output, digit, j = np.ogrid[:radix, :radix, :left]
        block = _roots(output * (digit * left + j), radix * left, is_inverse)
        found.append(np.broadcast_to(block, (done, radix, radix, left)).copy())
    found[-1] /= prod(radices) if is_inverse else 1
    return tuple(found)


def hadamard(radices: tuple[int, ...]) -> Weights:
    """Sylvester's matrix per digit: minus one if output k and input l share an odd number of set bits, else one."""
    found = []
    for done, radix, left in _stages(radices):
        shared = np.bitwise_and.outer(np.arange(radix), np.arange(radix))
        signs = 1.0 - 2.0 * np.array([[int(each).bit_count() % 2 for each in row] for row in shared])
        found.append(np.broadcast_to(signs[None, :, :, None], (done, radix, radix, left)).copy())
    return tuple(found)


def haar(levels: int) -> Weights:
    """Sums and differences of neighbours, then of neighbouring sums, stored in place of the two inputs."""
    found = []
    for level in range(levels):
        weights = np.zeros((1 << levels - level - 1, 2, 2, 1 << level))
        weights[:, 0, 0] = weights[:, 1, 1] = 1
        weights[..., 0] = np.array([[1, 1], [1, -1]]) / sqrt(2)
        found.append(weights)
    return tuple(found)


def _roots(numbers: NDArray[Any], period: int, is_inverse: bool) -> NDArray[Any]:
    """exp(-2 pi i number / period), exact at multiples of a quarter turn; the conjugates if `is_inverse`."""
    numbers = numbers % period
    angles = 2 * np.pi / period * numbers
    roots = np.cos(angles) - 1j * np.sin(angles)
    quarters, rest = np.divmod(4 * numbers, period)
    roots = np.where(rest == 0, np.array([1, -1j, -1, 1j])[quarters], roots)
    return roots.conj() if is_inverse else roots
