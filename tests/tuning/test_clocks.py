"""Clocks and temperatures, as NVML tells them."""

import sys

import pytest

from ksgen.tuning import worker
from ksgen.tuning.worker import Clocks
from tests.support.fake_gpu import FakeGpu


class FakeNvml:
    """What nvidia-ml-py shows of two GPUs."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815
    NVMLError = RuntimeError

    def nvmlInit(self) -> None: ...  # noqa: N802 (NVML's names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-one": 1}[uuid]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return ("Fake GPU", "Other GPU")[handle]

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return (1980, 1500)[handle]

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:  # noqa: N802
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return (0x1, 0x40)[handle]


@pytest.mark.parametrize(
    ("visible", "name", "index", "expected"),
    [
        ("", "Fake GPU", 0, Clocks(1980, 41, False)),
        ("", "Other GPU", 1, Clocks(1500, 41, True)),
        ("1,0", "Other GPU", 0, Clocks(1500, 41, True)),
        ("GPU-one", "Other GPU", 0, Clocks(1500, 41, True)),
        ("", "Other GPU", 0, Clocks()),  # not the one that CUDA means: nothing is better than another one's clocks
    ],
)
def test_clocks_are_those_of_the_gpu_that_cuda_means(
    visible: str, name: str, index: int, expected: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    worker._nvml.cache_clear()
    assert Clocks.of(FakeGpu(name=name, index=index)) == expected
    worker._nvml.cache_clear()


def test_without_nvml_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    worker._nvml.cache_clear()
    assert Clocks.of(FakeGpu()) == Clocks()
    worker._nvml.cache_clear()
