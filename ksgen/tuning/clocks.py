"""Detects by NVML whether a GPU's clocks or temperature moved during a measurement. Without nvidia-ml-py it detects
nothing.

Reads only: clocks are never locked or set.
"""

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from ksgen.devices.base import Device

CLOCK_SHARE = 0.03  # largest relative change of the multiprocessors' clock that is ignored
DEGREES = 5  # largest change of the temperature that is ignored


@dataclass(frozen=True)
class Clocks:
    """NVML's readings at one moment; None for those it lacks."""

    megahertz: int | None = None  # clock of the multiprocessors
    degrees: int | None = None  # Celsius
    slowed: bool = False  # whether heat or lack of power limits the clocks

    @classmethod
    def of(cls, device: Device) -> "Clocks":
        """Read the clocks of a device now; no readings without NVML, or for a device that it does not know."""
        if device.kind != "cuda" or (found := _nvml(device.index, device.name)) is None:
            return cls()
        nvml, handle = found
        slow = (
            nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        try:
            return cls(
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slow),
            )
        except nvml.NVMLError:
            return cls()

    def moved_since(self, before: "Clocks") -> set[str]:
        """Notes for a figure that was measured between the two readings."""
        notes = set()
        if self.megahertz and before.megahertz and abs(self.megahertz / before.megahertz - 1) > CLOCK_SHARE:
            notes.add("clocks moved")
        if self.degrees and before.degrees and abs(self.degrees - before.degrees) > DEGREES:
            notes.add("temperature moved")
        if self.slowed or before.slowed:
            notes.add("clocks were held down")
        return notes


@cache
def _nvml(index: int, name: str) -> tuple[Any, Any] | None:
    """NVML and its handle of CUDA's GPU `index`; None without NVML, or if its GPU has another name than CUDA's."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        shown = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        which = shown[index] if index < len(shown) else str(index)
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(which)) if which.isdecimal() else by_uuid(which)
        found = pynvml.nvmlDeviceGetName(handle)
    except (pynvml.NVMLError, AttributeError):
        return None
    return (pynvml, handle) if (found.decode() if isinstance(found, bytes) else found) == name else None
