"""Fixtures for tests of builds: a private cache, and a fresh search for compilers."""

import pytest

from ksgen.build import toolchain
from ksgen.build.cache import Cache


@pytest.fixture
def nothing_found_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("KSGEN_NVCC", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "KSGEN_COMPILE_SECONDS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain, "_unfit", {})
    toolchain._find.cache_clear()


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")
