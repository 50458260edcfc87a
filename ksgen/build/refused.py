"""What is told of a source that a compiler refused, and where it is kept for the user to look at. Runs no compiler."""

import hashlib
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ksgen import paths
from ksgen.errors import KsgenError, ToolchainError
from ksgen.files import write


def refusal(told: str, name: str, text: str, log: str, command: Callable[[str], Iterable[str]] | None = None) -> ToolchainError:
    """The error for a source that does not build: `told` and the first complaint, the kept source, the command to repeat.

    `name` is the source's file name; `command` makes the command from the place where it was kept.
    """
    message = f"{told}: {first_error(log)}"
    if kept := _keep(text, name, log):
        message += f"\n  source: {kept}"
        message += f"\n  repeat: {shlex.join(command(str(kept)))}" if command else ""
    return ToolchainError(message)


def first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)]
    warnings = [line for line in lines if re.search(r"\bwarning\b", line)]
    return next(iter(errors or warnings or lines), "no output")


def _keep(text: str, name: str, log: str) -> Path | None:
    """In the cache's folder, else in the one for temporary files. The same source always goes to the same file."""
    file = Path(f"{Path(name).stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}{Path(name).suffix}")
    for folder in (paths.cache_dir() / "failed", None):
        with suppress(OSError, KsgenError):
            folder = folder or Path(tempfile.gettempdir())
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            write(folder / file.with_suffix(".log"), log)
            write(kept := folder / file, text)
            return kept
    return None
