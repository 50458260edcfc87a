"""The store on disk: what is found, what is refused, what is evicted, and what a dying process leaves."""

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.build.cache import STALE_SECONDS, Cache, _seal, max_bytes_from_environment
from ksgen.build.request import Request
from ksgen.errors import KsgenError, KsgenWarning
from tests.support.cache_entries import COMPILER, REQUEST, Compiler, binary
from tests.support.users import ANOTHER, needs_root


def request(number: int) -> Request:
    return replace(REQUEST, text=f"text {number}")


def files_of(cache: Cache, request: Request = REQUEST, compiler: Compiler = COMPILER) -> Path:
    return cache.path / request.digest / request.key(compiler)


def test_what_is_put_comes_back(cache):
    assert cache.get(REQUEST, COMPILER) is None
    cache.put(REQUEST, binary())
    assert cache.get(REQUEST, COMPILER) == binary()
    assert cache.get(REQUEST) == binary()


def test_entry_says_what_it_is(cache):
    cache.put(REQUEST, binary())
    meta = json.loads((files_of(cache) / "meta.json").read_text())
    assert meta["entry"] == "ks_1"
    assert meta["target"] == "sm_90a"
    assert meta["resources"] == {"registers": 32, "shared_bytes": 1024, "spill_bytes": 0, "stack_bytes": None}
    assert meta["provenance"]["compiler_version"] == "13.0.88"
    assert len(meta["source_sha256"]) == 64
    assert meta["created"].startswith("20")
    assert sorted(os.listdir(files_of(cache))) == ["binary", "meta.json"]
    (entry,) = cache.entries()
    assert (entry.entry, entry.target, entry.compiler) == ("ks_1", "sm_90a", "nvcc 13.0.88")
    assert entry.bytes == sum(file.stat().st_size for file in files_of(cache).iterdir())


def test_folder_is_the_users_own(cache):
    cache.put(REQUEST, binary())
    assert cache.path.stat().st_mode & 0o777 == 0o700


def test_without_a_compiler_the_newest_ones_entry_is_found(cache):
    for version in ("12.9.100", "13.0.9", "13.0", "13.0.88", "9.2"):
        cache.put(REQUEST, binary(compiler=Compiler(version=version), data=version.encode()))
    found = cache.get(REQUEST)
    assert found is not None
    assert found.data == b"13.0.88"
    exact = cache.get(REQUEST, Compiler(version="9.2"))
    assert exact is not None
    assert exact.data == b"9.2"


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def reseal(path: Path, **changes: object) -> None:
    record = json.loads((path / "meta.json").read_text())
    del record["seal"]
    (path / "meta.json").write_bytes(_seal(record | changes))


DAMAGE = {
    "pipe for binary": lambda path: fifo(path / "binary"),
    "pipe for meta": lambda path: fifo(path / "meta.json"),
    "sealed without a target": lambda path: reseal(path, target=None),
    "sealed with unknown resources": lambda path: reseal(path, resources={"memory": 3}),
    "sealed without a compiler": lambda path: reseal(path, provenance={}),
    "truncated binary": lambda path: os.truncate(path / "binary", 7),
    "empty binary": lambda path: os.truncate(path / "binary", 0),
    "flipped binary": lambda path: flip(path / "binary", 250),
    "missing binary": lambda path: (path / "binary").unlink(),
    "truncated meta": lambda path: os.truncate(path / "meta.json", 40),
    "empty meta": lambda path: os.truncate(path / "meta.json", 0),
    "missing meta": lambda path: (path / "meta.json").unlink(),
    "folder for binary": lambda path: ((path / "binary").unlink(), (path / "binary" / "inside").mkdir(parents=True)),
    "folder for meta": lambda path: ((path / "meta.json").unlink(), (path / "meta.json").mkdir()),
    "endless link": lambda path: ((path / "meta.json").unlink(), (path / "meta.json").symlink_to("meta.json")),
    "file for the entry": lambda path: (shutil.rmtree(path), path.write_text("a file")),
    "deep JSON": lambda path: (path / "meta.json").write_text('{"a": ' * 5000 + "1" + "}" * 5000),
    "other JSON": lambda path: (path / "meta.json").write_text("[1, 2]"),
    "no text": lambda path: (path / "meta.json").write_bytes(b"\xff\xfe\x00"),
    "edited meta": lambda path: (path / "meta.json").write_text(
        (path / "meta.json").read_text().replace('"registers": 32', '"registers": 16')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("compiler", [COMPILER, None], ids=["exact", "any"])
def test_bad_entry_is_reported_set_aside_and_replaced(cache, caplog, damage, compiler):
    cache.put(REQUEST, binary())
    damage(files_of(cache))
    (bad,) = cache.verify()
    assert bad.path == files_of(cache)
    assert bad.reason
    with caplog.at_level(logging.WARNING):
        assert cache.get(REQUEST, compiler) is None
    assert "is ignored, and is built again" in caplog.text
    assert os.listdir(cache.path) == []
    cache.put(REQUEST, binary())
    assert cache.get(REQUEST, compiler) == binary()
    assert cache.verify() == []


def test_a_file_in_the_place_of_a_folder_is_replaced(cache):
    cache.path.mkdir()
    (cache.path / REQUEST.digest).write_text("a file")
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, binary())
    assert cache.get(REQUEST, COMPILER) == binary()


def test_no_flipped_bit_of_meta_json_goes_unnoticed(cache):
    cache.put(REQUEST, binary())
    meta = files_of(cache) / "meta.json"
    whole = meta.read_bytes()
    for at in range(len(whole)):
        flip(meta, at)
        assert cache.verify() or cache.get(REQUEST, COMPILER) == binary()
        meta.write_bytes(whole)
    assert cache.get(REQUEST, COMPILER) == binary()


def test_entry_under_another_key_is_refused(cache):
    cache.put(REQUEST, binary())
    elsewhere = files_of(cache, request(1))
    shutil.copytree(files_of(cache), elsewhere)
    (bad,) = cache.verify()
    assert (bad.path, bad.reason) == (elsewhere, "it is stored under another entry's key")
    assert cache.get(request(1), COMPILER) is None


def use_in_order(cache: Cache, numbers: list[int]) -> None:
    for moment, number in enumerate(numbers):
        for file in files_of(cache, request(number)).iterdir():
            os.utime(file, (1000 + moment, 1000 + moment))


def test_least_recently_used_entries_are_evicted_first(cache):
    for number in range(6):
        cache.put(request(number), binary(request(number)))
    use_in_order(cache, [3, 1, 5, 0, 2, 4])
    assert cache.get(request(3)) is not None  # and so used last
    size = next(cache.entries()).bytes
    assert cache.gc(max_bytes=3 * size) == 3 * size
    assert {number for number in range(6) if cache.get(request(number))} == {2, 4, 3}
    assert len(os.listdir(cache.path)) == 3


def test_put_keeps_the_cap(tmp_path):
    cache = Cache(tmp_path / "cache", max_bytes=10_000)
    for number in range(100):
        cache.put(request(number), binary(request(number)))
    total = sum(entry.bytes for entry in cache.entries())
    assert 5_000 < total <= 10_000
    assert cache.get(request(99)) is not None


def test_cap_from_the_environment(monkeypatch):
    monkeypatch.delenv("KSGEN_CACHE_MAX_BYTES", raising=False)
    assert max_bytes_from_environment() == 2 << 30
    monkeypatch.setenv("KSGEN_CACHE_MAX_BYTES", "1000")
    assert Cache("nowhere").max_bytes == 1000
    monkeypatch.setenv("KSGEN_CACHE_MAX_BYTES", "2G")
    with pytest.raises(KsgenError, match="KSGEN_CACHE_MAX_BYTES='2G' must be a whole number of bytes"):
        max_bytes_from_environment()
    monkeypatch.setenv("KSGEN_CACHE_MAX_BYTES", "9" * 5000)
    with pytest.raises(KsgenError, match=r"KSGEN_CACHE_MAX_BYTES='9+\.\.\. must be"):
        max_bytes_from_environment()


def test_clear_removes_its_own_things_only(cache):
    cache.put(REQUEST, binary())
    (cache.path / "failed").mkdir()
    for name in (refused_name("refused"), refused_name("refused", ".log")):
        (cache.path / "failed" / name).write_text("refused")
    (cache.path / "photos").mkdir()
    (cache.path / "photos" / "holiday.jpg").write_text("dear")
    assert cache.clear() > 0
    assert list(cache.entries()) == []
    assert sorted(os.listdir(cache.path)) == ["failed", "photos"]
    assert os.listdir(cache.path / "failed") == []
    assert os.listdir(cache.path / "photos") == ["holiday.jpg"]


def refused_name(text: str, ending: str = ".cu") -> str:
    return f"ks_1-{hashlib.sha256(text.encode()).hexdigest()[:8]}{ending}"


def remove_everything(cache: Cache) -> None:
    """Call everything that removes files of a cache."""
    cache.max_bytes = 1
    cache.put(REQUEST, binary())  # evicts
    cache.gc(0)
    cache.clear()


def test_no_users_file_is_ever_removed(cache, monkeypatch):
    monkeypatch.setattr("ksgen.build.cache.FAILED_SECONDS", -1)
    monkeypatch.setattr("ksgen.build.cache.STALE_SECONDS", -1)
    digest = "a" * 64
    dear = {
        "failed/notes-20240101.txt", "failed/notes-20240101.log", "failed/thesis-01234567.cu",  # of no such content
        f"failed/{refused_name('refused')}",  # edited since
        f"{digest}/{digest}/photo.jpg",  # a store of another program that names by digests too
        f"{'b' * 64}/{'c' * 64}", "d" * 64, ".tmp-0123456789abcdef/photo.jpg", ".tmp-1123456789abcdef",
    }  # fmt: skip
    for name in dear:
        (cache.path / name).parent.mkdir(parents=True, exist_ok=True)
        (cache.path / name).write_text("dear")
    (cache.path / "failed" / "link-01234567.cu").symlink_to("notes-20240101.txt")
    remove_everything(cache)
    assert {str(path.relative_to(cache.path)) for path in cache.path.rglob("*") if path.is_file()} == {
        *dear,
        "failed/link-01234567.cu",
    }


def test_folder_that_does_not_exist_is_an_empty_cache(tmp_path):
    cache = Cache(tmp_path / "nowhere")
    assert cache.get(REQUEST) is None
    assert (list(cache.entries()), cache.verify(), cache.gc(), cache.clear()) == ([], [], 0, 0)
    assert not cache.path.exists()


def test_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "cache").write_text("a file")
    cache = Cache(tmp_path / "cache")
    assert cache.get(REQUEST) is None
    assert cache.get(REQUEST, COMPILER) is None
    with pytest.raises(OSError, match="File exists"):
        cache.put(REQUEST, binary())


def die_while_writing(folder: Path) -> None:
    def die(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        if path.name == "meta.json":
            os.kill(os.getpid(), signal.SIGKILL)

    Path.write_bytes = die  # type: ignore[assignment, method-assign]
    Cache(folder).put(REQUEST, binary())


def test_killed_in_the_middle_of_writing(cache):
    child = multiprocessing.get_context("spawn").Process(target=die_while_writing, args=(cache.path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (left,) = cache.path.glob(".tmp-*")
    assert (list(cache.entries()), cache.verify(), cache.get(REQUEST)) == ([], [], None)
    cache.put(REQUEST, binary())
    assert cache.get(REQUEST) == binary()
    assert cache.gc() == 0  # it might belong to a process that still writes
    assert left.exists()
    os.utime(left, (1000, 1000))
    assert STALE_SECONDS > 0
    assert cache.gc() > 0
    assert not left.exists()
    assert cache.get(REQUEST) == binary()


@pytest.mark.parametrize("file", ["binary", "meta.json"])
def test_injected_full_disk_leaves_nothing(cache, monkeypatch, file):
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, data[:10])
        if path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device"):
        cache.put(REQUEST, binary())
    assert os.listdir(cache.path) == []


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 64 KiB; its path."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "size=64k", "none", disk), capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(("umount", "-l", disk), check=True)


def test_disk_that_is_full(tiny_disk):
    cache = Cache(tiny_disk / "cache")
    cache.put(REQUEST, binary())
    with pytest.raises(OSError, match="No space left on device"):
        cache.put(request(1), binary(request(1), data=bytes(100_000)))
    assert not list(cache.path.glob(".tmp-*"))
    assert cache.get(REQUEST) == binary()


def test_disk_that_is_read_only(tiny_disk):
    cache = Cache(tiny_disk / "cache")
    cache.put(REQUEST, binary())
    os.truncate(files_of(cache) / "binary", 10)
    cache.put(request(1), binary(request(1)))
    subprocess.run(("mount", "-o", "remount,ro", tiny_disk), check=True)
    assert cache.get(request(1)) == binary(request(1))
    assert cache.get(REQUEST) is None
    with pytest.raises(OSError, match="Read-only file system"):
        cache.put(request(2), binary(request(2)))


def test_same_entry_put_twice(cache):
    cache.put(REQUEST, binary())
    cache.put(REQUEST, binary())
    assert len(list(cache.entries())) == 1
    assert not list(cache.path.glob(".tmp-*"))


def test_clearing_while_others_read_and_write(cache):
    """Every reader gets the whole binary or nothing, and no call fails."""
    answers = []
    failures = []

    def use() -> None:
        try:
            for _ in range(60):
                cache.put(REQUEST, binary())
                answers.append(cache.get(REQUEST, COMPILER))
                answers.append(cache.get(REQUEST))
        except BaseException as error:
            failures.append(error)

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    while any(user.is_alive() for user in users):
        cache.clear()
    assert failures == []
    assert {answer.data for answer in answers if answer} <= {binary().data}
    assert not list(cache.path.glob(".tmp-*"))


REACH = {
    "the cache": lambda entry: entry.parents[1],
    "the request": lambda entry: entry.parent,
    "the entry": lambda entry: entry,
    "its record": lambda entry: entry / "meta.json",
    "its binary": lambda entry: entry / "binary",
}


def refuses(cache: Cache, why: str) -> None:
    """Says so once, in one line, and takes nothing."""
    with pytest.warns(KsgenWarning, match=why) as warned:
        assert [cache.get(REQUEST, COMPILER), cache.get(REQUEST), cache.get(REQUEST)] == [None] * 3
    (warning,) = warned
    assert str(warning.message).startswith(f"ksgen does not use the cache {cache.path}: {cache.path}")
    assert str(warning.message).endswith("or accept it with KSGEN_TRUST=all")
    assert "\n" not in str(warning.message)


@pytest.mark.parametrize("reach", REACH.values(), ids=REACH)
def test_what_every_user_can_write_is_not_taken(cache, monkeypatch, reach):
    cache.put(REQUEST, binary())
    place = reach(files_of(cache))
    place.chmod(0o777)
    refuses(cache, r"every user can write to it; take that right away \(chmod o-w\)")
    monkeypatch.setenv("KSGEN_TRUST", "all")
    assert cache.get(REQUEST) == binary()
    assert len(list(cache.entries())) == 1  # nothing was removed


@needs_root
@pytest.mark.parametrize("reach", REACH.values(), ids=REACH)
def test_what_belongs_to_another_user_is_not_taken(cache, monkeypatch, reach):
    cache.put(REQUEST, binary())
    os.chown(reach(files_of(cache)), ANOTHER, -1)
    refuses(cache, rf"it belongs to user {ANOTHER}; make it yours \(chown\)")
    monkeypatch.setenv("KSGEN_TRUST", "all")
    assert cache.get(REQUEST) == binary()


@needs_root
def test_what_belongs_to_root_is_taken_by_everybody(cache, monkeypatch):
    cache.put(REQUEST, binary())
    monkeypatch.setattr("os.geteuid", lambda: ANOTHER)
    assert cache.get(REQUEST) == binary()


def test_a_folder_that_others_can_write_takes_no_entry(cache):
    cache.path.mkdir()
    cache.path.chmod(0o777)
    with pytest.raises(OSError, match="every user can write to it"):
        cache.put(REQUEST, binary())
    assert os.listdir(cache.path) == []


@pytest.mark.parametrize("umask", [0, 0o002])
def test_what_is_put_is_taken_again_whatever_the_umask(cache, umask):
    before = os.umask(umask)
    try:
        cache.put(REQUEST, binary())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o022 for path in cache.path.rglob("*")} == {0}
    assert cache.get(REQUEST) == binary()


def test_a_group_may_share_a_cache_that_is_trusted(cache, monkeypatch):
    monkeypatch.setenv("KSGEN_TRUST", "all")
    before = os.umask(0o002)
    try:
        cache.put(REQUEST, binary())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o020 for path in cache.path.rglob("*")} == {0o020}
