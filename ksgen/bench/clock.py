"""Seconds of calls, by the GPU's own events or the processor's clock. Several calls take turns, so that a disturbance hits all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch

from ksgen.bench.host_memory import keep_freed_memory
from ksgen.devices.base import Device
from ksgen.measure.pause import rest

Clock = Callable[[Callable[[], None]], float]

WARMUP_RUNS = 3  # the first allocate, and the second may find what the first of another call left
_CYCLES_PER_S = 2e9  # of a GPU's clock, about
_LEAST_BUSY_S, _MOST_BUSY_S = 2e-4, 5e-3


def host_clock(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def cuda_clock(call: Callable[[], object]) -> float:
    """By events on PyTorch's stream. Includes the host's time to launch, if the GPU waits for it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class BusyCudaClock:
    """The same, queued behind other work that keeps the GPU busy while the host enqueues the call: launching is not measured."""

    def __init__(self) -> None:
        self._busy_s = _MOST_BUSY_S  # what enqueuing took last time, and half as much again

    def __call__(self, call: Callable[[], object]) -> float:
        def enqueue() -> None:
            self._busy_s = min(max(1.5 * host_clock(call), _LEAST_BUSY_S), _MOST_BUSY_S)

        torch.cuda._sleep(int(self._busy_s * _CYCLES_PER_S))
        return cuda_clock(enqueue)


def opencl_clock(device: Device) -> Clock:
    """From the start of the first launch to the end of the last one, by the device's own profile."""
    return lambda call: device.time(call, None, runs=1, warmup=0)[0]


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
    """Times of each call, round by round. Each round begins with another call.

    On a processor freed memory is kept, and calls take turns from the first warm-up run on: memory is then laid out as it stays.
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
