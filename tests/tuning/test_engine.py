"""How a search keeps a GPU's compilers and device busy: on an engine whose binaries and times are made up, for a GPU
that is not there.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ksgen import __version__
from ksgen.build.request import Binary, Resources
from ksgen.devices.base import DeviceLimits
from ksgen.emit.render import template_digest
from ksgen.errors import DeviceError, ToolchainError
from ksgen.families import FAMILIES
from ksgen.measure.roofline import Ceilings
from ksgen.measure.trust import LEAST_BLOCKS
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning import engine as engine_module
from ksgen.tuning import tuner
from ksgen.tuning.engine import Engine, Entries, LocalEngine
from ksgen.tuning.job import Candidate, Facts, Job, Outcome, Runs
from ksgen.tuning.model import Machine
from ksgen.tuning.pool import list_space
from ksgen.tuning.search import Budget, Tuned
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner
from ksgen.wisdom import load_wisdom

FACTS = Facts(
    "NVIDIA Imagined",
    "sm_90a",
    "cuda",
    "cuda",
    "580",
    DeviceLimits(227 * 1024, 1024, 132),
    __version__,
    tuple(map(template_digest, FAMILIES)),
)
JOBS = [Job(KernelSpec(Pattern(1, b, 48, 2), "float16", "bsl"), 25088) for b in (192, 96)]


def some_of_space(job: Job, machine: Machine, only: str | None = None) -> list[Candidate]:
    """Every 19th of ten thousand: how a search goes on does not depend on how many there are."""
    return list_space(job, machine, only)[::19]


@dataclass
class Busy:
    """How many calls run at once, and how many at most so far."""

    now: int = 0
    most: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> None:
        with self.guard:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self.guard:
            self.now -= 1


class ImaginedEngine(Engine):
    """Tensor cores take as long as their tile is far from 96 outputs; what has 5 stages spills, 4 is refused."""

    measuring_s = 0.002

    def __init__(self, devices: int = 1) -> None:
        self.facts = FACTS
        self.compiles, self.measures = Busy(), Busy()
        self.measured: list[Candidate] = []
        self.overlapped = 0
        self.lost = False
        super().__init__(compilers=8, devices=devices)

    def _compile(self, kernel: KernelSpec, candidate: Candidate) -> Binary:
        with self.compiles:
            time.sleep(0.02)
        if candidate.constants.stages == 4:
            raise ToolchainError("no")
        return Binary(b"", "", "sm_90a", Resources(64, 0, 16 if candidate.constants.stages == 5 else 0, 0))

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        with self.measures:
            time.sleep(self.measuring_s)
            self.overlapped += self.compiles.now > 0
        if self.lost:
            raise DeviceError("it is gone")
        self.measured += [candidate for candidate, _ in entries]
        return [Outcome("measured", "", (self.time_of(candidate),) * LEAST_BLOCKS) for candidate, _ in entries]

    def time_of(self, candidate: Candidate) -> float:
        return 1000.0 if candidate.family == "simt" else 10.0 + abs(candidate.constants.tile_out - 96)

    def _ceilings(self, precision: str, operand: str | None) -> Ceilings:
        return Ceilings(4.3e12, 60e12 if operand is None else 790e12)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialStore:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setattr(tuner, "list_space", some_of_space)
    return TrialStore(tmp_path / "trials.sqlite")


def tune(engine: Engine, store: TrialStore, jobs: Sequence[Job] = JOBS, **options: object) -> list[Tuned]:
    found = Tuner(engine, store, SearchOptions(**options)).run(jobs)
    assert all(isinstance(each, Tuned) for each in found), found
    return [each for each in found if isinstance(each, Tuned)]


def test_all_cores_compile_while_the_device_measures_one_at_a_time(store: TrialStore) -> None:
    engine = ImaginedEngine()
    for found in tune(engine, store):
        assert found.best.family != "simt"
        assert found.best.median_us < 50
    assert 3 <= engine.compiles.most <= 8
    assert engine.measures.most == 1
    assert engine.overlapped


def test_several_devices_measure_at_once(store: TrialStore) -> None:
    engine = ImaginedEngine(devices=3)
    engine.measuring_s = 0.05  # long compared with other work of a busy machine
    tune(engine, store, budget=Budget(candidates=40))
    assert engine.measures.most == 3


def test_what_spills_or_is_refused_is_kept_with_the_reason_and_never_measured(store: TrialStore) -> None:
    engine = ImaginedEngine()
    tune(engine, store, JOBS[:1], strategy="random", budget=Budget(candidates=60))
    states = {
        stages: {trial.state for trial in store.trials() if trial.constants.stages == stages} for stages in (2, 3, 4, 5)
    }
    assert states == {2: {"measured"}, 3: {"measured"}, 4: {"failed"}, 5: {"pruned"}}
    assert {trial.reason for trial in store.trials() if trial.state != "measured"} == {
        "compiling: no",
        "spills 16 bytes per thread",
    }
    assert not any(candidate.constants.stages in (4, 5) for candidate in engine.measured)
    assert all(trial.registers == 64 for trial in store.trials() if trial.state in ("measured", "pruned"))


def test_one_family_alone(store: TrialStore) -> None:
    (found,) = tune(ImaginedEngine(), store, JOBS[:1], family="simt")
    assert found.best.family == "simt"
    assert {trial.family for trial in store.trials()} == {"simt"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("job", "batch", "families"),
    [
        ("multiply", 25088, {"wgmma", "mma", "simt"}),
        ("multiply", 25087, {"mma", "simt"}),  # rows that no tensor map describes
        ("gradient", 25088, {"gradient"}),
    ],
)
def test_only_families_of_the_job_that_take_its_batch_are_looked_at(
    store: TrialStore, job: str, batch: int, families: set[str]
) -> None:
    kernel = KernelSpec(Pattern(1, 192, 48, 2), "float16", "bsl", job=job)
    (found,) = tune(ImaginedEngine(), store, [Job(kernel, batch)], budget=Budget(candidates=4))
    assert {trial.family for trial in store.trials()} == families
    assert found.entry().kernel == kernel
    assert [entry.kernel for entry in load_wisdom(FACTS.name).entries()] == [kernel]


@pytest.mark.parametrize(("kind", "target"), [("native", "host of this kind"), ("opencl", None)])
def test_an_entry_names_the_processor_that_measured_it(store: TrialStore, kind: str, target: str | None) -> None:
    engine = ImaginedEngine()
    engine.time_of = lambda candidate: 10.0  # type: ignore[method-assign]
    engine._compile = lambda kernel, candidate: Binary(b"", "", "host")  # type: ignore[method-assign]
    limits = replace(FACTS.limits, is_cpu=True, vector_bytes=64)
    engine.facts = replace(FACTS, kind=kind, target="host of this kind", dialect="opencl", limits=limits)
    (found,) = tune(engine, store, [Job(KernelSpec(Pattern(1, 192, 48, 2)), 392)], budget=Budget(candidates=1))
    assert found.entry().measured.get("target") == target


def test_trials_of_another_processor_of_the_same_name_are_not_known(store: TrialStore) -> None:
    """Searches of both may share a store, as in a home folder of several machines."""
    job, limits = Job(KernelSpec(Pattern(1, 192, 48, 2)), 392), replace(FACTS.limits, is_cpu=True, vector_bytes=64)

    def measured_on(target: str) -> int:
        engine = ImaginedEngine()
        engine.time_of = lambda candidate: 10.0  # type: ignore[method-assign]
        engine._compile = lambda kernel, candidate: Binary(b"", "", "host")  # type: ignore[method-assign]
        engine.facts = replace(FACTS, kind="native", target=target, dialect="opencl", limits=limits)
        (found,) = tune(engine, store, [job], budget=Budget(candidates=3))
        return found.measured_now

    assert [measured_on(each) for each in ("host of one kind", "host of one kind", "host of another")] == [3, 0, 3]


def test_a_search_for_a_gradient_looks_at_plain_products_and_at_tensor_cores_by_ceilings_of_each(
    store: TrialStore,
) -> None:
    job = Job(KernelSpec(Pattern(1, 192, 48, 2), "float16", "bsl", job="gradient"), 25088)
    both, one = (
        Tuner(ImaginedEngine(), store, SearchOptions(family=name)).machine(job) for name in (None, "gradient_mma")
    )
    assert (set(both.ceilings), set(both.plain)) == ({"gradient"}, {"gradient"})
    assert (set(one.ceilings), set(one.plain)) == ({"gradient"}, set())
    tune(ImaginedEngine(), store, [job], budget=Budget(candidates=4))
    assert {trial.constants.on_tensor_cores for trial in store.trials()} == {True, False}


def test_an_engine_that_is_lost_ends_the_search_with_its_own_words(store: TrialStore) -> None:
    engine = ImaginedEngine()
    engine.lost = True
    results = Tuner(engine, store).run(JOBS)
    assert [str(each) for each in results] == ["it is gone", "it is gone"]
    assert store.trials() == [trial for trial in store.trials() if trial.state in ("failed", "pruned")]


class PatientEngine(ImaginedEngine):
    """Engine whose device does not answer until the engine is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        super().__init__()

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        self.closed.wait(30)
        raise DeviceError("it is closed")

    def close(self) -> None:
        self.closed.set()
        super().close()


def test_whatever_comes_between_ends_the_searches_that_wait(store: TrialStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted test would otherwise go on waiting."""

    def interrupted(searches: Sequence[object]) -> None:
        raise GeneratorExit("the time is up")

    monkeypatch.setattr(tuner, "wait", interrupted)
    engine = PatientEngine()
    with pytest.raises(GeneratorExit, match="the time is up"):
        Tuner(engine, store).run(JOBS)
    assert engine.closed.is_set()


class Child:
    """A process that compiles or measures until an event ends it; `log` lists each begin and end in order."""

    def __init__(self, facts: Facts) -> None:
        self._facts, self.log, self.may_end = (
            facts,
            list[str](),
            {"compile": threading.Event(), "measure": threading.Event()},
        )
        self.begun = {"compile": threading.Semaphore(0), "measure": threading.Semaphore(0)}

    def _work(self, what: str) -> None:
        self.log.append(f"{what} begins")
        self.begun[what].release()
        assert self.may_end[what].wait(30)
        self.log.append(f"{what} ends")

    def facts(self) -> Facts:
        return self._facts

    def compile(self, kernel: KernelSpec, candidate: Candidate, facts: Facts) -> Binary:
        self._work("compile")
        return Binary(b"", "", facts.target)

    def measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        self._work("measure")
        return []

    def ceilings(self, precision: str, operand: str | None) -> Ceilings:
        self._work("measure")
        return Ceilings(1e10, 1e11)

    def stop(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("what", ["measure", "ceilings"])
def test_a_processor_never_measures_while_a_compiler_runs(
    what: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(replace(FACTS, kind="native", limits=replace(FACTS.limits, is_cpu=is_cpu)))
    monkeypatch.setattr(engine_module, "Worker", lambda *_: child)
    engine = LocalEngine(compilers=2)
    kernel, candidate = JOBS[0].kernel, Candidate("simt", None)
    compiles = [engine.compile(kernel, candidate) for _ in range(2)]
    for _ in compiles:
        assert child.begun["compile"].acquire(timeout=30)
    asked = threading.Thread(target=engine.ceilings, args=("float32", None))
    measured = engine.measure(JOBS[0], [], Runs(0.0)).result if what == "measure" else asked.join
    if what == "ceilings":
        asked.start()
    is_early = child.begun["measure"].acquire(timeout=30 if not is_cpu else 0.2)
    late = engine.compile(kernel, candidate)  # has to wait for what measures
    child.may_end["compile"].set()
    assert is_early or child.begun["measure"].acquire(timeout=30)
    assert [future.result().data for future in compiles] == [b"", b""]
    child.may_end["measure"].set()
    measured()
    late.result()
    engine.close()
    at = child.log.index("measure begins"), child.log.index("measure ends")
    during = [each for each in child.log[at[0] + 1 : at[1]] if is_cpu]
    assert is_early != is_cpu
    assert during == []
    assert child.log.count("compile ends") == 3
