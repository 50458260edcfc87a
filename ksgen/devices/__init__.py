"""Finds the device to run on: `KSGEN_DEVICE`, or the first that works.

The order of preference is: PyCUDA, the CUDA driver, an OpenCL GPU, the processor, other OpenCL devices.

Each runtime is one module with `found()` and `open_device(index)`, imported only when it is needed.
"""

import os
from collections.abc import Collection, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from ksgen.devices.base import Buffer, Device, DeviceLimits, Found, Missing, UnavailableError
from ksgen.devices.opencl_drivers import may_show_gpus
from ksgen.errors import DeviceError, warn
from ksgen.install import supported_cuda
from ksgen.locks import new_reentrant_lock
from ksgen.values import excerpt

__all__ = [
    "Buffer", "Device", "DeviceLimits", "Found", "Missing", "UnavailableError", "device_for",
    "find_device", "list_devices",
]  # fmt: skip

# in order of preference; but a GPU of OpenCL comes before the processor
_MODULES = {"pycuda": "cuda_pycuda", "driver": "cuda_driver", "native": "native", "opencl": "opencl"}
_RUNTIMES = {"cuda": ("pycuda", "driver"), **{runtime: (runtime,) for runtime in _MODULES}}
_ACCEPTED = (
    "accepted, also as KSGEN_DEVICE: cuda, pycuda, driver, native, opencl, each with or without a number "
    "(opencl:1), or a part of a name"
)


_opening = new_reentrant_lock()


def find_device(name: str | None = None) -> Device:
    """The device named by `name` or `KSGEN_DEVICE`, else the best one.

    Every call returns the same object, until the user destroys the CUDA context that it works in.
    """
    if not isinstance(name, str | None):
        raise DeviceError(f"device={excerpt(name)}; {_ACCEPTED}")
    with _opening:  # several threads that ask for the first time get the same object, too
        wanted = name or os.environ.get("KSGEN_DEVICE", "")
        if not _find(wanted).is_open:
            _find.cache_clear()
        return _find(wanted)


def device_for(place: Any) -> Device:
    """The device that reaches an array's memory (`ArrayView.device`); `find_device()` for host arrays."""
    if place == "host":
        return find_device()
    kind, where = place
    if kind == "opencl":
        device: Device = import_module("ksgen.devices.opencl").for_context(where)
        return device
    asked = os.environ.get("KSGEN_DEVICE", "").partition(":")[0].lower()
    runtime = asked if asked in ("pycuda", "driver") else "cuda"
    return find_device(runtime if where is None else f"{runtime}:{where}")


def list_devices() -> list[Found | Missing]:
    """Every device of every runtime, and why a runtime has none. Never raises."""
    lines: list[Found | Missing] = []
    for runtime in _MODULES:
        try:
            lines += _module(runtime).found()
        except UnavailableError as absent:
            lines.append(Missing(runtime, absent.why, absent.remedy))
        except Exception as error:  # a broken driver must not hide the others
            lines.append(Missing(runtime, f"{type(error).__name__}: {error}", ""))
    return lines


@cache
def _find(wanted: str) -> Device:
    if not wanted:
        return _find_best()
    word, colon, number = wanted.lower().partition(":")
    if word not in _RUNTIMES:
        return _find_by_name(wanted)
    if colon and not (number.isdecimal() and len(number) < 10):
        raise DeviceError(f"device {excerpt(wanted)}: {excerpt(number)} is not a number; {_ACCEPTED}")
    return next(_opened(_RUNTIMES[word], int(number or 0), []))


def _find_best() -> Device:
    """Return a GPU of any runtime, else the processor. OpenCL opens slowly: it is tried only if it may have a GPU.

    Warns if OpenCL runs the processor's kernels because ksgen's own cannot be compiled.
    """
    reasons: list[str] = []
    devices = _opened(_MODULES, 0, reasons)
    first = next(devices)
    if first.kind == "opencl" and first.limits.is_cpu:
        warn(f"{reasons[-1]}. OpenCL runs the kernels instead; KSGEN_DEVICE=opencl chooses it without this message")
    if first.kind != "native" or not may_show_gpus():
        return first
    return next((device for device in devices if not device.limits.is_cpu), first)


def _opened(runtimes: Collection[str], index: int, reasons: list[str]) -> Iterator[Device]:
    """Yield the device with this index of each runtime that has one. If none has, one `DeviceError` says why.

    `reasons` gets the reason of each runtime that has none.
    """
    opened = 0
    for runtime in runtimes:
        try:
            device: Device = _module(runtime).open_device(index)
        except DeviceError as error:
            reasons.append(str(error))
        else:
            opened += 1
            yield device
    if not opened and set(runtimes) <= set(_RUNTIMES["cuda"]) and not supported_cuda():
        raise DeviceError("no CUDA device: this machine has no NVIDIA driver; install it, or take native or opencl")
    if not opened:
        raise DeviceError(reasons[0] if len(reasons) == 1 else f"no device: {'. '.join(reasons)}")


def _find_by_name(wanted: str) -> Device:
    devices = [line for line in list_devices() if isinstance(line, Found)]
    for candidate in devices:
        if wanted.lower() in f"{candidate.name} {candidate.target}".lower():
            return _find(candidate.selector)
    names = ", ".join(f"{device.selector} ({device.name})" for device in devices) or "none"
    raise DeviceError(f"device {excerpt(wanted)}: none is called that; found: {names}; {_ACCEPTED}")


def _module(runtime: str) -> Any:
    return import_module(f"ksgen.devices.{_MODULES[runtime]}")
