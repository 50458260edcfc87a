"""Convert rows to one self-contained HTML page, or Markdown: the paper's tables and figures for this device.

Evaluates nothing: `tables`, `charts` and `heuristic` choose the content. The same rows give the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ksgen import __version__
from ksgen.bench import tables
from ksgen.bench.charts import MOST_BARS, Charts, boxes, charts
from ksgen.bench.comparison import BEST, Pairs, Results, comparisons, group_by
from ksgen.bench.heuristic import predictors
from ksgen.bench.payoff import by_density, conversions
from ksgen.bench.published import published
from ksgen.bench.roster import COMPARISONS, FORWARD, OTHERS, OURS, PAPERS, STEP_TITLES, STEPS_OF_LAYERS
from ksgen.bench.rows import ResultRow
from ksgen.bench.tables import ResultTable
from ksgen.errors import KsgenError
from ksgen.figures import svg
from ksgen.figures.charts import inline
from ksgen.figures.charts import picture as drawn_picture
from ksgen.files import read, reading
from ksgen.measure.roofline import NO_FLOOR
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS

RATIO = "(b+c)/(bc)"
MOST_BYTES_OF_LINE = 1000
FASTER = "times as fast"
NO_CHARTS = "No charts, as no time of ksgen in the file is reliable: measure again on a quiet machine."


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
        raise KsgenError("the file has no reliable time of ksgen, so there is nothing to draw")
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
    products, layers = [row for row in rows if not row.layer], [row for row in rows if row.layer]
    drawn = charts(rows) if with_figures else []
    shown = (
        tables.overview(products),
        tables.processors(products),
        by_density(products),
        tables.headlines(layers),
        tables.layers_summary(layers),
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
            ratios = results.energy_ratios(OURS, OTHERS)
            energy.folded_figures += _boxes(
                title, "times the energy", ratios, lambda each: each.d * each.rewrite_ratio, "d (b+c)/(bc)"
            )
    for step in STEPS_OF_LAYERS:
        of_step = [row for row in layers if row.step == step]
        converted = (conversions(*kind) for kind in tables.layers_by_kind(of_step))
        if of_layers := [*tables.each_layer(of_step), *(table for table in converted if table.rows)]:
            title = "Layers" if step == FORWARD else f"Layers, {STEP_TITLES[step]}"
            found.append(PageSection(title, "Every factor of a layer, and several layers on one x.", of_layers))
    last = [
        energy,
        PageSection("Whole models", tables=list(wholes)),
        PageSection("Compared with the authors", tables=[tables.authors(products)]),
    ]
    last.append(
        PageSection(
            "Errors, and what is missing", tables=[tables.unreliable(rows), tables.errors(rows), tables.absent(rows)]
        )
    )
    return [*found, *(section for section in last if any(table.rows for table in section.tables))]


def _of_products(results: Results) -> PageSection:
    comparison = COMPARISONS.get(results.precision)
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
    for label, others in (("the paper's five", PAPERS), ("everyone", OTHERS)):
        by_layout = {layout: results.ratios(OURS, others, layout) for layout in (*LAYOUTS, BEST)}
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
        for name in OTHERS:
            title = f"Figures 9 to 17: ksgen compared with {name}, {words}"
            section.folded_figures += _boxes(title, FASTER, results.ratios(OURS, [name], layout))
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
    share_of = {Pattern.parse(text).shape: share for text, share in results.shares_of_floor(OURS, layout).items()}
    if not share_of:
        return None
    blocks, counts = sorted({(b, c) for _, b, c, _ in share_of}), sorted({(a, d) for a, _, _, d in share_of})
    lines = tuple((f"{a}, {d}", tuple(share_of.get((a, b, c, d)) for b, c in blocks)) for a, d in counts)
    return Map(tables.LAYOUT_WORDS[layout], tuple(blocks), lines)
