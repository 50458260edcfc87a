"""Convert rows to one self-contained HTML page, or Markdown: the paper's tables and figures for this device.

Evaluates nothing: `tables` and `payoff` choose the content. Up to ten jobs have a bar chart each. More have speed-ups
and shares of the floor in ascending order, and box plots in the paper's style. The same rows give the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ksgen import __version__
from ksgen.bench import roster, tables
from ksgen.bench.comparison import BEST, Pairs, Results, comparisons, group_by
from ksgen.bench.payoff import by_density, conversions, predictors
from ksgen.bench.rows import ResultRow, kinds_of
from ksgen.bench.tables import LAYOUT_WORDS, ResultTable, layers_by_kind, published
from ksgen.errors import KsgenError
from ksgen.figures import svg
from ksgen.figures.charts import Bars, Series, Sorted, inline
from ksgen.figures.charts import picture as drawn_picture
from ksgen.files import read, reading
from ksgen.measure.roofline import NO_FLOOR
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 10  # with more jobs, curves replace the bar charts
WIDTH, HEIGHT = 7.2, 2.6  # inches of a box plot
EXTRA = "bench"  # extra of the package that installs matplotlib
MOST_BOXES = 24  # if there are more numbers, neighbouring ones share a box
LEAST_IN_BOX = 5  # patterns; neighbouring numbers with fewer share a box
OWN_LAYERS = (roster.LAYER, *roster.OUR_METHODS)  # of many layers, curves compare the first of these that was measured
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
    products, _, layers, _ = kinds_of(rows)
    bars: list[Charts] = []
    panels: list[Sorted] = []
    compared = [
        _Compared(each, each.title, LAYOUTS, (roster.OURS,), roster.OTHERS, roster.PYTORCH)
        for each in comparisons(products)
    ]
    for results, layout, is_group in layers_by_kind(layers):
        title = f"{'groups of ' * is_group}layers, {results.title}"
        others = roster.OTHERS_OF_LAYERS
        compared.append(_Compared(results, title, (layout,), OWN_LAYERS, others, others))
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


RATIO = "(b+c)/(bc)"
MOST_BYTES_OF_LINE = 1000
FASTER = "times as fast"
LACKS_TIMES = "the file has no reliable time of ksgen for forward products, or for layers"
NO_CHARTS = f"No charts, as {LACKS_TIMES}."


@dataclass(frozen=True)
class Map:
    """Our share of the floor by pattern: a row per a and d, a column per block."""

    layout: str
    columns: tuple[tuple[int, int], ...]  # (b, c)
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass
class PageSection:
    """Section of the page for one batch size and precision, or for all of them. Details are folded."""

    title: str
    says: str = ""
    tables: list[ResultTable] = field(default_factory=list)
    charts: list[Charts] = field(default_factory=list)
    folded_tables: list[ResultTable] = field(default_factory=list)
    folded_figures: list[str] = field(default_factory=list)
    maps: list[Map] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(", ", "-").replace(" ", "-")


def page(rows: Sequence[ResultRow], wholes: Sequence[ResultTable] = (), machine: str = "") -> str:
    """Render the HTML page.

    `wholes` holds tables of full models.
    """
    return svg.page(
        Path(__file__).parent,
        "page.html.j2",
        # figures are generated here, and contain nothing from the file
        {"panel": lambda panel: Markup(inline(panel)), "svg": Markup},
        title=f"Kronecker-sparse products: {machine or _devices(rows)}",
        no_floor=NO_FLOOR,
        sections=_sections(rows, wholes, with_figures=True),
        dark_style=Markup(svg.dark_style()),
        source=published()["source"],
        version=__version__,
    )


def markdown(rows: Sequence[ResultRow], wholes: Sequence[ResultTable] = (), machine: str = "") -> str:
    """Render every table of the page as Markdown."""
    parts = [f"# Kronecker-sparse products: {machine or _devices(rows)}\n"]
    for section in _sections(rows, wholes, with_figures=False):
        parts += [f"## {section.title}\n", *([f"{section.says}\n"] if section.says else [])]
        parts += map(tables.markdown, section.tables + section.folded_tables)
    return "\n".join(parts)


def picture(rows: Sequence[ResultRow], machine: str = "") -> str:
    """Draw all charts of a file of results as one SVG."""
    title = f"Kronecker-sparse products: {machine or _devices(rows)}"
    if not (panels := [panel for each in charts(rows) for panel in each.panels]):
        raise KsgenError(
            f"{LACKS_TIMES}, so there is nothing to draw; the page without --svg lists all times, and those to measure "
            "again on a quiet machine"
        )
    return drawn_picture(title, panels)


def machine_of(file: Path) -> str:
    """Description of the machine: the line in machine.txt next to a file of results; empty if there is none."""
    path = file.with_name("machine.txt")
    with reading(path, "a line of text"):
        return read(path, MOST_BYTES_OF_LINE).decode().strip() if path.exists() else ""


def _devices(rows: Sequence[ResultRow]) -> str:
    return ", ".join(dict.fromkeys(row.device for row in rows))


def _sections(rows: Sequence[ResultRow], wholes: Sequence[ResultTable], with_figures: bool) -> list[PageSection]:
    """Sections of the page: charts, overview, products, layers, energy, models, the authors' times, and errors."""
    products, trained, layers, models = kinds = kinds_of(rows)
    drawn = charts(rows) if with_figures else []
    shown = (
        tables.overview(products),
        tables.processors(products),
        by_density(products),
        tables.headlines(kinds.without_models),
        tables.standings(kinds.without_models),
        tables.layers_summary(layers),
        tables.wholes(models),
        tables.versions(rows),
        tables.setting(rows),
    )
    found = [PageSection("Charts", "" if drawn else NO_CHARTS, charts=drawn)] * with_figures
    found.append(PageSection("Overview", tables=[table for table in shown if table.rows]))
    energy = PageSection(
        "Energy", "NVML's energy during long runs, minus that of the idle GPU.", [tables.energy(products)]
    )
    for results in comparisons(products):
        found.append(_of_products(results))
        if with_figures:
            _draw(found[-1], results)
            title = f"Figure 7: energy of ksgen over the least of the others, {results.title}"
            ratios = results.energy_ratios(roster.OURS, roster.OTHERS)
            energy.folded_figures += _boxes(
                title, "times the energy", ratios, lambda each: each.d * each.rewrite_ratio, "d (b+c)/(bc)"
            )
    for step in roster.STEPS_OF_LAYERS:
        of_step = [row for row in layers if row.step == step]
        converted = (conversions(*kind) for kind in tables.layers_by_kind(of_step))
        if of_layers := [*tables.each_layer(of_step), *(table for table in converted if table.rows)]:
            title = "Layers" if step == roster.FORWARD else f"Layers, {roster.STEP_TITLES[step]}"
            found.append(PageSection(title, "Every factor of a layer, and several layers on one x.", of_layers))
    of_errors = [tables.unreliable(rows), tables.errors(rows), tables.absent(rows)]
    last = [
        PageSection(f"Patterns, {roster.STEP_TITLES[roster.TRAINING]}", tables=list(tables.each_layer(trained))),
        energy,
        PageSection("Whole models", tables=list(wholes)),
        PageSection("Compared with the authors", tables=[tables.authors(products)]),
        PageSection("Errors, and what is missing", tables=of_errors),
    ]
    return [*found, *(section for section in last if any(table.rows for table in section.tables))]


def _of_products(results: Results) -> PageSection:
    comparison = roster.COMPARISONS.get(results.precision)
    makers = (
        tables.table3, tables.table5, tables.table8, tables.layouts, tables.rewriting, tables.families, conversions,
    )  # fmt: skip
    shown = [*(make(results) for make in makers), *(predictors(results, layout) for layout in LAYOUTS)]
    section = PageSection(
        results.title, f"{comparison.says}." if comparison else "", [table for table in shown if table.rows]
    )
    section.folded_tables = [tables.table8(results, layout) for layout in LAYOUTS]
    return section


def _draw(section: PageSection, results: Results) -> None:
    """Add the paper's figures and the maps of one batch size and precision."""
    for label, others in (("the paper's five", roster.PAPERS), ("everyone", roster.OTHERS)):
        by_layout = {layout: results.ratios(roster.OURS, others, layout) for layout in (*LAYOUTS, BEST)}
        scale = [ratio for ratios in by_layout.values() for _, ratio in ratios]
        for layout, ratios in by_layout.items():
            title = (
                f"Figure 6: ksgen compared with the fastest of {label}, {results.title}, {tables.LAYOUT_WORDS[layout]}"
            )
            section.folded_figures += _boxes(title, FASTER, ratios, scale=scale)
    for layout in LAYOUTS:
        words = f"{results.title}, {tables.LAYOUT_WORDS[layout]}"
        title = f"Figure 4: share of bmm that rewrites memory, {words}"
        section.folded_figures += _boxes(title, "share", results.rewriting_share(layout), reference=None)
        for name in roster.OTHERS:
            title = f"Figures 9 to 17: ksgen compared with {name}, {words}"
            section.folded_figures += _boxes(title, FASTER, results.ratios(roster.OURS, [name], layout))
        if found := _map(results, layout):
            section.maps.append(found)


def _boxes(
    title: str,
    unit: str,
    ratios: Pairs,
    key: Callable[[Pattern], float] = attrgetter("rewrite_ratio"),
    label: str = RATIO,
    **more: Any,
) -> list[str]:
    """One box plot, if there are more than `MOST_BARS` patterns; else none."""
    return [boxes(title, label, unit, group_by(ratios, key), **more)] if len(ratios) > MOST_BARS else []


def _map(results: Results, layout: str) -> Map | None:
    shares = results.shares_of_floor(roster.OURS, layout)
    share_of = {Pattern.parse(text).shape: share for text, share in shares.items()}
    if not share_of:
        return None
    blocks, counts = sorted({(b, c) for _, b, c, _ in share_of}), sorted({(a, d) for a, _, _, d in share_of})
    lines = tuple((f"{a}, {d}", tuple(share_of.get((a, b, c, d)) for b, c in blocks)) for a, d in counts)
    return Map(tables.LAYOUT_WORDS[layout], tuple(blocks), lines)
