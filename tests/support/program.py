"""`ksgen` with all that its console script does, here or as a program of its own; a small spec; and what this machine
lacks.
"""

import contextlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ksgen import cli
from ksgen.build.toolchain import find_compiler
from ksgen.devices import Found, list_devices
from ksgen.errors import ToolchainError

ROOT = Path(__file__).parents[2]
SMALL = 'defaults: {precision: [float32, float16]}\nkernels: ["2,9,5,3"]\n'


def ksgen(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The console script in this process: a program of its own spends most of its time on imports."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", ["ksgen", *arguments])
        patch.setenv("KSGEN_COMPILE", "wait")  # what the script sets is unset again
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def ksgen_program(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "tests.support.short_series", *arguments], cwd=cwd, env={**os.environ,
            "PYTHONPATH": path, **environment},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def has_device() -> bool:
    return any(isinstance(line, Found) for line in list_devices())


def has_compiler() -> bool:
    try:
        find_compiler()
    except ToolchainError:
        return False
    return True


needs_device = pytest.mark.skipif(not has_device(), reason="no GPU and no OpenCL device")
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="neither nvcc nor NVRTC")
