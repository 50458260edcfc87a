"""`ksgen bench` and `ksgen bench report`. The subcommands that measure are in other modules of this package."""

from pathlib import Path

import click

from ksgen.commands import bench_layers, bench_models, bench_products
from ksgen.commands.bench_common import LOG
from ksgen.commands.common import REPLACED, named_file
from ksgen.files import write
from ksgen.spec.kernel import hint
from ksgen.values import excerpt


class _OrSpec(click.Group):
    """Group that accepts a spec in place of a subcommand: it measures the spec's layers and writes a page."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0].endswith((".yaml", ".yml")):
            return "layers", bench_layers.command, ["-o", f"{Path(args[0]).stem}.jsonl", "--page", *args]
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(
                f"no command {excerpt(args[0])}; {hint(args[0], self.commands)}, or a spec such as specs/vit.yaml", ctx
            )
        return super().resolve_command(ctx, args)


@click.group("bench", cls=_OrSpec, subcommand_metavar="SPEC|COMMAND [ARGS]...")
def command() -> None:
    """Measure the layers of a spec on this machine, repeat the paper's experiments (products, energy, whole models),
    and report the results.

    \b
    Examples:
      ksgen bench specs/vit.yaml
      ksgen bench paper --subset 60 --time-limit 8m
      ksgen bench report paper.jsonl
      ksgen bench layers
      ksgen bench model vit-s16
    """


@click.command("report", short_help="Make a page, Markdown tables or a picture from a results file.")
@click.argument("file", type=click.Path(path_type=Path), default=LOG)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help=f"HTML page to write; {REPLACED}.  [default: next to FILE]"
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, allow_dash=True),
    help=f"Write only the tables, as Markdown, to this file, or - for standard output; {REPLACED}.",
)
@click.option("--svg", type=named_file, metavar="PATH", help=f"Draw the page's charts to this file; {REPLACED}.")
@click.option(
    "--with", "model_files", type=click.Path(path_type=Path), multiple=True,
    help="Also show the tables of this file, which `ksgen bench model -o` or `ksgen bench share -o` wrote. May be "
         "repeated.",
)  # fmt: skip
def report(
    file: Path, output: Path | None, markdown: Path | None, svg: Path | None, model_files: tuple[Path, ...]
) -> None:  # fmt: skip
    """Make one self-contained page from the results of `ksgen bench paper`, `layers` and `energy`.

    FILE is a .jsonl, .csv or .parquet file. The default is paper.jsonl. With --markdown or --svg, a page is written
    only if -o names one.

    \b
    Examples:
      ksgen bench report
      ksgen bench report h200.jsonl
      ksgen bench report h200.csv --markdown -
      ksgen bench report h200.jsonl --with vit-s16.json --with share.json
      ksgen bench report processor.jsonl --svg processor.svg
    """
    from ksgen.bench import report as pages
    from ksgen.bench.rows import read_rows
    from ksgen.bench.tables import tables_of

    rows, tables = read_rows(file), [table for path in model_files for table in tables_of(path)]
    machine = pages.machine_of(file)
    if markdown:
        _write(markdown, pages.markdown(rows, tables, machine))
    if svg:
        _write(svg, pages.picture(rows, machine))
    if output or not (markdown or svg):
        _write(output or file.with_suffix(".html"), pages.page(rows, tables, machine))


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        click.echo(text)
        return
    write(path, text)
    click.echo(f"{path}: {len(text) / 1e3:.0f} kB")


for subcommand in (
    bench_products.paper,
    bench_layers.command,
    bench_products.energy,
    report,
    bench_models.share_command,
    bench_models.model_command,
):
    command.add_command(subcommand)
