"""`ksgen tune`."""

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ksgen.commands.common import (
    REPLACED,
    SPEC,
    OneOf,
    batch_option,
    check_memory,
    device_option,
    json_option,
    print_columns,
    print_json,
    takes_patterns,
    warn_if_busy,
)
from ksgen.commands.figures import kernel_figures
from ksgen.commands.layers import Layer, Wanted, takes_layers, takes_wanted
from ksgen.devices.base import default_batch
from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.values import counted

if TYPE_CHECKING:
    from ksgen.spec.nodes import SourcePlace
    from ksgen.tuning.job import Job
    from ksgen.tuning.trials import TrialStore
    from ksgen.tuning.tuner import Tuner

STRATEGY = OneOf(("model", "random", "exhaustive"))


@click.command("tune")
@takes_patterns
@takes_layers
@click.option("--spec", type=SPEC, help="Tune every kernel of this spec, and every layer in one launch.")
@takes_wanted(has_job=True)
@click.option(
    "--chain", is_flag=True, help="The patterns are factors of a layer: tune one launch of all, and one per factor."
)
@batch_option
@click.option("--family", help="Search only this kernel family, such as simt or mma.")
@click.option("--budget", metavar="60s|200", help="Budget per kernel: a time, or a number of candidates.")
@click.option(
    "--strategy",
    type=STRATEGY,
    default="model",
    show_default=True,
    help="Search strategy; see docs/tuning.md.",
)
@device_option
@click.option("--scheduler", metavar="ADDRESS", help="Search on this Dask cluster, such as tcp://10.0.0.1:8786.")
@click.option("--fresh", is_flag=True, help="Measure all candidates again, including those of earlier searches.")
@click.option("--noise", is_flag=True, help="Instead of a search, report how much repeated measurements differ.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Write a page with curves and tables to this file; {REPLACED}.",
)
@json_option
def command(
    patterns: tuple[Pattern, ...], layer: Layer, spec: Path | None, wanted: Wanted, chain: bool, batch: int | None,
    family: str | None, budget: str | None, strategy: str, device: str | None, scheduler: str | None, fresh: bool,
    noise: bool, report: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the fastest constants of kernels on this machine's device. They go into the user's wisdom, where launchers
    find them.

    A stopped search resumes when the same command is run again. Exit code 1 if a kernel could not be measured.

    \b
    Examples:
      ksgen tune 1,192,48,2 --precision float16
      ksgen tune --spec specs/vit.yaml --report vit.html
      ksgen tune 1,192,48,2 --job gradient
      ksgen tune 6,64,64,1 1,768,192,2 --chain --between relu --batch 1568
      ksgen tune 6,64,64,1 --group-with 6,64,64,1 --group-with 6,64,64,1 --batch 1568
      ksgen tune 1,192,48,2 --budget 60s --strategy random
      ksgen tune --spec specs/vit.yaml --scheduler tcp://10.0.0.1:8786
    """
    from ksgen.tuning.kernels import job_of
    from ksgen.tuning.report import check_report
    from ksgen.tuning.trials import TrialStore
    from ksgen.tuning.tuner import SearchOptions, Tuner, open_engine, parse_budget

    kernels: dict[KernelSpec, SourcePlace | None]  # each with the place of its batch in the spec
    if chain or layer.is_asked_for:
        options_given = ", ".join(["--chain"] * chain + layer.options)
        refusal = f"{options_given}: accepted: a layer of two or more patterns, with neither --spec nor --job gradient"
        if spec:
            raise SpecError(refusal)
        kernels = dict.fromkeys(layer.kernels(wanted, Epilogue(), refusal))
    elif bool(patterns) == (spec is not None):
        raise SpecError("name what to tune: patterns such as 1,192,48,2, or --spec FILE, one of the two")
    else:
        kernels = wanted.kernels_of_spec(spec) if spec else dict.fromkeys(wanted.kernels(patterns, Epilogue()))
    if report:
        check_report(report)
    options = SearchOptions(parse_budget(budget), strategy, family, fresh)
    engine = open_engine(device, scheduler)
    store = TrialStore()
    try:
        rows = batch or default_batch(engine.facts.limits)
        jobs = [job_of(kernel, rows) for kernel in kernels]
        tuner = Tuner(engine, store, options)
        for each, place in zip(jobs, kernels.values(), strict=True):
            check_memory(each.kernel, each.batch, tuner.limits, place)
        jobs = _supported(tuner, _available(tuner, jobs, spec), spec)
        warn_if_busy()
        if noise:
            _noise(tuner, jobs, as_json)
        else:
            _tune(tuner, jobs, store, report, as_json)
    finally:
        engine.close()
        store.close()


def _available(tuner: "Tuner", jobs: "list[Job]", spec: Path | None) -> "list[Job]":
    """Return the jobs, except layers of a spec that cannot be one launch here. If the command line names such a layer,
    raise an error.
    """
    from ksgen.tuning.kernels import why_not_one

    available = []
    for each in jobs:
        if not (why := why_not_one(tuner, each)):
            available.append(each)
        elif spec is None:
            raise KsgenError(f"{each.kernel.name} in one launch on {tuner.engine.facts.name}: {why}")
        else:
            click.echo(f"left out, as {why}: {each.kernel.name}", err=True)
    return available


def _supported(tuner: "Tuner", jobs: "list[Job]", spec: Path | None) -> "list[Job]":
    """Return the jobs that --family supports, before anything runs.

    Kernels of a spec may be left out. If all are, or if the command line names the kernels, raise an error.
    """
    supported, refusal = [], None
    for each in jobs:
        try:
            tuner.families(each)
            supported.append(each)
        except KsgenError as error:
            refusal = error
    if refusal and (spec is None or not supported):
        raise refusal
    if refusal:
        left_out = len(jobs) - len(supported)
        click.echo(
            f"left out, as {tuner.options.family} does not support them here: {left_out} of "
            f"{counted(len(jobs), 'kernel')}",
            err=True,
        )
    return supported


def _tune(tuner: "Tuner", jobs: "list[Job]", store: "TrialStore", report: Path | None, as_json: bool) -> None:
    from ksgen.commands.tune_table import TuneTable, figures, outcome_of, print_results
    from ksgen.paths import wisdom_dir
    from ksgen.tuning.report import write_report
    from ksgen.tuning.tuner import NotBegunError
    from ksgen.wisdom.store import file_name

    facts = tuner.engine.facts
    with TuneTable(len(jobs), tuner.options.budget.seconds, tuner.engine.jobs_at_once) as watch:
        results = tuner.run(jobs, watch.say)
    found = [result for result in results if not isinstance(result, KsgenError)]
    if as_json:
        print_json(
            {"device": facts.name, "stopped": tuner.stop.is_set(), "kernels": [figures(tuned) for tuned in found]}
        )
    else:
        print_results(results)
        if found:
            batches = ", ".join(map(str, sorted({tuned.job.batch for tuned in found})))
            click.echo(f"{len(found)} of {counted(len(jobs), 'kernel')} tuned on {facts.name}, batch {batches}.")
            for outcome, count in Counter(map(outcome_of, found)).items():
                click.echo(f"{counted(count, 'kernel')}: {outcome}")
            if any(tuned.is_kept for tuned in found):
                click.echo(f"Saved in {wisdom_dir() / file_name(facts.name)}")
    for result in results:
        if isinstance(result, KsgenError) and not isinstance(result, NotBegunError):
            click.echo(f"ksgen: {result}", err=True)
    if report:
        trials = [trial for job in jobs for trial in store.trials(job.kernel, job.batch, facts.name)]
        write_report(trials, report, [tuned.best for tuned in found])
        click.echo(f"{counted(len(trials), 'trial')} in {report}", err=as_json)
    if tuner.stop.is_set():
        click.echo("ksgen: interrupted; results so far are saved, and the same command continues from there", err=True)
        sys.exit(130)
    if len(found) < len(jobs):
        sys.exit(1)


def _noise(tuner: "Tuner", jobs: "list[Job]", as_json: bool) -> None:
    from ksgen.commands.tune_table import name_of
    from ksgen.tuning.tuner import measure_noise

    found = [measure_noise(tuner.engine, job, tuner.default(job)) for job in jobs]
    if as_json:
        kernels = [
            {**kernel_figures(each.job.kernel, each.job.batch), "median_us": each.median_us, "within": each.within,
             "between": each.between, "notes": each.notes}
            for each in found
        ]  # fmt: skip
        return print_json({"device": tuner.engine.facts.name, "kernels": kernels})
    rows = []
    for each in found:
        figures = (f"{each.median_us:.1f}", f"{each.within:.1%}", f"{each.between:.1%}")
        rows.append((name_of(each.job), str(each.job.batch), *figures, ", ".join(each.notes)))
    print_columns(("kernel", "batch", "median, us", "uncertainty", "measurement to measurement", ""), rows)
    return click.echo(
        "uncertainty: width of the interval that contains one measurement's median; measurement to measurement: range "
        "of ten medians; both relative to the median."
    )
