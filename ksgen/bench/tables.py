"""Tables of the report, compared with the paper's numbers.

Only text: pages, Markdown and terminals show the same tables. Figures of the paper and of its authors' files are in
`published.yaml`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import isnan
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import yaml

from ksgen.bench.comparison import BEST, UNTUNED, Duel, Results, comparisons, group_by
from ksgen.bench.roster import (
    AND,
    EVERYONE,
    EXPERTS,
    FORWARD,
    LAYER,
    LAYERS,
    METHODS,
    METHODS_OF_MODELS,
    ONE_LAUNCH,
    OTHER_METHODS,
    OTHERS,
    OUR_METHODS,
    OURS,
    PAPERS,
    PYTORCH,
    STEP_TITLES,
    WHOLE,
)
from ksgen.bench.rows import MOST_BYTES_OF_FILE, OK, ResultRow
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.errors import KsgenError
from ksgen.files import read, reading
from ksgen.measure.roofline import NO_FLOOR
from ksgen.measure.trust import MARK, MOST_WIDTH, ROUGH_WIDTH, marked
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from ksgen.values import counted, grouped, spanned


@dataclass(frozen=True)
class Claim:
    """A share of patterns, a median factor, or both, with the place in the paper."""

    precision: str
    where: str
    layout: str = ""
    share: float | None = None
    factor: float | None = None


@cache
def published() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return content


def claim(name: str) -> Claim:
    return Claim(**published()["claims"][name])


def published_patterns() -> list[Pattern]:
    """Patterns whose times the authors published."""
    return [Pattern.parse(text) for text in published()["times"]]


def published_us(pattern: str, precision: str, layout: str) -> float | None:
    """Microseconds that the authors published for their kernel; None if they published none."""
    milliseconds = published()["times"].get(pattern, {}).get(f"{precision} {layout}")
    return None if milliseconds is None else milliseconds * 1e3


NONE = "-"  # in a cell without a figure
LAYOUT_WORDS = {"bsf": "batch-size-first", "bsl": "batch-size-last", BEST: "best layout of each"}


@dataclass(frozen=True)
class ResultTable:
    """Table with cells as text. The note is a sentence below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @classmethod
    def of(cls, title: str, columns: Sequence[str], lines: Iterable[Iterable[object]], *notes: str) -> "ResultTable":
        """Create a table of values. None is a cell without a figure."""
        rows = tuple(tuple(NONE if cell is None else str(cell) for cell in line) for line in lines)
        return cls(title, tuple(columns), rows, " ".join(filter(None, notes)))


def markdown(table: ResultTable) -> str:
    cells = (table.columns, ["---"] * len(table.columns), *table.rows)
    lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in cells)
    return f"### {table.title}\n\n{''.join(lines)}" + (f"\n{table.note}\n" if table.note else "")


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"


def number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def times(factor: float | None) -> str:
    return NONE if factor is None else f"x{factor:.2f}"


def spread(ratios: Iterable[float]) -> tuple[str, str, str]:
    """Geometric mean, least and most of ratios, if there are any."""
    found = list(ratios)
    return (times(geometric_mean(found)), times(min(found)), times(max(found))) if found else (NONE, NONE, NONE)


# ---- products


def overview(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of the most important results, with one line per batch size, precision and layout."""
    lines = []
    for results, layout in product(comparisons(rows), LAYOUTS):
        papers, others = results.duel(OURS, PAPERS, layout), results.duel(OURS, OTHERS, layout)
        if others.ratios:
            shares = results.shares_of_floor(OURS, layout).values()
            beats = (percent(papers.share), times(papers.factor), percent(others.share), times(others.factor))
            floor = percent(median(shares)) if shares else None
            layer = times(results.duel(LAYER, OTHERS, layout).factor)
            lines.append((results.batch, results.precision, layout, others.patterns, *beats, layer, floor))
    columns = (
        "batch", "precision", "layout", "patterns", "paper beaten", "median", "all beaten", "median", "layer",
        "of the floor",
    )  # fmt: skip
    note = (
        "ksgen is compared with the fastest of the paper's methods, and with the fastest of all others. 'paper "
        "beaten' and 'all beaten' are the shares of patterns in which ksgen is faster. Medians of the speed-up are "
        "over all patterns: above x1 ksgen is faster. 'layer' is the median speed-up over all others of a frozen "
        "`KSLinear`, which chooses among ksgen's kernels and PyTorch's products by itself."
    )
    return ResultTable.of(
        "Ours compared with the others", columns, lines, note, arithmetic_note(rows), measured_note(rows, OTHERS),
        unreliable_note(rows), _without_floor(lines),
    )  # fmt: skip


def arithmetic_note(rows: Iterable[ResultRow]) -> str:
    """Sentence that names what ksgen's kernels of float32 arrays also multiply in; empty if only in float32."""
    ours = (row for row in rows if row.implementation == OURS and row.status == OK and row.precision == "float32")
    found = " and ".join(f"`{each}`" for each in sorted({row.arithmetic for row in ours} - {"float32"}))
    return f"In float32, ksgen may multiply in {found}, which launchers use only if asked." if found else ""


def measured_names(rows: Iterable[ResultRow], among: Sequence[str]) -> str:
    """Names of the contenders that have a time, in words; empty if none has one."""
    measured = {row.implementation for row in rows if row.status == OK}
    found = [name for name in among if name in measured]
    return " and ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def measured_note(rows: Iterable[ResultRow], among: Sequence[str]) -> str:
    """Sentence that names the contenders that have a time; empty if none has one."""
    names = measured_names(rows, among)
    return f"The others that were measured are {names}." if names else ""


def _without_floor(lines: Sequence[Sequence[object]]) -> str:
    """Reason why a line has no share of the floor; empty if all have one."""
    return NO_FLOOR if any(line[-1] is None for line in lines) else ""


def processors(rows: Sequence[ResultRow]) -> ResultTable:
    """Summary of a processor's results: a line per batch size, precision and layout."""
    lines = []
    for results, layout in product(comparisons([row for row in rows if row.runtime in PROCESSOR_RUNTIMES]), LAYOUTS):
        if ratios := results.over(OURS, PYTORCH, layout):
            duel, reached = Duel(tuple(ratios.values())), results.shares_of_floor(OURS, layout)
            shares = [reached[job] for job in ratios if job in reached]
            floor = (percent(median(shares)), percent(min(shares))) if shares else (None, None)
            layers = results.over(LAYER, PYTORCH, layout).values()
            cells = (duel.patterns, *spread(duel.ratios), percent(duel.share), spread(layers)[0])
            lines.append((results.batch, results.precision, layout, *cells, *floor))
    columns = (
        "batch", "precision", "layout", "patterns", "mean", "least", "most", "faster in", "layer",
        "of the floor", "least share",
    )  # fmt: skip
    note = (
        "ksgen is compared with the fastest of PyTorch's methods in each pattern: geometric mean, least and most "
        "speed-up. The share of the floor is the median. 'layer' is the geometric mean for a frozen `KSLinear`, "
        "which chooses among ksgen's kernels and PyTorch's products by itself. Its times include PyTorch's call."
    )
    return ResultTable.of(
        "On a processor: ours compared with the best of PyTorch", columns, lines, note, arithmetic_note(rows),
        measured_note(rows, PYTORCH), _without_floor(lines),
    )  # fmt: skip


def setting(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of device, dates and commits; a file may hold several dates and commits."""
    names = ("device", "target", "driver", "runtime", "compiler", "torch", "baselines_on", "ksgen", "commit", "date")
    measured = [row for row in rows if row.measurements]
    lines = [
        (name.replace("_", " "), ", ".join(sorted(filter(None, {getattr(row, name) for row in rows}))))
        for name in names
    ]
    lines += [
        ("batch", ", ".join(map(str, sorted({row.batch for row in rows})))),
        ("measurements", spanned((row.measurements for row in measured), number)),
        ("runs in a measurement", spanned((row.runs for row in measured), number)),
    ]
    return ResultTable.of("Where and when", ("", ""), [line for line in lines if line[1]])


def versions(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of all contenders with their versions, and how many rows have no time for which reasons."""
    lines = []
    for name, some in grouped(rows, attrgetter("implementation")).items():
        identity = "; ".join(dict.fromkeys(row.identity for row in some if row.identity))
        missing = [row for row in some if row.status != OK]
        count = f"{len(some) - len(missing)} of {counted(len(some), 'row')}"
        lines.append((name, identity or None, count, _reasons(missing)))
    note = "Rows without a time have the most frequent reason. ksgen's versions end with digests of templates."
    columns = ("contender", "version", "measured", "without a time")
    return ResultTable.of("Contenders and their versions", columns, lines, note)


def _reasons(rows: Iterable[ResultRow]) -> str:
    """Number of rows without a time by status, each with its most frequent reason."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row.status, Counter())[row.reason] += 1
    return "; ".join(f"{each.total()} {status}: {each.most_common(1)[0][0]}" for status, each in found.items())


def table3(results: Results) -> ResultTable:
    of_bmm = results.duel("bmm", ("einsum", "bsr"), BEST)
    lines = [
        _duel_line("bmm faster than einsum and bsr", of_bmm, results, "bmm_beats_einsum_bsr"),
        _duel_line("ksgen faster than the paper's five", results.duel(OURS, PAPERS, BEST), results, "kernel_beats_all"),
        _duel_line("ksgen's defaults faster than these", results.duel(UNTUNED, PAPERS, BEST)),
        _duel_line("ksgen faster than the expert's", results.duel(OURS, EXPERTS, BEST)),
        _duel_line("ksgen faster than everyone", results.duel(OURS, OTHERS, BEST)),
    ]
    if results.precision == "float16":  # the best contender that uses the pattern against the best that does not
        found = []
        for best in results.best[BEST].values():
            users, others = (
                [best[name].us for name in names if name in best] for names in ((OURS, *PAPERS[:3]), PAPERS[3:])
            )
            found += [min(others) / min(users)] if users and others else []
        what = "bmm, bsr, einsum or ksgen faster than dense and sparse"
        lines.append(_duel_line(what, Duel(tuple(found)), results, "specialised_beats_dense_sparse"))
    return _duels(f"Table 3, {results.title}: everyone in the better of the two layouts", lines)


def table5(results: Results) -> ResultTable:
    lines = []
    for layout in LAYOUTS:
        what = f"{layout}: ksgen faster than min(bmm, einsum, bsr, dense, sparse)"
        lines.append(_duel_line(what, results.duel(OURS, PAPERS, layout), results, f"kernel_beats_all_{layout}"))
        lines.append(_duel_line(f"{layout}: ksgen faster than the expert's", results.duel(OURS, EXPERTS, layout)))
    return _duels(f"Table 5, {results.title}: by layout", lines)


def _duel_line(what: str, duel: Duel, results: Results | None = None, name: str = "") -> tuple[object, ...]:
    """Figures of a duel, and the paper's claim of that name if it is of the same precision."""
    paper, theirs = _claim(name, results.precision) if results else None, ""
    if paper:
        factor = f" (x{paper.factor:.2f})" if paper.factor else ""
        theirs = f"{percent(paper.share)}{factor}, {paper.where}"
    return what, duel.patterns, percent(duel.share), times(duel.factor_where_faster), times(duel.factor), theirs


def _duels(title: str, lines: Iterable[tuple[object, ...]]) -> ResultTable:
    columns = ("", "patterns", "faster in", "median where faster", "median of all", "the paper")
    return ResultTable.of(title, columns, [line for line in lines if line[1]])


def _claim(name: str, precision: str) -> Claim | None:
    return claim(name) if published()["claims"].get(name, {}).get("precision") == precision else None


def table8(results: Results, layout: str = BEST) -> ResultTable:
    """Table of every contender against every other."""

    def cell(one: str, other: str) -> str:
        duel = results.duel(one, [other], layout)
        where_faster = f" ({times(duel.factor_where_faster)})" if duel.wins else ""
        return "" if one == other else percent(duel.share) + where_faster

    names = results.names
    lines = [(one, *(cell(one, other) for other in names)) for one in names]
    title = f"Table 8, {results.title}, {LAYOUT_WORDS[layout]}: the row is faster than the column"
    return ResultTable.of(
        title, ("", *names), lines, "Share of patterns, and the median factor where the row is faster."
    )


def layouts(results: Results) -> ResultTable:
    """Table for appendix B.5: the cost of a layout per contender."""
    theirs = published()["layout_recomputed"] if results.precision == "float32" else {}
    ratios = {name: found for name in results.names if (found := results.layouts_ratio(name))}
    by_name = [group_by(found, lambda pattern: pattern.d) for found in ratios.values()]
    lines: list[tuple[object, ...]] = [
        (d, *(number(median(groups[d])) if d in groups else None for groups in by_name), number(theirs.get(d)))
        for d in sorted({d for groups in by_name for d in groups})
    ]
    paper = _claim("bsf_over_bsl", results.precision)
    if ratios:
        medians = (number(median(ratio for _, ratio in found)) for found in ratios.values())
        lines.append(("all", *medians, number(paper.factor if paper else None)))
    note = "Median of the time in batch-size-first over that in batch-size-last."
    return ResultTable.of(f"Layouts, {results.title}", ("d", *ratios, "the authors' kernel"), lines, note)


def rewriting(results: Results) -> ResultTable:
    """Table for appendix B.2 and Figure 4."""
    lines = [
        (layout, f"{ratio:.4f}", len(shares), percent(median(shares)), percent(max(shares)))
        for layout in LAYOUTS
        for ratio, shares in group_by(results.rewriting_share(layout), lambda pattern: pattern.rewrite_ratio).items()
    ]
    paper = _claim("rewriting_most", results.precision)
    note = f"The paper: up to {percent(paper.share)} ({paper.where}), growing with (b+c)/(bc)." if paper else ""
    columns = ("layout", "(b+c)/(bc)", "patterns", "median share", "largest")
    return ResultTable.of(f"Share of bmm that rewrites memory, {results.title}", columns, lines, note)


def families(results: Results) -> ResultTable:
    """Table of our families compared with each other and with PyTorch; no rows if there is only one."""
    names = list(
        dict.fromkeys(row.by for row in results.rows if row.implementation == OURS and row.family and row.counts)
    )
    lines = []
    for name, layout in product(names, LAYOUTS) if len(names) > 1 else ():
        line, floor = [layout, name.removeprefix(f"{OURS}: ")], results.shares_of_floor(name, layout).values()
        for others in (PYTORCH, [each for each in names if each != name]):
            ratios = results.over(name, others, layout).values()
            line += [str(len(ratios)), *spread(ratios)[:2]]
        if any(name in best for best in results.best[layout].values()):
            lines.append((*line, percent(median(floor)) if floor else NONE))
    columns = (
        "layout", "family", "patterns", "over PyTorch, mean", "least", "patterns", "over our others, mean", "least",
        "of the floor",
    )  # fmt: skip
    note = (
        "The fastest time of PyTorch's methods, or of our other families, over the family's: the geometric mean, and "
        "the least."
    )
    return ResultTable.of(f"Our families, {results.title}", columns, lines, note)


def energy(rows: Sequence[ResultRow]) -> ResultTable:
    """Table with the numbers of Figure 7."""
    lines = []
    for results, (label, others) in product(comparisons(rows), (("bmm and einsum", PAPERS[:2]), ("everyone", OTHERS))):
        theirs = published()["energy_recomputed"].get(results.precision) if label != "everyone" else None
        ratios = [ratio for _, ratio in results.energy_ratios(OURS, others)]
        if ratios:
            paper = f"{times(theirs['ratio'])}, {percent(theirs['share'])}" if theirs else ""
            less = percent(sum(ratio < 1 for ratio in ratios) / len(ratios))
            lines.append((results.batch, results.precision, label, len(ratios), times(median(ratios)), less, paper))
    idle = spanned((row.idle_watt for row in rows if row.idle_watt), number)
    note = f"Above idle, which was {idle} W. Below x1 ours takes less energy." if idle else ""
    columns = ("batch", "precision", "ours against", "patterns", "median", "takes less in", "the authors' kernel")
    return ResultTable.of("Energy", columns, lines, note)


def authors(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of times per pattern, compared with those that the authors published, at their batch size."""
    lines: list[tuple[str, ...]] = []
    for results, layout in product(comparisons([row for row in rows if row.batch == published()["batch"]]), LAYOUTS):
        for pattern, best in results.best[layout].items():
            ours, theirs = best.get(OURS), published_us(pattern, results.precision, layout)
            if theirs and ours:
                others = min((best[name].us for name in OTHERS if name in best), default=None)
                figures = (*map(number, (ours.us, others, theirs)), times(theirs / ours.us))
                lines.append((pattern, results.precision, layout, *figures, percent(ours.share_of_floor)))
    columns = (
        "pattern", "precision", "layout", "ours, us", "best other, us", "the authors', us", "theirs over ours",
        "of the floor",
    )  # fmt: skip
    note = (
        "The authors' times are of another GPU (not recorded; the float32 ones fit an A100), at the same batch: no "
        "comparison of kernels."
    )
    lines.sort(key=lambda line: line[1:3])
    return ResultTable.of("Compared with the authors' own times", columns, lines, note)


def errors(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of errors per contender, with the number of inaccurate results."""
    lines = []
    for key, some in grouped(rows, attrgetter("precision", "contender", "arithmetic")).items():
        if errs := [row.error for row in some if row.error is not None]:
            wrong = sum(not row.is_accurate for row in some if row.error is not None)
            largest = max(errs, key=lambda error: (isnan(error), error))
            lines.append((*key, len(errs), f"{largest:.1e}", wrong))
    columns = ("precision", "contender", "multiplies in", "checked", "largest error", "not accurate")
    return ResultTable.of(
        "Errors against float64", columns, lines, "Relative, Frobenius. Inaccurate results count in no other table."
    )


def unreliable_note(rows: Sequence[ResultRow]) -> str:
    """Note on the rows with rough and with unreliable times; empty if there are none."""
    timed, doubtful = [row for row in rows if row.median_us is not None], [row for row in rows if row.doubt]
    rough, notes = sum(row.has_time for row in doubtful), []
    if count := len(doubtful) - rough:
        notes.append(f"{count} of {counted(len(timed), 'time')} are unreliable and count in no table.")
    if rough:
        notes.append(
            f"{rough} of {counted(len(timed), 'time')} are rough: their medians are uncertain by "
            f"{100 * MOST_WIDTH:.0f} to {percent(ROUGH_WIDTH)}. They count, but single ratios of them may be wrong by "
            "as much."
        )
    return " ".join(notes)


def unreliable(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of unreliable times: they are in the file, but no conclusion uses them. Rough times are not among them."""
    lines = []
    for row in (row for row in rows if row.doubt and not row.has_time):
        figures = (marked(number(row.median_us), row.doubt), number(row.fastest_us), row.doubt)
        job = row.layer if row.pattern == WHOLE else row.pattern
        lines.append((job, row.batch, row.precision, row.layout, row.contender, *figures))
    columns = ("pattern", "batch", "precision", "layout", "contender", "median, us", "fastest, us", "why")
    note = "They count in no other table. On a quiet machine, measure them again."
    return ResultTable.of("Unreliable times", columns, lines, note)


def absent(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of contenders without a time, with the reason; equal reasons appear once."""
    groups = grouped(
        (row for row in rows if row.status != OK),
        lambda row: (row.contender, row.status, row.reason if row.status == "failed" else ""),
    )
    lines = [(*key[:2], len(some), key[2] or f"such as {some[0].reason}") for key, some in groups.items()]
    return ResultTable.of("Not measured", ("contender", "status", "jobs", "why"), lines)


# ---- layers: each contender's time over that of one launch, or over that of a `KSLinear` in training


def reference_of(step: str) -> str:
    """Contender whose time the others' are divided by: launches record no gradients."""
    return ONE_LAUNCH if step == FORWARD else LAYER


def compared_with(reference: str) -> tuple[str, ...]:
    """All other contenders for layers."""
    return tuple(name for name in METHODS if name != reference and (reference == ONE_LAUNCH or name in OTHER_METHODS))


def layers_by_kind(rows: Sequence[ResultRow]) -> Iterator[tuple[Results, str, bool]]:
    """Results of comparable layers or products, with their layout and whether they are groups. Forward is first."""
    kinds = dict.fromkeys(
        (row.precision, row.layout, row.batch, AND in row.pattern, bool(row.layer), row.step)
        for row in rows
        if row.layout in LAYOUTS  # an incomplete row has none
    )
    for precision, layout, batch, is_group, is_layer, step in sorted(kinds, key=lambda kind: kind[-1] != FORWARD):
        some = [row for row in rows if (is_group, is_layer) == (AND in row.pattern, bool(row.layer))]
        yield Results(some, precision, batch, step), layout, is_group


def headlines(rows: Sequence[ResultRow]) -> ResultTable:
    """Summary of a `KSLinear` compared with the best of all others, per step, precision, layout and batch.

    Rows are of layers, or of products, which are layers of one factor. Those where an unreliable time may be the best
    are left out.
    """
    lines = []
    for results, layout, is_group in layers_by_kind(rows):
        if ratios := results.over(LAYER, EVERYONE, layout):
            least, is_product = min(ratios, key=ratios.__getitem__), not results.rows[0].layer
            kernels = results.over(OURS if is_product else ONE_LAUNCH, EVERYONE, layout)
            words = f"{STEP_TITLES[results.step]}{', groups' * is_group}{', patterns' * is_product}"
            kind = (words, results.precision, layout, results.batch, f"{len(ratios)} of {len(results.best[layout])}")
            wins = percent(Duel(tuple(ratios.values())).share)
            lines.append((*kind, *spread(ratios.values()), wins, least.partition(": ")[0], *spread(kernels.values())))
    note = (
        "Ratios are the fastest time of the contenders that are not ksgen's, over that of a `KSLinear`: above "
        "x1 ksgen is faster. Layers in which an unreliable time may be the fastest are left out. In forward rows, the "
        "`KSLinear` is frozen; a training step includes the gradients of x, of all weights and of the bias. The last "
        "three columns have such ratios for ksgen's fastest kernel of a pattern, or for one launch of a layer."
    )
    columns = (
        "step", "precision", "layout", "batch", "layers", "mean", "least", "most", "faster in", "layer of the least",
        "kernel, mean", "least", "most",
    )  # fmt: skip
    others, doubts = measured_note(rows, EVERYONE), unreliable_note(rows)
    return ResultTable.of("KSLinear compared with the best of all others", columns, lines, note, others, doubts)


def standings(rows: Sequence[ResultRow]) -> ResultTable:
    """Summary of all contenders: times over those of a `KSLinear`, and jobs in which each is the fastest of all."""
    ratios: dict[tuple[str, str], list[float]] = {}
    firsts: Counter[tuple[str, str]] = Counter()
    names, parts = (OURS, *OUR_METHODS, LAYER, *EVERYONE), dict[str, None]()
    for results, layout, _ in layers_by_kind(rows):
        work = "layers" if results.rows[0].layer else "patterns"
        part = f"{work}, {STEP_TITLES[results.step]}, {results.precision}"
        for name in names:
            ratios.setdefault((name, part), []).extend(results.over(LAYER, [name], layout).values())
        for job in results.over(LAYER, EVERYONE, layout):
            firsts[results.fastest(names, layout, job), part] += 1
            parts[part] = None
    lines = []
    for name in names:
        cells = ((ratios[name, part], firsts[name, part]) for part in parts)
        shown = [f"{spread(found)[0]} ({first} of {len(found)})" if found else None for found, first in cells]
        if any(shown):
            lines.append((name, *shown))
    note = (
        "Time of each contender over that of a `KSLinear`: the geometric mean over all layouts and batches. In "
        "brackets: in how many jobs it is the fastest of all, out of those in which its time and that of the "
        "`KSLinear` count."
    )
    return ResultTable.of("Each contender compared with a KSLinear", ("", *parts), lines, note)


def layers_summary(rows: Sequence[ResultRow]) -> ResultTable:
    """Summary of layers: each contender over the reference of its step, per precision, layout and batch."""
    lines = []
    for results, layout, is_group in layers_by_kind(rows):
        reference = reference_of(results.step)
        title = f"{results.precision} {layout} {results.batch}{' groups' * is_group}"
        title += "" if results.step == FORWARD else f" {results.step}"
        for name in compared_with(reference):
            if ratios := results.over(reference, [name], layout).values():
                lines.append((title, name, f"{len(ratios)} of {len(results.best[layout])}", *spread(ratios)))
                title = ""
    note = (
        "Time of each contender over that of one launch, or in training over that of a `KSLinear`. The mean is "
        "geometric, over the layers with two times that count."
    )
    title = "Layers: every contender compared with one launch, or in training with a `KSLinear`"
    return ResultTable.of(title, ("", "", "layers", "mean", "least", "most"), lines, note)


def each_layer(rows: Sequence[ResultRow]) -> Iterator[ResultTable]:
    """Tables with one line per layer or product. In training, contenders that have no time there have no column."""
    for results, layout, is_group in layers_by_kind(rows):
        reference = reference_of(results.step)
        found = {name: results.over(reference, [name], layout) for name in compared_with(reference)}
        if results.step != FORWARD:
            found = {name: each for name, each in found.items() if each}
        names, ratios, words = tuple(found), list(found.values()), reference.replace("_", " ")
        lines = []
        for layer, best in results.best[layout].items():
            cells = NONE, NONE, NONE
            if one := best.get(reference):
                by = ", ".join(filter(None, (one.family, one.arithmetic)))
                cells = number(one.us), percent(one.share_of_floor), by
            lines.append((layer, *cells, *(times(each.get(layer)) for each in ratios)))
        for title, statistic in (("geometric mean", geometric_mean), ("median", median), ("least", min), ("most", max)):
            lines.append((title, "", "", "", *(times(statistic(each.values())) if each else NONE for each in ratios)))
        subject = "layer" if results.rows[0].layer else "pattern"
        title = f"{subject.title()}s, {results.precision}, {LAYOUT_WORDS[layout]}, batch {results.batch}"
        title += ", groups" * is_group
        title += "" if results.step == FORWARD else f", {STEP_TITLES[results.step]}"
        columns = (subject, f"{words}, us", "of the floor", "by", *names)
        note = f"{', '.join(names)}: times as long as {words} takes; above 1, {words} is faster." if names else ""
        if any(figure not in ("", NONE) for _, *figures in lines for figure in figures):
            yield ResultTable.of(title, columns, lines, note, "Only times that count, of right results.")


def wholes(rows: Sequence[ResultRow]) -> ResultTable:
    """Table of whole models: milliseconds with `KSLinear` layers, and every contender's time over that."""
    names = [name for name in METHODS_OF_MODELS if name != LAYER]
    lines = []
    for results, layout, _ in layers_by_kind(rows):
        ratios = {name: results.over(LAYER, [name], layout) for name in names}
        for job, best in results.best[layout].items():
            if one := best.get(LAYER):
                kind = (job.partition(": ")[0], STEP_TITLES[results.step], results.precision, results.batch)
                lines.append((*kind, number(one.us / 1e3), *(times(ratios[name].get(job)) for name in names)))
    columns = ("model", "step", "precision", "sequences", f"{LAYER}, ms", *names)
    note = (
        f"{', '.join(names)}: times as long as the model with `KSLinear` layers takes. Forward, these are frozen; a "
        "training step includes the gradients of all parameters."
    )
    return ResultTable.of("Whole models", columns, lines, note)


# ---- full models: results of `ksgen bench model` and `ksgen bench share`

OF_MATRICES = "N: the features; a linear layer is named as its matrix, outputs x inputs."
ACCEPTED = "the JSON of `ksgen bench model` or `ksgen bench share`"


def tables_of(path: Path) -> list[ResultTable]:
    """Read Tables 4, 6 and 7 from one file."""
    with reading(path, ACCEPTED):
        text = read(path, MOST_BYTES_OF_FILE)
    try:
        content = json.loads(text)
        return [shares(content)] if "shares" in content else models(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KsgenError(
            f"{path}: not a file of this kind ({type(error).__name__}: {error}); accepted: {ACCEPTED}"
        ) from error


def models(content: Mapping[str, Any]) -> list[ResultTable]:
    """Tables per precision and step, sparse over dense."""
    found = []
    for (precision, step), rows in grouped(content["rows"], itemgetter("precision", "step")).items():
        lines, backends = [], dict.fromkeys(row["backend"] for row in rows)
        for module, some in grouped(rows, itemgetter("module")).items():
            cells: dict[str, str | None] = dict.fromkeys(backends)  # a killed run lacks some
            for row in some:
                ratio = marked("{median:.2f}", row["doubt"]) + " ({low:.2f}-{high:.2f})"
                cells[row["backend"]] = ratio.format(**row["ratio"])
            dense, paper = some[0]["dense_us"]["median"] / 1e3, some[0]["paper_ratio"]
            lines.append((module, f"{dense:.3f}", *cells.values(), f"{paper:.2f}" if paper else ""))
        sparse = content.get("layers", LAYERS)
        only = "" if len(sparse) == len(LAYERS) else f" with sparse {', '.join(sparse)} alone"
        where = f"{content['model']}{only} on {content['device']}, batch {content['batch']}"
        title = f"{where}, {precision}, {STEP_TITLES.get(step, step)}"
        columns = ("module", "dense, ms", *backends, "the paper")
        note = f"Tables 4 and 7: sparse over dense, the median of {content['repeats']} rounds (quartiles)."
        is_papers = any(row["paper_ratio"] for row in rows)
        paper_note = f"The paper: its own kernel, ViT-S/16 in float32 on an A100. {OF_MATRICES}" if is_papers else ""
        found.append(ResultTable.of(title, columns, lines, note, paper_note, _why_marked(rows)))
    return found


def shares(content: Mapping[str, Any]) -> ResultTable:
    """Table 6 from the results of `ksgen bench share`."""
    rows = content["shares"]
    lines = []
    for row in rows:
        figures = (number(row["whole_us"] / 1e3), marked(percent(row["share"]), row["doubt"]), percent(row["paper"]))
        lines.append((row["model"], row["precision"], *figures))
    columns = ("model", "precision", "forward pass, ms", "feed-forward linear layers", "the paper")
    title = f"Table 6: the share of a forward pass, batch {content['batch']} on {content['device']}"
    return ResultTable.of(
        title, columns, lines, "Dense layers, timed alone, in turn with the full model.", _why_marked(rows)
    )


def _why_marked(rows: Sequence[Mapping[str, Any]]) -> str:
    first = next((row["doubt"] for row in rows if row["doubt"]), "")
    return f"{MARK}: unreliable ({first})." if first else ""
