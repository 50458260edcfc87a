"""Scripts on the stand-in machine, and children of searches, each in a fork of a process that has imported ksgen and
the libraries that it needs. No device is open there: ksgen reads its variables when it opens one, after the fork.
"""

import atexit
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType

from tests.support import booked

IMPORTED = ("ksgen.launcher", "ksgen.calibration.proof", "ksgen.tuning.worker", "pytest")
MOST_BYTES = 2**17  # of a script and its variables
# variables that only ksgen, the stand-in driver and PyCUDA read, and so after the fork
READ_LATE = ("KSGEN_", "PYCUDA_", "PYTEST_")


class Forks:
    """A process that forks for each script."""

    def __init__(self, variables: dict[str, str], folder: str | None = None) -> None:
        self.variables, self.folder = variables, folder
        self._guard = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.driver.scripts", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.kill)

    def run(self, script: str, variables: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            status = self.wait(self.start(script, variables, [out.fileno(), err.fileno()]), seconds)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(["-c", script], status, out.read(), err.read())

    def start(self, script: str, variables: dict[str, str], handles: Sequence[int]) -> int:
        """Start a script whose first handles, from its output on, are these; return its process's number.

        With a third one, it has a process group of its own.
        """
        with self._guard:
            socket.send_fds(self._line, [json.dumps([script, variables]).encode()], handles)
            (child,) = json.loads(self._line.recv(MOST_BYTES))
            return int(child)

    def wait(self, child: int, seconds: float | None = None) -> int:
        """Wait for a script's end, and return its exit code."""
        with self._guard:
            self._line.settimeout(seconds)
            self._line.send(json.dumps([child]).encode())
            status, spent_s = json.loads(self._line.recv(MOST_BYTES))
            self._line.settimeout(None)
        booked.seconds[booked.PROGRAMS] += spent_s
        return int(status)

    def kill(self) -> None:
        """End it and the script that it waits for."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._line.close()


_forks: dict[object, Forks] = {}


def read_early(variables: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that libraries read at their import."""
    return {name: value for name, value in variables.items() if not name.startswith(READ_LATE)}


def run(script: str, variables: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a script under these variables alone; `subprocess.TimeoutExpired` where it does not end in time."""
    early = read_early(variables)
    key = os.getcwd(), *sorted(early.items())
    if key not in _forks:
        _forks[key] = Forks(early)
    try:
        return _forks[key].run(script, variables, seconds)
    except TimeoutError:
        _forks.pop(key).kill()
        raise subprocess.TimeoutExpired(["-c", script], seconds) from None


def _next_script(line: socket.socket) -> str | None:
    """Return a script in each fork, and None in the process that forks, at the end."""
    while True:
        request, handles, _, _ = socket.recv_fds(line, MOST_BYTES, 3)
        if not request:
            return None
        if not handles:
            (child,) = json.loads(request)
            _, status, used = os.wait4(child, 0)
            line.send(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]).encode())
            continue
        if not (child := os.fork()):
            line.close()
            for number, handle in enumerate(handles, 1):
                os.dup2(handle, number)
                os.close(handle)
            script, variables = json.loads(request)
            os.environ.clear()
            os.environ.update(variables)
            return str(script)
        if len(handles) > 2:
            os.setpgid(child, child)
        for handle in handles:
            os.close(handle)
        line.send(json.dumps([child]).encode())


def _main(line: socket.socket) -> None:
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # so that the end of a fork does not look at all that it shares
    script = _next_script(line)
    if script is not None:
        sys.argv[:], sys.path[0] = ["-c"], ""
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(script, "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
