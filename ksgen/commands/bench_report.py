"""`ksgen bench report`."""

from pathlib import Path

import click

from ksgen.commands.bench_common import LOG
from ksgen.commands.common import REPLACED, named_file
from ksgen.files import write


@click.command("report", short_help="Make a page, Markdown tables or a picture from a results file.")
@click.argument("file", type=click.Path(path_type=Path), default=LOG)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help=f"HTML page to write; {REPLACED}.  [default: next to FILE]"
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, allow_dash=True),
    help=f"Write only the tables, as Markdown, to this file, or - for the screen; {REPLACED}.",
)
@click.option("--svg", type=named_file, metavar="PATH", help=f"Draw the page's charts here; {REPLACED}.")
@click.option(
    "--with", "wholes", type=click.Path(path_type=Path), multiple=True,
    help="Show the tables of this file too, written by `ksgen bench model -o` or `ksgen bench share -o`; may be given "
         "again.",
)  # fmt: skip
def command(file: Path, output: Path | None, markdown: Path | None, svg: Path | None, wholes: tuple[Path, ...]) -> None:
    """Make one self-contained page from the results of `ksgen bench paper`, `layers` and `energy`.

    FILE is a .jsonl, .csv or .parquet file; paper.jsonl if not given. With --markdown or --svg there is no page unless
    -o names one.

    \b
    Examples:
      ksgen bench report
      ksgen bench report h200.jsonl
      ksgen bench report h200.csv --markdown -
      ksgen bench report h200.jsonl --with vit-s16.json --with share.json
      ksgen bench report processor.jsonl --svg processor.svg
    """
    from ksgen.bench import report
    from ksgen.bench.rows import read_rows
    from ksgen.bench.tables import tables_of

    rows, tables = read_rows(file), [table for path in wholes for table in tables_of(path)]
    machine = report.machine_of(file)
    if markdown:
        _write(markdown, report.markdown(rows, tables, machine))
    if svg:
        _write(svg, report.picture(rows, machine))
    if output or not (markdown or svg):
        _write(output or file.with_suffix(".html"), report.page(rows, tables, machine))


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        click.echo(text)
        return
    write(path, text)
    click.echo(f"{path}: {len(text) / 1e3:.0f} kB")
