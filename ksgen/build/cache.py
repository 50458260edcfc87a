"""A content-addressed store of binaries on disk, shared by unrelated processes. Knows no CUDA.

    <folder>/<request digest>/<key>/binary, meta.json      one entry
    <folder>/.tmp-<random>/                                 an entry being written or removed
    <folder>/failed/                                        sources that a compiler rejected, and logs, for the user

The request digest covers the source, the kernel function's name and the target. So a machine without a compiler finds
any compiler's binary. The key also covers the compiler, its version and its options. An entry appears and disappears by
one rename, so a reader sees a complete entry or none. If a crash of the machine truncates a file, its hash does not
match when it is next read. Only content decides whether an entry is valid; times only decide the order of evictions.
Files that another user could have written are not read.

`gc` and `clear` remove only files that certainly belong to the cache. They remove a temporary folder, or a folder named
by digests, only if it holds nothing but an entry's two files. They also remove a source in `failed`, with its log, if
its content still has the digest in its name.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ksgen.build.request import (
    Binary,
    Compiler,
    DamagedError,
    Request,
    check_record,
    describe,
    digest_of,
    key_of,
    newness,
    restore,
)
from ksgen.errors import KsgenError, warn
from ksgen.files import read
from ksgen.ownership import UntrustedError, check_folder, keep_from_others, make_folder, trusts_all
from ksgen.values import excerpt

MAX_BYTES = 2 << 30
MOST_BYTES_OF_META, MOST_BYTES_OF_BINARY, MOST_BYTES_OF_SOURCE = 2**20, 2**28, 2**28  # kernels have kilobytes
STALE_SECONDS = 3600  # age from which on a temporary folder belongs to a process that died
FAILED_SECONDS = 24 * 3600  # age from which on `gc` removes rejected sources

_log = logging.getLogger(__name__)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")
_FILES = {"binary", "meta.json"}
_REFUSED = re.compile(r".+-([0-9a-f]{8})\.(cu|cl|cpp)", re.DOTALL)  # ksgen.build.children names sources like this


@dataclass(frozen=True)
class CacheEntry:
    key: str
    entry: str  # name of the kernel function
    target: str
    compiler: str  # name and version
    bytes: int
    last_used: float  # seconds since the epoch
    path: Path

    @classmethod
    def of(cls, key: str, record: dict[str, Any], size: int, used: float, path: Path) -> "CacheEntry":
        compiler = f"{record['provenance']['compiler']} {record['provenance']['compiler_version']}"
        return cls(key, record["entry"], record["target"], compiler, size, used, path)


@dataclass(frozen=True)
class BadEntry:
    path: Path
    reason: str


class Cache:
    """One folder of entries. Reading raises no errors. `put` raises OSError if the entry cannot be written."""

    def __init__(self, folder: str | Path, max_bytes: int | None = None) -> None:
        self.path = Path(folder)
        self.max_bytes = max_bytes_from_environment() if max_bytes is None else max_bytes
        self._has_warned = False
        self._bytes: int | None = None  # size that this process knows: counted at its first put, then updated

    def get(self, request: Request, compiler: Compiler | None = None) -> Binary | None:
        """Return the binary of a request by exactly this compiler, or by the newest compiler if none is given.

        None if there is no such binary.
        """
        folder = self.path / request.digest
        if not self._may_read(folder):
            return None
        if compiler is not None:
            return self._load(folder / request.key(compiler))
        found = [binary for path in _entries_in(folder) if (binary := self._load(path))]
        return max(found, key=lambda binary: newness(binary.provenance), default=None)

    def put(self, request: Request, binary: Binary) -> None:
        record = describe(request, binary) | {"created": datetime.now(UTC).isoformat(timespec="seconds")}
        meta = _seal(record)
        make_folder(self.path)
        aside = self._temporary()
        try:
            aside.mkdir()
            (aside / "binary").write_bytes(binary.data)
            (aside / "meta.json").write_bytes(meta)
            for each in (aside / "binary", aside / "meta.json", aside):
                keep_from_others(each)
            _move_into_place(aside, self.path / request.digest / key_of(request.digest, binary.provenance))
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._grow(len(binary.data) + len(meta))

    def entries(self) -> Iterator[CacheEntry]:
        """Yield entries whose `meta.json` can be read, ordered by request digest and key. Binaries are not read."""
        for path in self._paths():
            with contextlib.suppress(OSError, DamagedError):
                record = _unseal(read(path / "meta.json", MOST_BYTES_OF_META, is_own=True))
                used, size = _usage(path)
                yield CacheEntry.of(path.name, record, size, used, path)

    def verify(self) -> list[BadEntry]:
        """Read and hash all entries, and return the bad ones. It removes none: the next use of a bad one does that."""
        bad = []
        for path in self._paths():
            try:
                _read(path)
            except (DamagedError, OSError) as error:
                if os.path.lexists(path):  # else it was evicted meanwhile
                    bad.append(BadEntry(path, str(error)))
        return bad

    def gc(self, max_bytes: int | None = None) -> int:
        """Remove leftovers of dead processes, evict the least recently used entries, and return the bytes freed."""
        freed = self._sweep()
        limit = self.max_bytes if max_bytes is None else max_bytes
        by_age = sorted((*_usage(path), path) for path in self._paths() if _is_own(path))
        total = sum(size for _, size, _ in by_age)
        for _, size, path in by_age:
            if total <= limit:
                break
            self._remove(path)
            total -= size
            freed += size
        self._bytes = total
        return freed

    def clear(self) -> int:
        """Remove every entry and every rejected source, and return the bytes freed."""
        freed = self.gc(max_bytes=-1)
        return freed + _remove_refused(self.path / "failed", older_than=0)

    def _may_read(self, folder: Path) -> bool:
        """Whether a request's folder exists, and no other user can have written to it or to the cache's folder."""
        try:
            check_folder(self.path)
            check_folder(folder)
        except UntrustedError as error:
            self._distrust(error)
            return False
        except OSError:
            return False
        return True

    def _distrust(self, error: UntrustedError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"ksgen does not use the cache {self.path}: {error}")

    def _load(self, path: Path) -> Binary | None:
        try:
            binary = _read(path)
        except UntrustedError as error:
            self._distrust(error)
            return None
        except (DamagedError, OSError) as error:
            self._refuse(path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path / "meta.json")  # the least recently used entry is the first to be evicted
        return binary

    def _refuse(self, path: Path, error: Exception) -> None:
        # An entry is removed by one rename. So if it lacks files, it is damaged, and not just being removed.
        if isinstance(error, DamagedError) or getattr(error, "errno", 0) == errno.EFBIG or _lacks_files(path):
            _log.warning("cache entry %s is ignored, and is built again: %s", path, error)
            self._remove(path)

    def _paths(self) -> Iterator[Path]:
        for folder in _entries_in(self.path):
            yield from _entries_in(folder)

    def _temporary(self) -> Path:
        return self.path / f".tmp-{secrets.token_hex(8)}"

    def _remove(self, path: Path) -> None:
        aside = self._temporary()
        with contextlib.suppress(OSError):  # another process was faster, or the folder is read-only
            path.rename(aside)
            _discard(aside)
            path.parent.rmdir()  # fails if another compiler's entry is there, which is intended

    def _sweep(self) -> int:
        freed = _remove_refused(self.path / "failed", older_than=FAILED_SECONDS)
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                if (
                    _TEMPORARY.fullmatch(path.name)
                    and time.time() - path.lstat().st_mtime > STALE_SECONDS
                    and _is_own(path)
                ):
                    freed += _usage(path)[1]
                    _discard(path)
        return freed

    def _grow(self, size: int) -> None:
        """Add `size` to the known size, and evict entries if the sum exceeds the limit.

        Entries are evicted until they take at most 90 % of the limit, so that the next put does not evict again.
        """
        total = sum(_usage(path)[1] for path in self._paths()) if self._bytes is None else self._bytes + size
        self._bytes = total
        if total > self.max_bytes:
            self.gc(self.max_bytes * 9 // 10)


def max_bytes_from_environment() -> int:
    text = os.environ.get("KSGEN_CACHE_MAX_BYTES", "") or str(MAX_BYTES)
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise KsgenError(f"KSGEN_CACHE_MAX_BYTES={excerpt(text)} must be a whole number of bytes, such as {MAX_BYTES}")
    return int(text)


def _entries_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if _DIGEST.fullmatch(name))
    except OSError:
        return []


def _read(path: Path) -> Binary:
    """Read one entry and verify its hashes and its path."""
    check_folder(path)
    record = _unseal(read(path / "meta.json", MOST_BYTES_OF_META, is_own=True))
    binary = restore(record, read(path / "binary", MOST_BYTES_OF_BINARY, is_own=True))
    if (record["request"], key_of(record["request"], binary.provenance)) != (path.parent.name, path.name):
        raise DamagedError("it is stored under another entry's key")
    return binary


def _lacks_files(path: Path) -> bool:
    """Whether the path exists but is not a folder with both files of an entry as plain files."""
    try:
        with os.scandir(path) as found:
            return not _FILES.issubset(each.name for each in found if each.is_file(follow_symlinks=False))
    except NotADirectoryError:
        return os.path.lexists(path)
    except OSError:
        return False  # the whole entry was removed, so it is not damaged


def _seal(record: dict[str, Any]) -> bytes:
    return _canonical(record | {"seal": digest_of(_canonical(record))})


def _unseal(meta: bytes) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(meta)
        seal, found = record.pop("seal"), digest_of(_canonical(record))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedError("meta.json is not the one that was stored") from None
    if seal != found:
        raise DamagedError("meta.json was changed after it was stored")
    check_record(record)
    return record


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, indent=1).encode()


def _discard(path: Path) -> None:
    """Remove a folder, or any other file at its path."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _move_into_place(aside: Path, path: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o777 if trusts_all() else 0o755)
        try:
            aside.rename(path)
            return
        except FileNotFoundError:
            if not aside.exists():
                raise
            # An eviction removed the request's folder between `mkdir` and `rename`.
        except NotADirectoryError:
            # only a damaged disk has files at these paths, because only the cache uses such names
            for place in (path.parent, path):
                if os.path.lexists(place) and not place.is_dir():
                    place.unlink()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(aside, ignore_errors=True)  # another process has stored the same entry meanwhile
            return
    raise FileNotFoundError(f"{path.parent} was removed each time it was created; try again")


def _usage(path: Path) -> tuple[float, int]:
    """Time of the last use of a folder's files, and their total bytes; zeros if the folder is removed meanwhile."""
    with contextlib.suppress(OSError), os.scandir(path) as files:
        found = [file.stat() for file in files]
        return max((file.st_mtime for file in found), default=0.0), sum(file.st_size for file in found)
    return 0.0, 0


def _is_own(path: Path) -> bool:
    """Whether a folder holds nothing but files of an entry. Callers have checked its name."""
    try:
        return not path.is_symlink() and {*os.listdir(path)} <= _FILES
    except OSError:
        return False


def _remove_refused(folder: Path, older_than: float) -> int:
    """Remove unchanged rejected sources that are at least `older_than` seconds old, with their logs.

    Returns the bytes freed.
    """
    freed = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            source = folder / name
            if (named := _REFUSED.fullmatch(name)) and time.time() - source.lstat().st_mtime >= older_than:
                with contextlib.suppress(OSError):
                    if hashlib.sha256(read(source, MOST_BYTES_OF_SOURCE, is_own=True)).hexdigest()[:8] != named[1]:
                        continue
                    for file in (source.with_suffix(".log"), source):
                        with contextlib.suppress(FileNotFoundError):
                            size = file.lstat().st_size
                            file.unlink()
                            freed += size
    return freed
