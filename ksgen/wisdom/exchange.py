"""Exchanges wisdom between files and machines: lists known devices, merges two files, and compares them.

Times are compared only within one job, a kernel at a batch. Measures nothing, and writes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from ksgen.errors import KsgenError
from ksgen.files import reading
from ksgen.paths import resource, wisdom_dir
from ksgen.spec import KernelSpec
from ksgen.values import excerpt
from ksgen.wisdom.store import Entry, Wisdom, file_name, files_in, load_wisdom, parse_export, read_text

Job = tuple[KernelSpec, int]  # a kernel, and the batch at which it was measured


@dataclass(frozen=True)
class Difference:
    """One job on which two files differ."""

    device: str
    kernel: KernelSpec
    batch: int
    first: Entry | None
    second: Entry | None

    @property
    def what(self) -> str:
        if not (self.first and self.second):
            return "only in the first" if self.first else "only in the second"
        constants = [(entry.family, entry.constants) for entry in (self.first, self.second)]
        return "measured" if constants[0] == constants[1] else "constants"

    @property
    def ratio(self) -> float | None:
        """The second time over the first one; None if one is unknown or unreliable."""
        if any(entry.doubt for entry in (self.first, self.second) if entry):
            return None
        times = [entry.median_us if entry else None for entry in (self.first, self.second)]
        return times[1] / times[0] if times[0] and times[1] else None


def read_wisdom(path: Path) -> dict[str, Wisdom]:
    """Read a wisdom file or an export, by device."""
    with reading(path):
        text = read_text(path)
    return {device: Wisdom(entries) for device, entries in parse_export(text, str(path)).items()}


def folders() -> tuple[Path, Path]:
    """The folders of wisdom: what ksgen ships, and the user's own."""
    return resource("wisdom"), wisdom_dir()


def known_devices() -> dict[str, Wisdom]:
    """Wisdom that launchers here use: ksgen's own files, and the user's, which take precedence."""
    names: dict[str, None] = {}
    for folder in folders():
        for path in files_in(folder):
            for device in read_wisdom(path):
                if path.name != file_name(device):
                    raise KsgenError(
                        f"{path} is for {device}, which launchers read from {file_name(device)}; rename it"
                    )
                names[device] = None
    return {name: load_wisdom(name, strict=True) for name in sorted(names)}


def only_device(devices: Mapping[str, Wisdom], part: str | None, source: str) -> dict[str, Wisdom]:
    """Devices whose name contains `part`, in upper or lower case; all devices if it is None."""
    chosen = {name: wisdom for name, wisdom in devices.items() if part is None or part.lower() in name.lower()}
    if part is not None and not chosen:
        raise KsgenError(f"--device {excerpt(part)}: {source} has {', '.join(devices) or 'no device'}")
    return chosen


def better(first: Entry, second: Entry) -> Entry:
    """The better of two entries of a job: by rank, then by time.

    Times of stale entries compare only within a template; else the later entry is the better one.
    """
    if first.rank != second.rank:
        return min(first, second, key=lambda entry: entry.rank)
    if first.is_stale and _template(first) != _template(second):
        return max(first, second, key=lambda entry: str(entry.measured.get("date", "")))
    return min(first, second, key=lambda entry: entry.median_us or inf)


def merge(first: Iterable[Entry], second: Iterable[Entry]) -> list[Entry]:
    """Every job of both, with the better entry, or the first's if neither is better."""
    known: dict[Job, Entry] = {}
    for entry in (*first, *second):
        job = (entry.kernel, entry.batch)
        known[job] = better(known[job], entry) if job in known else entry
    return list(known.values())


def merge_devices(first: Mapping[str, Wisdom], second: Mapping[str, Wisdom]) -> dict[str, Wisdom]:
    """`merge`, device by device."""
    entries = [{name: wisdom.entries() for name, wisdom in side.items()} for side in (first, second)]
    return {name: Wisdom(merge(*(side.get(name, []) for side in entries))) for name in sorted({*first, *second})}


def improvements(known: Wisdom, offered: Wisdom) -> tuple[list[Entry], list[Entry]]:
    """The offered entries of new jobs, and the offered entries that are better than the known ones."""
    have = _by_job(known)
    new = [entry for job, entry in _by_job(offered).items() if job not in have]
    return new, [entry for job, entry in _by_job(offered).items() if job in have and better(have[job], entry) is entry]


def differences(first: Mapping[str, Wisdom], second: Mapping[str, Wisdom]) -> list[Difference]:
    """Every job on which the two differ."""
    found = []
    for device in sorted({*first, *second}):
        of_first, of_second = (_by_job(side.get(device, Wisdom())) for side in (first, second))
        for kernel, batch in {**of_first, **of_second}:
            pair = of_first.get((kernel, batch)), of_second.get((kernel, batch))
            if pair[0] != pair[1]:
                found.append(Difference(device, kernel, batch, *pair))
    return found


def _by_job(wisdom: Wisdom) -> dict[Job, Entry]:
    return {(entry.kernel, entry.batch): entry for entry in wisdom.entries()}


def _template(entry: Entry) -> tuple[str, object]:
    return entry.family, entry.measured.get("template")
