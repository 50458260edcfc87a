"""New arrays: of the library that an argument came from, on the stream that will write them."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView, view
from ksgen.launch.memory import host_array, new_array, size_of


def test_host_memory_is_seen_not_copied() -> None:
    array = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    seen = host_array(view(array))
    seen[1, 2] = 9
    assert array[1, 2] == 9
    assert seen.dtype == array.dtype
    assert size_of(view(array)) == 12


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_new_array_is_of_the_same_precision(precision: str) -> None:
    array = np.zeros((2, 3), np.dtype(ml_dtypes.bfloat16) if precision == "bfloat16" else np.dtype(precision))
    made = new_array(view(array), (4, 5))
    assert (made.shape, made.dtype) == ((4, 5), array.dtype)


@pytest.mark.parametrize("shape", [(1000, 64), (64, 1001), (3, 5), (0, 7)])
def test_a_large_array_begins_at_a_line_of_the_cache(shape: tuple[int, int]) -> None:
    """NumPy's own arrays begin 16 bytes behind a line, which rules out streaming stores."""
    for _ in range(4):
        made = new_array(view(np.zeros((2, 3), np.float32)), shape)
        assert made.shape == shape
        assert made.flags.c_contiguous
        assert made.flags.writeable
        assert made.nbytes < 2**16 or made.ctypes.data % 64 == 0


class Library(SimpleNamespace):
    """Stands in for PyTorch and CuPy: remembers on which stream each array was made."""

    def __init__(self) -> None:
        super().__init__(current=3, made=[])
        self.cuda = SimpleNamespace(
            stream=lambda stream: stream, ExternalStream=self.external, Device=self.device_context
        )

    @contextmanager
    def device_context(self, index: int) -> Any:
        yield

    @contextmanager
    def external(self, handle: int, device: Any) -> Any:
        before, self.current = self.current, handle
        yield
        self.current = before

    def empty(self, shape: Any, dtype: Any = None) -> str:
        self.made.append(self.current)
        return "an array"

    new_empty = empty


@pytest.mark.parametrize("kind", ["torch", "cupy"])
@pytest.mark.parametrize(("stream", "expected"), [(None, 0), (3, 3), (77, 77), (0, 0)])
def test_memory_comes_from_the_stream_that_writes_it(
    kind: str, stream: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    library.device, library.dtype = SimpleNamespace(id=0), "float32"
    monkeypatch.setitem(sys.modules, kind, library)
    like = ArrayView(kind, 0, (1, 1), "float32", None, ("cuda", 0), 3, library, True)
    assert new_array(like, (2, 2), stream) == "an array"
    assert library.made == [expected]
    assert library.current == 3


def test_an_unknown_library_must_bring_its_own() -> None:
    like = ArrayView("cuda", 0, (1, 1), "float32", None, ("cuda", None), None, None, True)
    with pytest.raises(LaunchError, match="give out="):
        new_array(like, (1, 1))
