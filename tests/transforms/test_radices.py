"""Sizes as radices: all of it, as few as there can be, and the butterfly that they make."""

from math import prod

import pytest

from ksgen import transforms
from ksgen.errors import PatternError
from ksgen.transforms.factors import PRIMES, butterfly, checked_radix, checked_size, radices


def smooth(most: int) -> list[int]:
    sizes = {1}
    for prime in PRIMES:
        sizes |= {size * prime**power for size in sizes for power in range(12) if size * prime**power <= most}
    return sorted(sizes)


@pytest.mark.parametrize("most", [7, 16, 32])
def test_radices_are_all_of_a_size(most: int) -> None:
    for n in smooth(3000):
        assert checked_size(n) == n
        found = radices(n, most)
        assert prod(found) == n
        assert max(found) <= most
        assert butterfly(found, "test").in_features == n


def test_few_radices_are_taken() -> None:
    assert radices(1, 32) == (1,)
    assert radices(32, 32) == (32,)
    assert radices(1024, 32) == (32, 32)
    assert radices(360, 32) == (20, 18)
    assert radices(1024, 8) == (8, 8, 4, 4)
    assert str(butterfly((4, 3), "test")) == "1,4,4,3 then 4,3,3,1"


@pytest.mark.parametrize("n", [0, -8, 11, 2 * 13, 2.5, "8", None, 1 << 25])
def test_other_sizes_are_refused(n: object) -> None:
    with pytest.raises(PatternError, match=r"n=.*; accepted: a product of the primes 2, 3, 5 and 7, up to 16777216"):
        checked_size(n)


def test_sizes_of_twos_are_asked_for() -> None:
    for make in (transforms.hadamard, transforms.haar):
        with pytest.raises(PatternError, match=r"n=12; accepted: a power of 2, up to 16777216"):
            make(12)


@pytest.mark.parametrize("radix", [6, 0, 1025, 8.5, "8"])
def test_other_radices_are_refused(radix: object) -> None:
    with pytest.raises(PatternError, match=r"radix=.*; accepted: a whole number from 7 to 1024"):
        checked_radix(radix)
