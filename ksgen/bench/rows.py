"""The log of measurements, and tidy results: one row per contender and job, with device, date and software versions.

The log holds one JSON object per line, appended at once, so that killing the process loses at most one. There are four
kinds of lines. "run" holds the facts of a process, and "ceilings" the device's measured limits. "contender" describes
one method to compute one job, with its error. "measurement" is the result of one measurement of that contender.

A row's columns are `COLUMNS`; files are the log of `ksgen bench`, CSV, or Parquet if pyarrow is installed.
"""

import csv
import errno
import fcntl
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, get_type_hints

from ksgen.bench.roster import AND, FORWARD, STEPS_OF_LAYERS, WHOLE
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.errors import KsgenError
from ksgen.families import present_names
from ksgen.files import read, reading, replaced
from ksgen.measure.roofline import share_of_floor
from ksgen.measure.trust import ROUGH_WIDTH, uncertainty, why_disturbed, why_unreliable
from ksgen.pattern import Pattern
from ksgen.values import excerpt

Facts = dict[str, Any]
MOST_BYTES_OF_FILE = 2**28  # two million lines
_BEGIN = b'{"kind":'  # of every line of a log


@dataclass
class LoggedContender:
    """Lines of one contender: its latest facts, with their run and ceilings, and all valid measurements."""

    facts: Facts
    run: Facts
    ceilings: Facts
    measurements: list[Facts] = field(default_factory=list)


@dataclass
class Content:
    """Content of a log. `contenders` is by key, in order of first appearance."""

    contenders: dict[str, LoggedContender] = field(default_factory=dict)
    run: Facts = field(default_factory=dict)  # facts of the latest run
    ceilings: dict[str, Facts] = field(default_factory=dict)  # the latest run's ceilings, by arithmetic
    whole_bytes: int = 0  # the file's size up to its last complete line

    def take(self, line: Facts) -> None:
        """Add a line. Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` if it is not a line of a log."""
        kind, rest = line["kind"], {name: value for name, value in line.items() if name != "kind"}
        if kind == "run":
            self.run, self.ceilings = rest, {}
        elif kind == "ceilings":
            self.ceilings[rest["arithmetic"]] = rest
        elif kind == "contender":
            known = self.contenders.get(rest["key"])
            # Measurements of another source of the same kernel, or of another PyTorch, are outdated.
            kept = known.measurements if known and known.facts["identity"] == rest["identity"] else []
            self.contenders[rest["key"]] = LoggedContender(
                rest, self.run, self.ceilings.get(rest["arithmetic"], {}), kept
            )
        elif kind == "measurement":
            self.contenders[rest["key"]].measurements.append(rest)
        else:
            raise ValueError(f"kind={excerpt(kind)}")


def read_log(path: Path) -> Content:
    """Read a log.

    An incomplete last line, left by a killed process, is skipped. `KsgenError` names a line that cannot be read, and a
    last line that is not the beginning of a log's.
    """
    content = Content()
    with reading(path):
        *whole, last = read(path, MOST_BYTES_OF_FILE).split(b"\n")
    content.whole_bytes = sum(map(len, whole)) + len(whole)
    for number, line in enumerate(whole, start=1):
        try:
            content.take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _foreign(path, number, line) from error
    if not last.startswith(_BEGIN[: len(last)]):
        raise _foreign(path, len(whole) + 1, last)
    return content


def _foreign(path: Path, number: int, line: bytes) -> KsgenError:
    found = excerpt(line.decode(errors="replace"))
    return KsgenError(f"{path}:{number}: not a line of `ksgen bench` ({found}); delete that line, or name another file")


class Log(AbstractContextManager["Log"]):
    """Log file, open in one process only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise KsgenError(f"{path}: cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.content = read_log(path)
            os.ftruncate(self._file, self.content.whole_bytes)
        except OSError as error:
            os.close(self._file)
            is_held, reason = isinstance(error, BlockingIOError), error.strerror
            why = "another `ksgen bench` writes to it; wait for it" if is_held else f"it cannot be continued ({reason})"
            raise KsgenError(f"{path}: {why}, or name another file with -o") from error
        except KsgenError:
            os.close(self._file)
            raise

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def append(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Append a line in one write: even if this process dies, the system writes all of it or nothing."""
        line = {"kind": kind, **facts}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            if (written := os.write(self._file, data)) < len(data):  # the disk became full within the line
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise KsgenError(
                f"{self.path}: cannot be written ({error.strerror}); its existing lines are intact"
            ) from error
        self.content.take(line)


OK = "ok"


@dataclass(frozen=True)
class ResultRow:
    """Result of one contender for one job. None means that nothing was measured."""

    pattern: str
    precision: str  # the comparison's precision: float32 is strict, tf32 allows TF32 on both sides
    layout: str
    batch: int
    implementation: str  # ksgen, or one of the baselines
    variant: str  # ksgen's constants: tuned or default
    arithmetic: str  # precision of the multiplications
    family: str
    constants: str
    why: str  # source of the constants, or description of the baseline
    status: str  # OK, or why it was not measured
    reason: str
    measurements: int
    runs: int  # in one measurement
    median_us: float | None
    fastest_us: float | None
    quartile1_us: float | None
    quartile3_us: float | None
    slowest_us: float | None
    others_share: float | None  # share of processor time that other programs used
    doubt: str  # why the median is unreliable; empty if it is reliable
    error: float | None  # relative, Frobenius, against float64
    tolerance: float | None
    checked: int  # compared rows of the batch
    floor_us: float | None
    share_of_floor: float | None
    ceiling_byte_per_s: float | None
    ceiling_flop_per_s: float | None
    energy_measurements: int
    joule: float | None  # median energy per run, above idle
    idle_watt: float | None
    device: str
    target: str
    runtime: str
    driver: str
    compiler: str
    torch: str
    baselines_on: str
    ksgen: str
    commit: str
    date: str
    identity: str = ""  # name and versions of what multiplies
    layer: str = ""  # name of a layer, whose factors are in `pattern`; empty for a product
    step: str = FORWARD  # what is timed: the product alone, or a training step
    conversion_us: float | None = None  # of the weights, to the contender's format
    uncertainty: float | None = None  # relative width of the median's interval; None if others disturbed the times

    @property
    def job(self) -> str:
        """Job that all contenders compute: a pattern, or a layer."""
        return f"{self.layer}: {self.pattern}" if self.layer else self.pattern

    @property
    def by(self) -> str:
        """Contender, and its family if it has one."""
        return f"{self.implementation}: {self.family}, {self.arithmetic}" if self.family else self.implementation

    @property
    def contender(self) -> str:
        """Contender, and the step unless it is forward."""
        return self.implementation if self.step == FORWARD else f"{self.implementation}, {self.step}"

    @property
    def us(self) -> float:
        """Median time in microseconds of a row that has one."""
        assert self.median_us is not None
        return self.median_us

    @property
    def is_accurate(self) -> bool:
        """Whether the error is within the tolerance; False for NaN."""
        return self.error is not None and self.tolerance is not None and self.error <= self.tolerance

    @property
    def has_time(self) -> bool:
        """Whether comparisons of many jobs use the time: it is reliable, or uncertain by at most `ROUGH_WIDTH`."""
        is_rough = self.uncertainty is not None and self.uncertainty <= ROUGH_WIDTH
        return self.median_us is not None and (is_rough or not self.doubt)

    @property
    def counts(self) -> bool:
        """Whether comparisons use the row: its result is accurate, and its time is good enough."""
        return self.status == OK and self.has_time and self.is_accurate


class RowKinds(NamedTuple):
    """Rows of a file by what they time: products, training steps of products, layers, and whole models."""

    products: list[ResultRow]
    trained: list[ResultRow]
    layers: list[ResultRow]
    models: list[ResultRow]

    @property
    def without_models(self) -> list[ResultRow]:
        return [*self.products, *self.layers, *self.trained]


def kinds_of(rows: Iterable[ResultRow]) -> RowKinds:
    """Split rows by what they time."""
    found = RowKinds([], [], [], [])
    for row in rows:
        if row.layer:
            kind = found.models if row.pattern == WHOLE else found.layers
        else:
            kind = found.products if row.step == FORWARD else found.trained
        kind.append(row)
    return found


COLUMNS = tuple(field.name for field in fields(ResultRow))
_ALWAYS = tuple(field.name for field in fields(ResultRow) if field.default is MISSING)  # older files lack the others
_TYPES = get_type_hints(ResultRow)


def row_of(contender: LoggedContender) -> ResultRow:
    """Row of one contender in a log, with the median and spread of its measurements."""
    facts = {**contender.run, **contender.ceilings, **contender.facts}
    times = sorted(each["us"] for each in contender.measurements if "us" in each)
    joules = [each["joule"] for each in contender.measurements if "joule" in each]
    idle = [each["idle_watt"] for each in contender.measurements if "idle_watt" in each]
    others = [each["others_share"] for each in contender.measurements if each.get("others_share") is not None]
    others_share = median(others) if others else None
    on_processors = facts.get("runtime") in PROCESSOR_RUNTIMES  # a GPU's clock does not depend on the host's load
    quartiles = quantiles(times, n=4, method="inclusive") if len(times) > 1 else 3 * times or [None] * 3
    middle = median(times) if times else None
    derived: Facts = {
        "measurements": len(times),
        "runs": max((each["runs"] for each in contender.measurements if "us" in each), default=0),
        "median_us": middle,
        "fastest_us": times[0] if times else None,
        "quartile1_us": quartiles[0],
        "quartile3_us": quartiles[2],
        "slowest_us": times[-1] if times else None,
        "others_share": others_share,
        "doubt": why_unreliable(times, others if on_processors else ()),
        "share_of_floor": share_of_floor(facts.get("floor_us"), middle),
        "energy_measurements": len(joules),
        "joule": median(joules) if joules else None,
        "idle_watt": median(idle) if idle else None,
        "uncertainty": uncertainty(times) if times and not (on_processors and why_disturbed(others)) else None,
    }
    return ResultRow(**{name: derived[name] if name in derived else facts.get(name, absent(name)) for name in COLUMNS})


def read_rows(path: Path) -> list[ResultRow]:
    """Read the rows of a log, a CSV or a Parquet file.

    `KsgenError` if the file has no rows, or another format.
    """
    readers: dict[str, Callable[[Path], list[ResultRow]]] = {
        ".jsonl": _read_log,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise KsgenError(f"{path}: not a results file; accepted: {', '.join(readers)}")
    rows = readers[path.suffix](path)
    if wrong := [row for row in rows if row.median_us is not None and not 0 < row.median_us < inf]:
        of = f"{wrong[0].implementation}, {wrong[0].job}"
        raise KsgenError(f"{path}: median_us={wrong[0].median_us} of {of}; accepted: microseconds above 0")
    if other := next((row.step for row in rows if row.step not in STEPS_OF_LAYERS), ""):
        raise KsgenError(f"{path}: step={excerpt(other)}; accepted: {', '.join(STEPS_OF_LAYERS)}")
    if not rows:
        raise KsgenError(
            f"{path}: holds no results yet; `ksgen bench paper` or `layers` with -o {path.with_suffix('.jsonl')} adds "
            "some"
        )
    return [_by_present_names(replace(row, share_of_floor=share_of_floor(row.floor_us, row.median_us))) for row in rows]


def _by_present_names(row: ResultRow) -> ResultRow:
    """Replace the names of earlier versions in a row: of families, and of layers and patterns of groups."""
    layer, pattern = row.layer.replace("beside each other", "side by side"), row.pattern.replace(" beside ", AND)
    return replace(row, family=present_names(row.family), layer=layer, pattern=pattern)


def write_csv(rows: Iterable[ResultRow], path: Path) -> None:
    with replaced(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _shown(getattr(row, name)) for name in COLUMNS} for row in rows)


def write_parquet(rows: Sequence[ResultRow], path: Path) -> bool:
    """Write a Parquet file.

    Returns whether it was written: pyarrow is optional.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return False
    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds[_kind(name)]) for name in COLUMNS])
    with replaced(path) as aside:
        parquet.write_table(
            pyarrow.table({name: [getattr(row, name) for row in rows] for name in COLUMNS}, schema=schema), aside
        )
    return True


def _read_log(path: Path) -> list[ResultRow]:
    try:
        return [row_of(contender) for contender in read_log(path).contenders.values()]
    except (TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise KsgenError(f"{path}: a line is incomplete or malformed ({excerpt(str(error))}); delete it") from error


def _read_csv(path: Path) -> list[ResultRow]:
    with reading(path):
        text = read(path, MOST_BYTES_OF_FILE).decode("utf-8-sig")  # spreadsheets add a mark
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        names = reader.fieldnames or ()
        if missing := [name for name in _ALWAYS if name not in names]:
            raise KsgenError(
                f"{path}: the column {missing[0]} is missing; a table of `ksgen bench paper` has {', '.join(COLUMNS)}"
            )
        return [_row_of_text(row, f"{path}:{reader.line_num}") for row in reader]
    except csv.Error as error:
        raise KsgenError(f"{path}: cannot be read ({error})") from error


def _read_parquet(path: Path) -> list[ResultRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise KsgenError(
            f"{path}: reading Parquet needs pyarrow: pip install pyarrow; or take the CSV next to it"
        ) from error
    try:
        table = parquet.read_table(path).to_pylist()
        return [ResultRow(**{name: row[name] for name in COLUMNS if name in _ALWAYS or name in row}) for row in table]
    except (OSError, ArrowException) as error:
        raise KsgenError(f"{path}: cannot be read ({excerpt(str(error))})") from error
    except KeyError as error:
        raise KsgenError(f"{path}: the column {error.args[0]} is missing; it has {', '.join(COLUMNS)}") from error


def _row_of_text(texts: Mapping[str, str | None], where: str) -> ResultRow:
    values: dict[str, Any] = {}
    for name in COLUMNS:
        text = texts.get(name) or ""
        try:
            values[name] = text or absent(name) if _kind(name) is str else (None if text == "" else _kind(name)(text))
        except ValueError:
            raise KsgenError(f"{where}: {name}={excerpt(text)}; accepted: a number") from None
        if values[name] is None and _TYPES[name] is int:
            raise KsgenError(f"{where}: {name} is empty; accepted: a number")
    try:
        if not values["layer"]:
            Pattern.parse(values["pattern"])
    except KsgenError as error:
        raise KsgenError(f"{where}: {error}") from error
    return ResultRow(**values)


def _kind(name: str) -> type:
    """Type of a column: str, int, or float for fields that may be None."""
    return _TYPES[name] if _TYPES[name] in (str, int) else float


def absent(name: str) -> Any:
    """Value of a column that was not measured, or that older files lack."""
    return {"step": FORWARD}.get(name, {str: "", int: 0, float: None}[_kind(name)])


def _shown(value: Any) -> Any:
    return "" if value is None else repr(value) if isinstance(value, float) else value
