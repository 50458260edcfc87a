"""Handles a child process that compiles and measures: starts it, calls it, and starts another when it is lost."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from ksgen.build.children import python_child
from ksgen.build.request import Binary
from ksgen.errors import DeviceError
from ksgen.measure.roofline import Ceilings
from ksgen.spec import KernelSpec
from ksgen.tuning.job import Candidate, Facts, Job, Outcome, Runs

CODE = "from ksgen.tuning.worker import main; main()"  # program of a child
STEP_SECONDS = 60.0  # limit of a child's step: compiling, checking or timing one candidate
# signals that others send, such as an out-of-memory killer or the end of a job: the candidate is not their cause
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_SECONDS = 15.0  # after a step's limit, until a child that its own alarm did not end is killed from here


class LostError(Exception):
    """The child is gone: it crashed, took too long, or a candidate made its device fail."""

    def __init__(self, reason: str, at: int, state: str = "failed", is_killed: bool = False) -> None:
        """`at`: index of the entry that the child was working on. `is_killed`: whether another process ended it."""
        super().__init__(reason)
        self.reason, self.at, self.state, self.is_killed = reason, at, state, is_killed


class Worker:
    """One child. It starts at the first call, and works for one thread at a time."""

    def __init__(self, device: str | None, preload: Sequence[str] = (), limit_s: float = STEP_SECONDS) -> None:
        """`preload`: modules for the child to import first, such as one that registers a family."""
        self._arguments = (str(limit_s), device or "", *preload)
        self._limit_s = limit_s
        self._is_stopped = False
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._errors: IO[bytes] | None = None

    def facts(self) -> Facts:
        facts: Facts = self._ask("facts")
        return facts

    def ceilings(self, precision: str, operand: str | None) -> Ceilings:
        ceilings: Ceilings = self._ask("ceilings", precision, operand)
        return ceilings

    def compile(self, kernel: KernelSpec, candidate: Candidate, facts: Facts) -> Binary:
        """Compile a candidate; `ToolchainError` if the compiler refuses it, `LostError` if it hangs or crashes."""
        binary: Binary = self._call("compile", kernel, candidate, facts.target, facts.dialect)
        return binary

    def prove(self, kernel: KernelSpec, candidate: Candidate, binary: Binary, batches: Sequence[int]) -> Outcome:
        """Check a candidate thoroughly at several batches; `LostError` if it hangs or crashes.

        Its state is "measured", "wrong", or "pruned" if its clusters do not fit the GPU.
        """
        outcome: Outcome = self._call("prove", kernel, candidate, binary, batches)
        return outcome

    def seconds(self) -> float:
        """Processor seconds of the present child."""
        seconds: float = self._ask("seconds")
        return seconds

    def measure(self, job: Job, entries: Sequence[tuple[Candidate, Binary]], runs: Runs) -> list[Outcome]:
        """Measure candidates, one outcome each. The outcome of a candidate that ends the child says so; another child
        measures the others."""
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(entries)))
        while left:
            try:
                found = self._call("measure", job, [entries[index] for index in left], runs)
            except LostError as lost:
                if self._is_stopped:
                    raise
                outcomes[left.pop(lost.at)] = Outcome(lost.state, lost.reason)
            else:
                outcomes |= zip(left, found, strict=True)
                break
        return [outcomes[index] for index in range(len(entries))]

    def stop(self) -> None:
        """End the child for good, also from another thread, whose calls then fail."""
        self._is_stopped = True
        self._kill()

    def _kill(self) -> None:
        if (child := self._child) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the child. Not while another thread's call is running: `stop` ends that."""
        self._kill()
        if self._child is not None:
            self._child.wait()
        for each in (self._connection, self._errors):
            if each is not None:
                each.close()
        self._child = self._connection = self._errors = None

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Call a function without a candidate. If the child is lost, the device is at fault: `DeviceError`."""
        try:
            return self._call(function, *arguments)
        except LostError as lost:
            raise DeviceError(f"the process that measures: {lost.reason}") from None

    def _call(self, function: str, *arguments: Any) -> Any:
        at = 0
        if self._is_stopped:
            raise LostError("it was stopped", at)
        try:
            connection = self._started()
            connection.send((function, arguments))
            word, *rest = self._receive(connection)
            while word == "at":
                (at,) = rest
                word, *rest = self._receive(connection)
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise self._lost(at, isinstance(error, TimeoutError)) from None
        if word == "guilty":
            self.close()
            raise LostError(rest[0], at)
        if word == "error":
            kind, message = rest
            raise kind(message)
        return rest[0]

    def _receive(self, connection: Connection) -> Any:
        if not connection.poll(self._limit_s + GRACE_SECONDS):
            raise TimeoutError
        return connection.recv()

    def _started(self) -> Connection:
        if self._child is None or self._connection is None:
            try:
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
            except OSError as error:
                why = f"temporary files cannot be written ({error}); TMPDIR names another folder"
                raise DeviceError(f"the process that measures: {why}") from None
            try:
                self._connection, end_of_child = Pipe()
                with end_of_child:
                    self._child = self._start(end_of_child.fileno(), self._errors)
            except OSError as error:  # no further file or process
                raise DeviceError(f"the process that measures: it cannot be started ({error})") from None
        return self._connection

    def _start(self, number: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a child, which inherits file `number`: its end of the connection."""
        command, options = python_child(CODE, str(number), *self._arguments)
        return subprocess.Popen(command, **options, stderr=errors, pass_fds=[number])

    def _lost(self, at: int, is_late: bool) -> LostError:
        """End what is left of the child, and return the reason why it is lost."""
        if self._child is None or self._errors is None:
            return LostError("it was stopped", at)
        if is_late:
            self._kill()
        status = self._child.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last_line = next((f" ({line.strip()[:200]})" for line in reversed(lines) if line.strip()), "")
        self.close()
        if is_late or status == -signal.SIGALRM:
            return LostError(f"not done after {self._limit_s:g} s", at, "hung")
        died = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return LostError(f"the process died: {died}{last_line}", at, is_killed=-status in FROM_OUTSIDE)
