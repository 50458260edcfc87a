"""Amount of measurement per contender: the protocol's number of measurements and runs, fewer for slow contenders.

The clock for work on a GPU excludes the time that the host takes to launch it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import median
from typing import Any
from typing import Protocol as PythonProtocol

import torch
from torch import Tensor

from ksgen.bench.problem import Gradients
from ksgen.bench.rows import Facts
from ksgen.measure.trust import Watch, host_clock
from ksgen.torch.conversion.times import cuda_clock

_CYCLES_PER_S = 2e9  # approximate clock rate of a GPU
_LEAST_BUSY_S, _MOST_BUSY_S = 2e-4, 5e-3


class BusyCudaClock:
    """CUDA clock that excludes the host's launch time.

    The call is queued behind other work that keeps the GPU busy while the host enqueues.
    """

    def __init__(self) -> None:
        self._busy_s = _MOST_BUSY_S  # 1.5 times the last duration of enqueuing

    def __call__(self, call: Callable[[], object]) -> float:
        def enqueue() -> None:
            self._busy_s = min(max(1.5 * host_clock(call), _LEAST_BUSY_S), _MOST_BUSY_S)

        torch.cuda._sleep(int(self._busy_s * _CYCLES_PER_S))
        return cuda_clock(enqueue)


@dataclass(frozen=True)
class ReadyContender:
    """A contender that is ready to run on one problem's arrays."""

    run: Callable[[int], Any]  # one product, on the set of arrays with this number
    y: Callable[[Any], Sequence[Tensor]]  # outputs of a run, one per chain
    clock: Callable[[Callable[[], object]], float]
    wait: Callable[[], None]  # until all runs are complete
    rest: Callable[[], None] = lambda: None  # pause before timing, until other threads sleep
    gradients: Callable[[Any], Gradients | None] = lambda result: None  # of a run that is a training step
    convert: Callable[[], object] | None = None  # convert the weights again; None if that cannot be timed alone


@dataclass(frozen=True)
class Protocol:
    """Contenders to measure, with the number and length of their measurements."""

    names: tuple[str, ...]  # contenders' names
    measurements: int = 10
    runs: int = 10  # in one measurement
    most_seconds: float = 2.0  # limit per contender and job: slower ones get fewer measurements
    seed: int = 0
    tune: str | None = None  # budget of the search per kernel of ours, such as 60s; None: no search


class Quantity(PythonProtocol):
    """Measured quantity of a prepared contender: its time, or its energy."""

    column: str  # name of a measurement's column

    def measure(self, timed: "Timed") -> Facts: ...


class Times:
    """Microseconds per run."""

    column = "us"

    def __init__(self) -> None:
        self._watch = Watch()

    def measure(self, timed: "Timed") -> Facts:
        us = timed.seconds() * 1e6
        return {"us": us, "runs": timed.runs, "others_share": self._watch.others_share()}


WAKING_S = 0.02  # shorter calls get a warm-up before each measurement: sleeping threads take 0.5 ms to wake


class Timed:
    """A warm contender, and its number of runs: the protocol's, more in `least_s`, or less if that takes too long.

    Each run takes the next set of arrays from `turns`, which all contenders of a job share. So no contender finds in a
    cache what another one has just read.
    """

    def __init__(self, ready: ReadyContender, turns: Iterator[int], protocol: Protocol, least_s: float = 0.0) -> None:
        self._ready, self._turns = ready, turns
        self.runs, self.once_s = 1, inf
        self.once_s = self.seconds()
        once = self.once_s = self._typical(self.once_s, self.seconds, protocol)
        allowed = int(protocol.most_seconds / once)
        wanted = max(protocol.runs, ceil(least_s / once))
        self.runs = max(1, min(wanted, allowed // protocol.measurements))
        self.most_measurements = max(1, allowed // self.runs)

    def conversion_us(self, protocol: Protocol) -> float | None:
        """Microseconds to convert the weights again; None if that cannot be timed alone."""
        if not (convert := self._ready.convert):
            return None

        def seconds(expected_s: float) -> float:
            self._ready.rest()
            if expected_s < WAKING_S:
                convert()
            return self._ready.clock(convert)

        once_s = seconds(inf)
        return 1e6 * self._typical(once_s, lambda: seconds(once_s), protocol)

    @staticmethod
    def _typical(once_s: float, again: Callable[[], float], protocol: Protocol) -> float:
        """Median of three more times, or the first one if it is a tenth of the limit or more."""
        return median(again() for _ in range(3)) if once_s < protocol.most_seconds / 10 else once_s

    def seconds(self) -> float:
        """Seconds per run, averaged over a measurement's runs."""
        self._ready.rest()
        if self.once_s < WAKING_S:
            self.run(1)
        return self._ready.clock(self._run) / self.runs

    def run(self, runs: int) -> None:
        """Execute this number of runs and wait for them, without reading the clock in between."""
        for _ in range(runs):
            self._ready.run(next(self._turns))
        self._ready.wait()

    def _run(self) -> None:
        for _ in range(self.runs):
            self._ready.run(next(self._turns))
