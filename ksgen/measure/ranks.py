"""Spearman's rank correlation: whether two lists of numbers grow together."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's rank correlation, from -1 to 1; equal values share a rank, NaN if a list has only equal values."""
    deviations = [ranks - ranks.mean() for ranks in (_ranks(first), _ranks(second))]
    scale = float(np.sqrt((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    return float((deviations[0] * deviations[1]).sum()) / scale if scale else float("nan")


def _ranks(values: ArrayLike) -> Any:
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[at]
