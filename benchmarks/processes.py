"""KSLinear on the processor in several processes, because one process may be lucky with its threads.

    python -m benchmarks.processes threads [--processes 10] > threads.jsonl
    python -m benchmarks.processes first-calls [--processes 3] > first.jsonl
    python -m benchmarks.processes threads --read threads.jsonl

`threads` times calls of frozen layers: with the number of threads that ksgen takes, and with one and two threads. Each
process prints its medians, and `--read` their median and 90th percentile over all processes. `first-calls` begins with
an empty cache, and calls a model until its kernels are compiled and timed. It prints the longest extra time of a call,
compared with PyTorch's products, and the time from the first call until kernels serve.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, sleep
from typing import Any, TextIO

import click
import torch
from torch import nn

from benchmarks.torch_cpu import inference, medians_us
from ksgen.bench import models
from ksgen.build.background import is_busy
from ksgen.measure.trust import keep_freed_memory
from ksgen.torch import KSLinear
from ksgen.torch.operators import replay
from ksgen.torch.operators.meanwhile import times_unsettled, waiting
from ksgen.torch.operators.prepared import Prepared
from ksgen.values import grouped

PATTERNS = (1, 192, 48, 2), (6, 64, 64, 1), (1, 128, 128, 3)
BATCHES = 1, 4, 16, 64, 256, 1024
WAYS = {"own": 0, "one": 1, "two": 2}  # numbers of threads; 0: ksgen chooses between one and two
WARM_UP = 100  # calls after which numbers of threads are chosen, and replays take over
CHAIN = (4, 48, 48, 1), (1, 256, 96, 2)
ROWS = 64
MOST_S = 300  # until kernels serve
USUAL, QUIET = 10, 5  # calls by PyTorch's products; calls without missing kernels or timing that end a run


@dataclass
class FixedThreads:
    """Stands in for `ThreadsByTime`, always with the same number of threads."""

    count: int

    def run(self, launch: Callable[[int, Any], object], threads: int, given: Any) -> None:
        launch(self.count, given)

    def settled(self, threads: int) -> tuple[int, int, int]:
        return self.count, sys.maxsize, 0

    def time_again(self) -> None:
        """Nothing is timed."""


def layer_with(threads: int, pattern: Sequence[int], x: torch.Tensor) -> nn.Module:
    """Frozen layer whose calls at this shape use that many threads; 0: as many as it chooses."""
    layer = KSLinear([pattern], bias=False, backend="ksgen").eval().freeze()
    with torch.no_grad(), waiting():
        for _ in range(WARM_UP if not threads else 2):  # the second call prepares
            layer(x)
    if threads:
        (call,) = (each for each in (layer._prepared_calls() or {}).values() if isinstance(each, Prepared))
        recording: Any = call.kernels and call.kernels.launch._recording
        recording._by_time = FixedThreads(threads)
        vars(layer).pop("_replay", None)
        with torch.no_grad():
            for _ in range(WARM_UP):
                layer(x)
    return layer


def time_threads(batches: Sequence[int], seconds: float) -> None:
    """Print a row of medians per pattern and batch."""
    replay.load_now()
    torch.set_num_threads(max(WAYS.values()))
    for pattern, batch in product(PATTERNS, batches):
        x = torch.randn(batch, pattern[2] * pattern[0] * pattern[3])
        jobs = {name: inference(layer_with(threads, pattern, x), x) for name, threads in WAYS.items()}
        took = {name: round(us, 2) for name, us in medians_us(jobs, seconds).items()}
        show({"pattern": ",".join(map(str, pattern)), "batch": batch, "us": took})


def show(row: Mapping[str, Any]) -> None:
    click.echo(json.dumps(row))
    sys.stdout.flush()


def one_layer() -> tuple[nn.Module, torch.Tensor]:
    layer = KSLinear(CHAIN)
    return layer, torch.randn(ROWS, layer.in_features)


def converted_vit() -> tuple[nn.Module, torch.Tensor]:
    model: Any = models.build("vit-s16")
    models.make_sparse(model, models.rule("vit-s16"), from_weights=False)
    return model, model.random_inputs(1)


MODELS = {"one layer": one_layer, "converted ViT": converted_vit}


def time_first_calls(name: str, idle_s: float) -> None:
    """Print a row for a model. The threads of the process are idle for some time after each call."""
    model, x = MODELS[name]()
    usual = deepcopy(model.eval())
    models.set_backend(usual, "strided")  # PyTorch's products, as in the first calls

    def timed(called: nn.Module) -> float:
        begin = perf_counter()
        called(x)
        seconds = perf_counter() - begin
        sleep(idle_s)
        return seconds

    with torch.no_grad():
        usual_s = median([timed(usual) for _ in range(USUAL)])
        gc.collect()  # else a full collection, which takes 0.1 s with PyTorch's objects, may fall into a call
        begin, took, quiet, served_s = monotonic(), list[float](), 0, 0.0
        while quiet < QUIET and monotonic() < begin + MOST_S:
            before, started = times_unsettled(), monotonic()
            took.append(timed(model))
            if before != times_unsettled() or is_busy():
                quiet = 0
                continue
            served_s = served_s if quiet else started - begin
            quiet += 1
    worst = max(range(len(took)), key=took.__getitem__)
    extra_ms = round(1e3 * (took[worst] - usual_s), 1)
    row = {"model": name, "usual_ms": round(1e3 * usual_s, 2), "longest_extra_ms": extra_ms, "at_call": worst + 1}
    show(row | {"calls": len(took), "seconds": round(served_s, 2), "is_served": quiet == QUIET})


def table_of_threads(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print, per pattern and batch, figures over all processes, and those of ksgen over the better of one and two."""
    click.echo("| pattern | batch | processes | figure | own, us | one | two | own / better |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (pattern, batch), group in grouped(rows, itemgetter("pattern", "batch")).items():
        for figure, of in (("median", median), ("90 %", ninth_tenth)):
            own, one, two = (of([row["us"][way] for row in group]) for way in WAYS)
            cells = pattern, batch, len(group), figure, f"{own:.1f}", f"{one:.1f}", f"{two:.1f}"
            click.echo(f"| {' | '.join(map(str, cells))} | {own / min(one, two):.2f} |")


def ninth_tenth(values: Sequence[float]) -> float:
    """90th percentile."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def table_of_first_calls(rows: Sequence[Mapping[str, Any]]) -> None:
    click.echo("| model | processes | PyTorch, ms | extra, ms: median | most | kernels after, s: median | most |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for model, group in grouped(rows, itemgetter("model")).items():
        cells: list[Any] = [model, len(group), f"{median(row['usual_ms'] for row in group):.2f}"]
        for name in ("longest_extra_ms", "seconds"):
            found = [row[name] if row["is_served"] else float("inf") for row in group]
            cells += [f"{of(found):.1f}" for of in (median, max)]
        click.echo(f"| {' | '.join(map(str, cells))} |")


def run_apart(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run this script in a process of its own, which prints its rows."""
    command = [sys.executable, "-m", "benchmarks.processes", *arguments]
    if subprocess.run(command, env={**os.environ, **variables}, check=False).returncode:
        raise click.ClickException(f"{' '.join(arguments)} failed")


@click.command()
@click.argument("what", type=click.Choice(["threads", "first-calls"]))
@click.option("--processes", default=10, show_default=True, help="Number of processes, which run sequentially.")
@click.option("--batch", "batches", default=BATCHES, multiple=True, show_default=True, help="Of `threads`.")
@click.option("--most-seconds", default=1.0, show_default=True, help="Most seconds per row of `threads`.")
@click.option("--idle-ms", default=20.0, show_default=True, help="Pause after each call of `first-calls`.")
@click.option("--only", default="", help="Only models of `first-calls` whose names contain this.")
@click.option("--read", type=click.File(), help="Print the table of rows that were printed.")
@click.option("--alone", default="", hidden=True, help="Measure here: a model, or threads.")
def main(
    what: str, processes: int, batches: tuple[int, ...], most_seconds: float, idle_ms: float, only: str,
    read: TextIO | None, alone: str,
) -> None:  # fmt: skip
    """Measure in several processes."""
    if read:
        rows = [json.loads(line) for line in read]
        (table_of_threads if what == "threads" else table_of_first_calls)(rows)
    elif alone:
        torch.manual_seed(0)
        keep_freed_memory()
        if what == "threads":
            time_threads(batches, most_seconds)
        else:
            time_first_calls(alone, idle_ms / 1e3)
    else:
        for _ in range(processes):
            if what == "threads":
                sizes = [word for batch in batches for word in ("--batch", str(batch))]
                run_apart(["threads", "--alone", "threads", "--most-seconds", str(most_seconds), *sizes], {})
                continue
            for name in (each for each in MODELS if only in each):
                with TemporaryDirectory() as folder:
                    variables = {"KSGEN_CACHE_DIR": folder, "KSGEN_COMPILE": "background"}
                    run_apart(["first-calls", "--alone", name, "--idle-ms", str(idle_ms)], variables)


if __name__ == "__main__":
    main()
