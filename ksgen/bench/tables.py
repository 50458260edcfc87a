"""The report's tables, each with the paper's numbers beside it. Only text: pages and Markdown show the same tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from ksgen.bench.comparison import BEST, UNTUNED, Duel, Results, comparisons, gains, group_by
from ksgen.bench.published import Claim, claim, published, published_us
from ksgen.bench.roster import EXPERTS, OTHERS, OURS, PAPERS
from ksgen.bench.rows import OK, Row
from ksgen.measure.roofline import NO_FLOOR
from ksgen.measure.trust import marked
from ksgen.spec import LAYOUTS
from ksgen.words import counted, spanned

NONE = "-"  # in a cell without a figure
LAYOUT_WORDS = {"bsf": "batch-size-first", "bsl": "batch-size-last", BEST: "best layout of each"}


@dataclass(frozen=True)
class Table:
    """Cells as text. The note is a sentence below the table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def markdown(table: Table) -> str:
    lines = [_markdown_line(table.columns), _markdown_line(["---"] * len(table.columns)), *map(_markdown_line, table.rows)]
    note = f"\n{table.note}\n" if table.note else ""
    return f"### {table.title}\n\n" + "\n".join(lines) + "\n" + note


def overview(rows: Sequence[Row]) -> Table:
    """One line per batch size, precision and layout: what a reader wants to know first."""
    lines = []
    for results in comparisons(rows):
        for layout in LAYOUTS:
            papers, all_others = (results.duel(OURS, names, layout) for names in (PAPERS, OTHERS))
            shares = [row.share_of_floor for row in results.best_rows(OURS, layout).values() if row.share_of_floor]
            if all_others.patterns:
                floor = percent(median(shares)) if shares else NONE
                which = (str(results.batch), results.precision, layout, str(all_others.patterns))
                lines.append((*which, *_beats(papers), *_beats(all_others), floor))
    columns = ("batch", "precision", "layout", "patterns", "five beaten", "median", "all beaten", "median", "of the floor")
    note = "Ours against the fastest of the paper's five, and of all others. Medians are over all patterns: above x1 ours is faster."
    note += f" {said}" if (said := in_doubt(rows)) else ""
    note += _without_floor(lines)
    return Table("Ours beside the others", columns, tuple(lines), note)


def _without_floor(lines: Sequence[tuple[str, ...]]) -> str:
    """Why a line ends without a share of the floor; empty if all have one."""
    return f" {NO_FLOOR}" if any(line[-1] == NONE for line in lines) else ""


def processors(rows: Sequence[Row]) -> Table:
    """A processor's results in short: a line per batch size, precision and layout."""
    lines = []
    for found in gains(rows):
        ratios, shares = [ratio for ratio, _ in found.pairs], [share for _, share in found.pairs if share]
        floor = (percent(median(shares)), percent(min(shares))) if shares else (NONE, NONE)
        speeds = (geometric_mean(ratios), min(ratios), max(ratios))
        wins = percent(sum(ratio > 1 for ratio in ratios) / len(ratios))
        lines.append((str(found.batch), found.precision, found.layout, str(len(ratios)), *map(_times, speeds), wins, *floor))
    columns = ("batch", "precision", "layout", "patterns", "mean", "least", "most", "faster in", "of the floor", "least share")
    note = "Ours against the fastest of PyTorch's ways, pattern by pattern: the geometric mean, least and most. The share is the median."
    note += _without_floor(lines)
    return Table("On a processor: ours beside the best of PyTorch", columns, tuple(lines), note)


def setting(rows: Sequence[Row]) -> Table:
    """Device, dates and commits; a file may hold several dates and commits."""
    names = ("device", "target", "driver", "runtime", "compiler", "torch", "baselines_on", "ksgen", "commit", "date")
    measured = [row for row in rows if row.measurements]
    facts = {name.replace("_", " "): {getattr(row, name) for row in rows} for name in names}
    facts |= {
        "batch": {", ".join(map(str, sorted({row.batch for row in rows})))},
        "measurements": {spanned((row.measurements for row in measured), number)},
    }
    facts |= {"runs in a measurement": {spanned((row.runs for row in measured), number)}}
    lines = [(name, ", ".join(sorted(filter(None, values)))) for name, values in facts.items()]
    return Table("Where and when", ("", ""), tuple(line for line in lines if line[1]))


def table3(results: Results) -> Table:
    precision = results.precision
    lines = [
        _line("bmm faster than einsum and bsr", results.duel("bmm", ("einsum", "bsr"), BEST), _claim("bmm_beats_einsum_bsr", precision)),
        _line("ksgen faster than the paper's five", results.duel(OURS, PAPERS, BEST), _claim("kernel_beats_all", precision)),
        _line("ksgen's defaults faster than these", results.duel(UNTUNED, PAPERS, BEST)),
        _line("ksgen faster than the expert's", results.duel(OURS, EXPERTS, BEST)),
        _line("ksgen faster than everyone", results.duel(OURS, OTHERS, BEST)),
    ]
    if precision == "float16":
        lines.append(
            _line(
                "bmm, bsr, einsum or ksgen faster than dense and sparse",
                _specialised(results),
                _claim("specialised_beats_dense_sparse", precision),
            )
        )
    return _shares(f"Table 3, {results.title}: everyone in the better of the two layouts", lines)


def table5(results: Results) -> Table:
    lines = []
    for layout in LAYOUTS:
        paper = _claim(f"kernel_beats_all_{layout}", results.precision)
        lines += [
            _line(f"{layout}: ksgen faster than min(bmm, einsum, bsr, dense, sparse)", results.duel(OURS, PAPERS, layout), paper),
            _line(f"{layout}: ksgen faster than the expert's", results.duel(OURS, EXPERTS, layout)),
        ]
    return _shares(f"Table 5, {results.title}: by layout", lines)


def table8(results: Results, layout: str) -> Table:
    """Every contender against every other."""
    names = results.names
    lines = []
    for one in names:
        duels = [None if one == other else results.duel(one, [other], layout) for other in names]
        lines.append((one, *("" if duel is None else _short(duel) for duel in duels)))
    title = f"Table 8, {results.title}, {LAYOUT_WORDS[layout]}: the row is faster than the column"
    return Table(title, ("", *names), tuple(lines), "Share of patterns, and the median factor where it is.")


def layouts(results: Results) -> Table:
    """Appendix B.5: the cost of a layout for each contender."""
    theirs = published()["layout_recomputed"] if results.precision == "float32" else {}
    names = [name for name in results.names if results.layouts_ratio(name)]
    by_name = {name: group_by(results.layouts_ratio(name), lambda pattern: pattern.d) for name in names}
    every_d = sorted({d for groups in by_name.values() for d in groups})
    lines = [
        (str(d), *(number(median(groups[d])) if d in groups else "-" for groups in by_name.values()), number(theirs.get(d)))
        for d in every_d
    ]
    paper = _claim("bsf_over_bsl", results.precision)
    if names:
        whole = (number(median(ratio for _, ratio in results.layouts_ratio(name))) for name in names)
        lines.append(("all", *whole, number(paper.factor if paper else None)))
    note = "Median of the time in batch-size-first over that in batch-size-last."
    return Table(f"Layouts, {results.title}", ("d", *names, "the authors' kernel"), tuple(lines), note)


def rewriting(results: Results) -> Table:
    """Appendix B.2 and Figure 4."""
    lines = []
    for layout in LAYOUTS:
        for ratio, shares in group_by(results.rewriting_share(layout), lambda pattern: pattern.rewrite_ratio).items():
            lines.append((layout, f"{ratio:.4f}", str(len(shares)), percent(median(shares)), percent(max(shares))))
    paper = _claim("rewriting_most", results.precision)
    note = f"The paper: up to {percent(paper.share)} ({paper.where}), growing with (b+c)/(bc)." if paper else ""
    columns = ("layout", "(b+c)/(bc)", "patterns", "median share", "largest")
    return Table(f"Share of bmm that rewrites memory, {results.title}", columns, tuple(lines), note)


def energy(rows: Sequence[Row]) -> Table:
    """Figure 7 in numbers."""
    lines = []
    for results in comparisons(rows):
        theirs = published()["energy_recomputed"].get(results.precision)
        for label, others in (("bmm and einsum", ("bmm", "einsum")), ("everyone", OTHERS)):
            ratios = [ratio for _, ratio in results.energy_ratios(OURS, others)]
            if ratios:
                paper = f"x{theirs['ratio']:.2f}, {percent(theirs['share'])}" if theirs and label != "everyone" else ""
                less = percent(sum(ratio < 1 for ratio in ratios) / len(ratios))
                lines.append((str(results.batch), results.precision, label, str(len(ratios)), f"x{median(ratios):.2f}", less, paper))
    idle = spanned((row.idle_watt for row in rows if row.idle_watt), number)
    note = f"Above idle, which was {idle} W. Below x1 ours takes less energy." if idle else ""
    columns = ("batch", "precision", "ours against", "patterns", "median", "takes less in", "the authors' kernel")
    return Table("Energy", columns, tuple(lines), note)


def authors(rows: Sequence[Row]) -> Table:
    """Pattern by pattern beside the times that the authors published, where the batch is theirs."""
    lines = []
    for results in comparisons([row for row in rows if row.batch == published()["batch"]]):
        precision = results.precision
        for layout in LAYOUTS:
            ours = results.best_rows(OURS, layout)
            for pattern, times in results.times(layout).items():
                theirs = published_us(pattern, precision, layout)
                if theirs and pattern in ours:
                    others = min((times[name] for name in OTHERS if name in times), default=None)
                    figures = (number(times[OURS]), number(others), number(theirs), f"x{theirs / times[OURS]:.2f}")
                    lines.append((pattern, precision, layout, *figures, percent(ours[pattern].share_of_floor)))
    columns = ("pattern", "precision", "layout", "ours, us", "best other, us", "the authors', us", "theirs over ours", "of the floor")
    note = (
        "The authors' times are of another GPU (not recorded; the float32 ones fit an A100), at the same batch: no comparison of kernels."
    )
    return Table("Beside the authors' own times", columns, tuple(sorted(lines, key=lambda line: (line[1], line[2]))), note)


def errors(rows: Sequence[Row]) -> Table:
    """Who is accurate, and who could not be measured."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.precision, row.implementation, row.arithmetic), []).append(row)
    lines = []
    for key, some in groups.items():
        checked = [row for row in some if row.error is not None]
        if checked:
            worst = max(row.error for row in checked if row.error is not None)
            wrong = sum(not row.is_accurate for row in checked)
            lines.append((*key, str(len(checked)), f"{worst:.1e}", str(wrong)))
    columns = ("precision", "contender", "multiplies in", "checked", "largest error", "not accurate")
    return Table("Errors against float64", columns, tuple(lines), "Relative, Frobenius. What is not accurate counts in no other table.")


def in_doubt(rows: Sequence[Row]) -> str:
    """A sentence about the rows whose times are in doubt; empty if there are none."""
    count, timed = sum(bool(row.doubt) for row in rows), sum(row.median_us is not None for row in rows)
    return f"{count} of {counted(timed, 'time')} cannot be trusted, and count in no table." if count else ""


def doubted(rows: Sequence[Row]) -> Table:
    """Times in doubt: they are in the file, and nothing is concluded from them."""
    some = [row for row in rows if row.doubt]
    lines = [
        (
            row.pattern,
            str(row.batch),
            row.precision,
            row.layout,
            row.implementation,
            marked(number(row.median_us), row.doubt),
            number(row.fastest_us),
            row.doubt,
        )
        for row in some
    ]
    columns = ("pattern", "batch", "precision", "layout", "contender", "median, us", "fastest, us", "why")
    return Table(
        "Times that cannot be trusted", columns, tuple(lines), "They count in no other table. On a quiet machine, measure them again."
    )


def absent(rows: Sequence[Row]) -> Table:
    """What has no time, and why; equal reasons once."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.status != OK:
            groups.setdefault((row.implementation, row.status, row.reason if row.status == "failed" else ""), []).append(row)
    lines = [(*key[:2], str(len(some)), key[2] or f"such as {some[0].reason}") for key, some in groups.items()]
    return Table("Not measured", ("contender", "status", "jobs", "why"), tuple(lines))


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _specialised(results: Results) -> Duel:
    """The best contender that uses the pattern against the best that does not."""
    found = []
    for times in results.times(BEST).values():
        those = [[times[name] for name in names if name in times] for names in ((OURS, "bmm", "bsr", "einsum"), ("dense", "sparse"))]
        if all(those):
            found.append(min(those[1]) / min(those[0]))
    return Duel(tuple(found))


def _claim(name: str, precision: str) -> Claim | None:
    found = published()["claims"].get(name)
    return claim(name) if found and found["precision"] == precision else None


def _line(what: str, duel: Duel, paper: Claim | None = None) -> tuple[str, ...]:
    theirs = ""
    if paper:
        factor = f" (x{paper.factor:.2f})" if paper.factor else ""
        theirs = f"{percent(paper.share)}{factor}, {paper.where}"
    where_faster, overall = duel.factor_where_faster, duel.factor
    return what, str(duel.patterns), percent(duel.share), _times(where_faster), _times(overall), theirs


def _shares(title: str, lines: Iterable[tuple[str, ...]]) -> Table:
    columns = ("", "patterns", "faster in", "median where it is", "median of all", "the paper")
    return Table(title, columns, tuple(line for line in lines if line[1] != "0"))


def _beats(duel: Duel) -> tuple[str, str]:
    return percent(duel.share), _times(duel.factor)


def _short(duel: Duel) -> str:
    if not duel.patterns:
        return "-"
    return percent(duel.share) + (f" (x{duel.factor_where_faster:.2f})" if duel.factor_where_faster else "")


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"x{factor:.2f}"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
