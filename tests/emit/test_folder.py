"""Tests of the folder that emit writes: its own files are replaced together, and no other file is lost."""

import fcntl
import json
import os
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.cli import cli
from ksgen.emit.folder import MANIFEST, _locked, write_folder
from ksgen.errors import KsgenError
from tests.support.mounts import fill, mounted

FIRST = {"ks_a.cu": "first a", "ks_b.cu": "first b", "launchers.py": "first", "__init__.py": "same"}
SECOND = {"ks_b.cu": "second b", "ks_c.cu": "second c", "launchers.py": "second", "__init__.py": "same"}
ROW = {"pattern": [1, 2, 3, 4]}
SPEC = 'kernels: ["2,8,8,2"]'


def write(folder: Path, files: Mapping[str, str] = FIRST) -> None:
    kernels = [{"file": name, "sha256": digest_of(text), **ROW} for name, text in files.items() if name.endswith(".cu")]
    write_folder(folder, files, {"ksgen": "0.1.0", "spec": "x", "layers": {}, "kernels": kernels})


def digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def content(folder: Path) -> dict[str, str]:
    """Every file's, but the manifest's."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != MANIFEST and path.is_file()}


def manifest(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text())


def whole(folder: Path) -> dict[str, str]:
    """Return the folder's files. The manifest must list all of them."""
    found = content(folder)
    assert "unfinished" not in manifest(folder)
    assert not list(folder.glob(".ksgen*"))
    assert manifest(folder)["files"] == {name: digest_of(text) for name, text in found.items()}
    return found


def refusal(folder: Path, files: Mapping[str, str] = SECOND) -> str:
    """Return the message of a refused write, which must change no file."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(KsgenError) as caught:
        write(folder, files)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return str(caught.value)


def test_a_second_version_takes_the_place_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    for files in (FIRST, SECOND, SECOND, FIRST):
        write(folder, files)
        assert whole(folder) == files
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_what_is_the_users_stays(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("main")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "notes").symlink_to(tmp_path / "thesis.tex")
    write(tmp_path, SECOND)
    assert (tmp_path / "notes").read_text() == "years of work"
    assert (tmp_path / ".git" / "HEAD").read_text() == "main"
    assert (tmp_path / "__pycache__").is_dir()
    for name in ("thesis.tex", "notes"):
        (tmp_path / name).unlink()
    assert {path.name for path in tmp_path.iterdir()} == {*SECOND, MANIFEST, ".git", "__pycache__"}


@pytest.mark.parametrize("name", ["ks_a.cu", "ks_b.cu", "launchers.py"])
def test_a_file_that_was_changed_is_named_and_kept(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name).write_text("mine")
    assert (
        refusal(tmp_path)
        == f"{tmp_path / name} was changed since emit wrote it; move it away, or name another folder with -o"
    )
    (tmp_path / name).rename(tmp_path / "mine")
    write(tmp_path, SECOND)
    assert content(tmp_path) == SECOND | {"mine": "mine"}


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_in_the_place_of_a_new_one_is_named_and_kept(kind: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "mine").write_text(SECOND["ks_c.cu"])
    place = tmp_path / "ks_c.cu"
    if kind == "file":
        place.write_text("mine")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("mine")
    words = "was not written by emit, which writes a file of that name; move it away, or name another folder with -o"
    assert refusal(tmp_path) == f"{place} {words}"


def test_an_equal_file_is_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "ks_c.cu").write_text(SECOND["ks_c.cu"])
    (tmp_path / "launchers.py").unlink()
    write(tmp_path, SECOND)
    assert whole(tmp_path) == SECOND


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert (
        refusal(tmp_path)
        == f"{tmp_path} holds thesis.tex and no manifest of emit's; name another folder with -o, or empty it"
    )
    for other in (tmp_path / "empty", tmp_path / "cached"):
        other.mkdir()
    (tmp_path / "cached" / "__pycache__").mkdir()
    write(tmp_path / "empty")
    write(tmp_path / "cached")


FOREIGN = [
    "{}",
    "[]",
    "",
    "[" * 100000,
    '{"name": "app", "icons": []}',
    '{"ksgen": "0.1.0"}',
    '{"ksgen": "0.1.0", "kernels": [{"file": "thesis.tex"}]}',
    '{"ksgen": 1, "kernels": []}',
    '{"ksgen": "0.1.0", "kernels": [{"file": "../thesis.tex", "sha256": "0"}]}',
    '{"ksgen": "0.1.0", "kernels": [], "files": {"/etc/passwd": "0"}}',
    '{"ksgen": "0.1.0", "kernels": [], "files": {"..": "0"}}',
    '{"ksgen": "0.1.0", "kernels": [], "files": {"manifest.json": "0"}}',
    '{"ksgen": "0.1.0", "kernels": [], "files": {"a.cu": ["0"]}}',
    '{"ksgen": "0.1.0", "kernels": [], "files": []}',
]


@pytest.mark.parametrize("text", FOREIGN)
def test_another_programs_manifest_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    (tmp_path / "thesis.tex").write_text("years of work")
    assert refusal(tmp_path) == f"{tmp_path / MANIFEST} is not one that emit wrote; name another folder with -o"


def test_a_manifest_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    assert refusal(tmp_path) == f"{tmp_path / MANIFEST} is not one that emit wrote; name another folder with -o"


def test_what_an_earlier_version_wrote_is_emits_own(tmp_path: Path) -> None:
    spec = tmp_path / "small.yaml"
    spec.write_text(SPEC)
    emitted = tmp_path / "out"
    arguments = ["emit", str(spec), "-o", str(emitted)]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    old = manifest(emitted)
    del old["files"]
    (emitted / MANIFEST).write_text(json.dumps(old))
    (emitted / "launchers.py").write_text(
        '"""Launchers of old. Written by `ksgen emit`: edit the spec, not this file."""\n'
    )
    (emitted / "mine").write_text("mine")
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert "Launcher(2, 8, 8, 2)" in (emitted / "launchers.py").read_text()
    (emitted / MANIFEST).write_text(json.dumps(old))
    (emitted / "launchers.py").write_text("print('mine')")
    refused = CliRunner().invoke(cli, arguments)
    assert f"{emitted / 'launchers.py'} was not written by emit" in str(refused.exception)
    assert (emitted / "mine").read_text() == "mine"


def test_a_folder_s_lock_ends_with_its_emit_even_if_a_forked_child_has_the_folder_open(tmp_path: Path) -> None:
    end, write_end = os.pipe()
    with _locked(tmp_path):
        child = os.fork()
        if not child:
            os.close(write_end)
            os.read(end, 1)  # until the parent closes its end
            os._exit(0)
    again = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while somebody holds the lock
    finally:
        os.close(again)
        os.close(write_end)
        assert os.waitpid(child, 0)[1] == 0


def killed_at(step: int, folder: Path, files: Mapping[str, str]) -> bool:
    """Whether a process that writes the folder, killed before its so many'th step in it, came to that step."""
    if (child := os.fork()) == 0:
        left = step

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(arguments[0]).startswith(
                str(folder)
            ):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(count)
        write(folder, files)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", [{}, FIRST])
def test_a_kill_at_any_step_is_mended_by_the_next_emit(before: Mapping[str, str], tmp_path: Path) -> None:
    step, unfinished = 0, 0
    while True:
        folder = tmp_path / str(step)
        if before:
            write(folder, before)
            (folder / "mine").write_text("mine")
        if not killed_at(step, folder, SECOND):
            break
        if (folder / MANIFEST).exists() and "unfinished" in manifest(folder):
            unfinished += 1
        elif (folder / MANIFEST).exists():  # whole, before or after
            files = {name: text for name, text in content(folder).items() if name in {*FIRST, *SECOND}}
            assert manifest(folder)["files"] == {name: digest_of(text) for name, text in files.items()}
        write(folder, FIRST if step % 2 else SECOND)
        if before:
            (folder / "mine").rename(tmp_path / f"mine of {step}")
        assert whole(folder) == (FIRST if step % 2 else SECOND)
        step += 1
    assert step > 10
    assert unfinished >= len(SECOND)


def test_a_second_kill_is_mended_too(tmp_path: Path) -> None:
    """The version that a killed one left behind is emit's own still, whichever of its files are there."""
    folder = tmp_path / "out"
    for step in range(0, 40, 3):
        write(folder, FIRST)
        killed_at(step, folder, SECOND)
        killed_at(40 - step, folder, FIRST | {"ks_d.cu": "third"})
    write(folder, SECOND)
    assert whole(folder) == SECOND


def test_two_at_a_time_take_turns(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    turns = [Thread(target=write, args=(folder, files)) for files in (FIRST, SECOND) * 8]
    for each in turns:
        each.start()
    for each in turns:
        each.join()
    assert whole(folder) in (FIRST, SECOND)


def test_a_link_to_a_folder_goes_on_leading_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for files in (FIRST, SECOND):
        write(tmp_path / "link", files)
    assert (tmp_path / "link").is_symlink()
    assert whole(tmp_path / "there") == SECOND
    (tmp_path / "nowhere").symlink_to("none")
    with pytest.raises(KsgenError, match=r"nowhere is not a folder; name another folder with -o"):
        write(tmp_path / "nowhere")


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KsgenError, match=r"file is not a folder; name another folder with -o"):
        write(tmp_path / "file")
    with pytest.raises(
        KsgenError, match=r"cannot write .*file/out: (File exists|Not a directory); name another folder with -o"
    ):
        write(tmp_path / "file" / "out")


def test_a_disk_that_is_full_or_read_only_leaves_what_was(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        write(disk / "old")
        fill(disk)
        assert (
            refusal(disk / "old")
            == f"cannot write {disk / 'old'}: No space left on device; name another folder with -o"
        )
        assert whole(disk / "old") == FIRST
        with pytest.raises(KsgenError, match="No space left on device"):
            write(disk / "new")
        assert not (disk / "new").exists()
    with (
        mounted(tmp_path / "fixed", "size=64k,ro") as disk,
        pytest.raises(KsgenError, match=r"cannot write .*: Read-only file system"),
    ):
        write(disk / "new")


def test_the_commands_keep_what_is_not_theirs(tmp_path: Path) -> None:
    spec, web = tmp_path / "good.yaml", tmp_path / "web"
    spec.write_text(SPEC)
    (web / "src").mkdir(parents=True)
    (web / MANIFEST).write_text("{}")
    (web / "src" / "thesis.tex").write_text("years of work")
    refused = CliRunner().invoke(cli, ["emit", str(spec), "-o", str(web)])
    assert str(refused.exception) == f"{web / MANIFEST} is not one that emit wrote; name another folder with -o"
    assert (web / "src" / "thesis.tex").read_text() == "years of work"


def test_two_specs_whose_names_become_one_share_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my-net.yaml", "my_net.yaml", "other.yaml"):
        (tmp_path / name).write_text(SPEC)
    assert CliRunner().invoke(cli, ["emit", "my-net.yaml"]).exit_code == 0
    before = whole(tmp_path / "generated" / "my_net")
    for options in ((), ("-o", "generated/my_net")):
        refused = CliRunner().invoke(cli, ["emit", "my_net.yaml", *options])
        assert str(refused.exception) == (
            "generated/my_net holds what emit wrote of 'my-net', and 'my_net' becomes the same name my_net; name "
            "another folder with -o"
        )
    assert whole(tmp_path / "generated" / "my_net") == before
    assert CliRunner().invoke(cli, ["emit", "my-net.yaml"]).exit_code == 0  # itself
    assert CliRunner().invoke(cli, ["emit", "my_net.yaml", "-o", "elsewhere"]).exit_code == 0
    # in its place, as a user says
    assert CliRunner().invoke(cli, ["emit", "other.yaml", "-o", "elsewhere"]).exit_code == 0
    assert manifest(tmp_path / "elsewhere")["title"] == "other"


def test_a_folder_of_a_version_that_kept_no_title_is_still_emits_own(tmp_path: Path) -> None:
    (tmp_path / "my-net.yaml").write_text(SPEC)
    for _ in range(2):
        assert (
            CliRunner().invoke(cli, ["emit", str(tmp_path / "my-net.yaml"), "-o", str(tmp_path / "out")]).exit_code == 0
        )
        found = manifest(tmp_path / "out")
        assert found.pop("title") == "my-net"
        (tmp_path / "out" / MANIFEST).write_text(json.dumps(found))
