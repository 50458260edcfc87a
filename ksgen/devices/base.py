"""The interface that every runtime implements: what a device can do, and its properties. Imports no runtime."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from ksgen.errors import DeviceError, LaunchError

if TYPE_CHECKING:
    import numpy as np

    from ksgen.build.request import Binary, Compiler
    from ksgen.families import TensorMap

HostArray: TypeAlias = "np.ndarray[Any, Any]"
Buffer = Any  # device memory: the result of `allocate`, a pyopencl Buffer, or a CUDA pointer
Stream = Any  # a CUDA handle as an int, a PyCUDA stream, a pyopencl CommandQueue, or None for the device's own
KernelHandle = Any  # the result of `load`

PROCESSOR_RUNTIMES = ("native", "opencl")  # runtimes that run kernels on processors
LINE_BYTES = 64  # bytes per cache line of a processor
GPU_BATCH, CPU_BATCH = 25088, 1568  # measured unless the user names a batch: 128 and 8 sequences of 196 tokens
CONTEXT_LOST = "; the GPU context is lost, and only a new process can use the GPU again"
MAP_BYTES = 128  # size of an encoded tensor map
PER_THREAD_STREAM = 2  # CUDA's default stream of the calling thread
LEGACY_STREAM = 1  # CUDA's legacy default stream, like 0. It cannot be captured; querying its capture status may fail
PORTABLE_SHARED_BYTES = 48 * 1024  # a CUDA kernel that needs more must request it before its launch


@dataclass(frozen=True)
class DeviceLimits:
    """The resources of one block, and how many multiprocessors run blocks."""

    shared_bytes_per_block: int
    threads_per_block: int
    multiprocessors: int
    is_cpu: bool = False
    vector_bytes: int = 16  # width of a processor's vector registers
    tiles: tuple[str, ...] = ()  # operands that a processor's matrix tiles multiply: bf16, f16
    dots: tuple[str, ...] = ()  # operands that a processor's vector instructions multiply in pairs: bf16
    has_arm_vectors: bool = False  # whether the vector registers are ARM's, which has more of them


class Device(Protocol):
    """One device through one runtime. Every method may be called from any thread."""

    kind: Literal["cuda", "native", "opencl"]
    runtime: Literal["pycuda", "driver", "native", "opencl"]
    dialect: Literal["cuda", "opencl"]
    index: int  # among the devices of its runtime; -1 for a context that the user brought
    name: str
    target: str  # the target that binaries are built for: "sm_90a", or platform, device and driver version for OpenCL
    driver_version: str
    limits: DeviceLimits
    shares_host: bool  # kernels use the host's memory in place
    is_open: bool  # False once the CUDA context that it works in is destroyed
    context: int  # the address of the CUDA context that it works in; 0 for other devices
    supports_foreign_streams: bool  # can launch on other libraries' CUDA streams, given as integers
    # for host arrays without a stream; copies on CUDA's default stream would invalidate captures of other streams
    host_stream: Stream

    def compiler(self) -> Compiler | None:
        """The device's own compiler, or None for the compiler that `build` finds."""

    def prepare_launches(self) -> object:
        """Build what launches need in addition to kernels; `PendingError` while a background thread does it."""

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> KernelHandle:
        """Load an entry. `starts_early` allows programmatic dependent launch, if the runtime supports it."""

    def launch(
        self, kernel: KernelHandle, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Stream
    ) -> None:
        """Enqueue one launch. `args`: encoded maps first; then buffers, None (a null pointer) or ints, 64 bits each."""

    def encode_map(self, described: TensorMap, pointer: int) -> bytes:
        """Encode the tensor map of an array at a 16-byte boundary, for a kernel's argument. CUDA only."""

    def allocate(self, nbytes: int) -> Buffer: ...

    def shared(self, pointer: int) -> Buffer:
        """Host memory as a kernel's argument, if the device shares it. The memory must outlive the launches."""

    def workspace(self, nbytes: int, stream: Stream) -> Buffer:
        """Memory for intermediates of launches on that stream. A thread's later launches may get it again."""

    def upload(self, buffer: Buffer, array: HostArray, stream: Stream = None) -> None:
        """Copy to the device, in stream order. The array may change once this returns."""

    def download(self, array: HostArray, buffer: Buffer, stream: Stream = None) -> None:
        """Copy from the device, in stream order. The array is complete once this returns."""

    def synchronize(self, stream: Stream = None) -> None: ...

    def is_capturing(self, stream: Stream) -> bool:
        """Whether the stream is recording a CUDA graph: nothing may then wait or allocate."""

    def time(self, call: Callable[[], object], stream: Stream, runs: int, warmup: int) -> list[float]:
        """Seconds of each run by the device's own clock."""


class ProcessorDevice:
    """Shared base of devices of OpenCL's dialect: no CUDA context, and no streams of other libraries."""

    dialect: Literal["opencl"] = "opencl"
    supports_foreign_streams = False
    host_stream = None
    is_open = True
    context = 0
    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def prepare_launches(self) -> object:
        return None

    def is_capturing(self, stream: Stream) -> bool:
        return False


def refuse_capture(device: Device, stream: Stream, what: str, instead: str = "") -> None:
    """Raise `LaunchError` while a CUDA graph records the stream."""
    if device.kind == "cuda" and device.is_capturing(stream):
        remedy = instead or (
            "before the capture, call launcher.prepare(...) with the same arguments, or build(batch) of a KSLinear"
        )
        raise LaunchError(f"this call {what}, which a CUDA graph cannot record; {remedy}")


class Launch(NamedTuple):
    """One launch, as `Device.launch` takes it."""

    kernel: KernelHandle
    grid: int
    block: int
    shared_bytes: int
    args: tuple[Any, ...]


class Settled(NamedTuple):
    """How native code repeats recorded launches: by a call of `function` with the struct `Repeat` of host_threads.cpp.

    The addresses in the struct begin with that of a workspace. They do not if `workspace_bytes` is 0.
    """

    function: int  # address
    recorded: int  # address
    threads: int
    workspace_bytes: int
    calls: int  # calls after which another number of threads may be faster
    most_ns: int  # a launch on all threads that takes longer counts as late; 0: none does


class Recording(Protocol):
    """Launches recorded in order, to be repeated on other host memory."""

    def settled(self) -> Settled | None:
        """How native code repeats the launches; None if it cannot, or until the fastest number of threads is known."""

    def time_again(self) -> None:
        """Let the next calls be timed again, on all threads and on one thread, to find which is faster."""

    def __call__(self, addresses: Sequence[int] = ()) -> None:
        """Repeat the launches on the memory at these addresses, and wait for them. Several threads may call at once."""


def recorder(device: Device) -> Any:
    """Method by which a device that shares the host's memory records launches; None if it has none.

    It takes the launches, their stream, and the arguments that change. Each is a pair: its number among the arguments
    of all launches, and the number of its address in a call.
    """
    return getattr(device, "record", None)


def uploaded(device: Device, array: HostArray) -> Buffer:
    """Allocate device memory and copy a host array to it, complete on return."""
    buffer = device.allocate(array.nbytes)
    device.upload(buffer, array, device.host_stream)
    return buffer


def default_batch(limits: DeviceLimits) -> int:
    """The batch to measure on a device with these limits, unless the user names one."""
    return CPU_BATCH if limits.is_cpu else GPU_BATCH


class Memory:
    """CUDA device memory, freed with its last reference. Its value as an int is its pointer."""

    __slots__ = ("__weakref__", "nbytes", "pointer")

    def __init__(self, pointer: int, nbytes: int, free: Callable[..., object], *args: Any) -> None:
        self.pointer, self.nbytes = pointer, nbytes
        weakref.finalize(self, free, *args).atexit = False  # at exit the driver frees it

    def __index__(self) -> int:
        return self.pointer


class ThreadWorkspace:
    """Workspace of the launching thread, because threads that launch at once may not share one."""

    __slots__ = ("_allocate", "_per_thread", "nbytes")

    def __init__(self, per_thread: threading.local, nbytes: int, allocate: Callable[[int], Buffer]) -> None:
        """Create it. All workspaces of a device share `per_thread`, which holds one allocation per thread."""
        self._per_thread, self.nbytes, self._allocate = per_thread, nbytes, allocate

    @property
    def buffer(self) -> Buffer:
        """The calling thread's memory, allocated at first use and again if it is too small."""
        kept: tuple[int, Buffer] | None = getattr(self._per_thread, "workspace", None)
        if kept is None or kept[0] < self.nbytes:
            kept = self._per_thread.workspace = self.nbytes, self._allocate(self.nbytes)
        return kept[1]

    @property
    def pointer(self) -> int:
        """Address of the calling thread's memory, if it is host memory."""
        address: int = self.buffer.pointer
        return address


@dataclass(frozen=True)
class Found:
    """A device that `find_device(selector)` can open."""

    selector: str
    runtime: str
    name: str
    target: str


@dataclass(frozen=True)
class Missing:
    """A runtime without a device: why, and the command that installs what is missing."""

    runtime: str
    why: str
    remedy: str


class RefusedError(DeviceError):
    """A device refuses a launch or a tensor map, and may run others. Or `KSGEN_CHECK=first` finds a wrong result."""


class UnavailableError(DeviceError):
    """This machine or environment lacks a runtime."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}; {remedy}" if remedy else why)
        self.why, self.remedy = why, remedy


def check_index(runtime: str, index: int, names: Sequence[str]) -> None:
    """Raise `DeviceError` unless `runtime:index` is one of the devices listed."""
    if not 0 <= index < len(names):
        listed = ", ".join(f"{runtime}:{number} ({name})" for number, name in enumerate(names))
        raise DeviceError(f"{runtime}:{index}: no such device; there is {listed}")


def cuda_driver_version(cuda_version: int) -> str:
    """The kernel driver's version, if Linux reports it, and the newest CUDA that it supports (13000: 13.0)."""
    supported = f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
    try:
        version = re.search(r"\d{3,}(\.\d+)+", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        version = None
    return f"{version[0]}, {supported}" if version else supported


def host_memory(nbytes: int) -> HostArray:
    """Uninitialised host memory that begins at a cache line, where a processor's kernels write fastest."""
    import numpy as np

    whole = np.empty(nbytes + LINE_BYTES, np.uint8)
    begin = -address_of(whole) % LINE_BYTES
    return whole[begin : begin + nbytes]


HUGE_BYTES = 4 << 20  # arrays from this size on lie in huge pages, as those of NumPy do
_MADV_HUGEPAGE = 14


def use_huge_pages(address: int, nbytes: int) -> None:
    """Ask Linux to map a new, large array by huge pages.

    Page tables of huge pages stay in a core's caches, and 512 faults become one. Small arrays are left unchanged.
    """
    if nbytes < HUGE_BYTES or (advise := _madvise()) is None:
        return
    begin = -(-address // PAGESIZE) * PAGESIZE
    advise(begin, address + nbytes - begin, _MADV_HUGEPAGE)  # refused where the kernel has none: nothing changes


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def address_of(array: HostArray) -> int:
    """Address of a NumPy array. Read from its buffer if possible, which takes a third of the time."""
    flags = array.flags
    # for other arrays, ctypes or NumPy refuse the buffer
    if flags.c_contiguous and flags.writeable and array.size and array.dtype.isbuiltin == 1:
        memory: Any = array  # annotations of older NumPy versions declare no buffer
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    address: int = array.__array_interface__["data"][0]
    return address


def as_bytes(array: HostArray) -> HostArray:
    """View an array's memory as plain bytes, because runtimes do not know bfloat16's buffer format."""
    if not array.flags.c_contiguous:
        raise DeviceError(f"array of shape {array.shape} and strides {array.strides}: only row-major arrays are copied")
    return array.reshape(-1).view("u1")
