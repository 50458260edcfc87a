"""`ksgen bench paper`."""

import click

from ksgen.commands.bench_common import (
    Selection,
    check_library,
    job_options,
    measure,
    measurements_option,
    print_done,
    runs_option,
    seconds_option,
)
from ksgen.commands.common import json_option


@click.command("paper", short_help="Time ksgen's kernels against every baseline, as the paper does.")
@job_options
@measurements_option
@runs_option
@seconds_option(2.0)
@click.option(
    "--tune",
    metavar="BUDGET",
    help="First tune kernels without wisdom. Limit per kernel: 60s, or a number of candidates.",
)
@json_option
def command(
    selection: Selection, measurements: int, runs: int, most_seconds: float, tune: str | None, as_json: bool
) -> None:
    """Time our kernels against PyTorch's methods for the same product, taking turns, with errors and floors.

    A run that was stopped or killed continues when the same command is run again.

    \b
    Examples:
      ksgen bench paper --subset 60 --time-limit 8m -o h200.jsonl
      ksgen bench paper --patterns "1,192,48,2 2,48,192,1" --precision float32,float16 --without compiled
      ksgen bench report h200.jsonl -o h200.html
    """
    check_library("torch", "`ksgen bench paper`", "bench")
    from ksgen.bench.timing import Protocol, Times
    from ksgen.tuning.tuner import parse_budget

    parse_budget(tune)  # refused now, rather than at the first search
    protocol = Protocol(selection.contenders(), measurements, runs, most_seconds, selection.seed, tune)
    print_done(measure(selection, protocol, lambda device: Times()), as_json)
