"""What the CUDA driver knows and arrays and PyCUDA do not tell: asked by ctypes, where the process has the driver anyway."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_CONTEXT, _DEVICE_ORDINAL = 1, 9  # CU_POINTER_ATTRIBUTE_...
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def device_of(pointer: int) -> int | None:
    """Which of several GPUs the memory lies on; None where there are no several, or the driver does not know it."""
    if (driver := _with_several_gpus()) is None:
        return None
    index = ctypes.c_int()
    unknown = driver.cuPointerGetAttribute(ctypes.byref(index), _DEVICE_ORDINAL, ctypes.c_uint64(pointer))
    return None if unknown else index.value


def is_in_primary_context(pointer: int, index: int) -> bool:
    """Whether memory of a GPU was allocated in its primary context, or nobody knows."""
    driver, own, primary = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuPointerGetAttribute(ctypes.byref(own), _CONTEXT, ctypes.c_uint64(pointer)):
        return True
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), index):
        return True
    driver.cuDevicePrimaryCtxRelease_v2(index)
    return own.value == primary.value


def is_capturing(handle: int) -> bool:
    """Whether a stream that is not the default one records a CUDA graph. Its context has to be current."""
    status = ctypes.c_int()
    return not _driver().cuStreamIsCapturing(ctypes.c_void_p(handle), ctypes.byref(status)) and status.value != 0


@contextmanager
def beside_captures() -> Iterator[None]:
    """What is collected as garbage while a graph is recorded does not spoil the recording."""
    mode = ctypes.c_int(_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _with_several_gpus() -> Any:
    count = ctypes.c_int()
    try:
        driver = _driver()
    except OSError:
        return None
    driver.cuInit(0)  # by now somebody has, or there is nothing to count
    driver.cuDeviceGetCount(ctypes.byref(count))
    return driver if count.value > 1 else None
