"""One file that carries binaries, sources and wisdom to another machine."""

import hashlib
import json
import multiprocessing
import os
import zipfile
from dataclasses import dataclass, replace

import pytest

from ksgen.build.bundle import Bundle, write_bundle
from ksgen.build.request import Binary, Request, Resources, describe
from ksgen.errors import KsgenError
from tests.support.users import ANOTHER, needs_root


@dataclass(frozen=True)
class Compiler:
    name: str = "nvcc"
    version: str = "13.0.88"

    def options(self, target: str) -> tuple[str, ...]:
        return ("-O3", target)

    def compile(self, text: str, entry: str, target: str) -> Binary:
        raise AssertionError("a bundle never compiles")


REQUESTS = [Request(f"text of kernel {n}", f"ks_{n}", target) for n in range(3) for target in ("sm_80", "sm_90a")]
WISDOM = {"NVIDIA_H100.json": b'{"entries": []}'}


def binary(request: Request, version: str = "13.0.88") -> Binary:
    options = json.dumps(Compiler().options(request.target))
    made = {"compiler": "nvcc", "compiler_version": version, "options": options}
    data = f"{request.entry} {request.target} {version}".encode() * 20
    return Binary(data, request.entry, request.target, Resources(registers=40), made)


ENTRIES = [(request, binary(request)) for request in REQUESTS]


@pytest.fixture
def path(tmp_path):
    write_bundle(tmp_path / "vit.ksb", ENTRIES, WISDOM, {"ksgen": "0.1.0"})
    return tmp_path / "vit.ksb"


def test_everything_comes_back(path):
    bundle = Bundle(path)
    assert [bundle.get(request) for request in REQUESTS] == [binary(request) for request in REQUESTS]
    assert bundle.get(replace(REQUESTS[0], text="another text")) is None
    assert bundle.wisdom() == WISDOM
    assert bundle.provenance == {"ksgen": "0.1.0"}
    listed = {(entry.entry, entry.target, bundle.source(entry.key)) for entry in bundle.entries()}
    assert listed == {(request.entry, request.target, request.text) for request in REQUESTS}
    assert {entry.compiler for entry in bundle.entries()} == {"nvcc 13.0.88"}


def test_answers_for_any_compiler_and_prefers_the_exact_one(path):
    request = REQUESTS[0]
    write_bundle(path, [(request, binary(request, version)) for version in ("12.9", "13.0.88", "13.0.9")])
    bundle = Bundle(path)
    assert bundle.get(request) == binary(request, "13.0.88")
    assert bundle.get(request, Compiler(version="12.9")) == binary(request, "12.9")
    assert bundle.get(request, Compiler(version="14.0")) == binary(request, "13.0.88")


def test_same_input_same_bytes(path, tmp_path):
    write_bundle(tmp_path / "again.ksb", reversed(ENTRIES), WISDOM, {"ksgen": "0.1.0"})
    assert (tmp_path / "again.ksb").read_bytes() == path.read_bytes()
    write_bundle(tmp_path / "other.ksb", ENTRIES[:-1], WISDOM, {"ksgen": "0.1.0"})
    assert (tmp_path / "other.ksb").read_bytes() != path.read_bytes()


def test_sources_shared_by_targets_are_stored_once(path):
    with zipfile.ZipFile(path) as archive:
        names = [name.split("/")[0] for name in archive.namelist()]
    assert (names.count("sources"), names.count("binaries"), names.count("wisdom")) == (3, 6, 1)


def test_writing_replaces_the_file_whole(path):
    before = Bundle(path)
    write_bundle(path, ENTRIES[:1])
    assert len(Bundle(path).entries()) == 1
    assert before.get(REQUESTS[3]) == binary(REQUESTS[3])
    assert os.listdir(path.parent) == ["vit.ksb"]


def test_bundle_that_cannot_be_written(tmp_path):
    with pytest.raises(KsgenError, match=r"nowhere/vit.ksb: cannot be written \(No such file or directory\)"):
        write_bundle(tmp_path / "nowhere" / "vit.ksb", ENTRIES)
    for place in (tmp_path, ""):
        with pytest.raises(KsgenError, match=r": cannot be written \(it is a folder\)"):
            write_bundle(place, ENTRIES)
    assert os.listdir(tmp_path) == []


def test_missing_foreign_and_newer_files(path, tmp_path):
    with pytest.raises(KsgenError, match=r"none.ksb: there is no such bundle"):
        Bundle(tmp_path / "none.ksb")
    (tmp_path / "text.ksb").write_text("hello")
    with pytest.raises(KsgenError, match=r"text.ksb is not a ksgen bundle, or is truncated"):
        Bundle(tmp_path / "text.ksb")
    with zipfile.ZipFile(tmp_path / "foreign.ksb", "w") as archive:
        archive.writestr("hello", "world")
    with pytest.raises(KsgenError, match=r"foreign.ksb is a zip archive, but not a ksgen bundle"):
        Bundle(tmp_path / "foreign.ksb")
    path.write_bytes(path.read_bytes().replace(b"ksgen bundle 1 ", b"ksgen bundle 2 "))
    with pytest.raises(KsgenError, match=r"has bundle format 2, and this version of ksgen reads 1; write it again"):
        Bundle(path)
    for comment in (b"ksgen bundle 1 \xb7\xff", b"ksgen bundle " + b"1" * 5000 + b" abc"):
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = comment
        with pytest.raises(KsgenError, match=r"is a zip archive, but not a ksgen bundle"):
            Bundle(path)


def test_bundle_that_was_cut_short(path):
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(KsgenError, match=r"truncated|not a ksgen bundle|is damaged"):
            Bundle(path)


def read_all(bundle: Bundle) -> tuple[object, ...]:
    listed = [(entry.entry, bundle.source(entry.key)) for entry in bundle.entries()]
    return [bundle.get(request) for request in REQUESTS], sorted(listed), bundle.wisdom(), dict(bundle.provenance)


def test_no_flipped_byte_gives_a_wrong_answer(path):
    whole = path.read_bytes()
    truth = read_all(Bundle(path))
    noticed = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            answer = read_all(Bundle(path))
        except KsgenError as error:
            noticed += str(error).startswith(str(path))
        else:
            assert answer == truth
    assert noticed > len(whole) // 3 // 2


def test_damaged_member_is_named(path):
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: (info, archive.read(info)) for info in archive.infolist()}
        comment = archive.comment
    name = next(name for name in members if name.startswith("binaries/"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        for info, data in members.values():
            archive.writestr(info, b"another binary" if info.filename == name else data)
    with pytest.raises(KsgenError, match=rf"is damaged \({name}: the binary is not the one that was stored\); copy it"):
        read_all(Bundle(path))


inherited: list[Bundle] = []  # by forked processes


def get_inherited(request: Request) -> Binary | None:
    return inherited[0].get(request)


def test_forked_process_reads_on_its_own(path):
    inherited[:] = [Bundle(path)]
    jobs = REQUESTS * 50
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(get_inherited, jobs) == [binary(request) for request in jobs]


def write_index(path, index: bytes) -> None:
    """A bundle of that index alone, whose hash is right."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = f"ksgen bundle 1 {hashlib.sha256(index).hexdigest()}".encode()
        archive.writestr("index.json", index)


def changed(**changes: object) -> bytes:
    """An index with one record, changed so."""
    record = describe(REQUESTS[0], binary(REQUESTS[0])) | changes
    return json.dumps({"entries": {"k": record}, "provenance": {}, "wisdom": {}}).encode()


MALFORMED = {
    "no JSON": (b"{", "Expecting property name"),
    "no text": (b'"\xff"', "codec can't decode"),
    "deep": (b"[" * 100_000, "recursion"),
    "a list": (b"[]", "entries is None, not a mapping"),
    "no entries": (b"{}", "entries is None, not a mapping"),
    "a list of entries": (b'{"entries": []}', r"entries is \[\], not a mapping"),
    "no provenance": (b'{"entries": {}}', "provenance is None, not a mapping"),
    "numbers of wisdom": (b'{"entries": {}, "provenance": {}, "wisdom": {"a": 1}}', r"wisdom is \{'a': 1\}, not a "
                                                                                    r"mapping to"),
    "a number as a record": (b'{"entries": {"k": 1}, "provenance": {}, "wisdom": {}}', "a record is 1, not a mapping"),
    "no request": (changed(request=None), "request of a record is None"),
    "a number as the binary's hash": (changed(binary_sha256=1), "binary_sha256 of a record is 1"),
    "a text of bytes": (changed(binary_bytes="many"), "binary_bytes of a record is 'many'"),
    "other resources": (changed(resources={"memory": 1}), r"resources of a record is \{'memory': 1\}"),
    "a text of registers": (changed(resources={"registers": "few"}),
        r"resources of a record is \{'registers': 'few'\}"),
    "no compiler": (changed(provenance={"options": "[]"}), r"provenance of a record is \{'options': '\[\]'\}"),
    "a version of numbers": (
        changed(provenance={"compiler": "nvcc", "compiler_version": 13, "options": "[]"}), "provenance of a record is",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("index", "why"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_index_is_refused_though_its_hash_is_right(tmp_path, index, why):
    write_index(tmp_path / "a.ksb", index)
    with pytest.raises(KsgenError, match=rf"a\.ksb is damaged \(index\.json: .*{why}.*\); copy it again") as caught:
        Bundle(tmp_path / "a.ksb")
    assert len(str(caught.value).splitlines()) == 1


def test_the_index_that_is_changed_in_nothing_is_read(tmp_path):
    write_index(tmp_path / "a.ksb", changed())
    assert [entry.entry for entry in Bundle(tmp_path / "a.ksb").entries()] == ["ks_0"]


def test_a_bundle_that_others_can_write_is_refused(path, monkeypatch):
    path.chmod(0o646)
    with pytest.raises(
        KsgenError, match=r"vit\.ksb: every user can write to it; take that right away \(chmod o-w\), or accept it with"
    ):
        Bundle(path)
    monkeypatch.setenv("KSGEN_TRUST", "all")
    assert Bundle(path).wisdom() == WISDOM


@needs_root
def test_another_users_bundle_is_refused(path, monkeypatch):
    os.chown(path, ANOTHER, -1)
    with pytest.raises(
        KsgenError,
        match=rf"vit\.ksb: it belongs to user {ANOTHER}; make it yours \(chown\), or accept it with KSGEN_TRUST=all",
    ):
        Bundle(path)
    monkeypatch.setenv("KSGEN_TRUST", "all")
    assert Bundle(path).wisdom() == WISDOM
