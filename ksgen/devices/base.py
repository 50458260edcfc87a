"""What a device offers and what it says of itself: the one interface of all runtimes. Imports none of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ksgen.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np

    from ksgen.build.request import Binary, Compiler
    from ksgen.families import TensorMap

    HostArray = np.ndarray[Any, Any]

Buffer = Any  # device memory, as its runtime spells it: what `allocate` returned, or a pyopencl Buffer, or a CUDA pointer
Stream = Any  # a CUDA handle as an int, a PyCUDA stream, a pyopencl CommandQueue, or None for the device's own
KernelHandle = Any  # what `load` returned

GPU_BATCH, CPU_BATCH = 25088, 1568  # what is measured unless a batch is named: 128 sequences of 196 tokens, and 8 of them
CONTEXT_LOST = "; the GPU context is lost, and only a new process can use the GPU again"
MAP_BYTES = 128  # of an encoded tensor map
LEGACY_STREAM = 1  # CUDA's default stream by its other name, beside 0: it cannot be captured, and asking it may be an error
PORTABLE_SHARED_BYTES = 48 * 1024  # above this, a CUDA kernel must ask for its dynamic shared memory beforehand


@dataclass(frozen=True)
class Limits:
    """What one block may use, and how many run side by side."""

    shared_bytes_per_block: int
    threads_per_block: int
    multiprocessors: int
    is_cpu: bool = False
    vector_bytes: int = 16  # a processor's vector registers


class Device(Protocol):
    """One device through one runtime. Every method may be called from any thread."""

    kind: Literal["cuda", "opencl"]
    runtime: Literal["pycuda", "driver", "opencl"]
    dialect: Literal["cuda", "opencl"]
    index: int  # among the devices of its runtime; -1 for a context that the user brought
    name: str
    target: str  # what binaries are built for: "sm_90a", or platform, device and driver version for OpenCL
    driver_version: str
    limits: Limits
    shares_host: bool  # kernels take the host's memory where it lies
    supports_foreign_streams: bool  # launches on CUDA streams that others made, given as integers

    def compiler(self) -> Compiler: ...

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> KernelHandle:
        """`starts_early`: its launches may begin while the one before them in their stream ends, for which it waits by itself."""

    def launch(self, kernel: KernelHandle, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Stream) -> None:
        """Enqueue one launch. `args`: encoded maps, then buffers, None for a null pointer, or ints: 64 bits each."""

    def encode_map(self, described: TensorMap, pointer: int) -> bytes:
        """The map of an array at a 16-byte boundary, as a kernel takes it. CUDA alone has them."""

    def allocate(self, nbytes: int) -> Buffer: ...

    def shared(self, pointer: int) -> Buffer:
        """The host's memory as a kernel's argument, where the device shares it. Its owner must outlive the launches."""

    def workspace(self, nbytes: int, stream: Stream) -> Buffer:
        """Memory for what launches on that stream leave for each other; later ones on the same stream may be given the same."""

    def upload(self, buffer: Buffer, array: HostArray, stream: Stream = None) -> None:
        """Copy to the device in the stream's order; the array may change as soon as this returns."""

    def download(self, array: HostArray, buffer: Buffer, stream: Stream = None) -> None:
        """Copy from the device in the stream's order; the array is complete when this returns."""

    def synchronize(self, stream: Stream = None) -> None: ...

    def is_capturing(self, stream: Stream) -> bool:
        """Whether the stream records a CUDA graph, so that nothing may wait or allocate."""

    def time(self, call: Callable[[], None], stream: Stream, runs: int, warmup: int) -> list[float]:
        """Seconds of each run by the device's own clock."""


def uploaded(device: Device, array: HostArray, stream: Stream = None) -> Buffer:
    """New memory on the device with a host array's content, in the stream's order."""
    buffer = device.allocate(array.nbytes)
    device.upload(buffer, array, stream)
    return buffer


def default_batch(limits: Limits) -> int:
    """The batch that is measured on such a device unless one is named."""
    return CPU_BATCH if limits.is_cpu else GPU_BATCH


class Memory:
    """Device memory of CUDA, freed with its last reference. An int wherever one is asked for: its pointer."""

    __slots__ = ("__weakref__", "nbytes", "pointer")

    def __init__(self, pointer: int, nbytes: int, free: Callable[..., object], *args: Any) -> None:
        self.pointer, self.nbytes = pointer, nbytes
        weakref.finalize(self, free, *args).atexit = False  # the driver frees what a process leaves

    def __index__(self) -> int:
        return self.pointer


@dataclass(frozen=True)
class Found:
    """A device that can be opened: `find_device(selector)`."""

    selector: str
    runtime: str
    name: str
    target: str


@dataclass(frozen=True)
class Missing:
    """A runtime with no device: why, and what to type to get it."""

    runtime: str
    why: str
    remedy: str


class UnavailableError(DeviceError):
    """A runtime that this machine or environment lacks."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}; {remedy}" if remedy else why)
        self.why, self.remedy = why, remedy


def check_index(runtime: str, index: int, names: Sequence[str]) -> None:
    """Raise `DeviceError` unless `runtime:index` is one of the devices listed."""
    if not 0 <= index < len(names):
        listed = ", ".join(f"{runtime}:{number} ({name})" for number, name in enumerate(names))
        raise DeviceError(f"{runtime}:{index}: no such device; there is {listed}")


def cuda_target(major: int, minor: int) -> str:
    """The target of a compute capability, with all of the GPU's instructions."""
    from ksgen.families.gpus import target_of

    return target_of(major, minor)


def cuda_driver_version(cuda_version: int) -> str:
    """The kernel driver's version where Linux tells it, and the newest CUDA that the driver serves (13000: 13.0)."""
    import re
    from pathlib import Path

    served = f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
    try:
        told = re.search(r"\d{3,}(\.\d+)+", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        told = None
    return f"{told[0]}, {served}" if told else served


def as_bytes(array: HostArray) -> HostArray:
    """The same memory as plain bytes: runtimes do not know bfloat16's buffer format."""
    if not array.flags.c_contiguous:
        raise DeviceError(f"array of shape {array.shape} and strides {array.strides}: only row-major arrays are copied")
    return array.reshape(-1).view("u1")
