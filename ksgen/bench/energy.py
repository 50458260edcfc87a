"""Energy per run by NVML: the GPU's energy counter, or power samples if it has none, minus the idle power.

Refuses runs too short for the counter's resolution. Only arithmetic and NVML; knows nothing about the work.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ksgen.bench.rows import Facts
from ksgen.errors import KsgenError
from ksgen.install import install_line

if TYPE_CHECKING:
    from ksgen.bench.timing import Timed

LEAST_RUNS = 16  # runs per measurement, as in the paper
LEAST_UPDATES = 20  # counter updates, or samples, per measurement: a resolution of 5 %
SAMPLE_SECONDS = 0.01
IDLE_SECONDS = 3.0
SETTLE_SECONDS = 1.0  # pause after work, until the GPU is idle


class EnergyError(KsgenError):
    """Energy cannot be measured here, or a measurement is meaningless."""


@dataclass(frozen=True)
class Reading:
    """Energy of a GPU during some work."""

    joule: float
    seconds: float
    updates: int  # counter updates, or samples


@dataclass(frozen=True)
class Idle:
    """Power of the idle GPU, and the update interval of its counter."""

    watt: float
    update_s: float


def open_nvml() -> Any:
    """Initialise NVML and return its module. `EnergyError` names what is missing."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise EnergyError(f"measuring energy needs NVML's Python module: {install_line('bench')}") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EnergyError(f"measuring energy needs an NVIDIA GPU and its driver: NVML says {error}") from error
    return pynvml


class Energies:
    """Joules per run above idle, measured over runs that take at least `seconds` together.

    Implements `bench.timing.Quantity`.
    """

    column = "joule"

    def __init__(self, meter: "Meter", idle: Idle, seconds: float) -> None:
        self._meter, self._idle, self._seconds = meter, idle, seconds

    def measure(self, timed: "Timed") -> Facts:
        runs = max(LEAST_RUNS, ceil(self._seconds / timed.once_s))
        reading = self._meter.read(lambda: timed.run(runs))
        joule = joule_per_run(reading, runs, self._idle)
        return {"joule": joule, "idle_watt": self._idle.watt, "energy_runs": runs, "energy_from": self._meter.source}


class Meter:
    """Energy meter of one GPU. `clock` and `pause` are the machine's, except in tests."""

    def __init__(
        self, nvml: Any, handle: Any, clock: Callable[[], float] = monotonic, pause: Callable[[float], None] = sleep
    ) -> None:
        self._nvml, self._handle, self._clock, self._pause = nvml, handle, clock, pause
        self.source = "energy counter" if self._has_counter() else "power samples"

    def _has_counter(self) -> bool:
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError:
            return False
        return True

    def idle(self) -> Idle:
        """Measure the idle GPU now. Nothing else may run on it."""
        self._pause(SETTLE_SECONDS)
        reading = self.read(lambda: self._pause(IDLE_SECONDS)) if self.source == "power samples" else self._watched()
        if not reading.updates:
            raise EnergyError(f"the GPU's {self.source} did not change in {reading.seconds:.1f} s")
        return Idle(reading.joule / reading.seconds, reading.seconds / reading.updates)

    def read(self, work: Callable[[], None]) -> Reading:
        """Measure energy while `work` runs to its end."""
        if self.source == "power samples":
            return self._sampled(work)
        before, begin = self._joule(), self._clock()
        work()
        seconds = self._clock() - begin
        return Reading(self._joule() - before, seconds, 0)

    def _watched(self) -> Reading:
        """Growth of the counter on the idle GPU, from the first observed change to the last one."""
        start, begin = self._joule(), self._clock()
        changes: list[tuple[float, float]] = []
        last = start
        while self._clock() - begin < IDLE_SECONDS:
            self._pause(SAMPLE_SECONDS)
            if (now := self._joule()) != last:
                changes.append((self._clock(), now))
                last = now
        if len(changes) < 2:
            return Reading(last - start, self._clock() - begin, len(changes))
        (first_at, first), (last_at, joule) = changes[0], changes[-1]
        return Reading(joule - first, last_at - first_at, len(changes) - 1)

    def _sampled(self, work: Callable[[], None]) -> Reading:
        """Integral of power over time, by trapezoids between samples."""
        samples: list[tuple[float, float]] = []
        failed: list[EnergyError] = []
        done = threading.Event()

        def sample() -> None:
            try:
                while not done.is_set():
                    samples.append((self._clock(), self._reported("nvmlDeviceGetPowerUsage")))
                    self._pause(SAMPLE_SECONDS)
            except EnergyError as error:
                failed.append(error)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        begin = self._clock()
        try:
            work()
        finally:
            seconds = self._clock() - begin
            done.set()
            thread.join()
        if failed:  # the samples so far say nothing of the rest
            raise failed[0]
        within = [(moment, watt) for moment, watt in samples if begin <= moment <= begin + seconds]
        return Reading(integral(within, seconds), seconds, len(within))

    def _joule(self) -> float:
        return self._reported("nvmlDeviceGetTotalEnergyConsumption")

    def _reported(self, name: str) -> float:
        """Joules or watts that NVML's function of this name reports. `EnergyError` if it fails."""
        try:
            thousandths: int = getattr(self._nvml, name)(self._handle)
        except self._nvml.NVMLError as error:
            raise EnergyError(f"NVML reports no energy of the GPU any more ({error}); measure again") from error
        return thousandths / 1e3


def integral(samples: list[tuple[float, float]], seconds: float) -> float:
    """Joules over `seconds`, from power samples.

    Time before the first and after the last sample counts with the mean of these two samples.
    """
    if len(samples) < 2:
        return samples[0][1] * seconds if samples else 0.0
    between = sum((then - now) * (one + other) / 2 for (now, one), (then, other) in pairwise(samples))
    spanned = samples[-1][0] - samples[0][0]
    return between + (seconds - spanned) * (samples[0][1] + samples[-1][1]) / 2


def joule_per_run(reading: Reading, runs: int, idle: Idle) -> float:
    """Joules per run above idle.

    `EnergyError` if the measurement was too short, or used no more than idling.
    """
    least_s = LEAST_UPDATES * idle.update_s
    if reading.seconds < least_s:
        raise EnergyError(
            f"{runs} runs took {reading.seconds:.2f} s, and this GPU updates its energy every "
            f"{idle.update_s * 1e3:.0f} ms: at least {least_s:.1f} s are needed; --seconds {ceil(2 * least_s)} would do"
        )
    above = reading.joule - idle.watt * reading.seconds
    if above <= 0:
        raise EnergyError(
            f"{runs} runs took {reading.joule:.1f} J in {reading.seconds:.1f} s, no more than the idle GPU's "
            f"{idle.watt:.0f} W: another process used the GPU in the meantime; measure again on an idle GPU"
        )
    return above / runs


def find_handle(nvml: Any, uuid: str | None, index: int) -> Any:
    """NVML handle of CUDA's GPU: by UUID if known, because CUDA_VISIBLE_DEVICES renumbers GPUs, else by index."""
    if uuid:
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        raise EnergyError(f"NVML does not know GPU {index} ({error})") from error
