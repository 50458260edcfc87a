"""Charts of a comparison: a bar chart per job for up to ten jobs, else speed-ups and shares of the floor in ascending
order, and box plots in the paper's style.

Chooses what a chart shows; `ksgen.figures` draws it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

from ksgen.bench.comparison import Results, comparisons
from ksgen.bench.roster import LAYER, OTHERS, OTHERS_OF_LAYERS, OUR_METHODS, OURS, PYTORCH
from ksgen.bench.rows import ResultRow
from ksgen.bench.tables import LAYOUT_WORDS, layers_by_kind
from ksgen.figures import svg
from ksgen.figures.charts import Bars, Series, Sorted
from ksgen.spec import LAYOUTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 10  # with more jobs, curves replace the bar charts
WIDTH, HEIGHT = 7.2, 2.6  # inches of a box plot
EXTRA = "bench"  # extra of the package that installs matplotlib
MOST_BOXES = 24  # if there are more numbers, neighbouring ones share a box
LEAST_IN_BOX = 5  # patterns; neighbouring numbers with fewer share a box
OWN_LAYERS = (LAYER, *OUR_METHODS)  # of many layers, curves compare the first of these that was measured
BARS_NOTE = (
    "Microseconds, the median. Orange: ours. x: times as long as our fastest. Dashed: the floor, which no "
    "kernel can beat."
)
SORTED_NOTE = (
    "Over PyTorch: times as fast as the best of PyTorch; above the dashed line ours is faster. Of the floor: the "
    "share of it that ours "
    "reaches. Each curve has a point per pattern or layer, in ascending order; the least and the most are named."
)


@dataclass(frozen=True)
class Charts:
    """Charts that share a precision and a batch size, with the sentence below them."""

    title: str
    note: str
    panels: tuple[Bars | Sorted, ...]


@dataclass(frozen=True)
class _Compared:
    """Results to draw, and the contenders that their charts show."""

    results: Results
    title: str
    layouts: Sequence[str]
    ours: Sequence[str]  # our bars; curves compare the first one that was measured
    others: Sequence[str]  # bars next to ours
    of_pytorch: Sequence[str]  # contenders by PyTorch and its extensions; curves compare ours with the best of them

    @property
    def own(self) -> list[str]:
        """Our contenders that were measured."""
        every = [best for layout in self.layouts for best in self.results.best[layout].values()]
        return [name for name in self.ours if any(name in best for best in every)]

    @property
    def jobs(self) -> dict[str, None]:
        """Jobs with a time of at least one of our contenders."""
        found = (pair for layout in self.layouts for pair in self.results.best[layout].items())
        return dict.fromkeys(job for job, best in found if not set(self.ours).isdisjoint(best))


def charts(rows: Sequence[ResultRow]) -> list[Charts]:
    """All charts of a file: bars by precision and batch, products before layers; then curves of all sorted values."""
    products, layers = [row for row in rows if not row.layer], [row for row in rows if row.layer]
    bars: list[Charts] = []
    panels: list[Sorted] = []
    compared = [
        _Compared(results, results.title, LAYOUTS, (OURS,), OTHERS, PYTORCH) for results in comparisons(products)
    ]
    for results, layout, is_group in layers_by_kind(layers):
        title = f"{'groups of ' * is_group}layers, {results.title}"
        compared.append(_Compared(results, title, (layout,), OWN_LAYERS, OTHERS_OF_LAYERS, OTHERS_OF_LAYERS))
    for each in filter(lambda each: each.own, compared):
        if len(each.jobs) <= MOST_BARS:
            where = f"{each.title}, {LAYOUT_WORDS[each.layouts[0]]}" if len(each.layouts) == 1 else each.title
            bars.append(Charts(where, BARS_NOTE, tuple(_bars(each))))
        else:
            panels += _sorted(each)
    return bars + [Charts("Speed-ups, and shares of the floor", SORTED_NOTE, tuple(panels))] * bool(panels)


def _bars(compared: _Compared) -> Iterator[Bars]:
    own = compared.own
    for job, layout in product(compared.jobs, compared.layouts):
        best = compared.results.best[layout].get(job, {})
        times = sorted(
            ((name, best[name].us) for name in (*own, *compared.others) if name in best), key=lambda pair: pair[1]
        )
        if floors := [best[name].floor_us for name in own if name in best]:
            words = f"{_name(job)}, {layout}" if len(compared.layouts) > 1 else _name(job)
            yield Bars(words, tuple(times), frozenset(own), floors[0])


def _sorted(compared: _Compared) -> Iterator[Sorted]:
    results, one = compared.results, compared.own[0]
    ratios = {layout: found for layout in compared.layouts if (found := results.over(one, compared.of_pytorch, layout))}
    reached = {layout: results.shares_of_floor(one, layout) for layout in ratios}
    shares = {
        layout: {job: 100 * found[job] for job in ratios[layout] if job in found} for layout, found in reached.items()
    }
    speeds = [
        Series(f"{layout}: {len(found)}, mean x{geometric_mean(found.values()):.2f}", _named(found))
        for layout, found in ratios.items()
    ]
    floors = [
        Series(f"{layout}: median {median(found.values()):.0f} %", _named(found))
        for layout, found in shares.items()
        if found
    ]
    if speeds:
        yield Sorted(f"{compared.title}: over PyTorch", tuple(speeds), "x", 1)
    if floors:
        yield Sorted(f"{compared.title}: of the floor", tuple(floors), "%", 100)


def _named(values: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple((_name(job), value) for job, value in values.items())


def _name(job: str) -> str:
    """Pattern, or name of a layer, without its factors."""
    return job.partition(": ")[0]


# ---- box plots: whiskers are at 5 and 95 %


def boxes(
    title: str,
    label: str,
    unit: str,
    groups: Mapping[float, Sequence[float]],
    reference: float | None = 1.0,
    scale: Sequence[float] = (),
) -> str:
    """Draw a box per group, labelled with its number of patterns.

    A box shows median and quartiles, with whiskers at 5 and 95 % and no outliers. The axis covers the values in
    `scale`, so that several figures can share an axis; by default, it covers the figure's own values.
    """
    merged = _merged(groups)
    with svg.figure(title, svg.Size(WIDTH, HEIGHT), EXTRA) as drawn:
        axes = drawn.axes
        line = {"color": svg.LINE, "linewidth": 0.9}
        axes.boxplot(
            [values for _, values in merged], whis=(5, 95), showfliers=False, widths=0.6,
            boxprops=line, whiskerprops=line, capprops=line, medianprops={"color": svg.ACCENT, "linewidth": 1.6},
        )  # fmt: skip
        names = [f"{name} ({len(values)})" for name, values in merged]
        axes.set_xticks(range(1, len(merged) + 1), names, rotation=45, ha="right", fontsize=7)
        axes.set_xlabel(f"{label} (patterns)")
        axes.grid(axis="x", visible=False)
        _value_axis(axes, unit, scale or [value for _, values in merged for value in values], reference)
        if scale:
            margin = (max(scale) / min(scale)) ** 0.05
            axes.set_ylim(min(scale) / margin, max(scale) * margin)
    return drawn.svg


def _value_axis(axes: "Axes", unit: str, values: Sequence[float], reference: float | None) -> None:
    axes.set_ylabel(unit)
    if reference is None:
        axes.set_ylim(bottom=0)
        return
    axes.axhline(reference, color=svg.GUIDE, linewidth=1, linestyle="--")
    if max(values) > svg.WIDE_RATIO * min(values):
        svg.make_logarithmic(axes, "y", (1, 2, 5) if max(values) < 300 * min(values) else (1,), ticks=8)


def _merged(groups: Mapping[float, Sequence[float]]) -> list[tuple[str, list[float]]]:
    """Merge neighbouring groups into at most `MOST_BOXES` named groups of at least `LEAST_IN_BOX` values."""
    least = max(LEAST_IN_BOX, -(-sum(map(len, groups.values())) // MOST_BOXES))
    merged: list[tuple[list[float], list[float]]] = []
    for number in sorted(groups):
        if not merged or len(merged[-1][1]) >= least:
            merged.append(([], []))
        merged[-1][0].append(number)
        merged[-1][1].extend(groups[number])
    if len(merged) > 1 and len(merged[-1][1]) < least:
        numbers, values = merged.pop()
        merged[-1][0].extend(numbers)
        merged[-1][1].extend(values)
    return [
        (f"{numbers[0]:.3g}" if len(numbers) == 1 else f"{numbers[0]:.3g} to {numbers[-1]:.3g}", values)
        for numbers, values in merged
    ]
