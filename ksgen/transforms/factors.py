"""Computes the exact weights of transforms' factors, (a, b, c, d) each, in float64 or complex128. Knows no devices."""

from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = tuple[NDArray[Any], ...]


def fourier(radices: tuple[int, ...], is_inverse: bool) -> Weights:
    """Fourier matrices per digit, times the roots of unity (twiddle factors) between it and the remaining digits."""
    found, done, left = [], 1, prod(radices)
    for radix in radices:
        whole, left = left, left // radix
        output, digit, j = np.ogrid[:radix, :radix, :left]
        block = _roots(output * (digit * left + j), whole, is_inverse)
        found.append(np.broadcast_to(block, (done, radix, radix, left)).copy())
        done *= radix
    found[-1] /= done if is_inverse else 1
    return tuple(found)


def hadamard(radices: tuple[int, ...]) -> Weights:
    """Sylvester's matrix per digit: minus one if output k and input l share an odd number of set bits, else one."""
    found, done, left = [], 1, prod(radices)
    for radix in radices:
        left //= radix
        shared = np.bitwise_and.outer(np.arange(radix), np.arange(radix))
        signs = 1.0 - 2.0 * np.array([[int(each).bit_count() % 2 for each in row] for row in shared])
        found.append(np.broadcast_to(signs[None, :, :, None], (done, radix, radix, left)).copy())
        done *= radix
    return tuple(found)


def haar(levels: int) -> Weights:
    """Sums and differences of neighbours, then of neighbouring sums, stored in place of the two inputs."""
    found = []
    for level in range(levels):
        weights = np.zeros((1 << levels - level - 1, 2, 2, 1 << level))
        weights[:, 0, 0] = weights[:, 1, 1] = 1
        weights[..., 0] = np.array([[1, 1], [1, -1]]) / sqrt(2)
        found.append(weights)
    return tuple(found)


def _roots(numbers: NDArray[Any], period: int, is_inverse: bool) -> NDArray[Any]:
    """exp(-2 pi i number / period), exact at multiples of a quarter turn; the conjugates if `is_inverse`."""
    numbers = numbers % period
    angles = 2 * np.pi / period * numbers
    roots = np.cos(angles) - 1j * np.sin(angles)
    quarters, rest = np.divmod(4 * numbers, period)
    roots = np.where(rest == 0, np.array([1, -1j, -1, 1j])[quarters], roots)
    return roots.conj() if is_inverse else roots
