"""Stores passports: per device, the families whose kernels were proven on it, and those that are disabled.

One JSON file per device name lies next to the user's own wisdom. Its proofs are valid for the device's name, target and
driver, and each one for the digest of its family's templates. ksgen ships no passport. A file that cannot be read, or
that another user can have written, is ignored. Proves and chooses nothing.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from ksgen.emit.templates import template_digest
from ksgen.errors import KsgenError
from ksgen.families import FAMILIES
from ksgen.files import replaced_in_turn
from ksgen.paths import wisdom_dir
from ksgen.values import excerpt
from ksgen.wisdom.store import PASSPORT_SUFFIX, file_name, read_text

State = Literal["proven", "disabled"]
MOST_LETTERS = 400  # length of the longest reason

_log = logging.getLogger(__name__)


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
            f"{path}: the passport cannot be written ({error.strerror or error}); KSGEN_WISDOM_DIR names another folder"
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
