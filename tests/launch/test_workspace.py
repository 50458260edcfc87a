"""Kernels of several launches, and the memory in which they leave what others read."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.devices import find_device
from ksgen.errors import DeviceError, LaunchError
from ksgen.launch import streams
from ksgen.launch.arrays import view
from ksgen.launch.places import new_workspace
from ksgen.launcher import Launcher
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
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


def test_a_graph_records_tensors_and_prepared_calls_but_no_workspace_of_ksgens_own(
    gpu: FakeGpu, permuting: Launcher
) -> None:
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
    with pytest.raises(LaunchError, match=r"allocates its workspace.*prepare the call by launcher.prepare"):
        permuting(*others, out=outs[1])
    gpu.end_capture()()
    check(y.data.content, x, weights, precision="float16")
    check(outs[0].content, x, weights, precision="float16")


def test_host_arrays_and_an_epilogue_through_several_launches(
    gpu: FakeGpu, permuting: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)
    x, weights = in_16_bits()
    extras = {"bias": draw(32, precision="float16"), "residual": draw(BATCH, 32, precision="float16")}
    check(
        permuting(x, weights, activation="relu", **extras), x, weights, precision="float16", activation="relu", **extras
    )


def test_a_plan_of_one_launch_wants_no_workspace(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    call = ks.prepare(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    gpu.begin_capture()  # in which nothing else may allocate
    found = [new_workspace(call.plan, view(kind(gpu, x)), None) for kind in (FakeTensor, FakeArray)]
    assert found == [(None, None), (None, None)]
    assert call.plan.workspace() is None
    gpu.end_capture()


@pytest.mark.parametrize("other_job", ["gradient", "multiply"])
@pytest.mark.parametrize(
    "runtime", ["native", "opencl", pytest.param("driver", marks=[pytest.mark.gpu, pytest.mark.stand_in])]
)
def test_threads_do_not_share_a_workspace(runtime: str, other_job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread makes a whole call between the two launches of a gradient."""
    try:
        device = find_device(runtime)
    except DeviceError as absent:
        pytest.skip(str(absent))
    monkeypatch.setenv("KSGEN_DEVICE", runtime)
    pattern, batch = Pattern(1, 32, 32, 2), 700
    ks, x, dy, other_x, weights = (
        Launcher(*pattern.shape),
        *(draw(*each) for each in ((batch, 64),) * 3),
        draw(*pattern.shape),
    )
    others: dict[str, Callable[[], Any]] = {
        "gradient": lambda: ks.gradient(other_x, dy),
        "multiply": lambda: ks(other_x, weights),
    }
    launch, launches = type(device).launch, list[threading.Thread]()

    def interrupted(own: Any, *given: Any) -> None:
        launch(own, *given)
        launches.append(threading.current_thread())
        if len(launches) == 1:
            worker = threading.Thread(target=others[other_job])
            worker.start()
            worker.join()

    monkeypatch.setattr(type(device), "launch", interrupted)
    found = np.asarray(ks.gradient(x, dy))
    assert launches.count(threading.current_thread()) == 2 < len(launches)
    truth = reference.gradient(pattern, x, dy, "bsf")
    assert np.linalg.norm(found - truth) <= tolerance("float32", batch) * np.linalg.norm(truth)
