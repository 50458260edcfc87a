"""Stores every candidate that a search tried in SQLite, next to the cache. Measures and judges nothing.

A killed search resumes from here, and reports are drawn from here. Two tuners may write to one store. If the file
cannot be used, the store lives in memory, with one warning.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from ksgen.errors import KsgenError, warn
from ksgen.families import family_named
from ksgen.locks import new_lock
from ksgen.ownership import check_owner, make_folder
from ksgen.paths import cache_dir
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.kernel import chains_from_json
from ksgen.tuning.job import Candidate, Job

STATES = ("measured", "wrong", "failed", "hung", "pruned")  # in the order in which reports list them
BUSY_SECONDS = 30.0  # how long to wait for another tuner's write


@dataclass(frozen=True)
class Trial:
    """One candidate of one job, and its outcome."""

    kernel: KernelSpec
    batch: int
    device: str  # name of the device
    family: str
    constants: Any
    template: str  # emit.template_digest(family): a trial of another template is stale
    state: str  # one of STATES
    reason: str = ""  # why it was not measured
    median_us: float | None = None
    spread: float | None = None  # width of the interval that holds the median, relative to it
    runs: int = 0  # number of blocks of runs, whose median is `median_us`
    predicted_us: float | None = None  # by the cost model
    floor_us: float | None = None  # by the ceilings below
    bytes_per_s: float | None = None  # rate at which the device copied in the same search
    flops_per_s: float | None = None  # rate at which it computed with the family's instructions
    registers: int | None = None  # per thread; None if the compiler does not say
    shared_bytes: int | None = None  # per block
    note: str = ""  # remark about the time, such as "clocks moved"
    driver: str = ""  # on a processor with its target: `Facts.measured_with`
    compiler: str = ""  # name and version
    measured_at: str = ""  # ISO 8601, UTC

    @property
    def job(self) -> Job:
        return Job(self.kernel, self.batch)

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.family, self.constants)


_KEY = ("kernel", "batch", "device", "family", "constants", "template")
_COLUMNS = tuple(field.name for field in fields(Trial))
_SCHEMA = f"""
create table if not exists trials (
    id integer primary key, {", ".join(_COLUMNS)}, unique ({", ".join(_KEY)})
)"""
_ADD = f"""
insert into trials ({", ".join(_COLUMNS)}) values ({", ".join(f":{name}" for name in _COLUMNS)})
on conflict do update set {", ".join(f"{name} = excluded.{name}" for name in _COLUMNS if name not in _KEY)}"""


class TrialStore:
    """The trials of all jobs and devices. Measuring a candidate again replaces its old trial."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_dir() / "trials.sqlite"
        self._guard = new_lock()
        try:
            self._database = _opened(self.path)
        except (sqlite3.Error, OSError) as error:
            self._database = self._in_memory(error)

    def add(self, trial: Trial) -> None:
        """Store a trial. It is on disk when this returns."""
        self._run(_ADD, _row(trial))

    def trials(
        self, kernel: KernelSpec | None = None, batch: int | None = None, device: str | None = None, newest: int = -1
    ) -> list[Trial]:
        """Trials of the given kernel, batch and device, in the order in which they were first tried.

        None means any. At most the `newest` trials are returned; -1 means all.

        Trials of another version of ksgen, with constants unknown to this one, are skipped.
        """
        wanted = {"kernel": kernel and _kernel_text(kernel), "batch": batch, "device": device}
        values = {name: value for name, value in wanted.items() if value is not None}
        where = f" where {' and '.join(f'{name} = :{name}' for name in values)}" if values else ""
        rows = self._run(f"select {', '.join(_COLUMNS)} from trials{where} order by id desc limit {newest}", values)
        return [trial for row in reversed(rows) if (trial := _trial(dict(zip(_COLUMNS, row, strict=True))))]

    def close(self) -> None:
        with self._guard:
            self._database.close()

    def _run(self, statement: str, values: dict[str, Any]) -> list[Any]:
        with self._guard:
            try:
                return self._database.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                broken, self._database = self._database, self._in_memory(error)
                broken.close()
                return self._database.execute(statement, values).fetchall()

    def _in_memory(self, error: Exception) -> sqlite3.Connection:
        """A new store with what can still be read of the damaged file."""
        warn(f"{self.path}: trials are kept in memory only, and are lost at the end ({error})")
        memory = _connect(":memory:")
        memory.execute(_SCHEMA)
        for row in _readable_rows(self.path):
            memory.execute(_ADD, row)
        return memory


def _opened(path: Path) -> sqlite3.Connection:
    """Open a store, and wait for others that open it at this moment: SQLite's own waiting does not cover a change of
    the journal's mode."""
    last = monotonic() + BUSY_SECONDS
    while True:
        try:
            return _open(path)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or monotonic() > last:
                raise
            sleep(0.01)


def _open(path: Path) -> sqlite3.Connection:
    _check(path)
    database = _connect(str(path))
    try:
        # A write-ahead log needs shared memory, which network file systems lack. A home folder may be on such a system.
        database.execute("pragma journal_mode = delete")
        database.execute(_SCHEMA)
        database.execute("begin immediate")  # if nothing can be written, this fails now, not at the first trial
        database.execute("commit")
        database.execute(f"select {', '.join(_COLUMNS)} from trials limit 1")
    except BaseException:
        database.close()
        raise
    return database


def _check(path: Path) -> None:
    """Make the folder; `OSError` if others can have written to it or to the file, or if that is not a regular file."""
    make_folder(path.parent)
    if path.exists():
        check_owner(path, path.stat())
        if not path.is_file():
            raise OSError("it is not a regular file")


def _connect(path: str, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=uri)


def _readable_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        _check(path)
        with closing(_connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            for row in database.execute(f"select {', '.join(_COLUMNS)} from trials order by id"):
                yield dict(zip(_COLUMNS, row, strict=True))
    except (sqlite3.Error, OSError):
        return  # only the rows read so far can be recovered


def _kernel_text(kernel: KernelSpec) -> str:
    return json.dumps(kernel.as_json, sort_keys=True)


def _row(trial: Trial) -> dict[str, Any]:
    constants = json.dumps(asdict(trial.constants), sort_keys=True)
    return {name: getattr(trial, name) for name in _COLUMNS} | {
        "kernel": _kernel_text(trial.kernel),
        "constants": constants,
    }


def _trial(row: dict[str, Any]) -> Trial | None:
    try:
        own = json.loads(row["kernel"])
        chains, epilogue = chains_from_json(own, lambda shape: Pattern(**shape)), Epilogue(**own.pop("epilogue"))
        options = {name: value for name, value in own.items() if name not in ("pattern", "before", "beside")}
        family = family_named(row["family"])
        constants = family.constants(json.loads(row["constants"]))
        kernel = KernelSpec(chains, epilogue=epilogue, **options)
        return Trial(**{**row, "kernel": kernel, "family": family.name, "constants": constants})
    except (KsgenError, ValueError, TypeError, KeyError, AttributeError):
        return None
