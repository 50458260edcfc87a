"""The driver's runtime where the bindings, or the driver, are missing."""

import sys

import pytest

from ksgen.devices import cuda_driver
from ksgen.devices.base import UnavailableError


def test_missing_bindings_are_reported(monkeypatch):
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        UnavailableError, match=r"CUDA driver: cuda-bindings cannot be imported .*; pip install .*\[cuda\]"
    ):
        cuda_driver._driver.__wrapped__()


def test_a_missing_driver_is_reported_before_bindings_are_imported(monkeypatch):
    def no_library():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "load_driver", no_library)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        UnavailableError, match=r"libcuda cannot be loaded \(libcuda\.so\.1.*\); install NVIDIA's driver"
    ):
        cuda_driver._driver.__wrapped__()
