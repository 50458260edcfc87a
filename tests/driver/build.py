"""Builds the stand-in libcuda.so.1, once per content. What it needs: g++, and a CUDA toolkit's cuda.h."""

import hashlib
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from ksgen.build.toolchain import Nvcc, find_compiler
from ksgen.errors import ToolchainError
from tests.emulator.build import cache_folder, compiler, put
from tests.support.booked import booked

HERE = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O1", "-g0", "-Wall", "-Wextra", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1")


class NotHereError(Exception):
    """What this machine lacks for the stand-in driver, or for PyCUDA over it."""


@cache
def find_toolkit() -> Path:
    """The folder of nvcc's toolkit, which has cuda.h in its `include`. nvcc itself tells: what is on PATH may be a
    script.
    """
    try:
        nvcc = find_compiler("nvcc")
    except ToolchainError as error:
        raise NotHereError(str(error)) from None
    assert isinstance(nvcc, Nvcc)
    planned = subprocess.run(
        [nvcc.path, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
    )
    found = re.search(r"^#\$ _HERE_=(.*)$", planned.stderr, re.MULTILINE)
    toolkit = Path(found[1]).parent if found else Path()
    if not (toolkit / "include" / "cuda.h").exists():
        raise NotHereError(
            f"{nvcc.path} comes without cuda.h; install a CUDA toolkit, or nvidia-cuda-runtime next to nvidia-cuda-nvcc"
        )
    return toolkit


@cache
def library_folder() -> Path:
    """The folder that holds libcuda.so.1, built now if it is not there."""
    sources = sorted((HERE / "library").iterdir())
    include = find_toolkit() / "include"
    content = [
        path.read_bytes() for path in (*sources, HERE.parent / "emulator/runtime/tensor_map.h", include / "cuda.h")
    ]
    digest = hashlib.sha256(b"\0".join([" ".join(_FLAGS).encode(), *content])).hexdigest()[:32]
    folder = cache_folder() / f"driver-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            built = Path(scratch, "built")
            built.mkdir()
            # As one source, which reads the headers once. What is unsupported has the names of cuda.h without its
            # types.
            together = "".join(
                f'#include "{path}"\n' for path in sources if path.suffix == ".cpp" and path.name != "unsupported.cpp"
            )
            command = [
                compiler(),
                *_FLAGS,
                f"-I{include}",
                "-x",
                "c++",
                "-",
                str(HERE / "library" / "unsupported.cpp"),
                "-ldl",
            ]
            with booked("g++ of the stand-in driver"):
                done = subprocess.run(
                    [*command, "-o", str(built / "libcuda.so.1")],
                    input=together,
                    capture_output=True,
                    text=True,
                    check=False,
                )
            if done.returncode != 0:
                raise RuntimeError(f"the stand-in driver does not build: {done.stderr}")
            put(built, folder)
    return folder
