"""Searches any number of jobs: opens an engine, runs the jobs, and saves each winner as wisdom when it is known."""

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from statistics import median

from ksgen.build.request import Binary
from ksgen.emit.templates import template_digest
from ksgen.errors import KsgenError
from ksgen.families import family_for, family_named, operand_of, requested_family, takes_job
from ksgen.launch.choice import limits_from
from ksgen.launch.fused import verdict_for
from ksgen.locks import new_lock
from ksgen.measure.roofline import Ceilings
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import is_word
from ksgen.tuning.engine import Engine, LocalEngine
from ksgen.tuning.job import Candidate, Job, Runs
from ksgen.tuning.model import Machine, predict_us
from ksgen.tuning.pool import list_space, make_pool, supported_families
from ksgen.tuning.search import AGAIN, Budget, Progress, Search, Tuned
from ksgen.tuning.strategies import STRATEGIES, TRIAL
from ksgen.tuning.trials import Trial, TrialStore
from ksgen.values import excerpt
from ksgen.wisdom import MOST_ATTEMPTS, Entry, Wisdom, check_writable, load_wisdom, save

CPU_CANDIDATES = 13  # candidates of a processor's search without a budget
NOISE_REPEATS, NOISE_RUNS = 10, Runs(seconds=0.5)  # timings of an unchanged kernel, and the limits of each
RECENT = 1000  # the device's latest trials; a search learns from those of other kernels

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search."""

    budget: Budget = field(default_factory=Budget)  # budget of each job
    strategy: str = "model"
    family: str | None = None  # the only family to search
    fresh: bool = False  # measure known candidates again


def parse_budget(text: str | int | None) -> Budget:
    """Read a budget per job: a time such as `60s`, `5m` or `1h`, or a number of candidates; None: no limit."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|m|min|h)?\s*", str(text)) if text is not None else None
    if text is None:
        return Budget()
    if not found or float(found[1]) == 0 or (not found[2] and "." in found[1]):
        raise KsgenError(
            f"budget {excerpt(text)}: accepted: a time such as 60s, 5m or 1h, or a number of candidates such as 200"
        )
    return Budget(seconds=float(found[1]) * _UNITS[found[2]]) if found[2] else Budget(candidates=int(found[1]))


def open_engine(device: str | None = None, scheduler: str | None = None) -> Engine:
    """Open the engine of this machine's device, or of the devices of a Dask cluster."""
    if scheduler is None:
        return LocalEngine(device)
    from ksgen.tuning.cluster import ClusterEngine

    return ClusterEngine(scheduler, device)


class NotBegunError(KsgenError):
    """The search was stopped before this job's turn."""


class Tuner:
    """Searches on one engine. Keeps trials in `store`, and winners as wisdom."""

    def __init__(self, engine: Engine, store: TrialStore, options: SearchOptions = SearchOptions()) -> None:
        if not is_word(options.strategy, STRATEGIES):
            raise KsgenError(f"strategy {excerpt(options.strategy)}: accepted: {', '.join(STRATEGIES)}")
        if options.family is not None:
            requested_family(options.family)
        self.engine, self.store, self.options = engine, store, options
        self.stop = threading.Event()
        self.limits = limits_from(engine.facts.kind, engine.facts.target, engine.facts.limits)
        self._ceilings: dict[tuple[str, str | None], Ceilings] = {}
        self._guard = new_lock()
        # refuses an unreadable file before the search
        self._wisdom = load_wisdom(engine.facts.name, strict=True, target=engine.facts.target)

    def run(self, jobs: Sequence[Job], say: Callable[[Progress], None] | None = None) -> list[Tuned | KsgenError]:
        """Return one result per job, in order. An interrupt stops all searches; each keeps its best result so far."""
        check_writable()
        with ThreadPoolExecutor(self.engine.jobs_at_once) as threads:
            searches = [threads.submit(self._tune, job, say or (lambda progress: None)) for job in jobs]
            try:
                wait(searches)
            except BaseException as error:  # even then, the pool must not wait for all of its searches
                self.stop.set()
                self.engine.close()
                if not isinstance(error, KeyboardInterrupt):
                    raise
            return [_result(search) for search in searches]

    def trials(self, jobs: Iterable[Job]) -> list[Trial]:
        """Every candidate that was tried on this device for the jobs, in this search or an earlier one."""
        return [each for job in jobs for each in self.store.trials(job.kernel, job.batch, self.engine.facts.name)]

    def families(self, job: Job) -> list[str]:
        """The families that are searched for a job."""
        if self.options.family is None:
            return supported_families(job, self.limits)
        family = family_named(self.options.family)
        if not takes_job(family, job.kernel, self.limits, job.batch):
            raise KsgenError(
                f"{job}: not supported by {family.name} on {self.engine.facts.name}; {family.name} is for: {family.why}"
            )
        return [family.name]

    def machine(self, job: Job) -> Machine:
        """The device as the cost model sees it, with ceilings measured once per kind of multiply-add."""
        facts, ceilings, plain = self.engine.facts, {}, {}
        for name in self.families(job):
            family = family_named(self.options.family or name)
            operands = {operand_of(job.kernel, each) for each in family.defaults(job.kernel, self.limits)}
            on_cores = next((each for each in operands if each), None)
            ceilings[name] = self._ceilings_of(job.kernel, on_cores)
            if on_cores and None in operands:
                plain[name] = self._ceilings_of(job.kernel, None)
        return Machine(facts.target, self.limits, facts.limits.multiprocessors, ceilings, plain)

    def why_not_one(self, job: Job) -> str:
        """Reason why a layer cannot be one launch on this device; empty if it can, or if the job is not a layer."""
        if not job.kernel.is_chain:
            return ""
        kind = "processor" if self.limits.is_cpu else self.engine.facts.kind
        found = verdict_for(job.kernel, self.limits, kind, job.batch, "yes")
        return "" if found.is_one else found.why

    def default(self, job: Job) -> Candidate:
        """Default of the family that launchers take without wisdom, or of the only family to search."""
        named = self.options.family
        family = family_named(named) if named else family_for(job.kernel, self.limits, job.batch)
        return Candidate(family.name, family.default(job.kernel, self.limits, job.batch))

    @property
    def is_trial(self) -> bool:
        """Whether only a few candidates per kernel are measured; any search replaces the result."""
        return self.options.strategy == TRIAL

    def settled(self, job: Job) -> Entry | None:
        """Entry that makes a trial unnecessary: for this kernel with dense arrays, this batch and the current template.

        A trial's entry with an unreliable time does not count before `MOST_ATTEMPTS` trials.
        """
        entry = self.kept(job)
        return None if entry and entry.is_open else entry

    def kept(self, job: Job) -> Entry | None:
        """Entry for this kernel with dense arrays, this batch and the current template, settled or not."""
        found = self._wisdom.of(replace(job.kernel, stride="dense"), job.batch)
        return None if found is None or found.is_stale else found

    def _guesses(self, job: Job, machine: Machine, incumbent: Entry | None) -> list[Candidate]:
        """Candidates to measure first: wisdom's entry, the launchers' default, and the families' defaults.

        A trial measures few candidates. So `default` of each family precedes the other `defaults`, both in the order of
        predicted times.
        """
        first = [Candidate(incumbent.family, incumbent.constants)] if incumbent else []
        only, others = self.options.family, list[Candidate]()  # an alias may mean one kind of a family's constants
        for name in machine.ceilings:
            family = family_named(only or name)
            others += [Candidate(name, each) for each in family.defaults(job.kernel, self.limits, job.batch)]
        if self.is_trial:

            def rank(each: Candidate) -> tuple[bool, float]:
                family = family_named(each.family)
                is_default = each.constants == family.default(job.kernel, self.limits, job.batch)
                return not is_default, predict_us(machine, family, job.kernel, each.constants, job.batch)

            others.sort(key=rank)
        return [*first, self.default(job), *others]

    def _tune(self, job: Job, say: Callable[[Progress], None]) -> Tuned:
        try:
            machine = self.machine(job)
            incumbent = self._wisdom.of(job.kernel, job.batch) or self._wisdom.lookup(job.kernel, job.batch)
        except (KsgenError, CancelledError, RuntimeError):  # a stopped search has a closed engine
            if not self.stop.is_set():
                raise
        if self.stop.is_set():
            raise NotBegunError(f"{job}: the search was stopped before it reached this job")
        default, guesses = self.default(job), self._guesses(job, machine, incumbent)
        others = self.store.trials(device=self.engine.facts.name, newest=RECENT)
        others = [each for each in others if _is_current(each)]
        pool = make_pool(job, machine, list_space(job, machine, self.options.family), guesses, others)
        strategy = STRATEGIES[self.options.strategy](pool, self.options.budget != Budget())
        again = 0 if self.is_trial else AGAIN  # a trial repeats no disturbed rounds; a later one measures again
        search = Search(
            pool, strategy, known=self._known(job), default=default, engine=self.engine, machine=machine,
            store=self.store, budget=self._budget(), stop=self.stop, say=say, again=again,
        )  # fmt: skip
        tuned = replace(search.run(), is_trial=self.is_trial)
        if self.is_trial and tuned.best.note:
            previous = None if self.options.fresh else self.kept(job)
            tuned = replace(tuned, attempts=1 + (previous.attempts if previous else 0))
        kept = tuned
        if 0 < tuned.attempts < MOST_ATTEMPTS and tuned.default and not tuned.default_won:
            # launchers keep using the default, marked as unreliable too, until a trial's winner has a reliable time
            kept = replace(tuned, best=replace(tuned.default, note=tuned.best.note))
        if is_better := _is_better(kept, incumbent):
            self._save(kept.entry())
        return replace(tuned, is_kept=is_better and kept is tuned)

    def _budget(self) -> Budget:
        """Budget of a job. By default, it is smaller on a processor, because compiling takes ten times as long as
        measuring there."""
        budget = self.options.budget
        is_stated = budget != Budget() or self.options.strategy != "model"
        return budget if is_stated or not self.limits.is_cpu else Budget(candidates=CPU_CANDIDATES)

    def _save(self, entry: Entry) -> None:
        with self._guard:
            save(self.engine.facts.name, [entry])
            self._wisdom = Wisdom([*self._wisdom.entries(), entry])

    def _ceilings_of(self, kernel: KernelSpec, operand: str | None) -> Ceilings:
        key = (kernel.precision if operand else kernel.dtype, operand)
        with self._guard:
            if key not in self._ceilings:
                self._ceilings[key] = self.engine.ceilings(*key)
            return self._ceilings[key]

    def _known(self, job: Job) -> dict[Candidate, Trial]:
        """The job's trials with this template, driver and kind of processor that need not be repeated.

        Failed candidates are tried again, because disk or memory may have been full. Candidates with unreliable times
        are tried again, too.
        """
        if self.options.fresh:
            return {}
        return {
            each.candidate: each
            for each in self.trials([job])
            if _is_current(each)
            and each.driver == self.engine.facts.measured_with
            and each.state != "failed"
            and not each.note
        }


def _is_current(trial: Trial) -> bool:
    return trial.template == template_digest(trial.family)


def _is_better(tuned: Tuned, incumbent: Entry | None) -> bool:
    """Whether the winner replaces the incumbent: the better rank wins.

    With equal ranks, the winner of a complete search replaces it. After a stopped search, the shorter time decides.
    """
    entry = tuned.entry()
    if incumbent is None or (incumbent.kernel, incumbent.batch) != (entry.kernel, entry.batch):
        return True
    if incumbent.rank != entry.rank:
        return entry.rank < incumbent.rank
    return tuned.is_complete or incumbent.median_us is None or (tuned.best.median_us or 0) <= incumbent.median_us


def _result(search: "Future[Tuned]") -> Tuned | KsgenError:
    try:
        return search.result()
    except KsgenError as error:
        return error


# ---- noise: how much the time of an unchanged kernel varies; a search cannot detect smaller differences


@dataclass(frozen=True)
class Noise:
    """One kernel, measured several times."""

    job: Job
    median_us: float  # median of the medians
    # width of the interval that holds a measurement's median, relative to that median; the median over all measurements
    within: float
    between: float  # (largest - smallest) / median of the measurements' medians
    notes: tuple[str, ...]  # why times are unreliable, such as "clocks moved"


def measure_noise(engine: Engine, job: Job, candidate: Candidate) -> Noise:
    """Measure one kernel several times; `KsgenError` if it cannot be measured."""
    built = engine.compile(job.kernel, candidate).result()
    if not isinstance(built, Binary):
        raise KsgenError(f"{job}: {built.reason}")
    outcomes = [engine.measure(job, [(candidate, built)], NOISE_RUNS).result()[0] for _ in range(NOISE_REPEATS)]
    if failed := next((each for each in outcomes if each.state != "measured"), None):
        raise KsgenError(f"{job}: {failed.state}: {failed.reason}")
    medians = [each.median_us for each in outcomes]
    between = (max(medians) - min(medians)) / median(medians)
    notes = tuple(sorted({each.note for each in outcomes if each.note}))
    return Noise(job, median(medians), median(each.spread for each in outcomes), between, notes)
