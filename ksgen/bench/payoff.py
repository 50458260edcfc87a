"""When Kronecker-sparse products pay: below which density, and after how many products with converted weights.

Evaluates results; launchers never use it.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, exp, inf, log
from statistics import geometric_mean, median

import numpy as np

from ksgen.bench.comparison import Pairs, Results, comparisons
from ksgen.bench.roster import COMPARISONS, OURS
from ksgen.bench.rows import ResultRow
from ksgen.bench.tables import LAYOUT_WORDS, ResultTable, number, times
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec

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
        lines.append((results.batch, results.precision, layout, by, *cells, _as_density(crossing(pairs))))
    columns = ("batch", "precision", "layout", "dense by", *CLASSES, "ours is faster below")
    note = (
        "Time of the dense product over ours: geometric mean, least, and number of patterns. A class includes its "
        "bound. The last column is the density at which a line crosses 1. The line fits the logarithms of ratio and "
        "density: its slope is the median of the slopes between all pairs of patterns (Theil-Sen). floor: no dense "
        "product was measured, and its floor counts. That is the longer of two times, of memory and of multiply-adds, "
        "at the device's measured rates; libraries take longer."
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


def _as_density(density: float | None) -> str | None:
    return None if density is None else "any density" if density > 1 else f"{100 * density:.2g} %"


# ---- conversion of weights


def conversions(results: Results, layout: str | None = None, is_group: bool = False) -> ResultTable:
    """Table of every contender's time next to that of converting the weights to its format; medians over the jobs.

    It has no rows if no conversion was measured. None: all layouts. The title names one layout, and groups.
    """
    layouts: Sequence[str] = [layout] if layout else LAYOUTS
    words = [LAYOUT_WORDS[layout]] if layout else []
    words += ["groups"] * is_group
    lines = list(_conversions(results, layouts)) if any(row.conversion_us is not None for row in results.rows) else []
    columns = ("layout", "contender", "jobs", "product, ms", "conversion, ms", "in products", "paid after")
    note = (
        "Medians over the jobs. Weights (a, b, c, d) are converted to the contender's format: packed, permuted, or "
        "stored as another matrix. in products: the conversion's time over that of one product. paid after: the number "
        f"of products after which conversion and products together take less time than {UNCONVERTED}, which converts "
        "nothing."
    )
    return ResultTable.of(", ".join(("Conversion of weights", results.title, *words)), columns, lines, note)


def _conversions(results: Results, layouts: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for layout, name in product(layouts, results.names):
        jobs = [best for best in results.best[layout].values() if name in best]
        pairs = [(us, best) for best in jobs if (us := best[name].conversion_us) is not None]
        paid = [
            _products_until(us, best[UNCONVERTED].us - best[name].us)
            for us, best in pairs
            if UNCONVERTED in best and name != UNCONVERTED
        ]
        converted = (
            (number(median(us for us, _ in pairs) / 1e3), number(median(us / best[name].us for us, best in pairs)))
            if pairs
            else (None, None)
        )
        if jobs:
            product_ms = number(median(best[name].us for best in jobs) / 1e3)
            yield layout, name, len(jobs), product_ms, *converted, _as_products(paid)


def _products_until(conversion_us: float, saved_us: float) -> float:
    """Number of products whose savings make up for the conversion; infinite if a product saves nothing."""
    return max(1, ceil(conversion_us / saved_us)) if saved_us > 0 else inf


def _as_products(paid: Sequence[float]) -> str | None:
    if not paid:
        return None
    middle = sorted(paid)[len(paid) // 2]  # an element: the mean with an infinite one would be infinite
    return NEVER if middle == inf else str(middle)
