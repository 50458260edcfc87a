"""Arrays for tests of transforms, and how near what is found must be to the truth."""

from typing import Any

import numpy as np

from ksgen.transforms import wavelets

SIZES = [1, 2, 7, 15, 24, 49, 360]
PRECISE = {"float32": 5e-7, "float64": 3e-15}
Array = np.ndarray[Any, Any]


def hartley(x: Array) -> Array:
    found = np.fft.fft(x)
    return np.asarray(found.real - found.imag)


def drawn(*shape: int, dtype: str) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def drawn_complex(*shape: int, dtype: str) -> Array:
    both = drawn(2, *shape, dtype=dtype)
    return np.asarray(both[0] + np.complex64(1j) * both[1])


def agree(found: Array, truth: Array, dtype: str) -> None:
    assert found.shape == truth.shape
    assert found.dtype == (np.result_type(dtype, np.complex64) if truth.dtype.kind == "c" else dtype)
    assert np.linalg.norm(found - truth) <= PRECISE[dtype] * np.linalg.norm(truth)


def bank(x: Array, taps: int, levels: int) -> Array:
    """Level after level, each filter at every second entry; ends are neighbours."""
    low = np.array(wavelets.lowpass(taps))
    details, high = [], low[::-1] * (-1.0) ** np.arange(taps)
    for _ in range(levels):
        taken = (np.arange(0, x.shape[-1], 2)[:, None] + np.arange(taps) - (taps // 2 - 1)) % x.shape[-1]
        details.append(x[..., taken] @ high)
        x = x[..., taken] @ low
    return np.concatenate([x, *reversed(details)], axis=-1)
