"""All candidates of one job, with predicted times, for a strategy to choose from. Compiles and measures nothing.

Expected times come from measured ones by a Gaussian process over the constants. It starts from the cost model's
predictions and learns their errors from the job's own measurements. Measurements of other kernels on the same device
count less.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, log2
from typing import Any

import numpy as np

from ksgen.errors import ConstantsError
from ksgen.families import Limits, family_named, meant_for
from ksgen.launch.choice import check_fit
from ksgen.tuning.job import Candidate, Job
from ksgen.tuning.model import Machine, predict_us
from ksgen.tuning.trials import Trial

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


EVERYWHERE = ("simt", "gradient")  # families that support every device
MOST_OTHERS = 200  # a search learns from so many trials of other kernels, the newest ones


@dataclass(frozen=True, eq=False)
class Pool:
    """Candidates: guesses first, then the others by predicted time. Strategies may try them in another order."""

    job: Job
    candidates: tuple[Candidate, ...]
    predicted_us: tuple[float, ...]
    guesses: int  # number of guesses, which come first
    known: tuple[Trial, ...] = field(default=(), repr=False)  # trials of other jobs, to learn from

    @cached_property
    def points(self) -> Points:
        """Points of the candidates, then of the trials of other jobs. Only strategies that learn compute them."""
        own = zip(self.candidates, self.predicted_us, strict=True)
        known = ((trial.job, trial.candidate, trial.predicted_us or 1.0) for trial in self.known)
        return _points([*((self.job, each, us) for each, us in own), *known])

    @cached_property
    def others(self) -> Array:
        """log2 of the measured times of the trials of other jobs."""
        return np.array([log2(trial.median_us or 1) for trial in self.known])

    def __len__(self) -> int:
        return len(self.candidates)

    def neighbours(self, index: int) -> list[int]:
        """Candidates of the same family that differ in one constant."""
        return [number for number in range(len(self)) if number != index and self.are_near(index, number)]

    def are_near(self, one: int, other: int) -> bool:
        """Whether two candidates are of one family and differ in one constant at most."""
        first, second = self.candidates[one], self.candidates[other]
        is_one_kind = type(first.constants) is type(second.constants)
        differences = vars(first.constants).items() - vars(second.constants).items()
        return first.family == second.family and is_one_kind and len(differences) <= 1


def list_space(job: Job, machine: Machine, only: str | None = None) -> list[Candidate]:
    """List all candidates of the machine's families; `only` restricts them to one family, by any of its names."""
    families = [family_named(only or name) for name in machine.ceilings]
    return [
        Candidate(family.name, constants)
        for family in families
        for constants in family.space(job.kernel, machine.limits)
    ]


def make_pool(
    job: Job,
    machine: Machine,
    listed: Iterable[Candidate],
    guesses: Iterable[Candidate] = (),
    trials: Sequence[Trial] = (),
) -> Pool:
    """Pool of the guesses and the listed candidates that can run. Strategies may learn from `trials` of other jobs."""
    families = machine.ceilings.keys()
    first = [guess for guess in dict.fromkeys(guesses) if guess.family in families and _may_run(guess, job, machine)]
    times = {each: _predicted_us(each, job, machine) for each in dict.fromkeys([*first, *listed])}
    guessed = set(first)
    ranked = sorted((each for each, us in times.items() if each not in guessed and isfinite(us)), key=times.__getitem__)
    candidates = (*first, *ranked)
    known = [
        trial
        for trial in trials
        if trial.median_us and trial.predicted_us and trial.family in families and trial.job != job
    ]
    return Pool(job, candidates, tuple(times[each] for each in candidates), len(first), tuple(known[-MOST_OTHERS:]))


def supported_families(job: Job, limits: Limits) -> list[str]:
    """Families that support a kernel at its batch on a device, for arrays as the device allocates them.

    On a processor these are the families that are made for it, without those of GPUs that support every device.
    """
    found = [family.name for family in meant_for(job.kernel, limits, job.batch)]
    if limits.is_cpu:
        found = [name for name in found if name not in EVERYWHERE] or found
    return found


def _points(rows: Sequence[tuple[Job, Candidate, float]]) -> Points:
    numbers: dict[Job, int] = {}
    for job, _, _ in rows:
        numbers.setdefault(job, len(numbers))
    kinds = features([_kernel_row(job) for job in numbers])
    jobs = np.array([numbers[job] for job, _, _ in rows], int)
    constants = features([_constants_row(candidate) for _, candidate, _ in rows])
    return Points(constants, kinds[jobs], jobs, np.array([log2(us) for _, _, us in rows]))


def _constants_row(candidate: Candidate) -> dict[str, Any]:
    """A candidate's constants as one row. The family's name precedes the names of its constants."""
    return {"family": candidate.family} | {
        f"{candidate.family}.{name}": value for name, value in vars(candidate.constants).items()
    }


def _kernel_row(job: Job) -> dict[str, Any]:
    kernel, pattern = job.kernel, job.kernel.pattern
    return {"b": pattern.b, "c": pattern.c, "d": pattern.d, "precision": kernel.precision, "layout": kernel.layout}


def _predicted_us(candidate: Candidate, job: Job, machine: Machine) -> float:
    return predict_us(machine, family_named(candidate.family), job.kernel, candidate.constants, job.batch)


def _may_run(candidate: Candidate, job: Job, machine: Machine) -> bool:
    try:
        check_fit(candidate.family, candidate.constants, job.kernel, machine.limits)
    except ConstantsError:
        return False
    return isfinite(_predicted_us(candidate, job, machine))
