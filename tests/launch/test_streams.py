"""Tests of the device and stream that a call works on, and of what it waits for."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ksgen.devices.opencl import OpenCLDevice
from ksgen.errors import DeviceError, LaunchError
from ksgen.launch import arrays, base, streams
from ksgen.launch.arrays import views_of
from ksgen.launcher import Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.launching import BATCH, PATTERN, check, inputs, needs_opencl, zeros


def test_streams_are_the_callers(gpu: FakeGpu, ks: Launcher) -> None:
    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    x, weights = inputs()
    out = FakeArray(gpu, np.zeros((BATCH, PATTERN.out_features), np.float32))
    for stream, handle in ((None, None), (5, 5), (Foreign(), 77)):
        gpu.launches.clear()
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=out, stream=stream)
        assert {used for _, used in gpu.launches} == {handle}
        gpu.synchronize(handle)
        check(out.content, x, weights)
    gpu.launches.clear()
    ks(FakeArray(gpu, x, stream=9), FakeArray(gpu, weights), out=out)  # the stream that the array names itself
    assert {used for _, used in gpu.launches} == {9}


def test_work_of_another_stream_is_waited_for_or_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    late, out = FakeArray(gpu, np.full_like(x, np.nan), stream=9), zeros(gpu)
    kept = ks.pack(FakeArray(gpu, weights))
    gpu._queues[9] = [lambda: late.content.__setitem__(..., x)]
    ks(late, kept, out=out, stream=5)
    gpu.synchronize(5)
    check(out.content, x, weights)
    with pytest.raises(
        LaunchError, match="x works on stream 9 and weights on 4; give stream=, which waits for the work of both"
    ):
        ks(late, FakeArray(gpu, weights, stream=4), out=out)
    with pytest.raises(  # a tensor does not say on which stream its work is
        LaunchError, match="x works on stream 9 and weights on 4; let one wait for the other, and give it as stream="
    ):
        ks(FakeTensor(gpu, x, stream=9), FakeArray(gpu, weights, stream=4), out=out)
    ks(FakeTensor(gpu, x, stream=0), FakeArray(gpu, weights, stream=1), out=out)  # two names of the default stream
    gpu.synchronize()
    check(out.content, x, weights)


def test_stream_0_is_the_default_one_and_none_is_the_arrays_own(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    kept, out = ks.pack(weights_on := FakeArray(gpu, weights)), zeros(gpu)
    ks.prepare(FakeArray(gpu, x), kept, out=out)
    gpu.launches.clear()
    for stream in (None, 0):
        ks(FakeTensor(gpu, x, stream=6), kept, out=out, stream=stream)
    assert [stream for _, stream in gpu.launches] == [6, 0]
    assert weights_on is not None


def test_pytorch_learns_of_a_stream_that_is_not_its_current_one(gpu: FakeGpu, ks: Launcher, entered: list[int]) -> None:
    """PyTorch would otherwise reuse the memory of a freed tensor while kernels still read it."""
    x, weights = inputs()
    for stream, told in ((None, []), (6, []), (5, [(5, 0)]), (0, [(0, 0)])):
        tensors = [
            FakeTensor(gpu, each, stream=6)
            for each in (x, weights, np.zeros((BATCH, PATTERN.out_features), np.float32))
        ]
        ks(tensors[0], tensors[1], out=tensors[2], stream=stream)
        assert [each.recorded for each in tensors] == [told] * 3


@pytest.mark.parametrize(("stream", "told"), [(None, []), (6, []), (5, [(5, 0)])])
def test_pytorch_learns_of_a_stream_that_transposes_x(
    stream: int | None, told: list[tuple[int, int]], gpu: FakeGpu, entered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single factor then reads only the copy."""
    x, weights = inputs()

    def copied(array: FakeTensor, on: int | None) -> FakeTensor:
        return FakeTensor(gpu, np.ascontiguousarray(array.data.content.T), stream=6)

    monkeypatch.setattr(base, "transposed", copied)
    given, out = FakeTensor(gpu, x, stream=6), FakeTensor(gpu, np.zeros((PATTERN.out_features, BATCH), np.float32), 6)
    own = Launcher(PATTERN, fuse="no", out_layout="bsl")
    own(given, FakeTensor(gpu, weights, stream=6), out=out, stream=stream)
    assert given.recorded == told
    gpu.synchronize(stream or 6)
    check(out.data.content.T, x, weights)


def test_dlpack_arrays_are_made_ready_for_the_stream_of_the_launch(
    gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Jax(FakeArray):
        pass

    def read(array: Jax, name: str, stream: Any) -> arrays.ArrayView:
        asked.append(stream)
        pointer = array.__cuda_array_interface__["data"][0]
        return arrays.ArrayView("dlpack", pointer, array.shape, "float32", None, ("cuda", 0), stream, array, False)

    monkeypatch.setitem(arrays._readers, Jax, read)
    x, weights = inputs()
    out = zeros(gpu)
    ks(FakeTensor(gpu, x, stream=6), Jax(gpu, weights), out=out)
    assert asked[-1] == 6
    ks(Jax(gpu, x), Jax(gpu, weights), out=out, stream=5)
    assert asked[-2:] == [5, 5]
    gpu.synchronize(6)
    check(out.content, x, weights)


def test_arrays_in_two_places_are_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    with pytest.raises(LaunchError, match=r"x lies on a CUDA device and weights on the host; give both in one place"):
        ks(FakeArray(gpu, x), weights)


def test_a_foreign_stream_leaves_pycuda_for_the_driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        handle = 12

    pycuda, asked = FakeGpu(runtime="pycuda", supports_foreign_streams=False), []
    monkeypatch.setattr(streams, "device_for", lambda place: pycuda)
    monkeypatch.setattr(streams, "find_device", lambda name: asked.append(name) or gpu)
    monkeypatch.setitem(sys.modules, "pycuda.driver", SimpleNamespace(Stream=Stream))
    own = Stream()
    for stream, device, handle in (
        (5, gpu, 5),
        (0, pycuda, None),
        (1, pycuda, None),
        (None, pycuda, None),
        (own, pycuda, own),
    ):
        assert streams.device_and_stream("ks", ("cuda", 0), stream) == (device, handle)
    assert asked == ["driver:0"]

    def none_there(name: str) -> FakeGpu:
        raise DeviceError("no driver")

    monkeypatch.setattr(streams, "find_device", none_there)
    with pytest.raises(
        LaunchError,
        match="PyCUDA cannot launch on a stream of another library, and the driver runtime is not there: no driver",
    ):
        streams.device_and_stream("ks", ("cuda", 0), 5)


@needs_opencl
def test_queues_are_checked_and_decide_where_host_arrays_go(gpu: FakeGpu, ks: Launcher) -> None:
    import pyopencl as cl
    import pyopencl.array as cl_array

    device = cl.get_platforms()[0].get_devices()[0]
    context, other = cl.Context([device]), cl.Context([device])
    queue = cl.CommandQueue(context)
    x, weights = inputs()
    call = ks.prepare(x, weights, stream=queue)
    assert call.stream is queue
    check(call(), x, weights)
    on_device = cl_array.to_device(queue, x), cl_array.to_device(queue, weights)
    for stream in (0, 5):
        with pytest.raises(
            LaunchError, match=f"stream {stream} is a CUDA stream, and .* wants a pyopencl CommandQueue, or None"
        ):
            ks(*on_device, stream=stream)
        with pytest.raises(LaunchError, match=r"is a CUDA stream|has no streams"):
            ks(x, weights, stream=stream)
    with pytest.raises(LaunchError, match="stream is a queue of another OpenCL context than x; give one of x's own"):
        ks(*on_device, stream=cl.CommandQueue(other))
    unordered = cl.CommandQueue(context, properties=cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE)
    with pytest.raises(LaunchError, match="stream is an out-of-order queue"):
        ks(*on_device, stream=unordered)
    with pytest.raises(LaunchError, match=r"x works on stream .* and weights on .*; give stream="):
        ks(on_device[0], cl_array.to_device(cl.CommandQueue(context), weights))
    second = cl.CommandQueue(context)
    y = ks(*on_device, stream=second)
    second.finish()
    check(y.get(), x, weights)
    with pytest.raises(
        LaunchError, match="stream is a pyopencl CommandQueue, and x lies on a CUDA device; give a CUDA stream"
    ):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu), stream=queue)


@needs_opencl
def test_the_queues_of_arrays_are_waited_for(ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyopencl as cl
    import pyopencl.array as cl_array

    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    own, other = cl.CommandQueue(context), cl.CommandQueue(context)
    x, weights = inputs()
    given, waited = (cl_array.to_device(other, x), cl_array.to_device(own, weights)), []
    usual = OpenCLDevice.synchronize
    monkeypatch.setattr(
        OpenCLDevice, "synchronize", lambda device, stream=None: waited.append(stream) or usual(device, stream)
    )
    y = ks(*given, stream=own)
    own.finish()
    check(y.get(), x, weights)
    assert other in waited
    assert own not in waited


def test_host_arrays_follow_packed_weights_to_their_device(gpu: FakeGpu) -> None:
    x, _ = inputs()
    views = views_of({"x": x}, None)
    assert streams.where_to_work("ks", "host", {"x": x}, views, None, gpu)[:2] == (gpu, None)  # type: ignore[arg-type]
    assert streams.where_to_work("ks", "host", {"x": x}, views, 5, gpu)[:2] == (gpu, 5)  # type: ignore[arg-type]
