"""`ksgen calibrate`."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import click

from ksgen.bench.roster import MODELS
from ksgen.commands import common
from ksgen.commands.bench_common import check_torch, memory_for
from ksgen.commands.bench_models import CPU_SEQUENCES, CPU_TOKENS, GPU_SEQUENCES, GPU_TOKENS, PRECISIONS
from ksgen.commands.common import ACTIVATION, ReadBy
from ksgen.commands.layers import Layer, Wanted, epilogue_of, takes_layers, takes_wanted
from ksgen.commands.tune import TuneTable, name_of
from ksgen.devices.base import CPU_BATCH, GPU_BATCH, default_batch
from ksgen.errors import DeviceError, PatternError, SpecError
from ksgen.files import check_writable, write
from ksgen.measure.trust import describe_unreliable, marked
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue
from ksgen.spec.kernel import hint
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from ksgen.calibration.trials import Calibrated, Calibration
    from ksgen.passport import Passport
    from ksgen.tuning.job import Facts, Job
    from ksgen.tuning.trials import Trial

NAMES = "a spec such as specs/vit.yaml, patterns, or --model vit-s16"  # arguments with kernels to try
MOST_LETTERS = 300  # length of a reason in a report
OMITTED = "..."
_OF_TRIAL = (
    "kernel", "batch", "family", "constants", "template", "state", "reason", "median_us", "predicted_us", "floor_us",
    "spread", "bytes_per_s", "flops_per_s", "registers", "shared_bytes", "note", "compiler", "driver",
)  # fmt: skip
# a path in quotes may hold spaces
_PATH = re.compile(r"""(['"])[^'"\n]*/[^'"\n]*\1|[^\s:;,'"(]*/[^\s:;,'")]*""")


@ReadBy
def spec_or_pattern(text: str) -> Pattern | Path:
    if text.endswith((".yaml", ".yml")):
        return Path(text)
    try:
        return Pattern.parse(text)
    except PatternError as error:
        raise PatternError(f"{error}; or a spec, a file whose name ends in .yaml or .yml") from None


@click.command("calibrate")
@click.argument("patterns", type=spec_or_pattern, nargs=-1, metavar="[SPEC|A,B,C,D]...")
@common.pattern_option
@takes_layers
@click.option(
    "--chain", is_flag=True, help="The patterns are factors of a layer: try one launch of all, and one per factor."
)
@click.option(
    "--model", metavar="|".join(MODELS), help="Try the kernels of this model with sparse layers; needs PyTorch."
)
@takes_wanted(has_job=True)
@click.option("--bias", is_flag=True, help="Add a bias to each output of the patterns.")
@click.option("--activation", type=ACTIVATION, default="none", help="Activation of the patterns, after the bias.")
@click.option("--residual", is_flag=True, help="Add a residual to the patterns' outputs, after the activation.")
@click.option("--residual-first", is_flag=True, help="Add the residual before the activation.")
@click.option(
    "--batch",
    "batches",
    type=common.batches_in,
    metavar="NUMBERS",
    help=f"Batch sizes; for a model, sequences.  [default: {GPU_BATCH} on a GPU, {CPU_BATCH} on a processor]",
)
@common.device_option
@click.option("--fresh", is_flag=True, help="Prove all families again and repeat all trials.")
@common.file_option("--report", help_text="Write a report for ksgen's authors, without personal data")
@common.json_option
def command(
    patterns: tuple[Pattern | Path, ...], named: tuple[Pattern, ...], layer: Layer, chain: bool, model: str | None,
    wanted: Wanted, bias: bool, activation: str, residual: bool, residual_first: bool,
    batches: tuple[int, ...] | None, device: str | None,
    fresh: bool, report: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Determine which kernels are correct on this machine's device, and which are the fastest.

    First, a child process proves each kernel family on the GPU, and the results are stored as the GPU's passport.
    Processors need none. Then each kernel that has no wisdom (results of earlier runs) is tried. Candidates are the
    defaults of the families, and the constants that the cost model expects to be fastest, four at most. Each is
    compiled, checked against float64 and timed. Launchers take the winners. `ksgen tune` searches further.

    A second run does only what is missing. --fresh repeats everything except the searches of `ksgen tune`. The exit
    code is 1 if a kernel could not be measured.

    \b
    Examples:
      ksgen calibrate specs/vit.yaml
      ksgen calibrate 1,192,48,2 --precision float16 --batch 16,1568
      ksgen calibrate 6,64,64,1 1,768,192,2 --chain
      ksgen calibrate --model vit-s16 --report report.json
    """
    from ksgen.calibration.trials import opened
    from ksgen.tuning.job import job_of

    specs = [each for each in patterns if isinstance(each, Path)]
    layer = replace(layer, patterns=(*(each for each in patterns if isinstance(each, Pattern)), *named))
    epilogue, precision = epilogue_of(bias, activation, residual, residual_first), wanted.precision or "float32"
    if is_layer := chain or layer.is_asked_for:
        refusal = f"--chain of {layer.description}; accepted: a layer's patterns, without --job gradient"
        kernels = layer.kernels(wanted, epilogue, refusal)
    else:
        kernels = wanted.kernels(layer.patterns, epilogue)
    kernels = list(dict.fromkeys([*(each for spec in specs for each in wanted.kernels_of_spec(spec)), *kernels]))
    if model and (kernels or wanted.job):
        raise SpecError(f"--model {excerpt(model)} with other kernels; accepted: a model alone, or patterns and specs")
    unused = wanted.layout or wanted.weights or wanted.inputs or is_layer or epilogue != Epilogue()
    if model and unused:
        raise SpecError(f"--model {excerpt(model)} with options of patterns; accepted: --precision, --batch, --device")
    if not (kernels or model) and (unused or wanted.precision or wanted.job or batches):
        raise SpecError(f"options of kernels without a kernel; name {NAMES}")
    if specs and not layer.patterns and epilogue != Epilogue():
        raise SpecError("--bias, --activation and --residual are for patterns; a spec has its own")
    if model:
        _check_model(model, precision)
    if report:
        check_writable(report, *specs)
    if kernels or model:  # making a passport alone times nothing
        common.warn_if_busy()
    passport = make_passport(device, fresh)
    if not kernels and not model:
        print_passport(passport, as_json)
        if report:
            with opened(device) as calibration:
                _write_report(report, report_of(calibration.facts, passport, ()), as_json)
        return
    jobs, settle = _jobs_of_model(model, precision, batches, device) if model else ([], None)
    with opened(device, fresh) as calibration:
        facts = calibration.facts
        sizes = batches or (default_batch(facts.limits),)
        jobs = jobs or list(dict.fromkeys(job_of(kernel, batch) for kernel in kernels for batch in sizes))
        found, trials, is_stopped = try_all(calibration, jobs), calibration.tuner.trials(jobs), calibration.is_stopped
    if settle and not is_stopped:
        settle()
    content = {"device": facts.name, "stopped": is_stopped, "kernels": [figures_of(each) for each in found]}
    if as_json:
        common.print_json(content)
    else:
        print_found(found, facts)
    if report:
        _write_report(report, report_of(facts, passport, trials), as_json)
    if is_stopped:
        rest = "the same command repeats all trials" if fresh else "the same command continues from there"
        click.echo(f"ksgen: interrupted; results so far are saved, and {rest}", err=True)
        sys.exit(130)
    if any(each.why for each in found):
        sys.exit(1)


def report_of(facts: "Facts", passport: "Passport | None", trials: "Iterable[Trial]") -> dict[str, Any]:
    """The file that a user may send back: the device, its passport, and the times of trials next to predicted times.

    It holds no host name, user name or path. Paths in error messages and compilers' options are replaced by "...".
    """
    return {
        "ksgen": facts.ksgen,
        "device": {
            "name": facts.name,
            "kind": facts.kind,
            "target": facts.target,
            "driver": without_paths(facts.driver_version),
            "limits": asdict(facts.limits),
        },
        "passport": passport and {
            name: asdict(proof) | {"reason": without_paths(proof.reason)} for name, proof in passport.families.items()
        },
        "trials": [_trial(each) for each in trials],
    }  # fmt: skip


def without_paths(text: str) -> str:
    """Shorten a text, and replace paths, which may hold a user's name."""
    home = os.path.expanduser("~")  # unchanged for a user without a home
    return _PATH.sub(OMITTED, text.replace(home, "~") if len(home) > 1 else text)[:MOST_LETTERS]


def _trial(trial: "Trial") -> dict[str, Any]:
    changed: dict[str, Any] = {name: without_paths(getattr(trial, name)) for name in ("reason", "compiler", "driver")}
    changed |= {"kernel": trial.kernel.name, "constants": asdict(trial.constants)}
    return {name: changed.get(name, getattr(trial, name)) for name in _OF_TRIAL}


def _write_report(path: Path, content: dict[str, Any], as_json: bool) -> None:
    write(path, common.json_text(content) + "\n")
    click.echo(f"{counted(len(content['trials']), 'trial')} in {path}", err=as_json)


def try_all(calibration: "Calibration", jobs: "Sequence[Job]") -> "list[Calibrated]":
    """Try the jobs, with a live table or a line per kernel."""
    missing = calibration.missing(jobs)
    known = len(jobs) - len(missing)
    click.echo(f"{counted(len(jobs), 'kernel')}, {known} known; {len(missing)} to try", err=True)
    with TuneTable(len(missing)) as watch:
        return calibration.run(jobs, watch.say)


def make_passport(device: str | None, fresh: bool = False) -> "Passport | None":
    """Prove the families that a GPU's passport lacks, or all if `fresh`, and return the passport; None for a processor.

    Only child processes use the GPU. Verdicts, and waits for other processes, are reported on standard error.
    """
    from ksgen.calibration.proof import NotNeededError, ProofProgress, prove
    from ksgen.launch.planner import PLANNER

    def report(step: ProofProgress) -> None:
        if step.proof:
            why = f": {step.proof.reason}" if step.proof.reason else ""
            click.echo(f"{step.family}: {step.proof.state}{why}, {counted(step.proof.cases, 'case')}", err=True)

    try:
        passport = prove(device, on_step=report, again=fresh, on_wait=lambda why: click.echo(f"ksgen: {why}", err=True))
    except NotNeededError:
        return None
    PLANNER.forget()
    return passport


def print_passport(passport: "Passport | None", as_json: bool) -> None:
    """Print a GPU's passport, or how to find the fastest kernels of a device that needs no passport."""
    if as_json:
        common.print_json({"passport": passport and str(passport)})
    elif passport:
        click.echo(f"Passport: {passport}")
    else:
        click.echo(f"Passport: this device needs none. To find its fastest kernels, name {NAMES}.")


def _check_model(name: str, precision: str) -> None:
    """Raise an error before any work if the model or its precision is unknown, or if PyTorch is missing."""
    if name not in MODELS:
        raise SpecError(f"--model {excerpt(name)}; {hint(name, MODELS)}")
    check_torch("`ksgen calibrate --model`", "torch")
    if precision not in PRECISIONS:
        raise SpecError(f"--precision {precision} of a model; {hint(precision, PRECISIONS)}")


def _jobs_of_model(
    name: str, precision: str, batches: tuple[int, ...] | None, device: str | None
) -> "tuple[list[Job], Callable[[], object]]":
    """Kernels of a transformer's forward pass and training step.

    The function times the methods of its layers, such as one launch, or one per factor. Call it after trials.
    """
    if device:
        os.environ["KSGEN_DEVICE"] = device
    import torch

    from ksgen.bench.contenders import torch_device
    from ksgen.bench.models import build, make_sparse, rule
    from ksgen.devices import find_device
    from ksgen.torch.layer import freeze
    from ksgen.torch.layer.building import build as build_calls
    from ksgen.torch.layer.building import jobs_of, settle

    where = find_device()
    if where.kind == "cuda" and not torch.cuda.is_available():
        lacks = f"PyTorch {torch.__version__} cannot use {where.name}"
        raise DeviceError(f"--model {name}: {lacks}; install PyTorch's build for CUDA, or give --device native")
    with torch_device(where):
        model: Any = build(name)
    model.blocks = model.blocks[:1]  # all blocks have the same kernels
    make_sparse(model, rule(name), from_weights=False)
    model = model.to(getattr(torch, precision))
    sizes = batches or (GPU_SEQUENCES if where.kind == "cuda" else CPU_SEQUENCES,)
    with memory_for(*sizes):
        inputs = [model.random_inputs(size, GPU_TOKENS if where.kind == "cuda" else CPU_TOKENS) for size in sizes]

    def call() -> None:
        with memory_for(*sizes):
            for each in inputs:
                build_calls(model.train(), each)
                freeze(model.eval())
                build_calls(model, each)

    click.echo(f"compiling the defaults of {name}", err=True)
    return list(jobs_of(call).get(where, ())), partial(settle, call)


def figures_of(found: "Calibrated") -> dict[str, Any]:
    """Facts of a kernel for `--json`: its entry of wisdom and its speed-ups, or the reason why it has no entry."""
    facts = common.entry_figures(found.entry) if found.entry else common.kernel_figures(found.kernel, found.batch)
    return facts | {
        "tried_now": found.is_new,
        "over_default": found.over_default,
        "over_prediction": found.over_prediction,
        "why": found.why,
    }


def print_found(found: "Sequence[Calibrated]", facts: "Facts") -> None:
    """Print a table of kernels with their times, and a summary."""
    from ksgen.paths import wisdom_dir
    from ksgen.tuning.job import Job
    from ksgen.wisdom import MOST_ATTEMPTS, file_name

    def times(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.2f}x"

    rows = []
    for each in found:
        name = name_of(Job(each.kernel, each.batch))
        if each.entry is None:
            rows.append((name, str(each.batch), "none", "", "", "", ""))
            continue
        by = "default kept" if each.keeps_default else "trial" if each.entry.is_trial else "search"
        us = marked(f"{each.entry.median_us or 0:.1f}", each.entry.why_unreliable)
        compared = times(each.over_default), times(each.over_prediction)
        rows.append((name, str(each.batch), each.entry.family, us, *compared, by))
    common.print_columns(("kernel", "batch", "chosen", "us", "over default", "over model", "by"), rows)
    known, new = [each.entry for each in found if each.entry], sum(each.is_new for each in found)
    still_open = sum(entry.is_open for entry in known)
    given_up = sum(entry.is_trial and bool(entry.why_unreliable) for entry in known) - still_open
    settled = len(known) - still_open
    click.echo(f"{settled} of {counted(len(found), 'kernel')} settled on {facts.name}: {new} tried now.")
    if ratios := [each.over_default for each in found if each.over_default]:
        mean = geometric_mean(ratios)
        click.echo(f"{mean:.2f} times as fast as the defaults (geometric mean of {counted(len(ratios), 'kernel')}).")
    reasons = [entry.why_unreliable for entry in known]
    if note := describe_unreliable(reasons):
        click.echo(note)
    if still_open:
        again = "run the same command again on a quiet machine"
        click.echo(f"{counted(still_open, 'kernel')} not settled, launchers keep the defaults: {again}.")
    if given_up:
        fresh = "on a quiet machine, --fresh retries"
        click.echo(f"{counted(given_up, 'kernel')} settled after {MOST_ATTEMPTS} unreliable attempts: {fresh}.")
    if new and not all(reasons):
        click.echo(f"Saved in {wisdom_dir() / file_name(facts.name)}; `ksgen tune` searches further.")
    for each in found:
        if each.why:
            which = f"{each.kernel.name}, batch {each.batch}: "
            click.echo(f"ksgen: {which}{each.why.removeprefix(which)}", err=True)
