"""Wraps driver calls in ctypes that PyCUDA and cuda-bindings lack or expose poorly. Used only where there is a
driver."""

from __future__ import annotations

import ctypes
import logging
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Literal

from ksgen.build.request import Binary
from ksgen.devices.base import (
    CONTEXT_LOST,
    LEGACY_STREAM,
    MAP_BYTES,
    PORTABLE_SHARED_BYTES,
    Buffer,
    RefusedError,
    Stream,
    cuda_driver_version,
)
from ksgen.errors import DeviceError, KsgenError, ToolchainError
from ksgen.families import Geometry, TensorMap
from ksgen.install import cuda_extra, install_line, load_driver, supported_cuda

# After these errors the context is lost, and with it the process's use of the GPU: CUDA_ERROR_ECC_UNCORRECTABLE,
# _ILLEGAL_ADDRESS, _LAUNCH_TIMEOUT, _ASSERT, _HARDWARE_STACK_ERROR, _ILLEGAL_INSTRUCTION, _MISALIGNED_ADDRESS,
# _INVALID_ADDRESS_SPACE, _INVALID_PC, _LAUNCH_FAILED.
_STICKY = (214, 700, 702, 710, 714, 715, 716, 717, 718, 719)
_CONTEXT, _MEMORY_TYPE, _DEVICE_ORDINAL = 1, 2, 9  # CU_POINTER_ATTRIBUTE_...
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# bytes -> CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT16, _UINT32: copies move bits and convert nothing
_ELEMENT = {1: 0, 2: 1, 4: 2}
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CU_TENSOR_MAP_SWIZZLE_...
# of a tensor map: interleaving, L2 fetch size, fill value beyond the array
_NOT_INTERLEAVED, _LINES_OF_128_BYTES, _ZEROS_OUTSIDE = 0, 2, 0
_MAP_ALIGNMENT = 64  # alignment of a tensor map's address, also as a parameter; objects of cuda-bindings do not keep it
_GRAPHS_HOLD_EARLY_LAUNCHES = 12030  # the first CUDA that records early launches
_GONE = (201, 709)  # CUDA_ERROR_INVALID_CONTEXT, _CONTEXT_IS_DESTROYED
# status of a driver that refuses a binary: CUDA_ERROR_INVALID_IMAGE, _NO_BINARY_FOR_GPU, _INVALID_PTX,
# _UNSUPPORTED_PTX_VERSION, ...
_REFUSED = (200, 209, 218, 222, 300)
_MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CUlaunchConfig: blocks, threads, shared bytes, stream, attributes and their number
_CONFIGURATION = struct.Struct("7I4xQQI4x")
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is 1. Its value is a union of 64 bytes.
_STARTS_EARLY = ctypes.create_string_buffer(struct.pack("i4xi60x", 6, 1))
_CLUSTER = struct.Struct("i4x3I52x")  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION is 4
_INVALID_CLUSTER_SIZE = 912
# status of a driver that does not support early launches: CUDA_ERROR_INVALID_VALUE, _NOT_SUPPORTED
_NO_EARLY_LAUNCH = (1, 801)
# status of a launch or a tensor map that this GPU does not support, but after which it may run others:
# CUDA_ERROR_INVALID_VALUE, _LAUNCH_OUT_OF_RESOURCES, _NOT_SUPPORTED, _INVALID_CLUSTER_SIZE
_NO_SUCH_LAUNCH = (1, 701, 801, _INVALID_CLUSTER_SIZE)


_log = logging.getLogger(__name__)
_driver: Callable[[], Any] = cache(load_driver)


class DriverError(DeviceError):
    """A failed driver call, in the words of `explained`. The calling device adds what the call was for."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    def within(self, doing: str) -> DeviceError:
        """The error of a launch or a tensor map: a `RefusedError` if this GPU does not support it."""
        return (RefusedError if self.status in _NO_SUCH_LAUNCH else DeviceError)(f"{doing}: {self}")


def device_of(pointer: int) -> int | None:
    """Index of the GPU that holds the memory; None if there is only one, or if the driver does not know it."""
    if (driver := _with_several_gpus()) is None:
        return None
    index = ctypes.c_int()
    unknown = driver.cuPointerGetAttribute(ctypes.byref(index), _DEVICE_ORDINAL, ctypes.c_uint64(pointer))
    return None if unknown else index.value


def context_of(pointer: int) -> int | None:
    """The context that memory was allocated in; 0 if it belongs to none, None if the driver does not know."""
    ask, place = _driver().cuPointerGetAttribute, ctypes.c_uint64(pointer)
    context, kind = ctypes.c_void_p(), ctypes.c_uint()
    if not ask(ctypes.byref(context), _CONTEXT, place):
        return context.value or 0
    # memory of pools has a type, and may have no context
    return None if ask(ctypes.byref(kind), _MEMORY_TYPE, place) else 0


def current_context() -> int:
    """The context that is current on this thread; 0 if there is none."""
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


def push_context(context: int) -> None:
    """Make a context current on this thread, on top of its stack of contexts."""
    call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))


def context_number(context: int) -> int | None:
    """Number of a context, unique in the process. None: the context was destroyed; 0: the driver does not know."""
    number = ctypes.c_uint64()
    status = _number_function()(context, ctypes.byref(number))
    return None if status in _GONE else number.value


def compute_mode(index: int) -> int:
    """Compute mode of a GPU: 0 allows several processes at once, 3 allows one, 2 allows none."""
    device, mode = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetAttribute", ctypes.byref(mode), _COMPUTE_MODE, device)
    return mode.value


def is_capturing(handle: int) -> bool:
    """Whether a stream other than the default one records a CUDA graph. Its context must be current."""
    status = ctypes.c_int()
    return not _driver().cuStreamIsCapturing(ctypes.c_void_p(handle), ctypes.byref(status)) and status.value != 0


def encode_map(described: TensorMap, pointer: int) -> bytes:
    """The 128 bytes that a kernel takes as a tensor map. A context must be current."""
    memory = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    place = ctypes.addressof(memory) + -ctypes.addressof(memory) % _MAP_ALIGNMENT
    rank = len(described.sizes)
    uint32s = ctypes.c_uint32 * rank
    call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(place), _ELEMENT[described.item_bytes], rank, ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*described.sizes), (ctypes.c_uint64 * rank)(*described.strides),
        uint32s(*described.box), uint32s(*[1] * rank),  # every element
        _NOT_INTERLEAVED, _SWIZZLE[described.swizzle], _LINES_OF_128_BYTES, _ZEROS_OUTSIDE,
    )  # fmt: skip
    return ctypes.string_at(place, MAP_BYTES)


def check_clusters(function: int, cluster: int, block: int, shared_bytes: int) -> int | None:
    """Return how many clusters of `cluster` blocks the GPU runs at the same time; None if the driver cannot answer.

    Raise `DriverError` if not even one fits. GPCs of a card, or of a part of it, may have few multiprocessors. A
    context must be current.
    """
    if (ask := getattr(_driver(), "cuOccupancyMaxActiveClusters", None)) is None:
        return None
    attribute = ctypes.create_string_buffer(_CLUSTER.pack(4, cluster, 1, 1))
    configuration = _CONFIGURATION.pack(cluster, 1, 1, block, 1, 1, shared_bytes, 0, ctypes.addressof(attribute), 1)
    at_once = ctypes.c_int()
    status = ask(ctypes.byref(at_once), ctypes.c_void_p(function), configuration)
    if status == _INVALID_CLUSTER_SIZE or (not status and not at_once.value):
        raise DriverError(f"clusters of {cluster} blocks do not fit this GPU")
    return None if status else at_once.value


class CudaDevice:
    """Shared base of both CUDA runtimes' devices."""

    kind: Literal["cuda"] = "cuda"
    dialect: Literal["cuda"] = "cuda"
    shares_host = False
    name: str
    allocate: Callable[[int], Buffer]
    _inside: Callable[[str], AbstractContextManager[None]]  # context manager whose errors say what was being done

    def prepare_launches(self) -> None:
        """Launches need only their kernels."""

    def shared(self, pointer: int) -> Buffer:
        raise DeviceError(f"{self.name} does not share the host's memory")

    def workspace(self, nbytes: int, stream: Stream) -> Buffer:
        return self.allocate(nbytes)

    def check_clusters(self, kernel: Any, geometry: Geometry) -> int | None:
        """Return how many of a kernel's clusters run at the same time; None if unknown.

        Raise `DeviceError` if none fits. The kernel was loaded with `starts_early`.
        """
        with self._inside(f"asking for the clusters of {kernel.entry}"):
            return check_clusters(int(kernel.function), geometry.cluster, geometry.block, geometry.shared_bytes)

    def encode_map(self, described: TensorMap, pointer: int) -> bytes:
        with self._inside(f"describing {described} at {pointer:#x}"):
            return encode_map(described, pointer)


class ArgumentBlock:
    """Memory for a kernel's arguments. One call of a launch uses it at a time, from `pack` until the call returns."""

    __slots__ = ("_arity", "_block", "_pack", "_pointers", "_start")

    def __init__(self) -> None:
        self._arity = -1

    def pack(self, args: Sequence[Any]) -> int:
        """Write the arguments, maps before 64-bit values. Return the address of an array of pointers to them."""
        if self._arity != len(args):
            self._arity = len(args)
            self._lay_out(sum(isinstance(arg, bytes) for arg in args))
        if None in args:
            args = tuple(0 if arg is None else arg for arg in args)
        self._pack(self._block, self._start, *args)
        return self._pointers[1]

    def _lay_out(self, maps: int) -> None:
        numbers, width = self._arity - maps, ctypes.sizeof(ctypes.c_int64)
        self._block = (ctypes.c_char * (MAP_BYTES * maps + width * numbers + _MAP_ALIGNMENT))()
        self._start = -ctypes.addressof(self._block) % _MAP_ALIGNMENT
        first = ctypes.addressof(self._block) + self._start
        offsets = [MAP_BYTES * min(number, maps) + width * max(number - maps, 0) for number in range(self._arity)]
        addresses = (ctypes.c_void_p * self._arity)(*(first + offset for offset in offsets))
        self._pointers = (addresses, ctypes.addressof(addresses))
        self._pack = struct.Struct(f"{MAP_BYTES}s" * maps + f"{numbers}q").pack_into


class EarlyLaunch:
    """Launches a function early (programmatic dependent launch): it may begin while the previous grid still ends.

    The function itself waits for that grid. PyCUDA has no such call, and that of cuda-bindings takes as long as this.
    An instance serves one launch at a time. Launches are plain in a graph that cannot record early ones, and after the
    driver has refused an early one.
    """

    are_refused = False  # by the driver

    __slots__ = ("_attribute", "_configuration", "_function", "_launch", "_may_be_refused", "_place", "_written")

    def __init__(self, function: int) -> None:
        self._function, self._attribute = function, ctypes.addressof(_STARTS_EARLY)
        self._configuration = (ctypes.c_char * _CONFIGURATION.size)()
        self._place = ctypes.addressof(self._configuration)
        self._launch, self._written = _launch_function(), (0, 0, 0, 0, 0)
        self._may_be_refused = supported_cuda() < _GRAPHS_HOLD_EARLY_LAUNCHES

    def __call__(self, grid: int, block: int, shared_bytes: int, stream: int, arguments: int) -> int:
        """Launch, and return the driver's status. `arguments` is the result of `ArgumentBlock.pack`."""
        attributes = 0 if self._may_be_refused and stream > LEGACY_STREAM and is_capturing(stream) else 1
        if EarlyLaunch.are_refused:
            attributes = 0
        if self._written != (wanted := (grid, block, shared_bytes, stream, attributes)):
            _CONFIGURATION.pack_into(
                self._configuration, 0, grid, 1, 1, block, 1, 1, shared_bytes, stream, self._attribute, attributes
            )
            self._written = wanted
        status: int = self._launch(self._place, self._function, arguments, None)
        if status in _NO_EARLY_LAUNCH and attributes:
            _CONFIGURATION.pack_into(self._configuration, 0, grid, 1, 1, block, 1, 1, shared_bytes, stream, 0, 0)
            self._written = (grid, block, shared_bytes, stream, 0)
            if not (plain := self._launch(self._place, self._function, arguments, None)):
                EarlyLaunch.are_refused = True
                _log.warning("the driver refuses early launches (%s): all launches are plain", explained(status))
            return int(plain)
        return status


class Spares:
    """Unused argument blocks of one kernel, each with an `EarlyLaunch` if the kernel is launched early.

    Every launch takes its own block, also in other threads and in a signal handler that interrupts a launch. A lock
    would block the handler.
    """

    __slots__ = ("_early", "_free", "put_back")

    def __init__(self, early: int | None = None) -> None:
        """`early`: the handle of a function that is launched early."""
        self._early, self._free = early, list[tuple[ArgumentBlock, EarlyLaunch | None]]()
        self.put_back = self._free.append

    def take(self) -> tuple[ArgumentBlock, EarlyLaunch | None]:
        try:
            return self._free.pop()
        except IndexError:
            return ArgumentBlock(), None if self._early is None else EarlyLaunch(self._early)


class CudaModule:
    """A binary that is loaded into the current context, and unloaded when the last reference to this object is dropped.

    Drop that reference while the same context is current. PyCUDA's own modules give no handles of functions.
    """

    def __init__(self, data: bytes) -> None:
        self._handle = ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self._handle), data)
        weakref.finalize(self, _driver().cuModuleUnload, self._handle).atexit = False

    def function(self, entry: str, shared_bytes: int) -> int:
        """The handle of an entry that may ask for that much shared memory."""
        function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(function), self._handle, entry.encode())
        if shared_bytes > PORTABLE_SHARED_BYTES:
            call("cuFuncSetAttribute", function, _MOST_DYNAMIC_SHARED, shared_bytes)
        return function.value or 0


def call(name: str, *arguments: Any) -> None:
    """Call one of the driver's functions; `DriverError` if it fails."""
    check(getattr(_driver(), name)(*arguments))


def check(status: int) -> None:
    """Raise `DriverError` if a call of the driver failed."""
    if status:
        raise DriverError(explained(status), status)


def explained(status: int) -> str:
    """The code of a failed call, the driver's words for it, and whether the process can go on."""
    return (
        f"{_text('cuGetErrorName', status)} "
        f"({_text('cuGetErrorString', status)}){CONTEXT_LOST if status in _STICKY else ''}"
    )


@cache
def lost_context_messages() -> list[str]:
    """The driver's sentences for errors that lose the context, for callers that get no code."""
    return [_text("cuGetErrorString", status) for status in _STICKY]


def refused_binary(message: str, binary: Binary) -> KsgenError:
    """The error for a binary that was not loaded, with versions if the driver refused it."""
    if not any(_text("cuGetErrorString", status) in message for status in _REFUSED):
        return DeviceError(message)
    made = binary.provenance.get("compiler", "an unknown compiler"), binary.provenance.get("compiler_version", "")
    versions = (
        f"{' '.join(made).strip()} built it for {binary.target}, "
        f"and the driver is {cuda_driver_version(supported_cuda())}"
    )
    if not 0 < supported_cuda() // 1000 < int(made[1].partition(".")[0] or 0):
        return DeviceError(f"{message}; {versions}")
    remedy = f"update the driver, or take a compiler of CUDA {supported_cuda() // 1000}: {install_line(cuda_extra())}"
    return ToolchainError(f"{message}; {versions}, which loads no binaries of a later CUDA; {remedy}")


def _text(function: str, status: int) -> str:
    text = ctypes.c_char_p()
    getattr(_driver(), function)(status, ctypes.byref(text))
    return text.value.decode() if text.value else f"error {status}, unknown to this driver"


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Allow calls, such as allocations, that graph captures of other threads forbid, without ending those captures."""
    mode = ctypes.c_int(_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def _number_function() -> Any:
    driver = _driver()
    # drivers before CUDA 12 do not number contexts: the other function shows whether one is alive
    function = getattr(driver, "cuCtxGetId", driver.cuCtxGetApiVersion)
    function.argtypes = (ctypes.c_void_p,) * 2
    return function


@cache
def _launch_function() -> Any:
    function = _driver().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


@cache
def _with_several_gpus() -> Any:
    count = ctypes.c_int()
    try:
        driver = _driver()
    except OSError:
        return None
    driver.cuInit(0)  # already done by now, or there is nothing to count
    driver.cuDeviceGetCount(ctypes.byref(count))
    return driver if count.value > 1 else None
