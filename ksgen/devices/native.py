"""Runs kernels on this machine's processor as plain functions of shared libraries, on threads of its own or those of
OpenMP.

A launch returns when it is done. Host memory is used in place. Only sources whose work groups are single work items run
here, such as those of the families for processors. `host_threads.cpp` distributes work groups over threads. Without a
compiler, binaries from a cache or a bundle for this processor's instructions are run.

Products of 16-bit numbers use pairs or matrix tiles if the processor and the compiler have the instructions. The system
must permit tiles. Otherwise kernels use vector registers.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain, count, pairwise
from pathlib import Path
from struct import Struct
from time import perf_counter
from typing import Any, ClassVar, Literal

from ksgen.build.background import outcome
from ksgen.build.build import AbsentCompiler, build, compiling_is_forbidden, default_caches, usable_cores
from ksgen.build.bundle import Bundle
from ksgen.build.host import REMEDY, TRIAL, WALKS, HostCompiler, host_compilers, host_target
from ksgen.build.processors import (
    INSTRUCTION_SETS,
    InstructionSet,
    instruction_sets_here,
    machine,
    processor_features,
    processor_name,
    set_of,
    tiles_are_permitted,
    why_not_here,
)
from ksgen.build.request import Binary, Compiler, Request
from ksgen.devices.base import (
    Buffer,
    DeviceLimits,
    Found,
    HostArray,
    Launch,
    ProcessorDevice,
    Recording,
    Settled,
    Stream,
    ThreadWorkspace,
    UnavailableError,
    as_bytes,
    check_index,
    host_memory,
)
from ksgen.devices.threads import ThreadsByTime, of_torch, wanted_threads
from ksgen.errors import DeviceError, ToolchainError, warn
from ksgen.locks import new_lock
from ksgen.ownership import temporary_folder

MOST_THREADS = 1024
THREADS = Path(__file__).with_name("host_threads.cpp")
# cores among which a binary for other machines divides work: too many groups cost less than idle cores
USUAL_CORES = 16
_LAUNCH = "ksgen_launch"
_from_memory_so_far = count()  # libraries that were loaded from memory


def found() -> list[Found]:
    """This machine's processor, if its kernels can be compiled."""
    device = open_device(0)
    return [Found("native:0", "native", device.name, device.target)]


@cache
def open_device(index: int) -> NativeDevice:
    if os.name != "posix":
        raise UnavailableError("native: kernels are loaded as shared libraries on Linux and macOS only", "")
    device = NativeDevice(_compiler_or_absent())
    check_index("native", index, [device.name])
    return device


def _compiler_or_absent() -> HostCompiler | AbsentCompiler:
    """A compiler that works here, or an `AbsentCompiler` if only cached binaries can run."""
    try:
        return working_compiler()
    except ToolchainError as error:
        if _built_before():
            return AbsentCompiler(str(error))
        raise UnavailableError(f"native: {error}{_bundled_alternatives()}", "") from error


def working_compiler() -> HostCompiler:
    """The first compiler found that builds kernels here; `ToolchainError` if none does."""
    return _first_working(host_compilers())


@cache
def _first_working(compilers: tuple[HostCompiler, ...]) -> HostCompiler:
    refusals: list[str] = []
    for compiler in compilers:
        if not (why := why_not_working(compiler)):
            if refusals:
                warn(f"{'; '.join(refusals)}; {compiler} is used instead")
            return compiler
        refusals.append(why)
    named = "KSGEN_CXX names it, so no other is tried; unset it, or set it to another compiler"
    raise ToolchainError("; ".join((*refusals, named if os.environ.get("KSGEN_CXX") else REMEDY)))


@cache
def why_not_working(compiler: HostCompiler) -> str:
    """Reason why a compiler builds no kernel here, in one line; empty if it does. Only the first call tries it."""
    try:
        if not (compiler.is_proven or compiling_is_forbidden()):
            build(TRIAL, "ks_trial", host_target(), compiler)
    except ToolchainError as error:
        return str(error).splitlines()[0]
    return ""


def threads_request(target: str) -> Request:
    """Build request of the function that distributes work groups over threads. It is built once per target."""
    return Request(THREADS.read_text(encoding="utf-8"), _LAUNCH, target)


def _built_before() -> Binary | None:
    """Cached binary for `threads_request` by any compiler, for this processor or one of its instruction sets."""
    targets = (host_target(), *(each.target for each in instruction_sets_here()))
    caches = default_caches()
    return next((found for target in targets if (found := caches.get(threads_request(target)))), None)


def _bundled_alternatives() -> str:
    """The end of a message: processors that bundles hold kernels for, and why none of these runs here."""
    bundles = [layer for layer in default_caches().layers if isinstance(layer, Bundle)]
    targets = {each.target for each in chain.from_iterable(bundle.entries() for bundle in bundles)}
    held = {each.name: why_not_here(each) for each in INSTRUCTION_SETS.values() if each.target in targets}
    if any(target.startswith("host ") for target in targets):
        held["host"] = "" if host_target() in targets else "that was another processor"
    return "".join(
        f"; a bundle holds kernels for {name}, but {why or 'another version of ksgen wrote it'}"
        for name, why in held.items()
    )


def limits_for(instruction_set: InstructionSet) -> DeviceLimits:
    """Limits for kernels that run on any processor with these instructions."""
    limits = _limits(instruction_set.vector_bytes, instruction_set.has_arm_vectors, USUAL_CORES)
    return replace(limits, tiles=instruction_set.tiles, dots=instruction_set.dots)


def _limits(vector_bytes: int, has_arm_vectors: bool, cores: int) -> DeviceLimits:
    return DeviceLimits(2**18, 1024, cores, is_cpu=True, vector_bytes=vector_bytes, has_arm_vectors=has_arm_vectors)


class NativeMemory:
    """Host memory at address `pointer`, alive as long as `owner`."""

    __slots__ = ("nbytes", "owner", "pointer")

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self.pointer, self.nbytes, self.owner = pointer, nbytes, owner


class _Kernel:
    """The loop over an entry's work groups, in a library that stays loaded as long as the kernel lives."""

    def __init__(self, entry: str, library: ctypes.CDLL) -> None:
        self.entry, self.library = entry, library
        # attributes of the library and casts create reference cycles, which would keep it loaded
        walk = library[entry + WALKS]
        self.walk: int = ctypes.c_void_p.from_address(ctypes.addressof(walk)).value or 0


class _Recording:
    """Recorded launches with their arguments in place; a call replaces only the moved ones."""

    __slots__ = ("_by_time", "_kept", "_launcher", "_recorded", "_recorded_at", "_threads", "_workspace")

    def __init__(
        self,
        launcher: Any,
        launches: Sequence[Launch],
        moved: Sequence[tuple[int, int]],
        threads: int,
        by_time: ThreadsByTime,
    ) -> None:
        self._launcher, self._threads, self._by_time = launcher, threads, by_time
        words, steps, working = array("q"), array("q"), list[tuple[int, ThreadWorkspace]]()
        for each in launches:
            begin = len(words)
            steps.extend((each.kernel.walk, begin, each.grid, _size_of(each.args)))
            words.extend(_words(each.args))
            working += [(at, arg) for at, arg in enumerate(each.args, begin) if isinstance(arg, ThreadWorkspace)]
        # the largest: all use the same memory of the calling thread, whose address precedes the others
        self._workspace = max((each for _, each in working), key=lambda each: each.nbytes, default=None)
        if working:
            moved = [*((at, 0) for at, _ in working), *((at, number + 1) for at, number in moved)]
        moves = array("q", chain.from_iterable(moved))
        tables = _openmp() or 0, steps, len(launches), words, len(words), moves, len(moved)
        # the struct `Recorded` of host_threads.cpp
        self._recorded = array("q", [each if isinstance(each, int) else each.buffer_info()[0] for each in tables])
        self._recorded_at, _ = self._recorded.buffer_info()
        self._kept = launches, tables

    def __call__(self, addresses: Sequence[int] = ()) -> None:
        if self._workspace is not None:
            addresses = (self._workspace.pointer, *addresses)
        self._by_time.run(self._launch, self._threads, addresses)

    def settled(self) -> Settled | None:
        if (settled := self._by_time.settled(self._threads)) is None:
            return None
        function = ctypes.cast(self._launcher, ctypes.c_void_p).value or 0
        workspace_bytes = 0 if self._workspace is None else self._workspace.nbytes
        return Settled(function, self._recorded_at, settled[0], workspace_bytes, *settled[1:])

    def time_again(self) -> None:
        self._by_time.time_again()

    def _launch(self, threads: int, addresses: Sequence[int]) -> None:
        self._launcher(_packer(len(addresses))(self._recorded_at, threads, *addresses))


@cache
def _packer(addresses: int) -> Callable[..., bytes]:
    """Function that writes the struct `Repeat` of host_threads.cpp."""
    return Struct(f"{2 + addresses}q").pack


class NativeDevice(ProcessorDevice):
    """This machine's processor."""

    kind: Literal["native"] = "native"
    runtime: Literal["native"] = "native"
    shares_host = True
    index = 0

    def __init__(self, compiler: HostCompiler | AbsentCompiler) -> None:
        self._compiler = compiler
        self.name = processor_name()
        self.target = host_target()
        self.driver_version = compiler.version
        host_compiler = compiler if isinstance(compiler, HostCompiler) else None
        limits = _limits(_vector_bytes(), machine() == "aarch64", usable_cores())
        self.limits = replace(limits, tiles=usable_tiles(host_compiler), dots=pair_products(host_compiler))
        self._starting = new_lock()
        self._launcher: Any = None
        self._several: Any = None
        self._per_thread = threading.local()
        # by their bytes: the entries of a binary share one library
        self._libraries = weakref.WeakValueDictionary[bytes, ctypes.CDLL]()
        # recordings of the same launches on other arrays share what was found
        self._by_time = weakref.WeakValueDictionary[tuple[Any, ...], ThreadsByTime]()

    def compiler(self) -> Compiler:
        return self._compiler

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> _Kernel:
        check_runs_here(binary)
        if shared_bytes:
            raise DeviceError(
                f"{entry}: a kernel whose work items share memory needs an OpenCL driver; give device=opencl"
            )
        library = self._libraries.get(binary.data)
        if library is None:
            library = self._libraries[binary.data] = load_library(binary.data, entry)
        try:
            return _Kernel(entry, library)
        except AttributeError:
            raise DeviceError(f"{entry}: the library holds no such kernel; build it again from source") from None

    def launch(
        self, kernel: _Kernel, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Stream
    ) -> None:
        _check_launch(self.name, kernel, block, stream)
        values = array("q", _words(args))
        launcher = self._launcher or self.prepare_launches()
        at, _ = values.buffer_info()
        launcher(kernel.walk, at, grid, _size_of(args), self._threads(), _openmp())

    def record(self, launches: Sequence[Launch], stream: Stream, moved: Sequence[tuple[int, int]] = ()) -> Recording:
        """Record launches, which one call then repeats together, on as many threads as wanted now."""
        for each in launches:
            _check_launch(self.name, each.kernel, each.block, stream)
        self.prepare_launches()
        threads = self._threads()
        key = threads, *((each.kernel.walk, each.grid, _size_of(each.args)) for each in launches)
        by_time = self._by_time.setdefault(key, ThreadsByTime())
        return _Recording(self._several, launches, moved, threads, by_time)

    def _threads(self) -> int:
        return min(wanted_threads() or self.limits.multiprocessors, MOST_THREADS)

    def prepare_launches(self) -> Any:
        """Function that distributes work groups over threads: compiled once, and cached like kernels."""
        if self._launcher is None:  # kept here, because the background drops a job when its result is fetched
            self._launcher = outcome(self, "the function that distributes work over cores", self._start_here)
        return self._launcher

    def _start_here(self) -> Any:
        with self._starting:
            if self._several is None:
                library = load_library(self._built_threads().data, _LAUNCH)
                launcher, several = library.ksgen_launch, library.ksgen_launch_all
                launcher.restype = several.restype = None
                numbers = ctypes.c_long, ctypes.c_int64, ctypes.c_long
                launcher.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *numbers, ctypes.c_void_p)
                several.argtypes = (ctypes.c_char_p,)
                self._library, self._several = library, several
        return self._library.ksgen_launch

    def _built_threads(self) -> Binary:
        request = threads_request(self.target)
        compiler = self._compiler
        if isinstance(compiler, HostCompiler):
            compiler = ThreadsCompiler(compiler.command, compiler.builds_for)
        try:
            return build(request.text, request.entry, request.target, compiler)
        except ToolchainError:
            if found := _built_before():
                return found
            raise

    def allocate(self, nbytes: int) -> Buffer:
        memory = host_memory(nbytes)
        return NativeMemory(memory.ctypes.data, nbytes, memory)

    def shared(self, pointer: int) -> Buffer:
        return pointer

    def workspace(self, nbytes: int, stream: Stream) -> Buffer:
        return ThreadWorkspace(self._per_thread, nbytes, self.allocate)

    def upload(self, buffer: Buffer, array: HostArray, stream: Stream = None) -> None:
        source = as_bytes(array)
        ctypes.memmove(buffer.pointer, source.ctypes.data, source.nbytes)

    def download(self, array: HostArray, buffer: Buffer, stream: Stream = None) -> None:
        target = as_bytes(array)
        ctypes.memmove(target.ctypes.data, buffer.pointer, target.nbytes)

    def synchronize(self, stream: Stream = None) -> None:
        """Nothing to wait for: a launch returns when it is done."""

    def time(self, call: Callable[[], object], stream: Stream, runs: int, warmup: int) -> list[float]:
        for _ in range(warmup):
            call()
        marks = [perf_counter()]
        for _ in range(runs):
            call()
            marks.append(perf_counter())
        return [end - begin for begin, end in pairwise(marks)]


def _words(args: tuple[Any, ...]) -> list[int]:
    """Arguments as 64-bit numbers: integers unchanged, memory by its address, None as 0."""
    return [arg if isinstance(arg, int) else 0 if arg is None else arg.pointer for arg in args]


def _size_of(args: tuple[Any, ...]) -> int:
    """Number by which times of one kernel differ with equal grids: a product's last argument, which is the batch."""
    *_, last = args
    return last if isinstance(last, int) else 0


def _check_launch(device: str, kernel: _Kernel, block: int, stream: Stream) -> None:
    if stream is not None:
        raise DeviceError(f"launching {kernel.entry}: {device} has no streams; give None")
    if block != 1:
        raise DeviceError(
            f"launching {kernel.entry}: {block} work items per group need an OpenCL driver; give device=opencl"
        )


class ThreadsCompiler(HostCompiler):
    """The host's compiler for sources that are C++ already."""

    name: ClassVar[str] = "c++ threads"

    def compile(self, text: str, entry: str, target: str) -> Binary:
        self.check_target(target, entry)
        return Binary(self.compile_whole(text, entry, target), entry, target)


def check_runs_here(binary: Binary) -> None:
    """Raise `DeviceError` for another processor's library: a missing instruction would end the process."""
    named = set_of(binary.target)
    why = why_not_here(named) if named else "" if binary.target == host_target() else f"this is {host_target()}"
    if why:
        raise DeviceError(f"{binary.entry}: a binary for {binary.target} does not run here: {why}")


def load_library(data: bytes, name: str) -> ctypes.CDLL:
    """Load a library from a temporary file, which is removed at once; from memory if files may not be executed."""
    try:
        with temporary_folder("native") as folder:
            file = Path(folder, f"{name}.so")
            file.write_bytes(data)
            library = ctypes.CDLL(str(file))
    except OSError as error:
        library = _from_memory(data, name, error)
    weakref.finalize(library, _unload, library._handle).atexit = False
    return library


def _from_memory(data: bytes, name: str, refused: OSError) -> ctypes.CDLL:
    with suppress(OSError, AttributeError), os.fdopen(os.memfd_create(name), "wb") as file:
        file.write(data)
        file.flush()
        # The numbers of files recur, and for the path of a loaded library the loader returns that library. So each path
        # has its own slashes and dots: the bits of a count.
        spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_from_memory_so_far):b}")
        return ctypes.CDLL(f"/proc/self/fd/{spelling}{file.fileno()}")
    raise DeviceError(f"loading {name}: {refused}; set TMPDIR to a folder whose files may be executed")


def _unload(handle: int) -> None:
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


def _openmp() -> int | None:
    """Address of the function that begins a parallel region of PyTorch's OpenMP, whose threads are used; else None."""
    return _parallel_of(of_torch("__file__")) if of_torch("get_num_threads") else None


@cache
def _parallel_of(module: str | None) -> int | None:
    folders = [Path(module).parent / "lib"] if module else []
    # libgomp, libomp, libiomp5
    for library in (each for folder in folders for each in sorted(folder.glob("lib*omp*"))):
        with suppress(OSError, AttributeError):
            loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value
    return None


def _vector_bytes() -> int:
    features = processor_features()
    return 64 if "avx512f" in features else 32 if "avx2" in features else 16


# macros that compilers define if they have instructions for products of these operands
_MACROS = {"bf16": "__AMX_BF16__", "f16": "__AMX_FP16__"}
_FLAGS = {"bf16": "amx_bf16", "f16": "amx_fp16"}  # Linux's names of the processor's features


def usable_tiles(compiler: HostCompiler | None) -> tuple[str, ...]:
    """Operands that matrix tiles multiply, by `Operand.name`. `compiler` is None if binaries come from elsewhere."""
    features = processor_features()
    named = [name for name, flag in _FLAGS.items() if flag in features and "amx_tile" in features]
    found = tuple(name for name in named if _makes(compiler, "__AMX_TILE__", _MACROS[name]))
    return found if found and tiles_are_permitted() else ()


def pair_products(compiler: HostCompiler | None) -> tuple[str, ...]:
    """Operands that processor and compiler can multiply in pairs in vector registers, by `Operand.name`."""
    is_there = "avx512_bf16" in processor_features() and _makes(compiler, "__AVX512BF16__")
    return ("bf16",) if is_there else ()


def _makes(compiler: HostCompiler | None, *macros: str) -> bool:
    return compiler is None or set(macros) <= _made_by(compiler)


@cache
def _made_by(compiler: HostCompiler) -> frozenset[str]:
    """Macros that the compiler defines for this processor, cached."""
    return compiler.macros(host_target())
