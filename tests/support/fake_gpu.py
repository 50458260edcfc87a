"""A CUDA device for tests: its memory is the host's, its launches are the emulator's, and its streams run late.

Work is queued and runs only when its stream is waited for, so that a missing wait, or a wrong stream, shows as NaN.
Memory is NaN before it is written and after it is freed. Stream 2 is another one in each thread, as CUDA's.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np

from ksgen.build.request import Binary, Resources
from ksgen.devices.base import DeviceLimits, Memory
from ksgen.launch.arrays import ArrayView
from tests.emulator import TensorMap, run_cuda

Array = np.ndarray[Any, Any]
Work = Callable[[], None]
_TYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2"}


@dataclass
class TextCompiler:
    """Compiler whose binaries are the source itself."""

    name: str = "text"
    version: str = "1"
    compiled: list[str] = field(default_factory=list)  # entries, in order

    def options(self, target: str) -> tuple[str, ...]:
        return ()

    def compile(self, text: str, entry: str, target: str) -> Binary:
        self.compiled.append(entry)
        return Binary(text.encode(), entry, target, Resources())


@dataclass(eq=False)
class FakeGpu:
    name: str = "Fake GPU"
    index: int = 0
    supports_foreign_streams: bool = True
    host_stream: int | None = None
    is_open: bool = True
    shares_host: bool = False
    context: int = 0
    compiles: TextCompiler = field(default_factory=TextCompiler)
    launches: list[tuple[str, Any]] = field(default_factory=list)  # entry and stream of every launch, in order
    waits: list[Any] = field(default_factory=list)  # streams that were waited for, in order
    graph: list[Work] | None = None  # what a capture has recorded; None while there is none
    freed_in_capture: int = 0
    encoded: list[int] = field(default_factory=list)  # where arrays are that tensor maps were made of, in order
    kind: str = "cuda"
    runtime: str = "driver"
    dialect: str = "cuda"
    target: str = "sm_90a"
    driver_version: str = "0"
    limits: DeviceLimits = DeviceLimits(227 * 1024, 1024, 132)  # noqa: RUF009  (frozen)
    _memory: dict[int, Array] = field(default_factory=dict)
    _queues: dict[Any, list[Work]] = field(default_factory=dict)
    _running: Any = field(default_factory=threading.RLock, repr=False)  # one thread at a time: what it began, it ends

    def compiler(self) -> TextCompiler:
        return self.compiles

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> tuple[str, str, bool]:
        assert self.graph is None, "a module was loaded inside a capture"
        return binary.data.decode(), entry, starts_early

    def launch(self, kernel: Any, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Any) -> None:
        text, entry, early = kernel
        self.launches.append((entry, stream))
        given = [
            arg if arg is None or isinstance(arg, TensorMap) else self._memory.get(index(arg), arg) for arg in args
        ]
        to = self._queue(stream) if self.graph is None else self.graph
        to.append(lambda: run_cuda(text, entry, grid, block, shared_bytes, given, early=early, target=self.target))

    def encode_map(self, described: Any, pointer: int) -> Any:
        self.encoded.append(pointer)
        array = self._memory[pointer]
        return TensorMap(
            array, described.sizes, described.strides, described.box, described.swizzle, described.item_bytes
        )

    def workspace(self, nbytes: int, stream: Any) -> Memory:
        return self.allocate(nbytes)

    def allocate(self, nbytes: int) -> Memory:
        assert self.graph is None, "memory was allocated inside a capture"
        content = np.full(nbytes, 0xFF, np.uint8)
        return Memory(self.own(content), nbytes, self._free, content)

    def _free(self, content: Array) -> None:
        """Free as cuMemFree does: it waits for all running work, which no capture allows."""
        if self.graph is not None:
            self.freed_in_capture += 1
        for stream in list(self._queues):
            self._run(stream)
        del self._memory[content.ctypes.data]
        content[...] = 0xFF

    def own(self, array: Array) -> int:
        """Make host memory device memory, and return its address."""
        self._memory[array.ctypes.data] = array
        return array.ctypes.data

    def upload(self, buffer: Memory, array: Array, stream: Any = None) -> None:
        self.synchronize(stream)
        self._memory[index(buffer)][: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def download(self, array: Array, buffer: Memory, stream: Any = None) -> None:
        self.synchronize(stream)
        array.reshape(-1).view(np.uint8)[...] = self._memory[index(buffer)]

    def synchronize(self, stream: Any = None) -> None:
        assert self.graph is None, "a stream was waited for inside a capture"
        self.waits.append(stream)
        self._run(_key(stream))

    def _queue(self, stream: Any) -> list[Work]:
        return self._queues.setdefault(_key(stream), [])

    def _run(self, stream: Any) -> None:
        with self._running:
            for work in self._queues.pop(stream, []):
                work()

    def prepare_launches(self) -> None:
        """Launches need only their kernels."""

    def is_capturing(self, stream: Any) -> bool:
        return self.graph is not None

    def begin_capture(self) -> None:
        self.graph = []

    def end_capture(self) -> Work:
        """Returns the graph's replay."""
        recorded, self.graph = self.graph or [], None
        return lambda: [work() for work in recorded] and None


def _key(stream: Any) -> Any:
    return (stream, threading.get_ident()) if stream == 2 else stream or 0


class FakeArray:
    """Like Numba's arrays: `__cuda_array_interface__` over the device's memory."""

    def __init__(self, gpu: FakeGpu, content: Array, stream: int | None = None) -> None:
        self.show(gpu, np.array(content), stream)

    def show(self, gpu: FakeGpu, content: Array, stream: int | None = None) -> None:
        """Show this content from now on."""
        self.content = content
        self.shape, self.dtype = self.content.shape, self.content.dtype
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": _TYPES.get(str(self.dtype), "<V2"),
            "data": (gpu.own(self.content), False),
            "version": 3,
            "stream": stream,
        }


class FakeStorage:
    """The memory behind tensors."""

    def __init__(self, content: Array) -> None:
        self.content = content


class FakeTensor:
    """Like a PyTorch tensor on a GPU. `arrays._readers` takes `read` for it."""

    def __init__(self, gpu: FakeGpu, content: Array, stream: int = 0, base: "FakeTensor | None" = None) -> None:
        self.gpu, self.stream, self._base, self._writes = gpu, stream, base, 0
        self.requires_grad, self.recorded = False, []
        self.data = FakeStorage(np.array(content)) if base is None else base.data

    @property
    def _version(self) -> int:
        return self._writes if self._base is None else self._base._version

    def untyped_storage(self) -> FakeStorage:
        return self.data

    def is_inference(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return int(self.data.content.ctypes.data)

    @property
    def dtype(self) -> Any:
        return self.data.content.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.content.shape

    def stride(self) -> tuple[int, ...]:
        return self.data.content.strides

    def view(self) -> "FakeTensor":
        return FakeTensor(self.gpu, self.data.content, self.stream, base=self)

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)

    def write(self, content: Any) -> None:
        self.data.content[...] = content
        self._writes += 1

    def new_empty(self, shape: tuple[int, ...]) -> "FakeTensor":
        return FakeTensor(self.gpu, np.full(shape, np.nan, self.data.content.dtype), self.stream)

    def read(self, name: str, stream: Any) -> ArrayView:
        content = self.data.content
        pointer = self.gpu.own(content)
        return ArrayView(
            "torch", pointer, content.shape, str(content.dtype), None, ("cuda", 0), self.stream, self, True
        )
