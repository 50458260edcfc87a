"""Daubechies' filters: what defines them, and PyWavelets' own values."""

import numpy as np
import pytest

from ksgen.transforms import wavelets

DB4 = [  # pywt.Wavelet("db4").rec_lo of PyWavelets 1.9
    0.2303778133088965, 0.7148465705529157, 0.6308807679298589, -0.027983769416859854,
    -0.18703481171909309, 0.030841381835560764, 0.0328830116668852, -0.010597401785069032,
]  # fmt: skip
DB2 = [  # what it gives for wavedec(np.arange(8.0) ** 2, "db2", "periodization", level=2), joined
    43.66025403784438, 26.339745962155618, -17.98076211353316, 28.516660498395407,
    -7.436401953852086, -1.224744871391589, -1.2247448713915903, 29.684881569858604,
]  # fmt: skip


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
