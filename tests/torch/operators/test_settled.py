"""Stored times of a processor's methods: later processes read them, and what they cannot trust is as if absent."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.devices import find_device  # noqa: E402
from ksgen.errors import KsgenWarning  # noqa: E402
from ksgen.pattern import Pattern  # noqa: E402
from ksgen.spec import KernelSpec  # noqa: E402
from ksgen.torch.operators import choice, settled  # noqa: E402

KERNEL = KernelSpec(Pattern(1, 6, 4, 2))
WAYS = ("ksgen", "strided")
JOB = (KERNEL, 8, *WAYS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine whose cache is empty, and a process that has timed nothing."""
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    for name in ("_measured", "_unreliable", "_trials"):
        monkeypatch.setattr(choice, name, {})
    settled.forget()
    yield tmp_path
    settled.forget()


def key() -> Any:
    return JOB, torch.get_num_threads()


def never() -> torch.Tensor:
    raise AssertionError("a method was run")


def forget_times() -> None:
    """Begin as another process does: without measured times."""
    choice.forget_times()
    settled.forget()


def file_of(folder: Path) -> Path:
    (found,) = folder.glob("methods-*.json")
    return found


def test_a_later_process_takes_the_stored_times_and_runs_nothing(folder: Path) -> None:
    choice._measured[key()], choice._unreliable[key()] = {"ksgen": 2e-5, "strided": 1e-5}, ""
    choice.save_times()
    forget_times()
    assert choice.faster(JOB, dict.fromkeys(WAYS, never)) == "strided"
    forget_times()
    told = choice.choose(KERNEL, 8, torch.device("cpu"))
    assert (told.backend, told.why) == ("strided", "10 us here, ksgen 20 us")


def test_stored_times_are_explained_like_measured_ones(folder: Path) -> None:
    """The file has the methods in another order."""
    patterns, options = [(1, 6, 4, 2)], (torch.float32, "bsf", "none", False)
    job = choice.job_of("chain", patterns, *options, False), choice.size_of(8), "one", "each"
    stored = job, torch.get_num_threads()
    choice._measured[stored], choice._unreliable[stored] = {"one": 1e-5, "each": 2e-5}, ""
    lines = choice.describe_times(patterns, *options, 8)
    assert len(lines) == 1
    choice.save_times()
    forget_times()
    assert choice._is_timed(stored, ("one", "each"))
    assert choice.describe_times(patterns, *options, 8) == lines


def test_without_a_file_nothing_is_asked_that_takes_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "_stamp", never)
    assert settled.times_of(key(), WAYS) == {}


def test_unreliable_times_and_methods_that_cannot_run_are_not_stored(folder: Path) -> None:
    other = (KERNEL, 4, *WAYS), torch.get_num_threads()
    choice._measured |= {key(): {"ksgen": 2e-5, "strided": float("inf")}, other: {"ksgen": 1e-5, "strided": 2e-5}}
    choice._unreliable |= {key(): "", other: "other processes took 50% of the CPU time"}
    choice.save_times()
    forget_times()
    assert settled.times_of(key(), WAYS) == {"ksgen": 2e-5}
    assert settled.times_of(other, WAYS) == {}


def test_times_of_two_processes_are_kept_together(folder: Path) -> None:
    def save(number: int) -> None:
        for each in range(20):
            settled.save({(number, each): {"ksgen": 1e-5}})

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=save, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    settled.forget()
    assert all(settled.times_of((number, each), WAYS) for number in range(3) for each in range(20))


def _with_stamp(**other: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content["stamp"] |= other
        path.write_text(json.dumps(content))

    return change


def _with_times(given: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content["figures"] = {repr(key()): given}
        path.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[]"),
        lambda path: path.chmod(0o666),  # which others can have written
        lambda path: path.unlink(),
        _with_stamp(torch="0.1"),
        _with_stamp(driver="another compiler"),
        _with_stamp(device="another machine"),
        _with_stamp(templates="of long ago"),
        _with_times({"ksgen": "fast"}),
        _with_times({"ksgen": -1.0}),
        _with_times({"another method": 1e-5}),
        _with_times([1e-5]),
    ],
)
def test_a_foreign_or_damaged_file_is_as_if_absent(folder: Path, damage: Callable[[Path], None]) -> None:
    settled.save({key(): {"ksgen": 1e-5, "strided": 2e-5}})
    assert settled.times_of(key(), WAYS)
    damage(file_of(folder))
    settled.forget()
    assert settled.times_of(key(), WAYS) == {}


def test_times_of_another_processor_of_the_same_name_are_as_if_absent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled.save({key(): {"ksgen": 1e-5, "strided": 2e-5}})
    assert settled.times_of(key(), WAYS)
    settled.forget()
    monkeypatch.setattr(find_device(), "target", "host of another kind")
    assert settled.times_of(key(), WAYS) == {}


def test_a_folder_that_takes_no_file_is_reported_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = folder / "file"
    blocked.write_text("")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(blocked))
    with pytest.warns(KsgenWarning, match="are not stored, so that each process takes them again"):
        assert settled.save({key(): {"ksgen": 1e-5}}) is None
    assert settled.times_of(key(), WAYS) == {}
