"""Searches one job: compiles, measures and stores a strategy's proposals, and measures the best few again, alternately.

Reports progress through a callback. Never writes wisdom: the caller saves the result.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from typing import Any

from ksgen import __version__
from ksgen.build.request import Binary
from ksgen.emit.templates import template_digest
from ksgen.errors import KsgenError
from ksgen.families import family_named
from ksgen.families.chains import transposed_bytes
from ksgen.measure.trust import BLOCK_SECONDS, LEAST_BLOCKS, interval
from ksgen.measure.verify import most_sets
from ksgen.tuning.engine import Engine
from ksgen.tuning.job import Candidate, Job, Outcome, Runs
from ksgen.tuning.model import Machine, misfit
from ksgen.tuning.pool import Pool
from ksgen.tuning.process import LostError
from ksgen.tuning.strategies import Strategy
from ksgen.tuning.trials import Trial, TrialStore
from ksgen.wisdom import Entry

FIRST = Runs(seconds=1.0)  # limits of the first timing of each candidate
HOPELESS = 1.5  # a candidate is dropped if its first blocks of runs all exceed this multiple of the best time
FINALISTS = 6
# Each of the FINALISTS fastest candidates enters the finals if it takes at most this multiple of the best time.
# The entry that wisdom already has and the defaults enter, too, if they were timed.
CLOSE = 1.2
FINAL = Runs(seconds=1.0)  # limits of the timing of a finalist, per round
# share of a time budget reserved for the finals, and the most seconds for them: about three rounds
FINALS_SHARE, FINALS_SECONDS = 0.2, 12.0
AGAIN = 2  # disturbed rounds that a job repeats; later disturbed rounds count, marked as unreliable
WAIT_SECONDS = 0.1  # interval of checks whether to stop


@dataclass(frozen=True)
class Budget:
    """Limits at which a search ends early."""

    seconds: float | None = None
    candidates: int | None = None


@dataclass(frozen=True)
class Progress:
    """Report of a running search."""

    job: Job
    phase: str  # "searching", "finals" or "done"
    looked: int  # candidates completed so far
    left: int  # candidates that may follow
    best: Trial | None
    last: Trial | None  # trial of the candidate completed last

    def __str__(self) -> str:
        best = f"; best {self.best.median_us:.1f} us by {self.best.family}" if self.best else ""
        return f"{self.job}: {self.phase}, {self.looked} done, {self.left} left{best}"


@dataclass(frozen=True)
class Tuned:
    """The result of a search: the fastest trial, and that of the default, which was measured alternately with it."""

    job: Job
    best: Trial
    default: Trial | None  # trial of the default (`Tuner.default`), if it could be measured
    looked: int
    measured_now: int  # candidates that no earlier search had measured
    seconds: float
    is_complete: bool  # false if the search was stopped
    is_kept: bool = True  # whether it is stored as wisdom; false if wisdom's earlier entry is better
    is_trial: bool = False  # whether only a few candidates were measured, as in calibration
    attempts: int = 0  # consecutive searches, this one included, whose times were unreliable
    processor: str = ""  # target of the processor that measured; empty for other devices, whose names suffice

    @property
    def default_won(self) -> bool:
        return self.default is not None and self.best.candidate == self.default.candidate

    def entry(self) -> Entry:
        """The best trial as wisdom."""
        best, default = self.best, self.default
        optional = {
            "floor_us": best.floor_us,
            "default_us": default.median_us if default and not default.note else None,
            "predicted_us": best.predicted_us,
        }
        marks = {"note": best.note, "target": self.processor, "trial": self.is_trial, "attempts": self.attempts}
        measured = {
            "median_us": round(best.median_us or 0, 3),
            **{name: round(us, 3) for name, us in optional.items() if us},
            "spread": round(best.spread or 0, 4),
            "driver": best.driver,
            "compiler": best.compiler,
            "ksgen": __version__,
            "template": best.template,
            "date": best.measured_at,
            **{name: mark for name, mark in marks.items() if mark},
        }
        # lower bound for the time of the transposing copy that separate launches need in addition
        if transposed := transposed_bytes(best.kernel, best.batch):
            measured["transpose_us"] = round(transposed / best.bytes_per_s * 1e6, 3) if best.bytes_per_s else 0.0
        kernel = replace(best.kernel, stride="dense")  # slices use the wisdom of dense arrays
        return Entry(kernel, best.batch, best.family, best.constants, measured)


@dataclass(eq=False)
class Search:
    """The search for one job.

    Candidates in `known` are not measured again before the finals. The winner is compared with `default`.
    """

    pool: Pool
    strategy: Strategy
    known: Mapping[Candidate, Trial]
    default: Candidate
    engine: Engine
    machine: Machine
    store: TrialStore
    budget: Budget
    stop: threading.Event  # if set, the search ends and keeps its results
    say: Callable[[Progress], None]
    again: int = AGAIN  # disturbed rounds of the finals that are repeated

    def __post_init__(self) -> None:
        self.job = self.pool.job
        self.trials: dict[int, Trial] = {}  # trials of the completed candidates
        self._last_round: list[int] = []  # candidates of the last round of the finals
        self._binaries: dict[int, Binary] = {}
        self._begin = time.monotonic()
        self._asked = self._measured_now = 0
        self._last: Trial | None = None
        self._compiling: dict[Future[Binary | Outcome], int] = {}
        self._built: deque[int] = deque()
        self._measuring: dict[Future[list[Outcome]], int] = {}

    def run(self) -> Tuned:
        """Run the search; `KsgenError` if no candidate could be measured."""
        try:
            self._explore()
            self._finals()
        except (LostError, CancelledError, RuntimeError):  # a stopped search has a closed engine
            if not self.stop.is_set():
                raise
        best = self._best()
        if best is None:
            raise KsgenError(f"{self.job}: {self._why_nothing()}")
        default = next(
            (each for each in self.trials.values() if each.candidate == self.default and each.median_us), None
        )
        self._report_progress("done")
        seconds, is_complete = time.monotonic() - self._begin, not self.stop.is_set()
        return Tuned(
            self.job, best, default, len(self.trials), self._measured_now, seconds, is_complete,
            processor=self.engine.facts.processor,
        )  # fmt: skip

    # ---- trying candidates

    def _explore(self) -> None:
        for index, candidate in enumerate(self.pool.candidates):
            if candidate in self.known:
                self._asked += 1
                self._done(index, self.known[candidate])
        while not self.stop.is_set():
            self._ask()
            self._measure()
            under_way: set[Future[Any]] = {*self._compiling, *self._measuring}
            if not under_way:
                return
            done, _ = wait(under_way, timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                if self.stop.is_set():
                    return
                if future in self._compiling:
                    self._compiled(self._compiling.pop(future), future.result())
                else:
                    index = self._measuring.pop(future)
                    self._done(index, self._trial_of(index, future.result()[0]))

    def _ask(self) -> None:
        """Keep every compiler busy. If compilers and kernels share the processor, compile only between measurements."""
        ahead = self.engine.compilers + self.engine.devices if self.engine.overlaps else 2 * self.engine.compilers
        if not self.engine.overlaps and (self._built or self._measuring):
            return
        while len(self._compiling) + len(self._built) < ahead and not self._is_spent():
            index = self.strategy.ask()
            if index is None:
                return
            self._asked += 1
            self._compiling[self.engine.compile(self.job.kernel, self.pool.candidates[index])] = index

    def _is_spent(self) -> bool:
        candidates = self.budget.candidates
        return self._is_late(self._finals_s) or (candidates is not None and self._asked >= candidates)

    @property
    def _finals_s(self) -> float:
        """Seconds of the budget that are kept for the finals."""
        return (
            FINALS_SECONDS if self.budget.seconds is None else min(FINALS_SHARE * self.budget.seconds, FINALS_SECONDS)
        )

    @property
    def _final_s(self) -> float:
        """Seconds per finalist and round: enough blocks for a confidence interval of the median."""
        return max(FINAL.seconds * self._finals_s / FINALS_SECONDS, min(FINAL.seconds, LEAST_BLOCKS * BLOCK_SECONDS))

    def _is_late(self, needed_s: float = 0.0) -> bool:
        """Whether the budget has at most `needed_s` seconds left."""
        return self.budget.seconds is not None and time.monotonic() - self._begin >= self.budget.seconds - needed_s

    def _compiled(self, index: int, result: Binary | Outcome) -> None:
        candidate = self.pool.candidates[index]
        if isinstance(result, Outcome):
            return self._done(index, self._trial_of(index, result))
        self._binaries[index] = result
        family = family_named(candidate.family)
        if why := misfit(self.machine, family, self.job.kernel, candidate.constants, result.resources):
            return self._done(index, self._trial_of(index, Outcome("pruned", why)))
        return self._built.append(index)

    def _measure(self) -> None:
        while (
            self._built and len(self._measuring) < self.engine.devices and (self.engine.overlaps or not self._compiling)
        ):
            best = self._best()
            if best and self._is_late(self._finals_s):  # other compiled candidates are left for the next search
                return self._built.clear()
            index = self._built.popleft()
            give_up_us = HOPELESS * best.median_us if best and best.median_us else inf
            self._measuring[self._measured([index], replace(FIRST, give_up_us=give_up_us))] = index

    def _measured(self, indexes: Sequence[int], runs: Runs) -> Future[list[Outcome]]:
        return self.engine.measure(
            self.job, [(self.pool.candidates[index], self._binaries[index]) for index in indexes], runs
        )

    def _done(self, index: int, trial: Trial) -> None:
        self.trials[index] = self._last = trial
        if self.known.get(self.pool.candidates[index]) is not trial:
            self._measured_now += 1
            self.store.add(trial)
        self.strategy.tell(index, trial.median_us)
        self._report_progress("searching")

    # ---- the finals: the best candidates, measured alternately

    def _finals(self) -> None:
        """Successive halving: the faster half enters the next round, and so does the default, which the winner must
        beat.
        """
        finalists = [] if self.stop.is_set() else self._finalists()
        self._build(finalists)
        finalists = [index for index in finalists if index in self._binaries]
        default = next((index for index in finalists if self.pool.candidates[index] == self.default), None)
        rounds: dict[int, list[Outcome]] = {index: [] for index in finalists}
        again, runs = self.again, replace(FINAL, seconds=self._final_s)
        while finalists and not self.stop.is_set():
            self._report_progress("finals")
            outcomes = self._measured(finalists, runs).result()
            if again and any(each.note for each in outcomes) and not self._is_late():
                again -= 1
                continue
            for index, outcome in zip(finalists, outcomes, strict=True):
                if self.stop.is_set():
                    return
                rounds[index].append(outcome)
                self.trials[index] = self._trial_of(index, _together(rounds[index]))
                self.store.add(self.trials[index])
            finalists = sorted(
                (each for each in finalists if self.trials[each].median_us),
                key=lambda each: self.trials[each].median_us or 0,
            )
            self._last_round = finalists
            if len(finalists) <= 2:
                break
            half = finalists[: -(-len(finalists) // 2)]
            finalists = half if default in half or default not in finalists else [*half[:-1], default]
        if default in self._last_round and not is_faster(rounds[self._last_round[0]][-1], rounds[default][-1]):
            self._last_round = [default]

    def _finalists(self) -> list[int]:
        """The fastest candidates, and all timed guesses: the entry that wisdom already has, and the defaults."""
        timed = sorted((trial.median_us, index) for index, trial in self.trials.items() if trial.median_us is not None)
        if not timed:
            return []
        close = [index for us, index in timed[:FINALISTS] if us <= CLOSE * timed[0][0]]
        return list(dict.fromkeys([*close, *(index for _, index in timed if index < self.pool.guesses)]))

    def _build(self, indexes: Sequence[int]) -> None:
        """Compile candidates that an earlier search measured and that have no binary yet."""
        missing = {
            self.engine.compile(self.job.kernel, self.pool.candidates[index]): index
            for index in indexes
            if index not in self._binaries
        }
        for future, index in missing.items():
            result = future.result()
            if isinstance(result, Binary):
                self._binaries[index] = result

    # ---- results

    def _best(self) -> Trial | None:
        """Fastest trial; of the last round of finals if there was one, because times of rounds are not comparable."""
        timed = [
            trial
            for index, trial in self.trials.items()
            if trial.median_us is not None and (not self._last_round or index in self._last_round)
        ]
        # reliable times precede unreliable ones
        return min(timed, key=lambda trial: (bool(trial.note), trial.median_us or 0), default=None)

    def _trial_of(self, index: int, outcome: Outcome) -> Trial:
        candidate, job = self.pool.candidates[index], self.job
        binary, facts = self._binaries.get(index), self.engine.facts
        ceilings = self.machine.ceilings_of(candidate.family, job.kernel, candidate.constants)
        blocks = outcome.microseconds
        provenance = binary.provenance if binary else {}
        return Trial(
            kernel=job.kernel, batch=job.batch, device=facts.name, family=candidate.family,
            constants=candidate.constants,
            template=template_digest(candidate.family), state=outcome.state, reason=outcome.reason,
            median_us=outcome.median_us if blocks else None, spread=outcome.spread if blocks else None,
            runs=len(blocks), predicted_us=self.pool.predicted_us[index],
            floor_us=ceilings.floor_us(job.kernel, job.batch, most_sets(self.machine.limits.is_cpu)),
            bytes_per_s=ceilings.bytes_per_s, flops_per_s=ceilings.flops_per_s,
            registers=binary.resources.registers if binary else None,
            shared_bytes=family_named(candidate.family).shared_bytes(job.kernel, candidate.constants),
            note=outcome.note, driver=facts.measured_with,
            compiler=f"{provenance.get('compiler', '')} {provenance.get('compiler_version', '')}".strip(),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip

    def _report_progress(self, phase: str) -> None:
        left = self.strategy.left()
        if self.budget.candidates is not None:
            left = min(left, max(0, self.budget.candidates - self._asked))
        left = 0 if phase == "done" else left
        self.say(Progress(self.job, phase, len(self.trials), left, self._best(), self._last))

    def _why_nothing(self) -> str:
        if self.stop.is_set():
            return "the search was stopped before any candidate was measured"
        states: dict[str, Any] = {}
        for trial in self.trials.values():
            states.setdefault(trial.state, trial.reason)
        if not states:
            lacks = "no family has a candidate for it on this device"
            return "the budget ended before any candidate was tried; give more" if len(self.pool) else lacks
        return "no candidate could be measured; " + "; ".join(f"{state}: {reason}" for state, reason in states.items())


def _together(rounds: Sequence[Outcome]) -> Outcome:
    """Merge a finalist's rounds: all blocks and notes, or only the last round if that failed."""
    last = rounds[-1]
    if last.state != "measured":
        return last
    notes = dict.fromkeys(each.note for each in rounds if each.note)
    return replace(last, microseconds=tuple(us for each in rounds for us in each.microseconds), note=", ".join(notes))


def is_faster(one: Outcome, other: Outcome) -> bool:
    """Whether one candidate is faster than another, measured alternately: the 95 % interval of the ratio is below 1."""
    _, highest = interval([first / second for first, second in zip(one.microseconds, other.microseconds, strict=True)])
    return highest < 1
