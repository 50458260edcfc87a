"""Runs kernels on this machine's processor as plain functions of shared libraries, on threads of its own or those of OpenMP.

A launch returns when it is done. Host memory is used where it lies. Only texts whose work groups are single work items run here: those of
the families for processors. `host_threads.cpp` shares work groups out among threads.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from ksgen.build.build import build, usable_cores
from ksgen.build.host import WALKS, HostCompiler, find_host_compiler, host_target, processor_features
from ksgen.build.request import Binary
from ksgen.devices.base import Buffer, Found, Limits, Stream, UnavailableError, as_bytes, check_index, host_memory
from ksgen.devices.matrix_tiles import usable_tiles
from ksgen.devices.threads import wanted_threads
from ksgen.errors import DeviceError, ToolchainError

if TYPE_CHECKING:
    from ksgen.build.request import Compiler
    from ksgen.devices.base import HostArray

MOST_THREADS = 1024
_THREADS = Path(__file__).with_name("host_threads.cpp")
_LAUNCH = "ksgen_launch"


def found() -> list[Found]:
    """This machine's processor, if its kernels can be compiled."""
    device = open_device(0)
    return [Found("native:0", "native", device.name, device.target)]


@cache
def open_device(index: int) -> NativeDevice:
    if os.name != "posix":
        raise UnavailableError("native: kernels are loaded so on Linux and macOS alone", "")
    try:
        device = NativeDevice(find_host_compiler())
    except ToolchainError as error:
        raise UnavailableError(f"native: {error}", "") from error
    check_index("native", index, [device.name])
    return device


class Memory:
    """Host memory. `pointer` is where it begins."""

    __slots__ = ("nbytes", "owner", "pointer")

    def __init__(self, pointer: int, nbytes: int = 0, owner: Any = None) -> None:
        self.pointer, self.nbytes, self.owner = pointer, nbytes, owner


class _Workspace:
    """Memory to work in, of whichever thread of Python launches: several do so at once, and none may write where another works."""

    __slots__ = ("_own", "nbytes")

    def __init__(self, own: threading.local, nbytes: int) -> None:
        self._own, self.nbytes = own, nbytes

    @property
    def pointer(self) -> int:
        """Where the calling thread's begins; made, or made larger, where it is too small."""
        memory: Memory | None = getattr(self._own, "memory", None)
        if memory is None or memory.nbytes < self.nbytes:
            memory = self._own.memory = _allocated(self.nbytes)
        return memory.pointer


class _Kernel:
    """A walk through an entry's work groups, in a library that is loaded as long as the kernel lives."""

    def __init__(self, entry: str, library: ctypes.CDLL) -> None:
        self.entry, self.library = entry, library
        self.walk = ctypes.cast(getattr(library, entry + WALKS), ctypes.c_void_p)


class NativeDevice:
    """This machine's processor."""

    kind: Literal["native"] = "native"
    runtime: Literal["native"] = "native"
    dialect: Literal["opencl"] = "opencl"
    supports_foreign_streams = False
    shares_host = True
    context = 0
    index = 0

    def __init__(self, compiler: HostCompiler) -> None:
        self._compiler = compiler
        self.name = _processor_name()
        self.target = host_target()
        self.driver_version = compiler.version
        self.limits = Limits(
            shared_bytes_per_block=2**18, threads_per_block=1024, multiprocessors=usable_cores(), is_cpu=True,
            vector_bytes=_vector_bytes(), tiles=usable_tiles(compiler),
        )  # fmt: skip
        self._starting = threading.Lock()
        self._launcher: Any = None
        self._own = threading.local()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def compiler(self) -> Compiler:
        return self._compiler

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> _Kernel:
        if binary.target != self.target:
            raise DeviceError(f"{entry}: a binary for {binary.target} does not run on {self.target}")
        if shared_bytes:
            raise DeviceError(f"{entry}: a kernel whose work items share memory needs an OpenCL driver; {self.name} runs it by opencl")
        library = _library(binary.data, entry)
        if not hasattr(library, entry + WALKS):
            raise DeviceError(f"{entry}: the library holds no such kernel; build it again from source")
        return _Kernel(entry, library)

    def launch(self, kernel: _Kernel, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Stream) -> None:
        if stream is not None:
            raise DeviceError(f"launching {kernel.entry}: {self.name} has no streams; give None")
        if block != 1:
            raise DeviceError(f"launching {kernel.entry}: {block} work items a group need an OpenCL driver; give device=opencl")
        values = [0 if arg is None else arg if isinstance(arg, int) else arg.pointer for arg in args]
        arguments = (ctypes.c_int64 * len(values))(*values)
        launcher = self._launcher or self._start()
        launcher(kernel.walk, arguments, grid, min(wanted_threads() or self.limits.multiprocessors, MOST_THREADS), _openmp())

    def _start(self) -> Any:
        """The function that shares work groups out: compiled once, and kept as kernels are."""
        with self._starting:
            if self._launcher is None:
                library = _library(self._built_threads().data, _LAUNCH)
                launcher = library.ksgen_launch
                launcher.restype = None
                launcher.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
                self._library, self._launcher = library, launcher
        return self._launcher

    def _built_threads(self) -> Binary:
        return build(_THREADS.read_text(encoding="utf-8"), _LAUNCH, self.target, _OfThreads(self._compiler))

    def allocate(self, nbytes: int) -> Buffer:
        return _allocated(nbytes)

    def shared(self, pointer: int) -> Buffer:
        return Memory(pointer)

    def workspace(self, nbytes: int, stream: Stream) -> Buffer:
        return _Workspace(self._own, nbytes)

    def upload(self, buffer: Buffer, array: HostArray, stream: Stream = None) -> None:
        source = as_bytes(array)
        ctypes.memmove(buffer.pointer, source.ctypes.data, source.nbytes)

    def download(self, array: HostArray, buffer: Buffer, stream: Stream = None) -> None:
        target = as_bytes(array)
        ctypes.memmove(target.ctypes.data, buffer.pointer, target.nbytes)

    def synchronize(self, stream: Stream = None) -> None:
        """Nothing to wait for: a launch returns when it is done."""

    def is_capturing(self, stream: Stream) -> bool:
        return False

    def time(self, call: Callable[[], None], stream: Stream, runs: int, warmup: int) -> list[float]:
        for _ in range(warmup):
            call()
        seconds = []
        for _ in range(runs):
            begin = perf_counter()
            call()
            seconds.append(perf_counter() - begin)
        return seconds


def _allocated(nbytes: int) -> Memory:
    memory = host_memory(nbytes)
    return Memory(memory.ctypes.data, nbytes, memory)


class _OfThreads:
    """The same compiler, for a text that is C++ already."""

    name = "c++ threads"

    def __init__(self, compiler: HostCompiler) -> None:
        self._compiler = compiler
        self.version = compiler.version

    def options(self, target: str) -> tuple[str, ...]:
        return self._compiler.options(target)

    def compile(self, text: str, entry: str, target: str) -> Binary:
        return Binary(self._compiler.compile_whole(text, entry, target), entry, target)


def _library(data: bytes, name: str) -> ctypes.CDLL:
    """A library of these bytes, from a file that is gone at once. Where files may not be run, from memory."""
    try:
        with tempfile.TemporaryDirectory(prefix="ksgen-native-") as folder:
            file = Path(folder, f"{name}.so")
            file.write_bytes(data)
            library = ctypes.CDLL(str(file))
    except OSError as error:
        library = _from_memory(data, name, error)
    weakref.finalize(library, _unload, library._handle).atexit = False
    return library


def _from_memory(data: bytes, name: str, refused: OSError) -> ctypes.CDLL:
    with suppress(OSError, AttributeError):
        file = os.memfd_create(name)
        with os.fdopen(os.dup(file), "wb") as open_file:
            open_file.write(data)
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    raise DeviceError(f"loading {name}: {refused}; TMPDIR names a folder whose files may be run")


def _unload(handle: int) -> None:
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


def _openmp() -> int | None:
    """How PyTorch's OpenMP begins a region, if it has one: then its threads do our work, which would wait for each other else."""
    return _parallel_of(sys.modules["torch"].__file__) if "torch" in sys.modules else None


@cache
def _parallel_of(module: str | None) -> int | None:
    folders = [Path(module).parent / "lib"] if module else []
    for library in (each for folder in folders for each in sorted(folder.glob("lib*omp*"))):  # libgomp, libomp, libiomp5
        with suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value
    return None


@cache
def _processor_name() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _vector_bytes() -> int:
    features = processor_features()
    return 64 if "avx512f" in features else 32 if "avx2" in features else 16
