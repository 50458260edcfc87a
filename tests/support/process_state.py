"""States of other processes on Linux."""

from pathlib import Path


def state_of(process: int | str) -> str:
    """State of a process, such as R, S or T; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_ended(process: int | str) -> bool:
    """Return whether the process has ended. It may stay listed as a zombie if its parent does not wait."""
    return state_of(process) in ("", "Z", "X")
