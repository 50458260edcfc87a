"""Charts of a comparison: a bar chart per job for up to ten jobs, else speed-ups and shares of the floor in ascending
order.

Chooses what a chart shows; `ksgen.figures.charts` draws it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean, median

from ksgen.bench.comparison import Results, comparisons
from ksgen.bench.roster import LAYER, OTHERS, OTHERS_OF_LAYERS, OUR_METHODS, OURS, PYTORCH
from ksgen.bench.rows import ResultRow
from ksgen.bench.tables import LAYOUT_WORDS, layers_by_kind
from ksgen.figures.charts import Bars, Series, Sorted
from ksgen.spec import LAYOUTS

MOST_BARS = 10  # with more jobs, curves replace the bar charts
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
