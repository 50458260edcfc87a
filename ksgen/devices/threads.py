"""Number of processor cores that kernels use: `KSGEN_THREADS`, else PyTorch's number of threads, else all cores."""

import os
import sys
from collections.abc import Callable
from functools import cache
from time import perf_counter_ns
from typing import Any, TypeVar

from ksgen.errors import DeviceError
from ksgen.values import excerpt

Given = TypeVar("Given")
MOST = 2**16 - 1  # threads that a user may ask for
SHORT_NS = 1_000_000  # launches that take longer on all threads never run on one
WARM_UP, SAMPLES = 2, 8  # first calls, on all threads; then calls on all threads, and as many on one, to compare
TOGETHER = 4  # calls in a row on the same threads; the first is not timed, because it pays for the change
HOPELESS = 4  # times the longest launch on all threads: a first launch on one thread that takes longer ends the trial
GAIN = 1.05  # least gain for which all threads are taken: they lose where other work keeps them asleep or apart
AGAIN = 2048  # calls after which both are timed again: other processes may have taken or left cores
# launches on one thread that take longer are timed again after SOON calls, twice as many, and so on: threads of
# PyTorch's products, which were timed between them, spin for milliseconds on the other cores
LONG_NS, SOON = 100_000, 64
MOST_LATE = 16  # launches on all threads that take longer than on one, minus others, after which both are timed again


class ThreadsByTime:
    """Runs repeated launches on all threads, or on one if that is faster because waking the others costs more.

    The upper quartile of the first calls' times decides, because stalls of threads are common and must count. Launches
    on all threads are watched, since they may become slow: threads fall asleep if calls are rarer.
    """

    __slots__ = ("__weakref__", "_again", "_calls", "_is_one", "_is_short", "_late", "_most_ns", "_soon", "_times")

    def __init__(self) -> None:
        self._calls, self._is_one, self._is_short = 0, False, False
        self._again, self._soon = AGAIN, SOON  # calls after which both are timed again; the next number if it is soon
        self._times: tuple[list[int], list[int]] = [], []  # on all threads, and on one
        self._most_ns = self._late = 0  # time on one thread, if all are faster; later launches that took longer

    def run(self, launch: Callable[[int, Given], object], threads: int, given: Given) -> None:
        """Call launch(threads, given) on all threads or one: alternately while both are timed, then the faster."""
        at = self._calls = self._calls % self._again + 1
        if threads <= 1 or at > WARM_UP + 2 * SAMPLES or (at > WARM_UP and not self._is_short):
            self._run_faster(launch, threads, given)
            return
        if at == 1:
            self._is_one, self._times, self._most_ns, self._late = False, ([], []), 0, 0
        turn, place = divmod(at - WARM_UP - 1, TOGETHER)
        is_one = at > WARM_UP and turn % 2 == 1
        begin = perf_counter_ns()
        launch(1 if is_one else threads, given)
        taken = perf_counter_ns() - begin
        if is_one and not place and taken > HOPELESS * max(self._times[False], default=taken):
            self._is_short = False
        elif place or at <= WARM_UP:
            self._times[is_one].append(taken)
        if at == WARM_UP:
            self._is_short = min(self._times[False], default=0) < SHORT_NS
            self._times = [], []
        elif at == WARM_UP + 2 * SAMPLES:
            # calls of several threads may have left one list empty
            on_all, on_one = (sum(sorted(each)[3 * len(each) // 4 :][:1]) for each in self._times)
            self._is_one = on_one < GAIN * on_all
            self._most_ns = 0 if self._is_one else on_one
            if self._is_one and on_one > LONG_NS:
                self._again, self._soon = self._soon, min(2 * self._soon, AGAIN)
            else:
                self._again, self._soon = AGAIN, SOON

    def _run_faster(self, launch: Callable[[int, Given], object], threads: int, given: Given) -> None:
        if not self._most_ns:
            launch(1 if self._is_one else threads, given)
            return
        begin = perf_counter_ns()
        launch(threads, given)
        is_late = perf_counter_ns() - begin > self._most_ns
        self._late = self._late + 1 if is_late else max(0, self._late - 1)
        if self._late >= MOST_LATE:
            self.time_again()

    def settled(self, threads: int) -> tuple[int, int, int] | None:
        """Threads of the following calls, and how many calls; None while both numbers are timed.

        The third number is the time above which a launch on all threads counts as late; 0: none does.
        """
        if threads <= 1:
            return threads, sys.maxsize, 0
        if self._calls < WARM_UP or (self._is_short and self._calls < WARM_UP + 2 * SAMPLES):
            return None
        return 1 if self._is_one else threads, self._again, self._most_ns

    def time_again(self) -> None:
        """Let the next calls be timed again, on all threads and on one thread, to find which is faster."""
        self._calls = self._again


def groups_for(grid: int, cores: int) -> int:
    """Number of work groups of a persistent kernel.

    It is `grid`. If fewer threads than `cores` are wanted, it is at most the number of wanted threads.
    """
    threads = wanted_threads()
    return grid if threads is None or threads >= cores else min(grid, threads)


def wanted_threads() -> int | None:
    """Number of threads to use; None for all cores."""
    if number := threads_of_environment():
        return number
    get_num_threads = of_torch("get_num_threads")
    return None if get_num_threads is None else int(get_num_threads())


def of_torch(name: str) -> Any:
    """Attribute of PyTorch; None without PyTorch, and while another thread imports it and has not defined it yet."""
    return getattr(sys.modules.get("torch"), name, None)


@cache
def threads_of_environment() -> int | None:
    """Value of `KSGEN_THREADS` at the first call, cached because reading it takes as long as the smallest launch."""
    given = os.environ.get("KSGEN_THREADS")
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 0 < int(given) <= MOST):
        raise DeviceError(f"KSGEN_THREADS={excerpt(given)}; accepted: a whole number from 1 up to {MOST}")
    return int(given)
