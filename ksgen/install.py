"""Finds the extras that fit this machine's driver, and the command that installs one. The command follows how ksgen was
installed: from a checkout, a wheel, a repository or an index.

`python -m ksgen.install` prints the extras, for the Makefile; it needs Python alone.
"""

import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

NEWEST = 13  # the CUDA of the extra `cuda`; older drivers need `cuda12`
_OLDEST_GPU = 75  # oldest compute capability that CUDA 13 compiles for
# A C++ compiler needs these for kernels on the processor: GCC before 12 lacks the type, and Clang may find no C++
# library.
_TRIAL = b"#include <array>\nstd::array<_Float16, 8> x;\n"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@cache
def supported_cuda() -> int:
    """The newest CUDA that this machine's driver supports (12040: 12.4); 0 without a driver. Touches no GPU."""
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        load_driver().cuDriverGetVersion(ctypes.byref(version))
    return version.value


@cache
def capabilities() -> list[int]:
    """The compute capability of each GPU that the driver shows (75: 7.5)."""
    found, count, value = [], ctypes.c_int(), ctypes.c_int()
    with suppress(OSError, AttributeError):
        driver = load_driver()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return []
        for index in range(count.value):
            parts = []
            for attribute in (_MAJOR, _MINOR):
                driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
                parts.append(value.value)
            found.append(10 * parts[0] + parts[1])
    return found


def cuda_extra() -> str:
    """The extra whose NVRTC supports this machine's GPUs, and whose binaries its driver loads."""
    is_older = 0 < supported_cuda() < NEWEST * 1000 or min(capabilities(), default=_OLDEST_GPU) < _OLDEST_GPU
    return "cuda12" if is_older else "cuda"


def extras() -> str:
    """Extras that this machine needs, separated by commas.

    A GPU needs cuda-bindings, and PyCUDA too if nvcc is on PATH. A machine without GPU and C++ compiler needs OpenCL.
    """
    if not capabilities():
        return "" if has_compiler() else "cpu"
    return f"pycuda,{cuda_extra()}" if shutil.which("nvcc") else cuda_extra()


def has_compiler() -> bool:
    """Whether a C++ compiler here builds kernels for the processor: the one that KSGEN_CXX names, or one on PATH."""
    named = os.environ.get("KSGEN_CXX")
    for command in [named] if named else ["c++", "g++", "clang++"]:
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):  # the command is missing, misquoted, or hangs
            words = [*shlex.split(command), "-std=gnu++17", "-fsyntax-only", "-x", "c++", "-"]
            tried = subprocess.run(words, input=_TRIAL, capture_output=True, timeout=60)
            if tried.returncode == 0:
                return True
    return False


def load_driver() -> ctypes.CDLL:
    """NVIDIA's driver; `OSError` where there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def install_line(extra: str) -> str:
    """Command that installs an extra, such as `pip install -e '.[cpu]' in ksgen's checkout`."""
    from importlib import metadata

    try:
        fields = metadata.distribution("ksgen").read_text("direct_url.json")
        origin = json.loads(fields) if fields else {}
    except (metadata.PackageNotFoundError, ValueError):
        is_checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
        origin = {"dir_info": {"editable": True}} if is_checkout else {}
    if "dir_info" in origin:
        flag = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {flag}'.[{extra}]' in ksgen's checkout"
    if "vcs_info" in origin:
        version = origin["vcs_info"]
        return f"pip install 'ksgen[{extra}] @ {version['vcs']}+{origin['url']}@{version['commit_id']}'"
    if "archive_info" in origin:
        place = urlsplit(origin["url"])
        if place.scheme == "file":
            return f"pip install {shlex.quote(f'{unquote(place.path)}[{extra}]')}"
        return f"pip install 'ksgen[{extra}] @ {origin['url']}'"
    return f"pip install 'ksgen[{extra}]'"


if __name__ == "__main__":
    print(extras())
