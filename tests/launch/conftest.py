"""What tests of launchers are given: a GPU that is an emulator, and launchers on it."""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.devices import device_for, find_device
from ksgen.devices.base import Device
from ksgen.errors import DeviceError
from ksgen.launch import arrays, streams
from ksgen.launch.choice import choice_by_name, limits_of
from ksgen.launch.planner import Planner
from ksgen.launcher import Launcher
from tests.emulator import is_installed
from tests.support.fake_gpu import FakeGpu, FakeTensor, TextCompiler
from tests.support.hasty import compiles_hastily
from tests.support.host_memory import processor
from tests.support.launching import SHAPE, plan_afresh

__all__ = ["compiles_hastily"]


@pytest.fixture
def compiler() -> TextCompiler:
    return TextCompiler()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: TextCompiler) -> FakeGpu:
    """The device of every CUDA array, with a planner and a cache of its own."""
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    fake = FakeGpu(compiles=compiler)
    monkeypatch.setattr(streams, "device_for", lambda place: fake if place[0] == "cuda" else device_for(place))
    monkeypatch.setattr(streams, "torch_stream", lambda handle, index: (handle, index))
    plan_afresh(monkeypatch)
    monkeypatch.setitem(arrays._readers, FakeTensor, FakeTensor.read)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    return fake


@pytest.fixture(params=["processor", pytest.param("driver", marks=[pytest.mark.gpu, pytest.mark.stand_in])])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device of two cores that shares the host's memory, or one to which arrays are copied: the one that launchers
    take.
    """
    try:
        found = processor() if request.param == "processor" else find_device(request.param)
    except DeviceError as absent:
        pytest.skip(str(absent))
    monkeypatch.setenv("KSGEN_DEVICE", found.runtime)
    monkeypatch.setattr(found, "limits", replace(found.limits, multiprocessors=2))
    return found


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams that PyTorch is asked to give memory on, where those are not its current one."""
    streams = []

    class Cuda:
        @staticmethod
        def ExternalStream(handle: int, device: Any) -> int:  # noqa: N802  (PyTorch's name)
            return handle

        @staticmethod
        @contextlib.contextmanager
        def stream(handle: int) -> Any:
            streams.append(handle)
            yield

    monkeypatch.setattr(FakeTensor, "device", "cuda:0", raising=False)
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=Cuda, is_grad_enabled=lambda: False, Tensor=FakeTensor)
    )
    return streams


@pytest.fixture
def ks() -> Launcher:
    return Launcher(*SHAPE)


@pytest.fixture
def permuting(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Provide a launcher whose kernels permute X into a workspace, multiply there, and permute Y back."""

    def choose(_: Planner, device: Any, kernel: Any, batch: int, aligned: bool = True) -> Any:
        return choice_by_name("wgmma_permuted", kernel, batch, limits_of(device))

    monkeypatch.setattr(Planner, "choice", choose)
    return Launcher(1, 16, 8, 2)


@pytest.fixture
def forget_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the readers that were found for each library's arrays."""
    monkeypatch.setattr(arrays, "_readers", {})
