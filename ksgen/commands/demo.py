"""`ksgen demo`."""

import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from ksgen.commands.common import (
    SPEC,
    check_memory,
    console,
    device_option,
    find_spec,
    json_option,
    output_folder,
    print_json,
    progress,
    say_if_busy,
)
from ksgen.commands.figures import choice_figures, kernel_figures
from ksgen.devices.base import CPU_BATCH, GPU_BATCH, default_batch
from ksgen.spec import KernelSpec
from ksgen.words import counted

if TYPE_CHECKING:
    from ksgen.devices.base import Device
    from ksgen.launcher import Call
    from ksgen.measure.trust import Blocks
    from ksgen.measure.verify import Problem


@click.command("demo", short_help="Emit, build, check and time a whole spec.")
@click.argument("spec", type=SPEC, default=Path("specs/vit.yaml"))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write.  [default: generated/<spec name>]")
@click.option("--batch", type=click.IntRange(min=1), help=f"Batch size.  [default: {GPU_BATCH} on a GPU, {CPU_BATCH} on a processor]")
@device_option
@json_option
def command(spec: Path, output: Path | None, batch: int | None, device: str | None, as_json: bool) -> None:
    """Emit a spec, build it, check every kernel against a float64 reference, time it, and show a table. Exit code 1 if
    a check fails.

    \b
    Examples:
      ksgen demo
      ksgen demo specs/gpt2.yaml --batch 512
    """
    from ksgen.devices import find_device
    from ksgen.emit.render import emit
    from ksgen.launch.choice import limits_of
    from ksgen.spec import load

    loaded = load(find_spec(spec))
    where = find_device(device)
    folder = output_folder(output, loaded)
    entries = batch or default_batch(where.limits)
    for kernel in loaded.kernels:
        check_memory(kernel, kernel.batch or entries, limits_of(where), loaded.batch_places.get(kernel))
    emit(loaded, folder)
    note = ", a smaller batch than a GPU's 25088, as there is none here" if where.limits.is_cpu and not batch else ""
    if not as_json:
        kernels = counted(len(loaded.kernels), "kernel")
        click.echo(f"{kernels} of {loaded.name} in {folder}; on {where.name} ({where.runtime}), batch {entries}{note}.")
    say_if_busy()
    rows = _measure_all(where, loaded.kernels, entries)
    if as_json:
        print_json({"device": where.name, "batch": entries, "kernels": rows})
    else:
        _print(rows)
    if not all(row["passed"] for row in rows):
        sys.exit(1)


def _measure_all(device: "Device", kernels: tuple[KernelSpec, ...], default_batch: int) -> list[dict[str, Any]]:
    from ksgen.measure.verify import make_problem, measure

    rows = []
    with progress() as bar:
        task = bar.add_task("building, checking and timing", total=len(kernels), now="")
        for kernel in kernels:
            bar.update(task, now=kernel.name)
            batch = kernel.batch or default_batch
            is_called = device.shares_host and kernel.job == "multiply"
            measured = measure(device, kernel, batch, runs=0 if is_called else 1)
            *called, numpy = _beside_numpy(device, make_problem(kernel, batch), is_called)
            ours = called[0] if called else measured.seconds
            rows.append(
                {
                    **kernel_figures(kernel, batch),
                    **choice_figures(measured.plan.choice.family, measured.plan.choice.constants),
                    "error": measured.error,
                    "tolerance": measured.tolerance,
                    "passed": measured.passed,
                    "median_us": ours.median * 1e6,
                    "others_share": numpy.others_share,
                    "doubt": ours.doubt,
                    "numpy_us": numpy.median * 1e6,
                    "numpy_doubt": numpy.doubt,
                }
            )
            bar.advance(task)
    return rows


def _beside_numpy(device: "Device", problem: "Problem", is_called: bool) -> "list[Blocks]":
    """Seconds of a product on host arrays as users call it, if kernels use host memory, and of NumPy's product, in
    turns."""
    from ksgen.measure.trust import block_of, take_blocks
    from ksgen.measure.verify import host_call, numpy_way

    timers = [block_of(lambda runs: [numpy_way(problem)[0] for _ in range(runs)])]
    if is_called:
        call = host_call(device, problem)
        timers.insert(0, block_of(lambda runs: [_seconds_of(call) for _ in range(runs)]))
    return take_blocks(timers, on_processor=True)


def _seconds_of(call: "Call") -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from ksgen.measure.trust import marked, told

    table = Table()
    for title in ("pattern", "precision", "layout"):
        table.add_column(title)
    for title in ("error", "", "time, us", "NumPy, us"):
        table.add_column(title, justify="right")
    for row in rows:
        verdict = "[green]ok[/]" if row["passed"] else f"[red]over {row['tolerance']:.1e}[/]"
        times = [marked(f"{row[us]:.0f}", row[why]) for us, why in (("median_us", "doubt"), ("numpy_us", "numpy_doubt"))]
        job = "" if row["job"] == "multiply" else f", {row['job']}"
        table.add_row(f"{','.join(map(str, row['pattern']))}{job}", row["precision"], row["layout"], f"{row['error']:.1e}", verdict, *times)
    console().print(table)
    passed = sum(row["passed"] for row in rows)
    numpy = "NumPy: permute, batched matrix product, permute back, on this processor"
    click.echo(f"{passed} of {counted(len(rows), 'kernel')} agree{'s' * (len(rows) == 1)} with float64. {numpy}.")
    if said := told([row[why] for row in rows for why in ("doubt", "numpy_doubt")]):
        click.echo(said)
