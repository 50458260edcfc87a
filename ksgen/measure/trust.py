"""Decides whether a time is reliable, by the uncertainty of its median over blocks of runs, and by the machine's load.

A block is a number of consecutive runs, and its value is their median. Blocks are taken until the median over blocks is
known well enough, or the time is up. The load is the processor time that other processes took meanwhile. An unreliable
figure is printed with a mark, and no decision depends on it. This module knows nothing of the work that it times.

`rest` waits until the threads of the previous contender sleep, so that this process does not disturb its own
measurements. Contenders are the implementations that a benchmark compares. `keep_freed_memory` keeps freed memory in
the C library, so that no contender is slowed by new pages.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import comb, inf
from pathlib import Path
from statistics import median
from threading import get_native_id
from time import monotonic, perf_counter, process_time, sleep

from ksgen.values import counted

MARK = "?"  # after each unreliable figure, wherever it is printed
ONE_IN = 20  # one of so many intervals misses the median: a confidence of 95 %
MOST_WIDTH = 0.05  # largest width of that interval for a reliable time, relative to the median
ROUGH_WIDTH = 0.25  # the same for a rough time, which counts only in comparisons of many jobs
MOST_OTHERS = 0.1  # largest share of the CPU time that other processes may take
LEAST_BLOCKS = 6  # fewer blocks have no interval of that confidence
BLOCK_SECONDS = 0.02  # long compared with a single disturbance
MOST_SECONDS = 2.0  # for the blocks of one kernel
FIRST_RUNS, MOST_RUNS = 3, 1000  # runs that determine the length of a block, and the most runs of a block
HOPELESS_BLOCKS = 2  # a contender is given up after so many blocks if all are too slow
# least time between two readings of the system's counts, which advance by hundredths of a second; duration of `look`
LEAST_SECONDS, LOOK_SECONDS = 0.1, 0.2
_PROC = Path("/proc")

Runs = Callable[[int], Sequence[float]]  # does a number of runs, and returns their times
Timer = Callable[[], float]  # takes a block, and returns its median


@dataclass(frozen=True)
class Blocks:
    """A series of blocks: medians of their runs, and the shares of the CPU time that other processes took."""

    values: tuple[float, ...]
    others: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Interval that contains the median with a confidence of 95 %, for any distribution, if the blocks are
        independent."""
        return interval(self.values)

    @property
    def others_share(self) -> float | None:
        return median(self.others) if self.others else None

    @property
    def why_unreliable(self) -> str:
        return why_unreliable(self.values, self.others)

    @property
    def is_known(self) -> bool:
        """Whether no further blocks are needed."""
        return len(self.values) >= LEAST_BLOCKS and not self.why_unreliable

    def is_hopeless(self, give_up: float) -> bool:
        """Whether the fastest of at least two blocks is slower than `give_up`."""
        return len(self.values) >= HOPELESS_BLOCKS and min(self.values) > give_up


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval that contains the median with a confidence of 95 %, for any distribution of independent values."""
    ordered, count = sorted(values), len(values)
    # Each value is below or above the true median, with equal probability. cut: values omitted at either end. tail:
    # how many of these 2^count outcomes have at most cut + 1 values below the median.
    cut, tail = 0, 1 + count
    while 2 * tail * ONE_IN <= 2**count:
        cut += 1
        tail += comb(count, cut + 1)
    return ordered[cut], ordered[count - 1 - cut]


def uncertainty(values: Sequence[float]) -> float:
    """Width of the 95 % interval of the median, relative to the median."""
    low, high = interval(values)
    return (high - low) / median(values)


def why_unreliable(values: Sequence[float], others: Sequence[float | None] = ()) -> str:
    """Reason why the median of blocks is unreliable, in a few words; empty if it is reliable.

    Values are times or ratios. If a processor did the work, `others` holds the shares of the CPU time that other
    processes took. A single value is judged by these shares alone.
    """
    if not values:
        return ""
    if why := why_disturbed(others):
        return why
    width = uncertainty(values)
    return f"the median is uncertain by {width:.0%}" if width > MOST_WIDTH else ""


def why_disturbed(others: Sequence[float | None]) -> str:
    """Reason why other processes disturbed a measurement; empty if they did not take too much CPU time."""
    known = [share for share in others if share is not None]
    is_disturbed = 2 * sum(share > MOST_OTHERS for share in known) > len(known)
    return f"other processes took {median(known):.0%} of the CPU time" if is_disturbed else ""


def host_clock(call: Callable[[], object]) -> float:
    """Wall-clock seconds of a call on the host."""
    begin = perf_counter()
    call()
    return perf_counter() - begin


def block_of(times: Runs, least_runs: int = 1, seconds: float = BLOCK_SECONDS) -> Timer:
    """Timer of blocks that take about `seconds`. Its first call determines the number of runs per block."""
    runs, once = 0, 0.0

    def take() -> float:
        nonlocal runs, once
        if not runs:
            marks = [perf_counter()]
            for _ in range(FIRST_RUNS):  # the first run warms up, and one may be disturbed
                times(1)
                marks.append(perf_counter())
            once = max(min(end - begin for begin, end in pairwise(marks)), 1e-9)
            runs = max(least_runs, min(MOST_RUNS, int(seconds / once)))
        elif once < BLOCK_SECONDS:
            times(1)  # not counted, because it wakes sleeping threads, which takes up to half a millisecond
        return median(times(runs))

    return take


def take_blocks(
    timers: Sequence[Timer], on_processor: bool, most_seconds: float | None = None, give_up: float = inf
) -> list[Blocks]:
    """Take blocks of all timers alternately, until all medians are known well enough or `most_seconds` per timer have
    passed.

    A timer whose first blocks are all slower than `give_up` gets no further ones. On a processor, a block that follows
    another timer's block first waits until the threads of this process sleep. A series on a processor ends early only
    if the load of the machine is known. With the clock of a GPU, neither is necessary.
    """
    watch = Watch() if on_processor else None
    values: list[list[float]] = [[] for _ in timers]
    last, order = -1, list(range(len(timers)))
    end = monotonic() + (MOST_SECONDS if most_seconds is None else most_seconds) * len(timers)
    while True:
        for index in order:
            if watch and index != last:
                rest()
            values[index].append(timers[index]())
            last = index
            if watch:
                watch.look()
        found = [Blocks(tuple(each), tuple(watch.shares) if watch else ()) for each in values]
        has_looked = not watch or watch.has_looked
        if monotonic() >= end or (has_looked and all(each.is_known or each.is_hopeless(give_up) for each in found)):
            return found
        if has_looked:
            order = [index for index in order if not found[index].is_hopeless(give_up)]
        order = [*order[1:], order[0]]  # no timer always follows the same one


def marked(figure: str, why: str) -> str:
    """Format a figure. An unreliable one, which has a reason `why`, gets the mark."""
    return f"{figure}{MARK}" if why else figure


def with_reason(figure: str, why: str) -> str:
    """Format a figure outside a table: an unreliable one gets the mark and the reason."""
    return f"{marked(figure, why)} ({why})" if why else figure


def describe_unreliable(reasons: Sequence[str], thing: str = "time") -> str:
    """Format the note below a table of figures; empty if all are reliable.

    `reasons` has one entry per figure: the reason why it is unreliable, or "".
    """
    some = list(filter(None, reasons))
    return f"{MARK} {len(some)} of {counted(len(reasons), thing)} unreliable; the first: {some[0]}." if some else ""


@dataclass(frozen=True)
class Counts:
    """Seconds on the clock, and seconds of processor time of the machine and of this process with its children."""

    clock: float
    busy: float  # busy time of all processors together
    own: float


def counts() -> Counts | None:
    """Present counts of processor time; None if the system is not Linux.

    Linux counts idle time exactly, so busy time is computed from it.
    """
    try:
        words = (_PROC / "stat").read_text().split("\n", 1)[0].split()
        idle, waiting = map(int, words[4:6])
    except (OSError, ValueError):
        return None
    clock, own = monotonic(), os.times()
    busy = clock * (os.cpu_count() or 1) - (idle + waiting) / os.sysconf("SC_CLK_TCK")
    return Counts(clock, busy, process_time() + own.children_user + own.children_system)


def others_between(before: Counts, after: Counts, processors: int) -> float:
    """Share of the CPU time that other processes used between two counts, from 0 to 1."""
    seconds = max(after.clock - before.clock, 1e-9) * processors
    return min(max(((after.busy - before.busy) - (after.own - before.own)) / seconds, 0.0), 1.0)


class Watch:
    """Shares of the CPU time that other processes take, one per interval of at least `LEAST_SECONDS`."""

    def __init__(self) -> None:
        self._before = counts()
        self.shares: list[float] = []

    @property
    def has_looked(self) -> bool:
        """Whether a share is known, or none ever will be."""
        return bool(self.shares) or self._before is None

    def look(self) -> None:
        """Add the share since the last one, unless that is less than `LEAST_SECONDS` old."""
        after = counts()
        if self._before and after and after.clock - self._before.clock >= LEAST_SECONDS:
            self.shares.append(others_between(self._before, after, os.cpu_count() or 1))
            self._before = after

    def others_share(self) -> float | None:
        """The last share; None if none is known."""
        self.look()
        return self.shares[-1] if self.shares else None


def load_warning(share: float | None, processors: int, busiest: Sequence[tuple[str, float]]) -> str:
    """Warning that other processes keep the machine busy, with the names of the busiest; empty if they do not."""
    if share is None or share <= MOST_OTHERS:
        return ""
    named = ", ".join(f"{name} {taken:.1f}" for name, taken in busiest[:3] if taken >= 0.1)
    busy = f"{share * processors:.1f} of {processors} processors busy{f' ({named})' if named else ''}"
    return f"other processes keep {busy}: unreliable times are marked"


def look() -> str:
    """Measure this machine's load for a fifth of a second, and return its `load_warning`."""
    watch, before = Watch(), _by_process()
    sleep(LOOK_SECONDS)
    share, after = watch.others_share(), _by_process()
    taken = [
        (name, (spent - before[number][1]) / LOOK_SECONDS)
        for number, (name, spent) in after.items()
        if number in before
    ]
    return load_warning(share, os.cpu_count() or 1, sorted(taken, key=lambda each: -each[1]))


def _by_process() -> dict[int, tuple[str, float]]:
    """Names and processor seconds of the other visible processes."""
    found, ticks = {}, os.sysconf("SC_CLK_TCK")
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            name, _, fields = path.read_text().partition("(")[2].rpartition(")")
            found[int(path.parent.name)] = name, sum(map(int, fields.split()[11:13])) / ticks
        except (OSError, ValueError, IndexError):
            continue  # the process has just ended
    found.pop(os.getpid(), None)
    return found


# `rest` waits for a quarter of a second at most: OpenBLAS's threads spin for 2^28 cycles, 0.1 s and more
NAP_S, MOST_NAPS = 2e-3, 125
AWAKE_SHARE = 0.1  # threads that work for at most this share of a nap count as asleep
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt, in glibc's malloc.h
_NEVER = 2**31 - 1
_TASKS = Path("/proc/self/task")


def rest() -> None:
    """Wait until this process's other threads sleep.

    After an operation, threads of PyTorch and OpenCL spin for milliseconds, and NumPy's for a tenth of a second. They
    wait for the next operation, and meanwhile take cores from other work.
    """
    for _ in range(MOST_NAPS):
        spent = process_time()
        sleep(NAP_S)
        states = list(_states())
        # Processor time is used only if the system reports no states of threads, because Linux adds the time of other
        # threads only at ticks, which are longer than a nap.
        if "R" not in states if states else process_time() - spent < AWAKE_SHARE * NAP_S:
            return


def _states() -> Iterator[str]:
    """Yield the scheduler's letter of each thread, with S for this one; nothing if the system does not report them."""
    with suppress(OSError):
        for number in os.listdir(_TASKS):
            with suppress(OSError):  # the thread has just ended
                state = (_TASKS / number / "stat").read_text().rpartition(")")[2].split()[0]
                yield "S" if int(number) == get_native_id() else state


def keep_freed_memory() -> None:
    """Reuse freed memory for large arrays from now on, as in a long-running application. Needs Linux with glibc."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Return free memory to the system, so that its report of available memory is right."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
