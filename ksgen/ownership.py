"""Checks whether another user can have written a file or folder, and creates private folders for temporary files.

Caches hold machine code. So ksgen refuses files and folders of users other than root and the current user, and those
that others can write to. `KSGEN_TRUST=all` accepts them. Never reads a file's content.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from ksgen.errors import KsgenError
from ksgen.paths import temporary_root
from ksgen.values import excerpt, shown

GRACE_SECONDS = 60  # age from which a temporary folder or lock file that no process has locked is removed

_LEFT = re.compile(r"ksgen-\w+-\w{8}|[0-9a-f]{64}", re.ASCII)  # temporary folders; locks of builds, named by digests


class UntrustedError(PermissionError):
    """A file or folder that another user can have written. Its text is one line with the remedy."""

    def __init__(self, path: Path, why: str, remedy: str) -> None:
        super().__init__(errno.EPERM, f"{why}; {remedy}, or accept it with KSGEN_TRUST=all", str(path))

    def __str__(self) -> str:
        return f"{shown(self.filename)}: {self.strerror}"


def trusts_all() -> bool:
    if (setting := os.environ.get("KSGEN_TRUST", "")) not in ("", "all"):
        raise KsgenError(f"KSGEN_TRUST={excerpt(setting)}; accepted: all, or unset")
    return bool(setting)


def check_owner(path: Path, status: os.stat_result) -> None:
    """Raise `UntrustedError` if another user can have written the file or folder, judged by its status."""
    if status.st_uid not in (0, os.geteuid()):
        who = "user 65534 (any user outside this container)" if status.st_uid == 65534 else f"user {status.st_uid}"
        _refuse(path, f"it belongs to {who}", "make it yours (chown)")
    if stat.S_ISLNK(status.st_mode):  # the mode of a link has no meaning
        return
    if status.st_mode & stat.S_IWOTH:
        _refuse(path, "every user can write to it", "take that right away (chmod o-w)")
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid, os.geteuid()):
        _refuse(path, f"group {status.st_gid} can write to it", "take that right away (chmod g-w)")


def _refuse(path: Path, why: str, remedy: str) -> None:
    if not trusts_all():
        raise UntrustedError(path, why, remedy)


def check_folder(path: Path) -> None:
    """Raise `UntrustedError` if another user can have written to the folder, or made the link that leads to it."""
    status = os.lstat(path)
    check_owner(path, status)
    if stat.S_ISLNK(status.st_mode):
        check_owner(path, os.stat(path))


def distrust(folder: Path) -> str:
    """Reason why ksgen reads nothing from a folder, in one line; empty if it does, or if the folder cannot be found."""
    try:
        check_folder(folder)
    except UntrustedError as error:
        return str(error)
    except OSError:
        pass
    return ""


@cache
def _is_own_group(group: int, user: int) -> bool:
    """Whether a group is root's, or a private group with the user's name and no other members."""
    import grp
    import pwd

    if group == 0:
        return True
    with suppress(KeyError):
        account, entry = pwd.getpwuid(user), grp.getgrgid(group)
        is_namesake = entry.gr_name == account.pw_name and account.pw_gid == group
        return is_namesake and {*entry.gr_mem} <= {account.pw_name}
    return False


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, which only this user may access; check an existing folder."""
    if not folder.exists():
        if not folder.parent.exists():
            make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    check_folder(folder)


def keep_from_others(path: Path) -> None:
    """Allow only this user to write to a file, whatever the umask.

    With `KSGEN_TRUST=all` the umask decides, because others may share the cache.
    """
    if not trusts_all():
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def own_temporary(root: str | None = None) -> Path:
    """Folder of this user for lock files and temporary folders, from which `sweep` removes those of dead processes.

    `PermissionError` if it is not this user's, or if others can write to it, even with `KSGEN_TRUST=all`. Callers can
    use a new folder instead.
    """
    folder = Path(root or temporary_root(), f"ksgen-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it is not this user's own folder", str(folder))
    return folder


@contextmanager
def temporary_folder(what: str) -> Iterator[str]:
    """A folder for temporary files, removed at the end. Folders that killed processes left are removed first.

    The folder is locked while its process lives. So a folder that can be locked is left over.
    """
    parent: Path | None = None
    with suppress(OSError):
        sweep(parent := own_temporary())
    # no `TemporaryDirectory`: a forked child that exits would remove those of its parent
    folder = tempfile.mkdtemp(prefix=f"ksgen-{what}-", dir=parent)
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # a file system without locks, on which `sweep` removes nothing either
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(opened)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove temporary folders and lock files of processes that are gone."""
    for name in os.listdir(parent):
        if _LEFT.fullmatch(name):
            with suppress(OSError):
                _remove_if_left(parent / name)


def _remove_if_left(path: Path) -> None:
    status = os.lstat(path)
    if status.st_uid != os.geteuid() or time.time() - status.st_mtime < GRACE_SECONDS:
        return
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened), os.lstat(path)):
            shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink()
    finally:
        os.close(opened)
