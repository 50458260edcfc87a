"""What is refused of a call's arrays and words, before anything is launched."""

from typing import Any

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView
from ksgen.launch.checks import are_aligned, y_shape
from ksgen.launcher import Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.launching import BATCH, PATTERN, SHAPE, inputs, needs_opencl, zeros
from tests.support.libraries import library


def mistakes() -> list[tuple[str, dict[str, Any], str]]:
    x, weights = inputs()
    y = np.zeros((BATCH, PATTERN.out_features), np.float32)
    read_only = y.copy()
    read_only.flags.writeable = False
    both = np.zeros(x.size + y.size, np.float32)
    return [
        (
            "features",
            {"x": x[:, :29].copy()},
            r"Launcher\(2, 9, 5, 3\): got x of shape \(37, 29\); layout bsf wants \(batch, 30\)",
        ),
        ("axes", {"x": x[0]}, r"got x of shape \(30,\)"),
        ("empty", {"x": x[:0]}, "with a batch of at least 1"),
        ("layout of x", {"layout": "bsl"}, r"layout bsl wants \(30, batch\)"),
        ("layout", {"layout": "nchw"}, "layout='nchw'; accepted: bsf, bsl"),
        ("activation", {"activation": "tanh"}, "activation='tanh'; did you mean gelu_tanh"),
        (
            "weights",
            {"weights": weights[..., :2].copy()},
            r"got weights of shape \(2, 9, 5, 2\); \(2, 9, 5, 3\) is needed",
        ),
        (
            "precision",
            {"weights": weights.astype(np.float64)},
            "got x of float32 and weights of float64; give both in one precision",
        ),
        ("integers", {"x": x.astype(int)}, "x is of int64; give float32"),
        (
            "stride",
            {"x": np.asfortranarray(x)},
            "x must be row-major, with gaps only between rows; give a contiguous copy of it",
        ),
        ("bias", {"bias": y[0, :5].copy()}, r"got bias of shape \(5,\); \(54,\) is needed"),
        ("residual", {"residual": y[:3].copy()}, r"got residual of shape \(3, 54\); \(37, 54\) is needed"),
        ("out", {"out": y[:3].copy()}, r"got out of shape \(3, 54\)"),
        ("read-only", {"out": read_only}, "out is read-only; give an array that can be written to"),
        (
            "overlap",
            {"x": both[: x.size].reshape(x.shape), "out": both[x.size - 8 : -8].reshape(y.shape)},
            "out shares memory with x",
        ),
        ("list", {"x": x.tolist()}, "x is a list; give np.asarray.*, or a NumPy array"),
        ("stream", {"stream": "fast"}, "stream is a str; give a CUDA stream's handle"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"), [case[1:] for case in mistakes()], ids=[case[0] for case in mistakes()]
)
def test_what_does_not_fit_is_refused(ks: Launcher, changes: dict[str, Any], message: str) -> None:
    x, weights = inputs()
    given = {"x": x, "weights": weights, **changes}
    with pytest.raises(LaunchError, match=message):
        ks(given.pop("x"), given.pop("weights"), **given)


def test_an_address_inside_a_number_is_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = (FakeArray(gpu, each) for each in inputs())
    for array in (x, weights):
        shown = array.__cuda_array_interface__
        shown["data"] = (shown["data"][0] + 2, False)
    with pytest.raises(LaunchError, match=r"x starts inside a float32, at 0x.*; give a copy of it"):
        ks(x, FakeArray(gpu, weights.content), out=zeros(gpu))
    with pytest.raises(LaunchError, match=r"weights starts inside a float32, at 0x.*; give a copy of it"):
        ks.pack(weights)


@pytest.mark.libraries
@needs_opencl
def test_torch_gradients_are_refused_not_lost(ks: Launcher) -> None:
    torch = library("torch")
    x, weights = torch.randn(BATCH, PATTERN.in_features), torch.randn(*SHAPE, requires_grad=True)
    with pytest.raises(LaunchError, match="weights requires gradients, which launchers do not record"):
        ks(x, weights)
    with torch.no_grad():
        assert ks(x, weights).shape == (BATCH, PATTERN.out_features)


def test_the_shape_of_what_a_call_gives() -> None:
    assert y_shape(PATTERN, "bsf", 7) == (7, 54)
    assert y_shape(PATTERN, "bsl", 7) == (54, 7)


def test_arrays_are_aligned_where_maps_and_wide_reads_want_them() -> None:
    def views(**places: Any) -> dict[str, ArrayView]:
        return {
            name: ArrayView("cuda", place, (4,), "float32", None, ("cuda", 0), None, None, True)
            for name, place in places.items()
        }

    assert are_aligned(views(x=64, out=32, weights=4))
    assert are_aligned(views(x=object()))  # a buffer, which begins at a boundary
    for name in ("x", "bias", "residual", "out"):
        assert not are_aligned(views(**{"x": 64, name: 68}))
