"""Trials of a few candidates: who wins, what is kept, what a second run does, and what a search replaces."""

import errno
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ksgen
from ksgen import wisdom as wisdoms
from ksgen.calibration import trials
from ksgen.calibration.trials import Calibrated, Calibration
from ksgen.emit.templates import template_digest
from ksgen.errors import KsgenError, SpecError
from ksgen.families import FAMILIES
from ksgen.passport import Proof, record
from ksgen.pattern import Chain, Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning import tuner
from ksgen.tuning.engine import Entries
from ksgen.tuning.job import Candidate, Job, Outcome, Runs
from ksgen.tuning.strategies import MOST_TRIED
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner
from ksgen.wisdom import MOST_ATTEMPTS, load_wisdom
from tests.support.fake_gpu import FakeGpu
from tests.support.tuning_search import TimedEngine, some_of_space, time_shortly

JOB = Job(KernelSpec(Pattern(1, 24, 16, 2), "float16"), 70)
OTHER = Job(KernelSpec(Pattern(2, 8, 16, 1), "float16"), 70)
NAME = FakeGpu().name


def by_family(fastest: str) -> Callable[[KernelSpec, Candidate], float]:
    return lambda kernel, candidate: 10.0 if candidate.family == fastest else 30.0


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "list_space", some_of_space)


def calibrated(store: TrialStore, fastest: str, *jobs: Job, fresh: bool = False) -> list[Calibrated]:
    engine = TimedEngine(FakeGpu(), by_family(fastest))
    try:
        return Calibration(engine, store, fresh).run(jobs)
    finally:
        engine.close()


def test_each_familys_default_is_tried_and_the_fastest_is_wisdom_marked_as_a_trial(store: TrialStore) -> None:
    (found,) = calibrated(store, "mma", JOB)  # not the default
    assert found.is_new
    assert found.entry is not None
    assert (found.entry.family, found.entry.is_trial) == ("mma", True)
    assert found.over_default == pytest.approx(3.0)
    assert found.over_prediction == pytest.approx(found.entry.measured["predicted_us"] / 10, rel=1e-3)
    trials = store.trials()
    assert len(trials) == MOST_TRIED
    limits = Tuner(TimedEngine(FakeGpu(), by_family("")), store).limits
    for name in ("mma", "simt"):  # all that serve it at such a batch
        own = FAMILIES[name].default(JOB.kernel, limits, JOB.batch)
        assert any(trial.constants == own for trial in trials)
    assert load_wisdom(NAME).entries() == [found.entry]


def test_a_second_run_does_only_what_is_missing(store: TrialStore) -> None:
    (first,) = calibrated(store, "simt", JOB)
    again, other = calibrated(store, "mma", JOB, OTHER)
    assert again.entry == first.entry
    assert not again.is_new
    assert other.is_new
    assert {trial.kernel for trial in store.trials()} == {JOB.kernel, OTHER.kernel}


def test_a_search_replaces_a_trial_though_its_time_is_longer_and_no_trial_a_search(store: TrialStore) -> None:
    calibrated(store, "simt", JOB)
    engine = TimedEngine(FakeGpu(), lambda kernel, candidate: 40.0 if candidate.family == "mma" else 50.0)
    try:
        (tuned,) = Tuner(engine, store, SearchOptions(family="mma", fresh=True)).run([JOB])
    finally:
        engine.close()
    assert not isinstance(tuned, KsgenError)
    (kept,) = load_wisdom(NAME).entries()
    assert (kept.family, kept.is_trial, kept.median_us) == ("mma", False, 40.0)
    for fresh in (False, True):
        (found,) = calibrated(store, "simt", JOB, fresh=fresh)
        assert not found.is_new
        assert found.entry == kept


def test_a_fresh_trial_replaces_an_earlier_one_and_an_unreliable_one_does_not(store: TrialStore) -> None:
    calibrated(store, "simt", JOB)
    (slower,) = calibrated(store, "mma", JOB, fresh=True)
    assert slower.is_new
    assert slower.entry is not None
    assert slower.entry.family == "mma"
    assert load_wisdom(NAME).entries() == [slower.entry]
    engine = Noisy(FakeGpu(), by_family("simt"))
    try:
        (found,) = Calibration(engine, store, fresh=True).run([JOB])
    finally:
        engine.close()
    assert found.entry == slower.entry
    assert load_wisdom(NAME).entries() == [slower.entry]


class Broken(TimedEngine):
    """Nothing that it measures is right."""

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        return [Outcome("wrong", "relative error 1e+00 in /home/someone/file")] * len(entries)


def test_a_kernel_without_a_right_candidate_has_no_entry_and_says_why(store: TrialStore) -> None:
    engine = Broken(FakeGpu(), by_family(""))
    try:
        (found,) = Calibration(engine, store).run([JOB])
    finally:
        engine.close()
    assert found.entry is None
    assert "no candidate could be measured; wrong: relative error" in found.why
    assert load_wisdom(NAME).entries() == []


class Noisy(TimedEngine):
    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        return [Outcome(each.state, "", each.microseconds, "noisy") for each in super()._measure(job, entries, runs)]


def test_a_trial_with_unreliable_times_is_repeated_by_the_next_run(store: TrialStore) -> None:
    engine = Noisy(FakeGpu(), by_family("simt"))
    try:
        (first,) = Calibration(engine, store).run([JOB])
    finally:
        engine.close()
    assert first.entry is not None
    assert first.over_default is None
    (second,) = calibrated(store, "mma", JOB)
    assert second.is_new
    assert second.entry is not None
    assert (second.entry.family, second.entry.why_unreliable, second.entry.attempts) == ("mma", "", 0)


def test_unreliable_times_are_repeated_a_few_times_alone_and_launchers_keep_the_default_meanwhile(
    store: TrialStore,
) -> None:
    for attempt in range(1, MOST_ATTEMPTS + 2):
        engine = Noisy(FakeGpu(), by_family("mma"))  # not the default
        try:
            (found,) = Calibration(engine, store).run([JOB])
        finally:
            engine.close()
        (kept,) = load_wisdom(NAME).entries()
        assert found.entry == kept  # what launchers take
        is_open = attempt < MOST_ATTEMPTS
        assert (found.is_new, kept.is_open, found.keeps_default) == (attempt <= MOST_ATTEMPTS, is_open, is_open)
        assert (kept.attempts, kept.why_unreliable, kept.over_default) == (min(attempt, MOST_ATTEMPTS), "noisy", None)
        assert kept.family == ("simt" if attempt < MOST_ATTEMPTS else "mma")
    for _ in range(2):  # fresh trials do not count on
        engine = Noisy(FakeGpu(), by_family("mma"))
        try:
            (found,) = Calibration(engine, store, fresh=True).run([JOB])
        finally:
            engine.close()
        assert found.entry is not None
        assert (found.entry.family, found.entry.attempts, found.keeps_default) == ("simt", 1, True)
        assert load_wisdom(NAME).entries() == [found.entry]
    (again,) = calibrated(store, "mma", JOB, fresh=True)
    assert again.entry is not None
    assert (again.entry.why_unreliable, again.entry.attempts) == ("", 0)


@pytest.mark.slow
def test_calibrate_takes_patterns_chains_and_specs_and_launchers_take_the_winners(
    wisdom: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    time_shortly(monkeypatch)
    spec = tmp_path / "small.yaml"
    spec.write_text("defaults: {gradients: true}\nkernels:\n  - {pattern: [2,24,9,3]}\n")
    told: list[object] = []
    found = ksgen.calibrate(
        "2,24,9,3", spec, Chain.read(["2,9,5,3", "1,4,18,3"]), batches=[7, 70], progress=told.append
    )
    assert told
    assert {(each.kernel.job, each.batch) for each in found} == {
        (job, batch) for job in ("multiply", "gradient", "chain") for batch in (7, 70)
    }
    assert all(each.entry and each.entry.is_trial for each in found)
    assert "wisdom of a trial, measured at batch 70" in ksgen.Launcher(2, 24, 9, 3).explain(70)
    json.dumps([each.entry.as_json() for each in found if each.entry])


def test_mistakes_are_named_before_anything_is_opened() -> None:
    with pytest.raises(SpecError, match="nothing to calibrate; accepted: patterns such as '1,192,48,2'"):
        ksgen.calibrate()
    for batches in (0, [2.5], []):
        with pytest.raises(SpecError, match=r"^batch=.*; accepted: a whole number from 1 up$"):
            ksgen.calibrate("1,3,2,2", batches=batches)  # type: ignore[arg-type]


def test_a_folder_that_takes_no_wisdom_is_named_before_anything_is_measured(
    store: TrialStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "file" / "wisdom"))
    with pytest.raises(KsgenError, match="wisdom cannot be written there; set KSGEN_WISDOM_DIR to another folder"):
        calibrated(store, "mma", JOB)
    assert store.trials() == []


def test_a_disk_that_becomes_full_loses_nothing_that_was_settled(
    store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated(store, "mma", JOB)
    before = load_wisdom(NAME).entries()

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield path

    with monkeypatch.context() as patched:
        patched.setattr(wisdoms, "replaced_in_turn", full)
        known, lost = calibrated(store, "mma", JOB, OTHER)
    assert known.entry in before
    assert lost.entry is None
    assert "cannot be written (No space left on device)" in lost.why
    assert load_wisdom(NAME).entries() == before
    _, found = calibrated(store, "mma", JOB, OTHER)  # once there is room again
    assert found.entry is not None
    assert len(load_wisdom(NAME).entries()) == 2


def test_a_family_that_the_passport_bars_is_not_tried(store: TrialStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_PERMIT", "")
    gpu = FakeGpu()
    record(gpu, {"mma": Proof("disabled", "relative error 1e+00", template_digest("mma"), 3, 1.0)})
    (found,) = calibrated(store, "mma", JOB)
    assert found.entry is not None
    assert found.entry.family == "simt"
    assert {trial.family for trial in store.trials()} == {"simt"}


def test_a_launchers_trials_that_cannot_begin_end_with_the_reason_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: str) -> None:
        raise KsgenError("wisdom cannot be written\nand more")

    monkeypatch.setenv("KSGEN_TRIAL", "background")
    monkeypatch.setattr(os, "nice", lambda added: added)
    monkeypatch.setattr(trials, "opened", refuse)
    (tmp_path / "asked").write_bytes(pickle.dumps(("cuda:0", [])))
    with pytest.raises(SystemExit) as ended:
        trials.main(str(tmp_path / "asked"))
    assert ended.value.code == "wisdom cannot be written"
