"""Builds PyCUDA from its source on PyPI for the stand-in driver, once per version, Python and toolkit.

It lies in the user's cache, not in the environment: a PyCUDA that finds no driver there would only be in the way.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

from tests.driver.build import NotHereError, find_toolkit, library_folder
from tests.emulator.build import put

VERSION = "2026.1"
HINT = "PyCUDA is not built for the stand-in driver; build it with: make pycuda"
_NEEDS = ("pytools", "siphash24", "mako")  # in addition to ksgen's own requirements
_PROFILER = "nvidia-cuda-profiler-api"  # a header of PyCUDA's that NVIDIA's packages have apart from nvcc

# PyCUDA's build reads this file in the home folder. By default it compiles sources sequentially, and the 33 of Boost
# apart, each of which reads the same headers for a second.
_CONFIGURATION = """
import os
from concurrent.futures import ThreadPoolExecutor
from distutils.ccompiler import CCompiler

CUDA_ROOT, CUDA_INC_DIR, CUDADRV_LIB_DIR = {toolkit!r}, {include!r}, [{library!r}]
CUDA_ENABLE_CURAND = False
CXXFLAGS = ["-w", "-O0", "-g0"]

_compile = CCompiler.compile

def compile_side_by_side(self, sources, **options):
    if boost := [source for source in sources if "/libs/" in source]:
        with open("boost_together.cpp", "w") as together:
            together.writelines(f'#include "{{os.path.abspath(source)}}"\\n' for source in boost)
        sources = [*(source for source in sources if source not in boost), "boost_together.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(lambda source: _compile(self, [source], **options), sources), [])

CCompiler.compile = compile_side_by_side
"""


def site_folder() -> Path:
    """Return the folder for PYTHONPATH that holds PyCUDA, or will hold it."""
    key = "\0".join([VERSION, sys.version, str(find_toolkit()), _CONFIGURATION, *_NEEDS])
    root = Path(os.environ.get("KSGEN_PYCUDA_FOLDER") or platformdirs.user_cache_path("ksgen-tests"))
    return root / f"pycuda-{VERSION}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def build() -> Path:
    folder = site_folder()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        home, site = Path(scratch, "home"), Path(scratch, "site")
        home.mkdir()
        _configure(home)
        _install(site, home, "--no-binary", "pycuda", f"pycuda=={VERSION}", *_NEEDS)
        put(site, folder)
    return folder


def _configure(home: Path) -> None:
    toolkit = find_toolkit()
    include = [str(toolkit / "include")]
    if not (toolkit / "include" / "cudaProfiler.h").exists():
        _install(home, home, _PROFILER)
        include += [str(found.parent) for found in home.rglob("cudaProfiler.h")]
    (home / "libcuda.so").symlink_to(library_folder() / "libcuda.so.1")
    text = _CONFIGURATION.format(toolkit=str(toolkit), include=include, library=str(home))
    (home / ".aksetup-defaults.py").write_text(text, encoding="utf-8")


def _install(target: Path, home: Path, *packages: str) -> None:
    """Install with another home folder and the user's pip settings. Pip's cache may hold another build of PyCUDA."""
    settings = os.environ.get("PIP_CONFIG_FILE") or str(Path("~/.config/pip/pip.conf").expanduser())
    variables = os.environ | {"HOME": str(home), "PIP_CONFIG_FILE": settings, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-cache-dir",
        "--no-deps",
        "--target",
        str(target),
        *packages,
    ]
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise NotHereError(f"{' '.join(command)}\n{done.stdout[-4000:]}")
