"""Shared by the `ksgen bench` subcommands that measure: options, the selected jobs, the log and the progress bar."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from ksgen.bench.roster import COMPARISONS, NAMES, USUAL
from ksgen.commands import common
from ksgen.devices.base import default_batch
from ksgen.errors import KsgenError, PatternError, SpecError
from ksgen.install import install_line
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, load, paper_patterns, stratified
from ksgen.spec.kernel import hint
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from ksgen.bench.problem import LayerJob
    from ksgen.bench.rows import ResultRow
    from ksgen.bench.runner import Report
    from ksgen.bench.tables import ResultTable
    from ksgen.bench.timing import Protocol, Quantity
    from ksgen.devices.base import Device

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    """Parse a time such as 90, 90s, 8m, 1.5h or 1h30m into seconds. A click type."""
    parts = re.findall(r"([0-9]*\.?[0-9]+)([smh]?)", text)
    is_whole = "".join(number + unit for number, unit in parts) == text
    if not parts or not is_whole or (len(parts) > 1 and not all(unit for _, unit in parts)):
        raise KsgenError(f"time {excerpt(text)}; accepted: 90s, 8m, 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def words_option(
    flag: str, name: str, accepted: Collection[str], help_text: str, usual: str | None = None, what: str = ""
) -> Callable[[Any], Any]:
    """Option for one or more of the accepted words, separated by commas.

    `what` names the words in messages. The default is the option's flag.
    """
    read = common.ReadBy(lambda text: words_in(text, accepted, what or flag))
    shows = usual is not None
    return click.option(flag, name, type=read, metavar="WORDS", default=usual, show_default=shows, help=help_text)


def words_in(text: str, accepted: Collection[str], what: str) -> tuple[str, ...]:
    """Split a text at commas into distinct words; raise `SpecError` if one is not accepted.

    `what` names the words in the message, such as "precision".
    """
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if word not in accepted:
            raise SpecError(f"{what} {excerpt(word)}; {hint(word, accepted)}")
    return words


def log_option(log: Path) -> Callable[[Any], Any]:
    return click.option(
        "-o", "--output", type=common.PATH, default=log, show_default=True,
        help=f"Log file; an existing log is continued. Its rows also go to a .csv file next to it; {common.REPLACED}.",
    )  # fmt: skip


def seconds_option(usual: float) -> Callable[[Any], Any]:
    help_text = "Time limit in seconds per contender and job. Slow contenders get fewer runs."
    return common.number_option("--most-seconds", help_text=help_text, usual=usual, least=0.001)


def precisions_option(default: str) -> Callable[[Any], Any]:
    """Option for precisions. Its help describes the default."""
    return words_option(
        "--precision", "precisions", COMPARISONS, f"Precisions.  [default: {default}]", what="precision"
    )


def contender_options(accepted: Collection[str], such_as: str, but: str) -> Callable[[Any], Any]:
    """Options for the contenders to measure, and for those to leave out, with examples of both in their help."""
    chosen = words_option("--contenders", "names", accepted, f"Contenders, such as {such_as}", what="contender")
    left_out = words_option(
        "--without", "without", accepted, f"Contenders to leave out, such as {but}.", what="contender"
    )
    return lambda function: chosen(left_out(function))


def measurements_option(usual: int) -> Callable[[Any], Any]:
    help_text = "Measurements per contender and job; the result is their median."
    return common.number_option("--measurements", help_text=help_text, usual=usual)


def runs_option(usual: int) -> Callable[[Any], Any]:
    return common.number_option("--runs", help_text="Runs per measurement.", usual=usual)


def time_limit_option(usual: str | None = None) -> Callable[[Any], Any]:
    help_text = "Stop after this time, such as 90s, 8m or 1h. The current measurement is finished first."
    return click.option(
        "--time-limit", "seconds", type=duration, metavar="TIME", default=usual, show_default=usual is not None,
        help=help_text,
    )  # fmt: skip


seed_option = common.number_option("--seed", help_text="Seed of the random chains and arrays.", usual=0, least=0)
LOG = Path("paper.jsonl")
LATE = "--time-limit ended before the first measurement; give more time"
_OPTIONS = (
    log_option(LOG),
    common.number_option(
        "--subset", help_text="Measure only this many of the patterns, the most informative ones, in a fixed order."
    ),
    click.option(
        "--most-gflop", type=common.RealRange(min=0, min_open=True), help="Leave out patterns with more GFLOP per run."
    ),
    click.option(
        "--patterns",
        "named",
        help="paper (the default), published (with times by the paper's authors), a spec, or patterns such as "
        '"1,192,48,2 2,48,192,1".',
    ),
    common.batch_option,
    precisions_option(f"{','.join(USUAL)}; also accepted: fp16x3"),
    words_option("--layout", "layouts", LAYOUTS, "Layouts.", ",".join(LAYOUTS), "layout"),
    contender_options(NAMES, "ksgen,bmm,strided.  [default: all; for energy, all but layer and rewriting]", "compiled"),
    time_limit_option(),
    common.device_option,
    seed_option,
)


def contenders_left(names: Sequence[str], without: Sequence[str] | None) -> tuple[str, ...]:
    """Contenders to measure; `SpecError` if there are none."""
    left = tuple(name for name in names if name not in (without or ()))
    if not left:
        raise SpecError("no contender is left: --without excludes all of them; exclude fewer, or name more")
    return left


@dataclass(frozen=True)
class Selection:
    """The values of the options of `job_options`."""

    output: Path
    subset: int | None
    most_gflop: float | None
    named: str | None
    batch: int | None
    precisions: tuple[str, ...] | None
    layouts: tuple[str, ...]
    names: tuple[str, ...] | None
    without: tuple[str, ...] | None
    seconds: float | None
    device: str | None
    seed: int
    begun: float = field(default_factory=monotonic, init=False)  # time at which the command began

    def contenders(self, usual: Sequence[str] = NAMES) -> tuple[str, ...]:
        return contenders_left(self.names or usual, self.without)

    def jobs(self, device: "Device", most_d: int | None = None) -> list["LayerJob"]:
        """Jobs pattern by pattern, so that a time limit leaves complete patterns."""
        from ksgen.bench.problem import product_job

        batch = self.batch or default_batch(device.limits)
        most_weights = None if self.most_gflop is None else self.most_gflop * 1e9 / (2 * batch)
        patterns = patterns_named(self.named, self.subset, most_d, most_weights)
        if not patterns:
            raise SpecError(
                f"--most-gflop {self.most_gflop:g} at batch {batch}: every pattern needs more; give a larger limit, or "
                "a smaller batch"
            )
        kinds = [(precision, layout) for precision in self.precisions or USUAL for layout in self.layouts]
        return [product_job(pattern, *kind, batch) for pattern in patterns for kind in kinds]


@dataclass(frozen=True)
class Part:
    """Jobs that are measured by the same protocol."""

    protocol: "Protocol"
    jobs: Sequence["LayerJob"]


@dataclass(frozen=True)
class Done:
    """Device and job counts of a finished command, and the files that hold its results."""

    device: str
    jobs: int
    complete: int
    files: tuple[Path, ...]
    page: Path | None = None


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add options for the jobs and the log; the command receives them as a `Selection`, its first argument."""

    @wraps(function)
    def with_selection(**options: Any) -> Any:
        selection = Selection(**{each.name: options.pop(each.name) for each in fields(Selection) if each.init})
        return function(selection, **options)

    for option in reversed(_OPTIONS):
        with_selection = option(with_selection)
    return with_selection


def measure(
    selection: Selection, protocol: "Protocol", quantity: Callable[["Device"], "Quantity"], most_d: int | None = None
) -> Done:  # fmt: skip
    """Measure the selected jobs, and write the log's rows next to the log."""
    deadline = ends_at(selection.begun, selection.seconds)
    check_log_name(selection.output)
    from ksgen.devices import find_device

    device = find_device(selection.device)
    jobs, measured = selection.jobs(device, most_d), quantity(device)
    return measure_by(selection.output, device, measured, [Part(protocol, jobs)], deadline, LATE)


def ends_at(begun: float, seconds: float | None) -> float:
    """Return the time at which a run ends that began at `begun`; infinity if `seconds` is None."""
    return begun + (inf if seconds is None else seconds)


def measure_by(
    output: Path, device: "Device", quantity: "Quantity", parts: Sequence["Part"], deadline: float, unfit: str,
    takes_all: bool = False,
) -> Done:  # fmt: skip
    """Measure the jobs of all parts into a log, and write its rows next to it.

    First, each part gets an equal share of the time that is left when it begins. Then incomplete parts get the rest,
    in the same order.

    Args:
        output: The log; an existing one is continued.
        device: Device that measures.
        quantity: Measured quantity.
        parts: Jobs and their protocols.
        deadline: Time of `monotonic` at which measuring ends.
        unfit: Message of the error if all jobs are done and no contender could be measured.
        takes_all: Whether the log may hold products and layers, whatever the jobs are.

    Returns:
        The numbers of jobs, and the files.
    """
    from ksgen.bench.rows import Log
    from ksgen.bench.runner import Runner, run_facts

    total, complete = sum(len(part.jobs) for part in parts), [0] * len(parts)
    with Log(output) as log, bar() as report:
        facts = run_facts(device)
        if monotonic() < deadline:
            common.warn_if_busy()
        for shares in (True, False) if len(parts) > 1 else (False,):
            for number, part in enumerate(parts):
                left = deadline - monotonic()
                if complete[number] < len(part.jobs):
                    ends = monotonic() + left / (len(parts) - number) if shares else deadline
                    runner = Runner(log, device, part.protocol, quantity, facts, ends, report)
                    complete[number] = runner.run(part.jobs, takes_all)
        if not log.content.contenders:
            raise KsgenError(LATE if sum(complete) < total else unfit)
    return Done(device.name, total, sum(complete), (output, *write_rows(output)))


def check_log_name(output: Path) -> None:
    if output.suffix != ".jsonl":
        raise SpecError(f"-o {output}: the log is a .jsonl file; its rows go to the .csv next to it")


def print_results(
    done: Done, as_json: bool, tables: Callable[[Sequence["ResultRow"]], Sequence["ResultTable"]]
) -> None:
    """Print tables of the measured rows, and a few lines about the files."""
    from ksgen.bench.rows import read_rows
    from ksgen.bench.tables import unreliable_note

    log = done.files[0]
    rows = read_rows(log)
    if as_json:
        files = [str(path) for path in (*done.files, done.page) if path]
        facts = {"device": done.device, "jobs": done.jobs, "complete": done.complete, "files": files}
        in_doubt = sum(bool(row.doubt) and not row.has_time for row in rows)
        common.print_json({**facts, "rows": len(rows), "in_doubt": in_doubt})
        return
    for table in tables(rows):
        if table.rows:
            print_table(table)
    measured = f"{done.complete} of {counted(done.jobs, 'job')} measured on {done.device}"
    click.echo(f"{measured}; rows in {', '.join(map(str, done.files[1:]))}.")
    if note := unreliable_note(rows):
        click.echo(note)
    if done.complete < done.jobs:
        click.echo("The time limit was reached; the same command continues from here.")
    click.echo(f"{done.page} shows the rows." if done.page else f"ksgen bench report {log} makes a page of the rows.")


def print_done(done: Done, as_json: bool) -> None:
    from ksgen.bench.tables import energy, overview

    print_results(done, as_json, lambda rows: (overview(rows), energy(rows)))


def print_table(table: "ResultTable") -> None:
    click.echo(table.title)
    common.print_columns(table.columns, table.rows, left=2)
    if table.note:
        common.console().print(table.note, markup=False)


def check_torch(needed_for: str, extra: str = "bench") -> None:
    """Raise `KsgenError` without PyTorch. `extra` is the extra of the package that installs it."""
    from importlib.util import find_spec as find_module

    if find_module("torch") is None:
        raise KsgenError(f"{needed_for} needs torch: {install_line(extra)}")


@contextmanager
def memory_for(*batches: int) -> Iterator[None]:
    """Raise `MemoryError` that names the batch sizes, if PyTorch has too little memory in the block."""
    try:
        yield
    except RuntimeError as error:
        if "memory" in str(error):
            raise MemoryError(f"--batch {','.join(map(str, batches))}: {str(error).splitlines()[0]}") from error
        raise


def patterns_named(
    named: str | None, subset: int | None, most_d: int | None = None, most_weights: float | None = None
) -> list[Pattern]:
    """Return the first `subset` patterns of `named` that have at most `most_weights` weights.

    `named` is "published", a spec or patterns. By default, and for "paper", it is the paper's patterns with d up to
    `most_d`.
    """
    from ksgen.bench.tables import published_patterns

    if named is None or named == "paper":
        found = [pattern for pattern in stratified(len(paper_patterns())) if pattern.d <= (most_d or pattern.d)]
    elif named == "published":
        found = published_patterns()
    elif named.endswith((".yaml", ".yml")):
        found = list(dict.fromkeys(kernel.pattern for kernel in load(common.find_spec(Path(named))).kernels))
    else:
        found = [Pattern.parse(word) for word in named.split()]
        if not found:
            raise PatternError(
                f"--patterns {excerpt(named)}; accepted: paper, published, a spec, or patterns such as 1,192,48,2"
            )
    return [pattern for pattern in found if most_weights is None or pattern.weight_count <= most_weights][:subset]


def write_rows(log: Path) -> list[Path]:
    """Write the log's rows next to it as CSV, and as Parquet if pyarrow is installed."""
    from ksgen.bench.rows import read_rows, write_csv, write_parquet

    rows = read_rows(log)
    csv, parquet = log.with_suffix(".csv"), log.with_suffix(".parquet")
    write_csv(rows, csv)
    return [csv, *([parquet] if write_parquet(rows, parquet) else [])]


@contextmanager
def bar() -> Iterator["Report"]:
    """A progress bar: jobs done, time spent, time left, the current job. Hidden if there is no terminal."""
    with common.progress(shows_left=True) as shown:
        task = shown.add_task("", total=None, now="")
        yield lambda done, total, now: shown.update(task, completed=done, total=total, now=now)
