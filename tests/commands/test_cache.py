"""`ksgen cache`: what is there, what is damaged, and what goes."""

import json
from pathlib import Path

import pytest

from ksgen.build.cache import Cache
from ksgen.build.request import Binary, Request, Resources
from ksgen.commands import cache
from ksgen.errors import KsgenError
from tests.support.commands import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    filled = Cache(tmp_path / "cache")
    for name in ("ks_one", "ks_two"):
        provenance = {"compiler": "nvcc", "compiler_version": "13.0", "options": "[]"}
        filled.put(
            Request(f"text of {name}", name, "sm_90a"), Binary(b"code" * 100, name, "sm_90a", Resources(), provenance)
        )
    return filled.path


def test_cache_ls_lists_what_is_there(folder: Path) -> None:
    rows = json.loads(run("cache", "ls", "--json", "--folder", str(folder)).stdout)
    assert sorted((row["entry"], row["target"], row["compiler"]) for row in rows) == [
        ("ks_one", "sm_90a", "nvcc 13.0"),
        ("ks_two", "sm_90a", "nvcc 13.0"),
    ]
    used = {entry.entry: int(entry.last_used) for entry in Cache(folder).entries()}
    assert {row["entry"]: row["last_used"] for row in rows} == used
    assert run("cache", "ls", "--folder", str(folder)).stdout.splitlines()[-1].startswith("2 entries, ")
    assert run("cache", "ls", "--folder", str(folder / "none")).stdout == f"0 entries, 0.0 MB in {folder / 'none'}\n"


def test_cache_verify_finds_damage(folder: Path) -> None:
    assert run("cache", "verify", "--folder", str(folder)).exit_code == 0
    binary = next(folder.glob("*/*/binary"))
    binary.write_bytes(b"c0de" * 100)
    done = run("cache", "verify", "--folder", str(folder))
    assert done.exit_code == 1
    assert str(binary.parent) in done.stdout
    assert "1 damaged" in done.stdout


def test_cache_gc_and_clear(folder: Path) -> None:
    assert "freed" in run("cache", "gc", "--max-bytes", "1k", "--folder", str(folder)).stdout
    assert len(list(Cache(folder).entries())) <= 1
    unanswered = run("cache", "clear", "--folder", str(folder))
    assert str(unanswered.exception) == f"{folder}: nothing was removed; answer y, or give --yes"
    assert run("cache", "clear", "--yes", "--folder", str(folder)).exit_code == 0
    assert list(Cache(folder).entries()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("500", 500), ("2k", 2000), ("500M", 500_000_000), ("1.5GB", 1_500_000_000), ("1 t", 10**12), ("7b", 7)],
)
def test_sizes_have_decimal_units(text: str, size: int) -> None:
    assert cache._parse_bytes(text) == size


def test_mistakes_of_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["gc", "--max-bytes", "12x"], "--max-bytes '12x': give a number of bytes, such as 500000000, 500M or 2G"),
        (["gc", "--max-bytes", "9" * 400], "--max-bytes '999"),
        (["ls", "--folder", str(tmp_path / "file")], f"{tmp_path / 'file'} is not a folder; name the cache's folder"),
    ):
        caught = run("cache", *arguments).exception
        assert isinstance(caught, KsgenError)
        assert str(caught).startswith(message)


def test_a_folder_that_others_can_write_is_refused_with_its_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)
    for command in ("ls", "verify", "gc", "clear"):
        refused = run("cache", command, "--folder", str(folder)).exception
        assert (
            str(refused)
            == f"{folder}: every user can write to it; take that right away (chmod o-w), or accept it with "
            "KSGEN_TRUST=all"
        )
    assert run("cache", "path", "--folder", str(folder)).stdout == f"{folder}\n"
    monkeypatch.setenv("KSGEN_TRUST", "all")
    assert run("cache", "verify", "--folder", str(folder)).exit_code == 0
