"""Measures how much the time of an unchanged kernel varies; a search cannot detect smaller differences."""

from dataclasses import dataclass
from statistics import median

from ksgen.build.request import Binary
from ksgen.errors import KsgenError
from ksgen.tuning.engine import Engine
from ksgen.tuning.job import Candidate, Job, Runs

REPEATS = 10
RUNS = Runs(seconds=0.5)


@dataclass(frozen=True)
class Noise:
    """One kernel, measured several times."""

    job: Job
    median_us: float  # median of the medians
    # width of the interval that holds a measurement's median, relative to that median; the median over all measurements
    within: float
    between: float  # (largest - smallest) / median of the measurements' medians
    notes: tuple[str, ...]  # why times are unreliable, such as "clocks moved"


def measure_noise(engine: Engine, job: Job, candidate: Candidate) -> Noise:
    """Measure one kernel several times; `KsgenError` if it cannot be measured."""
    built = engine.compile(job.kernel, candidate).result()
    if not isinstance(built, Binary):
        raise KsgenError(f"{job}: {built.reason}")
    outcomes = [engine.measure(job, [(candidate, built)], RUNS).result()[0] for _ in range(REPEATS)]
    if failed := next((each for each in outcomes if each.state != "measured"), None):
        raise KsgenError(f"{job}: {failed.state}: {failed.reason}")
    medians = [each.median_us for each in outcomes]
    between = (max(medians) - min(medians)) / median(medians)
    notes = tuple(sorted({each.note for each in outcomes if each.note}))
    return Noise(job, median(medians), median(each.spread for each in outcomes), between, notes)
