"""A bundle: many binaries, their sources and the wisdom that chose them, in one file to carry to another machine.

It is a zip archive, so that people can look inside. It holds `index.json` with the record of each binary, `binaries/`
and `sources/` with files named by the hash of their content, and `wisdom/`. The archive's comment holds the format and
the hash of the index. The index holds the hashes of all other members, which are checked when a member is read. The
same input gives the same bytes, because a bundle stores no times. `Bundle.get` works like `Cache.get`, but also returns
binaries of other compilers.
"""

import hashlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from ksgen.build.cache import CacheEntry
from ksgen.build.request import (
    Binary,
    Compiler,
    DamagedError,
    Request,
    check_record,
    describe,
    key_of,
    newness,
    restore,
)
from ksgen.errors import KsgenError
from ksgen.files import replaced
from ksgen.ownership import UntrustedError, check_owner
from ksgen.values import excerpt, shown

BUNDLE_FORMAT = 1
MOST_BYTES_OF_MEMBER = 2**28  # unpacked, because a few hundred packed bytes can unpack to terabytes

_COMMENT = re.compile(rb"ksgen bundle (\d{1,9}) ([!-~]+)")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time that a zip archive can store
# zipfile raises these for an archive whose bytes were changed.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, OSError, KeyError, ValueError, EOFError, NotImplementedError, RuntimeError,
)  # fmt: skip


def write_bundle(
    path: str | Path,
    entries: Iterable[tuple[Request, Binary]],
    wisdom: Mapping[str, bytes] | None = None,
    provenance: Mapping[str, str] | None = None,
) -> None:
    """Write entries and wisdom files (name: content) to a bundle, which appears complete or not at all."""
    records: dict[str, dict[str, Any]] = {}
    members: dict[str, bytes] = {}
    for request, binary in entries:
        record = describe(request, binary)
        records[key_of(request.digest, binary.provenance)] = record
        members[f"binaries/{record['binary_sha256']}"] = binary.data
        members[f"sources/{record['source_sha256']}"] = request.text.encode()
    members |= {f"wisdom/{name}": data for name, data in (wisdom or {}).items()}
    index = {
        "entries": {key: records[key] for key in sorted(records)},
        "provenance": dict(provenance or {}),
        "wisdom": {name: hashlib.sha256(data).hexdigest() for name, data in (wisdom or {}).items()},
    }
    with replaced(Path(path)) as aside:
        _write_zip(aside, json.dumps(index, sort_keys=True).encode(), members)


class Bundle:
    """A bundle that is open for reading, as a cache layer. Its index is in memory; other members are read on demand."""

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = Path(path).absolute()  # opened again after a fork, perhaps from another working folder
        except TypeError:
            raise KsgenError(f"bundle={excerpt(path)}; accepted: the path of a file that ksgen bundle wrote") from None
        self._archive = self._open()
        self._process = os.getpid()
        index = self._index()
        self.provenance: Mapping[str, str] = index["provenance"]
        self._wisdom: Mapping[str, str] = index["wisdom"]
        self._records: Mapping[str, dict[str, Any]] = index["entries"]
        self._keys: dict[str, list[str]] = {}
        for key, record in self._records.items():
            self._keys.setdefault(record["request"], []).append(key)

    def get(self, request: Request, compiler: Compiler | None = None) -> Binary | None:
        """Return the binary of a request by this compiler, else by the newest compiler; None if there is none."""
        if not (keys := self._keys.get(request.digest)):
            return None
        exact = request.key(compiler) if compiler else ""
        record = self._records[max(keys, key=lambda key: (key == exact, newness(self._records[key]["provenance"])))]
        name = f"binaries/{record['binary_sha256']}"
        try:
            return restore(record, self._read(name))
        except DamagedError as error:
            raise self._damaged(f"{name}: {error}") from None

    def entries(self) -> list[CacheEntry]:
        records = self._records.items()
        return [CacheEntry.of(key, record, record["binary_bytes"], 0.0, self.path) for key, record in records]

    def source(self, key: str) -> str:
        """Source of the entry with this key."""
        digest = self._records[key]["source_sha256"]
        return self._read(f"sources/{digest}", digest).decode(errors="replace")

    def wisdom(self) -> dict[str, bytes]:
        return {name: self._read(f"wisdom/{name}", digest) for name, digest in self._wisdom.items()}

    def _open(self) -> zipfile.ZipFile:
        try:
            if not self.path.is_file() and self.path.exists():  # zipfile would look for the end of /dev/zero
                raise OSError("it is not a regular file")
            archive = zipfile.ZipFile(self.path)
            if archive.fp:
                check_owner(self.path, os.fstat(archive.fp.fileno()))
            return archive
        except UntrustedError as error:
            raise KsgenError(str(error)) from None
        except FileNotFoundError:
            raise KsgenError(f"{shown(self.path)}: there is no such bundle; `ksgen bundle` writes one") from None
        except _ZIP_ERRORS as error:
            raise KsgenError(
                f"{shown(self.path)} is not a ksgen bundle, or is truncated ({shorten(str(error), 400)})"
            ) from None

    def _index(self) -> dict[str, Any]:
        if not (found := _COMMENT.match(self._archive.comment)):
            raise KsgenError(f"{shown(self.path)} is a zip archive, but not a ksgen bundle; `ksgen bundle` writes one")
        if int(found[1]) != BUNDLE_FORMAT:
            written = f"has bundle format {int(found[1])}, and this version of ksgen reads {BUNDLE_FORMAT}"
            raise KsgenError(f"{shown(self.path)} {written}; write it again, or use the version that wrote it")
        data = self._read("index.json", found[2].decode())
        try:
            return _checked(json.loads(data))
        except (ValueError, RecursionError, DamagedError) as error:
            raise self._damaged(f"index.json: {shorten(str(error), 400)}") from None

    def _read(self, name: str, digest: str | None = None) -> bytes:
        if self._process != os.getpid():  # a forked process shares the file's position with its parent
            self._archive, self._process = self._open(), os.getpid()
        try:
            if (size := self._archive.getinfo(name).file_size) > MOST_BYTES_OF_MEMBER:
                raise self._damaged(f"{name} has {size} bytes, more than {MOST_BYTES_OF_MEMBER}")
            data = self._archive.read(name)
        except _ZIP_ERRORS as error:
            raise self._damaged(f"{name}: {shorten(str(error), 400)}") from None  # the error may quote the file's bytes
        if digest and hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(f"{name} does not match its digest")
        return data

    def _damaged(self, what: str) -> KsgenError:
        return KsgenError(
            f"{shown(self.path)} is damaged ({what}); copy it again, or write it again with `ksgen bundle`"
        )


def _checked(index: Any) -> dict[str, Any]:
    """Return the index if `write_bundle` can have written it. Its hash alone shows only that it is complete."""
    parts = index if isinstance(index, dict) else {}
    for name in ("entries", "provenance", "wisdom"):
        if not isinstance(parts.get(name), dict):
            raise DamagedError(f"{name} is {excerpt(parts.get(name))}, not a mapping")
    for name in ("provenance", "wisdom"):
        if not all(isinstance(each, str) for each in parts[name].values()):
            raise DamagedError(f"{name} is {excerpt(parts[name])}, not a mapping to strings")
    for record in parts["entries"].values():
        check_record(record)
    return parts


def _write_zip(path: Path, index: bytes, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.comment = f"ksgen bundle {BUNDLE_FORMAT} {hashlib.sha256(index).hexdigest()}".encode()
        for name, data in (("index.json", index), *sorted(members.items())):
            member = zipfile.ZipInfo(name, date_time=_EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3  # Unix, on every system: the same input gives the same bytes
            member.external_attr = 0o644 << 16
            archive.writestr(member, data, compresslevel=9)
