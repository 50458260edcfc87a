"""`tune` from Python: budgets, and mistakes that are named before anything is measured."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

import ksgen
from ksgen import reference
from ksgen.errors import KsgenError, PatternError, SpecError
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Chain, Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning import search
from ksgen.tuning.engine import Entries
from ksgen.tuning.job import Job, Outcome, Runs
from ksgen.tuning.search import FINALS_SECONDS, Budget, Tuned
from ksgen.tuning.strategies import MOST
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner, parse_budget
from tests.support.fake_gpu import FakeGpu
from tests.support.tuning_search import TimedEngine, space_of
from tests.tuning.test_worker import HAS_OPENCL

needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
CONSTANTS = SimtConstants(32, 16, 8, 1, 4, 4, 2, 1, "registers")


@pytest.mark.slow
@needs_opencl
def test_tune_from_python_and_the_same_process_launches_what_was_found(
    wisdom: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "opencl:0")
    chosen = replace(CONSTANTS, tile_in=4)
    space_of(monkeypatch, chosen)
    monkeypatch.setattr(Simt, "default", lambda self, kernel, limits, batch=None: chosen)
    PLANNER.forget()  # the wisdom of other tests
    launcher = ksgen.Launcher(2, 24, 9, 3)
    assert "the family's default: no search has been run" in launcher.explain(70)
    generation, told = PLANNER.generation, []
    found = ksgen.tune(Pattern(2, 24, 9, 3), batch=70, budget=5, family="simt", progress=told.append)
    assert isinstance(found, ksgen.tuning.Tuned)
    assert ksgen.tune(Pattern(2, 24, 9, 3), batch=70, budget=1, job="gradient").best.family == "cpu_gradient"
    layer = Chain((Pattern(2, 9, 5, 3), Pattern(1, 4, 18, 3)))
    assert ksgen.tune(layer, batch=70, budget=1).best.family == "vector"
    with pytest.raises(SpecError, match=r"job='gradient' of a chain; accepted: multiply"):
        ksgen.tune(layer, job="gradient")
    for given in ([], None):
        with pytest.raises(PatternError, match="accepted: one Pattern or more"):
            ksgen.tune(given)  # type: ignore[arg-type]
    for form in ("2,24,9,3", (2, 24, 9, 3)):
        with pytest.raises(SpecError, match="between=relu with one factor"):
            ksgen.tune(form, between="relu")
    with pytest.raises(SpecError, match="between=relu with one factor"):
        ksgen.tune(Pattern(2, 24, 9, 3), between="relu")
    assert found.best.constants == chosen
    assert told[-1].phase == "done"
    assert str(told[-1]).startswith("ks_2x24x9x3_float32_bsf, batch 70: done, 1 done, 0 left; best ")
    assert PLANNER.generation > generation
    assert "wisdom, measured at batch 70" in launcher.explain(70)
    x, weights = np.ones((70, 54), np.float32), np.ones((2, 24, 9, 3), np.float32)
    np.testing.assert_allclose(
        launcher(x, weights), reference.multiply(Pattern(2, 24, 9, 3), x, weights, "bsf"), rtol=1e-6
    )


class SlowEngine(TimedEngine):
    """One whose measurements take all the time that they may, on a clock that is a number, and are noisy if `note`
    says so.
    """

    note = ""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        self.now += len(entries) * runs.seconds
        return [replace(each, note=self.note) for each in super()._measure(job, entries, runs)]


@pytest.mark.parametrize(("note", "compilers"), [("", 1), ("other processes took 50% of the CPU time", 1), ("", 16)])
def test_a_budget_of_time_is_used_and_kept(
    note: str, compilers: int, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All candidates take the same time, so that none promises a gain. They are some of a space, and more than the
    longest budget has time for.
    """
    listed = Simt.space
    monkeypatch.setattr(Simt, "space", lambda *given: islice(listed(*given), 400))
    engine = SlowEngine(FakeGpu(), lambda kernel, candidate: 10.0, compilers)
    engine.note = note
    monkeypatch.setattr(search, "time", engine)
    monkeypatch.setattr(search, "FIRST", Runs(seconds=1.0))  # tests have shorter ones
    job = Job(KernelSpec(Pattern(1, 192, 48, 2)), 25088)
    try:
        (alone,) = Tuner(engine, store, SearchOptions(family="simt", fresh=True)).run([job])
        (given,) = Tuner(engine, store, SearchOptions(Budget(seconds=200), family="simt", fresh=True)).run([job])
        (short,) = Tuner(engine, store, SearchOptions(Budget(seconds=20), family="simt", fresh=True)).run([job])
    finally:
        engine.close()
    assert isinstance(alone, Tuned)
    assert isinstance(given, Tuned)
    assert isinstance(short, Tuned)
    assert alone.looked <= MOST < given.looked
    assert 200 - FINALS_SECONDS < given.seconds <= 200 + FINALS_SECONDS * bool(note)  # one round more may begin in time
    assert 16 <= short.seconds <= 20 + 4 * bool(note)


def test_a_budget_that_ends_before_any_candidate_is_named(store: TrialStore, monkeypatch: pytest.MonkeyPatch) -> None:
    space_of(monkeypatch, CONSTANTS)
    engine = TimedEngine(FakeGpu(), lambda kernel, candidate: 10.0)
    try:
        (found,) = Tuner(engine, store, SearchOptions(Budget(seconds=1e-9), family="simt")).run(
            [Job(KernelSpec(Pattern(1, 192, 48, 2)), 70)]
        )
    finally:
        engine.close()
    assert str(found).endswith(", batch 70: the budget ended before any candidate was tried; give more")


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, Budget()),
        ("60s", Budget(seconds=60)),
        ("1.5m", Budget(seconds=90)),
        ("2h", Budget(seconds=7200)),
        ("200", Budget(None, 200)),
    ],
)
def test_budgets(text: str | None, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("batch", [0, -1, 1.5, "64"])
def test_mistakes_of_batches(batch: object, store: TrialStore) -> None:
    with pytest.raises(SpecError, match=r"batch=.*; accepted: a whole number from 1 up"):
        ksgen.tune(Pattern(2, 24, 9, 3), batch=batch, budget=1, device="opencl:0")  # type: ignore[arg-type]


def test_an_epilogue_that_is_an_array_is_refused() -> None:
    with pytest.raises(SpecError, match=r"epilogue=array\(.*; accepted: an Epilogue"):
        ksgen.tune(Pattern(2, 24, 9, 3), epilogue=np.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "0", "0s", "1.5", "-3", "10 minutes", "1e9s", "9" * 30])
def test_mistakes_of_budgets(text: str) -> None:
    with pytest.raises(
        KsgenError, match="accepted: a time such as 60s, 5m or 1h, or a number of candidates such as 200"
    ):
        parse_budget(text)
