"""Each transform against NumPy's and SciPy's, to float precision, and the spec that ships with ksgen."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ksgen import transforms
from ksgen.spec import load
from tests.support.program import needs_device
from tests.transforms.arrays import PRECISE, SIZES, Array, agree, drawn, drawn_complex

hadamard = pytest.importorskip("scipy.linalg", reason="pip install scipy").hadamard
ROOT = Path(__file__).parents[2]


COMPLEX: dict[str, tuple[Callable[[int], transforms.Transform], Callable[[Array], Array]]] = {
    "dft": (transforms.dft, np.fft.fft),
    "inverse": (lambda n: transforms.dft(n, inverse=True), np.fft.ifft),
}


@pytest.mark.exhaustive
@needs_device
@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", COMPLEX)
def test_transforms_of_complex_numbers(name: str, n: int, dtype: str) -> None:
    make, truth = COMPLEX[name]
    x = drawn_complex(5, n, dtype=dtype)
    agree(make(n)(x), truth(x.astype(complex)), dtype)


@needs_device
def test_hadamard_and_haar() -> None:
    x = drawn(3, 64, dtype="float64")
    agree(transforms.hadamard(64)(x), x @ hadamard(64), "float64")
    agree(transforms.hadamard(64)(1j * x), 1j * x @ hadamard(64), "float64")
    basis = transforms.haar(8)(np.eye(8)).T
    np.testing.assert_allclose(basis @ basis.T, np.eye(8), atol=1e-15)
    steps = [[1] * 8, [1] * 4 + [-1] * 4, [1, 1, -1, -1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, -1, -1], [1, -1] + [0] * 6]
    np.testing.assert_allclose(np.sign(basis[:5].round(9)), steps)
    np.testing.assert_array_equal(transforms.haar(1)(np.ones((2, 1))), np.ones((2, 1)))


def test_the_shipped_spec_is_of_these_chains() -> None:
    spec = load(ROOT / "specs" / "fft.yaml")
    made = {"dft360": transforms.dft(360), "dft1024": transforms.dft(1024), "hadamard1024": transforms.hadamard(1024)}
    assert spec.layers == {name: each.chain for name, each in made.items()}
    assert {kernel.precision for kernel in spec.kernels} == {"complex64", "float32"}
