"""Duration of calls in seconds, by the GPU's events or the processor's clock.

Several calls alternate, so that a disturbance affects all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from ksgen.measure.host_memory import keep_freed_memory
from ksgen.measure.pause import rest
from ksgen.measure.trust import host_clock
from ksgen.torch.conversion.times import cuda_clock

Clock = Callable[[Callable[[], None]], float]

WARMUP_RUNS = 3  # the first allocates; the second may still reuse memory of another call's first
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
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)


def seconds_in_turn(
    calls: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Times of each call, round by round; each round begins with another call.

    On a processor, freed memory is not returned to the system, and calls alternate from the first warm-up run on. The
    memory layout is then stable.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
    for _ in range(WARMUP_RUNS):
        for call in calls.values():
            call()
    clock = cuda_clock if on_gpu else host_clock
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if not on_gpu:
                rest()
            seconds[name].append(clock(calls[name]))
    return seconds
