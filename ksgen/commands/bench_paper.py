"""`ksgen bench paper`."""

from pathlib import Path
from time import monotonic

import click

from ksgen.commands.bench_common import (
    bar,
    check_library,
    contenders_named,
    default_batch,
    job_options,
    jobs_of,
    patterns_named,
    write_rows,
)
from ksgen.commands.common import json_option, print_json
from ksgen.errors import SpecError


@click.command("paper", short_help="The paper's experiment: our kernels beside every baseline.")
@job_options
@click.option("--measurements", type=click.IntRange(min=1), default=10, show_default=True, help="Of each contender; the median counts.")
@click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True, help="In one measurement.")
@click.option(
    "--most-seconds",
    type=click.FloatRange(min=0.001),
    default=2.0,
    show_default=True,
    help="Of one contender in one job; slower ones are measured less often.",
)
@json_option
def command(
    output: Path, subset: int | None, named: str | None, batch: int | None, precisions: tuple[str, ...] | None, layouts: tuple[str, ...],
    names: tuple[str, ...] | None, without: tuple[str, ...] | None, seconds: float | None, device: str | None, seed: int,
    measurements: int, runs: int, most_seconds: float, as_json: bool,
) -> None:  # fmt: skip
    """Measure our kernels beside PyTorch's ways of computing the same, in turn, with their errors and their floors.

    Goes on where the file ends: a run that was stopped, or killed, is continued by the same command.

    \b
    Examples:
      ksgen bench paper --subset 60 --time-limit 8m -o h200.jsonl
      ksgen bench paper --patterns "1,192,48,2 2,48,192,1" --precision float32,float16 --without compiled
      ksgen bench report h200.jsonl -o h200.html
    """
    check_library("torch", "`ksgen bench paper`", "pip install 'ksgen[bench]'")
    if output.suffix != ".jsonl":
        raise SpecError(f"-o {output}: the log is a .jsonl file; its rows go to the .csv beside it")
    from ksgen.bench.facts import run_facts
    from ksgen.bench.log import Log
    from ksgen.bench.roster import USUAL
    from ksgen.bench.runner import Protocol, Runner
    from ksgen.devices import find_device

    patterns = patterns_named(named, subset)
    protocol = Protocol(contenders_named(names, without), measurements, runs, most_seconds, seed)
    where = find_device(device)
    jobs = jobs_of(patterns, precisions or USUAL, layouts, batch or default_batch(where))
    deadline = monotonic() + seconds if seconds else float("inf")
    with Log(output) as log, bar() as report:
        done = Runner(log, where, protocol, run_facts(where), deadline, report).run(jobs)
    written = write_rows(output)
    if as_json:
        print_json({"device": where.name, "jobs": len(jobs), "done": done, "files": [str(output), *map(str, written)]})
    else:
        _print(output, written, where.name, done, len(jobs))


def _print(output: Path, written: list[Path], device: str, done: int, total: int) -> None:
    from rich.table import Table as Shown

    from ksgen.bench.rows import read_rows
    from ksgen.bench.tables import overview
    from ksgen.commands.common import console

    table = overview(read_rows(output))
    shown = Shown(title=table.title, caption=table.note)
    for name in table.columns:
        shown.add_column(name)
    for row in table.rows:
        shown.add_row(*row)
    console().print(shown)
    click.echo(f"{done} of {total} jobs are complete on {device}; rows in {', '.join(map(str, written))}.")
    if done < total:
        click.echo("The time was up: the same command goes on from here.")
    click.echo(f"ksgen bench report {output} makes a page of them.")
