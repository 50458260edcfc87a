"""`ksgen demo`."""

import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import click

from ksgen.commands import common
from ksgen.devices.base import GPU_BATCH, default_batch
from ksgen.errors import KsgenError
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec, Spec, load
from ksgen.values import counted

if TYPE_CHECKING:
    from ksgen.devices.base import Device
    from ksgen.measure.trust import Blocks
    from ksgen.measure.verify import Problem

    Job = tuple[KernelSpec, int]  # a kernel and its batch

# log2 of the cycles for which NumPy's idle threads spin: longer than the pause between two of its products here
NUMPY_WAITS = 23
BMM_MEASUREMENTS = 7  # the result is their median
MOST_SECONDS = 0.5  # limit for the blocks of runs per contender and kernel


@click.command("demo")
@click.argument("spec", type=common.PATH, default=Path("specs/vit.yaml"))
@common.folder_option
@common.batch_option
@common.device_option
@common.json_option
def command(spec: Path, output: Path | None, batch: int | None, device: str | None, as_json: bool) -> None:
    """Emit a spec, build it, check every kernel against a float64 reference, time it alternately with NumPy, and show a
    table. Exit code 1 if a check fails. On a GPU, the demo first determines which kernels launchers take, like `ksgen
    calibrate`.

    \b
    Examples:
      ksgen demo
      ksgen demo specs/gpt2.yaml --batch 512
    """
    # Set this before NumPy is loaded. By default NumPy's threads spin for a tenth of a second after each product, and
    # each block of ours waits for their end.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", f"{NUMPY_WAITS}")
    from ksgen.devices import find_device
    from ksgen.emit.render import emit
    from ksgen.launch.choice import limits_of

    loaded = load(common.find_spec(spec))
    where = find_device(device)
    folder = common.output_folder(output, loaded)
    size = batch or default_batch(where.limits)
    for kernel in loaded.kernels:
        common.check_memory(kernel, kernel.batch or size, limits_of(where), loaded.batch_places.get(kernel))
    emit(loaded, folder)
    note = f", smaller than the default of GPUs, {GPU_BATCH}" if where.limits.is_cpu and not batch else ""
    if not as_json:
        kernels = counted(len(loaded.kernels), "kernel")
        click.echo(f"{kernels} of {loaded.name} in {folder}; on {where.name} ({where.runtime}), batch {size}{note}.")
    jobs = [(kernel, kernel.batch or size) for kernel in loaded.kernels]
    settled = _settle(f"{where.runtime}:{where.index}", loaded, size) if where.kind == "cuda" else ""
    _build_all(where, jobs)
    common.warn_if_busy()
    rows = _measure_all(where, jobs)
    if as_json:
        common.print_json({"device": where.name, "batch": size, "kernels": rows})
    else:
        _print(rows)
        _print_choices(rows, spec)
        if where.kind == "cuda":
            _print_gpu(rows, settled)
    if not all(row["passed"] for row in rows):
        sys.exit(1)


def _settle(device: str, spec: "Spec", batch: int) -> str:
    """Prove the GPU's families and try the spec's kernels; return a summary, or the reason why there is none.

    The demo uses defaults if no child process can use the GPU.
    """
    from ksgen.calibration.trials import opened
    from ksgen.commands.calibrate import make_passport, try_all
    from ksgen.tuning.job import job_of, kernels_of_spec

    try:
        passport = make_passport(device)
        with opened(device) as calibration:
            tried = try_all(calibration, [job_of(kernel, batch) for kernel in kernels_of_spec(spec)])
            if calibration.is_stopped:
                raise KeyboardInterrupt
    except KsgenError as error:
        return f"No trials: {error}"
    proven = "" if passport is None else f"Passport: {passport}. "
    return f"{proven}{sum(each.is_new for each in tried)} of {counted(len(tried), 'kernel')} tried now."


def bmm_us(device: "Device", kernel: KernelSpec, batch: int) -> float | None:
    """Microseconds of PyTorch's batched product between two permutations; on a GPU the product is cuBLAS's.

    None if PyTorch is missing, cannot use the GPU, or has no product in this precision. Gradients and exchanged outputs
    also give None.
    """
    from importlib.util import find_spec as find_module

    from ksgen.bench.roster import COMPARISONS

    is_comparable = kernel.job == "multiply" and not kernel.is_exchanged and kernel.precision in COMPARISONS
    if not is_comparable or not find_module("torch"):
        return None
    import torch

    if device.kind == "cuda":
        if not torch.cuda.is_available():
            return None
        torch.cuda.set_device(device.index)  # for events, and the busy work
    from ksgen.bench.contenders import contenders, torch_device
    from ksgen.bench.problem import product_job
    from ksgen.bench.timing import Protocol, Timed

    job = product_job(kernel.pattern, kernel.precision, kernel.layout, batch)
    (bmm,) = contenders(job, device, ("bmm",))
    problem = job.problem(torch_device(device), seed=0)
    protocol = Protocol(("bmm",), measurements=BMM_MEASUREMENTS, runs=10, most_seconds=MOST_SECONDS, seed=0)
    timed = Timed(bmm.prepare(problem), cycle(range(len(problem.sets))), protocol)
    return median(timed.seconds() for _ in range(timed.most_measurements)[:BMM_MEASUREMENTS]) * 1e6


def _build_all(device: "Device", jobs: "Sequence[Job]") -> None:
    """Compile all kernels on all cores before any is timed. A failure is reported when its kernel would be timed."""
    from ksgen.build.build import Request, build_many
    from ksgen.emit.render import render
    from ksgen.launch.planner import PLANNER

    requests = []
    for kernel, batch in jobs:
        choice = PLANNER.choice(device, kernel, batch)
        source = render(kernel, choice.constants, family=choice.family, dialect=device.dialect)
        requests.append(Request(source.text, source.entry, device.target))
    with common.progress() as bar:
        task = bar.add_task("building", total=len(requests), now="")
        build_many(
            requests, device.compiler(), on_done=lambda request, _: bar.update(task, advance=1, now=request.entry)
        )


def _measure_all(device: "Device", jobs: "Sequence[Job]") -> list[dict[str, Any]]:
    from ksgen.families import operand_of
    from ksgen.measure.roofline import measure_ceilings, share_of_floor
    from ksgen.measure.trust import Blocks, keep_freed_memory
    from ksgen.measure.verify import make_problem, measure, most_sets

    keep_freed_memory()  # NumPy's operands and results are new arrays at each call
    ceilings_of = cache(partial(measure_ceilings, device))
    rows = []
    with common.progress() as bar:
        task = bar.add_task("checking and timing", total=len(jobs), now="")
        for kernel, batch in jobs:
            bar.update(task, now=kernel.name)
            on_host_arrays = device.shares_host and kernel.job == "multiply"
            measured = measure(device, kernel, batch, runs=0 if on_host_arrays else 1)
            choice = measured.plan.choice
            *called, numpy = _in_turns_with_numpy(device, make_problem(kernel, batch), on_host_arrays)
            ours = called[0] if called else measured.seconds
            our_values = ours.values if called else [ours.median] * len(numpy.values)
            ratio = Blocks(
                tuple(theirs / own for theirs, own in zip(numpy.values, our_values, strict=True)), numpy.others
            )
            ceilings = ceilings_of(kernel.precision, operand_of(kernel, choice.constants))
            floor_us = ceilings.floor_us(kernel, batch, 1 if called else most_sets(device.limits.is_cpu))
            rows.append(
                {
                    **common.kernel_figures(kernel, batch),
                    **common.choice_figures(choice.family, choice.constants),
                    "why": choice.why,
                    **({"bmm_us": bmm_us(device, kernel, batch)} if device.kind == "cuda" else {}),
                    "error": measured.error,
                    "tolerance": measured.tolerance,
                    "passed": measured.passed,
                    "median_us": ours.median * 1e6,
                    "others_share": numpy.others_share,
                    "doubt": ours.why_unreliable,
                    "numpy_us": numpy.median * 1e6,
                    "numpy_doubt": numpy.why_unreliable,
                    "ratio": ratio.median,
                    "ratio_doubt": ratio.why_unreliable or ("" if called else ours.why_unreliable),
                    "floor_us": floor_us,
                    "share_of_floor": None if ours.why_unreliable else share_of_floor(floor_us, ours.median * 1e6),
                }
            )
            bar.advance(task)
    return rows


def _in_turns_with_numpy(device: "Device", problem: "Problem", on_host_arrays: bool) -> "list[Blocks]":
    """Measure the seconds of NumPy's product.

    With `on_host_arrays`, also measure ksgen's product on host arrays, alternately with NumPy's. Then ksgen's blocks
    are the first result, and NumPy's the second.
    """
    from ksgen.measure.trust import block_of, host_clock, take_blocks
    from ksgen.measure.verify import host_call, numpy_product

    timers = [block_of(lambda runs: [numpy_product(problem)[0] for _ in range(runs)])]
    if on_host_arrays:
        call = host_call(device, problem)
        timers.insert(0, block_of(lambda runs: [host_clock(call) for _ in range(runs)]))
    return take_blocks(timers, on_processor=True, most_seconds=MOST_SECONDS)


def _print_choices(rows: list[dict[str, Any]], spec: Path) -> None:
    """Print how many kernels were chosen by measured times, and the command that settles the others."""
    defaults = sum("wisdom" not in row["why"].split(",")[0] for row in rows)
    settled = f"{len(rows) - defaults} of {counted(len(rows), 'kernel')} chosen by measured times"
    click.echo(f"{settled}{f'; `ksgen calibrate {spec}` settles the others' if defaults else ''}.")


def _print_gpu(rows: list[dict[str, Any]], settled: str) -> None:
    """Print what the GPU decided, and ksgen's speed relative to cuBLAS and to the floor."""
    click.echo(settled)
    over_bmm = [row["bmm_us"] / row["median_us"] for row in rows if row["bmm_us"] and not row["doubt"]]
    of_floor = [row["share_of_floor"] for row in rows if row["share_of_floor"]]
    if over_bmm:
        product = "cuBLAS's batched product with its permutations"
        count = counted(len(over_bmm), "kernel")
        click.echo(f"{geometric_mean(over_bmm):.2f} times as fast as {product} (geometric mean of {count}).")
    if of_floor:
        click.echo(
            f"{geometric_mean(of_floor):.0%} of the floor (geometric mean of {counted(len(of_floor), 'kernel')})."
        )


def _print(rows: list[dict[str, Any]]) -> None:
    from ksgen.measure.roofline import NO_FLOOR
    from ksgen.measure.trust import describe_unreliable, marked

    lines = []
    for row in rows:
        job = "" if row["job"] == "multiply" else f" {row['job']}"
        figures = (f"{row['median_us']:.0f}", "doubt"), (f"{row['numpy_us']:.0f}", "numpy_doubt")
        verdict = "ok" if row["passed"] else f"over {row['tolerance']:.1e}"
        share = "" if row["share_of_floor"] is None else f"{row['share_of_floor']:.0%}"
        name = f"{Pattern(*row['pattern'])}{job}"
        each = (marked(figure, row[why]) for figure, why in figures)
        ratio = marked("" if row["ratio_doubt"] else f"{row['ratio']:.2f}x", row["ratio_doubt"])
        lines.append((name, row["precision"], row["layout"], f"{row['error']:.1e}", verdict, *each, ratio, share))
    columns = ("pattern", "precision", "layout", "error", "", "us", "NumPy us", "speed-up", "floor")
    common.print_columns(columns, lines, left=3)
    passed = sum(row["passed"] for row in rows)
    click.echo(f"{passed} of {counted(len(rows), 'kernel')} agree{'s' * (len(rows) == 1)} with float64.")
    click.echo("NumPy: permute, batched matrix product, permute back, on this processor, timed alternately with ksgen.")
    if known := [row["ratio"] for row in rows if not row["ratio_doubt"]]:
        span = f"geometric mean of {counted(len(known), 'reliable speed-up')}; {min(known):.2f}x to {max(known):.2f}x"
        click.echo(f"ksgen is {geometric_mean(known):.2f} times as fast as NumPy ({span}).")
    else:
        click.echo("No mean, as no speed-up is reliable: repeat the demo on a quiet machine.")
    if any(row["floor_us"] is None for row in rows):
        click.echo(NO_FLOOR)
    if unreliable := describe_unreliable([row[why] for row in rows for why in ("doubt", "numpy_doubt")]):
        click.echo(unreliable)
