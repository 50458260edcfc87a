"""The data types of a search: a job, a candidate, a device's facts, limits of timing, and a candidate's outcome. Runs
nothing.

All of them travel between processes.
"""

from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from ksgen.devices.base import DeviceLimits
from ksgen.measure.trust import BLOCK_SECONDS, interval
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import checked_batch


@dataclass(frozen=True)
class Job:
    """Subject of a search: one kernel at one batch."""

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
    """Facts about the measuring device that a search needs without opening it."""

    name: str
    target: str
    dialect: str
    kind: str
    driver_version: str
    limits: DeviceLimits
    ksgen: str  # version
    templates: tuple[str, ...]  # digests of the templates, one per family


@dataclass(frozen=True)
class Runs:
    """Limits of timing: candidates take turns, a block of runs each, until medians are known well enough or time is up.

    A candidate whose first blocks are all slower than `give_up_us` needs no more blocks.
    """

    seconds: float  # per candidate, at most
    block_s: float = BLOCK_SECONDS
    give_up_us: float = inf


@dataclass(frozen=True)
class Outcome:
    """The outcome of a candidate: its times, or why there are none."""

    state: str  # one of a trial's states
    reason: str = ""
    microseconds: tuple[float, ...] = ()  # the median of each block
    note: str = ""

    @property
    def median_us(self) -> float:
        return median(self.microseconds)

    @property
    def spread(self) -> float:
        """The width of the interval that holds the median, relative to it."""
        low, high = interval(self.microseconds)
        return (high - low) / self.median_us
