"""When Kronecker-sparse products pay: below which density, and after how many products with converted weights.

Also judges one-line rules, such as (b+c)/(bc), that predict where our kernel is faster. Results of one GPU suffice for
a verdict. Results of processors count only if two kinds of processors agree. Evaluates results; launchers never use it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, exp, inf, log
from statistics import geometric_mean, median

import numpy as np
from numpy.typing import NDArray

from ksgen.bench.comparison import Pairs, Results, comparisons
from ksgen.bench.roster import COMPARISONS, OTHERS, OURS
from ksgen.bench.rows import ResultRow
from ksgen.bench.tables import LAYOUT_WORDS, ResultTable, number, percent, times
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.measure.gains import PAPERS, RULES
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec
from ksgen.tuning.model import rank_correlation
from ksgen.values import counted

BOUNDS = (4, 16, 64)  # of the classes of density: 1/4, 1/16 and 1/64
CLASSES = ("density over 1/4", "to 1/4", "to 1/16", "to 1/64")
DENSE, UNCONVERTED = "dense", "einsum"  # the second takes weights (a, b, c, d) unchanged
NEVER = "never"


# ---- density


def by_density(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of dense time over ours by class of density, and the density at which a fit of all patterns crosses 1."""
    lines = []
    for results, layout in product(comparisons(rows), LAYOUTS):
        pairs, is_measured = over_dense(results, layout)
        if not pairs:
            continue
        classes: list[list[float]] = [[] for _ in CLASSES]
        for pattern, ratio in pairs:
            classes[sum(bound * pattern.density <= 1 for bound in BOUNDS)].append(ratio)
        cells = (
            f"{times(geometric_mean(some))}, {times(min(some))} ({len(some)})" if some else None for some in classes
        )
        by = "time" if is_measured else "floor"
        density = crossing(pairs)
        below = None if density is None else "any density" if density > 1 else f"{float(f'{100 * density:.2g}'):g} %"
        lines.append((results.batch, results.precision, layout, by, *cells, below))
    columns = ("batch", "precision", "layout", "dense by", *CLASSES, "ours is faster below")
    note = (
        "Time of the dense product over ours: geometric mean, least, and number of patterns. A class includes its "
        "upper bound. The last column is the density at which a line crosses 1. The line fits the logarithms of ratio "
        "and density: its slope is the median of the slopes between all pairs of patterns (Theil-Sen). In rows "
        "with 'floor', no dense product was measured, and its floor counts. That is the longer of two times, of memory "
        "and of multiply-adds, at the device's measured rates; libraries take longer."
    )
    return ResultTable.of("Speed against density", columns, lines, note)


def over_dense(results: Results, layout: str) -> tuple[Pairs, bool]:
    """The dense product's time over ours by pattern, and whether it was measured.

    If no dense product was measured, its time is its floor: that of memory or of multiply-adds at the device's rates.
    """
    if measured := results.ratios(OURS, [DENSE], layout):
        return measured, True
    if (comparison := COMPARISONS.get(results.precision)) is None:
        return [], False
    found, arithmetic = [], comparison.baselines
    for job, best in results.best[layout].items():
        pattern, rows = Pattern.parse(job), [row for row in best.values() if row.arithmetic == arithmetic]
        dense = KernelSpec(Pattern(1, pattern.out_features, pattern.in_features, 1), arithmetic, layout)
        floors = [
            Ceilings(row.ceiling_byte_per_s, row.ceiling_flop_per_s).floor_s(dense, results.batch)
            for row in rows
            if row.ceiling_byte_per_s and row.ceiling_flop_per_s
        ]
        if OURS in best and floors:
            found.append((pattern, 1e6 * min(floors) / best[OURS].us))
    return found, False


def crossing(pairs: Pairs) -> float | None:
    """Density at which the fitted ratio is 1; None if the ratio does not fall with the density.

    Examples:
        >>> from ksgen import Pattern
        >>> crossing([(Pattern(1, 8, 8, d), d / 2) for d in (1, 2, 4, 8)])
        0.5
    """
    densities = np.log([pattern.density for pattern, _ in pairs])
    ratios = np.log([ratio for _, ratio in pairs])
    first, second = np.triu_indices(len(pairs), 1)
    apart = densities[second] - densities[first]
    is_apart = apart != 0
    if not is_apart.any():
        return None
    slope = float(np.median((ratios[second] - ratios[first])[is_apart] / apart[is_apart]))
    if slope >= 0:
        return None
    at = -float(np.median(ratios - slope * densities)) / slope
    return exp(min(at, log(1e6)))


# ---- conversion of weights


def conversions(results: Results, layout: str | None = None, is_group: bool = False) -> ResultTable:
    """Table of every contender's time next to that of converting the weights to its format; medians over the jobs.

    It has no rows if no conversion was measured. `layout=None` takes all layouts. The title names the layout, if
    one is given, and says whether the jobs are groups.
    """
    layouts: Sequence[str] = [layout] if layout else LAYOUTS
    words = [LAYOUT_WORDS[layout]] if layout else []
    words += ["groups"] * is_group
    lines = list(_conversions(results, layouts)) if any(row.conversion_us is not None for row in results.rows) else []
    columns = ("layout", "contender", "jobs", "product, ms", "conversion, ms", "in products", "paid after")
    note = (
        "Medians over the jobs. Weights (a, b, c, d) are converted to the contender's format: packed, permuted, or "
        "stored as another matrix. 'in products' is the conversion's time over that of one product. 'paid "
        "after' is the number of products after which conversion and products together take less time than "
        f"{UNCONVERTED}, which converts nothing."
    )
    return ResultTable.of(", ".join(("Conversion of weights", results.title, *words)), columns, lines, note)


def _conversions(results: Results, layouts: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for layout, name in product(layouts, results.names):
        jobs = [best for best in results.best[layout].values() if name in best]
        pairs = [(us, best) for best in jobs if (us := best[name].conversion_us) is not None and name != UNCONVERTED]
        paid: list[float] = []  # products whose savings make up for the conversion
        for us, best in pairs:
            if UNCONVERTED in best:
                saved_us = best[UNCONVERTED].us - best[name].us
                paid.append(max(1, ceil(us / saved_us)) if saved_us > 0 else inf)
        middle = sorted(paid)[len(paid) // 2] if paid else None  # an element: the mean with an infinite one is infinite
        if jobs:
            figures = (
                median(best[name].us for best in jobs) / 1e3,
                median(us for us, _ in pairs) / 1e3 if pairs else None,
                median(us / best[name].us for us, best in pairs) if pairs else None,
            )
            yield layout, name, len(jobs), *map(number, figures), NEVER if middle == inf else middle


# ---- rules that predict where ours is faster

LEAST_PATTERNS = 30  # fewer are not significant
LEAST_GAIN = 0.05  # least gain in rank correlation of a better rule than the paper's
LEAST_KINDS = 2  # of processors that must find the same better rule
HALVES = slice(0, None, 2), slice(1, None, 2)  # of the patterns

Numbers = NDArray[np.float64]
Ratios = Sequence[tuple[Pattern, float]]  # the best other's time over ours: above 1 ours is faster


@dataclass(frozen=True)
class Judged:
    """Quality of a rule on some results."""

    rule: str
    correlation: float  # rank correlation with the gain
    accuracy: float | None  # cross-validated, of predicting a win above a threshold; None: ours wins always or never
    margin: float  # gain in correlation over the paper's rule, on the half of the patterns where it is less

    @property
    def is_better(self) -> bool:
        """Whether either half of the patterns confirms a gain over the paper's rule found on the other half."""
        return self.margin >= LEAST_GAIN


def predictors(results: Results, layout: str) -> ResultTable:
    """Table of all rules, best first, with the conclusion that the results allow.

    It has no rows for fewer than two patterns.
    """
    title = f"What predicts the gain, {results.title}, {LAYOUT_WORDS[layout]}"
    columns, ratios = ("rule", "rank correlation with the gain", "wins predicted"), results.ratios(OURS, OTHERS, layout)
    if len(ratios) < 2:
        return ResultTable.of(title, columns, ())
    judged, patterns, wins = judge(ratios), len(ratios), sum(ratio > 1 for _, ratio in ratios)
    description = f"Ours wins in {wins} of {counted(patterns, 'pattern')}"
    if 0 < wins < patterns:
        description += (
            "; each pattern is predicted with a threshold found on the others. A constant prediction is right in "
        )
        description += f"{max(wins, patterns - wins)}."
    else:
        description += ": there are no wins and losses to tell apart."
    is_gpu = all(row.runtime not in PROCESSOR_RUNTIMES for row in results.rows)
    lines = [(each.rule, f"{each.correlation:.2f}", percent(each.accuracy)) for each in judged]
    return ResultTable.of(title, columns, lines, conclusion(judged, patterns, is_gpu), description)


def judge(ratios: Ratios) -> list[Judged]:
    """Evaluate every rule on the results of one precision and layout, the best first."""
    gains = np.log([ratio for _, ratio in ratios])
    papers = np.maximum(_of_halves(_scores(PAPERS, ratios), gains), 0)  # without correlation, a rule is of no use
    judged = (_judge(rule, ratios, gains, papers) for rule in RULES)
    return sorted(judged, key=lambda each: (-each.correlation, -(each.accuracy or 0)))


def conclusion(judged: Sequence[Judged], patterns: int, is_gpu: bool) -> str:
    """Sentence on the rule that predicts best, as far as the results of one device allow a claim."""
    papers, best = next(each for each in judged if each.rule == PAPERS), judged[0]
    if patterns < LEAST_PATTERNS:
        return f"No claim: {counted(patterns, 'pattern')}, and at least {LEAST_PATTERNS} are needed."
    if best.correlation < papers.correlation + LEAST_GAIN:
        return f"{PAPERS} predicts as well as any rule here: rank correlation {papers.correlation:.2f}."
    better = next((each for each in judged if each.is_better), None)
    if better is None:
        return f"No claim: {best.rule} is not better than {PAPERS} by {LEAST_GAIN} on each half of the patterns."
    alone = "" if is_gpu else f" It counts if {LEAST_KINDS} kinds of processors agree."
    return (
        f"{better.rule} predicts better than {PAPERS}: rank correlation {better.correlation:.2f} against "
        f"{papers.correlation:.2f}.{alone}"
    )


def _scores(rule: str, ratios: Ratios) -> Numbers:
    return np.array([RULES[rule](pattern) for pattern, _ in ratios])


def _of_halves(scores: Numbers, gains: Numbers) -> Numbers:
    """Rank correlation on each half; equal scores for all patterns predict nothing."""
    return np.nan_to_num([rank_correlation(scores[half], gains[half]) for half in HALVES])


def _judge(rule: str, ratios: Ratios, gains: Numbers, papers: Numbers) -> Judged:
    scores = _scores(rule, ratios)
    wins = gains > 0
    places = np.arange(len(scores))
    accuracy = None  # nothing to predict if ours always wins, or never
    if 0 < wins.sum() < len(wins):
        hits = [(scores[one] > _threshold(scores[places != one], wins[places != one])) == wins[one] for one in places]
        accuracy = float(np.mean(hits))
    correlation = np.nan_to_num(rank_correlation(scores, gains))  # equal scores for all patterns predict nothing
    margin = float((_of_halves(scores, gains) - papers).min())
    return Judged(rule, float(correlation), accuracy, margin)


def _threshold(scores: Numbers, wins: NDArray[np.bool_]) -> float:
    """Threshold above which predicting a win is right most often: between two scores, or infinite (always or never)."""
    known = np.unique(scores)
    candidates = np.concatenate([[-np.inf], (known[1:] + known[:-1]) / 2, [np.inf]])
    right = [int(((scores > candidate) == wins).sum()) for candidate in candidates]
    return float(candidates[int(np.argmax(right))])
