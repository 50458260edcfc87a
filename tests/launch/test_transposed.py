"""A matrix in the other layout: by the library that it came from, without gaps; and whose arrays cannot be
transposed.
"""

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch import memory as module
from ksgen.launch.arrays import ArrayView, view
from ksgen.launch.memory import check_transposable, numpy_dtype, transposed
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.libraries import library


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_arrays_of_the_host(precision: str) -> None:
    """Slices too."""
    x = np.arange(40).reshape(4, 10).astype(numpy_dtype(precision))[:, 2:7]
    got = transposed(x, None)
    np.testing.assert_array_equal(got, x.T)
    assert got.flags.c_contiguous
    check_transposable("a layer", view(x))


def test_one_row_is_copied() -> None:
    """Its transpose is contiguous as it lies, and an intermediate's memory may serve the next output."""
    x = np.arange(6.0)[None]
    got = transposed(x, None)
    assert got.shape == (6, 1)
    assert not np.shares_memory(got, x)


@pytest.mark.libraries
def test_tensors_of_the_host() -> None:
    torch = library("torch")
    x = torch.arange(40.0).reshape(4, 10)[:, 2:7]
    got = transposed(x, None)
    assert torch.equal(got, x.t())
    assert got.is_contiguous()


class Tensor:
    """One of a GPU, as PyTorch's: it says where it was transposed."""

    def __init__(self, places: list[Any]) -> None:
        self.places = places

    def t(self) -> "Tensor":
        return self

    def contiguous(self) -> str:
        return f"transposed on {self.places[-1]}"


@pytest.mark.parametrize(("stream", "where"), [(None, "its own"), (7, "its own"), (9, "stream 9")])
def test_tensors_of_a_gpu_are_transposed_on_the_stream_of_the_launches(
    monkeypatch: pytest.MonkeyPatch, stream: Any, where: str
) -> None:
    places = ["its own"]

    @contextmanager
    def entered(entered_stream: str) -> Any:
        places.append(entered_stream)
        yield
        places.pop()

    cuda = SimpleNamespace(stream=entered, ExternalStream=lambda handle, index: f"stream {handle}")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    tensor = Tensor(places)
    found = ArrayView("torch", 4096, (4, 10), "float32", None, ("cuda", 0), 7, tensor, True)
    monkeypatch.setattr(module, "view", lambda *given: found)
    assert transposed(tensor, stream) == f"transposed on {where}"


def test_who_cannot_be_transposed() -> None:
    found = view(FakeArray(FakeGpu(), np.zeros((4, 10), np.float32)))
    with pytest.raises(
        LaunchError,
        match="'a layer': factors are launched one by one here, and nothing transposes a FakeArray from one",
    ):
        check_transposable("a layer", found)


def test_a_layer_transposes_by_its_option_or_at_a_call() -> None:
    layers = Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3)
    x, weights = np.random.default_rng(0).standard_normal((7, 30)), [np.ones(each.pattern.shape) for each in layers]
    always = ChainLauncher(*layers, out_layout="bsl")
    wanted = ChainLauncher(*layers)(x, weights, out_layout="bsl")
    assert wanted.shape == (12, 7)
    np.testing.assert_array_equal(always(x, weights), wanted)
    np.testing.assert_array_equal(always(x, weights, out_layout="bsf"), ChainLauncher(*layers)(x, weights))
    assert repr(always).endswith(", out_layout='bsl')")
    with pytest.raises(LaunchError, match="out_layout='rows'; accepted: bsf, bsl"):
        ChainLauncher(*layers, out_layout="rows")
    with pytest.raises(LaunchError, match=r"out_layout='bsl'\) of a group; accepted: layers without out_layout"):
        GroupLauncher(always)
