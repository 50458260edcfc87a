"""Seconds that a few runs in a row take: by the GPU's own events, or by the processor's clock."""

from collections.abc import Callable
from time import perf_counter

import torch

from ksgen.devices.base import Device

Clock = Callable[[Callable[[], None]], float]

_CYCLES_PER_S = 2e9  # of a GPU's clock, about
_LEAST_BUSY_S, _MOST_BUSY_S = 2e-4, 5e-3


def host_clock(call: Callable[[], None]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


class CudaClock:
    """Events on PyTorch's stream. The GPU is kept busy while the host enqueues the runs, so that launching is not measured."""

    def __init__(self) -> None:
        self._busy_s = _MOST_BUSY_S  # what enqueuing took last time, and half as much again

    def __call__(self, call: Callable[[], None]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(self._busy_s * _CYCLES_PER_S))
        begin.record()
        enqueue_s = host_clock(call)
        end.record()
        end.synchronize()
        self._busy_s = min(max(1.5 * enqueue_s, _LEAST_BUSY_S), _MOST_BUSY_S)
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds * 1e-3


def opencl_clock(device: Device) -> Clock:
    """From the start of the first launch to the end of the last one, by the device's own profile."""
    return lambda call: device.time(call, None, runs=1, warmup=0)[0]
