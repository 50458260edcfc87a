"""Reads and writes users' files as a whole. Never reads without a limit, and never leaves a file half written.

Never interprets their content.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from ksgen.errors import KsgenError
from ksgen.ownership import check_owner, keep_from_others, make_folder
from ksgen.values import shown

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of network file systems and others


def read(path: Path, most_bytes: int, is_own: bool = False) -> bytes:
    """Read a file. `OSError` if it cannot be read, or if it has more than `most_bytes`: /dev/zero has no end.

    `is_own` marks a file that ksgen manages. It must be a regular file, because reading a pipe may never end. No other
    user may be able to write to it.
    """
    with open(path, "rb", opener=_open_own if is_own else None) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
    return content


@contextmanager
def reading(path: Path, accepted: str = "") -> Iterator[None]:
    """Raise `KsgenError` that names the file, and what is accepted, if the block cannot read it as text."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise KsgenError(f"{path}: cannot be read ({why}){accepted and f'; accepted: {accepted}'}") from error


def _open_own(path: str, flags: int) -> int:
    opened = os.open(path, flags | os.O_NONBLOCK)  # O_NONBLOCK: does not wait for a pipe's writer
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        check_owner(Path(path), status)
    except BaseException:
        os.close(opened)
        raise
    return opened


def write(path: Path, content: str | bytes, is_own: bool = False) -> None:
    """Replace a file's content: a reader finds the complete old file or the complete new one.

    `is_own` marks a file that ksgen manages, as for `replaced`.
    """
    with replaced(path, is_own) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced(path: Path, is_own: bool = False) -> Iterator[Path]:
    """Temporary path for new content that replaces the file once it is complete; a failure is a `KsgenError` and keeps
    the old file.

    A link of this user or of root keeps leading to its file. A pipe or a device is written to, and never replaced. The
    mode of the old file stays. `is_own` marks a file that ksgen manages: other users lose the right to write to it.
    """
    aside = None
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not path.is_file():
            yield path
            return
        place = _followed(path)
        aside = place.with_name(f".ksgen-{token_hex(8)}")
        yield aside
        if place.exists():
            shutil.copymode(place, aside)
        if is_own:
            keep_from_others(aside)
        os.replace(aside, place)
    except OSError as error:
        raise KsgenError(f"{shown(path)}: cannot be written ({error.strerror or error})") from error
    finally:
        if aside:
            with suppress(OSError):
                aside.unlink()


def _followed(path: Path) -> Path:
    """Follow a chain of links. Links of other users are refused: in an open folder they can lead to any file of this
    user."""
    for _ in range(40):  # the limit of Linux
        if not path.is_symlink():
            return path
        check_owner(path, os.lstat(path))
        path = path.parent / os.readlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def check_writable(path: Path, *inputs: Path | None) -> None:
    """Raise `KsgenError` if no file can be written there, or if it is one of the command's input files.

    Call it before the work whose result goes into the file.
    """
    check_is_no_input(path, *inputs)
    is_stream = path.exists() and not path.is_file() and not path.is_dir()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if is_stream else path.parent, os.W_OK):
        raise KsgenError(
            f"{shown(path)}: no file can be written there; choose an existing folder that you can write to"
        )


def check_is_no_input(path: Path, *inputs: Path | None) -> None:
    """Raise `KsgenError` if a file to write is one of the command's input files."""
    if any(each and os.path.isfile(path) and os.path.isfile(each) and path.samefile(each) for each in inputs):
        raise KsgenError(f"{shown(path)}: it is an input of this command; choose another file to write")


@contextmanager
def locked(path: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[bool]:
    """Create and lock a file until the block or the process ends. Yields False if its file system has no locks.

    `on_wait` is called before waiting for another process that has locked it.
    """
    with open(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "rb") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            is_locked = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_locked = False
        try:
            yield is_locked
        finally:
            if is_locked:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may still have the file open


@contextmanager
def replaced_in_turn(path: Path) -> Iterator[Path]:
    """Like `replaced`, for a file that ksgen manages and that processes change in turn: a lock file orders them."""
    make_folder(path.parent)
    with locked(path.parent / f".{path.name}.lock"), replaced(path, is_own=True) as aside:
        yield aside
