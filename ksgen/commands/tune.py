"""`ksgen tune`, with a live table of its searches, or plain lines if there is no terminal."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ksgen.commands import common
from ksgen.commands.layers import Layer, Wanted, takes_layers, takes_wanted
from ksgen.devices.base import default_batch
from ksgen.errors import KsgenError, SpecError
from ksgen.locks import new_lock
from ksgen.measure.trust import describe_unreliable, marked
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from rich.table import Table

    from ksgen.spec.nodes import SourcePlace
    from ksgen.tuning.engine import Engine
    from ksgen.tuning.job import Job
    from ksgen.tuning.search import Progress, Tuned
    from ksgen.tuning.trials import Trial
    from ksgen.tuning.tuner import Tuner

STRATEGY = common.OneOf(("model", "random", "exhaustive"))


@click.command("tune")
@common.takes_patterns
@takes_layers
@click.option("--spec", type=common.PATH, help="Tune every kernel of this spec, and every layer in one launch.")
@takes_wanted(has_job=True)
@click.option(
    "--chain", is_flag=True, help="The patterns are factors of a layer: tune one launch of all, and one per factor."
)
@common.batch_option
@click.option("--family", type=common.WORD, help="Search only this kernel family, such as simt or mma.")
@click.option("--budget", metavar="60s|200", help="Budget per kernel: a time, or a number of candidates.")
@click.option(
    "--strategy", type=STRATEGY, default="model", show_default=True, help="Search strategy; see docs/tuning.md."
)
@common.device_option
@click.option(
    "--scheduler", type=common.WORD, metavar="ADDRESS", help="Search on this Dask cluster, such as tcp://10.0.0.1:8786."
)
@click.option("--fresh", is_flag=True, help="Measure all candidates again, including those of earlier searches.")
@click.option("--noise", is_flag=True, help="Instead of a search, report how much repeated measurements differ.")
@common.file_option("--report", help_text="Write a page with curves and tables to this file")
@common.json_option
def command(
    patterns: tuple[Pattern, ...], layer: Layer, spec: Path | None, wanted: Wanted, chain: bool, batch: int | None,
    family: str | None, budget: str | None, strategy: str, device: str | None, scheduler: str | None, fresh: bool,
    noise: bool, report: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the fastest constants of kernels on this machine's device. Results are stored as wisdom, in the user's files
    that launchers read.

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
    from ksgen.tuning.job import job_of
    from ksgen.tuning.report import check_report
    from ksgen.tuning.trials import TrialStore
    from ksgen.tuning.tuner import SearchOptions, Tuner, parse_budget

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
    of_search = {"--report": report, "--budget": budget, "--fresh": fresh}
    if noise and (given := [name for name, value in of_search.items() if value]):
        raise SpecError(f"{', '.join(given)} with --noise, which searches nothing; accepted: one of the two")
    if report:
        check_report(report, spec)
    options = SearchOptions(parse_budget(budget), strategy, family, fresh)
    with closing(_engine(device, scheduler)) as engine, closing(TrialStore()) as store:
        rows = batch or default_batch(engine.facts.limits)
        jobs = [job_of(kernel, rows) for kernel in kernels]
        tuner = Tuner(engine, store, options)
        for each, place in zip(jobs, kernels.values(), strict=True):
            common.check_memory(each.kernel, each.batch, tuner.limits, place)
        jobs = _supported(tuner, _available(tuner, jobs, spec), spec)
        common.warn_if_busy()
        if noise:
            _noise(tuner, jobs, as_json)
        else:
            _tune(tuner, jobs, report, as_json)


def _engine(device: str | None, scheduler: str | None) -> "Engine":
    """Open the engine of this machine or of a cluster. A terminal shows the wait for a cluster, up to 20 seconds."""
    from ksgen.tuning.tuner import open_engine

    if scheduler is None:
        return open_engine(device)
    with common.progress() as bar:
        bar.add_task(f"connecting to {excerpt(scheduler)}", total=None, now="")
        return open_engine(device, scheduler)


def _available(tuner: "Tuner", jobs: "list[Job]", spec: Path | None) -> "list[Job]":
    """Return the jobs, except layers of a spec that cannot be one launch here. If the command line names such a layer,
    raise an error.
    """
    available = []
    for each in jobs:
        if not (why := tuner.why_not_one(each)):
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


def _tune(tuner: "Tuner", jobs: "list[Job]", report: Path | None, as_json: bool) -> None:
    from ksgen.paths import wisdom_dir
    from ksgen.tuning.report import write_report
    from ksgen.tuning.tuner import NotBegunError
    from ksgen.wisdom import file_name

    facts = tuner.engine.facts
    with TuneTable(len(jobs), tuner.options.budget.seconds, tuner.engine.jobs_at_once) as watch:
        results = tuner.run(jobs, watch.say)
    found = [result for result in results if not isinstance(result, KsgenError)]
    if as_json:
        common.print_json(
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
        if trials := tuner.trials(jobs):
            write_report(trials, report, [tuned.best for tuned in found])
        where = f"in {report}" if trials else f"to report: {report} is not written"
        click.echo(f"{counted(len(trials), 'trial')} {where}", err=as_json)
    if tuner.stop.is_set():
        click.echo("ksgen: interrupted; results so far are saved, and the same command continues from there", err=True)
        sys.exit(130)
    if len(found) < len(jobs):
        sys.exit(1)


def _noise(tuner: "Tuner", jobs: "list[Job]", as_json: bool) -> None:
    from ksgen.tuning.tuner import measure_noise

    found = [measure_noise(tuner.engine, job, tuner.default(job)) for job in jobs]
    if as_json:
        kernels = [
            common.kernel_figures(each.job.kernel, each.job.batch)
            | {name: getattr(each, name) for name in ("median_us", "within", "between", "notes")}
            for each in found
        ]
        return common.print_json({"device": tuner.engine.facts.name, "kernels": kernels})
    rows = []
    for each in found:
        figures = (f"{each.median_us:.1f}", f"{each.within:.1%}", f"{each.between:.1%}")
        rows.append((name_of(each.job), str(each.job.batch), *figures, ", ".join(each.notes)))
    common.print_columns(("kernel", "batch", "median, us", "uncertainty", "measurement to measurement", ""), rows)
    return click.echo(
        "uncertainty: width of the interval that contains one measurement's median; measurement to measurement: range "
        "of ten medians; both relative to the median."
    )


PIPED_COLUMNS = 1000  # width without a terminal: each row is one line
MOST_ROWS = 12  # rows of the live table: all running searches, below as many of the last finished ones as fit


class TuneTable:
    """Shows searches while they run. Any thread may call `say` to report progress."""

    def __init__(self, jobs: int, budget_s: float | None = None, at_once: int = 1) -> None:
        from rich.live import Live

        self._jobs, self._begin = jobs, time.monotonic()
        self._most_s = None if budget_s is None else -(-jobs // at_once) * budget_s
        self._latest: dict[Job, Progress] = {}
        self._guard = new_lock()
        self._screen = common.console(stderr=True)
        self._live = Live(get_renderable=self._table, console=self._screen, refresh_per_second=4, transient=True)

    def __enter__(self) -> "TuneTable":
        if self._screen.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, progress: "Progress") -> None:
        with self._guard:
            self._latest.pop(progress.job, None)
            self._latest[progress.job] = progress  # now the last item, so that jobs are in the order of their reports
            done = sum(each.phase == "done" for each in self._latest.values())
        looked = counted(progress.looked, "candidate")
        left_s = (time.monotonic() - self._begin) / max(1, done) * (self._jobs - done)
        left = f", about {clock(left_s)} left" if done < self._jobs else ""
        if not self._screen.is_terminal and progress.phase == "done" and progress.best:
            text = f"[{done}/{self._jobs}] {name_of(progress.job)}: {summary(progress.best)}, {looked}{left}"
            click.echo(text, err=True)

    def _table(self) -> "Table":
        with self._guard:
            latest = list(self._latest.values())
        running = [each for each in latest if each.phase != "done"]
        ended = [each for each in latest if each.phase == "done"]
        best = [f"{name_of(each.job)}: {each.best.family}: {each.best.constants}" for each in running if each.best]
        table = _table_of("best, us", "of floor", "done", "left")
        table.title, table.title_justify = self._title(len(ended)), "left"
        table.caption, table.caption_justify = "\n".join(best), "left"
        for each in [*ended[::-1][: max(0, MOST_ROWS - len(running))][::-1], *running]:
            table.add_row(*_row(each), style="dim" if each.phase == "done" else "")
        return table

    def _title(self, ended: int) -> str:
        spent_s = time.monotonic() - self._begin
        most_s = spent_s / ended * self._jobs if self._most_s is None and ended else self._most_s
        most = "" if most_s is None else f" of about {clock(most_s)}"
        return f"{ended} of {counted(self._jobs, 'kernel')} tuned in {clock(spent_s)}{most}"


def _table_of(*figures: str) -> "Table":
    """Table of kernels, without rows, with these columns of figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", overflow="fold")  # the first column to fold in a narrow terminal
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row(progress: "Progress") -> list[str]:
    best = progress.best
    figures = [time_us(best), share(best)] if best and best.median_us else ["", ""]
    left = "finals" if progress.phase == "finals" else str(progress.left or "")
    return [name_of(progress.job), *figures, str(progress.looked), left]


def name_of(job: "Job") -> str:
    """Name of the kernel, with the batch if it supports no other."""
    return job.kernel.short_description + ("" if job.kernel.batch is None else f" batch {job.kernel.batch}")


def clock(seconds: float) -> str:
    """`75` -> `1:15`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def time_us(trial: "Trial") -> str:
    return marked(f"{trial.median_us:.1f}", trial.note)


def share(trial: "Trial") -> str:
    from ksgen.tuning.report import share

    return share(trial)


def summary(trial: "Trial") -> str:
    part = share(trial)
    remark = f"unreliable: {trial.note}, " if trial.note else f"{part} of the floor, " if part else ""
    return f"{time_us(trial)} us, {remark}{trial.family}: {trial.constants}"


def outcome_of(tuned: "Tuned") -> str:
    """Say in one line what a search found, and which constants launchers take from now on."""
    if not tuned.is_kept:
        return "the earlier entry of wisdom stays, because its time is reliable or shorter."
    if not tuned.is_complete:
        return "the finals were not finished: launchers take the fastest constants so far, until the search is resumed."
    if tuned.best.note or (tuned.default and tuned.default.note):
        return (
            "no winner, because times are unreliable: launchers take the fastest constants until a search on a quiet "
            "machine."
        )
    if tuned.default is None:
        return "the default could not be measured: launchers take the fastest constants from now on."
    if tuned.default_won:
        return "the default won: launchers keep it."
    return "faster than the default: launchers take the new constants from now on."


def figures(tuned: "Tuned") -> dict[str, object]:
    """Facts of a result for `--json`."""
    from ksgen.measure.roofline import share_of_floor

    best, default = tuned.best, tuned.default
    return common.entry_figures(tuned.entry()) | {
        "default_won": tuned.default_won,
        "default_us": default.median_us if default else None,
        "share_of_floor": None if best.note else share_of_floor(best.floor_us, best.median_us),
        "doubt": best.note or (default.note if default else ""),
        "candidates": tuned.looked,
        "measured_now": tuned.measured_now,
        "seconds": round(tuned.seconds, 2),
        "complete": tuned.is_complete,
        "kept": tuned.is_kept,
    }


def print_results(results: Sequence["Tuned | KsgenError"]) -> None:
    table, reasons = _table_of("default us", "best us", "gain", "spread", "floor", "tried"), []
    for tuned in results:
        if isinstance(tuned, KsgenError):
            continue
        best, default = tuned.best, tuned.default if tuned.default and tuned.default.median_us else None
        own = [each.note for each in ((best,) if best is default else (best, default)) if each]
        reasons += own
        gain = ""
        if default and default.median_us and best.median_us and not any(own):
            gain = f"{default.median_us / best.median_us:.2f}x"
        table.add_row(
            name_of(tuned.job), time_us(default) if default else "", time_us(best), gain, f"{best.spread or 0:.1%}",
            share(best),
            str(tuned.looked),
        )  # fmt: skip
    screen = common.console()
    if not screen.is_terminal:
        screen.width = PIPED_COLUMNS
    if table.row_count:
        screen.print(table)
    if unreliable := describe_unreliable(reasons):
        click.echo(unreliable)
