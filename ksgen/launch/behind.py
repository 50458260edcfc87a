"""Trials in the background, if `KSGEN_TRIAL=background`: a child process times candidates of kernels that calls plan
without wisdom.

Calls use defaults meanwhile, and later calls use the winners. Results may then change in the last bits. So no trial
begins under PyTorch's deterministic algorithms or inside a trace. There, and while a CUDA graph records a call, calls
keep their kernels. Measures nothing itself.
"""

import os
import pickle
import sys
from contextlib import suppress
from pathlib import Path

from ksgen import STARTED_IN
from ksgen.build.background import PendingError, deferred, outcome
from ksgen.build.children import current_children, python_program
from ksgen.devices.base import Device, Stream
from ksgen.devices.threads import of_torch
from ksgen.errors import KsgenError, ToolchainError, warn
from ksgen.launch.choice import Choice
from ksgen.launch.planner import PLANNER, WATCHERS
from ksgen.locks import new_lock
from ksgen.ownership import temporary_folder
from ksgen.passport import trial
from ksgen.spec import KernelSpec

MOST_AT_ONCE = 8  # kernels per child process, whose time limit is that of a compiler
_CHILD = (
    "import os, sys; os.path.isdir({0!r}) and os.chdir({0!r}); sys.path[:] = {1!r}; "
    "from ksgen.calibration.trials import main; main({2!r})"
)

Asked = tuple[KernelSpec, int]  # a kernel, and the batch of the call that planned it

_guard = new_lock()
_seen: set[tuple[Device, Asked]] = set()
_waiting: dict[Device, list[Asked]] = {}


def note(device: Device, kernel: KernelSpec, batch: int, choice: Choice | None) -> None:
    """Begin a trial of a kernel that a call plans with default constants, once per process and batch.

    There is none on a device in a context that the user brought, which a child process cannot open.
    """
    if choice is None or choice.from_wisdom or trial() != "background" or not may_change() or device.index < 0:
        return
    key = device, (kernel, batch)
    with _guard:
        if key in _seen:
            return
        _seen.add(key)
        _waiting.setdefault(device, []).append(key[1])
    _begin(device)


def must_stay(device: Device, stream: Stream) -> bool:
    """Whether a call must keep the kernel that it used before the last trials.

    It must if results may not change, or if a CUDA graph records the stream.
    """
    return not may_change() or (device.kind == "cuda" and device.is_capturing(stream))


def may_change() -> bool:
    """Whether results may change in the last bits: not under PyTorch's deterministic algorithms or inside a trace."""
    is_deterministic = of_torch("are_deterministic_algorithms_enabled")
    if is_deterministic is None:
        return True
    return not (is_deterministic() or of_torch("compiler").is_compiling() or of_torch("jit").is_tracing())


def _begin(device: Device) -> None:
    key = "trials", device
    with suppress(PendingError), deferred(lambda: True):
        for _ in range(2):  # the first call may only collect the result of an earlier round
            outcome(key, "trials", lambda: _try_all(device))


def _try_all(device: Device) -> None:
    """Try all kernels that wait, a few per child process; runs in a background thread."""
    while True:
        with _guard:
            waiting = _waiting.get(device, [])
            asked, _waiting[device] = waiting[:MOST_AT_ONCE], waiting[MOST_AT_ONCE:]
        if not asked:
            return
        try:
            _try(device, asked)
        except (KsgenError, OSError) as error:
            if current_children.get().stopped:  # the program is ending
                return
            with _guard:
                _waiting.pop(device)
            warn(f"KSGEN_TRIAL=background: {device.name}: no more trials; defaults stay in use: {error}")
            return
        PLANNER.renew()


def _try(device: Device, asked: list[Asked]) -> None:
    with temporary_folder("trials") as folder:
        path = Path(folder) / "asked"
        path.write_bytes(pickle.dumps((f"{device.runtime}:{device.index}", asked)))
        child = _CHILD.format(STARTED_IN, [os.path.abspath(each) for each in sys.path], str(path))
        done = current_children.get().run([python_program(), "-c", child])
    if done.returncode:
        raise ToolchainError(next(reversed([*filter(None, done.log.splitlines())]), f"exit status {done.returncode}"))


WATCHERS.append(note)
