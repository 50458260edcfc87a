"""Whether another user can have written a file, and temporary folders that are this user's alone and outlive no
process.
"""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ksgen import ownership
from ksgen.errors import KsgenError
from ksgen.ownership import (
    UntrustedError,
    check_folder,
    keep_from_others,
    make_folder,
    own_temporary,
    sweep,
    temporary_folder,
)
from tests.support.users import ANOTHER, needs_root

ROOT = Path(__file__).parents[1]


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (0o757, "every user can write to it; take that right away (chmod o-w), or accept it with KSGEN_TRUST=all"),
        (0o1777, "every user can write to it; take that right away (chmod o-w), or accept it with KSGEN_TRUST=all"),
        (0o775, "group 4242 can write to it; take that right away (chmod g-w), or accept it with KSGEN_TRUST=all"),
    ],
)
def test_a_folder_that_others_can_write_is_refused_in_one_line(
    mode: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder(tmp_path)
    monkeypatch.setattr(ownership, "_is_own_group", lambda group, user: False)
    tmp_path.chmod(mode)
    group = tmp_path.stat().st_gid
    with pytest.raises(UntrustedError) as caught:
        check_folder(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {why.replace('4242', str(group))}"
    monkeypatch.setenv("KSGEN_TRUST", "all")
    check_folder(tmp_path)
    tmp_path.chmod(0o755)


@needs_root
def test_another_users_folder_and_link_are_refused_and_roots_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("theirs", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("own")
    os.chown(tmp_path / "theirs", ANOTHER, -1)
    os.chown(tmp_path / "link", ANOTHER, -1, follow_symlinks=False)
    for name in ("theirs", "link"):
        with pytest.raises(
            UntrustedError, match=rf"{name}: it belongs to user {ANOTHER}; make it yours \(chown\), or accept it with"
        ):
            check_folder(tmp_path / name)
    monkeypatch.setattr("os.geteuid", lambda: ANOTHER)
    for name in ("theirs", "own"):
        check_folder(tmp_path / name)


def test_a_word_of_trust_that_is_unknown_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_TRUST", "me")
    tmp_path.chmod(0o757)
    with pytest.raises(KsgenError, match="KSGEN_TRUST='me'; accepted: all, or unset"):
        check_folder(tmp_path)
    tmp_path.chmod(0o755)


def test_a_users_private_group_and_roots_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    names = {1000: ("anna", "x", 1000, []), 1001: ("anna", "x", 1001, ["bob"]), 100: ("users", "x", 100, [])}
    monkeypatch.setattr(pwd, "getpwuid", lambda user: pwd.struct_passwd(("anna", "x", user, user, "", "/", "/bin/sh")))
    monkeypatch.setattr(grp, "getgrgid", lambda group: grp.struct_group(names[group]))
    ownership._is_own_group.cache_clear()
    cases = ((0, 5), (1000, 1000), (1001, 1001), (100, 100), (7, 7))
    assert [ownership._is_own_group(*each) for each in cases] == [True, True, False, False, False]
    ownership._is_own_group.cache_clear()


def test_folders_are_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b")
        (tmp_path / "file").write_text("")
        keep_from_others(tmp_path / "file")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "file")] == [0o700, 0o700, 0o644]
    with pytest.raises(FileExistsError, match="File exists"):
        make_folder(tmp_path / "file")


def test_a_temporary_folder_that_is_not_this_users_is_never_taken(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = parent / f"ksgen-{os.geteuid()}"
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    place.symlink_to(elsewhere)
    monkeypatch.setenv("KSGEN_TRUST", "all")
    with pytest.raises(PermissionError, match="it is not this user's own folder"):
        own_temporary()
    with temporary_folder("build") as folder:  # goes elsewhere
        assert Path(folder).parent == parent
    place.unlink()
    place.mkdir(mode=0o700)
    place.chmod(0o770)
    with pytest.raises(PermissionError, match="it is not this user's own folder"):
        own_temporary()
    place.chmod(0o700)
    with temporary_folder("build") as folder:
        assert (Path(folder).parent, Path(folder).stat().st_mode & 0o777) == (place, 0o700)
    assert os.listdir(elsewhere) == os.listdir(place) == []


LEAVES = """
import os
from ksgen.ownership import temporary_folder
with temporary_folder("build") as folder:
    print(folder, flush=True)
    input()
"""


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_uses_is_not(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "GRACE_SECONDS", -1)
    environment = os.environ | {"TMPDIR": str(parent), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-c", LEAVES)
    users = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    left, used = (Path(user.stdout.readline().strip()) for user in users if user.stdout)
    for each in (left, used):
        (each / "kernel.cpp").write_text("")
    users[0].kill()
    users[0].communicate()
    assert left.is_dir()
    (left.parent / "notes").mkdir()
    (left.parent / ("a" * 64)).write_text("")  # a lock
    with temporary_folder("build") as own:
        assert sorted(os.listdir(left.parent)) == sorted([used.name, Path(own).name, "notes"])
        sweep(left.parent)
        assert Path(own).is_dir()
    users[1].communicate("\n")
    assert os.listdir(left.parent) == ["notes"]


FORKS = """
import os, threading
from ksgen.ownership import temporary_folder
is_made, is_done, folders = threading.Event(), threading.Event(), []
def build():
    with temporary_folder("build") as folder:
        folders.append(folder)
        is_made.set()
        is_done.wait()
builder = threading.Thread(target=build, daemon=True)
builder.start()
is_made.wait()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert os.path.isdir(folders[0])
    is_done.set()
    builder.join()
    assert not os.path.exists(folders[0])
"""


def test_a_forked_child_that_exits_leaves_the_folders_of_its_parent(parent: Path) -> None:
    environment = os.environ | {"TMPDIR": str(parent), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-c", FORKS)
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr


def test_a_lock_that_is_held_or_new_stays(tmp_path: Path) -> None:
    held, new = tmp_path / ("a" * 64), tmp_path / ("b" * 64)
    for each in (held, new):
        each.write_text("")
    old = time.time() - 2 * ownership.GRACE_SECONDS
    os.utime(held, (old, old))
    with held.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert held.exists()
    sweep(tmp_path)
    assert os.listdir(tmp_path) == [new.name]
