"""Tests of where operands lie: on the device, in memory shared with the host, or in copies."""

from typing import Any

import numpy as np
import pytest

from ksgen.devices import find_device
from ksgen.errors import LaunchError
from ksgen.launch import arrays, streams
from ksgen.launch.choice import Choice, choice_by_name, limits_of
from ksgen.launch.planner import Planner
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.launching import BATCH, PATTERN, SHAPE, check, dtype_of, inputs, needs_opencl
from tests.support.libraries import library


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", arrays.DTYPES)
def test_numpy_arrays(ks: Launcher, precision: str, layout: str) -> None:
    x, weights = inputs(precision, layout)
    y = ks(x, weights, layout=layout)
    assert y.dtype == x.dtype
    check(y, x, weights, layout, precision)


@pytest.mark.libraries
@needs_opencl
@pytest.mark.parametrize("precision", arrays.DTYPES)
def test_torch_tensors_on_the_processor(ks: Launcher, precision: str) -> None:
    torch = library("torch")
    kind = torch.complex128 if precision.startswith("complex") else torch.float64
    x, weights = (
        torch.randn(*shape, dtype=kind).to(getattr(torch, precision)) for shape in ((BATCH, PATTERN.in_features), SHAPE)
    )
    y = ks(x, weights)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == x.dtype
    check(*(each.to(kind).numpy() for each in (y, x, weights)), precision=precision)


@needs_opencl
def test_pyopencl_arrays_stay_where_they_are(ks: Launcher) -> None:
    import pyopencl as cl
    import pyopencl.array as cl_array

    device = find_device("opencl")
    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    queue = cl.CommandQueue(context)
    x, weights = inputs()
    out = cl_array.empty(queue, (BATCH, PATTERN.out_features), np.float32)
    y = ks(cl_array.to_device(queue, x), cl_array.to_device(queue, weights), out=out)
    assert y is out
    check(y.get(), x, weights)
    check(ks(cl_array.to_device(queue, x), cl_array.to_device(queue, weights)).get(), x, weights)
    with pytest.raises(LaunchError, match=r"packed weights lie on .* and x on"):
        ks(cl_array.to_device(queue, x), ks.pack(weights))
    assert device is find_device("opencl")


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", arrays.DTYPES)
def test_cuda_arrays_are_used_where_they_are(gpu: FakeGpu, ks: Launcher, precision: str, layout: str) -> None:
    x, weights = inputs(precision, layout)
    features = PATTERN.out_features
    out = FakeArray(
        gpu,
        np.full((BATCH, features) if layout == "bsf" else (features, BATCH), np.nan, np.float32).astype(
            dtype_of(precision)
        ),
    )
    kept = FakeArray(gpu, weights)  # its packed form is freed with it, which waits
    y = ks(FakeArray(gpu, x), kept, layout=layout, out=out)
    assert y is out
    assert np.isnan(out.content.real.astype(np.float64)).all()  # nothing was waited for
    gpu.synchronize()
    check(out.content, x, weights, layout, precision)


def test_output_and_workspace_come_from_the_memory_of_the_stream_that_writes_them(
    gpu: FakeGpu, ks: Launcher, entered: list[int]
) -> None:
    """PyTorch gives out memory that its current stream may still read."""
    x, weights = inputs()
    y = ks(FakeTensor(gpu, x, stream=6), FakeTensor(gpu, weights, stream=6))
    assert (type(y), entered) == (FakeTensor, [])
    y = ks(FakeTensor(gpu, x, stream=6), FakeTensor(gpu, weights, stream=6), stream=5)
    assert entered == [5, 5]
    gpu.synchronize(5)
    check(y.data.content, x, weights)


def test_memory_of_an_unknown_library_needs_out(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    with pytest.raises(LaunchError, match="no way to allocate an output; give out="):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights))


def test_overflow_of_fp16x3_is_reported_for_host_arrays(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Pattern(2, 9, 8, 3)  # of fewer inputs plain multiply-adds are more accurate
    ks = Launcher(pattern)
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)

    def choose(_: Planner, on: Any, kernel: KernelSpec, batch: int, aligned: bool = True) -> Choice:
        # so small a problem would get plain multiply-adds
        return choice_by_name("mma" if kernel.precision == "fp16x3" else "simt", kernel, batch, limits_of(on))

    monkeypatch.setattr(Planner, "choice", choose)
    x, weights = np.ones((BATCH, pattern.in_features), np.float32), np.ones(pattern.shape, np.float32)
    np.testing.assert_array_equal(ks(x, weights, precision="fp16x3"), np.full((BATCH, pattern.out_features), 8))
    x[7, 5] = 7e4
    with pytest.raises(
        LaunchError,
        match=r"fp16x3 takes \|x\| up to 65504 and \|weights\| up to 63.9; got x up to 7e\+04, weights up to 1; take "
        r"tf32x3",
    ):
        ks(x, weights, precision="fp16x3")
    y = np.ones((BATCH, pattern.out_features), np.float32)
    with pytest.raises(LaunchError, match=r"got x up to 7e\+04, weights up to 1; take tf32x3"):
        ks(x, weights, precision="fp16x3", residual=y, out=y)
    y[...] = np.nan  # the caller's own
    assert np.isnan(ks(x, weights, precision="fp16x3", residual=y, out=y)).all()
    np.testing.assert_allclose(ks(x, weights, precision="tf32x3")[7, 2], 70007, rtol=1e-6)
    x[7, 5] = np.nan  # the caller's own
    assert np.isnan(ks(x, weights, precision="fp16x3")[7, 2])


def test_overflow_of_fp16x3_is_reported_whichever_family_serves(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)

    def choose(_: Planner, on: Any, kernel: KernelSpec, batch: int, aligned: bool = True) -> Choice:
        return choice_by_name("wgmma_registers" if on is gpu else "simt", kernel, batch, limits_of(on))

    monkeypatch.setattr(Planner, "choice", choose)
    x, weights = np.ones((8, 32), np.float32), np.ones((1, 8, 16, 2), np.float32)
    x[7, 5] = 7e4
    with pytest.raises(LaunchError, match="got x up to 7e\\+04, weights up to 1; take tf32x3"):
        Launcher(1, 8, 16, 2)(x, weights, precision="fp16x3")
    assert len(gpu.encoded) == 1  # a tensor map: it was the warpgroups' kernel
    older = FakeGpu(target="sm_75")  # no tensor cores: plain float32, whose own overflow is the caller's
    monkeypatch.setattr(streams, "device_for", lambda place: older)
    x[7, 5] = 3e38
    weights[...] = 4
    assert np.isinf(Launcher(1, 8, 16, 2)(x, weights, precision="fp16x3")).any()
