"""Processes on the stand-in machine: what they need in their environment, and what they print."""

import os
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from ksgen.build.toolchain import find_compiler
from tests.driver import pycuda, scripts
from tests.driver.build import NotHereError, find_toolkit, library_folder
from tests.driver.registry import registry_folder
from tests.emulator.build import cache_folder, is_installed

ROOT = Path(__file__).parents[2]
RUNTIMES = ("pycuda", "driver")
MOST_SECONDS = 120  # that a script takes


def environment(runtime: str = "driver") -> dict[str, str]:
    """The variables of a process on that machine, this one's among them. Raises NotHereError."""
    if "KSGEN_DRIVER_REGISTRY" in os.environ:  # this one runs there already
        return dict(os.environ)
    if sys.platform != "linux" or not is_installed("none"):
        raise NotHereError("the stand-in driver needs Linux and g++")
    paths = [str(ROOT)]
    if runtime == "pycuda":
        if not pycuda.site_folder().exists():
            raise NotHereError(pycuda.HINT)
        paths.append(str(pycuda.site_folder()))
    elif not _is_there("cuda.bindings"):
        raise NotHereError("cuda-bindings is not installed")
    if own := os.environ.get("PYTHONPATH"):
        paths.append(own)
    return os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join([str(library_folder()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "PYTHONPATH": os.pathsep.join(paths),
        "KSGEN_NVCC": str(_nvcc()),
        "KSGEN_DEVICE": runtime,
        "KSGEN_CACHE_DIR": str(registry_folder() / "cache"),  # no binary from elsewhere: the driver would not know it
        "KSGEN_CACHE_PATH": "",
        "KSGEN_PERMIT": "all",  # as if every family were proven there
        "PYCUDA_DISABLE_CACHE": "1",
        "KSGEN_WISDOM_DIR": str(registry_folder() / "wisdom"),
        "KSGEN_DRIVER_REGISTRY": str(registry_folder()),
        # the same for compilers, which get a folder for temporary files of their own
        "KSGEN_SIMT_CACHE": str(cache_folder()),
    }


def run(script: str, runtime: str = "driver", **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own; one that does not end within two minutes raises subprocess.TimeoutExpired."""
    return scripts.run(textwrap.dedent(script), environment(runtime) | variables, MOST_SECONDS)


def completed(script: str, runtime: str = "driver", **variables: str) -> subprocess.CompletedProcess[str]:
    """A script's process that ended well; the test is skipped where the machine cannot be built."""
    try:
        done = run(script, runtime, **variables)
    except NotHereError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    return done


def _is_there(module: str) -> bool:
    """Without importing more than its parents, which may be missing too."""
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # ValueError: it is kept from being imported
        return False


@cache
def _nvcc() -> Path:
    """The script that is nvcc there: questions go to the real one."""
    find_toolkit()
    real = find_compiler("nvcc").path  # type: ignore[union-attr]
    python = [sys.executable, "-m", "tests.driver.nvcc", real]
    script = cache_folder() / "nvcc"
    text = (
        f'#!/bin/sh\ncase "$1" in --version|--list-gpu-code) exec {shlex.quote(real)} "$@" ;; esac\nexec '
        f'{shlex.join(python)} "$@"\n'
    )
    if not script.exists() or script.read_text() != text:
        aside = script.with_suffix(f".{os.getpid()}")
        aside.write_text(text)
        aside.chmod(0o755)
        aside.rename(script)
    return script
