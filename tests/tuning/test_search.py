"""Searches on a real device: who wins, what is kept, what a bad candidate costs, and how a search goes on after it
was stopped.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ksgen
from ksgen.build.request import Binary
from ksgen.devices import find_device
from ksgen.emit.render import template_digest
from ksgen.errors import ConstantsError, KsgenError
from ksgen.families import FAMILIES
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants
from ksgen.measure.trust import BLOCK_SECONDS, LEAST_BLOCKS
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning import engine as engine_module
from ksgen.tuning import search as search_module
from ksgen.tuning.engine import LocalEngine
from ksgen.tuning.job import Candidate, Job, Outcome, Runs
from ksgen.tuning.process import Worker
from ksgen.tuning.search import FINALISTS, Budget, Progress, Search, Tuned, is_faster
from ksgen.tuning.trials import Trial, TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner
from ksgen.wisdom import Entry, load_wisdom, save
from tests.support import broken_kernels as broken
from tests.support.short_series import shorten
from tests.support.tuning_search import own_cache, space_of, time_shortly, without_notes
from tests.tuning.test_worker import HAS_OPENCL

needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
JOB = Job(KernelSpec(Pattern(2, 24, 9, 3)), 70)
CONSTANTS = SimtConstants(32, 16, 8, 1, 4, 4, 2, 1, "registers")


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    made = LocalEngine("opencl:0", compilers=2, preload=["tests.support.broken_kernels"], limit_s=6)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    time_shortly(monkeypatch)


def search(
    engine: LocalEngine, store: TrialStore, say: Callable[[Progress], None] = lambda each: None, **options: object
) -> Tuned:
    (found,) = Tuner(engine, store, SearchOptions(**{"family": "simt", **options})).run([JOB], say)
    if isinstance(found, KsgenError):
        raise found
    return found


@pytest.mark.slow
@needs_opencl
def test_the_fastest_right_candidate_wins_and_is_wisdom(
    engine: LocalEngine, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (broken.WRONG, broken.CRASHES, broken.HANGS, broken.REFUSED, broken.CRASHES_COMPILER)
    space_of(monkeypatch, *(replace(CONSTANTS, min_blocks=each) for each in (2, *bad)), replace(CONSTANTS, tile_out=32))
    told: list[Progress] = []
    found = search(engine, store, told.append, strategy="exhaustive")

    states = {trial.constants.min_blocks: trial.state for trial in store.trials() if trial.constants.min_blocks != 1}
    assert states == {
        2: "measured", broken.WRONG: "wrong", broken.CRASHES: "failed", broken.HANGS: "hung",
        broken.REFUSED: "failed", broken.CRASHES_COMPILER: "failed",
    }  # fmt: skip
    assert found.looked == len(store.trials()) == 8  # the space and the default
    assert found.best.state == "measured"
    assert told[-1].best == found.best
    assert found.default is not None
    assert found.default.constants == FAMILIES["simt"].default(JOB.kernel, Tuner(engine, store).limits)
    assert found.best.floor_us is None or 0 < found.best.floor_us < found.best.median_us * 1.5

    (entry,) = load_wisdom(engine.facts.name).entries()
    assert (entry.kernel, entry.batch, entry.constants) == (JOB.kernel, 70, found.best.constants)
    assert entry.median_us == pytest.approx(found.best.median_us, abs=1e-3)
    assert entry.measured["template"] == template_digest("simt")
    assert not entry.is_stale
    assert {"spread", "driver", "compiler", "ksgen", "date"} <= set(entry.measured)
    assert ("floor_us" in entry.measured) == (found.best.floor_us is not None)

    assert [each.phase for each in told].count("done") == 1
    assert told[-1].phase == "done"
    assert [each.looked for each in told if each.phase == "searching"] == list(range(1, 9))


@needs_opencl
def test_what_is_known_is_not_measured_again(
    engine: LocalEngine, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    space_of(monkeypatch, *(replace(CONSTANTS, tile_in=each) for each in (4, 8, 16)))
    assert search(engine, store, budget=Budget(candidates=2)).measured_now == 2
    without_notes(engine.facts.name, store)
    again = search(engine, store, strategy="exhaustive")
    assert (again.looked, again.measured_now) == (4, 2)
    without_notes(engine.facts.name, store)
    assert search(engine, store, strategy="exhaustive").measured_now == 0
    assert search(engine, store, strategy="exhaustive", fresh=True).measured_now == 4
    without_notes(engine.facts.name, store)
    store.add(replace(store.trials()[0], note="clocks moved"))
    assert search(engine, store, strategy="exhaustive").measured_now == 1
    for trial in store.trials():
        store.add(replace(trial, driver="an older one"))
    assert search(engine, store, strategy="exhaustive").measured_now == 4


@needs_opencl
def test_a_disturbed_round_is_run_again_and_a_note_that_stays_is_wisdom_but_takes_no_sound_ones_place(
    engine: LocalEngine, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    space_of(monkeypatch, *(replace(CONSTANTS, tile_in=each) for each in (4, 8, 16)))
    measure, moved = engine.measure, "clocks moved"
    disturbed, rounds = 0, []  # how many rounds of finals are to be; how many candidates each had

    def measured(job: Job, entries: Sequence[tuple[Candidate, Binary]], runs: Runs) -> Future[list[Outcome]]:
        is_final = runs == search_module.FINAL
        rounds.extend([len(entries)] if is_final else [])
        note = moved if is_final and len(rounds) <= disturbed else ""
        done: Future[list[Outcome]] = Future()
        done.set_result([replace(each, note=note) for each in measure(job, entries, runs).result()])
        return done

    def finals(count: int, **options: object) -> tuple[Tuned, list[int]]:
        nonlocal disturbed
        disturbed = count
        rounds.clear()
        return search(engine, store, strategy="exhaustive", fresh=True, **options), list(rounds)

    monkeypatch.setattr(engine, "measure", measured)
    unreliable, ran = finals(99)
    assert (unreliable.best.note, unreliable.is_kept, ran[0], ran[1], ran[2]) == (moved, True, ran[0], ran[0], ran[0])
    (entry,) = load_wisdom(engine.facts.name).entries()
    assert (entry.why_unreliable, entry.median_us) == (moved, pytest.approx(unreliable.best.median_us, abs=1e-3))
    sound, ran = finals(2)
    assert (sound.best.note, sound.is_kept, len(ran) > 2, ran[1], ran[2]) == ("", True, True, ran[0], ran[0])
    assert not finals(99)[0].is_kept
    (entry,) = load_wisdom(engine.facts.name).entries()
    assert (entry.why_unreliable, entry.constants) == ("", sound.best.constants)


@needs_opencl
def test_the_wisdom_of_before_is_the_first_guess_and_defends_its_place(
    engine: LocalEngine, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    space_of(monkeypatch, replace(CONSTANTS, tile_in=4))
    known = replace(CONSTANTS, tile_batch=64)
    save(engine.facts.name, [Entry(JOB.kernel, 80, "simt", known, {"median_us": 1.0, "template": "stale"})])
    order: list[Trial] = []
    search(engine, store, lambda each: order.append(each.last) if each.last else None, budget=Budget(candidates=1))
    assert order[0].constants == known


@pytest.mark.slow
@needs_opencl
def test_a_family_and_a_time_bound_the_search(engine: LocalEngine, store: TrialStore) -> None:
    begin = time.monotonic()
    found = search(engine, store, budget=Budget(seconds=1.0), strategy="random")
    assert time.monotonic() - begin < 60
    assert 1 <= found.looked < 500
    with pytest.raises(
        KsgenError, match=r"ks_2x24x9x3_float32_bsf, batch 70: not supported by mma on .*; mma is for: tensor cores"
    ):
        search(engine, store, family="mma")
    with pytest.raises(ConstantsError, match=r"unknown kernel family 'magic'; known: .*mma, .*simt"):
        search(engine, store, family="magic")
    with pytest.raises(KsgenError, match="strategy 'luck': accepted: model, random, exhaustive"):
        Tuner(engine, store, SearchOptions(strategy="luck"))


@needs_opencl
def test_a_job_of_which_nothing_can_be_measured_says_why(
    engine: LocalEngine, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(CONSTANTS, min_blocks=broken.WRONG)
    space_of(monkeypatch, wrong)
    monkeypatch.setattr(Simt, "default", lambda self, kernel, limits, batch=None: wrong)
    with pytest.raises(KsgenError, match="no candidate could be measured; wrong: relative error "):
        search(engine, store)
    assert not load_wisdom(engine.facts.name).entries()


@needs_opencl
def test_damaged_wisdom_is_refused_before_anything_is_measured(
    engine: LocalEngine, store: TrialStore, tmp_path: Path
) -> None:
    path = save(engine.facts.name, [])
    path.write_text("my own notes")
    with pytest.raises(KsgenError, match="not a wisdom file"):
        Tuner(engine, store)


@needs_opencl
def test_a_processor_s_search_starts_one_child_that_compiles_and_measures(
    store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **options: started.append(given) or popen(*given, **options)
    )
    monkeypatch.setattr(engine_module, "Worker", Worker)  # whose child is no fork
    space_of(monkeypatch, replace(CONSTANTS, tile_in=4))
    engine = LocalEngine("opencl:0", compilers=1, preload=["tests.support.short_probes"])
    try:
        assert search(engine, store, strategy="exhaustive").looked == 2
    finally:
        engine.close()
    assert len(started) == 1


@needs_opencl
def test_a_search_that_is_stopped_keeps_and_saves_the_best_so_far(store: TrialStore) -> None:
    engine = LocalEngine("opencl:0", compilers=1)
    tuner = Tuner(engine, store, SearchOptions(strategy="exhaustive"))

    def interrupt() -> None:
        while len(store.trials()) < 3:
            time.sleep(0.05)
        tuner.stop.set()
        engine.close()

    threading.Thread(target=interrupt).start()
    found, unbegun = tuner.run([JOB, replace(JOB, batch=71)])
    assert isinstance(found, Tuned)
    assert not found.is_complete
    of_notes_and_times = [(bool(trial.note), trial.median_us) for trial in store.trials()]
    assert (bool(found.best.note), found.best.median_us) == min(of_notes_and_times), "reliable times come first"
    assert all(trial.state == "measured" for trial in store.trials())
    assert [entry.constants for entry in load_wisdom(engine.facts.name).entries()] == [found.best.constants]
    assert str(unbegun) == "ks_2x24x9x3_float32_bsf, batch 71: the search was stopped before it reached this job"


TUNE = """
import ksgen
from tests.support.short_series import shorten

shorten(setattr)
ksgen.tune(ksgen.Pattern(2, 24, 9, 3), batch=70, device="opencl:0", strategy="exhaustive", budget={budget!r})
"""


def _environment(tmp_path: Path) -> dict[str, str]:
    own = {"KSGEN_WISDOM_DIR": str(tmp_path / "wisdom"), "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**os.environ, **own_cache(tmp_path), **own}


@pytest.mark.slow
@needs_opencl
def test_a_search_that_is_killed_loses_at_most_what_is_in_flight(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    store = TrialStore(tmp_path / "cache" / "trials.sqlite")
    command = [sys.executable, "-c", TUNE.format(budget=None)]
    killed = subprocess.Popen(command, env=environment, start_new_session=True)
    while len(store.trials()) <= FINALISTS + 2:
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    without_notes(find_device("opencl:0").name, store)
    kept = store.trials()
    subprocess.run([sys.executable, "-c", TUNE.format(budget=len(kept) + 3)], env=environment, check=True)
    after = store.trials()
    assert len(after) == len(kept) + 3
    assert [trial.constants for trial in after[: len(kept)]] == [trial.constants for trial in kept]
    measured_again = sum(now != before for now, before in zip(after, kept, strict=False))
    assert measured_again <= FINALISTS + 1  # and the default


def _tune_twice(variables: dict[str, str], batch: int) -> None:
    os.environ |= variables
    shorten(setattr)
    for layout in ("bsf", "bsl"):
        ksgen.tune(Pattern(1, 8, 8, 2), layout=layout, batch=batch, budget=2, device="opencl:0")


@pytest.mark.slow
@needs_opencl
def test_two_tuners_on_one_store_and_one_wisdom_file_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, variables = (
        multiprocessing.get_context("spawn"),
        own_cache(tmp_path) | {"KSGEN_WISDOM_DIR": str(tmp_path / "wisdom")},
    )
    tuners = [spawn.Process(target=_tune_twice, args=(variables, batch)) for batch in (50, 60)]
    for tuner in tuners:
        tuner.start()
    for tuner in tuners:
        tuner.join()
    assert [tuner.exitcode for tuner in tuners] == [0, 0]
    trials = TrialStore(tmp_path / "cache" / "trials.sqlite").trials()
    assert len(trials) == 8
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    entries = load_wisdom(trials[0].device).entries()
    assert sorted((entry.kernel.layout, entry.batch) for entry in entries) == [
        ("bsf", 50),
        ("bsf", 60),
        ("bsl", 50),
        ("bsl", 60),
    ]


MOVED = "clocks moved"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("times", "best"),
    [({0: (5.0, MOVED), 1: (6.0, "")}, 1), ({0: (5.0, MOVED), 1: (6.0, MOVED)}, 0), ({0: (7.0, ""), 1: (6.0, "")}, 1)],
)
def test_a_reliable_time_wins_over_a_shorter_unreliable_one(times: dict[int, tuple[float, str]], best: int) -> None:
    search: Any = object.__new__(Search)
    search.trials = {
        index: SimpleNamespace(median_us=median_us, note=note) for index, (median_us, note) in times.items()
    }
    search._last_round = [0, 1]
    assert search._best() is search.trials[best]


def test_an_unreliable_time_of_the_default_gives_no_speed_over_it() -> None:
    best = Trial(JOB.kernel, 70, "a device", "simt", CONSTANTS, template_digest("simt"), "measured", median_us=4.0)
    default = replace(best, constants=replace(CONSTANTS, tile_in=4), median_us=8.0)
    for note, factor in (("", 2.0), (MOVED, None)):
        found = Tuned(JOB, best, replace(default, note=note), 2, 2, 1.0, True)
        assert found.entry().over_default == factor


@pytest.mark.parametrize(
    ("others", "defaults", "is_so"),
    [
        ([9.0] * 6, [10.0] * 6, True),
        # what disturbs both says nothing
        ([9.9, 19.8, 9.9, 9.9, 39.6, 9.9], [10.0, 20.0, 10.0, 10.0, 40.0, 10.0], True),
        ([9.0, 10.1, 9.0, 9.0, 9.0, 9.0], [10.0] * 6, False),
        ([9.0, 10.1, *[9.0] * 10], [10.0] * 12, True),
        ([10.0] * 6, [10.0] * 6, False),
        ([9.0], [10.0], True),
    ],
)
def test_a_candidate_is_faster_if_it_is_so_turn_by_turn(
    others: list[float], defaults: list[float], is_so: bool
) -> None:
    one, other = (Outcome("measured", "", tuple(us)) for us in (others, defaults))
    assert is_faster(one, other) == is_so


@pytest.mark.parametrize(("beaten", "front"), [(True, 3), (False, 0)])
def test_the_default_is_in_the_last_round_and_loses_to_what_beats_it_turn_by_turn(
    beaten: bool, front: int, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is seventh of eight candidates, and candidate 3 is the fastest."""
    us = [10.7, 10.2, 10.3, 10.0, 10.4, 10.5, 10.6, 10.9]
    rounds: list[list[int]] = []
    search: Any = object.__new__(Search)
    search.stop, search.pool, search.default = threading.Event(), SimpleNamespace(candidates=list(range(8))), 0
    search.budget, search.again = Budget(), 0
    search.trials, search._last_round, search._binaries, search.store = {}, [], dict.fromkeys(range(8)), store
    monkeypatch.setattr(store, "add", lambda trial: None)
    search._report_progress, search._build, search._finalists = (
        (lambda phase: None),
        (lambda indexes: None),
        lambda: list(range(8)),
    )
    search._trial_of = lambda index, outcome: SimpleNamespace(
        median_us=outcome.median_us, note=outcome.note, index=index
    )

    def measured(indexes: Sequence[int], runs: Runs) -> Future[list[Outcome]]:
        rounds.append(list(indexes))
        done: Future[list[Outcome]] = Future()
        slower = 1.0 if beaten else 1.1  # in one turn of six
        done.set_result(
            [Outcome("measured", "", (*[us[each]] * 5, us[each] * (slower if each == 3 else 1.0))) for each in indexes]
        )
        return done

    search._measured = measured
    search._finals()
    assert [set(each) for each in rounds] == [set(range(8)), {3, 1, 2, 0}, {3, 0}]
    assert search._best().index == front
    assert Tuned(JOB, search._best(), None, 8, 8, 1.0, True).default_won is False


@pytest.mark.parametrize(
    ("budget_s", "seconds"), [(None, 1.0), (600.0, 1.0), (30.0, 0.5), (0.001, LEAST_BLOCKS * BLOCK_SECONDS)]
)
def test_a_finalist_has_enough_blocks_however_small_the_budget(
    budget_s: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "FINAL", Runs(seconds=1.0))  # tests have shorter ones
    own: Any = object.__new__(Search)
    own.budget = Budget(seconds=budget_s)
    assert own._final_s == pytest.approx(seconds)
