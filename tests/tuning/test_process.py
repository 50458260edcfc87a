"""A worker in a process of its own: how it ends, and that it ends with its parent."""

import errno
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from ksgen.devices import Found, list_devices
from ksgen.errors import DeviceError, ToolchainError
from ksgen.tuning.process import Worker
from tests.support.process_state import has_ended

HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")


@needs_opencl
def test_a_worker_that_is_stopped_answers_no_more(worker: Worker) -> None:
    stopped = Worker("opencl:0")
    stopped.stop()
    with pytest.raises(DeviceError, match="it was stopped"):
        stopped.facts()


ORPHAN = """
from ksgen.tuning.process import Worker
from tests.tuning.test_worker import JOB, broken, candidate
worker = Worker("opencl:0", ["tests.support.broken_kernels"], limit_s=3)
facts = worker.facts()
print(worker._child.pid, flush=True)
worker.compile(JOB.kernel, candidate(broken.HANGS_COMPILER), facts)
"""


@needs_opencl
def test_a_child_that_hangs_ends_by_itself_when_its_parent_was_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(600):
        if has_ended(child):
            return
        time.sleep(0.05)
    raise AssertionError(f"{child} still runs")


def test_a_child_imports_nothing_from_the_folder_it_starts_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tempfile.py").write_text("raise SystemExit('this is not the tempfile that was meant')")
    monkeypatch.setattr("ksgen.build.children.STARTED_IN", str(tmp_path))
    worker = Worker("native")
    try:
        assert worker.facts().kind == "native"
    finally:
        worker.close()


def test_a_folder_for_temporary_files_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(
        DeviceError,
        match=r"^the process that measures: temporary files cannot be written \(.*none.*\); TMPDIR",
    ):
        Worker("native").facts()


def test_a_program_that_embeds_python_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/editor")
    with closing(Worker("native")) as worker, pytest.raises(ToolchainError, match=r"^/opt/editor is no Python"):
        worker.facts()


def test_a_child_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    worker = Worker("native")
    monkeypatch.setattr(worker, "_start", start)
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(
            DeviceError, match=r"^the process that measures: it cannot be started \(.*temporarily unavailable\)"
        ):
            worker.facts()
    worker.close()
    assert len(os.listdir("/proc/self/fd")) <= files
