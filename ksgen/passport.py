"""Stores passports: per device, the families whose kernels were proven on it, and those that are disabled.

One JSON file per device name lies next to the user's own wisdom. Its proofs are valid for the device's name, target and
driver, and each one for the digest of its family's templates. ksgen ships no passport. A file that cannot be read, or
that another user can have written, is ignored.

A passport decides which families launchers may choose, and a child process makes one in the background. On a processor
every family may be chosen. On an NVIDIA GPU a disabled family is never chosen, and a family with tensor maps, warpgroup
instructions or clusters must be proven first. `KSGEN_PERMIT` lifts both rules. Proves nothing itself, and never uses a
CUDA context.
"""

import json
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import IO, Any, Literal, Protocol, get_args

from ksgen.build.build import bundles_in_use
from ksgen.build.children import python_child
from ksgen.devices.base import Device
from ksgen.emit.templates import template_digest
from ksgen.errors import ConstantsError, KsgenError, warn
from ksgen.families import FAMILIES, Bar, family_named
from ksgen.families.gpus import gpu_of
from ksgen.files import replaced_in_turn
from ksgen.locks import new_lock
from ksgen.paths import wisdom_dir
from ksgen.values import excerpt
from ksgen.wisdom import PASSPORT_SUFFIX, file_name, read_text

State = Literal["proven", "disabled"]
MOST_LETTERS = 400  # length of the longest reason
TRIALS = ("passport", "off", "background")  # accepted values of KSGEN_TRIAL; the first is the default
MAKE = "ksgen calibrate"  # the command that makes a passport
FORCE = "KSGEN_PERMIT"  # families that launchers may choose, whatever the passport says

_EXCLUSIVE, _PROHIBITED = 3, 2  # CU_COMPUTEMODE_...
_log = logging.getLogger(__name__)
_CHILD = "from ksgen.calibration.proof import main; main()"


class Known(Protocol):
    """A device to which a passport belongs, or the facts that identify it."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def driver_version(self) -> str: ...


@dataclass(frozen=True)
class Proof:
    """The verdict on one family on one device."""

    state: State
    reason: str  # why it is disabled; empty if it is proven
    template: str  # digest of the family's templates
    cases: int  # kernels that were checked
    seconds: float  # processor seconds of the proof, including compilers

    def __post_init__(self) -> None:
        words, numbers = (self.reason, self.template), (self.cases, self.seconds)
        if self.state not in get_args(State) or not all(isinstance(each, str) and each.isprintable() for each in words):
            raise ValueError(f"state={excerpt(self.state)}, reason={excerpt(self.reason)}")
        if not all(type(each) in (int, float) and isfinite(each) and each >= 0 for each in numbers):
            raise ValueError(f"cases={excerpt(self.cases)}, seconds={excerpt(self.seconds)}")


@dataclass(frozen=True)
class Passport:
    """Verdicts on the families of one device."""

    device: str
    target: str
    driver: str
    families: Mapping[str, Proof] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line: the proven families, and the disabled ones with their reasons."""
        proven = [name for name, proof in self.families.items() if proof.state == "proven"]
        disabled = [f"{name} is disabled: {proof.reason}" for name, proof in self.families.items() if proof.reason]
        return "; ".join([f"proven: {', '.join(proven) or 'no family'}", *disabled])


def path_of(device_name: str) -> Path:
    """Path of a device's passport, next to its wisdom: `nvidia-h200.passport.json`."""
    return wisdom_dir() / file_name(device_name).replace(".json", PASSPORT_SUFFIX)


def load(device: Known) -> Passport | None:
    """The passport of a device; None if there is none for this device, target and driver.

    It has only proofs of the current templates. A file that cannot be trusted or read is ignored, with one warning.
    """
    path = path_of(device.name)
    try:
        found = _parse(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _log.warning("%s: this passport is passed over (%s)", path, error.strerror or error)
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"{'it lacks ' if isinstance(error, KeyError) else ''}{error}"
        _log.warning("%s: this passport is passed over (%s); delete it: it is made again", path, excerpt(why))
        return None
    if (found.device, found.target, found.driver) != (device.name, device.target, device.driver_version):
        return None
    return found


def record(device: Known, proofs: Mapping[str, Proof]) -> Passport:
    """Add proofs to a device's passport, and return it. `KsgenError` if it cannot be written.

    Valid proofs of other families stay. Processes that write at once take turns.
    """
    path = path_of(device.name)
    try:
        with replaced_in_turn(path) as aside:
            known = load(device)
            families = {**(known.families if known else {}), **proofs}
            passport = Passport(device.name, device.target, device.driver_version, dict(sorted(families.items())))
            aside.write_text(json.dumps(asdict(passport), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise KsgenError(
            f"{path}: the passport cannot be written ({error.strerror or error}); "
            "set KSGEN_WISDOM_DIR to another folder"
        ) from error
    return passport


def _parse(text: str) -> Passport:
    content: Any = json.loads(text)
    device, target, driver = names = [content[name] for name in ("device", "target", "driver")]
    if not all(isinstance(each, str) for each in names):
        raise ValueError(f"it names {excerpt(names)}")
    proofs = {name: Proof(**each) for name, each in content["families"].items()}
    fresh = {name: each for name, each in proofs.items() if name in FAMILIES and each.template == template_digest(name)}
    return Passport(device, target, driver, fresh)


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
    # each attribute is read once, because other threads may take the child or forget the bars meanwhile
    if (child := known.child) is not None and child.poll() is not None:
        _take(device, known)
    if (found := known.bars) is None:
        found = known.bars = read_bars(device)
    return found


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
        if status := child.returncode:
            end = "was not done in time" if status == -signal.SIGALRM else f"ended with status {status}"
            _warn(device, lines[-1].strip() if lines else f"the process that proves them {end}")


def _warn(device: Device, why: str) -> None:
    warn(
        f"{device.name}: no passport, so that launchers choose no family that must be proven first: {why}; "
        f"{MAKE} tries again, KSGEN_TRIAL=off keeps launchers from trying"
    )
