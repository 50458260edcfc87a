"""Operands of foreign kernels: random arrays, and what is exact of them."""

import numpy as np

from tests.foreign import Array


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def to_tf32(values: Array) -> Array:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


def wide(*arrays: Array) -> list[Array]:
    return [each.astype(np.float64) for each in arrays]
