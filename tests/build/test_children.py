"""Compilers as children: a limit in time, an end together with what they start, and no start after a stop."""

import threading
from pathlib import Path

import pytest

from ksgen.build.children import Children
from ksgen.build.toolchain import Nvcc
from ksgen.errors import ToolchainError
from tests.support.compilers import SOURCE, fake_nvcc

pytestmark = pytest.mark.usefixtures("nothing_found_yet")


def test_compiler_past_its_time_is_ended_with_what_it_started(monkeypatch, tmp_path):
    compiler = Nvcc(str(fake_nvcc(tmp_path / "nvcc", f"sleep 600 & echo $! > {tmp_path}/pid; wait")))
    assert compiler.targets()
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "0.5")
    with pytest.raises(ToolchainError, match=r"it had not finished after 0.5 s \(KSGEN_COMPILE_SECONDS\)"):
        compiler.compile(SOURCE, "scale", "sm_90a")
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_time_limit_must_be_a_number(monkeypatch):
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "soon")
    with pytest.raises(ToolchainError, match="KSGEN_COMPILE_SECONDS='soon' must be a number of seconds"):
        Children().run(("true",))


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


def is_gone(process: int) -> bool:
    """Ended; a process that nobody waits for may stay listed as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True
