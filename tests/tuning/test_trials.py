"""The store of trials: what comes back, two writers at once, and files that cannot be used."""

import multiprocessing
import os
import sqlite3
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.families.simt.shape import SimtConstants
from ksgen.families.vector.chain import VectorChainConstants
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.tuning import trials
from ksgen.tuning.trials import Trial, TrialStore

KERNEL = KernelSpec(Pattern(1, 64, 48, 2), "float16", "bsl", Epilogue(True, "gelu"), 64)
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")
TRIAL = Trial(
    KERNEL, 64, "a device", "simt", CONSTANTS, "01234567", "measured", "", 12.5, 0.02, 30, 11.0, 9.0, 1e12, 2e13, 96,
    4096, "clocks moved",
    "a driver", "nvcc 13.0", "2026-01-02T03:04:05+00:00",
)  # fmt: skip


def stages(count: int, **changes: object) -> Trial:
    return replace(TRIAL, constants=replace(CONSTANTS, stages=count), **changes)


def test_a_trial_comes_back_as_it_was_added_also_to_another_process_view(tmp_path: Path) -> None:
    store = TrialStore(tmp_path / "deep" / "trials.sqlite")
    pruned = stages(4, state="pruned", reason="spills 8 bytes", median_us=None, spread=None, registers=None)
    for trial in (TRIAL, pruned):
        store.add(trial)
    assert store.trials() == [TRIAL, pruned]
    assert TrialStore(tmp_path / "deep" / "trials.sqlite").trials() == [TRIAL, pruned]


def test_a_chains_trial_comes_back_and_others_are_kept_as_before_there_were_chains(tmp_path: Path) -> None:
    chain = KernelSpec((Pattern(2, 3, 4, 1), Pattern(1, 8, 6, 1)))
    trials = [
        replace(
            TRIAL, kernel=chain, family="vector", constants=VectorChainConstants(48, "batch 8 3 2 1, batch 8 3 2 1", 0)
        ),
        TRIAL,
    ]
    store = TrialStore(tmp_path / "trials.sqlite")
    for trial in trials:
        store.add(trial)
    assert store.trials() == trials
    assert len({trial.kernel for trial in store.trials()}) == 2
    with sqlite3.connect(tmp_path / "trials.sqlite") as database:
        texts = [text for (text,) in database.execute("select kernel from trials order by id")]
    database.close()
    assert ["before" in text for text in texts] == [True, False]


def test_trials_are_those_of_a_job_in_the_order_of_their_first_look(tmp_path: Path) -> None:
    store = TrialStore(tmp_path / "trials.sqlite")
    other = replace(TRIAL, kernel=replace(KERNEL, layout="bsf"))
    for trial in (
        stages(2),
        stages(3),
        replace(TRIAL, batch=65),
        replace(TRIAL, device="another"),
        other,
        stages(2, median_us=1.0),
    ):
        store.add(trial)
    assert store.trials(KERNEL, 64, "a device") == [stages(2, median_us=1.0), stages(3)]
    assert store.trials(batch=65) == [replace(TRIAL, batch=65)]
    assert store.trials(replace(KERNEL, layout="bsf")) == [other]
    assert len(store.trials(device="a device")) == 4


def test_trials_of_constants_that_are_no_longer_known_are_passed_over(tmp_path: Path) -> None:
    store = TrialStore(tmp_path / "trials.sqlite")
    for count in (2, 3, 4):
        store.add(stages(count))
    with sqlite3.connect(tmp_path / "trials.sqlite") as database:
        database.execute("update trials set constants = '{\"tile\": 1}' where id = 1")
        database.execute("update trials set family = 'magic' where id = 2")
    database.close()
    assert store.trials() == [stages(4)]


def _write(path: Path, batch: int) -> None:
    store = TrialStore(path)
    for count in range(2, 52):
        store.add(stages(count, batch=batch))


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write, args=(path, batch)) for batch in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [len(TrialStore(path).trials(batch=batch)) for batch in (1, 2)] == [50, 50]


def test_opening_waits_for_another_process_that_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite refuses one of two processes that meet, once in two hundred times, whatever its time limit is."""
    path, refusals = tmp_path / "trials.sqlite", iter((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY))
    usual = trials._open

    def refusing(path: Path) -> sqlite3.Connection:
        if code := next(refusals, None):
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = code
            raise error
        return usual(path)

    monkeypatch.setattr(trials, "_open", refusing)
    TrialStore(path).add(stages(2))
    assert TrialStore(path).trials() == [stages(2)]


def test_what_stays_locked_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "BUSY_SECONDS", 0.2)
    path = tmp_path / "trials.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        in_memory(path)


def in_memory(path: Path) -> TrialStore:
    """A store that warns once, and still keeps trials."""
    with warnings.catch_warnings(record=True) as warned:
        store = TrialStore(path)
        store.add(stages(9))
    (warning,) = warned
    assert str(warning.message).startswith(f"{path}: trials are kept in memory only, and are lost at the end (")
    assert stages(9) in store.trials()
    return store


def test_a_damaged_file_costs_a_warning_and_stays_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    path.write_bytes(b"no database" * 1000)
    in_memory(path)
    assert path.read_bytes() == b"no database" * 1000


def test_a_file_of_another_form_costs_a_warning(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "trials.sqlite") as database:
        database.execute("create table trials (id integer primary key, kernel)")
    database.close()
    in_memory(tmp_path / "trials.sqlite")


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    in_memory(tmp_path / "file" / "trials.sqlite")


def test_a_file_that_cannot_be_written_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trials.sqlite"
    known = TrialStore(path)
    known.add(stages(5))
    monkeypatch.setattr("ksgen.tuning.trials.BUSY_SECONDS", 0.05)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("begin immediate")  # no other connection can write
        store = in_memory(path)
        assert store.trials() == [stages(5), stages(9)]
        other.execute("rollback")
    other.close()
    assert known.trials() == [stages(5)]


def test_a_store_that_breaks_midway_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trials.sqlite"
    monkeypatch.setattr("ksgen.tuning.trials.BUSY_SECONDS", 0.05)
    store = TrialStore(path)
    store.add(stages(2))
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("begin immediate")
        with pytest.warns(UserWarning, match="database is locked"):
            store.add(stages(3))
        other.execute("rollback")
    other.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.add(stages(4))
    assert store.trials() == [stages(2), stages(3), stages(4)]


def test_it_needs_no_memory_that_processes_share(tmp_path: Path) -> None:
    """A write-ahead log needs such memory, which a network file system lacks."""
    path = tmp_path / "trials.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("pragma journal_mode = wal")  # as an earlier version left it
        database.execute("create table other (id)")
    store = TrialStore(path)
    store.add(TRIAL)
    assert [each.name for each in tmp_path.iterdir()] == ["trials.sqlite"]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("pragma journal_mode").fetchone() == ("delete",)


def test_a_pipe_and_what_others_can_write_cost_a_warning(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trials.sqlite")
    in_memory(tmp_path / "trials.sqlite")
    path = tmp_path / "own" / "trials.sqlite"
    TrialStore(path).add(stages(5))
    for place in (path, path.parent):
        mode = place.stat().st_mode
        place.chmod(0o777)
        assert in_memory(path).trials() == [stages(9)]  # nothing is read from it
        place.chmod(mode)
    assert TrialStore(path).trials() == [stages(5)]
