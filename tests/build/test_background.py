"""Work in the background: deferred, shared, awaited, and ended with its process."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ksgen.build import background, children
from ksgen.build.background import PendingError, all_of, deferred, outcome
from ksgen.build.children import Children
from ksgen.errors import ToolchainError


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


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    def work() -> None:
        raise ToolchainError("refused")

    with pytest.raises(PendingError):
        ask("key", work)
    finish()
    with pytest.raises(ToolchainError, match=r"^refused$"):
        ask("key", work)


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


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has such a policy")
def test_a_compiler_takes_idle_cores_at_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then, after a while, any."""
    policies, real = [], children._schedule

    def schedule(process: int, policy: int) -> bool:
        policies.append(policy)
        if policies[2:] and policy == os.SCHED_OTHER:
            (tmp_path / "any core").touch()
        return real(process, policy)

    monkeypatch.setattr(children, "_schedule", schedule)
    monkeypatch.setattr(children, "IDLE_S", 0.2)
    wait = f"while [ ! -e '{tmp_path}/any core' ]; do sleep 0.01; done; echo ended"
    assert Children(is_background=True).run(("sh", "-c", wait)).log == "ended\n"
    assert policies[:3] == [os.SCHED_IDLE, os.SCHED_OTHER, os.SCHED_IDLE]  # the first two try whether there is a return
    returned = policies.index(os.SCHED_OTHER, 2)
    assert set(policies[2:returned]) == {os.SCHED_IDLE}
    assert set(policies[returned:]) == {os.SCHED_OTHER}
    monkeypatch.setattr(children, "IDLE_S", 60)
    assert Children(is_background=True).run(("echo", "all of it")).log == "all of it\n"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has such a policy")
def test_what_a_compiler_has_started_takes_idle_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may start others before this process, whose lock other threads hold, changes its policy."""
    start = children._start

    def start_late(*given: Any) -> Any:
        child = start(*given)
        os.read(forked, 1)
        return child

    forked, tell = os.pipe()
    monkeypatch.setattr(children, "_start", start_late)
    program = (
        f"import os, time; is_child = not os.fork(); is_child and os.write(os.open('/proc/{os.getpid()}/fd/{tell}', "
        "os.O_WRONLY), b'.'); time.sleep(0.3); print(os.sched_getscheduler(0), flush=True); is_child or os.wait()"
    )
    log = Children(is_background=True).run((sys.executable, "-c", program)).log
    assert log == f"{os.SCHED_IDLE}\n" * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has such a policy")
@pytest.mark.parametrize("has_guard", [True, False])
def test_a_compiler_takes_any_core_where_there_is_no_return(has_guard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most users may not leave the policy of idle cores: on a busy machine their compilers would never end."""
    changed, real = [], os.sched_setscheduler

    def without_rights(process: int, policy: int, parameter: os.sched_param) -> None:
        if policy != os.SCHED_IDLE:
            raise PermissionError(1, "Operation not permitted")
        real(process, policy, parameter)
        changed.append(process)

    monkeypatch.setattr(os, "sched_setscheduler", without_rights)
    if not has_guard:
        monkeypatch.setattr(children, "_guarded_group", lambda: nullcontext(0))
    process = Children(is_background=True).run(("sh", "-c", "echo $$")).log
    assert len(changed) == has_guard
    assert int(process) not in changed
