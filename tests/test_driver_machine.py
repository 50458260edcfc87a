"""The environment of the stand-in machine's processes, where something that it needs is not installed."""

import sys

import pytest

from tests.driver import NotHereError, environment
from tests.simt.build import is_installed


@pytest.mark.skipif(sys.platform != "linux" or not is_installed("none"), reason="the stand-in driver needs Linux and g++")
@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_without_cuda_bindings_that_is_said(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KSGEN_DRIVER_REGISTRY", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(NotHereError, match=r"^cuda-bindings is not installed$"):
        environment("driver")
