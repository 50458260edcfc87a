"""The walk from arrays to a launch, inside a CUDA graph's capture and before it."""

import sys
from typing import Any

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch import base
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.launching import check, inputs, packs, zeros
from tests.support.native import chosen_native


def test_inside_a_capture_nothing_compiles_allocates_or_waits(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    on_gpu, out, kept = FakeArray(gpu, x), zeros(gpu), ks.pack(FakeArray(gpu, weights))
    gpu.begin_capture()
    with pytest.raises(
        LaunchError, match=r"builds and loads its kernel.*cannot record; before the capture, call launcher.prepare"
    ):
        ks(on_gpu, kept, out=out)
    gpu.end_capture()
    ks.prepare(on_gpu, kept, out=out)
    gpu.begin_capture()
    ks(on_gpu, kept, out=out)
    with pytest.raises(LaunchError, match="packs its weights for the first time"):
        ks(on_gpu, FakeArray(gpu, weights), out=out)
    with pytest.raises(LaunchError, match="waits for weights"):
        ks.pack(FakeArray(gpu, weights))
    with pytest.raises(LaunchError, match=r"copies arrays from the host.*give arrays that lie on the device"):
        ks(x, kept)
    with pytest.raises(LaunchError, match=r"waits for arrays of another stream"):
        ks(FakeArray(gpu, x, stream=3), kept, out=out, stream=5)
    replay = gpu.end_capture()
    assert gpu.freed_in_capture == 0
    replay()
    check(out.content, x, weights)
    on_gpu.content *= 2
    replay()
    check(out.content, 2 * x, weights)


def test_a_graph_of_weights_packs_them_at_every_replay(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    on_gpu, out = FakeArray(gpu, weights), zeros(gpu)
    ready = FakeArray(gpu, x)
    ks.prepare(ready, on_gpu, out=out)
    assert gpu.launches == []
    gpu.begin_capture()
    ks(ready, on_gpu, out=out)
    replay = gpu.end_capture()
    for factor in (1, 2):
        on_gpu.content[...] = factor * weights
        replay()
        check(out.content, x, factor * weights)


def test_a_graph_of_tensors_packs_them_at_every_replay_whatever_wrote_them(gpu: FakeGpu, ks: Launcher) -> None:
    """No counter sees the writes of a replay, such as those of a training step."""
    x, weights = inputs()
    tensor, ready, out = FakeTensor(gpu, weights), FakeArray(gpu, x), zeros(gpu)
    ks(ready, tensor, out=out)
    gpu.begin_capture()
    ks(ready, tensor, out=out)
    gpu.graph.append(lambda: tensor.data.content.__iadd__(weights))  # type: ignore[union-attr]
    replay = gpu.end_capture()
    for factor in (1, 2):
        replay()
        check(out.content, x, factor * weights)
    ks(ready, tensor, out=out)
    gpu.synchronize()
    check(out.content, x, 3 * weights)
    assert gpu.freed_in_capture == 0


def test_a_graph_of_packed_weights_holds_no_packing(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    ready, out, kept = FakeArray(gpu, x), zeros(gpu), ks.pack(FakeTensor(gpu, weights))
    ks(ready, kept, out=out)
    gpu.begin_capture()
    ks(ready, kept, out=out)
    gpu.end_capture()()
    check(out.content, x, weights)
    assert packs(gpu) == 1


STEPS = ("views_of", "check_memory", "where_to_work", "plan_for", "on_device")


def test_products_and_gradients_take_each_step_once_and_in_order(
    gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def counted(name: str, step: Any) -> Any:
        return lambda *given: taken.append(name) or step(*given)

    for name in STEPS:
        monkeypatch.setattr(base, name, counted(name, getattr(base, name)))
    x, weights = inputs()
    grad_y, grad = zeros(gpu), FakeArray(gpu, np.zeros_like(weights))
    ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    assert tuple(taken) == STEPS
    taken.clear()
    ks.gradient(FakeArray(gpu, x), grad_y, out=grad)
    assert tuple(taken) == STEPS


def stops(call: Any) -> list[str]:
    """Files of `ksgen/launch` that a call enters until its first launch: one stop for functions of a file that
    follow each other.
    """
    found: list[str] = []
    done: list[bool] = []

    def enters(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and "/ksgen/" in code.co_filename and not done:
            _, _, name = code.co_filename.rpartition("/ksgen/")
            if name.startswith("devices/") and code.co_name == "launch":
                done.append(True)
            elif name.startswith("launch/") and found[-1:] != [name]:
                found.append(name)

    sys.setprofile(enters)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert done
    return found


@pytest.mark.parametrize("packs_once", [False, True])
def test_x_takes_one_short_path(packs_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known form of call makes at most 14 stops in 8 files (9 of a group), and comes back to one of them 5 times."""
    chosen_native(monkeypatch)
    first, then, x = Launcher(1, 8, 4, 2), Launcher(1, 4, 16, 1), np.ones((64, 8), np.float32)
    weights = [np.ones(each.pattern.shape, np.float32) for each in (first, then)]
    own: list[Any] = (
        [each.pack(array) for each, array in zip((first, then), weights, strict=True)] if packs_once else weights
    )
    chain = ChainLauncher(first, then, fuse="yes")
    group = GroupLauncher(chain, first)
    for call, files in (
        (lambda: first(x, own[0]), 8),
        (lambda: chain(x, own), 8),
        (lambda: group(x, [own, own[0]]), 9),
    ):
        call()
        found = stops(call)
        assert len(found) <= 14, found
        assert len(set(found)) <= files, found
        assert len(found) - len(set(found)) <= 5, found
