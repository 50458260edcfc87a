"""Times launches by a device's clock. Checks no result and chooses nothing.

On the host, a launch takes microseconds, which is longer than a small kernel runs. If the GPU waited for the host, the
host's time would be measured. So timed launches on a CUDA GPU are queued behind a kernel that keeps the GPU busy until
all of them are queued. Events have a resolution of half a microsecond. So short launches are timed in sequences, and
the time of a launch is its equal share of the sequence.
"""

from collections.abc import Callable
from functools import cache
from math import ceil
from time import perf_counter
from typing import Any

from ksgen.build.build import build
from ksgen.devices.base import Device
from ksgen.emit.render import render_wait
from ksgen.errors import DeviceError, ToolchainError, warn

SPAN_S = 1e-4  # time between two events: 200 times their resolution
LEAST_S = 1e-6  # shortest launch that events can time
# launches behind the waiting kernel; a full queue, with about a thousand entries, would make the host wait
MOST_QUEUED = 256
ROUNDS_PER_SECOND = 3e9 / 4  # highest rate of the waiting kernel: a multiply-add takes at least four cycles, at 3 GHz
FIRST_QUEUE_S = 2e-5  # the host's time per launch, until it is measured
LEAST_WAIT_S = 1e-4  # least wait: the host's time for a few launches, with a wake-up
SPARE = 1.5  # length of a wait, relative to the host's previous time for queueing
TRIES = 3  # attempts to queue everything in time; other processes may take the processor meanwhile

Launch = Callable[[], None]


def time_launches(device: Device, launch: Launch, runs: int, warmup: int = 2) -> list[float]:
    """Time a launch `runs` times, in seconds. Raises `DeviceError` if the device's clock is wrong."""
    if device.kind == "cuda":
        queue = _Queue.of(device)  # type: ignore[arg-type]  # every device can be hashed
        seconds = queue.times(launch, runs, warmup)
    else:
        seconds = device.time(launch, None, runs, warmup)
    if not all(second > 0 for second in seconds):
        raise DeviceError(f"{device.name}: its clock reported {min(seconds)} s for a run; update its driver")
    return seconds


class _Queue:
    """Timed launches on one device, queued behind a kernel that waits."""

    def __init__(self, device: Device, wait: Callable[[float], None] | None) -> None:
        self._device, self._wait = device, wait
        self._host_s = FIRST_QUEUE_S  # the host's seconds per launch, with its share of the events

    @staticmethod
    @cache
    def of(device: Any) -> "_Queue":
        """The device's queue, created once."""
        try:
            return _Queue(device, _waiting(device))
        except ToolchainError as error:
            why = str(error).partition(";")[0]
            warn(f"{device.name}: times include the host's launch overhead, because there is no compiler ({why})")
            return _Queue(device, None)

    def times(self, launch: Launch, runs: int, warmup: int) -> list[float]:
        for _ in range(warmup):
            launch()
        once = self._behind_a_wait(launch, 1, 1)[0]
        together = min(ceil(SPAN_S / max(once, LEAST_S)), MOST_QUEUED)
        seconds = [once] if together == 1 else []
        while len(seconds) < runs:
            seconds += self._behind_a_wait(launch, together, min(runs - len(seconds), MOST_QUEUED // together))
        return seconds

    def _behind_a_wait(self, launch: Launch, together: int, runs: int) -> list[float]:
        """Seconds per launch in each of `runs` sequences of `together` launches.

        The wait must last until all launches are queued. If it did not in any of `TRIES` attempts, the last one counts.
        """
        marks: list[float] = []  # on the host's clock

        def begin() -> None:
            marks[:] = [perf_counter()]
            if self._wait:
                self._wait(wait_s)

        def group() -> None:
            for _ in range(together):
                launch()
            marks.append(perf_counter())

        for _ in range(TRIES if self._wait else 1):
            wait_s = max(SPARE * self._host_s * together * runs, LEAST_WAIT_S)
            steps = iter([begin, *[group] * runs])
            _, *seconds = self._device.time(lambda: next(steps)(), None, 1 + runs, 0)  # noqa: B023  (its last use precedes the next try)
            queued_s = marks[-1] - marks[0]
            self._host_s = queued_s / (together * runs)
            if queued_s < wait_s:
                break
        return [second / together for second in seconds]


def _waiting(device: Device) -> Callable[[float], None]:
    """Create a function whose launch keeps the device busy for at least the given number of seconds."""
    probe = render_wait()
    kernel = device.load(build(probe.text, probe.entry, device.target), probe.entry, 0)
    unused = device.allocate(4)
    return lambda seconds: device.launch(kernel, 1, 1, 0, (unused, ceil(seconds * ROUNDS_PER_SECOND)), None)
