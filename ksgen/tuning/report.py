"""One self-contained HTML page about a search: for each job its winner, figures, and every candidate with its outcome.

A table lists the measured candidates first, then the others with the reasons. Evaluates and measures nothing: it shows
trials. The same trials give the same bytes.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import attrgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from ksgen import __version__
from ksgen.errors import KsgenError
from ksgen.families import family_named
from ksgen.figures import svg
from ksgen.files import check_writable, write
from ksgen.measure.roofline import share_of_floor
from ksgen.spec import KernelSpec
from ksgen.tuning import figures
from ksgen.tuning.model import rank_correlation
from ksgen.tuning.trials import STATES, Trial
from ksgen.values import cached_property, counted, grouped

SHOWN_ROWS = 12  # rows of a table, until the reader asks for all
LEAST_PREDICTED = 3  # candidates, for a picture of the cost model
MOST_ROWS = 1000
MOST_REASONS = 8
MOST_LETTERS = 300  # of a reason; longer ones are shortened
NUMBERS = ("#", "µs", "spread", "blocks", "of floor", "predicted µs", "registers", "shared bytes")


@dataclass(frozen=True)
class Section:
    """One job and its trials, in the order in which they were tried."""

    kernel: KernelSpec
    batch: int
    device: str
    trials: tuple[Trial, ...]
    left_out: int  # trials of earlier templates or drivers
    winner: Trial | None

    @cached_property
    def measured(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state == "measured"]

    @property
    def by_family(self) -> dict[str, list[Trial]]:
        """Trials by family, the winner's family first.

        Several kinds of constants of one family have names of their own.
        """
        kinds = Counter(family for family, _ in {(trial.family, type(trial.constants)) for trial in self.trials})

        def name_of(trial: Trial) -> str:
            own: str = trial.constants.entry_family if kinds[trial.family] > 1 else ""
            return own or trial.family

        names = dict.fromkeys(map(name_of, (*([self.winner] if self.winner else []), *self.trials)))
        return {name: [trial for trial in self.trials if name_of(trial) == name] for name in names}

    @property
    def title(self) -> str:
        only = " only" if self.kernel.batch else ""
        return f"{self.kernel.short_description}, batch {self.batch}{only}"

    @property
    def summary(self) -> tuple[str, ...]:
        """The job's line in the table of all jobs: time, share of the floor, gain, candidates, winner."""
        if not (winner := self.winner):
            return ("", "", "", str(len(self.trials)), "none was measured")
        shown = (microseconds(time_us(winner)), share(winner), f"{self.gain:.2f}" if self.gain else "")
        return (*shown, str(len(self.trials)), f"{winner.family}: {winner.constants}")

    @property
    def gain(self) -> float | None:
        """The first measured candidate's time over the winner's, if both are reliable."""
        first, winner = self.measured[0] if self.measured else None, self.winner
        return time_us(first) / time_us(winner) if first and winner and not (first.note or winner.note) else None

    @property
    def sentences(self) -> list[str]:
        """Sentences about the winner, and about the outcomes of the candidates."""
        lines = [f"{counted(len(self.trials), 'candidate')}: {by_state(self.trials)}."]
        if self.left_out:
            lines.append(f"{counted(self.left_out, 'trial')} of earlier templates or drivers left out.")
        if not (winner := self.winner):
            return ["No candidate was measured.", *lines]
        spread = "" if winner.spread is None else f", uncertain by {winner.spread:.1%}"
        faster = f"{self.gain:.2f} times as fast as the first candidate; the" if self.gain else "The"
        first = [f"{faster} median of {winner.runs} blocks{spread}."]
        if winner.floor_us and (part := share(winner)):
            first.append(f"{part} of the floor, which is {microseconds(winner.floor_us)} µs.")
        if min(map(time_us, self.measured)) < time_us(winner):
            first.append("Shorter times were seen, but not in the finals, where candidates are measured alternately.")
        if winner.note:
            first.append(f"Its time is unreliable: {winner.note}.")
        return [*first, *lines]


def sections_of(trials: Sequence[Trial], winners: Collection[Trial] = ()) -> list[Section]:
    """Sections by device, kernel and batch, in order of appearance; each family only with its last template and driver.

    `winners` are the trials that a search chose after finals between the fastest few. In other jobs, the shortest time
    wins.
    """
    jobs = grouped(trials, attrgetter("device", "kernel", "batch"))
    decided = {_candidate(trial) for trial in winners}
    sections = []
    for (device, kernel, batch), found in jobs.items():
        last = {
            trial.family: (trial.template, trial.driver) for trial in sorted(found, key=lambda trial: trial.measured_at)
        }
        present = tuple(trial for trial in found if (trial.template, trial.driver) == last[trial.family])
        measured = [trial for trial in present if trial.state == "measured"]
        winner = min(measured, key=lambda trial: (_candidate(trial) not in decided, time_us(trial)), default=None)
        sections.append(Section(kernel, batch, device, present, len(found) - len(present), winner))
    return sections


def _candidate(trial: Trial) -> tuple[Hashable, ...]:
    return trial.device, trial.kernel, trial.batch, trial.family, trial.constants


def time_us(trial: Trial) -> float:
    return trial.median_us or inf


# ---- candidates of a family


@dataclass(frozen=True)
class Row:
    state: str
    is_winner: bool
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    titles: tuple[str, ...]
    rows: tuple[Row, ...]
    throughout: str  # constants with one value for all candidates, which have no column
    left_out: int  # candidates beyond MOST_ROWS


def table_of(trials: Sequence[Trial], winner: Trial | None) -> Table:
    """All candidates of one family. `#` numbers them in the order in which they were tried."""
    numbered = sorted(
        enumerate(trials, start=1), key=lambda each: (STATES.index(each[1].state), each[1].median_us or 0.0)
    )
    listed = [(trial, _cells(number, trial)) for number, trial in numbered[:MOST_ROWS]]
    titles = (*NUMBERS, *vars(trials[0].constants), "fate")
    first = listed[0][1]
    is_same = [len({cells[column] for _, cells in listed}) == 1 for column in range(len(titles))]
    constants = range(len(NUMBERS), len(titles) - 1)
    wanted = [
        column for column in range(len(titles)) if not (is_same[column] and (column in constants or not first[column]))
    ]
    rows = tuple(
        Row(trial.state, trial is winner, tuple(cells[column] for column in wanted)) for trial, cells in listed
    )
    throughout = ", ".join(f"{titles[column]}={first[column]}" for column in constants if is_same[column])
    return Table(tuple(titles[column] for column in wanted), rows, throughout, len(numbered) - len(rows))


def by_state(trials: Sequence[Trial]) -> str:
    """Count trials by state: `120 measured, 30 pruned`."""
    counts = Counter(trial.state for trial in trials)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def reasons(trials: Sequence[Trial]) -> list[str]:
    """The most common reasons why candidates were not measured, such as `12 pruned: it spills registers`."""
    counts = Counter(_fate(trial) for trial in trials if trial.state != "measured").most_common()
    lines = [f"{count} {fate}" for fate, count in counts[:MOST_REASONS]]
    others = sum(count for _, count in counts[MOST_REASONS:])
    return [*lines, f"{others} for other reasons"] if others else lines


def microseconds(time_us: float) -> str:
    """Format microseconds with three digits, or as a whole number if that is longer."""
    return f"{time_us:.0f}" if time_us >= 100 else f"{time_us:.3g}"


def share(trial: Trial) -> str:
    """Share of the floor as text; empty if the time is unreliable, or there is no floor."""
    found = share_of_floor(trial.floor_us, trial.median_us)
    return "" if found is None or trial.note else f"{found:.0%}"


def _cells(number: int, trial: Trial) -> tuple[str, ...]:
    numbers = (
        str(number),
        microseconds(trial.median_us) if trial.median_us else "",
        "" if trial.spread is None else f"{trial.spread:.1%}",
        str(trial.runs or ""),
        share(trial),
        microseconds(trial.predicted_us) if trial.predicted_us else "",
        "" if trial.registers is None else str(trial.registers),
        "" if trial.shared_bytes is None else str(trial.shared_bytes),
    )
    return (*numbers, *map(str, vars(trial.constants).values()), _fate(trial))


def _fate(trial: Trial) -> str:
    reasons = "; ".join(text for text in (trial.reason, trial.note) if text)
    return shorten(f"{trial.state}: {reasons}" if reasons else trial.state, MOST_LETTERS)


# ---- the page


class Drawn(NamedTuple):
    """A figure and the sentence under it."""

    svg: Markup
    caption: str = ""


def write_report(trials: Sequence[Trial], path: Path, winners: Collection[Trial] = ()) -> None:
    """Write the page, completely or not at all.

    `winners` are the trials that a search chose; without them, the shortest time wins. `KsgenError` without trials, or
    without matplotlib.
    """
    if not trials:
        raise KsgenError(f"{path}: there is nothing to report, as no candidate was tried; ksgen tune tries some")
    write(path, page(trials, winners))


def check_report(path: Path, spec: Path | None = None) -> None:
    """Raise `KsgenError` before a search if its report could not be written afterwards, or would replace the spec."""
    svg.check_matplotlib(figures.EXTRA)
    check_writable(path, spec)


def page(trials: Sequence[Trial], winners: Collection[Trial] = ()) -> str:
    """The page's text."""
    sections = sections_of(trials, winners)
    devices = _once(trial.device for trial in trials)
    return svg.page(
        Path(__file__).parent,
        "report.html.j2",
        {"wrapped": lambda name: escape(name).replace("_", Markup("_<wbr>"))},
        devices=", ".join(devices),
        facts=[
            counted(len(sections), "job"),
            counted(len(trials), "candidate"),
            *_once(trial.compiler for trial in trials),
            *(f"driver {each}" for each in _once(trial.driver for trial in trials)),
            f"ksgen {__version__}",
        ],
        sections=[_shown(section, number, len(devices) > 1) for number, section in enumerate(sections, start=1)],
        palette=svg.DARK,
        point=svg.POINT,
        best=figures.BEST,
        winner=figures.WINNER,
        floor=figures.FLOOR,
        shown_rows=SHOWN_ROWS,
    )


def _shown(section: Section, number: int, name_device: bool) -> dict[str, Any]:
    return {
        "anchor": f"job-{number}",
        "title": f"{section.title} on {section.device}" if name_device else section.title,
        "name": section.kernel.name,
        "winner": section.winner,
        "summary": section.summary,
        "sentences": section.sentences,
        "reasons": reasons(section.trials),
        "overview": _overview(section),
        "families": [
            {
                "name": name,
                "why": family_named(name).why,
                "figures": _constants(trials, section.winner),
                "table": table_of(trials, section.winner),
            }
            for name, trials in section.by_family.items()
        ],
    }


def _once(words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word]


def _overview(section: Section) -> list[Drawn]:
    """Figures of the course of the search, the quality of the cost model, and the roofline; none without a winner."""
    if not (winner := section.winner):
        return []
    times, place = [time_us(trial) for trial in section.measured], section.measured.index(winner)
    floor_us = winner.floor_us if share_of_floor(winner.floor_us, winner.median_us) else None
    curve = Markup(figures.best_so_far(times, place, floor_us))
    drawn = [Drawn(curve, f"The winner was candidate {place + 1} of {len(times)}.")]
    predicted = [trial for trial in section.measured if trial.predicted_us and isfinite(trial.predicted_us)]
    if len(predicted) >= LEAST_PREDICTED:
        drawn.append(_cost_model(predicted, winner))
    if floor_us and winner.bytes_per_s and winner.flops_per_s and not winner.note:
        drawn.append(_roofline(winner, winner.bytes_per_s, winner.flops_per_s))
    return drawn


def _cost_model(trials: list[Trial], winner: Trial) -> Drawn:
    predicted_us, times_us = [trial.predicted_us or 0.0 for trial in trials], [time_us(trial) for trial in trials]
    caption = f"Rank correlation {rank_correlation(predicted_us, times_us):.2f}."
    place = _place(winner, trials)
    if place is not None:
        first = sum(each <= predicted_us[place] for each in predicted_us)
        caption += f" The winner was among the model's first {first} of {len(trials)}."
    return Drawn(Markup(figures.predictions(predicted_us, times_us, place)), caption)


def _place(winner: Trial | None, trials: list[Trial]) -> int | None:
    return trials.index(winner) if winner and winner in trials else None


def _roofline(winner: Trial, most_bytes_per_s: float, most_flops_per_s: float) -> Drawn:
    flops = winner.kernel.flops(winner.batch)
    flop_per_byte = flops / winner.kernel.bytes(winner.batch)
    reached = flops / time_us(winner) * 1e6
    bound = "copying" if flop_per_byte * most_bytes_per_s < most_flops_per_s else "multiply-adds"
    share = reached / min(most_flops_per_s, flop_per_byte * most_bytes_per_s)
    limits = (
        f"The device was measured to copy {_rate(most_bytes_per_s, 'B/s')} and to compute "
        f"{_rate(most_flops_per_s, 'FLOP/s')}."
    )
    caption = f"{_rate(reached, 'FLOP/s')}, {share:.0%} of what {bound} would allow. {limits}"
    return Drawn(Markup(figures.roofline(flop_per_byte, reached, most_bytes_per_s, most_flops_per_s)), caption)


def _rate(per_second: float, unit: str) -> str:
    return f"{per_second / 1e12:.3g} T{unit}" if per_second >= 1e12 else f"{per_second / 1e9:.3g} G{unit}"


def _constants(trials: Sequence[Trial], winner: Trial | None) -> list[Drawn]:
    """A figure per constant of a family."""
    measured = [trial for trial in trials if trial.state == "measured"]
    times, place = [time_us(trial) for trial in measured], _place(winner, measured)
    names = vars(measured[0].constants) if measured else ()
    return [
        Drawn(Markup(figures.constant(name, [getattr(trial.constants, name) for trial in measured], times, place)))
        for name in names
    ]
