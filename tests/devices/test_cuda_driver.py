"""The driver's runtime where the bindings, or the driver, are missing."""

import sys
from types import SimpleNamespace

import pytest

from ksgen.devices import cuda_driver
from ksgen.devices.base import UnavailableError


def test_missing_bindings_are_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        UnavailableError, match=r"CUDA driver: cuda-bindings cannot be imported .*; pip install .*\[cuda\]"
    ):
        cuda_driver._driver.__wrapped__()


def test_a_missing_driver_is_reported(monkeypatch):
    def no_library(flags):
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    stand_in = SimpleNamespace(driver=SimpleNamespace(cuInit=no_library))
    monkeypatch.setitem(sys.modules, "cuda.bindings", stand_in)
    with pytest.raises(
        UnavailableError, match=r"libcuda cannot be loaded \(libcuda\.so\.1.*\); install NVIDIA's driver"
    ):
        cuda_driver._driver.__wrapped__()
