"""Whether a time can be trusted: by the spread of its measurements, and by what other processes used of the machine meanwhile.

Reads clocks and counts of the system; never measures a kernel. A figure in doubt stays, marked, and nothing is concluded from it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, sleep

from ksgen.words import counted

MARK = "?"  # after each figure in doubt, wherever it is printed
MOST_SPREAD = 0.2  # between the quartiles, of the median
MOST_OVER_FASTEST = 1.5  # the median's, of the fastest measurement
JITTER_US = 5.0  # that any time may spread, however short
MOST_OTHERS = 0.25  # of the processors' time, that others take
LEAST_SECONDS = 0.2  # of a look at the system's counts, which go on by hundredths of a second
_PROC = Path("/proc")


def doubt(measured_us: Sequence[float], others_share: float | None = None) -> str:
    """Why the median cannot be trusted, in a few words; empty if it can. `others_share`: of the processors that did the work."""
    if not measured_us:
        return ""
    middle, fastest = median(measured_us), min(measured_us)
    low, _, high = quantiles(measured_us, n=4, method="inclusive") if len(measured_us) > 1 else (middle, middle, middle)
    if others_share is not None and others_share > MOST_OTHERS:
        return f"others took {others_share:.0%} of the processors"
    if middle > max(MOST_OVER_FASTEST * fastest, fastest + JITTER_US):
        return f"the median is {middle / fastest:.3g} times the fastest"
    if high - low > max(MOST_SPREAD * middle, JITTER_US):
        return f"the quartiles are {(high - low) / middle:.0%} of the median apart"
    return ""


def doubt_of_ratio(ratios: Sequence[float], others_share: float | None = None) -> str:
    """The same for ratios that were measured round by round."""
    return doubt([1e6 * ratio for ratio in ratios], others_share)  # so large that no jitter is let pass


def marked(figure: str, why: str) -> str:
    """A figure as it is printed: with the mark where there is a doubt of it."""
    return f"{figure}{MARK}" if why else figure


def said(figure: str, why: str) -> str:
    """The same of a figure that stands alone: with its doubt."""
    return f"{marked(figure, why)} ({why})" if why else figure


def told(doubts: Sequence[str], thing: str = "time") -> str:
    """What stands under figures, each with its doubt or none; empty if none is in doubt."""
    some = list(filter(None, doubts))
    return f"{MARK} {len(some)} of {counted(len(doubts), thing)} cannot be trusted; the first: {some[0]}." if some else ""


@dataclass(frozen=True)
class Counts:
    """Seconds: on the clock, and of processor time of the machine and of this process with its children."""

    clock: float
    busy: float  # of all processors together
    own: float


def counts() -> Counts | None:
    """Linux's counts now; None elsewhere."""
    try:
        words = (_PROC / "stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, soft, stolen = map(int, words[1:9])
    except (OSError, ValueError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return Counts(monotonic(), (user + nice + system + irq + soft + stolen) / ticks, sum(os.times()[:4]))


def others_between(before: Counts, after: Counts, processors: int) -> float:
    """The share of the processors' time that others used, 0 to 1."""
    seconds = max(after.clock - before.clock, 1e-9) * processors
    return min(max(((after.busy - before.busy) - (after.own - before.own)) / seconds, 0.0), 1.0)


class Watch:
    """What others take of the processors, from look to look: each is of at least `LEAST_SECONDS`, and the last one stands until then."""

    def __init__(self) -> None:
        self._before = counts()
        self._share: float | None = None

    def others_share(self) -> float | None:
        """None if nothing is known, or not yet."""
        after = counts()
        if self._before and after and after.clock - self._before.clock >= LEAST_SECONDS:
            self._share = others_between(self._before, after, os.cpu_count() or 1)
            self._before = after
        return self._share


def load_warning(share: float | None, processors: int, busiest: Sequence[tuple[str, float]]) -> str:
    """One line about a machine that others keep busy, with their names and processors; empty if none do."""
    if share is None or share <= MOST_OTHERS:
        return ""
    named = ", ".join(f"{name} {taken:.1f}" for name, taken in busiest[:3] if taken >= 0.1)
    by = f" ({named})" if named else ""
    return f"others keep {share * processors:.1f} of {processors} processors busy{by}: times may say nothing, and those in doubt are marked"


def look() -> str:
    """`load_warning` of this machine, measured in a fifth of a second."""
    watch, before = Watch(), _by_process()
    sleep(LEAST_SECONDS)
    share, after = watch.others_share(), _by_process()
    taken = [(name, (spent - before[number][1]) / LEAST_SECONDS) for number, (name, spent) in after.items() if number in before]
    return load_warning(share, os.cpu_count() or 1, sorted(taken, key=lambda each: -each[1]))


def _by_process() -> dict[int, tuple[str, float]]:
    """Names and processor seconds of the other visible processes."""
    found, ticks = {}, os.sysconf("SC_CLK_TCK")
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            found[int(path.parent.name)] = name, sum(map(int, rest.split()[11:13])) / ticks
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
    found.pop(os.getpid(), None)
    return found
