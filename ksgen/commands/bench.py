"""`ksgen bench` and `ksgen bench report`. The subcommands that measure are in other modules of this package."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ksgen.bench.roster import OTHERS, OURS
from ksgen.commands import bench_common, bench_layers, bench_models, bench_table
from ksgen.commands.bench_common import Selection
from ksgen.commands.common import PATH, REPLACED, NamedPath, file_option, json_option, number_option
from ksgen.files import check_is_no_input, write
from ksgen.spec.kernel import hint
from ksgen.values import excerpt

if TYPE_CHECKING:
    from ksgen.bench.timing import Quantity
    from ksgen.devices.base import Device

MOST_SECONDS = 600  # limit of `ksgen bench energy` in seconds per contender and job
# largest d of the paper's patterns in `ksgen bench energy`, as in the paper's Figure 7
MOST_D = 64


@click.command("paper", short_help="Time ksgen's kernels against every baseline, as the paper does.")
@bench_common.job_options
@bench_common.measurements_option(10)
@bench_common.runs_option(10)
@bench_common.seconds_option(2.0)
@click.option(
    "--tune",
    metavar="BUDGET",
    help="First tune kernels without wisdom. BUDGET is the limit per kernel: 60s, or a number of candidates.",
)
@json_option
def paper(
    selection: Selection, measurements: int, runs: int, most_seconds: float, tune: str | None, as_json: bool
) -> None:
    """Time ksgen's kernels and PyTorch's methods for the same product, alternately.

    A job is one pattern in one precision and layout. The results include errors and floors. A floor is the least time
    that the device's memory and arithmetic permit. A run that was stopped or killed continues when the same command is
    run again.

    \b
    Examples:
      ksgen bench paper --subset 60 --time-limit 8m -o h200.jsonl
      ksgen bench paper --patterns "1,192,48,2 2,48,192,1" --precision float32,float16 --without compiled
      ksgen bench report h200.jsonl -o h200.html
    """
    bench_common.check_torch("`ksgen bench paper`")
    from ksgen.bench.timing import Protocol, Times
    from ksgen.tuning.tuner import parse_budget

    parse_budget(tune)  # raises errors now, rather than at the first search
    protocol = Protocol(selection.contenders(), measurements, runs, most_seconds, selection.seed, tune)
    bench_common.print_done(bench_common.measure(selection, protocol, lambda device: Times()), as_json)


@click.command("energy", short_help="Measure joules per run with the GPU's own counter, minus its idle power.")
@bench_common.job_options
@bench_common.measurements_option(10)
@number_option("--seconds", "length_s", help_text="Seconds per measurement.", usual=2.5, least=0.1)
@json_option
def energy(selection: Selection, measurements: int, length_s: float, as_json: bool) -> None:
    """Measure the energy per run of each contender on an NVIDIA GPU. The idle GPU's power is measured first, and its
    energy is subtracted.

    A job is one pattern in one precision and layout. By default, the patterns are the paper's with d up to 64. If -o
    names the log of `ksgen bench paper`, the rows of that log get joules in addition to times. Use the GPU for nothing
    else meanwhile.

    \b
    Examples:
      ksgen bench energy --subset 30 --precision float32,float16 --time-limit 30m -o h200.jsonl
      ksgen bench energy --patterns 1,192,48,2 --contenders ksgen,bmm,einsum --measurements 3
    """
    bench_common.check_torch("`ksgen bench energy`")
    from ksgen.bench.timing import Protocol

    protocol = Protocol(
        selection.contenders((OURS, *OTHERS)), measurements, most_seconds=MOST_SECONDS, seed=selection.seed
    )

    def quantity(device: "Device") -> "Quantity":
        import torch

        from ksgen.bench.contenders import torch_device
        from ksgen.bench.energy import Energies, EnergyError, Meter, find_handle, open_nvml

        if device.kind != "cuda":
            raise EnergyError(f"energy is measured on NVIDIA GPUs, by NVML; not {device.name} ({device.runtime})")
        nvml, where = open_nvml(), torch_device(device)
        uuid = getattr(torch.cuda.get_device_properties(where), "uuid", None)
        meter = Meter(nvml, find_handle(nvml, str(uuid) if uuid else None, device.index))
        return Energies(meter, meter.idle(), length_s)

    bench_common.print_done(bench_common.measure(selection, protocol, quantity, MOST_D), as_json)


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
      ksgen bench table
    """


@click.command("report", short_help="Make a page, Markdown tables or a picture from a results file.")
@click.argument("file", type=PATH, default=bench_common.LOG)
@click.option("-o", "--output", type=PATH, help=f"HTML page to write; {REPLACED}.  [default: next to FILE]")
@click.option(
    "--markdown",
    type=NamedPath(allow_dash=True),
    help=f"Write only the tables, as Markdown, to this file, or - for standard output; {REPLACED}.",
)
@file_option("--svg", help_text="Draw the page's charts to this file", metavar="PATH")
@click.option(
    "--with", "model_files", type=PATH, multiple=True,
    help="Also show the tables of this file, which `ksgen bench model -o` or `ksgen bench share -o` wrote. May be "
         "repeated.",
)  # fmt: skip
def report(
    file: Path, output: Path | None, markdown: Path | None, svg: Path | None, model_files: tuple[Path, ...]
) -> None:  # fmt: skip
    """Make one self-contained page from the results of `ksgen bench paper`, `layers`, `energy` and `table`.

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

    for path in (output, markdown, svg):
        if path:
            check_is_no_input(path, file, *model_files)
    rows, tables = read_rows(file), [table for path in model_files for table in tables_of(path)]
    machine = pages.machine_of(file)
    is_printed = "-" in map(str, (markdown, output))
    if markdown:
        _write(markdown, pages.markdown(rows, tables, machine), is_printed)
    if svg:
        _write(svg, pages.picture(rows, machine), is_printed)
    if output or not (markdown or svg):
        _write(output or file.with_suffix(".html"), pages.page(rows, tables, machine), is_printed)


def _write(path: Path, text: str, is_printed: bool) -> None:
    """Write a file, or print it if its name is `-`. If one is printed, the names of others go to standard error."""
    if str(path) == "-":
        click.echo(text)
        return
    write(path, text)
    click.echo(f"{path}: {len(text) / 1e3:.0f} kB", err=is_printed)


for subcommand in (
    paper,
    bench_layers.command,
    energy,
    report,
    bench_models.share_command,
    bench_models.model_command,
    bench_table.command,
):
    command.add_command(subcommand)
