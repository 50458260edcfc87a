"""Daubechies' wavelets of numbers, there and back, against a bank of filters in float64."""

from typing import Any

import numpy as np
import pytest

from ksgen import transforms
from ksgen.errors import PatternError
from tests.support.program import needs_device
from tests.transforms.arrays import agree, bank, drawn


@pytest.mark.exhaustive
@needs_device
@pytest.mark.parametrize(("n", "taps", "levels"), [(48, 4, 4), (64, 2, 6), (24, 6, 3), (20, 20, 1), (8, 8, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_as_a_bank_of_filters_and_back(n: int, taps: int, levels: int, dtype: str) -> None:
    x = drawn(3, n, dtype=dtype)
    forth = transforms.daubechies(n, taps=taps, levels=levels)
    y = forth(x)
    agree(y, bank(x.astype(float), taps, levels), dtype)
    agree(transforms.daubechies(n, taps=taps, levels=levels, inverse=True)(y), x.astype(float), dtype)
    agree(forth(x.T, layout="bsl"), y.T.astype(float), dtype)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("levels", [1, 3])  # a level per factor
def test_an_empty_batch_stays_empty(levels: int, inverse: bool) -> None:
    transform = transforms.daubechies(48, levels=levels, inverse=inverse, radix=7)
    assert transform(np.zeros((0, 48), np.float32)).shape == (0, 48)
    assert transform(np.zeros((48, 2, 0)), layout="bsl").shape == (48, 2, 0)


@needs_device
def test_of_complex_numbers_and_by_default() -> None:
    x = drawn(2, 64, dtype="float64")
    whole = transforms.daubechies(64)  # windows of 4, 10, 22 and 46 entries lie within it
    np.testing.assert_array_equal(whole(1j * x), 1j * whole(x))
    agree(whole(x), bank(x, 4, 4), "float64")
    agree(transforms.daubechies(32, taps=2)(x[:, :32]) ** 2, transforms.haar(32)(x[:, :32]) ** 2, "float64")


def test_chains_are_of_the_finest_levels() -> None:
    assert transforms.daubechies(64, levels=3).chain[0].shape == (8, 8, 22, 1)
    assert transforms.daubechies(64, levels=3, inverse=True).chain[0].shape == (8, 8, 24, 1)
    assert transforms.daubechies(64, taps=2, levels=6).chain[0].shape == (2, 32, 32, 1)
    assert transforms.daubechies(64, levels=6, radix=16).chain[0].shape == (16, 4, 10, 1)
    assert transforms.daubechies(64, taps=20, radix=7).chain[0].shape == (32, 2, 20, 1)  # a level at least


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"n": 7}, "n=7; accepted: an even number up to 16777216"),
        ({"n": 8, "taps": 5}, "taps=5; accepted: an even number from 2 to 20"),
        ({"n": 8, "taps": 22}, "taps=22; accepted: an even number from 2 to 20"),
        ({"n": 24, "levels": 4}, "levels=4 of n=24; accepted: from 1 to 3, because n has 3 factors 2"),
        ({"n": 24, "levels": 0}, "levels=0 of n=24; accepted: from 1 to 3"),
        ({"n": 24, "radix": 6}, "radix=6; accepted: a whole number from 7 to 1024"),
    ],
)
def test_what_is_no_transform(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PatternError, match=told):
        transforms.daubechies(**options)
