"""Fixtures that compile a processor's kernels in less time: for tests of what calls them, for emulated matrix tiles,
and for OpenCL drivers.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ksgen.build.host import HostCompiler
from ksgen.devices import find_device, opencl
from ksgen.errors import DeviceError
from tests.support.compilers import hasty

_compilers: dict[str, HostCompiler] = {}  # by level; one of each per process


@pytest.fixture(autouse=True)
def compiles_hastily(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile hastily in this process, which found its processor before, and in processes that it starts.

    Tests marked `optimized` are exceptions.
    """
    with _compiling(request, tmp_path_factory, "-O1"):
        yield


@pytest.fixture(autouse=True)
def compiles_unoptimized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Except for tests marked `optimized`. GCC takes seconds to optimize emulated tiles, and a fifth of one without."""
    with _compiling(request, tmp_path_factory, "-O0"):
        yield


@pytest.fixture(autouse=True)
def drivers_compile_unoptimized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Except for tests marked `optimized`. PoCL takes a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("optimized"):
            patch.setattr(opencl, "_BUILD_OPTIONS", (*opencl._BUILD_OPTIONS, "-cl-opt-disable"))
        yield


@contextmanager
def _compiling(request: pytest.FixtureRequest, folders: pytest.TempPathFactory, level: str) -> Iterator[None]:
    if request.node.get_closest_marker("optimized"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        try:
            processor = find_device("native")
        except DeviceError:
            pass  # there is no compiler: tests that need one say so
        else:
            if level not in _compilers:
                _compilers[level] = HostCompiler((str(hasty(folders.mktemp("compiler"), level)),))
            patch.setattr(processor, "compiler", lambda: _compilers[level])
            patch.setenv("KSGEN_CXX", shlex.join(_compilers[level].command))
        yield
