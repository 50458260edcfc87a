"""README's figures, written from the result files under benchmarks/results.

    python benchmarks/readme_figures.py [--check]

Each GPU and each processor has a table. A picture next to the file is shown, and the line in `machine.txt` is the
heading. Never edit the figures by hand: `--check` exits with 1 if README differs.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from ksgen.bench.report import machine_of
from ksgen.bench.rows import Row, read_rows
from ksgen.bench.tables import markdown, overview, processors
from ksgen.devices.base import PROCESSOR_RUNTIMES

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: python benchmarks/readme_figures.py -->\n", "<!-- end of figures -->\n"
NOTHING = "Nothing has been measured on a GPU yet.\n"


def results(folder: Path) -> Iterator[tuple[Path, list[Row]]]:
    """Result file of each device, in its newest form: the log, or the table exported from it."""
    for place in sorted(folder.glob("*/")):
        path = next((place / name for name in ("paper.jsonl", "paper.csv") if (place / name).exists()), None)
        if path and (rows := read_rows(path)):
            yield path, rows


def figures(folder: Path) -> str:
    parts, is_gpu = [], False
    for path, rows in results(folder):
        latest = max(rows, key=lambda row: row.date)
        on_gpu = latest.runtime not in PROCESSOR_RUNTIMES
        is_gpu |= on_gpu
        made = f"{latest.device}, {_when(rows)}"
        picture = path.with_suffix(".png")
        shown = f"\n![speed-ups and shares of the floor, sorted]({picture.relative_to(ROOT)})\n" if picture.exists() else ""
        table = (overview if on_gpu else processors)(rows)
        table = replace(table, title=machine_of(path) or table.title)
        parts.append(f"{markdown(table)}\n{made}; all of it: `ksgen bench report {path.relative_to(ROOT)}`.\n{shown}")
    return "\n".join(parts if is_gpu else [NOTHING, *parts])


def _when(rows: list[Row]) -> str:
    """Date and commit of the rows; per precision and batch if they differ."""
    found: dict[str, list[str]] = {}
    for row in rows:
        known = found.setdefault(f"{row.date}, commit {row.commit[:12] or 'unknown'}", [])
        if (named := f"{row.precision} at batch {row.batch}") not in known:
            known.append(named)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)}: {when}" for when, names in found.items())


def updated(readme: str, shown: str) -> str:
    """Replace the figures between README's marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise click.ClickException(f"README.md has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}{shown}{END}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where README differs.")
def main(check: bool) -> None:
    """Write README's figures."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = updated(text, figures(ROOT / "benchmarks" / "results"))
    if check:
        raise SystemExit(new != text)
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
