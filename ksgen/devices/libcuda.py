"""What the CUDA driver can and PyCUDA and cuda-bindings do not show, or not well: by ctypes, where the process has the driver anyway."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ksgen.devices.base import MAP_BYTES
from ksgen.errors import DeviceError

if TYPE_CHECKING:
    from ksgen.families import TensorMap

_CONTEXT, _DEVICE_ORDINAL = 1, 9  # CU_POINTER_ATTRIBUTE_...
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ELEMENT = {2: 1, 4: 2}  # bytes -> CU_TENSOR_MAP_DATA_TYPE_UINT16, _UINT32: bits are moved, never converted
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CU_TENSOR_MAP_SWIZZLE_...
_NOT_INTERLEAVED, _LINES_OF_128_BYTES, _ZEROS_OUTSIDE = 0, 2, 0  # how boxes lie, what L2 fetches, what is beyond the array
_MAP_ALIGNMENT = 64  # of a tensor map's own address, which objects of cuda-bindings do not keep


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


def encode_map(described: TensorMap, pointer: int) -> bytes:
    """The 128 bytes that a kernel takes as a tensor map. A context has to be current."""
    room = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    place = ctypes.addressof(room) + -ctypes.addressof(room) % _MAP_ALIGNMENT
    rank = len(described.sizes)
    narrow = ctypes.c_uint32 * rank
    call(
        f"describing {described} at {pointer:#x}", "cuTensorMapEncodeTiled",
        ctypes.c_void_p(place), _ELEMENT[described.item_bytes], rank, ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*described.sizes), (ctypes.c_uint64 * rank)(*described.strides),
        narrow(*described.box), narrow(*[1] * rank),  # every element
        _NOT_INTERLEAVED, _SWIZZLE[described.swizzle], _LINES_OF_128_BYTES, _ZEROS_OUTSIDE,
    )  # fmt: skip
    return ctypes.string_at(place, MAP_BYTES)


def call(doing: str, name: str, *arguments: Any, accepted: Collection[int] = (0,)) -> int:
    """The status of a driver call, where it is accepted; `DeviceError` where it is not."""
    status: int = getattr(_driver(), name)(*arguments)
    if status not in accepted:
        code = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(code))
        raise DeviceError(f"CUDA, {doing}: {code.value.decode() if code.value else status}")
    return status


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
