"""Tests of reports on a refused source: the first complaint, the path of the source, the command to repeat."""

import os
from pathlib import Path

import pytest

from ksgen.build.cache import Cache
from ksgen.build.children import first_error, refusal

TEXT, LOG = "kernel void k() {", "k.cl:1: note: here\nk.cl:1: error: expected '}'\n"


def test_a_source_is_kept_with_its_log_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    told = str(refusal("k: it was refused", "k.cl", TEXT, LOG, lambda kept: ("build it", "-O3", kept)))
    kept = next((tmp_path / "failed").glob("k-*.cl"))
    assert told == f"k: it was refused: k.cl:1: error: expected '}}'\n  source: {kept}\n  repeat: 'build it' -O3 {kept}"
    assert (kept.read_text(), kept.with_suffix(".log").read_text()) == (TEXT, LOG)
    assert str(refusal("k: it was refused", "k.cl", TEXT, LOG)) == told.partition("\n  repeat")[0]
    refusal("another", "k.cl", TEXT + " ", LOG)
    assert len(list((tmp_path / "failed").glob("k-*.cl"))) == 2


def test_it_is_kept_elsewhere_where_the_cache_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (kept,) = [Path(line.split()[-1]) for line in str(refusal("k", "k.cl", TEXT, LOG)).splitlines()[1:]]
    assert (kept.parent.parent, kept.read_text()) == (tmp_path, TEXT)
    assert (kept.parent.name[:13], kept.parent.stat().st_mode & 0o777) == ("ksgen-failed-", 0o700)
    again = str(refusal("k", "k.cl", TEXT, LOG)).splitlines()[1].split()[-1]
    assert Path(again).parent != kept.parent  # an unpredictable name
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache" / "none"))
    assert str(refusal("k", "k.cl", TEXT, LOG, lambda kept: (kept,))) == "k: k.cl:1: error: expected '}'"


def test_first_error_of_a_log() -> None:
    assert first_error("In file included from a.h\nptxas x.ptx, line 28; error   : Unknown modifier\n") == (
        "ptxas x.ptx, line 28; error   : Unknown modifier"
    )
    assert first_error("\n something else \n") == "something else"
    assert first_error("") == "no output"


def test_a_source_is_kept_in_no_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refusal("k", "k.cl", TEXT, LOG)
    (failed,) = (tmp_path / "cache").iterdir()
    (kept,) = failed.glob("*.cl")
    kept.unlink()
    kept.symlink_to(tmp_path / "victim")
    failed.chmod(0o777)
    said = str(refusal("k", "k.cl", TEXT, LOG))
    assert not (tmp_path / "victim").exists()
    assert f"  source: {tmp_path}/ksgen-failed-" in said


def test_a_pipe_in_the_place_of_a_kept_source_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refusal("k", "k.cl", TEXT, LOG)
    (kept,) = tmp_path.glob("cache/failed/*.cl")
    kept.unlink()
    os.mkfifo(kept)
    assert f"  source: {tmp_path}/ksgen-failed-" in str(refusal("k", "k.cl", TEXT, LOG))


def test_a_kept_source_is_this_users_alone_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache removes no file that others can write to."""
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    before = os.umask(0)
    try:
        refusal("k", "k.cl", TEXT, LOG)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o022 for each in (tmp_path / "failed").iterdir()] == [0, 0]
    assert Cache(tmp_path).clear() == len(TEXT) + len(LOG)
