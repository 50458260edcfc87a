"""Runs compilers as child processes with a time limit, and ends them together with everything that they start.

`python_child` provides the command and options for children that run Python. `refusal` reports a source that a compiler
refused, and keeps the source for the user.
"""

import hashlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from ksgen import STARTED_IN, paths
from ksgen.errors import KsgenError, ToolchainError
from ksgen.files import write
from ksgen.locks import new_lock, waits_for_calls, yield_to_calls
from ksgen.ownership import make_folder, temporary_folder
from ksgen.paths import variables_for_compilers
from ksgen.values import excerpt

MOST_SECONDS = 10**6
COMPILE_SECONDS = 300.0  # a kernel takes about one second; minutes mean that the source unrolls far too much
MOST_WAIT_S = 60  # longest wait for in-process compilers; this process would abort if it ended before they do
END_S = 1.0  # longest wait for the output of killed processes
KILLED = "fatal: killed by signal"  # last line of a killed compiler's log
# Background compilers run while no call has computed for `PAUSE_S` seconds. If there is no such pause, they run for
# `SHARED_S` of every `PERIOD_S` seconds. The state is checked every `POLL_S` seconds.
PAUSE_S, SHARED_S, PERIOD_S, POLL_S = 0.003, 0.02, 0.1, 0.003
LONG_S, LONG_PERIOD_S = 0.25, 1.0  # in a call that has taken `LONG_S` seconds, the period is `LONG_PERIOD_S`
IDLE_S = 0.1  # in place of `PAUSE_S` if no job is needed; the period is `LONG_PERIOD_S` then, too
# environment variables with further options of nvcc, hidden from children because cache keys do not contain them
_HIDDEN_OPTIONS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def python_program() -> str:
    """Path of the Python that runs this process; `ToolchainError` if that is another program, which a child would start
    again.
    """
    if not Path(sys.executable or "").name.lower().startswith(("python", "pypy")):
        raise ToolchainError(f"{sys.executable} is no Python that a child could run")
    return sys.executable


def python_child(code: str, *arguments: str, **variables: str) -> tuple[list[str], dict[str, Any]]:
    """Command and options of `Popen` for Python code in a child that imports modules from the same folders.

    `variables` are added to the environment. The child starts no passport and no trials, which would disturb its
    measurements. Neither an interrupt nor the end of this process ends the child.
    """
    imports = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    # -P: the child imports from its working folder only if this process does
    return [python_program(), "-P", "-c", code, *arguments], {
        "stdin": subprocess.DEVNULL,
        "cwd": STARTED_IN if os.path.isdir(STARTED_IN) else None,  # relative paths in variables are relative to it
        "env": {**os.environ, "KSGEN_TRIAL": "off", **imports, **variables},
        "start_new_session": True,
    }


@dataclass(frozen=True)
class Finished:
    returncode: int
    log: str


class _Calls:
    """Context of each call that computes while compilers run. It decides when compilers may use the cores.

    PyTorch's products take several times as long on cores that other processes share, even at a lower priority. The
    reason is that PyTorch's threads wait for each other every few microseconds.
    """

    def __init__(self, changed: Callable[[], None], is_urgent: Callable[[], bool]) -> None:
        """Create the context; `changed` is called when a call begins and no other one is running.

        `is_urgent` says whether calls need what the compilers build.
        """
        self._changed, self._is_urgent, self._guard, self._running = changed, is_urgent, new_lock(), 0
        self._began = self._ended = self._permitted = 0.0

    def __enter__(self) -> None:
        with self._guard:
            self._running += 1
            if is_first := self._running == 1:
                self._began = monotonic()
                if self._began > self._ended + self._pause_s():
                    self._permitted = self._began
        if is_first:
            self._changed()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._running -= 1
            self._ended = monotonic()

    def permit_others(self) -> bool:
        """Whether compilers may use the cores now.

        They may if no call has run for `PAUSE_S` seconds; in shorter pauses, a model computes between the calls of its
        layers. If there is no such pause, they may run for a part of each period, which is smaller in a long call. The
        part is never zero, because a call may wait for the compilers. If calls need nothing of what is built, the pause
        is longer and the part smaller.
        """
        with self._guard:
            now = monotonic()
            if not self._running and now > self._ended + self._pause_s():
                self._permitted = now
                return True
            is_long = self._running and now > self._began + LONG_S
            period = LONG_PERIOD_S if is_long or not self._is_urgent() else PERIOD_S
            return (now - self._permitted) % period > period - SHARED_S

    def _pause_s(self) -> float:
        return PAUSE_S if self._is_urgent() else IDLE_S

    def wait(self) -> None:
        """Wait until compilers may use the cores."""
        while not self.permit_others():
            sleep(POLL_S)


class Children:
    """Running compilers. `stop` ends them all, and no new one starts afterwards.

    Background compilers are suspended for most of the time in which calls compute.
    """

    def __init__(self, is_background: bool = False, is_urgent: Callable[[], bool] = lambda: True) -> None:
        self._is_background, self.calls = is_background, _Calls(self._follow_calls, is_urgent)
        self._running: dict[subprocess.Popen[str], int] = {}  # process group by child
        self._are_paused = False
        self._guard = new_lock()
        self.stopped = False

    @property
    def are_running(self) -> bool:
        return bool(self._running)

    def run(self, command: Iterable[str], folder: str | None = None) -> Finished:
        """Run a command to its end or its time limit. If the wait is interrupted, the command ends too."""
        command, seconds = tuple(command), compile_seconds()
        environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN_OPTIONS}
        environment |= variables_for_compilers() | {"LC_ALL": "C"} | ({"TMPDIR": folder} if folder else {})
        with _guarded_group() as group:
            with self._guard:
                if self.stopped:
                    raise ToolchainError(f"{command[0]} was not started: the build is being stopped")
                child = _start(command, folder, environment, group)
                self._running[child] = group
                if self._are_paused:
                    _pause(group, True)
            try:
                left = self._run_between_calls(child, seconds) if self._is_background and group else seconds
                log, _ = child.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                with suppress(OSError):  # the compiler may have ended, but not what it started
                    os.killpg(group or child.pid, signal.SIGKILL)
                limit = f"{seconds:g} s (KSGEN_COMPILE_SECONDS); set the variable to more"
                raise ToolchainError(f"{command[0]} was stopped: it had not finished after {limit}") from None
            finally:
                with self._guard:
                    del self._running[child]
                    _kill(child)
                with child, suppress(subprocess.TimeoutExpired):
                    child.communicate(timeout=END_S)  # a process in another group may hold the pipe of the output
        if child.returncode < 0:
            log = f"{log.rstrip()}\n{KILLED} {-child.returncode}".lstrip()
        return Finished(child.returncode, log)

    def _run_between_calls(self, child: subprocess.Popen[str], seconds: float) -> float:
        """Wait until a background compiler ends or has run for `seconds`; return the seconds left of them.

        Seconds in which it is suspended do not count.
        """
        before, output = monotonic(), select.poll()  # `communicate` alone would take 0.2 ms each time
        if child.stdout:
            output.register(child.stdout, select.POLLIN)
        while seconds > 0:
            self._follow_calls()
            with suppress(subprocess.TimeoutExpired):
                if output.poll(1e3 * POLL_S):
                    child.communicate(timeout=POLL_S)
                    break
            now = monotonic()
            if not self._are_paused:
                seconds -= now - before
            before = now
        return max(0.0, seconds)

    def _follow_calls(self) -> None:
        """Suspend background compilers, or resume them if calls permit it."""
        if not self._running:
            return
        with self._guard:
            if self._are_paused == self.calls.permit_others():
                self._are_paused = not self._are_paused
                for group in filter(None, self._running.values()):
                    _pause(group, self._are_paused)

    def stop(self) -> None:
        with self._guard:
            self.stopped = True
            for child in self._running:
                _kill(child)


class Crew:
    """Worker threads for jobs, and the compilers that they start. Threads end when no job is left.

    They are daemon threads, because a thread inside a library's own compiler must not delay an interrupted program.
    """

    def __init__(self, is_background: bool = False, is_urgent: Callable[[], bool] = lambda: True) -> None:
        self.children = Children(is_background, is_urgent)
        self.guard = new_lock()
        self._todo: deque[Callable[[], None]] = deque()
        self._workers: list[threading.Thread] = []

    def add(self, job: Callable[[], None], most: int) -> None:
        """Queue a job for at most `most` worker threads. If no thread can be started, it runs in the calling thread."""
        with self.guard:
            self._todo.append(job)
            if len(self._workers) < most:
                worker = threading.Thread(target=self._work, name="ksgen worker", daemon=True)
                with suppress(RuntimeError):  # no further thread, or the interpreter is ending
                    worker.start()
                    self._workers.append(worker)
            is_alone = not self._workers
        if is_alone:
            copy_context().run(self._work)

    def _work(self) -> None:
        current_children.set(self.children)
        waits_for_calls.set(self.children.calls.wait)
        while True:
            with self.guard:
                if not self._todo:
                    with suppress(ValueError):
                        self._workers.remove(threading.current_thread())
                    return
                job = self._todo.popleft()
            yield_to_calls()
            job()

    def stop(self, must_end: bool = False) -> None:
        """End compilers, begin no further job, and wait until temporary folders are removed, which takes milliseconds.

        `must_end` says that some job cannot be stopped, and has to be waited for.
        """
        with self.guard:
            workers = list(self._workers)
            self._todo.clear()
        self.children.stop()
        deadline = monotonic() + (MOST_WAIT_S if must_end else 1.0)
        for worker in workers:
            worker.join(max(0.0, deadline - monotonic()))


current_children: ContextVar[Children] = ContextVar("current_children", default=Children())  # noqa: B039 (meant to be shared)


def compile_seconds() -> float:
    text = os.environ.get("KSGEN_COMPILE_SECONDS", "") or str(COMPILE_SECONDS)
    with suppress(ValueError):
        if 0 < (seconds := float(text)) <= MOST_SECONDS:
            return seconds
    raise ToolchainError(
        f"KSGEN_COMPILE_SECONDS={excerpt(text)} must be a number of seconds, more than 0 and at most {MOST_SECONDS}"
    )


@contextmanager
def working_folder(what: str) -> Iterator[str]:
    """Temporary folder for all files of a compiler, so that even a killed compiler leaves no files."""
    try:
        with temporary_folder("build") as folder:
            yield folder
    except OSError as error:
        named = f"TMPDIR={os.environ['TMPDIR']}" if "TMPDIR" in os.environ else "TMPDIR is not set"
        raise ToolchainError(
            f"{what}: temporary files cannot be written ({error}); {named}; accepted: a writable folder"
        ) from None


def made_from(source: str, text: str, made: str, command: Iterable[str]) -> tuple[bytes, Finished]:
    """Run a compiler on a source. Return the bytes of the file that it writes (none if it fails), status and log."""
    with working_folder(Path(source).stem) as folder:
        Path(folder, source).write_text(text, encoding="utf-8")
        finished, result = current_children.get().run(command, folder), Path(folder, made)
        return result.read_bytes() if finished.returncode == 0 and result.exists() else b"", finished


def _start(
    command: tuple[str, ...], folder: str | None, environment: dict[str, str], group: int
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            process_group=group,  # so that all processes that it starts end with it
        )
    except OSError as error:
        raise ToolchainError(f"{command[0]} does not run: {error}") from None


@contextmanager
def _guarded_group() -> Iterator[int]:
    """Provide a process group that ends with this process: a shell, the guard, kills the group when its pipe closes.

    Yields the group's ID, or 0 if no shell can be started.
    """
    guard: subprocess.Popen[bytes] | None = None
    with suppress(OSError):  # there is no shell, or no further process can be started
        guard = subprocess.Popen(
            ("/bin/sh", "-c", "read -r _; kill -s KILL 0"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
    try:
        yield guard.pid if guard else 0
    finally:
        if guard:
            guard.kill()
            guard.communicate()


def _pause(group: int, is_paused: bool) -> None:
    with suppress(OSError):  # the group has just ended
        os.killpg(group, signal.SIGTSTP if is_paused else signal.SIGCONT)
        os.kill(group, signal.SIGCONT)  # the group's guard must not stay suspended


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(os.getpgid(child.pid), signal.SIGKILL)


class RefusedSourceError(ToolchainError):
    """A compiler ran to its end and rejected a source."""


def refusal(
    summary: str, name: str, text: str, log: str, command: Callable[[str], Iterable[str]] | None = None
) -> ToolchainError:
    """Error for a source that does not build: summary, first error, the path of the kept source, and a command.

    The command repeats the compilation; `command` creates it from that path. `name` is the source's file name.
    """
    message = f"{summary}: {first_error(log)}"
    if kept := _keep(text, name, log):
        message += f"\n  source: {kept}"
        message += f"\n  repeat: {shlex.join(command(str(kept)))}" if command else ""
    is_killed = first_error(log).startswith(KILLED)
    return ToolchainError(message) if is_killed else RefusedSourceError(message)


def first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)]
    warnings = [line for line in lines if re.search(r"\bwarning\b", line)]
    return next(iter(errors or warnings or lines), "no output")


def _keep(text: str, name: str, log: str) -> Path | None:
    """Write the source and the log to the cache's folder, named by the source's hash, else to a temporary folder.

    Returns the path of the source; None if it cannot be written.
    """
    file = Path(f"{Path(name).stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}{Path(name).suffix}")
    for folder in (paths.cache_dir() / "failed", None):
        with suppress(OSError, KsgenError):
            folder = folder or Path(tempfile.mkdtemp(prefix="ksgen-failed-"))
            make_folder(folder)
            kept, kept_log = folder / file, folder / file.with_suffix(".log")
            # any other kind of file may be a pipe, and writing to a pipe may block forever
            if all(each.is_file() or not os.path.lexists(each) for each in (kept, kept_log)):
                write(kept, text, is_own=True)
                write(kept_log, log, is_own=True)
                return kept
    return None
