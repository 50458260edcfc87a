"""What searches found: for a device, the family and constants that served a kernel best. Read here, written by the tuner.

One JSON file per device name, one line per entry, sorted, so that files merge in git. The user's own file wins over the
one that ksgen ships. Never renders and never measures.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ksgen.errors import ConstantsError, KsgenError, PatternError, SpecError
from ksgen.families import check, family_named
from ksgen.paths import resource, wisdom_dir
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec


@dataclass(frozen=True)
class Entry:
    """One kernel's best known constants at one batch."""

    kernel: KernelSpec  # its batch is that of a specialised kernel; `batch` is what was measured
    batch: int
    family: str
    constants: Any
    measured: Mapping[str, Any]  # median_us, floor_us, driver, compiler, ksgen, template, date

    def as_json(self) -> dict[str, Any]:
        kernel = self.kernel
        return {
            "pattern": list(kernel.pattern.shape),
            "precision": kernel.precision,
            "layout": kernel.layout,
            "epilogue": asdict(kernel.epilogue),
            "specialised": kernel.batch is not None,
            "batch": self.batch,
            "family": self.family,
            "constants": asdict(self.constants),
            "measured": dict(self.measured),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Entry":
        batch = row["batch"]
        if type(batch) is not int or batch < 1:
            raise ValueError(f"batch={batch!r} is no whole number from 1 up")
        kernel = KernelSpec(
            Pattern(*row["pattern"]), row["precision"], row["layout"], Epilogue(**row["epilogue"]), batch if row["specialised"] else None
        )
        family = family_named(row["family"])
        constants = family.constants(row["constants"])
        check(family, kernel, constants)
        return cls(kernel, batch, family.name, constants, dict(row["measured"]))


class Wisdom:
    """Entries of one device; later ones win over earlier ones of the same kernel and batch."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._by_kernel: dict[KernelSpec, dict[int, Entry]] = {}
        for entry in entries:
            self._by_kernel.setdefault(entry.kernel, {})[entry.batch] = entry

    def lookup(self, kernel: KernelSpec, batch: int) -> Entry | None:
        """The entry of this batch, else of the nearest one in ratio; None where the kernel was never measured.

        A kernel for one batch takes what was found for any batch, where nothing was found for itself.
        """
        known = self._by_kernel.get(kernel) or self._by_kernel.get(replace(kernel, batch=None))
        if not known:
            return None
        return known[min(known, key=lambda have: (max(have, batch) / min(have, batch), have))]

    def batches(self, kernel: KernelSpec) -> list[int]:
        """The batches at which the kernel was measured."""
        return sorted(self._by_kernel.get(kernel, {}))

    def entries(self) -> list[Entry]:
        """All entries, sorted by kernel name and batch."""
        found = [entry for known in self._by_kernel.values() for entry in known.values()]
        return sorted(found, key=lambda entry: (entry.kernel.pattern, entry.kernel.name, entry.batch))


def file_name(device_name: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def load_wisdom(device_name: str, more: Iterable[str] = ()) -> Wisdom:
    """What ksgen ships for the device, then `more` texts (a bundle's), then the user's own file."""
    name = file_name(device_name)
    texts = [(str(path), text) for path in (resource("wisdom") / name,) if (text := _text(path)) is not None]
    texts += [("the bundle", text) for text in more]
    texts += [(str(path), text) for path in (wisdom_dir() / name,) if (text := _text(path)) is not None]
    return Wisdom(entry for source, text in texts for entry in parse(text, source))


def parse(text: str, source: str) -> list[Entry]:
    """The entries of a wisdom file; `KsgenError` says which file and entry cannot be read."""
    try:
        rows = json.loads(text)["entries"]
        numbered = list(enumerate(rows, start=1))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise KsgenError(f"{source}: not a wisdom file ({error}); restore it, or delete it and tune again") from error
    return [_entry(row, f"{source}: entry {number}") for number, row in numbered]


def dump(device_name: str, wisdom: Wisdom) -> str:
    """The file's text: one line per entry."""
    lines = ",\n".join(json.dumps(entry.as_json(), sort_keys=True) for entry in wisdom.entries())
    return f'{{"device": {json.dumps(device_name)}, "entries": [\n{lines}\n]}}\n'


def _entry(row: Any, where: str) -> Entry:
    try:
        return Entry.from_json(row)
    except KeyError as error:
        raise KsgenError(f"{where}: {error} is missing; delete that line and tune again") from error
    except (TypeError, ValueError, AttributeError, PatternError, SpecError, ConstantsError) as error:
        raise KsgenError(f"{where}: {error}; delete that line and tune again") from error


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise KsgenError(f"{path}: cannot be read ({error})") from error
