"""PyCUDA's runtime where there is no PyCUDA."""

import sys

import pytest

from ksgen.devices import cuda_pycuda
from ksgen.devices.base import UnavailableError


def test_a_missing_pycuda_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(
        UnavailableError, match=r"PyCUDA: it cannot be imported .*; install a CUDA .*: pip install pycuda"
    ):
        cuda_pycuda._pycuda.__wrapped__()
