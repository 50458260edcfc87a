"""Runs kernels on OpenCL devices, CPUs included: builds, loads, launches. Only this module uses pyopencl.

`opencl_drivers.py` knows where drivers are.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal

from ksgen.build.children import refusal
from ksgen.build.host import instruction_set
from ksgen.build.request import Binary, Resources
from ksgen.devices.base import (
    Buffer,
    DeviceLimits,
    Found,
    HostArray,
    ProcessorDevice,
    Stream,
    ThreadWorkspace,
    UnavailableError,
    as_bytes,
    check_index,
)
from ksgen.devices.opencl_drivers import drivers_shown, packages_line, raise_no_driver
from ksgen.errors import DeviceError, ToolchainError
from ksgen.locks import new_lock

_BUILD_OPTIONS = ("-cl-std=CL1.2",)  # accepted by every driver in use; 16-bit and 64-bit floats are extensions of 1.2
_INT64 = struct.Struct("=q")
_UNSET = object()


def found() -> list[Found]:
    """The OpenCL devices here, GPUs first."""
    return [
        Found(f"opencl:{index}", "opencl", device.name.strip(), _target(device))
        for index, device in enumerate(_devices())
    ]


@cache
def open_device(index: int) -> OpenCLDevice:
    devices = _devices()
    check_index("opencl", index, [device.name.strip() for device in devices])
    cl = _pyopencl()
    try:
        context = cl.Context([devices[index]])
    except cl.Error as error:
        raise DeviceError(
            f"opencl:{index} ({devices[index].name.strip()}): the driver refused to start ({error})"
        ) from error
    return OpenCLDevice(devices[index], context, index)


@cache
def for_context(context: Any) -> OpenCLDevice:
    """The device of a context that the user created. Buffers of one context are invalid in another."""
    return OpenCLDevice(context.devices[0], context, -1)


class OpenCLDevice(ProcessorDevice):
    """One OpenCL device in one context, with one in-order queue of its own."""

    kind: Literal["opencl"] = "opencl"
    runtime: Literal["opencl"] = "opencl"

    def __init__(self, device: Any, context: Any, index: int) -> None:
        cl = self._cl = _pyopencl()
        self.index = index
        self.name: str = device.name.strip()
        self.target = _target(device)
        self.driver_version: str = device.driver_version
        self.limits = DeviceLimits(
            shared_bytes_per_block=device.local_mem_size,
            threads_per_block=device.max_work_group_size,
            multiprocessors=device.max_compute_units,
            is_cpu=bool(device.type & cl.device_type.CPU),
            vector_bytes=4 * max(4, device.native_vector_width_float),
        )
        self.shares_host = self.limits.is_cpu and bool(
            device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM
        )
        self._device, self._context = device, context
        self._queue = cl.CommandQueue(context, device, cl.command_queue_properties.PROFILING_ENABLE)
        self._per_thread = threading.local()
        self._timed = threading.local()  # .events: events of the launches that `time` watches on this thread

    def compiler(self) -> OpenCLCompiler:
        return OpenCLCompiler(self._device, self._context)

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> _Kernel:
        if binary.target != self.target:
            raise DeviceError(f"{entry}: a binary for {binary.target} does not run on {self.target}")
        cl = self._cl
        with self._explained(f"loading {entry}"), _quiet(cl):
            try:
                program = cl.Program(self._context, [self._device], [binary.data]).build(cache_dir=False)
            except cl.LogicError as error:
                raise DeviceError(
                    f"loading {entry}: the driver refuses the binary ({error}); build it again from source"
                ) from error
            return _Kernel(cl, cl.Kernel(program, entry))

    def launch(
        self, kernel: _Kernel, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Stream
    ) -> None:
        queue = self._queue if stream is None else stream
        try:
            with kernel.lock:
                kernel.set_args(args, shared_bytes)
                event = self._cl.enqueue_nd_range_kernel(queue, kernel.kernel, (grid * block,), (block,))
        except self._cl.Error as error:
            raise self._failure(f"launching {kernel.entry}", error) from error
        if (events := getattr(self._timed, "events", None)) is not None:
            events.append(event)

    def allocate(self, nbytes: int) -> Buffer:
        with self._explained(f"allocating {nbytes} bytes"):
            return self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, size=max(nbytes, 1))

    def shared(self, pointer: int) -> Buffer:
        return self._cl.SVM((ctypes.c_char * 1).from_address(pointer))

    def workspace(self, nbytes: int, stream: Stream) -> Buffer:
        if stream is not None:  # a user's queue: its launches are not ordered with those of the device's queue
            return self.allocate(nbytes)
        return ThreadWorkspace(self._per_thread, nbytes, self.allocate)

    def upload(self, buffer: Buffer, array: HostArray, stream: Stream = None) -> None:
        source = as_bytes(array)
        self._copy(buffer, source, source.nbytes, stream)

    def download(self, array: HostArray, buffer: Buffer, stream: Stream = None) -> None:
        target = as_bytes(array)
        self._copy(target, buffer, target.nbytes, stream)

    def _copy(self, destination: Any, source: Any, nbytes: int, stream: Stream) -> None:
        if nbytes:  # OpenCL refuses to copy nothing
            with self._explained(f"copying {nbytes} bytes"):
                self._cl.enqueue_copy(stream or self._queue, _memory(destination), _memory(source), is_blocking=True)

    def synchronize(self, stream: Stream = None) -> None:
        try:
            (stream or self._queue).finish()
        except self._cl.Error as error:
            raise self._failure("waiting for the queue", error) from error

    def time(self, call: Callable[[], object], stream: Stream, runs: int, warmup: int) -> list[float]:
        queue = stream or self._queue
        if not queue.properties & self._cl.command_queue_properties.PROFILING_ENABLE:
            raise DeviceError(f"{queue}: timing needs a queue made with PROFILING_ENABLE, or None for the device's own")
        for _ in range(warmup):
            call()
        return [self._seconds(call, queue) for _ in range(runs)]

    def _seconds(self, call: Callable[[], object], queue: Any) -> float:
        """Seconds from the start of the first launch to the end of the last one."""
        events = self._timed.events = []
        try:
            call()
        finally:
            self._timed.events = None
        if not events:
            raise DeviceError("timing: the call launched nothing on this device")
        with self._explained("timing"):
            queue.finish()
            nanoseconds: int = events[-1].profile.end - events[0].profile.start
        return nanoseconds * 1e-9

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._cl.Error as error:
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: Exception) -> DeviceError:
        return DeviceError(f"OpenCL on {self.name}, {doing}: {error}")


def _memory(given: Any) -> Any:
    """Memory object for OpenCL: the calling thread's part of a workspace; other memory unchanged."""
    return given.buffer if isinstance(given, ThreadWorkspace) else given


class _Kernel:
    """An entry of a loaded program. The kernel object holds its arguments: set them and launch under `lock`."""

    def __init__(self, cl: Any, kernel: Any) -> None:
        self.kernel, self.lock = kernel, new_lock()
        self.entry: str = kernel.function_name
        self._cl = cl
        # arguments that the kernel object holds; this list keeps them alive too
        self._set: list[Any] = [_UNSET] * kernel.num_args

    def set_args(self, args: tuple[Any, ...], shared_bytes: int) -> None:
        """Set arguments that changed. One parameter more than `args` is shared memory, as a `__local` pointer."""
        if len(self._set) == len(args) + 1:
            args = (*args, self._cl.LocalMemory(shared_bytes))
        for index, (arg, previous) in enumerate(zip(map(_memory, args), self._set, strict=True)):
            if arg is not previous:
                self.kernel.set_arg(index, _INT64.pack(arg) if isinstance(arg, int) else arg)
                self._set[index] = arg


class OpenCLCompiler:
    """The compiler inside an OpenCL driver. It builds only for its own device."""

    name = "opencl"
    must_end = True  # a driver aborts a process that ends while the driver compiles

    def __init__(self, device: Any, context: Any) -> None:
        self.version = _target(device)
        self._device, self._context = device, context

    def options(self, target: str) -> tuple[str, ...]:
        return _BUILD_OPTIONS

    def compile(self, text: str, entry: str, target: str) -> Binary:
        if target != self.version:
            raise ToolchainError(f"{entry}: the OpenCL compiler of {self.version} cannot build for {target}")
        cl = _pyopencl()
        try:
            with _quiet(cl):
                program = cl.Program(self._context, text)
                program.build(list(self.options(target)), [self._device], cache_dir=False)
            if entry not in program.get_info(cl.program_info.KERNEL_NAMES).split(";"):
                raise ToolchainError(f"{entry}: the source compiles, but holds no __kernel function of that name")
            kernel = cl.Kernel(program, entry)
            shared_bytes = kernel.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, self._device)
        except cl.Error as error:
            raise refusal(f"{entry}: the OpenCL compiler refused it", f"{entry}.cl", text, str(error)) from error
        (data,) = program.get_info(cl.program_info.BINARIES)
        return Binary(data, entry, target, Resources(shared_bytes=shared_bytes))


class _Quiet:
    """Silences PyOpenCL's warning about non-empty build logs while any thread builds.

    Some drivers' logs are never empty. `catch_warnings` changes the whole process, so the first thread enters it, and
    the last one leaves it.
    """

    def __init__(self) -> None:
        self._guard, self._builders, self._caught = new_lock(), 0, warnings.catch_warnings()

    @contextmanager
    def __call__(self, cl: Any) -> Iterator[None]:
        with self._guard:
            if not self._builders:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.simplefilter("ignore", cl.CompilerWarning)
            self._builders += 1
        try:
            yield
        finally:
            with self._guard:
                self._builders -= 1
                if not self._builders:
                    self._caught.__exit__(None, None, None)


_quiet = _Quiet()


def _target(device: Any) -> str:
    """The target's name. A CPU driver compiles for this very machine, so its instruction set is part of the name."""
    words = [device.platform.name, device.name, device.driver_version]
    if device.type & _pyopencl().device_type.CPU:
        words.append(instruction_set())
    return ", ".join(word.strip() for word in words)


def _devices() -> list[Any]:
    """GPUs first, then in the loader's order."""
    cl = _pyopencl()
    devices: list[Any] = []
    with suppress(cl.Error):  # no platform at all is an error of the loader
        for one in cl.get_platforms():
            with suppress(cl.Error):  # a platform with no device, likewise
                devices += one.get_devices()
    if not devices:
        raise_no_driver()
    return sorted(devices, key=lambda device: not device.type & cl.device_type.GPU)


@cache
def _pyopencl() -> Any:
    """The pyopencl module, after its loader has read the list of drivers. The loader does so only once per process."""
    with drivers_shown():
        try:
            import pyopencl as cl
        except ImportError as error:
            raise UnavailableError(
                f"OpenCL: PyOpenCL cannot be imported ({error})", packages_line("pyopencl")
            ) from error
        with suppress(cl.Error):
            cl.get_platforms()
    # PyOpenCL generates Python code for each kernel and caches it in the user's folder. If it cannot write there, it
    # runs no kernel.
    cl._PYOPENCL_NO_CACHE = True
    return cl
