"""Figures of README and of two pages of docs, written from the result files under benchmarks/results.

    python benchmarks/readme_figures.py [--check]

README shows known layers of one machine: a GPU's if there is one, else that of the `table` with the most, if enough.
docs/benchmarks.md has a part per GPU and processor, whose heading is the line in `machine.txt`. A folder's `table`, of
`ksgen bench table`, takes the place of its `paper` and `layers`. docs/structures.md has the layers of
`ksgen bench layers structures`: the file `structures` of a folder has their times. Never edit the figures by hand:
`--check` exits with 1 if a file differs, or if docs/benchmarks.md does not explain losses to a contender.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from textwrap import fill

import click

from ksgen.bench import tables
from ksgen.bench.chains import MeasuredLayer, structured
from ksgen.bench.comparison import Duel, Results, comparisons
from ksgen.bench.payoff import LEAST_GAIN, LEAST_KINDS, LEAST_PATTERNS, Judged, by_density, conversions, judge
from ksgen.bench.report import machine_of, picture
from ksgen.bench.roster import AND, EVERYONE, FORWARD, LAYER, OTHERS, OURS, STEP_TITLES, STEPS_OF_LAYERS
from ksgen.bench.rows import ResultRow, kinds_of, read_rows
from ksgen.bench.tables import NONE, ResultTable, layers_by_kind, markdown, number, percent, spread, times
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.figures.charts import Bars
from ksgen.figures.charts import picture as draw
from ksgen.measure.gains import PAPERS
from ksgen.measure.trust import MARK, marked
from ksgen.pattern import Chain, Pattern
from ksgen.spec import LAYOUTS
from ksgen.values import counted, spanned

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: python benchmarks/readme_figures.py -->\n", "<!-- end of figures -->\n"
NOTHING = "Nothing has been measured on a GPU yet.\n"
TABLE = "table"  # name of the files of `ksgen bench table`
LEAST_LAYERS = 8  # for which README prefers such a file
LOST = 0.95  # ratios below count as losses: two reliable times may differ by 5 % by chance
MOST_LOSSES = 40  # of a file that the page lists, the worst ones
LOSSES = "Where ksgen loses on processors"
WHY = "Why does ksgen lose there?"  # section that explains them
PRECISION, LAYOUT, BATCH = "float32", "bsf", 1568  # of README's layers: 8 images of ViT-S/16
FAMILIES = {
    "vit": "ViT-S/16",
    "gpt2": "GPT-2 medium",
    "monarch": "Monarch",
    "low rank": "low rank",
    "butterfly": "block butterfly",
    "btt": "BTT",
    "blast": "BLAST",
}
DRAWN = (
    "vit attention", "vit up", "vit down", "gpt2 qkv", "gpt2 projection", "gpt2 up", "gpt2 down",
    "monarch 1024 to 1024",
    # of `bench table`
    "ViT-S attention, monarch", "ViT-S up, monarch", "ViT-S down, monarch", "ViT-B up, monarch", "ViT-B up, low rank",
    "ViT-B up, btt", "ViT-B up, blast", "GPT-2 qkv, monarch",
)  # fmt: skip
PICTURE = "docs/layers.svg"


def results(folder: Path, *names: str) -> Iterator[tuple[Path, list[ResultRow]]]:
    """The first of these files of each device, in its newest form: the log, or the table exported from it."""
    for place in sorted(folder.glob("*/")):
        paths = (place / f"{name}.{ending}" for name, ending in product(names, ("jsonl", "csv")))
        path = next((path for path in paths if path.exists()), None)
        if path and (rows := _rows(path, path.stat().st_mtime_ns, path.stat().st_size)):
            yield path, rows


@cache  # README and docs/benchmarks.md show the same files
def _rows(path: Path, changed_ns: int, size: int) -> list[ResultRow]:
    return read_rows(path)


def on_gpu(rows: Sequence[ResultRow]) -> bool:
    return rows[0].runtime not in PROCESSOR_RUNTIMES


# ---- README: layers that people know


def readme_figures(folder: Path) -> tuple[str, str]:
    """README's part, and its picture; empty without measured layers."""
    measured = []
    for path, rows in results(folder, TABLE, "layers"):
        compared = Results([row for row in kinds_of(rows).layers if AND not in row.pattern], PRECISION, BATCH)
        if (table := _families(compared)).rows:
            layers = int(table.rows[-1][1]) if path.stem == TABLE else 0
            measured.append(((on_gpu(rows), layers if layers >= LEAST_LAYERS else 0), path, rows, compared, table))
    if not measured:
        return NOTHING, ""
    _, path, rows, compared, table = max(measured, key=lambda found: found[0])
    machine = machine_of(path) or rows[0].device
    panels = [panel for name in DRAWN for panel in _bars(compared, name)]
    state = "" if on_gpu(rows) else f"{_on_gpus(folder) or f'**{NOTHING.strip()}**'}\n\n"
    lead = f"**{machine}** ran layers in {PRECISION} at batch {BATCH} ({max(row.date for row in rows)}):"
    note = (
        "A `KSLinear`, ksgen's PyTorch layer, frozen for inference, is compared with the dense layer and the "
        "fastest of [all others](docs/benchmarks.md#whole-layers). "
        f"These are {tables.measured_names(compared.rows, EVERYONE)}. "
        "Speed-ups are geometric means; *the least* and *the most* are extremes over the best other. "
        "The floor is the longer time of memory traffic or arithmetic at peak rates; *floor / time* is a median."
    )
    picture = f"![microseconds of layers: dense, the fastest other method, ksgen]({PICTURE})"
    drawn = draw(f"Layers on {machine}, {PRECISION}, batch {BATCH}", panels)
    parts = (f"{state}{lead}", picture, markdown(table).partition("\n\n")[2].strip(), note, _all_in_all(rows))
    return "\n\n".join(filter(None, parts)) + "\n", drawn


def _all_in_all(rows: Sequence[ResultRow]) -> str:
    """A sentence on all work of a file but whole models, forward and in training."""
    kinds = layers_by_kind(kinds_of(rows).without_models)
    ratios = [ratio for found, layout, _ in kinds for ratio in found.over(LAYER, EVERYONE, layout).values()]
    if not ratios:
        return ""
    mean, least, most = spread(ratios)
    share = percent(Duel(tuple(ratios)).share)
    return (
        "On that machine, all batches and precisions, forward and in training, make "
        f"{counted(len(ratios), 'comparison')} with the best other method. A "
        f"`KSLinear` is faster in {share} of them. The mean speed-up is {mean}, the range {least} to {most} "
        "([where it loses](docs/benchmarks.md#where-ksgen-loses-on-processors))."
    )


def _on_gpus(folder: Path) -> str:
    """A sentence per GPU: products of the paper's patterns."""
    sentences = list[str]()
    for path, rows in results(folder, "paper"):
        if on_gpu(rows):
            found = [f"{cells[7]} in {cells[1]} {cells[2]}" for cells in tables.overview(rows).rows]
            sentences += (
                f"**{machine_of(path) or rows[0].device}** ran products of the patterns of the paper cited below, "
                f"at batch {rows[0].batch}. ksgen's fastest kernel is compared with the fastest of the "
                f"alternatives [{tables.measured_names(rows, OTHERS)}](docs/benchmarks.md#what-is-measured).",
                tables.arithmetic_note(rows),
                "In layout bsf, X is (batch, features); in bsl, (features, batch). "
                f"Median speed-ups: {', '.join(found)} ([all results](docs/benchmarks.md#results)).",
            )
    return " ".join(filter(None, sentences))


def _bars(compared: Results, name: str) -> Iterator[Bars]:
    for job, best in compared.best[LAYOUT].items():
        if job.partition(": ")[0] == name and LAYER in best and "dense" in best:
            factors = best[LAYER].pattern.partition(", ")[0]  # words on the epilogue follow
            chain = Chain(tuple(map(Pattern.parse, factors.split(" then "))))
            fastest = best[compared.fastest(EVERYONE, LAYOUT, job)].us
            bars = (("dense", best["dense"].us), ("best other", fastest), ("ksgen", best[LAYER].us))
            title = (
                f"{_shown(name)}, {chain.in_features} to {chain.out_features}"
                if "to" not in name.split()
                else _shown(name)
            )
            yield Bars(title, bars, frozenset({"ksgen"}), best[LAYER].floor_us)


def _families(compared: Results) -> ResultTable:
    """One line per family of layers. All columns cover the same layers."""
    over_best, over_dense = compared.over(LAYER, EVERYONE, LAYOUT), compared.over(LAYER, ["dense"], LAYOUT)
    shares, lines = compared.shares_of_floor(LAYER, LAYOUT), []
    for family, words in {**FAMILIES, "": "all of them"}.items():
        both = (job for job in over_best if job in over_dense and job in shares)
        # layers of `bench table` are named by model and kind, such as "ViT-S up, monarch"
        jobs = [job for job in both if job.startswith(family) or f", {family}" in job]
        if jobs:
            best, dense, floor = ([found[job] for job in jobs] for found in (over_best, over_dense, shares))
            lines.append((words, len(best), spread(dense)[0], *spread(best), percent(median(floor))))
    columns = (
        "model or kind",
        "layers",
        "speed-up over dense",
        "over the best other",
        "the least",
        "the most",
        "floor / time",
    )
    return ResultTable.of("Layers", columns, lines)


def _shown(name: str) -> str:
    family = next((each for each in FAMILIES if name.startswith(each)), "")
    return FAMILIES.get(family, "") + name.removeprefix(family)


# ---- docs/benchmarks.md: a part per machine


def benchmarks_figures(folder: Path, page: Path) -> tuple[str, dict[Path, str]]:
    """Tables of every machine for a page, and their pictures."""
    parts, pictures, is_gpu = [], {}, False
    measured = sorted(results(folder, TABLE, "paper"), key=lambda found: not on_gpu(found[1]))
    of_layers = [(path, rows) for path, rows in results(folder, TABLE, "layers") if path.stem != TABLE]
    layers = {path.parent: rows for path, rows in of_layers}
    for path, rows in measured:
        is_gpu |= on_gpu(rows)
        machine = machine_of(path)
        drawn = path.with_suffix(".svg")
        pictures[drawn] = picture(rows, machine)
        first, *more = _of_file(path, rows)
        made = f"{max(rows, key=lambda row: row.date).device}, {_when(rows)}"
        parts.append(markdown(replace(first, title=machine or first.title)))
        parts.append(f"{made}. All results: `ksgen bench report {path.relative_to(ROOT)}`.\n")
        parts.append(
            f"![speed-ups and shares of the floor, in ascending order]({os.path.relpath(drawn, page.parent)})\n"
        )
        for table in filter(lambda table: table.rows, more):
            title = f"{machine or rows[0].device}: {table.title[0].lower()}{table.title[1:]}"
            parts.append(markdown(replace(table, title=title)))
        if own := layers.get(path.parent):
            title = f"{machine or own[0].device}: whole layers"
            parts.append(markdown(replace(tables.headlines(own), title=title)))
            parts.append(markdown(replace(tables.standings(own), title=f"{title}, each contender")))
            converted = conversions(Results(own, PRECISION, BATCH), LAYOUT)
            parts += [markdown(replace(converted, title=f"{title}, conversion of weights"))] if converted.rows else []
            parts.append(
                f"{_when(own)}. All results: `ksgen bench report {(path.parent / 'layers.csv').relative_to(ROOT)}`.\n"
            )
    on_processors = [(path, rows) for path, rows in [*measured, *of_layers] if not on_gpu(rows)]
    papers = {str(path): rows for path, rows in results(folder, "paper") if not on_gpu(rows)}
    for table in (_losses(on_processors), _densities(measured), agreement(papers)):
        parts += [markdown(table)] if table.rows else []
    return "\n".join(parts if is_gpu else [NOTHING, *parts]), pictures


def _of_file(path: Path, rows: Sequence[ResultRow]) -> list[ResultTable]:
    """Tables of a file of `ksgen bench table`, or the one of a file of products."""
    if path.stem != TABLE:
        return [tables.overview(rows) if on_gpu(rows) else tables.processors(rows)]
    kinds = kinds_of(rows)
    work = kinds.without_models
    return [tables.headlines(work), tables.standings(work), tables.wholes(kinds.models), tables.versions(rows)]


def _losses(files: Sequence[tuple[Path, list[ResultRow]]]) -> ResultTable:
    """Reliable times where another contender is faster, on processors: than a `KSLinear`, or than kernels alone."""
    lines = []
    for path, rows in files:
        own, found = LAYER if any(row.implementation == LAYER for row in rows) else OURS, []
        for results, layout, _ in layers_by_kind(rows):
            for job, ratio in results.over(own, EVERYONE, layout).items():
                best, other = results.best[layout][job], results.fastest(EVERYONE, layout, job)
                what = job.partition(": ")[0] + (f", {STEP_TITLES[results.step]}" if own == LAYER else "")
                shown = marked(times(ratio), best[own].doubt or best[other].doubt)
                cells = (results.precision, layout, results.batch, other, shown, number(best[own].us))
                found.append((ratio, (machine_of(path) or rows[0].device, what, *cells)))
        lost = sorted((each for each in found if each[0] < LOST), key=lambda each: each[0])
        lines += [cells for _, cells in lost[:MOST_LOSSES]]
    columns = ("machine", "pattern or layer", "precision", "layout", "batch", "faster", "ratio", "ours, us")
    note = (
        "The ratio is the fastest other's time over ksgen's. ksgen's time is that of a `KSLinear`, or of the fastest "
        f"kernel if the patterns were measured without a `KSLinear`. The table has ratios below {LOST}, at most the "
        f"{MOST_LOSSES} worst of a file. `{MARK}` marks ratios with a rough time."
    )
    return ResultTable.of(LOSSES, columns, lines, note)


def _densities(products: Sequence[tuple[Path, list[ResultRow]]]) -> ResultTable:
    """Speed against density on every machine, at large batches."""
    lines, table = [], by_density(())
    for path, rows in products:
        table = by_density([row for row in kinds_of(rows).products if row.batch >= BATCH])
        lines += [(machine_of(path) or rows[0].device, *cells) for cells in table.rows]
    return ResultTable.of(table.title, ("machine", *table.columns), lines, table.note)


# ---- docs/structures.md: a layer per structure


def structures_figures(folder: Path) -> str:
    """Sizes of the measured structures, and their times on each machine."""
    layers = structured()
    parts = [markdown(_sizes(layers))]
    for path, rows in results(folder, "structures"):
        machine = machine_of(path) or rows[0].device
        parts += [markdown(each) for each in _structure_times(rows, [each.name for each in layers], machine)]
        parts.append(f"{_when(rows)}. All results: `ksgen bench report {path.relative_to(folder.parents[1])}`.\n")
    return "\n".join(parts)


def _sizes(layers: Sequence[MeasuredLayer]) -> ResultTable:
    lines = []
    for layer in layers:
        counts = [sum(map(prod, each.shapes.values())) for each in layer.structures if each]
        operations = sum(each.weight_count for each in layer.chains)
        dense = layer.chains[0].in_features * layer.chains[0].out_features
        lines.append((f"`{layer.name}`", f"{sum(counts):,}", f"{operations:,}", percent(operations / dense)))
    note = "Operations are the chain's multiply-adds per row of x. A dense layer has as many parameters as operations."
    return ResultTable.of("Sizes", ("layer", "parameters", "operations", "of the dense layer's"), lines, note)


def _structure_times(rows: Sequence[ResultRow], names: Sequence[str], machine: str) -> Iterator[ResultTable]:
    """A table per batch size: microseconds of each layer, precision and step."""
    ways = {LAYER: "ksgen", "authors": "authors", "dense": "dense"}
    columns = [f"{STEP_TITLES[step]}: {way}" for step in STEPS_OF_LAYERS for way in ways.values()]
    for batch in sorted({row.batch for row in rows}):
        lines = []
        for name, precision in product(names, dict.fromkeys(row.precision for row in rows)):
            own = [row for row in rows if row.layer == name and row.layout == LAYOUT]
            steps = (Results(own, precision, batch, step).best[LAYOUT] for step in STEPS_OF_LAYERS)
            found = [next(iter(each.values()), {}) for each in steps]
            cells = [number(best[way].us) if way in best else NONE for best in found for way in ways]
            if set(cells) != {NONE}:
                lines.append((f"`{name}`, {precision}", *cells))
        if lines:
            yield ResultTable.of(f"{machine}: {counted(batch, 'row')}, microseconds", ("layer", *columns), lines, "")


def agreement(kinds: Mapping[str, Sequence[ResultRow]]) -> ResultTable:
    """Table of the rules that kinds of processors find better than the paper's, by batch size, precision and layout."""
    found: dict[tuple[int, str, str], list[list[Judged]]] = {}
    for rows in kinds.values():
        for results, layout in product(comparisons(rows), LAYOUTS):
            ratios = results.ratios(OURS, OTHERS, layout)
            if len(ratios) >= LEAST_PATTERNS:
                found.setdefault((results.batch, results.precision, layout), []).append(judge(ratios))
    lines = []
    for job, each_kind in sorted(found.items()):
        if len(each_kind) >= LEAST_KINDS:
            rule = agreed(each_kind)
            shown = (_correlations(each_kind, name) if name else None for name in (PAPERS, rule))
            lines.append((*job, len(each_kind), next(shown), rule, next(shown)))
    columns = ("batch", "precision", "layout", "kinds", PAPERS, "better rule", "its rank correlation")
    note = (
        "Rank correlations of rules with the gain over the fastest of the others, on kinds of processors with "
        f"{counted(LEAST_PATTERNS, 'pattern')} or more. The rank correlation of a better rule exceeds that of the "
        f"paper's by {LEAST_GAIN} on each half of the patterns, on {LEAST_KINDS} kinds."
    )
    return ResultTable.of("What predicts the gain on processors", columns, lines, note)


def agreed(each_kind: Sequence[Sequence[Judged]]) -> str | None:
    """Rule that the most kinds of processors find better than the paper's; None if fewer than `LEAST_KINDS` do."""
    better = [each for judged in each_kind for each in judged if each.is_better]
    votes = Counter(each.rule for each in better)
    margins = {rule: sum(each.margin for each in better if each.rule == rule) for rule in votes}
    rule = max(votes, key=lambda name: (votes[name], margins[name]), default=None)
    return rule if rule and votes[rule] >= LEAST_KINDS else None


def _correlations(each_kind: Sequence[Sequence[Judged]], rule: str) -> str:
    found = (each.correlation for judged in each_kind for each in judged if each.rule == rule)
    return spanned(found, "{:.2f}".format)


def _when(rows: Sequence[ResultRow]) -> str:
    """Date and commit of the rows; per step, precision and batch if they differ."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for row in rows:
        named = f"{row.precision}{'' if row.step == FORWARD else f' in {row.step}'}"
        of_date = found.setdefault(f"{row.date}, commit {row.commit[:12] or 'unknown'}", {})
        of_date.setdefault(named, {})[str(row.batch)] = None
    if len(found) == 1:
        return next(iter(found))
    return ". ".join(f"{_measured_at(batches)}: {when}" for when, batches in found.items())


def _measured_at(batches: Mapping[str, Mapping[str, None]]) -> str:
    """Precisions and steps, those with equal batches together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for named, each in batches.items():
        alike.setdefault(tuple(each), []).append(named)
    return "; ".join(f"{AND.join(names)} at batch {', '.join(each)}" for each, names in alike.items())


def updated(path: Path, shown: str) -> str:
    """The text of a page with new figures between its marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise click.ClickException(f"{path.name} has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}{_wrapped(shown)}{END}{after}"


def _wrapped(text: str) -> str:
    """Wrap paragraphs at 120 columns; tables, headings and pictures stay."""
    return "\n".join(
        line if line.startswith(("|", "#", "!")) else fill(line, 120, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def unexplained(page: str) -> list[str]:
    """Contenders to which ksgen loses on a page, and which its section on the reasons does not name."""
    lost, reasons = (page.partition(title)[2].partition("\n#")[0] for title in (f"### {LOSSES}\n", f"## {WHY}\n"))
    names = [line.split(" | ")[5] for line in lost.splitlines() if line.startswith("| ")][2:]
    return [name for name in dict.fromkeys(names) if f"`{name}`" not in reasons]


def written(root: Path) -> dict[Path, str]:
    """Every file that shows figures, with its content."""
    folder, readme, page = root / "benchmarks" / "results", root / "README.md", root / "docs" / "benchmarks.md"
    structures = root / "docs" / "structures.md"
    (shown, layers), (machines, pictures) = readme_figures(folder), benchmarks_figures(folder, page)
    return {
        readme: updated(readme, shown),
        page: updated(page, machines),
        structures: updated(structures, structures_figures(folder)),
        **pictures,
        **({root / PICTURE: layers} if layers else {}),
    }


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where a file differs.")
def main(check: bool) -> None:
    """Write the figures of README, docs/benchmarks.md and docs/structures.md."""
    files = written(ROOT)
    for path, text in files.items():
        if check and not (path.exists() and path.read_text(encoding="utf-8") == text):
            raise click.ClickException(
                f"{path.relative_to(ROOT)} differs; write it again: python benchmarks/readme_figures.py"
            )
        if not check:
            path.write_text(text, encoding="utf-8")
    if names := unexplained(files[ROOT / "docs" / "benchmarks.md"]):
        raise click.ClickException(f"docs/benchmarks.md: {WHY!r} names no reason for {', '.join(names)}; add it")


if __name__ == "__main__":
    main()
