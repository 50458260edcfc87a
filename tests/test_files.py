"""Users' files: never more is read than can be meant, and what cannot be written whole leaves what was there."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ksgen.bench.rows import Log, read_rows, write_csv
from ksgen.build.bundle import Bundle, write_bundle
from ksgen.build.cache import Cache
from ksgen.build.request import Binary, Request, Resources
from ksgen.cli import cli
from ksgen.errors import KsgenError
from ksgen.files import check_writable, locked, read, replaced, write
from ksgen.ownership import UntrustedError
from ksgen.spec import load
from ksgen.wisdom import load_wisdom, wisdom_dir
from tests.support.mounts import fill, mounted
from tests.support.users import ANOTHER, needs_root

ROOT = Path(__file__).parents[1]
ENDLESS = Path("/dev/zero")
REQUEST = Request("text", "entry", "sm_80")
BINARY = Binary(
    b"binary", "entry", "sm_80", Resources(), {"compiler": "nvcc", "compiler_version": "13.0", "options": "[]"}
)

needs_endless = pytest.mark.skipif(not ENDLESS.exists(), reason="no /dev/zero on this system")


def test_a_file_of_the_most_bytes_is_read_and_one_of_more_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read(tmp_path / "file", 4) == b"1234"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read(tmp_path / "file", 3)


def test_a_pipe_in_the_place_of_a_file_of_ksgens_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        read(tmp_path / "pipe", 4, is_own=True)
    (tmp_path / "file").write_bytes(b"1234")
    assert read(tmp_path / "file", 4, is_own=True) == b"1234"
    (tmp_path / "file").chmod(0o666)
    with pytest.raises(UntrustedError, match="file: every user can write to it"):
        read(tmp_path / "file", 4, is_own=True)


@needs_root
def test_another_users_link_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("victim")
    os.chown(tmp_path / "second", ANOTHER, -1, follow_symlinks=False)
    for name in ("first", "second"):
        with pytest.raises(
            KsgenError, match=rf"{name}: cannot be written \(it belongs to user {ANOTHER}; make it yours"
        ):
            write(tmp_path / name, "new")
    assert ((tmp_path / "victim").read_text(), len(os.listdir(tmp_path))) == ("dear", 3)


def test_writing_replaces_keeps_the_mode_and_leaves_no_other_file(tmp_path: Path) -> None:
    write(tmp_path / "file", "⊗")
    assert (tmp_path / "file").read_bytes() == "⊗".encode()
    (tmp_path / "file").chmod(0o640)
    write(tmp_path / "file", b"2")
    assert ((tmp_path / "file").read_bytes(), (tmp_path / "file").stat().st_mode & 0o777) == (b"2", 0o640)
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_goes_on_leading_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    for text in ("new", "newer"):
        write(tmp_path / "link", text)
        assert ((tmp_path / "link").is_symlink(), (tmp_path / "there" / "file").read_text()) == (True, text)
    assert os.listdir(tmp_path / "there") == ["file"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    write(tmp_path / "pipe", "words")
    reader.join(10)
    assert (heard, (tmp_path / "pipe").is_fifo()) == (["words"], True)


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    half = replaced(tmp_path / "file")
    half.__enter__().write_text("half")
    assert not half.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # it goes on
    assert ((tmp_path / "file").read_text(), os.listdir(tmp_path)) == ("old", ["file"])


def test_a_lock_ends_with_its_block_even_if_a_forked_child_has_its_file(tmp_path: Path) -> None:
    end, write_end = os.pipe()
    with locked(tmp_path / "lock"):
        child = os.fork()
        if not child:
            os.close(write_end)
            os.read(end, 1)  # until the parent closes its end
            os._exit(0)
    try:
        with (tmp_path / "lock").open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while somebody holds the lock
    finally:
        os.close(write_end)
        assert os.waitpid(child, 0)[1] == 0


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for path, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "file", "No such file or directory"),
        (tmp_path / "file" / "file", "Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(KsgenError) as caught:
            write(path, "new")
        assert str(caught.value) == f"{path}: cannot be written ({why})"
    check_writable(tmp_path / "new")
    check_writable(Path("/dev/null"))
    for path in (tmp_path, tmp_path / "none" / "file", tmp_path / "file" / "file"):
        with pytest.raises(KsgenError, match="no file can be written there; choose an existing folder"):
            check_writable(path)


def test_an_input_is_no_place_for_an_output(tmp_path: Path) -> None:
    file, link = tmp_path / "spec.yaml", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    check_writable(tmp_path / "new", None, file, tmp_path / "none")
    check_writable(Path("/dev/null"), Path("/dev/null"))  # as standard input and output, which a terminal shares
    for path in (file, link):
        with pytest.raises(KsgenError) as caught:
            check_writable(path, tmp_path / "none", file)
        assert str(caught.value) == f"{path}: it is an input of this command; choose another file to write"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two contenders, without a measurement."""
    path = tmp_path_factory.mktemp("results") / "rows.jsonl"
    facts = {
        "key": "1",
        "identity": "1",
        "pattern": "1,2,3,4",
        "arithmetic": "float32",
        "precision": "float32",
        "status": "ok",
    }
    lines = [{"kind": "run", "device": "x"}, {"kind": "contender", **facts}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk with old files and no room."""
    with mounted(tmp_path / "disk") as disk:
        for name in ("old.png", "old.json", "old.ksb", "old.csv", "old.html", "old.md"):
            (disk / name).write_text("old")
        fill(disk)
        yield disk


@pytest.mark.parametrize("which", ["old", "new"])
def test_a_full_disk_leaves_the_old_file_or_none(
    which: str, full: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in full.iterdir()}
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(ROOT / "wisdom"))
    wisdom = full.parent / "wisdom.json"
    wisdom.write_text('{"device": "NVIDIA H200", "entries": []}')
    commands = {
        "png": ["show", "1,64,64,1", "--png"],
        "json": ["wisdom", "merge", str(wisdom), str(wisdom), "-o"],
        "md": ["bench", "report", str(results), "--markdown"],
    }
    for suffix, command in commands.items():
        path = full / f"{which}.{suffix}"
        refused = CliRunner().invoke(cli, [*command, str(path)])
        assert (str(refused.exception), suffix) == (f"{path}: cannot be written (No space left on device)", suffix)
    with pytest.raises(KsgenError, match=r"\.csv: cannot be written \(No space left on device\)"):
        write_csv(read_rows(results), full / f"{which}.csv")
    with pytest.raises(KsgenError, match=r"\.ksb: cannot be written \(No space left on device\)"):
        write_bundle(full / f"{which}.ksb", [(REQUEST, BINARY)])
    assert {path.name: path.read_bytes() for path in full.iterdir()} == before


def append_without_end(log: Log) -> None:
    while True:
        log.append("run", {"words": "w" * 997})


def test_a_log_on_a_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk, Log(disk / "rows.jsonl") as log:
        with pytest.raises(
            KsgenError,
            match=r"rows\.jsonl: cannot be written \(No space left on device\); its existing lines are intact",
        ):
            append_without_end(log)
        held = (disk / "rows.jsonl").read_bytes()
        assert held.endswith(b"}\n")
        assert {len(line) for line in held.splitlines()} == {len(held.splitlines()[0])}


@pytest.mark.exhaustive
@needs_endless
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wisdom", "import", "/dev/zero"], "/dev/zero: cannot be read (more than 67108864 bytes)"),
        (["wisdom", "merge", "/dev/zero", "/dev/zero"], "/dev/zero: cannot be read (more than 67108864 bytes)"),
        (["wisdom", "diff", "/dev/zero", "/dev/zero"], "/dev/zero: cannot be read (more than 67108864 bytes)"),
        (["wisdom", "show"], "shared/nvidia-h200.json: cannot be read (it is not a regular file)"),
        (["emit", "/dev/zero"], "/dev/zero: cannot be read (more than 4194304 bytes)"),
        (["bench", "report", "endless.jsonl"], "endless.jsonl: cannot be read (more than 268435456 bytes)"),
        (["bench", "report", "endless.csv"], "endless.csv: cannot be read (more than 268435456 bytes)"),
    ],
)
def test_a_file_without_an_end_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    for name in ("endless.jsonl", "endless.csv"):
        (tmp_path / name).symlink_to(ENDLESS)
    (tmp_path / "shared").mkdir()
    if arguments[-1] == "show":
        (tmp_path / "shared" / "nvidia-h200.json").symlink_to(ENDLESS)
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32)); from ksgen.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT), "KSGEN_WISDOM_DIR": str(tmp_path / "shared")},
    )  # fmt: skip
    assert (done.returncode, message in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


@needs_endless
def test_launchers_pass_wisdom_without_an_end_over(caplog: pytest.LogCaptureFixture) -> None:
    own = wisdom_dir() / "nvidia-endless.json"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.symlink_to(ENDLESS)
    try:
        assert load_wisdom("NVIDIA Endless").entries() == []
    finally:
        own.unlink()
    assert "nvidia-endless.json: cannot be read (" in caplog.text
    assert "it is not a regular file" in caplog.text


@pytest.mark.exhaustive
@needs_endless
@pytest.mark.parametrize("name", ["binary", "meta.json"])
@pytest.mark.parametrize("is_link", [True, False])
def test_a_cache_entry_without_an_end_is_set_aside(name: str, is_link: bool, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(REQUEST, BINARY)
    (file,) = tmp_path.glob(f"*/*/{name}")
    file.unlink()
    if is_link:
        file.symlink_to(ENDLESS)
    else:
        with file.open("wb") as opened:
            opened.truncate(2**28 + 1)
    assert len(cache.verify()) == 1
    assert cache.get(REQUEST) is None
    assert list(tmp_path.glob("*/*")) == []


@needs_endless
def test_no_bundle_is_read_that_says_it_is_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KsgenError, match=r"zero is not a ksgen bundle"):
        Bundle(ENDLESS)
    write_bundle(tmp_path / "a.ksb", [(REQUEST, BINARY)])
    monkeypatch.setattr("ksgen.build.bundle.MOST_BYTES_OF_MEMBER", 10)
    with pytest.raises(KsgenError, match=r"a\.ksb is damaged \(index\.json has \d+ bytes, more than 10\)"):
        Bundle(tmp_path / "a.ksb")


def test_specs_are_still_read() -> None:
    assert load(ROOT / "specs" / "vit.yaml").kernels


@pytest.mark.parametrize(
    "command",
    ["show", "tune", "bundle", "bench model", "bench paper", "bench report", "wisdom merge", "wisdom export"],
)
def test_help_says_that_an_older_file_is_replaced(command: str) -> None:
    said = " ".join(CliRunner().invoke(cli, [*command.split(), "--help"]).output.split())
    assert "older one is replaced" in said
