"""Shows a search: a live table, or plain lines if there is no terminal; then the results."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ksgen.commands.common import console
from ksgen.commands.figures import entry_figures
from ksgen.errors import KsgenError
from ksgen.locks import new_lock
from ksgen.measure.trust import describe_unreliable, marked
from ksgen.values import counted

if TYPE_CHECKING:
    from rich.table import Table

    from ksgen.tuning.job import Job
    from ksgen.tuning.search import Progress, Tuned
    from ksgen.tuning.trials import Trial

PIPED_COLUMNS = 1000  # width without a terminal: each row is one line
MOST_ROWS = 12  # rows of the live table: running searches, then those that ended last


class TuneTable:
    """Shows searches while they run. Any thread may call `say` to report progress."""

    def __init__(self, jobs: int, budget_s: float | None = None, at_once: int = 1) -> None:
        from rich.live import Live

        self._jobs, self._begin = jobs, time.monotonic()
        self._most_s = None if budget_s is None else -(-jobs // at_once) * budget_s
        self._latest: dict[Job, Progress] = {}
        self._guard = new_lock()
        self._screen = console(stderr=True)
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
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        with self._guard:
            latest = list(self._latest.values())
        running = [each for each in latest if each.phase != "done"]
        ended = [each for each in latest if each.phase == "done"]
        best = [f"{name_of(each.job)}: {each.best.family}: {each.best.constants}" for each in running if each.best]
        table = Table(
            title=self._title(len(ended)), title_justify="left", caption="\n".join(best), caption_justify="left",
            box=SIMPLE_HEAD, pad_edge=False,
        )  # fmt: skip
        table.add_column("kernel", overflow="fold")  # the first column to fold in a narrow terminal
        for name in ("best, us", "of floor", "done", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for each in [*ended[::-1][: max(0, MOST_ROWS - len(running))][::-1], *running]:
            table.add_row(*_row(each), style="dim" if each.phase == "done" else "")
        return table

    def _title(self, ended: int) -> str:
        spent_s = time.monotonic() - self._begin
        most_s = spent_s / ended * self._jobs if self._most_s is None and ended else self._most_s
        most = "" if most_s is None else f" of about {clock(most_s)}"
        return f"{ended} of {counted(self._jobs, 'kernel')} tuned in {clock(spent_s)}{most}"


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
    """Share of the floor as text; empty if the time is unreliable, or there is no floor."""
    from ksgen.tuning import sections

    return "" if trial.note else sections.share(trial.floor_us, trial.median_us)


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
            "no winner, because times are unreliable: launchers take these constants until a search on a quiet machine."
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
    return entry_figures(tuned.entry()) | {
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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", overflow="fold")  # the first column to fold in a narrow terminal
    for name in ("default us", "best us", "gain", "spread", "floor", "tried"):
        table.add_column(name, justify="right", no_wrap=True)
    doubts = []
    for tuned in results:
        if isinstance(tuned, KsgenError):
            continue
        best, default = tuned.best, tuned.default if tuned.default and tuned.default.median_us else None
        own = [each.note for each in ((best,) if best is default else (best, default)) if each]
        doubts += own
        gain = (
            f"{default.median_us / best.median_us:.2f}x"
            if default and default.median_us and best.median_us and not any(own)
            else ""
        )
        table.add_row(
            name_of(tuned.job), time_us(default) if default else "", time_us(best), gain, f"{best.spread or 0:.1%}",
            share(best),
            str(tuned.looked),
        )  # fmt: skip
    screen = console()
    if not screen.is_terminal:
        screen.width = PIPED_COLUMNS
    if table.row_count:
        screen.print(table)
    if unreliable := describe_unreliable(doubts):
        click.echo(unreliable)
