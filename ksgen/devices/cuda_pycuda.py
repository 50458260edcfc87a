"""Runs kernels on NVIDIA GPUs through PyCUDA, for NumPy and `GPUArray` users. Only this module and
`pycuda_source` use PyCUDA.

PyCUDA launches on its own streams only; for another library's, the launcher takes the driver runtime.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal

from ksgen.build.build import compiling_is_forbidden
from ksgen.build.request import Binary, Compiler
from ksgen.build.toolchain import Nvcc, find_compiler
from ksgen.devices import libcuda
from ksgen.devices.base import (
    CONTEXT_LOST,
    LEGACY_STREAM,
    MAP_BYTES,
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
from ksgen.errors import DeviceError, ToolchainError
from ksgen.families.gpus import target_of
from ksgen.values import excerpt

_GONE = (
    "the CUDA context that this was made in is gone, detached by its user; "
    "call launchers, which open the current context, and pack weights and prepare calls again"
)
_opened: dict[int, PyCudaDevice] = {}
_left: list[list[Any]] = []  # resources that could not be freed


def found() -> list[Found]:
    """GPUs that PyCUDA reports. Creates no context."""
    return [
        Found(f"pycuda:{index}", "pycuda", device.name(), target_of(*device.compute_capability()))
        for index, device in enumerate(_devices())
    ]


def open_device(index: int) -> PyCudaDevice:
    """Open a GPU. Every call returns the same device, until its context is destroyed."""
    if (device := _opened.get(index)) is None or not device.is_open:
        devices = _devices()
        check_index("pycuda", index, [each.name() for each in devices])
        device = _opened[index] = PyCudaDevice(_pycuda(), devices[index], index)
    return device


class PyCudaDevice(libcuda.CudaDevice):
    """One GPU, in the context that the user's PyCUDA has current there, else in the primary one.

    Every call enters the context and leaves it at the end. PyCUDA aborts a process whose thread ends inside a context,
    and creates streams, events and modules only on a thread that is inside one.
    """

    runtime: Literal["pycuda"] = "pycuda"
    supports_foreign_streams = False

    def __init__(self, driver: Any, device: Any, index: int) -> None:
        self._driver, self.index = driver, index
        self.name: str = device.name()
        self.target = target_of(*device.compute_capability())
        self.driver_version = cuda_driver_version(driver.get_driver_version())
        self.limits = DeviceLimits(
            device.max_shared_memory_per_block_optin, device.max_threads_per_block, device.multiprocessor_count
        )
        current = driver.Context.get_current()
        is_here = current is not None and driver.Context.get_device() == device
        self._context = current if is_here else device.retain_primary_context()
        if not is_here:
            # PyCUDA's destructor would detach a primary context the wrong way, and complain
            atexit.register(self._context.detach)
        self.context: int = self._context.handle
        self._number = libcuda.context_number(self.context)
        with self._inside("making a stream"):
            self.host_stream = driver.Stream()

    @property
    def is_open(self) -> bool:
        """Whether the context still exists: a user who created it may have detached it."""
        return libcuda.context_number(self.context) in (self._number, 0)

    def compiler(self) -> Compiler | None:
        """nvcc, started by PyCUDA. None if the search finds another compiler or none, or if compiling is forbidden."""
        from ksgen.devices.pycuda_source import by_pycuda

        with suppress(ToolchainError):
            if not compiling_is_forbidden() and isinstance(found := find_compiler(), Nvcc):
                return by_pycuda(found)
        return None

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> _Kernel | _EarlyKernel:
        from ksgen.devices.pycuda_source import KernelModule

        kernel: _Kernel | _EarlyKernel
        try:
            with self._inside(f"loading {entry}"), libcuda.relaxed_captures():
                if starts_early:
                    kernel = _EarlyKernel(libcuda.CudaModule(binary.data), entry, shared_bytes)
                else:
                    module = KernelModule(binary)
                    function = module.get_function(entry)
                    if shared_bytes > PORTABLE_SHARED_BYTES:
                        attribute = self._driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                        function.set_attribute(attribute, shared_bytes)
                    kernel = _Kernel([function, module], entry)
        except DeviceError as error:
            raise libcuda.refused_binary(str(error), binary) from error
        weakref.finalize(kernel, self._release, kernel.parts).atexit = False
        return kernel

    def launch(
        self,
        kernel: _Kernel | _EarlyKernel,
        grid: int,
        block: int,
        shared_bytes: int,
        args: tuple[Any, ...],
        stream: Stream,
    ) -> None:
        pycuda_stream = self._pycuda_stream(stream)
        values = [0 if arg is None else arg if isinstance(arg, bytes) else int(arg) for arg in args]
        try:  # the same as `_inside`, which takes a microsecond more
            self._enter()
            try:
                kernel.launch(grid, block, shared_bytes, values, pycuda_stream)
            finally:
                self._driver.Context.pop()
        except (self._driver.Error, libcuda.DriverError) as error:
            doing = f"launching {kernel.entry} ({grid} blocks of {block}, {shared_bytes} bytes)"
            raise self._error(doing, error) from error

    def allocate(self, nbytes: int) -> Buffer:
        with self._inside(f"allocating {nbytes} bytes"), libcuda.relaxed_captures():
            allocation = self._driver.mem_alloc(max(nbytes, 1))
        return Memory(int(allocation), nbytes, self._release, [allocation])

    def upload(self, buffer: Buffer, array: HostArray, stream: Stream = None) -> None:
        pycuda_stream, source = self._pycuda_stream(stream), as_bytes(array)
        if source.nbytes:
            with self._inside(f"uploading {source.nbytes} bytes"), libcuda.relaxed_captures():
                self._driver.memcpy_htod_async(int(buffer), source, pycuda_stream)
                self._wait(pycuda_stream)

    def download(self, array: HostArray, buffer: Buffer, stream: Stream = None) -> None:
        pycuda_stream, target = self._pycuda_stream(stream), as_bytes(array)
        if target.nbytes:
            with self._inside(f"downloading {target.nbytes} bytes"), libcuda.relaxed_captures():
                self._driver.memcpy_dtoh_async(target, int(buffer), pycuda_stream)
                self._wait(pycuda_stream)

    def synchronize(self, stream: Stream = None) -> None:
        pycuda_stream = self._pycuda_stream(stream)
        with self._inside("waiting for the stream"), libcuda.relaxed_captures():
            self._wait(pycuda_stream)

    def is_capturing(self, stream: Stream) -> bool:
        """PyCUDA records no graph itself, but other libraries may, on its streams."""
        handle = getattr(stream, "handle", stream)
        if handle in (None, 0, LEGACY_STREAM):
            return False
        with self._inside("asking whether the stream is captured"):
            return libcuda.is_capturing(handle)

    def time(self, call: Callable[[], object], stream: Stream, runs: int, warmup: int) -> list[float]:
        pycuda_stream, event = self._pycuda_stream(stream), self._driver.Event
        with self._inside("timing"):
            for _ in range(warmup):
                call()
            pairs = [(event(), event()) for _ in range(runs)]
            for start, end in pairs:
                start.record(pycuda_stream)
                call()
                end.record(pycuda_stream)
            self._wait(pycuda_stream)
            seconds = [end.time_since(start) * 1e-3 for start, end in pairs]
            del pairs, start, end  # events must be destroyed on their thread, inside their context
        return seconds

    def _release(self, parts: list[Any]) -> None:
        """Free resources of the context inside it: outside, on another thread, PyCUDA would leak them."""
        try:
            with self._inside("releasing"), libcuda.relaxed_captures():
                parts.clear()
        except DeviceError:
            if self.is_open:  # false in a forked child, where PyCUDA would end the process: there is nothing to free
                _left.append(parts)

    def _pycuda_stream(self, stream: Stream) -> Any:
        """A stream as PyCUDA takes it: one that PyCUDA created, or None for the default stream."""
        if not stream:
            return None
        if isinstance(stream, self._driver.Stream):
            return stream
        raise DeviceError(
            f"stream {excerpt(stream)}: PyCUDA launches on its own streams only; KSGEN_DEVICE=driver launches on any"
        )

    def _wait(self, pycuda_stream: Any) -> None:
        if pycuda_stream is None:
            self._driver.Context.synchronize()
        else:
            pycuda_stream.synchronize()

    def _enter(self) -> None:
        """Push the context. If that fails, push again the thread's context, which PyCUDA has already popped."""
        try:
            self._context.push()
        except self._driver.Error:
            before = self._driver.Context.get_current()
            with suppress(libcuda.DriverError):
                if before is not None and not libcuda.current_context():
                    libcuda.push_context(before.handle)
            raise

    @contextmanager
    def _inside(self, doing: str) -> Iterator[None]:
        if not self.is_open:  # PyCUDA would push and pop whatever context has this address now
            raise DeviceError(f"PyCUDA on {self.name}, {doing}: {_GONE}")
        try:
            self._enter()
            try:
                yield
            finally:
                self._driver.Context.pop()
        except (self._driver.Error, libcuda.DriverError) as error:
            raise self._error(doing, error) from error

    def _error(self, doing: str, error: Exception) -> DeviceError:
        """Error of a failed call. PyCUDA's errors lack the driver's code; their message says if the context is lost."""
        doing = f"PyCUDA on {self.name}, {doing}"
        if not self.is_open:
            return DeviceError(f"{doing}: {_GONE}")
        if isinstance(error, libcuda.DriverError):
            return error.within(doing)
        lost = CONTEXT_LOST if any(words in str(error) for words in libcuda.lost_context_messages()) else ""
        return DeviceError(f"{doing}: {type(error).__name__}: {error}{lost}")


class _Kernel:
    """A function with its module, and the number of arguments it was prepared for."""

    __slots__ = ("__weakref__", "arity", "entry", "parts")

    def __init__(self, parts: list[Any], entry: str) -> None:
        self.parts, self.entry, self.arity = parts, entry, -1

    def prepare(self, values: list[bytes | int]) -> None:
        """Declare the arguments. PyCUDA puts no padding between them, so maps, which need alignment, come first."""
        self.parts[0].prepare("".join(f"{MAP_BYTES}s" if isinstance(value, bytes) else "q" for value in values))
        self.arity = len(values)

    def launch(self, grid: int, block: int, shared_bytes: int, values: list[bytes | int], stream: Any) -> None:
        if self.arity != len(values):
            self.prepare(values)
        self.parts[0].prepared_async_call((grid, 1), (block, 1, 1), stream, *values, shared_size=shared_bytes)


class _EarlyKernel:
    """A function for early launches with its module, both loaded by the driver API, and memory for arguments."""

    __slots__ = ("__weakref__", "entry", "function", "parts", "spares")

    def __init__(self, module: libcuda.CudaModule, entry: str, shared_bytes: int) -> None:
        self.parts, self.entry, self.function = [module], entry, module.function(entry, shared_bytes)
        self.spares = libcuda.Spares(self.function)

    def launch(self, grid: int, block: int, shared_bytes: int, values: list[bytes | int], stream: Any) -> None:
        arguments, early = spare = self.spares.take()
        assert early
        status = early(grid, block, shared_bytes, stream.handle if stream else 0, arguments.pack(values))
        self.spares.put_back(spare)
        libcuda.check(status)


def _devices() -> list[Any]:
    device = _pycuda().Device
    devices = [device(index) for index in range(device.count())]
    if not devices:
        raise UnavailableError("PyCUDA: it sees no GPU", "CUDA_VISIBLE_DEVICES may hide it")
    return devices


@cache
def _pycuda() -> Any:
    """pycuda.driver, initialised. Its import loads libcuda, so it fails without an NVIDIA driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyCUDA also warns of the error that it raises
            from pycuda import driver
    except ImportError as error:
        remedy = "install a CUDA toolkit and NVIDIA's driver, then: pip install pycuda"
        raise UnavailableError(f"PyCUDA: it cannot be imported ({error})", remedy) from None
    try:
        driver.init()
    except driver.Error as error:
        raise UnavailableError(f"PyCUDA: {error}", "nvidia-smi shows whether a GPU is there") from None
    return driver
