"""The weights by themselves: their product is the whole matrix, and quarters of a turn are exact."""

from functools import reduce

import numpy as np
import pytest

from ksgen import reference, transforms


@pytest.mark.parametrize("radix", [7, 16, 32])
@pytest.mark.parametrize("inverse", [False, True])
def test_the_chain_is_the_whole_matrix_in_another_order(radix: int, inverse: bool) -> None:
    """Without a device: its factors multiplied, and its rows put in order, to the last digits of float64."""
    found = transforms.dft(210, inverse=inverse, radix=radix)
    whole = reduce(
        lambda matrix, factor: reference.to_dense(*factor) @ matrix,
        zip(found.chain, found.weights, strict=True),
        np.eye(210),
    )
    truth = (np.fft.ifft if inverse else np.fft.fft)(np.eye(210)).T
    assert np.linalg.norm(whole[found.order] - truth) <= 2e-15 * np.linalg.norm(truth)
    assert max(pattern.b for pattern in found.chain) <= radix


def test_quarters_of_a_turn_are_exact() -> None:
    (weights,) = transforms.dft(4).weights
    np.testing.assert_array_equal(
        weights[0, ..., 0], [[1, 1, 1, 1], [1, -1j, -1, 1j], [1, -1, 1, -1], [1, 1j, -1, -1j]]
    )
    assert all(set(np.unique(each)) <= {-1.0, 1.0} for each in transforms.hadamard(64, radix=8).weights)
