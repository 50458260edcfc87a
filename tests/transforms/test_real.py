"""Transforms of real numbers against NumPy's and SciPy's, to float precision."""

from collections.abc import Callable

import numpy as np
import pytest

from ksgen import transforms
from tests.support.program import needs_device
from tests.transforms.arrays import PRECISE, SIZES, Array, agree, drawn, drawn_complex, hartley

fft = pytest.importorskip("scipy.fft", reason="pip install scipy")


REAL: dict[str, tuple[Callable[[int], transforms.Transform], Callable[[Array], Array]]] = {
    "dft": (transforms.dft, np.fft.fft),
    "rdft": (transforms.rdft, np.fft.rfft),
    "dct": (transforms.dct, lambda x: np.asarray(fft.dct(x, type=2))),
    "hartley": (transforms.hartley, hartley),
}


@pytest.mark.exhaustive
@needs_device
@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", REAL)
def test_transforms_of_real_numbers(name: str, n: int, dtype: str) -> None:
    make, truth = REAL[name]
    x = drawn(5, n, dtype=dtype)
    agree(make(n)(x), truth(x.astype(float)), dtype)


@needs_device
@pytest.mark.parametrize("n", SIZES)
def test_the_inverse_for_real_numbers(n: int) -> None:
    """Frequencies that no real numbers have agree too: both take the same parts as zero."""
    y = drawn_complex(3, n // 2 + 1, dtype="float64")
    agree(transforms.irdft(n)(y), np.fft.irfft(y, n), "float64")
