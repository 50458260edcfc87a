"""The native device for a test: chosen, or the test is skipped; and as if it had matrix tiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.devices import find_device
from ksgen.devices.base import Device
from ksgen.errors import DeviceError
from ksgen.launch.planner import PLANNER


def chosen_native(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Choose the native device for launchers, and for code that asks for the tests' `processor()`."""
    try:
        found = find_device("native")
    except DeviceError as absent:
        pytest.skip(str(absent))
    monkeypatch.setenv("KSGEN_TEST_PROCESSOR", "native")
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    return found


@pytest.fixture
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A native device without matrix tiles, so that a test is the same on all processors."""
    device = chosen_native(monkeypatch)
    monkeypatch.setattr(device, "limits", replace(device.limits, tiles=()))
    PLANNER.forget()
    yield
    PLANNER.forget()


@contextmanager
def saying_it_has_tiles(device: Device, wisdom: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Yield the device with tiles in its limits and without wisdom."""
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(wisdom))
    monkeypatch.setattr(device, "limits", replace(device.limits, tiles=("bf16", "f16")))
    PLANNER.forget()
    yield device
    monkeypatch.undo()
    PLANNER.forget()
