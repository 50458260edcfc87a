"""The words of a search: a job, a candidate, a device's facts, how to time, and a candidate's outcome. Runs nothing.

All of them travel between processes.
"""

from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from ksgen.devices.base import Limits
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import checked_batch


@dataclass(frozen=True)
class Job:
    """What is tuned: one kernel at one batch."""

    kernel: KernelSpec
    batch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", checked_batch(self.batch))

    def __str__(self) -> str:
        return f"{self.kernel.name}, batch {self.batch}"


@dataclass(frozen=True)
class Candidate:
    """One choice of compile-time constants."""

    family: str
    constants: Any

    def __str__(self) -> str:
        return f"{self.family}: {self.constants}"


@dataclass(frozen=True)
class Facts:
    """What a search must know about the device that measures, without opening it."""

    name: str
    target: str
    dialect: str
    kind: str
    driver_version: str
    limits: Limits
    ksgen: str  # version
    templates: tuple[str, ...]  # digests, family by family


@dataclass(frozen=True)
class Runs:
    """How long to time: `seconds` per candidate, and the least and most runs.

    Candidates take turns, `turns` each. One whose first runs are all slower than `give_up_us` gets no more of them.
    """

    least: int
    most: int
    seconds: float
    turns: int = 1
    give_up_us: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a candidate: its runs, or why there are none."""

    state: str  # as in a trial
    reason: str = ""
    microseconds: tuple[float, ...] = ()
    note: str = ""

    @property
    def median_us(self) -> float:
        return median(self.microseconds)

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        if len(self.microseconds) < 2:
            return 0.0
        tenths = quantiles(self.microseconds, n=10, method="inclusive")
        return (tenths[-1] - tenths[0]) / self.median_us
