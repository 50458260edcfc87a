"""Slices of larger arrays as x, residual and out: used where they lie, of every library, on every device; what is
refused.
"""

from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.devices import find_device
from ksgen.devices.base import Device
from ksgen.errors import DeviceError, LaunchError
from ksgen.launch.plan import Plan
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from tests.support.device_arrays import CudaArray
from tests.support.host_memory import processor
from tests.support.libraries import library

SHAPE = (2, 9, 5, 3)
PATTERN = Pattern(*SHAPE)
BATCH = 40
Array = np.ndarray[Any, Any]


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def columns(count: int, layout: str, before: int, behind: int, seed: int) -> tuple[Array, Array]:
    """A larger array, and the slice of it with so many features; in batch-size-last, of the batch."""
    if layout == "bsf":
        whole = draw(BATCH, before + count + behind, seed=seed)
        return whole, whole[:, before : before + count]
    whole = draw(count, before + BATCH + behind, seed=seed)
    return whole, whole[:, before : before + BATCH]


def is_right(y: Any, truth: Array, terms: int = SHAPE[2]) -> bool:
    error = np.linalg.norm(np.asarray(y, np.float64) - truth)
    return bool(error <= 2 * tolerance("float32", terms) * np.linalg.norm(truth))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_numpy_arrays(either: Device, layout: str) -> None:
    ks, weights, bias = Launcher(*SHAPE), draw(*SHAPE), draw(PATTERN.out_features)
    _, x = columns(PATTERN.in_features, layout, 3, 8, 1)
    _, residual = columns(PATTERN.out_features, layout, 16, 0, 2)
    whole, out = columns(PATTERN.out_features, layout, 5, 4, 3)
    outside = whole.copy()
    added = {"bias": bias, "activation": "relu", "residual": residual}
    truth = reference.multiply(PATTERN, x, weights, layout, **added)
    for own in (weights, ks.pack(weights)):
        out[:] = np.nan
        assert ks(x, own, layout=layout, out=out, **added) is out
        assert is_right(out, truth)
    assert is_right(ks(x, weights, layout=layout, **added), truth)  # into new memory, without gaps
    call = ks.prepare(x, weights, layout=layout, out=out, **added)
    x *= 2
    call()
    assert is_right(out, reference.multiply(PATTERN, x, weights, layout, **added))
    out[:] = outside[:, 5 : 5 + out.shape[1]]
    np.testing.assert_array_equal(whole, outside)  # between its rows nothing was written


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbouring_slices_of_one_array(either: Device, layout: str) -> None:
    """A launch reads one part of an array and writes the next one, which is also the residual."""
    ks, weights = Launcher(2, 5, 5, 3), draw(2, 5, 5, 3)
    features, count = 30, 30 if layout == "bsf" else BATCH
    whole = draw(BATCH, 3 * features) if layout == "bsf" else draw(features, 3 * BATCH)
    first, second, third = (whole[:, at * count : (at + 1) * count] for at in range(3))
    kept, truth = third.copy(), reference.multiply(ks.pattern, first, weights, layout, residual=second)
    ks(first, weights, layout=layout, residual=second, out=second)
    assert is_right(second, truth, 5)
    np.testing.assert_array_equal(third, kept)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chain_of_slices(either: Device, layout: str) -> None:
    patterns = (Pattern(3, 5, 4, 2), Pattern(1, 7, 10, 3))
    layer, weights = (
        ChainLauncher(*(Launcher(*each.shape) for each in patterns)),
        [draw(*each.shape) for each in patterns],
    )
    _, x = columns(24, layout, 3, 2, 1)
    whole, out = columns(21, layout, 8, 8, 2)
    _, residual = columns(21, layout, 1, 2, 3)
    outside = whole.copy()
    between = reference.multiply(patterns[0], x, weights[0], layout)
    truth = reference.multiply(patterns[1], between, weights[1], layout, residual=residual)
    assert layer(x, weights, layout=layout, residual=residual, out=out) is out
    assert is_right(out, truth, 14)
    out[:] = outside[:, 8 : 8 + out.shape[1]]
    np.testing.assert_array_equal(whole, outside)


@pytest.mark.libraries
def test_slices_of_tensors_and_of_what_speaks_dlpack() -> None:
    torch, _ = library("torch"), processor()
    ks, weights = Launcher(*SHAPE), draw(*SHAPE)
    _, x = columns(PATTERN.in_features, "bsf", 3, 8, 1)
    truth = reference.multiply(PATTERN, x, weights, "bsf")
    tensor = torch.from_numpy(x)
    assert tensor.stride() == (x.shape[1] + 11, 1)
    assert is_right(ks(tensor, torch.from_numpy(weights)), truth)

    class Other:
        def __dlpack__(self, **options: Any) -> Any:
            return tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return tensor.__dlpack_device__()

    assert is_right(ks(Other(), weights), truth)


class Slice:
    """Columns of a larger array on a device, as Numba would show them."""

    def __init__(self, whole: CudaArray, begin: int, count: int) -> None:
        self._whole, self.shape, item = whole, (whole.shape[0], count), whole.dtype.itemsize
        described = whole.__cuda_array_interface__
        steps = (whole.shape[1] * item, item)
        self.__cuda_array_interface__ = described | {
            "shape": self.shape,
            "strides": steps,
            "data": (whole.pointer + begin * item, False),
        }


@pytest.mark.exhaustive
@pytest.mark.gpu
@pytest.mark.stand_in
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("runtime", ["pycuda", "driver"])
def test_slices_of_arrays_on_a_gpu(runtime: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One factor, and layers whose outputs share one array, take one launch."""
    monkeypatch.setenv("KSGEN_DEVICE", runtime)
    try:
        device = find_device(runtime)
    except DeviceError as absent:
        pytest.skip(str(absent))
    whole, x = columns(PATTERN.in_features, layout, 3, 8, 1)
    weights, count = draw(*SHAPE), PATTERN.out_features if layout == "bsf" else BATCH
    rows = BATCH if layout == "bsf" else PATTERN.out_features
    larger = CudaArray(device, np.full((rows, count + 9), 7, np.float32))
    on_device, own = Slice(CudaArray(device, whole), 3, x.shape[1]), CudaArray(device, weights)
    Launcher(*SHAPE)(on_device, own, layout=layout, out=Slice(larger, 5, count))
    device.synchronize()
    found = larger.content()
    assert is_right(found[:, 5 : 5 + count], reference.multiply(PATTERN, x, weights, layout))
    assert (np.delete(found, range(5, 5 + count), 1) == 7).all()
    if layout == "bsf":
        larger = CudaArray(device, np.full((BATCH, 2 * count + 1), 7, np.float32))
        outs = [Slice(larger, 0, count), Slice(larger, count + 1, count)]
        families: list[str] = []
        launch = Plan.launch
        monkeypatch.setattr(
            Plan, "launch", lambda plan, *given: (families.append(plan.choice.family), launch(plan, *given))[1]
        )
        GroupLauncher(Launcher(*SHAPE), Launcher(*SHAPE))(on_device, [own, own], out=outs)
        assert families == ["simt"]
        device.synchronize()
        found = larger.content()
        assert all(
            is_right(found[:, begin : begin + count], reference.multiply(PATTERN, x, weights, layout))
            for begin in (0, count + 1)
        )
        assert (found[:, count] == 7).all()


def test_a_launcher_has_sources_of_slices_and_of_dense_arrays() -> None:
    """A call on dense arrays is served as before."""
    processor()
    ks, weights, x = Launcher(*SHAPE), draw(*SHAPE), draw(BATCH, 2 * PATTERN.in_features)
    part = x[:, : PATTERN.in_features]
    assert ks.prepare(part, weights).plan.kernel.name == "ks_2x9x5x3_float32_bsf_strided"
    assert ks.prepare(part.copy(), weights).plan.kernel.name == "ks_2x9x5x3_float32_bsf"
    assert ks.prepare(part[:1], weights).plan.kernel.name == "ks_2x9x5x3_float32_bsf"  # one row has no gaps


REFUSED = [
    ("x", lambda x: x[:, ::2], "x must be row-major, with gaps only between rows; give a contiguous copy of it"),
    ("x", lambda x: x[::-1, :30], "x must be row-major, with gaps"),
    # rows over each other
    ("x", lambda x: np.lib.stride_tricks.as_strided(x, (BATCH, 30), (4, 4)), "x must be row-major, with gaps"),
    ("x", lambda x: np.broadcast_to(x[:1, :30], (BATCH, 30)), "x must be row-major, with gaps"),
    # rows that begin within an element
    ("x", lambda x: np.lib.stride_tricks.as_strided(x, (BATCH, 30), (122, 4)), "x must be row-major, with gaps"),
]


@pytest.mark.parametrize(("name", "slice_of", "message"), REFUSED)
def test_what_is_no_slice_is_refused(name: str, slice_of: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Launcher(*SHAPE)(slice_of(draw(BATCH, 60)), draw(*SHAPE))


def test_other_arrays_have_no_gaps() -> None:
    ks, x = Launcher(*SHAPE), draw(BATCH, PATTERN.in_features)
    with pytest.raises(LaunchError, match="weights must be row-major, without gaps; give a contiguous copy of it"):
        ks(x, draw(2, 9, 5, 6)[..., :3])
    with pytest.raises(LaunchError, match="bias must be row-major, without gaps; give a contiguous copy of it"):
        ks(x, draw(*SHAPE), bias=draw(2 * PATTERN.out_features)[::2])
    with pytest.raises(LaunchError, match="grad_y must be row-major, without gaps; give a contiguous copy of it"):
        ks.gradient(x, draw(BATCH, 60)[:, : PATTERN.out_features])


def test_an_output_among_the_inputs_is_refused() -> None:
    ks, weights, flat = Launcher(2, 5, 5, 3), draw(2, 5, 5, 3), draw((BATCH + 1) * 90)

    def columns_from(begin: int, rows: int = BATCH, pitch: int = 90) -> Array:
        """Return that many rows of 30, from an element on."""
        return flat[begin : begin + rows * pitch].reshape(rows, pitch)[:, :30]

    for x, out, residual in (
        (columns_from(0), columns_from(29), None),
        (columns_from(29), columns_from(0), None),
        (columns_from(0), columns_from(75), None),  # whose rows end within the next one of x
        (columns_from(0), columns_from(30), columns_from(31)),
        (columns_from(0, 20), columns_from(60, 20, 45), None),  # of other distances, which meet somewhere
        # the residual begins where out does, and goes elsewhere
        (draw(20, 30), columns_from(0, 20, 45), columns_from(0, 20)),
    ):
        with pytest.raises(LaunchError, match="shares memory with"):
            ks(x, weights, out=out, residual=residual)
    ks(columns_from(0), weights, out=columns_from(60), residual=columns_from(30))
