"""Into which radices a size is split: products of the primes 2, 3, 5 and 7, as few as a largest one allows. Whole numbers only."""

from itertools import count
from math import prod

from ksgen.errors import PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.values import excerpt, whole_number

PRIMES = (2, 3, 5, 7)
MOST_FEATURES = 1 << 24


def checked_size(n: object, primes: tuple[int, ...] = PRIMES) -> int:
    """The size; `PatternError` unless it is a product of these primes."""
    size = whole_number(n)
    words = "a product of the primes 2, 3, 5 and 7" if primes == PRIMES else " or ".join(f"a power of {prime}" for prime in primes)
    if size is None or not 1 <= size <= MOST_FEATURES or _smooth_part(size, primes) != size:
        raise PatternError(f"n={excerpt(n)}; accepted: {words}, up to {MOST_FEATURES}")
    return size


def checked_radix(radix: object) -> int:
    """The largest radix; `PatternError` on what leaves no room for a prime."""
    most = whole_number(radix)
    if most is None or not PRIMES[-1] <= most <= 1024:
        raise PatternError(f"radix={excerpt(radix)}; accepted: a whole number from {PRIMES[-1]} to 1024")
    return most


def checked_inverse(inverse: object) -> bool:
    """Which way a transform goes; `PatternError` on what does not say it."""
    if type(inverse) is not bool:
        raise PatternError(f"inverse={excerpt(inverse)}; accepted: True or False")
    return inverse


def radices(n: int, most: int) -> tuple[int, ...]:
    """As few as there can be of at most `most` each, the largest of them as small as that allows. A size of 1 has one of 1."""
    primes = [prime for prime in reversed(PRIMES) for _ in range(_power(n, prime))]
    for parts in count(1):
        if found := _shared_out(tuple(primes), parts, most):
            return tuple(sorted(found, reverse=True))
    raise AssertionError  # each prime by itself is at most the largest radix


def butterfly(found: tuple[int, ...], name: str) -> Chain:
    """The patterns of a mixed-radix butterfly: the digit that counts most is transformed first, each in its place."""
    patterns, done, left = [], 1, prod(found)
    for radix in found:
        left //= radix
        patterns.append(Pattern(done, radix, radix, left))
        done *= radix
    return Chain(tuple(patterns), name)


def _shared_out(primes: tuple[int, ...], parts: int, most: int) -> list[int] | None:
    """The primes as products, each prime to the smallest of them so far; None where one becomes too large."""
    products = [1] * parts
    for prime in primes:
        place = products.index(min(products))
        products[place] *= prime
    return products if max(products) <= most else None


def _power(n: int, prime: int) -> int:
    return next(power for power in count() if n % prime ** (power + 1))


def _smooth_part(n: int, primes: tuple[int, ...]) -> int:
    return prod(int(prime ** _power(n, prime)) for prime in primes)
