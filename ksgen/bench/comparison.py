"""Comparison of contenders: which was faster, by how much, in how many jobs. Only arithmetic over rows.

Only accurate results count, with times that are reliable, or rough: uncertain by at most 25 %. A contender's time is
that of its best variant: for ksgen, of any family and constants.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from ksgen.bench.roster import FORWARD, STEP_TITLES
from ksgen.bench.rows import OK, ResultRow
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from ksgen.values import grouped

BEST = "best"  # each contender in the better of its layouts
UNTUNED = "ksgen, default"  # our families' defaults alone

Pairs = list[tuple[Pattern, float]]


@dataclass(frozen=True)
class Duel:
    """A contender against the best of some others, over the jobs in which it and at least one of them have a time."""

    ratios: tuple[float, ...]  # the best other's time over the contender's: above 1 the contender is faster

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
        """Median ratio over the patterns where the contender is faster, as the paper reports it."""
        return median(ratio for ratio in self.ratios if ratio > 1) if self.wins else None

    @property
    def factor(self) -> float | None:
        """Median ratio over all patterns."""
        return median(self.ratios) if self.ratios else None


class Results:
    """Rows of one precision and step at one batch size: times at different batch sizes are never compared.

    `best` holds the fastest row that counts, by layout, job and name: a contender, one of our families, or `UNTUNED`.
    A job is a pattern, or a layer.
    """

    def __init__(self, rows: Iterable[ResultRow], precision: str, batch: int, step: str = FORWARD) -> None:
        self.precision, self.batch, self.step = precision, batch, step
        self.title = ", ".join((precision, f"batch {batch}", *[STEP_TITLES[step]] * (step != FORWARD)))
        self.rows = [row for row in rows if (row.precision, row.batch, row.step) == (precision, batch, step)]
        self.best: dict[str, dict[str, dict[str, ResultRow]]] = {layout: {} for layout in (*LAYOUTS, BEST)}
        for row, layout in product(self.rows, (*LAYOUTS, BEST)):
            if layout not in (row.layout, BEST):
                continue
            fastest = self.best[layout].setdefault(row.job, {})
            is_part = row.status == OK and row.error is None  # part of a product: it has no result to check
            if not row.has_time or not (row.counts or is_part):
                continue
            for name in {row.implementation, row.by, *([UNTUNED] if row.variant == "default" else [])}:
                if name not in fastest or row.us < fastest[name].us:
                    fastest[name] = row

    @property
    def names(self) -> list[str]:
        """Contenders that have a time, in the rows' order."""
        return list(dict.fromkeys(row.implementation for row in self.rows if row.counts))

    def over(self, one: str, others: Sequence[str], layout: str) -> dict[str, float]:
        """The best other's time over `one`'s, by job, if `one` and at least one of the others have a time.

        Jobs are left out where a time of the others that does not count may be below their best one that does.
        """
        ratios, least = {}, {}
        for job, best in self.best[layout].items():
            if against := [best[name].us for name in others if name in best]:
                least[job] = min(against)
                if one in best:
                    ratios[job] = least[job] / best[one].us
        uncertain = {
            row.job
            for row in self.rows
            if layout in (row.layout, BEST)
            and row.implementation in others
            and not row.has_time
            and row.is_accurate
            and row.quartile1_us is not None
            and row.quartile1_us < least.get(row.job, 0.0)
        }
        return {job: ratio for job, ratio in ratios.items() if job not in uncertain}

    def fastest(self, names: Iterable[str], layout: str, job: str) -> str:
        """The fastest of some contenders for a job, at least one of which has a time."""
        best = self.best[layout][job]
        return min((name for name in names if name in best), key=lambda name: best[name].us)

    def ratios(self, one: str, others: Sequence[str], layout: str) -> Pairs:
        """The best other's time over `one`'s, by pattern."""
        return [(Pattern.parse(job), ratio) for job, ratio in self.over(one, others, layout).items()]

    def duel(self, one: str, others: Sequence[str], layout: str) -> Duel:
        return Duel(tuple(self.over(one, others, layout).values()))

    def layouts_ratio(self, name: str) -> Pairs:
        """Time in bsf over that in bsl, by pattern."""
        first, last = self.best["bsf"], self.best["bsl"]
        both = [job for job in first if name in first[job] and name in last.get(job, {})]
        return [(Pattern.parse(job), first[job][name].us / last[job][name].us) for job in both]

    def rewriting_share(self, layout: str) -> Pairs:
        """Share of bmm's time that its permutations alone take."""
        return [(pattern, 1 / ratio) for pattern, ratio in self.ratios("rewriting", ["bmm"], layout)]

    def shares_of_floor(self, name: str, layout: str) -> dict[str, float]:
        """Shares of the floor that a contender's fastest variants reach, by job, if there is a floor."""
        rows = ((job, best[name]) for job, best in self.best[layout].items() if name in best)
        return {job: row.share_of_floor for job, row in rows if row.share_of_floor}

    def energy_ratios(self, one: str, others: Sequence[str]) -> Pairs:
        """One contender's energy over the least of the others', each in the better of its layouts.

        Below 1, `one` uses less energy.
        """
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


def comparisons(rows: Sequence[ResultRow]) -> list[Results]:
    """Results per batch size and precision: batch sizes ascending, precisions in the rows' order."""
    found = dict.fromkeys((row.batch, row.precision) for row in rows)
    return [Results(rows, precision, batch) for batch, precision in sorted(found, key=lambda each: each[0])]


def group_by(pairs: Iterable[tuple[Pattern, float]], key: Callable[[Pattern], float]) -> dict[float, list[float]]:
    """Group values by a number derived from their patterns, in ascending order of that number."""
    found = grouped(pairs, lambda pair: key(pair[0]))
    return {number: [value for _, value in found[number]] for number in sorted(found)}
