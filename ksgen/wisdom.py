"""What searches found: for a device, the family and constants that served a kernel best. Read here, written by the tuner.

One JSON file per device name, one line per entry, sorted, so that files merge in git. The user's own file wins over the
one that ksgen ships. An entry that cannot be read costs only itself: launchers go on without it, with a warning; commands
that write wisdom, or were asked for it, refuse. Never renders and never measures.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from ksgen.errors import ConstantsError, KsgenError, PatternError, SpecError
from ksgen.families import check, family_named
from ksgen.paths import resource, wisdom_dir
from ksgen.pattern import Pattern, excerpt
from ksgen.spec import Epilogue, KernelSpec

MOST_BATCH = 2**63 - 1
MOST_CONSTANT = 2**31 - 1  # emitted as a 32-bit integer

_log = logging.getLogger(__name__)


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
        job = {} if kernel.job == "multiply" else {"job": kernel.job}
        return job | {
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
        if type(batch) is not int or not 1 <= batch <= MOST_BATCH:
            raise ValueError(f"batch={excerpt(batch)} is no whole number from 1 to {MOST_BATCH}")
        specialised = batch if row["specialised"] else None
        kernel = KernelSpec(
            Pattern(*row["pattern"]), row["precision"], row["layout"], Epilogue(**row["epilogue"]), specialised, row.get("job", "multiply")
        )
        family = family_named(row["family"])
        constants = family.constants(row["constants"])
        if any(isinstance(value, int) and value > MOST_CONSTANT for value in row["constants"].values()):
            raise ValueError(f"a constant above {MOST_CONSTANT}")
        check(family, kernel, constants)
        return cls(kernel, batch, family.name, constants, {**row["measured"]})


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


def load_wisdom(device_name: str, more: Iterable[str] = (), strict: bool = False) -> Wisdom:
    """What ksgen ships for the device, then `more` texts (a bundle's), then the user's own file.

    What cannot be read is passed over, with one warning for each text; `strict` raises `KsgenError` on the first instead.
    """
    shipped, own = (folder / file_name(device_name) for folder in (resource("wisdom"), wisdom_dir()))
    sources: list[Path | str] = [shipped, *more, own]
    return Wisdom(entry for source in sources for entry in _entries_of(source, strict))


def parse(text: str, source: str) -> list[Entry]:
    """The entries of a wisdom file; `KsgenError` says which file and entry cannot be read."""
    return [_entry(row, where) for where, row in _rows(text, source)]


def dump(device_name: str, wisdom: Wisdom) -> str:
    """The file's text: one line per entry."""
    lines = ",\n".join(json.dumps(entry.as_json(), sort_keys=True) for entry in wisdom.entries())
    return f'{{"device": {json.dumps(device_name)}, "entries": [\n{lines}\n]}}\n'


def _entries_of(source: Path | str, strict: bool) -> Iterator[Entry]:
    """Those of a file, or of a bundle's text."""
    rows, damage = [], []
    try:
        if (text := source if isinstance(source, str) else _text(source)) is not None:
            rows = _rows(text, "the bundle" if text is source else str(source))
    except KsgenError as error:
        damage.append(error)
    for where, row in rows:
        try:
            yield _entry(row, where)
        except KsgenError as error:
            damage.append(error)
    if damage and strict:
        raise damage[0]
    if damage:
        others = f" (and {len(damage) - 1} more like it)" if len(damage) > 1 else ""
        _log.warning("wisdom that cannot be read is passed over: %s%s", damage[0], others)


def _rows(text: str, source: str) -> list[tuple[str, Any]]:
    """The file's entries as JSON has them, each with its place."""
    try:
        rows = json.loads(text)["entries"]
        if not isinstance(rows, list):
            raise TypeError(f"entries is {excerpt(rows)}, not a list")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise KsgenError(f"{source}: not a wisdom file ({error}); restore it, or delete it and tune again") from error
    return [(f"{source}: entry {number}", row) for number, row in enumerate(rows, start=1)]


def _entry(row: Any, where: str) -> Entry:
    try:
        return Entry.from_json(row)
    except KeyError as error:
        raise KsgenError(f"{where}: {excerpt(error.args[0])} is missing; delete that line and tune again") from error
    except (TypeError, ValueError, AttributeError, RecursionError, PatternError, SpecError, ConstantsError) as error:
        # Shortened, and in one line: it can hold the file's own words.
        raise KsgenError(f"{where}: {shorten(str(error), 400)}; delete that line and tune again") from error


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise KsgenError(f"{path}: cannot be read ({error})") from error
