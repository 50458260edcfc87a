"""What a launcher remembers of its calls' arguments."""

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch import checks
from ksgen.launch.arrays import ArrayView, CallOptions, form_of, view
from ksgen.launch.weights import PLAIN
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.launching import PATTERN, draw, inputs, needs_opencl


def test_a_launcher_forgets_batches_rather_than_grow(
    gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MOST_CHECKED", 3)
    kept = ks.pack(FakeArray(gpu, inputs()[1]))
    for batch in range(1, 9):
        x, out = (
            FakeArray(gpu, np.zeros((batch, size), np.float32)) for size in (PATTERN.in_features, PATTERN.out_features)
        )
        ks.prepare(x, kept, out=out)
    assert len(ks._checks) <= 3


def test_arguments_of_the_same_form_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a factor, a chain and a group looks its form up; only another form is checked."""
    ks, form, checked = Launcher(PATTERN, batches=[5]), (PLAIN,), []
    check = checks.check_arrays
    monkeypatch.setattr(checks, "check_arrays", lambda *given, **more: checked.append(given) or check(*given, **more))
    x, weights = inputs(batch=5)
    views = {"x": view(x), "weights": view(weights)}
    found = ks._checks.find(ks, CallOptions(), views, form)
    assert found.kernel
    assert (found.batch, found.place, found.precision, found.kernel.batch) == (5, "host", "float32", 5)
    copies = {name: view(array.copy()) for name, array in (("x", x), ("weights", weights))}
    assert ks._checks.find(ks, CallOptions(stream=7), copies, form) is found
    assert len(checked) == 1
    others = [CallOptions(layout="bsf", activation="relu"), CallOptions(precision="tf32")]
    assert all(ks._checks.find(ks, each, views, form) is not found for each in others)
    fewer = ks._checks.find(ks, CallOptions(), {"x": view(x[:4].copy()), "weights": views["weights"]}, form).kernel
    assert fewer
    assert fewer.batch is None
    assert len(ks._checks) == len(checked) == 4
    with pytest.raises(LaunchError, match="layout='nchw'"):
        ks._checks.find(ks, CallOptions(layout="nchw"), views, form)
    assert len(ks._checks) == 4


@needs_opencl
def test_a_chain_and_a_group_check_each_form_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    check = checks.check_arrays
    monkeypatch.setattr(checks, "check_arrays", lambda *given, **more: checked.append(given) or check(*given, **more))
    x, weights = inputs(batch=5)
    chain, group = ChainLauncher(PATTERN, "1,4,18,3"), GroupLauncher(PATTERN, PATTERN)
    for own, given in ((chain, [weights, draw(1, 4, 18, 3)]), (group, [weights, weights])):
        ys = [own(each, given) for each in (x, x.copy())]
        np.testing.assert_array_equal(*ys)
        assert len(checked) == 2  # one per factor, though there were two calls
        checked.clear()


def test_a_form_is_the_library_shape_type_order_and_place_of_an_array() -> None:
    found = view(np.ones((2, 3), np.float32))
    wanted = found.kind, found.shape, found.dtype, found.strides, found.device
    assert form_of(found) == wanted == ("numpy", (2, 3), "float32", None, "host")


def test_repeated_weights_of_a_library_that_copies_none_are_refused_after_those_of_another(ks: Launcher) -> None:
    """A GPU's arrays of one form: PyTorch copies the slice, PyCUDA cannot."""
    x = ArrayView("torch", 64, (5, PATTERN.in_features), "float32", None, ("cuda", 0), None, None, True)
    weights = x._replace(pointer=2**20, shape=PATTERN.shape, strides=(0, 60, 12, 4))
    assert ks._checks.find(ks, CallOptions(), {"x": x, "weights": weights}, (PLAIN,)).kernel
    others = {"x": x, "weights": weights._replace(kind="pycuda")}
    with pytest.raises(LaunchError, match="weights must be row-major, without gaps; give a contiguous copy of it"):
        ks._checks.find(ks, CallOptions(), others, (PLAIN,))
