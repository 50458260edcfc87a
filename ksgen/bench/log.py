"""Log of measurements: one JSON object per line, appended at once, so that killing the process loses at most one.

There are four kinds of lines. "run" holds the facts of a process, and "ceilings" the device's measured limits.
"contender" describes one method to compute one job, with its error. "measurement" is the result of one measurement of
that contender. Does not interpret the lines.
"""

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ksgen.errors import KsgenError
from ksgen.files import read, reading
from ksgen.values import excerpt

Facts = dict[str, Any]
MOST_BYTES_OF_FILE = 2**28  # two million lines


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

    An incomplete last line, left by a killed process, is skipped. `KsgenError` names a line that cannot be read.
    """
    content = Content()
    with reading(path):
        data = read(path, MOST_BYTES_OF_FILE)
    content.whole_bytes = data.rfind(b"\n") + 1
    for number, line in enumerate(data[: content.whole_bytes].split(b"\n")[:-1], start=1):
        try:
            content.take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = excerpt(line.decode(errors="replace"))
            raise KsgenError(f"{path}:{number}: not a line of `ksgen bench` ({found}); delete that line") from error
    return content


class Log:
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
            raise KsgenError(
                f"{path}: another `ksgen bench` writes to it; wait for it, or name another file with -o"
            ) from error
        except KsgenError:
            os.close(self._file)
            raise

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
