"""Work in the background: deferred, shared, awaited, and ended with its process."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ksgen.build import background, children
from ksgen.build.background import PendingError, all_of, deferred, outcome
from ksgen.errors import ToolchainError
from ksgen.locks import yield_to_calls
from tests.support.process_state import has_ended, state_of

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[background._Background]:
    made = background._Background()
    monkeypatch.setattr(background, "_background", made)
    yield made
    made.stop()


def ask(key: str, work: Callable[[], Any]) -> Any:
    with deferred(lambda: True):
        return outcome(key, key, work)


def finish() -> None:
    for job in background.unfinished():
        assert job.done.wait(60)


def test_work_is_done_at_once_unless_it_is_deferred() -> None:
    assert outcome("key", "a kernel", lambda: 1) == 1
    with deferred(lambda: False):
        assert outcome("key", "a kernel", lambda: 2) == 2
    assert not background.is_busy()


def test_deferred_work_is_shared_and_handed_out_once() -> None:
    gate, runs = threading.Event(), []

    def work() -> int:
        runs.append(threading.current_thread())
        assert gate.wait(60)
        return 3

    for _ in range(3):
        with pytest.raises(PendingError, match=r"^key$"):
            ask("key", work)
    assert background.is_busy()
    gate.set()
    finish()
    assert ask("key", work) == 3
    assert len(runs) == 1
    assert runs[0] is not threading.current_thread()
    with pytest.raises(PendingError):
        ask("key", work)


def test_nothing_waits_for_work_that_is_not_needed() -> None:
    gate = threading.Event()
    ended, before = partial(gate.wait, 60), background.progress()
    with deferred(lambda: True):
        with pytest.raises(PendingError):
            outcome("key", "key", ended, is_needed=False)
        assert not background.is_busy()
        assert not background.is_pending(before)
        assert background.finish_jobs() == 0
        with pytest.raises(PendingError):
            outcome("key", "key", ended, is_needed=False)
        gate.set()
        (job,) = background._background.jobs.values()
        assert job.done.wait(60)
        assert outcome("key", "key", ended, is_needed=False) is True


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    def work() -> None:
        raise ToolchainError("refused")

    with pytest.raises(PendingError):
        ask("key", work)
    finish()
    lengths = set()
    for _ in range(3):
        with pytest.raises(ToolchainError, match=r"^refused$") as raised:
            ask("key", work)
        lengths.add(len(raised.traceback))
    assert len(lengths) == 1
    assert not background.is_busy()
    background.forget_errors()
    with pytest.raises(PendingError):
        ask("key", work)
    finish()
    with pytest.raises(ToolchainError):
        outcome("key", "key", work)
    assert "key" not in background._background.jobs  # the caller did the work, so its result is the last one


def test_several_works_begin_together() -> None:
    works = [lambda number=number: ask(str(number), lambda: number) for number in range(3)]
    with pytest.raises(PendingError):
        all_of(works)
    assert set(background._background.jobs) == {"0", "1", "2"}
    finish()
    assert all_of(works) == (0, 1, 2)


def test_work_is_done_by_the_caller_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert ask("key", lambda: 4) == 4


def test_a_stop_ends_commands_and_begins_nothing_more(own: background._Background) -> None:
    begun = threading.Event()
    found: list[Any] = []

    def work() -> None:
        begun.set()
        found.append(own.children.run(("sleep", "600")).returncode)

    for number in range(background.MOST_WORKERS + 1):
        with pytest.raises(PendingError):
            ask(str(number), work)
    assert begun.wait(60)
    own.stop()
    assert all(code == -9 for code in found)
    assert len(found) <= background.MOST_WORKERS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork of a process with threads
def test_a_forked_child_has_a_background_of_its_own(own: background._Background) -> None:
    gate = threading.Event()
    with pytest.raises(PendingError):
        ask("key", lambda: gate.wait(60))
    child = os.fork()
    if not child:
        is_right = background._background is not own and not background.is_busy() and outcome("key", "", lambda: 5) == 5
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_waits_for_work_that_imports_modules() -> None:
    """A child would wait for ever for the lock of a module that its parent was importing."""
    gate = threading.Event()
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(PendingError), deferred(lambda: True):
        outcome("key", "a device", lambda: gate.wait(60), imports=True)
    if not (child := os.fork()):
        os._exit(0)
    assert gate.is_set()
    os.waitpid(child, 0)


@pytest.fixture
def ticking(own: background._Background, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], int]]:
    """Provide a function that counts the steps of a background compiler, which takes one every 10 ms.

    A parameter False says that no call needs its result.
    """
    steps = tmp_path / "steps"
    steps.touch()
    compiler = partial(own.children.run, ("sh", "-c", f"while sleep 0.01; do echo >>'{steps}'; done"))
    with deferred(lambda: True), pytest.raises(PendingError):
        outcome("steps", "steps", compiler, is_needed=getattr(request, "param", True))
    until(lambda: steps.stat().st_size > 0)
    yield lambda: steps.stat().st_size
    own.children.stop()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def has_stopped(count: Callable[[], int]) -> bool:
    before = count()
    time.sleep(0.3)
    return count() == before


def test_compilers_are_stopped_during_a_long_call(ticking: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "PERIOD_S", 10**9)
    monkeypatch.setattr(children, "LONG_PERIOD_S", 60)
    with background.pause_compilers():
        with background.pause_compilers():
            until(lambda: has_stopped(ticking))
        until(lambda: has_stopped(ticking))
    before = ticking()
    until(lambda: ticking() > before + 3)


def test_time_in_which_a_compiler_is_stopped_does_not_count(
    own: background._Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LONG_PERIOD_S", 10**9)
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "0.5")
    logs = list[str]()
    command = "sh", "-c", "sleep 0.2; echo ended"
    runner = threading.Thread(target=lambda: logs.append(own.children.run(command).log))
    with background.pause_compilers():
        time.sleep(0.3)
        runner.start()
        time.sleep(1.0)
    runner.join()
    assert logs == ["ended\n"]


def test_compilers_are_stopped_during_most_of_many_short_calls(
    ticking: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with longer pauses leave them enough time."""
    monkeypatch.setattr(children, "SHARED_S", 0.005)
    monkeypatch.setattr(children, "PERIOD_S", 0.05)
    steps = partial(steps_during_calls, ticking)
    assert 2 * steps(0.0, 0.001) < steps(0.0, 0.02), "a model computes between the calls of its layers"
    monkeypatch.setattr(children, "PAUSE_S", 0.0)
    assert 2 * steps(0.004, 0.0) < steps(0.0, 0.004)


def steps_during_calls(ticking: Callable[[], int], call_s: float, pause_s: float) -> int:
    before, end = ticking(), time.monotonic() + 1
    while time.monotonic() < end:
        with background.pause_compilers():
            time.sleep(call_s)
        time.sleep(pause_s)
    return ticking() - before


@pytest.mark.parametrize("ticking", [False], indirect=True)
def test_compilers_run_only_in_long_pauses_if_no_call_needs_them(
    ticking: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LONG_PERIOD_S", 10**9)
    assert not steps_during_calls(ticking, 0.0, 0.02)
    before = ticking()
    until(lambda: ticking() > before + 3)


def test_a_call_stops_compilers_at_once(ticking: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A short call has ended before a thread that looks at intervals would notice it."""
    monkeypatch.setattr(children, "PERIOD_S", 10**9)
    monkeypatch.setattr(children, "POLL_S", 60)
    until(lambda: not has_stopped(ticking))
    with background.pause_compilers():
        assert has_stopped(ticking)


def test_background_work_yields_to_calls(own: background._Background, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs begin, and go on where they give way, while no call computes."""
    monkeypatch.setattr(children, "PERIOD_S", 10**9)
    began, steps = threading.Event(), list[str]()

    def work() -> None:
        steps.append("begun")
        began.set()
        until(lambda: own.children.calls._running > 0)
        yield_to_calls()
        steps.append("gone on")

    with background.pause_compilers():
        with pytest.raises(PendingError):
            ask("key", work)
        time.sleep(0.05)
        assert not steps
    began.wait(60)
    with background.pause_compilers():
        time.sleep(0.05)
        assert steps == ["begun"]
    until(lambda: len(steps) == 2)


def test_what_is_pending_is_asked_for_again_after_each_job(own: background._Background) -> None:
    gates = {name: threading.Event() for name in "ab"}
    before = background.progress()
    assert not background.is_pending(before), "nothing is"
    for name, gate in gates.items():
        with pytest.raises(PendingError):
            ask(name, partial(gate.wait, 60))
    assert background.is_pending(before)
    gates["a"].set()
    until(lambda: not background.is_pending(before))
    now = background.progress()
    assert background.is_pending(now)
    gates["b"].set()
    until(lambda: not background.is_busy())
    assert not background.is_pending(background.progress())


@pytest.mark.parametrize("has_guard", [True, False])
def test_a_background_compiler_returns_its_log(
    has_guard: bool, own: background._Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a guard it is never stopped, because nothing would end it with its process."""
    monkeypatch.setattr(children, "PERIOD_S", 10**9)
    monkeypatch.setattr(children, "LONG_PERIOD_S", 60)
    if not has_guard:
        monkeypatch.setattr(children, "_guarded_group", lambda: nullcontext(0))
    command = "sh", "-c", f"echo all; sleep {0 if has_guard else 0.2}; echo of it"
    with nullcontext() if has_guard else background.pause_compilers():
        assert own.children.run(command).log == "all\nof it\n"


def test_compilers_go_on_during_a_call_without_end(ticking: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may wait for what they compile."""
    monkeypatch.setattr(children, "LONG_PERIOD_S", 0.1)
    with background.pause_compilers():
        before = ticking()
        until(lambda: ticking() > before + 10)


@pytest.fixture
def adopts() -> Iterator[None]:
    """Adopt orphans, as the first process of a container does. In this session, the system does not end them."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "prctl"):
        pytest.skip("Linux alone lets a process adopt orphans")
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.usefixtures("adopts")
def test_a_stopped_compiler_ends_with_its_process(tmp_path: Path) -> None:
    """The guard goes on while the compiler is stopped."""
    program = """
import os, sys, threading, time
from ksgen.build import background, children
children.PERIOD_S = children.LONG_PERIOD_S = 10**9
run = background._background.children.run
threading.Thread(target=run, args=(("sh", "-c", f"echo $$ >'{sys.argv[1]}'; sleep 60"),), daemon=True).start()
while not (os.path.exists(sys.argv[1]) and os.path.getsize(sys.argv[1])):
    time.sleep(0.01)
with background.pause_compilers():
    time.sleep(60)
"""

    def compiler() -> str:
        return (tmp_path / "compiler").read_text().strip()

    caller = subprocess.Popen([sys.executable, "-c", program, tmp_path / "compiler"])
    until(lambda: (tmp_path / "compiler").exists() and state_of(compiler()) == "T")
    caller.kill()
    caller.wait()
    until(lambda: has_ended(compiler()))
