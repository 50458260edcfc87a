"""`ksgen run`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import click

from ksgen.commands import common
from ksgen.commands.common import ACTIVATION, JOB, PATH, STRIDE
from ksgen.commands.layers import Layer, Wanted, epilogue_of, launch_of_spec, takes_layers, takes_wanted
from ksgen.devices.base import CPU_BATCH, GPU_BATCH, default_batch
from ksgen.errors import PatternError, SpecError
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.kernel import MOST_BYTES
from ksgen.values import excerpt


@click.command("run")
@common.takes_patterns
@takes_layers
@click.option("--spec", type=PATH, help="Run a layer or group of this spec, with its options.")
@click.option(
    "--layer",
    "layer_name",
    type=common.WORD,
    metavar="NAME",
    help="Name of the layer or group, if the spec has several.",
)
@click.option("--batch", type=int, help=f"Batch size.  [default: {GPU_BATCH} on a GPU, {CPU_BATCH} on a processor]")
@takes_wanted(has_job=False)
@click.option(
    "--stride", type=STRIDE, default="dense", show_default=True, help="any: arrays may be slices of larger arrays."
)
@click.option(
    "--job", type=JOB, default="multiply", show_default=True, help="The product Y = X K^T, or the weights' gradient."
)
@click.option("--family", type=common.WORD, help="Kernel family, such as mma.  [default: the launchers' choice]")
@click.option("--bias", is_flag=True, help="Add a bias to each output.")
@click.option("--activation", type=ACTIVATION, default="none", show_default=True, help="Activation after the bias.")
@click.option("--residual", is_flag=True, help="Add a residual, after the activation.")
@click.option("--residual-first", is_flag=True, help="Add the residual before the activation.")
@common.device_option
@common.number_option(
    "--runs", help_text="Minimum number of consecutive runs that are timed together, as one block.", usual=1
)
@common.number_option("--seed", help_text="Seed of the random arrays.", usual=0, least=0)
@common.json_option
def command(
    patterns: tuple[Pattern, ...], layer: Layer, spec: Path | None, layer_name: str | None, batch: int | None,
    wanted: Wanted, stride: str, job: str, family: str | None, bias: bool, activation: str, residual: bool,
    residual_first: bool, device: str | None, runs: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Check one kernel against a float64 reference, then time it. Exit code 1 if the check fails.

    Several patterns are the factors of a layer, in the order in which they multiply x. They are launched as one kernel,
    and compared with one launch per factor. With --group-with, the kernel computes a group: this layer and others on
    the same x. With --spec, the kernel computes a layer or group of the spec, by default its only one. If several
    kernels of it match the options, such as --precision, the first one is taken.

    \b
    Examples:
      ksgen run 1,192,48,2 --batch 25088 --precision float32 --layout bsl
      ksgen run 6,64,64,1 --batch 1000 --bias --activation gelu --json
      ksgen run 6,64,64,1 --batch 1000 --job gradient
      ksgen run 1,1024,1024,1 --batch 1 --weights int8
      ksgen run 1,192,48,2 --precision bfloat16 --weights e4m3 --inputs e4m3
      ksgen run 6,64,64,1 1,768,192,2 --batch 1568 --bias
      ksgen run 6,64,64,1 --group-with 6,64,64,1 --group-with "2,48,192,1 1,192,48,2" --batch 1568
      ksgen run --spec specs/vit.yaml --layer up --precision bfloat16
    """
    from ksgen.devices import find_device
    from ksgen.families import operand_of
    from ksgen.families.chains import factor_kernels, transposed_bytes
    from ksgen.launch.choice import described, limits_of
    from ksgen.measure.roofline import measure_ceilings, share_of_floor
    from ksgen.measure.verify import measure, most_sets
    from ksgen.tuning.job import job_of

    if batch is not None and not 1 <= batch <= MOST_BYTES:
        raise SpecError(f"--batch {excerpt(batch)}: accepted: a whole number of at least 1, and below 2^63")
    epilogue = epilogue_of(bias, activation, residual, residual_first)
    place = None  # where a spec states the batch
    if spec is None and layer_name is not None:
        raise SpecError(f"--layer {excerpt(layer_name)} names a layer of a spec; accepted: with --spec FILE")
    if spec is None:
        kernel = _of_patterns(patterns, layer, wanted, epilogue, stride, job)
    else:
        is_given = {
            "--bias": bias,
            "--activation": activation != "none",
            "--residual": residual,
            "--residual-first": residual_first,
            "--stride": stride != "dense",
        }
        is_given |= {"--job": job != "multiply", **dict.fromkeys(layer.options, True), "patterns": bool(patterns)}
        if given := [option for option in is_given if is_given[option]]:
            accepted = "the spec's own layers, or patterns without --spec"
            raise SpecError(f"{', '.join(given)} with --spec; accepted: {accepted}")
        kernel, place = launch_of_spec(spec, layer_name, wanted, batch)
        place = None if batch else place
        batch = batch or kernel.batch
        if batch != kernel.batch:
            kernel = replace(kernel, batch=None)
    where = find_device(device)
    batch = batch or default_batch(where.limits)
    common.check_memory(kernel, batch, limits_of(where), place)
    kernel = job_of(kernel, batch).kernel  # specialised for one batch size only where launchers are, too
    measured = measure(where, kernel, batch, runs, seed, family)
    factors = [measure(where, each, batch, runs, seed) for each in factor_kernels(kernel)] if kernel.is_chain else []
    common.warn_if_busy()  # after all checks, so that a user's mistake prints one line
    why, *each_why = (each.seconds.why_unreliable for each in (measured, *factors))
    choice = measured.plan.choice
    operand = operand_of(kernel, choice.constants)
    ceilings = measure_ceilings(where, kernel.precision, operand)
    seconds, floor_us = measured.seconds.median, ceilings.floor_us(kernel, batch, most_sets(where.limits.is_cpu))
    low, high = measured.seconds.interval
    transpose_s = transposed_bytes(kernel, batch) / ceilings.bytes_per_s
    figures = {
        **common.kernel_figures(kernel, batch),
        "entry": measured.plan.source.entry,
        "device": where.name,
        "runtime": where.runtime,
        **common.choice_figures(choice.family, choice.constants),
        "why": described(choice, kernel, batch, limits_of(where), device),
        "passed": measured.passed and all(each.passed for each in factors),
        "error": measured.error,
        "tolerance": measured.tolerance,
        "checked_rows": measured.checked,
        "checked_batch_entries": measured.checked,  # deprecated
        "median_us": seconds * 1e6,
        "low_us": low * 1e6,
        "high_us": high * 1e6,
        "blocks": len(measured.seconds.values),
        "gflop_per_s": kernel.flops(batch) / seconds / 1e9,
        "gbyte_per_s": kernel.bytes(batch) / seconds / 1e9,
        "floor_us": floor_us,
        "share_of_floor": None if why else share_of_floor(floor_us, seconds * 1e6),
        **(
            {"each_factor_us": [each.seconds.median * 1e6 for each in factors], "each_factor_doubt": each_why}
            if factors
            else {}
        ),
        # "turn_us" is the deprecated name
        **({"transpose_us": transpose_s * 1e6, "turn_us": transpose_s * 1e6} if transpose_s else {}),
        "others_share": measured.seconds.others_share,
        "doubt": why,
        "measured_gbyte_per_s": ceilings.bytes_per_s / 1e9,
        "measured_gflop_per_s": ceilings.flops_per_s / 1e9,
        "multiply_adds": f"multiply-adds on tensor cores, {operand} operands" if operand else "plain multiply-adds",
    }
    if as_json:
        common.print_json(figures)
    else:
        _print(figures, str(choice.constants))
    if not figures["passed"]:
        sys.exit(1)


def _of_patterns(
    patterns: tuple[Pattern, ...], layer: Layer, wanted: Wanted, epilogue: Epilogue, stride: str, job: str
) -> KernelSpec:  # fmt: skip
    """Kernel of one product or gradient, or of a whole layer or group in one launch."""
    if not patterns:
        accepted = "one, such as ksgen run 1,192,48,2; one per factor of a layer; or --spec FILE"
        raise PatternError(f"got 0 patterns{' of a layer' if layer.is_asked_for else ''}; accepted: {accepted}")
    if job == "gradient" and (len(patterns) > 1 or layer.is_asked_for):
        raise PatternError(
            f"--job gradient of {layer.description}; accepted: one pattern, such as ksgen run 1,192,48,2 --job gradient"
        )
    whole = layer.launch(*wanted.precision_and_layout, epilogue, *wanted.stored)  # checks that factors fit each other
    (kernel,) = [whole] if whole else replace(wanted, job=job).kernels(patterns, epilogue)
    return kernel if stride == "dense" else replace(kernel, stride=stride)


def _print(figures: dict[str, object], chosen: str) -> None:
    from ksgen.measure.roofline import NO_FLOOR
    from ksgen.measure.trust import marked

    why = cast("str", figures["doubt"])
    rows = {
        "kernel": "{entry}, batch {batch}",
        "device": "{device} ({runtime})",
        "constants": "{family}: {chosen}",
        "chosen by": "{why}",
        "error": "{error:.2e} against float64 over {checked_rows} rows of the batch; {verdict} "
        "(at most {tolerance:.1e})",
        "time": f"{marked('{median_us:.1f}', why)} us median of {{blocks}} blocks, interval of the median "
        "{low_us:.1f} to {high_us:.1f}",
        "rate": f"{marked('{gflop_per_s:.1f}', why)} GFLOP/s, {marked('{gbyte_per_s:.1f}', why)} GB/s",
        "floor": "{floor}: this device just copied {measured_gbyte_per_s:.0f} GB/s and did {measured_gflop_per_s:.0f} "
        "GFLOP/s of {multiply_adds}",
        "share": "{share}",
    }
    if factor_us := figures.get("each_factor_us"):
        copy_us = cast("float", figures.get("transpose_us", 0.0))
        sum_us = sum(cast("list[float]", factor_us)) + copy_us
        copied = f", with {copy_us:.1f} us at least for the copy that transposes an intermediate" if copy_us else ""
        why_factor = next(filter(None, cast("list[str]", figures["each_factor_doubt"])), "")
        ratio = f"{sum_us / cast('float', figures['median_us']):.2f} times the time of one launch"
        note = _untrusted(why or why_factor) if why or why_factor else ratio
        rows["unfused"] = f"{marked(f'{sum_us:.1f}', why_factor)} us for one launch per factor{copied}: {note}"
    floor_us, part = cast("float | None", figures["floor_us"]), cast("float | None", figures["share_of_floor"])
    floor = "none" if floor_us is None else f"{floor_us:.1f} us"
    reached = (
        NO_FLOOR
        if floor_us is None
        else "none, because the time is below the floor"
        if part is None
        else f"{part:.0%} of the floor"
    )
    share = _untrusted(why) if why else reached
    verdict = "[green]passed[/]" if figures["passed"] else "[red]FAILED[/]"
    common.print_facts(rows, {**figures, "verdict": verdict, "share": share, "floor": floor, "chosen": chosen})


def _untrusted(why: str) -> str:
    """Text in place of a ratio of unreliable times."""
    return f"omitted, because the time is unreliable: {why}"
