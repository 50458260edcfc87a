"""The report's table of a family's candidates: what was measured first, and why others were not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from ksgen.measure.roofline import share_of_floor
from ksgen.tuning.trials import Trial

MOST_ROWS = 1000
MOST_REASONS = 8
MOST_LETTERS = 300  # the longest reason
STATES = ("measured", "wrong", "failed", "hung", "pruned")  # in the order in which they are of interest
NUMBERS = ("#", "µs", "spread", "runs", "of floor", "predicted µs", "registers", "shared bytes")


@dataclass(frozen=True)
class Row:
    state: str
    is_winner: bool
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    titles: tuple[str, ...]
    rows: tuple[Row, ...]
    throughout: str  # constants that all candidates share, which have no column
    left_out: int  # candidates beyond MOST_ROWS


def table_of(trials: Sequence[Trial], winner: Trial | None) -> Table:
    """All candidates of one family. `#` numbers them in the order in which they were looked at."""
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
    """`120 measured, 30 pruned`."""
    counts = Counter(trial.state for trial in trials)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def reasons(trials: Sequence[Trial]) -> list[str]:
    """The most common reasons why candidates were not measured, such as `12 pruned: it spills registers`."""
    counts = Counter(_fate(trial) for trial in trials if trial.state != "measured").most_common()
    lines = [f"{count} {fate}" for fate, count in counts[:MOST_REASONS]]
    others = sum(count for _, count in counts[MOST_REASONS:])
    return [*lines, f"{others} for other reasons"] if others else lines


def microseconds(time_us: float) -> str:
    """Three digits, or the whole number if that is longer."""
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
