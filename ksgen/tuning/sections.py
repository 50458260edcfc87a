"""The text of one job in a report: its winner, its numbers, and which trials count. Draws nothing."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from math import inf

from ksgen.spec import KernelSpec
from ksgen.tuning.candidates import by_state, microseconds, share
from ksgen.tuning.trials import Trial
from ksgen.values import cached_property
from ksgen.words import counted


@dataclass(frozen=True)
class Section:
    """One job and its trials, in the order in which they were looked at."""

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
        """The first measured candidate's time over the winner's."""
        return time_us(self.measured[0]) / time_us(self.winner) if self.winner else 1.0

    @property
    def said(self) -> list[str]:
        """Sentences about the winner, and about the outcomes of the candidates."""
        lines = [f"{counted(len(self.trials), 'candidate')}: {by_state(self.trials)}."]
        if self.left_out:
            lines.append(f"{self.left_out} of earlier templates or drivers are left out.")
        if not (winner := self.winner):
            return ["No candidate was measured.", *lines]
        spread = "" if winner.spread is None else f", which spread over {winner.spread:.1%}"
        first = [f"{self.gain:.2f} times as fast as the first candidate; the median of {winner.runs} runs{spread}."]
        if winner.floor_us and (part := share(winner.floor_us, winner.median_us)):
            first.append(f"{part} of the floor, which is {microseconds(winner.floor_us)} µs.")
        if min(map(time_us, self.measured)) < time_us(winner):
            first.append("Shorter times were seen, but not in the finals, where candidates are measured side by side.")
        if winner.note:
            first.append(f"Of its time: {winner.note}.")
        return [*first, *lines]


def sections_of(trials: Sequence[Trial], winners: Collection[Trial] = ()) -> list[Section]:
    """Sections by device, kernel and batch, in order of appearance; each family only with its last template and driver.

    `winners` are those that a search chose after looking closer at the fastest few. In other jobs the shortest time
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
