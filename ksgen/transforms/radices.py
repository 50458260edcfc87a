"""Splits a size into few radices: products of the primes 2, 3, 5 and 7 up to a largest radix."""

from itertools import count
from math import prod

from ksgen.errors import PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.values import excerpt, whole_number

PRIMES = (2, 3, 5, 7)
MOST_FEATURES = 1 << 24


def checked_size(n: object, primes: tuple[int, ...] = PRIMES) -> int:
    """The size as an int; `PatternError` unless it is a product of these primes."""
    size = whole_number(n)
    words = (
        "a product of the primes 2, 3, 5 and 7"
        if primes == PRIMES
        else " or ".join(f"a power of {prime}" for prime in primes)
    )
    if size is None or not 1 <= size <= MOST_FEATURES or _smooth_part(size, primes) != size:
        raise PatternError(f"n={excerpt(n)}; accepted: {words}, up to {MOST_FEATURES}")
    return size


def checked_radix(radix: object) -> int:
    """The largest radix as an int; `PatternError` if a prime would exceed it."""
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

    A greedy distribution of the primes makes them few and similar, not always the fewest or with the least maximum.
    """
    primes = [prime for prime in reversed(PRIMES) for _ in range(_power(n, prime))]
    for parts in count(1):
        if found := _shared_out(tuple(primes), parts, most):
            return tuple(sorted(found, reverse=True))
    raise AssertionError  # never reached: each prime alone is at most the largest radix


def butterfly(found: tuple[int, ...], name: str) -> Chain:
    """Chain of a mixed-radix butterfly: each digit is transformed in place, the most significant first."""
    patterns, done, left = [], 1, prod(found)
    for radix in found:
        left //= radix
        patterns.append(Pattern(done, radix, radix, left))
        done *= radix
    return Chain(tuple(patterns), name)


def _shared_out(primes: tuple[int, ...], parts: int, most: int) -> list[int] | None:
    """Multiply each prime into the smallest product so far; None if one product exceeds `most`."""
    products = [1] * parts
    for prime in primes:
        place = products.index(min(products))
        products[place] *= prime
    return products if max(products) <= most else None


def _power(n: int, prime: int) -> int:
    return next(power for power in count() if n % prime ** (power + 1))


def _smooth_part(n: int, primes: tuple[int, ...]) -> int:
    return prod(int(prime ** _power(n, prime)) for prime in primes)
