"""Who was faster, by how much, in how many patterns: arithmetic over rows. Shows nothing.

Only accurate results whose times can be trusted count. A contender's time is that of its best variant: ours of any family and constants.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ksgen.bench.roster import OURS, PYTORCH
from ksgen.bench.rows import OK, Row
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS

BEST = "best"  # each contender in the better of its layouts
UNTUNED = "ksgen, default"  # our families' defaults alone

Times = Mapping[str, float]  # microseconds by contender


@dataclass(frozen=True)
class Duel:
    """A contender against the best of some others, over the patterns in which all of them have a usable time."""

    ratios: tuple[float, ...]  # the best other's time over the contender's: above 1 it is faster

    @property
    def patterns(self) -> int:
        return len(self.ratios)

    @property
    def wins(self) -> int:
        return sum(ratio > 1 for ratio in self.ratios)

    @property
    def share(self) -> float | None:
        return self.wins / self.patterns if self.ratios else None

    @property
    def factor_where_faster(self) -> float | None:
        """The median, as the paper gives it: over the patterns where it is faster."""
        return median(ratio for ratio in self.ratios if ratio > 1) if self.wins else None

    @property
    def factor(self) -> float | None:
        return median(self.ratios) if self.ratios else None


class Results:
    """The rows of one precision at one batch size, by pattern and layout: times at different batch sizes are never compared."""

    def __init__(self, rows: Iterable[Row], precision: str, batch: int) -> None:
        self.precision, self.batch = precision, batch
        self.rows = [row for row in rows if (row.precision, row.batch) == (precision, batch)]
        self._times: dict[str, dict[str, dict[str, float]]] = {layout: {} for layout in (*LAYOUTS, BEST)}
        for row in self.rows:
            us = row.median_us
            is_part = row.status == OK and row.error is None  # of a product: it has no result to err
            if us is None or row.doubt or not (row.counts or is_part):
                continue
            for name in (row.implementation, *([UNTUNED] if row.variant == "default" else [])):
                for layout in (row.layout, BEST):
                    times = self._times[layout].setdefault(row.pattern, {})
                    times[name] = min(us, times.get(name, us))

    @property
    def title(self) -> str:
        return f"{self.precision}, batch {self.batch}"

    @property
    def patterns(self) -> list[str]:
        return sorted({row.pattern for row in self.rows}, key=Pattern.parse)

    @property
    def names(self) -> list[str]:
        """Contenders that have a time, in the rows' order."""
        found = dict.fromkeys(row.implementation for row in self.rows if row.counts)
        return list(found)

    def times(self, layout: str) -> Mapping[str, Times]:
        """By pattern."""
        return self._times[layout]

    def duel(self, one: str, others: Sequence[str], layout: str) -> Duel:
        """Patterns in which `one` and at least one of the others have a time."""
        return Duel(tuple(ratio for _, ratio in self.ratios(one, others, layout)))

    def ratios(self, one: str, others: Sequence[str], layout: str) -> list[tuple[Pattern, float]]:
        """The best other's time over `one`'s, by pattern."""
        found = []
        for text, times in self._times[layout].items():
            against = [times[name] for name in others if name in times]
            if one in times and against:
                found.append((Pattern.parse(text), min(against) / times[one]))
        return found

    def layouts_ratio(self, name: str) -> list[tuple[Pattern, float]]:
        """The time in bsf over that in bsl."""
        first, last = self._times["bsf"], self._times["bsl"]
        both = [text for text in first if name in first[text] and name in last.get(text, {})]
        return [(Pattern.parse(text), first[text][name] / last[text][name]) for text in both]

    def rewriting_share(self, layout: str) -> list[tuple[Pattern, float]]:
        """The share of bmm's time that its permutations alone take."""
        return [(pattern, 1 / ratio) for pattern, ratio in self.ratios("rewriting", ["bmm"], layout)]

    def energy_ratios(self, one: str, others: Sequence[str]) -> list[tuple[Pattern, float]]:
        """One's energy over the least of the others', each in the better of its layouts. Below 1 it uses less."""
        least: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.joule is not None and row.is_accurate:
                joules = least.setdefault(row.pattern, {})
                joules[row.implementation] = min(row.joule, joules.get(row.implementation, row.joule))
        found = []
        for text, joules in least.items():
            against = [joules[name] for name in others if name in joules]
            if one in joules and against:
                found.append((Pattern.parse(text), joules[one] / min(against)))
        return found

    def best_rows(self, name: str, layout: str) -> dict[str, Row]:
        """The row of a contender's fastest variant in a layout, by pattern."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if row.implementation == name and row.layout == layout and row.counts:
                known = found.get(row.pattern)
                if known is None or (row.median_us or 0) < (known.median_us or 0):
                    found[row.pattern] = row
        return found


@dataclass(frozen=True)
class Gains:
    """On a processor, per batch, precision and layout: PyTorch's best time over ours, and our share of the floor, by pattern."""

    batch: int
    precision: str
    layout: str
    pairs: tuple[tuple[float, float | None], ...]


def gains(rows: Sequence[Row]) -> list[Gains]:
    """The gains of every batch, precision and layout of a processor's rows that has any."""
    found = []
    for results in comparisons([row for row in rows if row.runtime in PROCESSOR_RUNTIMES]):
        for layout in LAYOUTS:
            best = results.best_rows(OURS, layout)
            pairs = tuple((ratio, best[str(pattern)].share_of_floor) for pattern, ratio in results.ratios(OURS, PYTORCH, layout))
            if pairs:
                found.append(Gains(results.batch, results.precision, layout, pairs))
    return found


def comparisons(rows: Sequence[Row]) -> list[Results]:
    """One per batch size and precision: batch sizes ascending, precisions in the rows' order."""
    found = dict.fromkeys((row.batch, row.precision) for row in rows)
    return [Results(rows, precision, batch) for batch, precision in sorted(found, key=lambda each: each[0])]


def group_by(pairs: Iterable[tuple[Pattern, float]], key: Callable[[Pattern], float]) -> dict[float, list[float]]:
    """Values grouped by a number of their pattern, in order."""
    found: dict[float, list[float]] = {}
    for pattern, value in pairs:
        found.setdefault(key(pattern), []).append(value)
    return dict(sorted(found.items()))
