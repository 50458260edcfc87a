"""Compilers as children: a limit in time, an end together with what they start, and no start after a stop."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ksgen.build.children import Children
from ksgen.build.host import find_host_compiler, host_target
from ksgen.build.toolchain import Nvcc
from ksgen.errors import ToolchainError
from tests.support.compilers import SOURCE, fake_nvcc
from tests.support.mounts import fill, mounted
from tests.support.process_state import has_ended

pytestmark = pytest.mark.usefixtures("nothing_found_yet")


def test_compiler_past_its_time_is_ended_with_what_it_started(monkeypatch, tmp_path):
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc", f"sleep 600 & echo $! > {tmp_path}/pid; wait")))
    assert compiler.targets()
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "0.5")
    with pytest.raises(ToolchainError, match=r"it had not finished after 0.5 s \(KSGEN_COMPILE_SECONDS\)"):
        compiler.compile(SOURCE, "scale", "sm_90a")
    assert has_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("own", ["", "setsid "])
def test_output_that_a_process_left_open_is_not_waited_for_beyond_the_limit(monkeypatch, tmp_path, own):
    """The compiler itself has ended. A process in a group of its own is no child to end."""
    if own and not shutil.which("setsid"):
        pytest.skip("no setsid on this system")
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "0.5")
    with pytest.raises(ToolchainError, match=r"it had not finished after 0.5 s \(KSGEN_COMPILE_SECONDS\)"):
        Children().run(("sh", "-c", f"{own}sleep 600 & echo $! > {tmp_path}/pid"))
    process = int((tmp_path / "pid").read_text())
    assert has_ended(process) == (not own)
    if own:
        os.kill(process, signal.SIGKILL)


def test_time_limit_must_be_a_number(monkeypatch, tmp_path):
    for text in ("soon", "nan", "inf", "-inf", "1e18", "0", "-1", "9" * 400):
        monkeypatch.setenv("KSGEN_COMPILE_SECONDS", text)
        with pytest.raises(
            ToolchainError, match=r"must be a number of seconds, more than 0 and at most 1000000$"
        ) as caught:
            Children().run(("touch", str(tmp_path / "started")))
        assert str(caught.value).startswith(f"KSGEN_COMPILE_SECONDS='{text[:9]}")
    assert not (tmp_path / "started").exists()
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "1e6")
    assert Children().run(("true",)).returncode == 0


def test_stopped_children_end_and_no_other_starts(tmp_path):
    children = Children()
    started = tmp_path / "started"
    ended = []
    script = f"touch {started}; exec sleep 600"
    thread = threading.Thread(target=lambda: ended.append(children.run(("sh", "-c", script))))
    thread.start()
    while not started.exists():
        pass
    children.stop()
    thread.join()
    assert ended[0].returncode == -9
    with pytest.raises(ToolchainError, match="true was not started: the build is being stopped"):
        children.run(("true",))


def test_command_that_does_not_exist():
    with pytest.raises(ToolchainError, match=r"/no/such/nvcc does not run: .*No such file"):
        Children().run(("/no/such/nvcc",))


COMPILES = """
import sys
from ksgen.build.children import Children, working_folder
with working_folder("kernel") as folder:
    Children().run(("sh", "-c",
        f"sleep 600 & echo $! $$ > {sys.argv[1]}/new; mv {sys.argv[1]}/new {sys.argv[1]}/pids; wait"), folder)
"""


def test_compiler_ends_with_a_process_that_is_killed(tmp_path):
    user = subprocess.Popen(
        (sys.executable, "-c", COMPILES, str(tmp_path)),
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    while not (tmp_path / "pids").exists():
        time.sleep(0.01)
    user.kill()
    user.wait()
    for process in (tmp_path / "pids").read_text().split():
        deadline = time.monotonic() + 60
        while not has_ended(int(process)):
            assert time.monotonic() < deadline, f"process {process} still runs"
            time.sleep(0.01)


def test_compiler_that_ended_leaves_no_process_behind():
    before = children_of_this()
    assert Children().run(("sh", "-c", "echo done")).log == "done\n"
    assert children_of_this() == before


def children_of_this() -> set[str]:
    """The child processes of all threads."""
    return {each for file in Path("/proc/self/task").glob("*/children") for each in file.read_text().split()}


def test_full_disk_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "disk"))
    with mounted(tmp_path / "disk") as disk:
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        fill(disk)
        with pytest.raises(
            ToolchainError,
            match=r"^k: temporary files cannot be written \(.*No space left.*\); TMPDIR=.*/disk; accepted: a",
        ):
            find_host_compiler().compile_whole("int x;" * 10_000, "k", host_target())
