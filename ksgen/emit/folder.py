"""The folder that emit writes: which of its files are emit's own, and how all of them are replaced together.

`manifest.json` lists emit's files with their SHA-256. Unlisted files are the user's and stay. If an unlisted file has a
name that emit writes, or a listed file was changed, emit refuses before it changes anything. Files are written to a
temporary folder and moved in one by one. Meanwhile the manifest lists under `unfinished` which files of the previous
version may remain. If an emit is killed, the next one completes its work.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from ksgen.errors import KsgenError
from ksgen.files import read
from ksgen.values import excerpt, shown

MANIFEST = "manifest.json"
MOST_BYTES_OF_MANIFEST = 2**26

_ASIDE = re.compile(r"\.ksgen-emit-[0-9a-f]{16}")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)  # file names that emit writes, without a folder
_WRITTEN = b"Written by `ksgen emit`"  # in the first line of launchers, which older manifests do not list
_ELSEWHERE = "name another folder with -o"

Digests = dict[str, set[str]]  # digests of emit's versions of a file, by name


def write_folder(folder: Path, files: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Write `files`, and a manifest with them and `facts`, to a folder. They replace an earlier emit's files."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise KsgenError(f"{shown(folder)} is not a folder; {_ELSEWHERE}")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _replace(folder, {name: text.encode() for name, text in files.items()}, facts)
    except OSError as error:
        raise KsgenError(f"cannot write {shown(folder)}: {error.strerror or error}; {_ELSEWHERE}") from error
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # succeeds only if the folder is still empty


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, so that two emits into it take turns."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # a forked child may still have the folder open
        os.close(opened)


def _replace(folder: Path, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    manifest = {**facts, "files": digests}
    before = _own_files(folder, manifest)
    for leftover in folder.iterdir():  # of an emit that was killed
        if _ASIDE.fullmatch(leftover.name):
            shutil.rmtree(leftover)
    aside = folder / f".ksgen-emit-{token_hex(8)}"
    try:
        aside.mkdir()
        for name, data in files.items():
            (aside / name).write_bytes(data)
        (aside / "unfinished").write_bytes(_as_json(manifest | {"unfinished": before}))
        (aside / MANIFEST).write_bytes(_as_json(manifest))
        os.replace(aside / "unfinished", folder / MANIFEST)
        for name in sorted({*before} - {*files}):  # before new files, whose names may differ in case alone
            (folder / name).unlink()
        for name in (*files, MANIFEST):
            os.replace(aside / name, folder / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _own_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Digests of files in the folder that emit may replace, by name. `KsgenError` names a file that it may not."""
    listed, wanted = _listed(folder, manifest), manifest["files"]
    digests: dict[str, str] = {}
    for name in sorted({*listed, *wanted}):
        path = folder / name
        if not os.path.lexists(path):
            continue
        digest = _digest(path)
        if digest not in {*listed.get(name, ()), wanted.get(name)}:
            foreign = "was not written by emit, which writes a file of that name"
            what = "was changed since emit wrote it" if name in listed else foreign
            raise KsgenError(f"{shown(path)} {what}; move it away, or {_ELSEWHERE}")
        digests[name] = digest
    return digests


def _listed(folder: Path, new: Mapping[str, Any]) -> Digests:
    """Digests of files that the folder's manifest lists, by name. Manifests of earlier versions of ksgen count, too.

    Raises `KsgenError` if the manifest is not emit's, or is of a spec with the same name but another title. It also
    does so if there are files but no manifest.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        if others := sorted(
            each.name for each in folder.iterdir() if each.name != "__pycache__" and not _ASIDE.fullmatch(each.name)
        ):
            raise KsgenError(
                f"{shown(folder)} holds {shown(others[0])} and no manifest of emit's; {_ELSEWHERE}, or empty it"
            )
        return {}
    try:
        if not path.is_file() or path.is_symlink():
            raise ValueError("no file")
        manifest = json.loads(read(path, MOST_BYTES_OF_MANIFEST))
        rows = [(row["file"], row["sha256"]) for row in manifest["kernels"]]
        if "files" in manifest:
            rows += [*manifest["files"].items(), *manifest.get("unfinished", {}).items()]
        else:
            rows += [
                (name, _digest(folder / name))
                for name in ("launchers.py", "__init__.py")
                if _was_written(folder / name)
            ]
        if not isinstance(manifest["ksgen"], str) or not all(_is_own(*row) for row in rows):
            raise ValueError("no list of emit's")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise KsgenError(f"{shown(path)} is not one that emit wrote; {_ELSEWHERE}") from None
    titles = {each["title"] for each in (manifest, new) if isinstance(each.get("title"), str)}
    if len(titles) > 1 and manifest.get("spec") == new.get("spec"):
        theirs, own = excerpt(manifest["title"]), excerpt(new["title"])
        raise KsgenError(
            f"{shown(folder)} holds what emit wrote of {theirs}, and {own} becomes the same name {new['spec']}; "
            f"{_ELSEWHERE}"
        )
    listed: Digests = {}
    for name, digest in rows:
        listed.setdefault(name, set()).add(digest)
    return listed


def _is_own(name: str, digest: object) -> bool:
    """Whether emit can have listed this name and digest."""
    return bool(_NAME.fullmatch(name)) and name != MANIFEST and isinstance(digest, str)


def _was_written(path: Path) -> bool:
    """Whether an earlier version of emit, whose manifest does not list this file, wrote it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _WRITTEN in file.readline(1000)


def _digest(path: Path) -> str:
    """Digest of a file's content; "no file" for a link, a folder or anything else."""
    if not path.is_file() or path.is_symlink():
        return "no file"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=True).encode() + b"\n"
