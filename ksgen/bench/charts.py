"""Charts of a comparison: a bar chart per job for up to ten jobs, else speed-ups and shares of the floor in ascending order.

Chooses what a chart shows; `ksgen.figures.charts` draws it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean, median

from ksgen.bench.comparison import Results, comparisons
from ksgen.bench.roster import OTHERS, OUR_WAYS, OURS, PYTORCH
from ksgen.bench.rows import Row
from ksgen.bench.tables import LAYOUT_WORDS, layers_by_kind
from ksgen.figures.charts import Bars, Series, Sorted
from ksgen.spec import LAYOUTS

MOST_BARS = 10  # jobs with a bar chart each
LAYER = "layer"
PRODUCTS_OF_LAYERS = ("bmm", "views", "dense")  # PyTorch's contenders for layers
OWN_LAYERS = (LAYER, *OUR_WAYS)  # the first one that was measured is compared where there are many layers
Asked = tuple[Results, str, Sequence[str], Sequence[str], Sequence[str], Sequence[str]]  # title, layouts, ours, others, PyTorch's
BARS_NOTE = "Microseconds, the median. Orange: ours. x: times as long as our fastest. Dashed: the floor, which no kernel can beat."
SORTED_NOTE = (
    "Over PyTorch: times as fast as the best of PyTorch; above the dashed line ours is faster. Of the floor: the share of it that ours "
    "reaches. Each curve has a point per pattern or layer, in ascending order; the least and the most are named."
)


@dataclass(frozen=True)
class Charts:
    """Charts that share a precision and a batch size, with the sentence below them."""

    title: str
    note: str
    panels: tuple[Bars | Sorted, ...]


def charts(rows: Sequence[Row]) -> list[Charts]:
    """All charts of a file: bars by precision and batch size, products before layers; then all sorted values together."""
    products, layers = [row for row in rows if not row.layer], [row for row in rows if row.layer]
    bars: list[Charts] = []
    panels: list[Sorted] = []
    asked: list[Asked] = [(results, results.title, LAYOUTS, (OURS,), OTHERS, PYTORCH) for results in comparisons(products)]
    for results, layout, is_group in layers_by_kind(layers):
        title = f"{'groups of ' * is_group}layers, {results.title}"
        asked.append((results, title, (layout,), OWN_LAYERS, PRODUCTS_OF_LAYERS, PRODUCTS_OF_LAYERS))
    for results, title, layouts, ours, others, of_pytorch in asked:
        if own := [name for name in ours if any(name in best for layout in layouts for best in results.best[layout].values())]:
            jobs = {job for layout in layouts for job, best in results.best[layout].items() if set(own) & set(best)}
            if len(jobs) <= MOST_BARS:
                where = f"{title}, {LAYOUT_WORDS[layouts[0]]}" if len(layouts) == 1 else title
                bars.append(Charts(where, BARS_NOTE, tuple(_bars(results, layouts, own, others))))
            else:
                panels += _sorted(results, title, layouts, own[0], of_pytorch)
    return bars + [Charts("Speed-ups, and shares of the floor", SORTED_NOTE, tuple(panels))] * bool(panels)


def _bars(results: Results, layouts: Sequence[str], own: Sequence[str], others: Sequence[str]) -> Iterator[Bars]:
    jobs = dict.fromkeys(job for layout in layouts for job in results.best[layout])
    for job, layout in product(jobs, layouts):
        best = results.best[layout].get(job, {})
        times = sorted(((name, best[name].us) for name in (*own, *others) if name in best), key=lambda pair: pair[1])
        if any(name in best for name in own):
            floor = next((best[name].floor_us for name in own if name in best), None)
            words = f"{_name(job)}, {layout}" if len(layouts) > 1 else _name(job)
            yield Bars(words, tuple(times), frozenset(own), floor)


def _sorted(results: Results, title: str, layouts: Sequence[str], one: str, others: Sequence[str]) -> Iterator[Sorted]:
    ratios = {layout: found for layout in layouts if (found := results.over(one, others, layout))}
    reached = {layout: results.shares_of_floor(one, layout) for layout in ratios}
    shares = {layout: {job: 100 * found[job] for job in ratios[layout] if job in found} for layout, found in reached.items()}
    speeds = [
        Series(f"{layout}: {len(found)}, mean x{geometric_mean(found.values()):.2f}", _named(found)) for layout, found in ratios.items()
    ]
    floors = [Series(f"{layout}: median {median(found.values()):.0f} %", _named(found)) for layout, found in shares.items() if found]
    if speeds:
        yield Sorted(f"{title}: over PyTorch", tuple(speeds), "x", 1)
    if floors:
        yield Sorted(f"{title}: of the floor", tuple(floors), "%", 100)


def _named(values: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple((_name(job), value) for job, value in values.items())


def _name(job: str) -> str:
    """Pattern, or name of a layer, without its factors."""
    return job.partition(": ")[0]
