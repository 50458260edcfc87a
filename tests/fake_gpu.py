"""A CUDA device for tests: its memory is the host's, its launches are the emulator's, and its streams run late.

Work is queued and runs only when its stream is waited for, so that a missing wait, or a wrong stream, shows as NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ksgen.devices.base import Limits
from ksgen.resources import Binary, Resources
from tests.simt import run_cuda

Array = np.ndarray[Any, Any]
Work = Callable[[], None]
_TYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2"}


@dataclass(frozen=True)
class TextCompiler:
    """Its binaries are the text itself."""

    name: str = "text"
    version: str = "1"

    def options(self, target: str) -> tuple[str, ...]:
        return ()

    def compile(self, text: str, entry: str, target: str) -> Binary:
        return Binary(text.encode(), entry, target, Resources(), {})


class Memory(int):
    """An address that keeps its memory; `int` is what kernels and other libraries see of it."""

    bytes_there: Array

    def __new__(cls, content: Array) -> "Memory":
        self = super().__new__(cls, content.ctypes.data)
        self.bytes_there = content
        return self


@dataclass(eq=False)
class FakeGpu:
    name: str = "Fake GPU"
    index: int = 0
    supports_foreign_streams: bool = True
    capturing: bool = False
    launches: list[tuple[str, Any]] = field(default_factory=list)  # entry and stream of every launch, in order
    kind: str = "cuda"
    runtime: str = "driver"
    dialect: str = "cuda"
    target: str = "sm_90a"
    driver_version: str = "0"
    limits: Limits = Limits(227 * 1024, 1024, 132)  # noqa: RUF009  (frozen)
    _memory: dict[int, Array] = field(default_factory=dict)
    _queues: dict[Any, list[Work]] = field(default_factory=dict)

    def compiler(self) -> TextCompiler:
        return TextCompiler()

    def load(self, binary: Binary, entry: str, shared_bytes: int) -> tuple[str, str]:
        assert not self.capturing, "a module was loaded inside a capture"
        return binary.data.decode(), entry

    def launch(self, kernel: Any, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Any) -> None:
        text, entry = kernel
        self.launches.append((entry, stream))
        given = [self._memory.get(int(arg), arg) if isinstance(arg, int) else arg for arg in args]
        self._queues.setdefault(stream or 0, []).append(lambda: run_cuda(text, entry, grid, block, shared_bytes, given))

    def allocate(self, nbytes: int) -> Memory:
        assert not self.capturing, "memory was allocated inside a capture"
        return self.own(np.full(nbytes, 0xFF, np.uint8))

    def own(self, array: Array) -> Memory:
        """Make host memory device memory."""
        memory = Memory(array)
        self._memory[int(memory)] = array
        return memory

    def upload(self, buffer: Memory, array: Array, stream: Any = None) -> None:
        self.synchronize(stream)
        buffer.bytes_there[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def download(self, array: Array, buffer: Memory, stream: Any = None) -> None:
        self.synchronize(stream)
        array.reshape(-1).view(np.uint8)[...] = buffer.bytes_there

    def synchronize(self, stream: Any = None) -> None:
        assert not self.capturing, "a stream was waited for inside a capture"
        for work in self._queues.pop(stream or 0, []):
            work()

    def is_capturing(self, stream: Any) -> bool:
        return self.capturing


class FakeArray:
    """What CuPy, JAX and others show: `__cuda_array_interface__` over the device's memory."""

    def __init__(self, gpu: FakeGpu, content: Array, stream: int | None = None) -> None:
        self.content = np.array(content)
        self.memory = gpu.own(self.content)
        self.shape, self.dtype = self.content.shape, self.content.dtype
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": _TYPES.get(str(self.dtype), "<V2"),
            "data": (int(self.memory), False),
            "version": 3,
            "stream": stream,
        }
