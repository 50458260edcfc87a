"""Kernels of several launches, and the memory in which they leave what others read."""

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch import streams
from ksgen.launch.arrays import view
from ksgen.launch.workspace import NONE, new_workspace
from ksgen.launcher import Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.launching import BATCH, check, draw, in_16_bits, inputs, launched, zeros


def test_launches_of_one_call_share_a_workspace_in_the_order_of_their_stream(gpu: FakeGpu, permuting: Launcher) -> None:
    x, weights = in_16_bits()
    given, own = FakeTensor(gpu, x, stream=7), FakeTensor(gpu, weights, stream=7)
    y = permuting(given, own)
    assert launched(gpu) == ["pack", "permute_x", "", "permute_y"]
    assert {stream for _, stream in gpu.launches} == {7}
    gpu.waits.clear()
    permuting(given, own)
    assert gpu.waits == []
    gpu.synchronize(7)
    check(y.data.content, x, weights, precision="float16")


def test_a_workspace_of_ksgens_own_goes_when_its_launches_are_done(gpu: FakeGpu, permuting: Launcher) -> None:
    x, weights = in_16_bits()
    kept, out = permuting.pack(FakeArray(gpu, weights)), FakeArray(gpu, np.zeros((BATCH, 32), np.float16))
    permuting.prepare(FakeArray(gpu, x), kept, out=out)
    before = len(gpu._memory)
    given = FakeArray(gpu, x)
    permuting(given, kept, out=out, stream=5)
    assert len(gpu._memory) == before + 1  # x itself
    check(out.content, x, weights, precision="float16")


def test_a_prepared_call_keeps_its_workspace(gpu: FakeGpu, permuting: Launcher) -> None:
    x, weights = in_16_bits()
    out = FakeArray(gpu, np.zeros((BATCH, 32), np.float16))
    call = permuting.prepare(given := FakeArray(gpu, x), own := FakeArray(gpu, weights), out=out)
    before, encoded = len(gpu._memory), len(gpu.encoded)
    for factor in (1, 2):
        given.content[...] = factor * x
        call()
        gpu.synchronize()
        check(out.content, factor * x, weights, precision="float16")
    assert (len(gpu._memory), len(gpu.encoded)) == (before, encoded + 1)
    assert own is not None


def test_a_graph_records_tensors_and_prepared_calls_but_no_workspace_of_ksgens_own(gpu: FakeGpu, permuting: Launcher) -> None:
    x, weights = in_16_bits()
    tensors, others = [(kind(gpu, x), kind(gpu, weights)) for kind in (FakeTensor, FakeArray)]
    outs = [FakeArray(gpu, np.zeros((BATCH, 32), np.float16)) for _ in range(2)]
    call = permuting.prepare(*others, out=outs[0])
    call()
    permuting(*tensors)
    gpu.synchronize()
    for out in outs:
        out.content[...] = np.nan
    gpu.begin_capture()
    y = permuting(*tensors)
    call()
    with pytest.raises(LaunchError, match=r"allocates memory to work in.*record the call that launcher.prepare"):
        permuting(*others, out=outs[1])
    gpu.end_capture()()
    check(y.data.content, x, weights, precision="float16")
    check(outs[0].content, x, weights, precision="float16")


def test_host_arrays_and_an_epilogue_through_several_launches(gpu: FakeGpu, permuting: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)
    x, weights = in_16_bits()
    extras = {"bias": draw(32, precision="float16"), "residual": draw(BATCH, 32, precision="float16")}
    check(permuting(x, weights, activation="relu", **extras), x, weights, precision="float16", activation="relu", **extras)


def test_a_plan_of_one_launch_wants_no_workspace(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    call = ks.prepare(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    gpu.begin_capture()  # in which nothing else may allocate
    assert [new_workspace(call.plan, view(kind(gpu, x)), None) for kind in (FakeTensor, FakeArray)] == [NONE, NONE]
    assert call.plan.workspace() is None
    gpu.end_capture()
