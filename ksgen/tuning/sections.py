"""The text of one job in a report: its winner, its numbers, which trials count, and tables of candidates.

A table lists the measured candidates first, then the others with the reasons. Draws nothing.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from textwrap import shorten

from ksgen.measure.roofline import share_of_floor
from ksgen.spec import KernelSpec
from ksgen.tuning.trials import STATES, Trial
from ksgen.values import cached_property, counted

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
        """Trials by family, the winner's family first."""
        first = [self.winner.family] if self.winner else []
        names = dict.fromkeys((*first, *(trial.family for trial in self.trials)))
        return {name: [trial for trial in self.trials if trial.family == name] for name in names}

    @property
    def title(self) -> str:
        only = " only" if self.kernel.batch else ""
        return f"{self.kernel.short_description}, batch {self.batch}{only}"

    @property
    def summary(self) -> tuple[str, ...]:
        """The job's line in the table of all jobs: time, share of the floor, gain, candidates, winner."""
        if not (winner := self.winner):
            return ("", "", "", str(len(self.trials)), "none was measured")
        shown = (microseconds(time_us(winner)), share(winner.floor_us, winner.median_us), f"{self.gain:.2f}")
        return (*shown, str(len(self.trials)), f"{winner.family}: {winner.constants}")

    @property
    def gain(self) -> float:
        """The first measured candidate's time over the winner's; 1 without a winner."""
        return time_us(self.measured[0]) / time_us(self.winner) if self.winner else 1.0

    @property
    def sentences(self) -> list[str]:
        """Sentences about the winner, and about the outcomes of the candidates."""
        lines = [f"{counted(len(self.trials), 'candidate')}: {by_state(self.trials)}."]
        if self.left_out:
            lines.append(f"{self.left_out} of earlier templates or drivers are left out.")
        if not (winner := self.winner):
            return ["No candidate was measured.", *lines]
        spread = "" if winner.spread is None else f", uncertain by {winner.spread:.1%}"
        first = [f"{self.gain:.2f} times as fast as the first candidate; the median of {winner.runs} blocks{spread}."]
        if winner.floor_us and (part := share(winner.floor_us, winner.median_us)):
            first.append(f"{part} of the floor, which is {microseconds(winner.floor_us)} µs.")
        if min(map(time_us, self.measured)) < time_us(winner):
            first.append("Shorter times were seen, but not in the finals, where candidates are measured side by side.")
        if winner.note:
            first.append(f"Its time is unreliable: {winner.note}.")
        return [*first, *lines]


def sections_of(trials: Sequence[Trial], winners: Collection[Trial] = ()) -> list[Section]:
    """Sections by device, kernel and batch, in order of appearance; each family only with its last template and driver.

    `winners` are the trials that a search chose after finals between the fastest few. In other jobs, the shortest time
    wins.
    """
    jobs: dict[tuple[str, KernelSpec, int], list[Trial]] = {}
    for trial in trials:
        jobs.setdefault((trial.device, trial.kernel, trial.batch), []).append(trial)
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


def share(floor_us: float | None, time_us: float | None) -> str:
    found = share_of_floor(floor_us, time_us)
    return "" if found is None else f"{found:.0%}"


def _cells(number: int, trial: Trial) -> tuple[str, ...]:
    numbers = (
        str(number),
        microseconds(trial.median_us) if trial.median_us else "",
        "" if trial.spread is None else f"{trial.spread:.1%}",
        str(trial.runs or ""),
        share(trial.floor_us, trial.median_us),
        microseconds(trial.predicted_us) if trial.predicted_us else "",
        "" if trial.registers is None else str(trial.registers),
        "" if trial.shared_bytes is None else str(trial.shared_bytes),
    )
    return (*numbers, *map(str, vars(trial.constants).values()), _fate(trial))


def _fate(trial: Trial) -> str:
    reasons = "; ".join(text for text in (trial.reason, trial.note) if text)
    return shorten(f"{trial.state}: {reasons}" if reasons else trial.state, MOST_LETTERS)
