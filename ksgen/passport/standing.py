"""Decides by a device's passport which families launchers may choose there, and starts the child that makes one.

On a processor every family may be chosen. On an NVIDIA GPU a disabled family is never chosen, and a family with tensor
maps, warpgroup instructions or clusters must be proven first. `KSGEN_PERMIT` lifts both rules. Proves nothing itself,
and never uses a CUDA context.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ksgen.build.build import bundles_in_use
from ksgen.build.children import python_child
from ksgen.devices.base import Device
from ksgen.errors import ConstantsError, KsgenError, warn
from ksgen.families import FAMILIES, Bar, family_named
from ksgen.families.gpus import gpu_of
from ksgen.locks import new_lock
from ksgen.passport.store import Known, load
from ksgen.values import excerpt

TRIALS = ("passport", "off", "background")  # accepted values of KSGEN_TRIAL; the first is the default
MAKE = "ksgen calibrate"  # the command that makes a passport
FORCE = "KSGEN_PERMIT"  # families that launchers may choose, whatever the passport says

_EXCLUSIVE, _PROHIBITED = 3, 2  # CU_COMPUTEMODE_...
_log = logging.getLogger(__name__)
_CHILD = "from ksgen.calibration.proof import main; main()"


@dataclass
class _Standing:
    """The bars of one device in this process, and the child that proves its families."""

    bars: tuple[Bar, ...] | None = None  # None: not read from the passport yet
    is_begun: bool = False
    child: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = field(default=None, repr=False)


_known: dict[Device, _Standing] = {}
_guard = new_lock()


def needs_proof(family: str, target: str) -> bool:
    """Whether launchers on a target may choose a family only if it is proven on the device.

    Kernels of such a family have tensor maps, warpgroup instructions or clusters.
    """
    return family_named(family).by_warpgroups and gpu_of(target).warpgroups


def unproven(target: str, device_name: str = "") -> tuple[Bar, ...]:
    """Bars of the families that need a proof on a target, for a device without any proof."""
    reason = f"not proven yet on {device_name or target} ({MAKE} proves it)"
    return tuple(Bar(name, reason) for name in FAMILIES if needs_proof(name, target))


def bars(device: Device) -> tuple[Bar, ...]:
    """Families that launchers may not choose on a device, each with the reason.

    The passport is read once per process, and again once the background child has ended.
    """
    if device.kind != "cuda":
        return ()
    known = _known.get(device) or _known.setdefault(device, _Standing())
    if known.child is not None and known.child.poll() is not None:
        _take(device, known)
    if known.bars is None:
        known.bars = read_bars(device)
    return known.bars


def forget() -> None:
    """Read passports again from now on, and let launchers start a child again, unless one is running."""
    with _guard:
        for known in _known.values():
            known.bars, known.is_begun = None, known.child is not None


def wait(device: Device) -> None:
    """Wait until the background child has ended, because it would disturb measured times."""
    known = _known.get(device)
    if known is not None and (child := known.child) is not None and child.poll() is None:
        _log.warning("%s: timing waits for the passport that a child process makes", device.name)
        child.wait()


def begin(device: Device) -> None:
    """Start a background child that makes a passport, if families lack a proof; once per process and device.

    With `KSGEN_TRIAL=off`, no child starts. The child outlives this process. One warning says why there is no passport.
    """
    known = _known.get(device)
    if known is None or known.is_begun or all(bar.is_disabled for bar in known.bars or ()):
        return
    with _guard:
        if known.is_begun:
            return
        known.is_begun = True
    if trial() == "off":
        return
    try:
        if why := why_not(device):
            raise KsgenError(why)
        known.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        known.child = _started(device, known.errors)
    except (OSError, KsgenError) as error:
        _warn(device, str(error))


def _in_forked_child() -> None:
    """Leave the background children to the process that started them. Only that process can wait for them."""
    for known in _known.values():
        if known.child is not None:
            known.child.returncode = 0  # its destructor neither waits nor warns
            known.child, known.errors = None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def trial() -> str:
    """Value of `KSGEN_TRIAL`: the work that launchers may start by themselves."""
    asked = os.environ.get("KSGEN_TRIAL", "") or TRIALS[0]
    if asked not in TRIALS:
        raise ConstantsError(f"KSGEN_TRIAL={excerpt(asked)}; accepted: {', '.join(TRIALS)}")
    return asked


def read_bars(device: Known) -> tuple[Bar, ...]:
    """Read the passport of an NVIDIA GPU, and return its bars."""
    passport = load(device)
    proofs = passport.families if passport else {}
    disabled = [
        Bar(name, f"disabled on {device.name}: {proof.reason}", is_disabled=True)
        for name, proof in proofs.items()
        if proof.state == "disabled"
    ]
    waiting = [bar for bar in unproven(device.target, device.name) if bar.family not in proofs]
    forced = _forced()
    return tuple(bar for bar in (*disabled, *waiting) if bar.family not in forced)


def _forced() -> frozenset[str]:
    asked = os.environ.get(FORCE, "")
    if asked == "all":
        return frozenset(FAMILIES)
    try:
        return frozenset(family_named(each.strip()).name for each in asked.split(",") if each.strip())
    except ConstantsError as error:
        raise ConstantsError(f"{FORCE}={excerpt(asked)}: {error}, or all") from None


def why_not(device: Device) -> str:
    """Reason why no child of this process can use the GPU; empty if one can."""
    from ksgen.devices.libcuda import compute_mode

    if not Path(sys.executable or "").name.lower().startswith(("python", "pypy")):
        return f"{sys.executable} is no Python that a child could run"
    mode = compute_mode(device.index)
    if mode in (_EXCLUSIVE, _PROHIBITED):
        word = "exclusive-process" if mode == _EXCLUSIVE else "prohibited"
        return f"the GPU is in {word} mode, so that no child can use it next to this process"
    return ""


def _started(device: Device, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the child, which outlives this process, and reads the bundles in use."""
    bundles = [str(bundle.path) for bundle in bundles_in_use()]
    paths = os.pathsep.join(filter(None, (*bundles, os.environ.get("KSGEN_CACHE_PATH"))))
    command, options = python_child(_CHILD, f"{device.runtime}:{device.index}", KSGEN_CACHE_PATH=paths)
    return subprocess.Popen(command, **options, stdout=subprocess.DEVNULL, stderr=errors)


def _take(device: Device, known: _Standing) -> None:
    """Read the passport that the child has made, or report why it made none."""
    with _guard:
        child, errors, known.child, known.errors = known.child, known.errors, None, None
    if child is None:
        return  # another thread has done this
    known.bars = None
    if errors is not None:
        with errors:
            errors.seek(0)
            lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        if child.returncode:
            _warn(device, lines[-1].strip() if lines else f"the process that proves them {_end_of(child.returncode)}")


def _end_of(status: int) -> str:
    return "was not done in time" if status == -signal.SIGALRM else f"ended with status {status}"


def _warn(device: Device, why: str) -> None:
    warn(
        f"{device.name}: no passport, so that launchers choose no family that must be proven first: {why}; "
        f"{MAKE} tries again, KSGEN_TRIAL=off keeps launchers from trying"
    )
