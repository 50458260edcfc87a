"""What a launcher remembers of its calls' arguments."""

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch import checks as checks
from ksgen.launch.arrays import FORM, CallOptions, view
from ksgen.launch.checks import ArgumentChecks
from ksgen.launcher import Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.launching import PATTERN, inputs


def test_a_launcher_forgets_batches_rather_than_grow(gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_CHECKED", 3)
    kept = ks.pack(FakeArray(gpu, inputs()[1]))
    for batch in range(1, 9):
        x, out = (FakeArray(gpu, np.zeros((batch, size), np.float32)) for size in (PATTERN.in_features, PATTERN.out_features))
        ks.prepare(x, kept, out=out)
    assert len(ks._checks) <= 3


def test_arguments_of_the_same_form_are_checked_once() -> None:
    checks, checked = ArgumentChecks(PATTERN, frozenset({5})), []

    class Caller:
        def __repr__(self) -> str:
            checked.append("named in an error")
            return "caller"

    x, weights = inputs(batch=5)
    views = {"x": view(x), "weights": view(weights)}
    found = checks.find(Caller(), CallOptions(), views)
    assert (found.batch, found.place, found.kernel.batch) == (5, "host", 5)
    assert (
        checks.find(Caller(), CallOptions(stream=7), {name: view(array.copy()) for name, array in (("x", x), ("weights", weights))})
        is found
    )
    others = [CallOptions(layout="bsf", activation="relu"), CallOptions(precision="tf32")]
    assert all(checks.find(Caller(), each, views) is not found for each in others)
    assert checks.find(Caller(), CallOptions(), {"x": view(x[:4].copy()), "weights": views["weights"]}).kernel.batch is None
    assert len(checks) == 4
    with pytest.raises(LaunchError, match="layout 'nchw'"):
        checks.find(Caller(), CallOptions(layout="nchw"), views)
    assert checked == ["named in an error"]


def test_a_form_is_the_shape_type_order_and_place_of_an_array() -> None:
    found = view(np.ones((2, 3), np.float32))
    assert found[FORM] == (found.shape, found.dtype, found.strides, found.device) == ((2, 3), "float32", None, "host")
