"""Transforms of PyTorch's tensors are its own."""

import numpy as np
import pytest

from ksgen import transforms
from ksgen.errors import LaunchError
from tests.support.libraries import library
from tests.support.program import needs_device
from tests.transforms.arrays import hartley

fft = pytest.importorskip("scipy.fft", reason="pip install scipy")


@pytest.mark.libraries
def test_sparse_tensors_are_refused() -> None:
    x = library("torch").eye(8)
    with pytest.raises(LaunchError, match=r"dct\(8\): x is a torch.sparse_coo tensor; accepted: a dense one"):
        transforms.dct(8)(x.to_sparse())


@pytest.mark.libraries
@needs_device
def test_tensors_of_pytorch() -> None:
    torch = library("torch")
    x = torch.randn(4, 30, dtype=torch.float64)
    z = torch.randn(4, 30, dtype=torch.complex128)
    for found, truth in (
        (transforms.dft(30)(z.conj()), torch.fft.fft(z.conj())),
        (transforms.rdft(30)(x), torch.fft.rfft(x)),
        (transforms.irdft(30)(z[:, :16]), torch.fft.irfft(z[:, :16], 30)),
        (transforms.dft(30)(z.T, layout="bsl"), torch.fft.fft(z.T, dim=0)),
        (transforms.rdft(24)(x.flatten()[1:25]), torch.fft.rfft(x.flatten()[1:25])),
        (transforms.dct(30)(x), torch.from_numpy(fft.dct(x.numpy()))),
        (transforms.hartley(30)(x), torch.from_numpy(hartley(x.numpy()))),
        (transforms.haar(16)(x[:, :16]), torch.from_numpy(transforms.haar(16)(x[:, :16].numpy()))),
    ):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


@needs_device
def test_other_orders_of_bytes_and_longer_numbers_of_numpy() -> None:
    z = np.random.default_rng(0).standard_normal((3, 24)) + 1j
    for x in (z.astype(">c16"), z.astype(np.clongdouble), z.real.astype(np.longdouble), z.real.astype(">f8")):
        np.testing.assert_allclose(transforms.dft(24)(x), np.fft.fft(x.astype(np.complex128)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        transforms.rdft(24)(z.real.astype(np.longdouble)), np.fft.rfft(z.real), rtol=0, atol=1e-12
    )
    assert transforms.hadamard(8)(np.ones(8, ">f4")).dtype == np.float32
