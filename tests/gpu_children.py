"""The commands that `make gpu-check` starts: each has its time, and ends with what it started, also where gpu-check
itself is killed.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run(command: Sequence[str], seconds: float, output: Path, variables: Mapping[str, str] | None = None) -> int | None:
    """The exit status; None of a command that was ended, as its time was up.

    What it prints goes to the file as it comes.
    """
    with output.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env={"KSGEN_PERMIT": "all", **os.environ, **(variables or {})},  # gpu-check proves more
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
