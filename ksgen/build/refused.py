"""Reports a source that a compiler refused, and keeps the source for the user. Runs no compiler."""

import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ksgen import paths
from ksgen.build.children import KILLED
from ksgen.errors import KsgenError, ToolchainError
from ksgen.files import write
from ksgen.ownership import make_folder


class RefusedSourceError(ToolchainError):
    """A compiler ran to its end and refused a source."""


def refusal(
    summary: str, name: str, text: str, log: str, command: Callable[[str], Iterable[str]] | None = None
) -> ToolchainError:
    """Error for a source that does not build: summary, first complaint, kept source, and the command to repeat.

    `name` is the source's file name; `command` creates that command from the path of the kept source.
    """
    message = f"{summary}: {first_error(log)}"
    if kept := _keep(text, name, log):
        message += f"\n  source: {kept}"
        message += f"\n  repeat: {shlex.join(command(str(kept)))}" if command else ""
    is_killed = first_error(log).startswith(KILLED)
    return ToolchainError(message) if is_killed else RefusedSourceError(message)


def first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)]
    warnings = [line for line in lines if re.search(r"\bwarning\b", line)]
    return next(iter(errors or warnings or lines), "no output")


def _keep(text: str, name: str, log: str) -> Path | None:
    """Keep the source in the cache's folder, named by its content, else in a new temporary folder."""
    file = Path(f"{Path(name).stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}{Path(name).suffix}")
    for folder in (paths.cache_dir() / "failed", None):
        with suppress(OSError, KsgenError):
            folder = folder or Path(tempfile.mkdtemp(prefix="ksgen-failed-"))
            make_folder(folder)
            kept, kept_log = folder / file, folder / file.with_suffix(".log")
            # anything else may be a pipe, and writing to a pipe may block for ever
            if all(each.is_file() or not os.path.lexists(each) for each in (kept, kept_log)):
                write(kept, text)
                write(kept_log, log)
                return kept
    return None
