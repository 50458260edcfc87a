"""Daubechies' wavelets: their filters, and what they make of numbers, against a bank of filters in float64 and PyWavelets' own values."""

from typing import Any

import numpy as np
import pytest

from ksgen import transforms
from ksgen.errors import PatternError
from ksgen.transforms import wavelets
from tests.support.program import needs_device
from tests.transforms.arrays import Array, agree, drawn

DB4 = [  # pywt.Wavelet("db4").rec_lo of PyWavelets 1.9
    0.2303778133088965, 0.7148465705529157, 0.6308807679298589, -0.027983769416859854,
    -0.18703481171909309, 0.030841381835560764, 0.0328830116668852, -0.010597401785069032,
]  # fmt: skip
DB2 = [  # what it gives for wavedec(np.arange(8.0) ** 2, "db2", "periodization", level=2), joined
    43.66025403784438, 26.339745962155618, -17.98076211353316, 28.516660498395407,
    -7.436401953852086, -1.224744871391589, -1.2247448713915903, 29.684881569858604,
]  # fmt: skip


def bank(x: Array, taps: int, levels: int) -> Array:
    """Level after level, each filter at every second entry; ends are neighbours."""
    low = np.array(wavelets.lowpass(taps))
    details, high = [], low[::-1] * (-1.0) ** np.arange(taps)
    for _ in range(levels):
        taken = (np.arange(0, x.shape[-1], 2)[:, None] + np.arange(taps) - (taps // 2 - 1)) % x.shape[-1]
        details.append(x[..., taken] @ high)
        x = x[..., taken] @ low
    return np.concatenate([x, *reversed(details)], axis=-1)


@pytest.mark.parametrize("taps", range(2, wavelets.MOST_TAPS + 1, 2))
def test_filters_are_orthonormal_and_blind_to_polynomials(taps: int) -> None:
    low = np.array(wavelets.lowpass(taps))
    for by in range(taps // 2):
        assert abs(low[2 * by :] @ low[: taps - 2 * by] - (by == 0)) < 4e-16
    high = low[::-1] * (-1.0) ** np.arange(taps)
    for power in range(taps // 2):
        assert abs(high @ (2 * np.arange(taps) / taps - 1) ** power) < 1e-15
    assert np.abs(low[: taps // 2]).sum() >= np.abs(low[taps // 2 :]).sum()  # the least phase


def test_filters_and_coefficients_are_those_of_another_library() -> None:
    assert list(wavelets.lowpass(8)) == DB4
    block, x = wavelets.analysis(4, 2), np.arange(8.0) ** 2
    found = (x[wavelets.windows(8, 4, 2)].reshape(2, -1) @ block.T).ravel()[wavelets.places(8, 2)]
    np.testing.assert_allclose(found, DB2, rtol=0, atol=1e-13)


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
        ({"n": 24, "levels": 4}, "levels=4 of n=24; accepted: from 1 to 3, as often as 2 divides n"),
        ({"n": 24, "levels": 0}, "levels=0 of n=24; accepted: from 1 to 3"),
        ({"n": 24, "radix": 6}, "radix=6; accepted: a whole number from 7 to 1024"),
    ],
)
def test_what_is_no_transform(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PatternError, match=told):
        transforms.daubechies(**options)
