"""Runs kernels on NVIDIA GPUs through the CUDA driver API, on any stream. Only this module uses its bindings.

Everything happens in the device's primary context, which PyTorch and CuPy share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal

from ksgen.build.request import Binary
from ksgen.devices.base import (
    LEGACY_STREAM,
    PER_THREAD_STREAM,
    PORTABLE_SHARED_BYTES,
    Buffer,
    DeviceLimits,
    Found,
    HostArray,
    Memory,
    Stream,
    UnavailableError,
    as_bytes,
    check_index,
    cuda_driver_version,
)
from ksgen.devices.libcuda import CudaDevice, DriverError, Spares, explained, refused_binary, relaxed_captures
from ksgen.errors import DeviceError
from ksgen.families.gpus import target_of
from ksgen.install import cuda_extra, install_line, load_driver


def found() -> list[Found]:
    """GPUs that the driver reports. Creates no context."""
    cu = _driver()
    described = [_describe(cu, index) for index in range(_device_count(cu))]
    return [Found(f"driver:{index}", "driver", name, target) for index, (name, target) in enumerate(described)]


@cache
def open_device(index: int) -> DriverDevice:
    cu = _driver()
    check_index("driver", index, [_describe(cu, each)[0] for each in range(_device_count(cu))])
    return DriverDevice(cu, index)


class DriverDevice(CudaDevice):
    """One GPU, in its primary context. Streams are handles: integers."""

    runtime: Literal["driver"] = "driver"
    supports_foreign_streams = True
    host_stream = PER_THREAD_STREAM
    is_open = True

    def __init__(self, cu: Any, index: int) -> None:
        self._cu, self.index = cu, index
        self.name, self.target = _describe(cu, index)
        self.driver_version = cuda_driver_version(_call("reading the driver's version", cu.cuDriverGetVersion))
        self.limits = DeviceLimits(
            _attribute(cu, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", index),
            _attribute(cu, "MAX_THREADS_PER_BLOCK", index),
            _attribute(cu, "MULTIPROCESSOR_COUNT", index),
        )
        self._context = _call(f"opening {self.name}", cu.cuDevicePrimaryCtxRetain, index)
        self.context = int(self._context)

    def compiler(self) -> None:
        return None

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> _Kernel:
        cu = self._cu
        with self._current(), relaxed_captures():
            try:
                library = _call(f"loading {entry}", cu.cuLibraryLoadData, binary.data, [], [], 0, [], [], 0)
            except DeviceError as error:
                raise refused_binary(str(error), binary) from None
            kernel = _call(f"finding {entry}", cu.cuLibraryGetKernel, library, entry.encode())
            function = _call(f"finding {entry}", cu.cuKernelGetFunction, kernel)
            if shared_bytes > PORTABLE_SHARED_BYTES:
                attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                doing = f"asking for {shared_bytes} bytes of shared memory for {entry}"
                _call(doing, cu.cuFuncSetAttribute, function, attribute, shared_bytes)
        loaded = _Kernel(function, entry, starts_early)
        weakref.finalize(loaded, self._unload, library).atexit = False
        return loaded

    def launch(
        self, kernel: _Kernel, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Stream
    ) -> None:
        cu = self._cu
        if not self._is_current():
            with self._current():
                return self.launch(kernel, grid, block, shared_bytes, args, stream)
        arguments, early = spare = kernel.spares.take()
        block_address = arguments.pack(args)
        if early is None:
            (status,) = cu.cuLaunchKernel(
                kernel.function, grid, 1, 1, block, 1, 1, shared_bytes, stream or 0, block_address, 0
            )
        else:
            status = early(grid, block, shared_bytes, stream or 0, block_address)
        kernel.spares.put_back(spare)
        if status:
            doing = f"CUDA, launching {kernel.entry} ({grid} blocks of {block}, {shared_bytes} bytes)"
            raise DriverError(explained(int(status)), int(status)).within(doing)
        return None

    def allocate(self, nbytes: int) -> Buffer:
        pointer = int(self._run(f"allocating {nbytes} bytes", self._cu.cuMemAlloc, max(nbytes, 1)))
        return Memory(pointer, nbytes, self._free, pointer)

    def upload(self, buffer: Buffer, array: HostArray, stream: Stream = None) -> None:
        source = as_bytes(array)
        doing, copy = f"uploading {source.nbytes} bytes", self._cu.cuMemcpyHtoDAsync
        self._run(doing, copy, int(buffer), source.ctypes.data, source.nbytes, stream or 0)
        self.synchronize(stream)

    def download(self, array: HostArray, buffer: Buffer, stream: Stream = None) -> None:
        target = as_bytes(array)
        doing, copy = f"downloading {target.nbytes} bytes", self._cu.cuMemcpyDtoHAsync
        self._run(doing, copy, target.ctypes.data, int(buffer), target.nbytes, stream or 0)
        self.synchronize(stream)

    def synchronize(self, stream: Stream = None) -> None:
        self._run("waiting for the stream", self._cu.cuStreamSynchronize, stream or 0)

    def is_capturing(self, stream: Stream) -> bool:
        if stream in (None, 0, LEGACY_STREAM):
            return False
        with self._current():
            status = _call("asking whether the stream is captured", self._cu.cuStreamIsCapturing, stream)
        return bool(status != self._cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def time(self, call: Callable[[], object], stream: Stream, runs: int, warmup: int) -> list[float]:
        cu, handle = self._cu, stream or 0
        with self._current():
            for _ in range(warmup):
                call()
            events = [_call("making an event", cu.cuEventCreate, 0) for _ in range(2 * runs)]
            pairs = list(zip(events[::2], events[1::2], strict=True))
            try:
                for start, end in pairs:
                    _call("timing", cu.cuEventRecord, start, handle)
                    call()
                    _call("timing", cu.cuEventRecord, end, handle)
                _call("timing", cu.cuStreamSynchronize, handle)
                return [_call("timing", cu.cuEventElapsedTime, *pair) * 1e-3 for pair in pairs]
            finally:
                for event in events:
                    cu.cuEventDestroy(event)

    def _run(self, doing: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call the driver in the device's context, without ending captures of other threads."""
        with self._current(), relaxed_captures():
            return _call(doing, function, *args)

    def _free(self, pointer: int) -> None:
        with suppress(DeviceError), self._current(), relaxed_captures():
            # unchecked: after a lost context, and in a forked child, there is nothing to free
            self._cu.cuMemFree(pointer)

    def _unload(self, library: Any) -> None:
        with relaxed_captures():
            self._cu.cuLibraryUnload(library)

    def _is_current(self) -> bool:
        status, context = self._cu.cuCtxGetCurrent()
        return not status and int(context) == self.context

    @contextmanager
    def _inside(self, doing: str) -> Iterator[None]:
        try:
            with self._current():
                yield
        except DriverError as error:
            raise error.within(f"CUDA, {doing}") from None

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context current. It stays so in a thread that had none; others get their context back."""
        cu = self._cu
        before = int(_call("asking for the context", cu.cuCtxGetCurrent))
        if before in (0, self.context):
            _call("entering the context", cu.cuCtxSetCurrent, self._context)
            yield
            return
        _call("entering the context", cu.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            cu.cuCtxPopCurrent()


class _Kernel:
    """A function, and memory for the arguments of its launches."""

    __slots__ = ("__weakref__", "entry", "function", "spares")

    def __init__(self, function: Any, entry: str, starts_early: bool) -> None:
        self.function, self.entry = function, entry
        self.spares = Spares(int(function) if starts_early else None)


@cache
def _driver() -> Any:
    """cuda-bindings' driver module after `cuInit`. Its import takes 0.1 s, so a driver must load first."""
    try:
        load_driver()
        from cuda.bindings import driver as cu

        (status,) = cu.cuInit(0)
    except ImportError as error:
        raise UnavailableError(
            f"CUDA driver: cuda-bindings cannot be imported ({error})", install_line(cuda_extra())
        ) from None
    except (OSError, RuntimeError) as error:  # the bindings raise RuntimeError
        raise UnavailableError(f"CUDA driver: libcuda cannot be loaded ({error})", "install NVIDIA's driver") from None
    if status:
        raise UnavailableError(str(_error(status, "starting the driver")), "nvidia-smi shows whether a GPU is there")
    return cu


def _device_count(cu: Any) -> int:
    count: int = _call("counting GPUs", cu.cuDeviceGetCount)
    if not count:
        raise UnavailableError("CUDA driver: it sees no GPU", "CUDA_VISIBLE_DEVICES may hide it")
    return count


def _describe(cu: Any, index: int) -> tuple[str, str]:
    """Name and target."""
    name: bytes = _call("reading the GPU's name", cu.cuDeviceGetName, 256, index)
    major = _attribute(cu, "COMPUTE_CAPABILITY_MAJOR", index)
    minor = _attribute(cu, "COMPUTE_CAPABILITY_MINOR", index)
    return name.partition(b"\0")[0].decode(), target_of(major, minor)


def _attribute(cu: Any, name: str, index: int) -> int:
    attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    value: int = _call(f"reading {attribute.name}", cu.cuDeviceGetAttribute, attribute, index)
    return value


def _call(doing: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the driver and return its result, or None if it has none. An error becomes a `DeviceError`."""
    try:
        status, *values = function(*args)
    except RuntimeError as error:  # a function that this driver is too old to have
        raise DeviceError(f"CUDA, {doing}: {error}") from None
    if status:
        raise _error(status, doing)
    return values[0] if values else None


def _error(status: int, doing: str) -> DeviceError:
    return DeviceError(f"CUDA, {doing}: {explained(int(status))}")
