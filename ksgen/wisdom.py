"""Stores results of searches: the best family and constants of a kernel on a device. The tuner writes them.

One JSON file per device name, one line per entry, sorted, so that files merge in git. The user's own file takes
precedence over the one that ksgen ships. An entry of another template version is stale: a first guess, which never wins
over a fresh one. Among equally fresh entries, the result of a trial (of a few candidates) never wins over that of a
search. After these criteria, an unreliable time never wins over a reliable one. If an entry cannot be read, launchers
use the other entries, with a warning. Commands that write or list wisdom stop with an error.

Files of several machines are merged and compared; times are compared only within one job, a kernel at a batch. Renders
and measures nothing.
"""

import json
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from textwrap import shorten
from typing import Any

from ksgen.emit.templates import template_digest
from ksgen.errors import ConstantsError, KsgenError, warn
from ksgen.families import check, family_named
from ksgen.families.vector.defaults import alike
from ksgen.files import locked, read, reading, replaced_in_turn
from ksgen.ownership import check_folder, make_folder
from ksgen.paths import resource, wisdom_dir
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.kernel import chains_as_json, chains_from_json, pattern_as_list
from ksgen.values import counted, excerpt

MOST_BATCH = 2**63 - 1
MOST_ATTEMPTS = 3  # trials of a kernel with unreliable times, after which the last one counts
MOST_BYTES_OF_FILE = 2**26  # a hundred thousand entries
MOST_CONSTANT = 2**31 - 1  # emitted as a 32-bit integer
PASSPORT_SUFFIX = ".passport.json"  # of passports, which lie next to wisdom files
MOST_US = 1e12  # microseconds of one launch: eleven days

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One kernel's best known constants at one batch."""

    kernel: KernelSpec  # `kernel.batch` is None unless the kernel is specialised for one batch
    batch: int  # the measured one
    family: str
    constants: Any
    # median_us, floor_us, transpose_us, default_us, predicted_us, driver, compiler, ksgen, template, date.
    # note: why the time is unreliable, if it is. trial: true, if only a few candidates were timed. attempts: as below.
    # target: a processor's architecture and instructions, since several kinds of processors report one name.
    measured: Mapping[str, Any]

    @property
    def is_stale(self) -> bool:
        """Whether the template has changed since: the time is of another source, and the constants are a guess."""
        return bool(self.measured.get("template") != template_digest(self.family))

    @property
    def why_unreliable(self) -> str:
        """Reason why its time is unreliable; empty if it is reliable."""
        return str(self.measured.get("note", ""))

    @property
    def is_trial(self) -> bool:
        """Whether it comes from a trial of a few candidates, not from a search."""
        return bool(self.measured.get("trial"))

    @property
    def attempts(self) -> int:
        """Number of this kernel's trials in sequence whose times were unreliable; 0 if its time is reliable."""
        return int(self.measured.get("attempts", 0))

    @property
    def is_open(self) -> bool:
        """Whether the next trial measures the kernel again: a trial's time is unreliable, and attempts are left."""
        return self.is_trial and bool(self.why_unreliable) and self.attempts < MOST_ATTEMPTS

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """Rank that decides before times do; the smallest wins.

        Fresh entries precede stale ones, then searches precede trials, then reliable times precede unreliable ones.
        """
        return self.is_stale, self.is_trial, bool(self.why_unreliable)

    @property
    def over_default(self) -> float | None:
        """Speed relative to the default, which was timed alternately with it; None if unknown or unreliable."""
        default_us = self.measured.get("default_us")
        return default_us / self.median_us if default_us and self.median_us and not self.why_unreliable else None

    @property
    def is_sound(self) -> bool:
        """Whether its time may decide: it was measured with the current template, and is reliable."""
        return not self.is_stale and not self.why_unreliable

    @property
    def median_us(self) -> float | None:
        return self.measured.get("median_us") or None

    @property
    def target(self) -> str:
        """Target of the processor that it was measured on; empty for other devices, whose names suffice."""
        return str(self.measured.get("target", ""))

    def holds_on(self, target: str) -> bool:
        """Whether a device of this target may use it: always if the entry has no target, or if `target` is empty."""
        return self.target in ("", target) or not target

    def as_json(self) -> dict[str, Any]:
        fields = replace(self.kernel, stride="dense").as_json
        return {
            **{name: value for name, value in fields.items() if (name, value) != ("job", "multiply")},
            **chains_as_json(self.kernel.chains, pattern_as_list),
            "specialised": self.kernel.batch is not None,
            "batch": self.batch,
            "family": self.family,
            "constants": asdict(self.constants),
            "measured": dict(self.measured),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Entry":
        batch = row["batch"]
        if type(batch) is not int or not 1 <= batch <= MOST_BATCH:
            raise ValueError(f"batch={excerpt(batch)} is not a whole number from 1 to {MOST_BATCH}")
        specialised = batch if row["specialised"] else None
        chains, epilogue = chains_from_json(row, lambda shape: Pattern(*shape)), Epilogue(**row["epilogue"])
        options = {name: row[name] for name in ("job", "between", "out_layout", "weights", "inputs") if name in row}
        kernel = KernelSpec(chains, row["precision"], row["layout"], epilogue, specialised, **options)
        if (job := row.get("job", "multiply")) != kernel.job:
            raise ValueError(f"job={excerpt(job)} of a kernel whose job is {kernel.job}")
        family = family_named(row["family"])
        constants = family.constants(row["constants"])
        if any(isinstance(value, int) and value > MOST_CONSTANT for value in row["constants"].values()):
            raise ValueError(f"a constant above {MOST_CONSTANT}")
        check(family, kernel, constants)
        measured = {**row["measured"]}
        if (earlier := measured.pop("turn_us", None)) is not None:  # its former name
            measured.setdefault("transpose_us", earlier)
        for name in ("median_us", "floor_us", "transpose_us", "default_us", "predicted_us"):
            time = measured.get(name, 0)
            if type(time) not in (int, float) or not 0 <= time < MOST_US:
                raise ValueError(f"{name}={excerpt(time)} is not a time in microseconds")
        note = measured.get("note", "")
        if not isinstance(note, str) or not note.isprintable():
            raise ValueError(f"note={excerpt(note)} is not text in one line")
        if not isinstance(target := measured.get("target", ""), str) or not target.isprintable():
            raise ValueError(f"target={excerpt(target)} is not a target of a processor")
        if not isinstance(trial := measured.get("trial", False), bool):
            raise ValueError(f"trial={excerpt(trial)} is not true or false")
        attempts = measured.get("attempts", 0)
        if type(attempts) is not int or not 0 <= attempts <= MOST_CONSTANT:
            raise ValueError(f"attempts={excerpt(attempts)} is not a number of trials")
        return cls(kernel, batch, family.name, constants, measured)


class Wisdom:
    """Entries of a device's name. A later entry replaces an earlier one of its kernel, batch and target unless its rank
    is worse.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._by_kernel: dict[KernelSpec, dict[tuple[int, str], Entry]] = {}  # by batch and target
        for entry in entries:
            known, which = self._by_kernel.setdefault(entry.kernel, {}), (entry.batch, entry.target)
            if which not in known or entry.rank <= known[which].rank:
                known[which] = entry

    def __repr__(self) -> str:
        return f"Wisdom({counted(sum(map(len, self._by_kernel.values())), 'entry', 'entries')})"

    def lookup(self, kernel: KernelSpec, batch: int, aligned: bool = True) -> Entry | None:
        """Entry of the nearest batch in ratio, among entries whose family supports this batch and alignment.

        None if there is none in the batch's class (`are_alike`). Entries that are neither unreliable nor
        stale precede all others, even if another batch is nearer.

        A kernel for strided arrays uses the entries of the kernel for contiguous arrays. Some kernels without entries
        of their own use those of another kernel. A kernel specialised for one batch uses those of the kernel for every
        batch. A chain with an epilogue or an activation in between uses those of the plain chain. A gradient with a
        bias uses those of the gradient without one.
        """
        # `replace` is called only if necessary, because it takes as long as several choices of constants
        dense = replace(kernel, stride="dense") if kernel.is_strided else kernel
        found = self._by_kernel.get(dense)
        if not found and dense.batch is not None:
            found = self._by_kernel.get(replace(dense, batch=None))
        if not found and (kernel.is_chain or kernel.job == "gradient"):
            found = self._by_kernel.get(replace(dense, batch=None, epilogue=Epilogue(), between="none"))
        known = [
            entry
            for entry in (found or {}).values()
            if are_alike(entry.batch, batch) and family_named(entry.family).takes(kernel, batch, aligned)
        ]

        def preference(entry: Entry) -> tuple[Any, ...]:
            have = entry.batch
            return not entry.is_sound, max(have, batch) / min(have, batch), have, *_preference(entry)

        return min(known, key=preference, default=None)

    def of(self, kernel: KernelSpec, batch: int) -> Entry | None:
        """The entry of exactly this kernel and batch; None if there is none."""
        found = (entry for entry in self._by_kernel.get(kernel, {}).values() if entry.batch == batch)
        return min(found, key=_preference, default=None)

    def batches(self, kernel: KernelSpec) -> list[int]:
        """The batches at which the kernel was measured."""
        return sorted({entry.batch for entry in self._by_kernel.get(kernel, {}).values()})

    def entries(self) -> list[Entry]:
        """All entries, sorted by kernel name, batch and target."""
        found = [entry for known in self._by_kernel.values() for entry in known.values()]
        return sorted(found, key=lambda entry: (entry.kernel.pattern, entry.kernel.name, entry.batch, entry.target))


def _preference(entry: Entry) -> tuple[Any, ...]:
    """Sort key of entries of one kernel and batch: of equal ranks, one that names its target comes first."""
    return *entry.rank, not entry.target


def are_alike(measured: int, batch: int) -> bool:
    """Whether a measurement at one batch counts at another: both batches have the same default constants."""
    return alike(measured) == alike(batch)


def file_name(device_name: str) -> str:
    """Name of a device's wisdom file: `nvidia-h200.json` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def files_in(folder: Path) -> list[Path]:
    """Wisdom files of a folder, without the passports next to them."""
    return sorted(path for path in folder.glob("*.json") if not path.name.endswith(PASSPORT_SUFFIX))


def load_wisdom(device_name: str, more: Iterable[str] = (), strict: bool = False, target: str = "") -> Wisdom:
    """Wisdom that ksgen ships for the device, then `more` texts (a bundle's), then the user's own file.

    With a `target`, entries of other processors of this name are left out. Unreadable parts are skipped, with one
    warning per text; `strict` raises `KsgenError` for the first one instead.
    """
    shipped, own = (folder / file_name(device_name) for folder in (resource("wisdom"), wisdom_dir()))
    sources: list[Path | str] = [shipped, *more, own]
    return Wisdom(entry for source in sources for entry in _entries_of(source, strict) if entry.holds_on(target))


def parse_export(text: str, source: str) -> dict[str, list[Entry]]:
    """The entries of an export (`dump_export`) or of a wisdom file, by device; `KsgenError` says which file and entry
    cannot be read.
    """
    content = _content(text, source)
    parts = content["devices"] if isinstance(content, dict) and "devices" in content else [content]
    if not isinstance(parts, list):
        raise _damaged(source, f"devices is {excerpt(parts)}, not a list")
    found: dict[str, list[Entry]] = {}
    for part in parts:
        rows = _rows(part, source)
        device = part.get("device")
        if not isinstance(device, str) or not device.isprintable() or file_name(device) == ".json":
            raise _damaged(source, f"device is {excerpt(device)}, not a name")
        found.setdefault(device, []).extend(
            _entry(row, f"{where} of {device}" if len(parts) > 1 else where) for where, row in rows
        )
    return found


def dump(device_name: str, wisdom: Wisdom) -> str:
    """The text of a device's wisdom file, with one line per entry."""
    lines = ",\n".join(json.dumps(entry.as_json(), sort_keys=True) for entry in wisdom.entries())
    return f'{{"device": {json.dumps(device_name)}, "entries": [\n{lines}\n]}}\n'


def dump_export(devices: Mapping[str, Wisdom]) -> str:
    """One text for several devices: a list of the texts of their files. For a single device, the text of its file."""
    texts = [dump(name, devices[name]) for name in sorted(devices)]
    return texts[0] if len(texts) == 1 else '{"devices": [\n' + ",\n".join(text.rstrip() for text in texts) + "\n]}\n"


def save(device_name: str, entries: Iterable[Entry]) -> Path:
    """Add entries to the user's own file, and return its path.

    An entry replaces the one of the same kernel and batch unless its rank is worse. Processes that save at once take
    turns. `KsgenError` if the file is damaged: no part of it is lost.
    """
    path = wisdom_dir() / file_name(device_name)
    try:
        with replaced_in_turn(path) as aside:
            aside.write_bytes(dump(device_name, Wisdom([*_entries_of(path, strict=True), *entries])).encode())
    except OSError as error:
        raise KsgenError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def check_writable() -> None:
    """Raise `KsgenError` before a search if its winners could not be saved."""
    folder = wisdom_dir()
    try:
        make_folder(folder)
        with tempfile.NamedTemporaryFile(prefix=".ksgen-", dir=folder) as file, locked(Path(file.name)) as is_locked:
            pass
    except OSError as error:
        words = "wisdom cannot be written there; set KSGEN_WISDOM_DIR to another folder"
        raise KsgenError(f"{folder}: {words} ({error.strerror or error})") from error
    if not is_locked:
        warn(
            f"{folder}: its file system has no locks, so searches that save at once can lose results; run one at a time"
        )


def _entries_of(source: Path | str, strict: bool) -> Iterator[Entry]:
    """The entries of a file, or of a bundle's text."""
    rows, damage = [], []
    try:
        if (text := source if isinstance(source, str) else _text(source)) is not None:
            where = "the bundle" if text is source else str(source)
            rows = _rows(_content(text, where), where)
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
        _log.warning("unreadable wisdom is ignored: %s%s", damage[0], others)


def _content(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(source, error) from error


def _rows(content: Any, source: str) -> list[tuple[str, Any]]:
    """Entries of a file's content, as read from JSON, each with its place for messages."""
    rows = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise _damaged(source, f"entries is {excerpt(rows)}, not a list")
    return [(f"{source}: entry {number}", row) for number, row in enumerate(rows, start=1)]


def _damaged(source: str, why: object) -> KsgenError:
    return KsgenError(f"{source}: not a wisdom file ({why}); restore it, or delete it and tune again")


def _entry(row: Any, where: str) -> Entry:
    try:
        return Entry.from_json(row)
    except KeyError as error:
        raise KsgenError(f"{where}: {excerpt(error.args[0])} is missing; delete that line and tune again") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise KsgenError(f"{where}: {excerpt(row)} is not an entry; delete that line and tune again") from error
    except (ValueError, ConstantsError) as error:
        # shortened to one line, because the message can quote the file
        raise KsgenError(f"{where}: {shorten(str(error), 400)}; delete that line and tune again") from error


def read_text(path: Path) -> str:
    """The text of a wisdom file or an export; `OSError` or `UnicodeDecodeError` if it cannot be read as text.

    In the user's own folder, which launchers read, it must be a plain file that no other user can have written.
    """
    if is_own := path.parent == wisdom_dir():
        check_folder(path.parent)
    return read(path, MOST_BYTES_OF_FILE, is_own).decode()


def _text(path: Path) -> str | None:
    with reading(path), suppress(FileNotFoundError, NotADirectoryError):
        return read_text(path)
    return None


# a kernel, the batch at which it was measured, and the processor's target or ""
Job = tuple[KernelSpec, int, str]


@dataclass(frozen=True)
class Difference:
    """One job on which two files differ."""

    device: str
    kernel: KernelSpec
    batch: int
    target: str  # of the processor; empty for other devices
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
        if any(entry.why_unreliable for entry in (self.first, self.second) if entry):
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

    Times of two stale entries are compared only if both are of one template version. Otherwise the later entry is the
    better one.
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
        job = _job_of(entry)
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
        for job in {**of_first, **of_second}:
            pair = of_first.get(job), of_second.get(job)
            if pair[0] != pair[1]:
                found.append(Difference(device, *job, *pair))
    return found


def _by_job(wisdom: Wisdom) -> dict[Job, Entry]:
    return {_job_of(entry): entry for entry in wisdom.entries()}


def _job_of(entry: Entry) -> Job:
    return entry.kernel, entry.batch, entry.target


def _template(entry: Entry) -> tuple[str, object]:
    return entry.family, entry.measured.get("template")
