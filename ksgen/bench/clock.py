"""Clock for work on a GPU, without the time that the host takes to launch it."""

from collections.abc import Callable

import torch

from ksgen.measure.trust import host_clock
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
