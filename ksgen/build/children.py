"""Runs compilers as child processes with a time limit, and ends them together with everything that they start.

`python_child` provides the command and options for children that run Python.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ksgen import STARTED_IN
from ksgen.errors import ToolchainError
from ksgen.locks import new_lock
from ksgen.ownership import temporary_folder
from ksgen.paths import variables_for_compilers
from ksgen.values import excerpt

MOST_SECONDS = 10**6
COMPILE_SECONDS = 300.0  # a kernel takes about one; minutes mean that the source unrolls far too much
KILLED = "fatal: killed by signal"  # last line of a killed compiler's log
IDLE_S = 3.0  # seconds for which background compilers use idle cores only; longer, a busy machine would starve them
# nvcc's variables with further options, hidden from children because cache keys do not contain them
_HIDDEN_OPTIONS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def python_child(code: str, *arguments: str, **variables: str) -> tuple[list[str], dict[str, Any]]:
    """Command and options of `Popen` for Python code in a child that imports modules from the same folders.

    `variables` are added to the environment. The child makes no device passport, which would disturb its measurements.
    Neither an interrupt nor the end of this process ends the child.
    """
    imports = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    # -P: the child imports from the folder that it starts in only if this process would
    return [sys.executable, "-P", "-c", code, *arguments], {
        "stdin": subprocess.DEVNULL,
        "cwd": STARTED_IN if os.path.isdir(STARTED_IN) else None,  # relative paths of the environment start there
        "env": {**os.environ, "KSGEN_TRIAL": "off", **imports, **variables},
        "start_new_session": True,
    }


@dataclass(frozen=True)
class Finished:
    returncode: int
    log: str


class Children:
    """The compilers that are running. `stop` ends them all, and lets no new one start.

    For the first `IDLE_S` seconds, background compilers use only idle cores. These seconds count from the start of a
    compiler while no other one is running.
    """

    def __init__(self, is_background: bool = False) -> None:
        self._is_background, self._busy_since = is_background, 0.0
        self._running: set[subprocess.Popen[str]] = set()
        self._guard = new_lock()
        self.stopped = False

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
                if not self._running:
                    self._busy_since = monotonic()
                self._running.add(child)
            try:
                if self._is_background:
                    _finish_on_idle_cores(child, group, min(seconds, self._busy_since + IDLE_S - monotonic()))
                log, _ = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                limit = f"{seconds:g} s (KSGEN_COMPILE_SECONDS)"
                raise ToolchainError(f"{command[0]} was stopped: it had not finished after {limit}") from None
            finally:
                with self._guard:
                    self._running.discard(child)
                    _kill(child)
                child.communicate()
        if child.returncode < 0:
            log = f"{log.rstrip()}\n{KILLED} {-child.returncode}".lstrip()
        return Finished(child.returncode, log)

    def stop(self) -> None:
        with self._guard:
            self.stopped = True
            for child in self._running:
                _kill(child)


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
    """Temporary folder for everything that a compiler reads and writes; a killed compiler leaves nothing behind."""
    try:
        with temporary_folder("build") as folder:
            yield folder
    except OSError as error:
        named = f"TMPDIR={os.environ['TMPDIR']}" if "TMPDIR" in os.environ else "TMPDIR is not set"
        raise ToolchainError(
            f"{what}: temporary files cannot be written ({error}); {named}; accepted: a writable folder"
        ) from None


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
            process_group=group,  # so that everything that it starts ends with it
        )
    except OSError as error:
        raise ToolchainError(f"{command[0]} does not run: {error}") from None


def _finish_on_idle_cores(child: subprocess.Popen[str], group: int, seconds: float) -> None:
    """Let a command use idle cores only, until it ends or `seconds` have passed.

    Linux lets few users leave this scheduling policy again, so the group's guard first tries to enter and leave it.
    """
    if seconds <= 0 or not group or not hasattr(os, "SCHED_IDLE"):
        return
    if not (_schedule(group, os.SCHED_IDLE) and _schedule(group, os.SCHED_OTHER)):
        return
    for member in _members(group):  # processes that they start inherit the policy
        _schedule(member, os.SCHED_IDLE)
    try:
        child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for each in _members(group):
            _schedule(each, os.SCHED_OTHER)


def _schedule(process: int, policy: int) -> bool:
    """Set the scheduling policy of a process, and return whether that succeeded."""
    with suppress(OSError):  # the process has just ended, or the system forbids it
        os.sched_setscheduler(process, policy, os.sched_param(0))
        return True
    return False


def _members(group: int) -> list[int]:
    """IDs of the processes in a group."""
    members = []
    for each in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            if os.getpgid(each) == group:
                members.append(each)
    return members


@contextmanager
def _guarded_group() -> Iterator[int]:
    """Process group that ends with this process: its guard is a shell that kills it when its input closes.

    Yields the group's ID, or 0 if no shell starts.
    """
    guard: subprocess.Popen[bytes] | None = None
    with suppress(OSError):  # no shell, or no room for another process
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


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(os.getpgid(child.pid), signal.SIGKILL)
