"""Times of several calls, in turn and by the device's own clock, so that what disturbs one disturbs all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch

WARMUP_RUNS = 2


@dataclass(frozen=True)
class Spread:
    """The median, and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)


def seconds_in_turn(calls: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """For each call its times, round by round; each round begins with another call."""
    for call in calls.values():
        for _ in range(WARMUP_RUNS):
            call()
    time = _time_on_cuda if device.type == "cuda" else _time_on_cpu
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(time(calls[name]))
    return seconds


def _time_on_cpu(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _time_on_cuda(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
