"""Expected times of candidates from measured ones: a Gaussian process over the constants.

It starts from the cost model's predictions and learns their errors from the job's own measurements. Measurements of
other kernels on the same device count less. Knows only numbers: no kernels, no devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

COMMON, OWN = 0.5, 0.5  # standard deviations, in log2 of time: shared by all kernels, and specific to one job
OFFSET = 1.0  # standard deviation of an error that all candidates of a job share
NOISE = 0.05  # standard deviation of a measurement
REACH = 1.5  # doublings of one constant over which a measurement is informative
REACH_KERNELS = 4.0  # the same for one size of the pattern


def features(rows: Sequence[Mapping[str, Any]]) -> Array:
    """One row per candidate: log2(1 + number) for numbers, and for words a column per word with 1 or 0.

    A name that is missing from a row counts as zero.
    """
    columns: list[list[float]] = []
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name, 0) for row in rows]
        words = {value for value in values if isinstance(value, str)}
        columns += [[float(value == word) for value in values] for word in sorted(words)]
        if not words:
            columns.append([log2(1 + value) for value in values])
    return np.array(columns, float).T.reshape(len(rows), len(columns))


@dataclass(frozen=True)
class Points:
    """Candidates of one or more jobs, as numbers."""

    constants: Array  # features, one row each
    kernels: Array  # features of the job's kernel, one row each
    jobs: Array  # number of the job
    predicted: Array  # log2 of the time by the cost model

    def at(self, rows: Array) -> "Points":
        return Points(self.constants[rows], self.kernels[rows], self.jobs[rows], self.predicted[rows])


def expect(measured: Points, times: Array, asked: Points) -> tuple[Array, Array]:
    """Mean and standard deviation of log2 of the time, for each candidate in `asked`.

    `times` holds log2 of the times of `measured`.
    """
    everywhere = COMMON**2 + OWN**2 + OFFSET**2
    if not len(times):
        return asked.predicted, np.full(len(asked.jobs), everywhere**0.5)
    lower = np.linalg.cholesky(_covariance(measured, measured) + NOISE**2 * np.eye(len(times)))
    across = np.linalg.solve(lower, _covariance(measured, asked))
    mean = asked.predicted + across.T @ np.linalg.solve(lower, times - measured.predicted)
    return mean, np.sqrt(np.maximum(everywhere - (across**2).sum(0), 1e-9))


def _covariance(left: Points, right: Points) -> Array:
    near = np.exp(-_distance(left.constants, right.constants) / REACH)
    alike = np.exp(-_distance(left.kernels, right.kernels) / REACH_KERNELS)
    same = left.jobs[:, None] == right.jobs[None, :]
    covariance: Array = near * (COMMON**2 * alike + OWN**2 * same) + OFFSET**2 * same
    return covariance


def _distance(left: Array, right: Array) -> Array:
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2 * left @ right.T
    distance: Array = np.sqrt(np.maximum(squares, 0))
    return distance
