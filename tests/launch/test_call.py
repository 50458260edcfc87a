"""A prepared call: what it does again at each launch, and what it keeps."""

import pickle
import weakref
from typing import Any

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch.plan import Arguments, Call
from ksgen.launcher import Launcher
from ksgen.spec import KernelSpec
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeStorage, FakeTensor
from tests.support.launching import PATTERN, check, inputs, packs, written, zeros
from tests.support.native import chosen_native


def test_a_prepared_call_packs_tensors_each_time(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    tensor, out = FakeTensor(gpu, weights), zeros(gpu)
    call = ks.prepare(ready := FakeArray(gpu, x), tensor, out=out)
    assert packs(gpu) == 0
    for factor in (1, 2, 3):
        written(tensor, factor * weights)
        call()
        gpu.synchronize()
        check(out.content, x, factor * weights)
    assert packs(gpu) == 3
    assert ready is not None


def test_a_prepared_call_reads_its_arrays_again_and_keeps_their_memory(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    tensor = FakeTensor(gpu, x)
    memory = weakref.ref(tensor.data)
    unversioned, out = FakeArray(gpu, weights), zeros(gpu)
    call = ks.prepare(tensor, unversioned, out=out)
    tensor.data = FakeStorage(np.zeros_like(x))
    assert memory() is not None
    for factor in (1, 2):
        unversioned.content[...] = factor * weights
        assert call() is out
        gpu.synchronize()
        check(out.content, x, factor * weights)
    assert gpu.waits == [None, None]  # the test's own


def test_a_call_does_what_comes_before_and_after_its_launch_in_order() -> None:
    done: list[Any] = []

    class Plan:
        kernel = KernelSpec(PATTERN)
        device = None  # which cannot record

        def launch(self, arguments: Any, stream: Any) -> None:
            done.append((arguments, stream))

        def __str__(self) -> str:
            return "by itself"

    plan: Any = Plan()
    call = Call(plan, Arguments((1, 2)), 7, "out", [lambda: done.append("before")], lambda: done.append("after"), ())
    assert (call(), done) == ("out", ["before", ((1, 2), 7), "after"])
    done.clear()
    assert (Call(plan, Arguments((1,)), None, "out", (), None, ())(), done) == ("out", [((1,), None)])
    assert repr(call) == "Call(Launcher(2, 9, 5, 3): by itself)"
    with pytest.raises(LaunchError, match="belongs to this process, where its memory is"):
        pickle.dumps(call)


def test_calls_after_the_first_are_recorded_for_the_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = chosen_native(monkeypatch)
    own, recorded = device.record, []
    monkeypatch.setattr(device, "record", lambda *given: recorded.append(given) or own(*given))
    x, weights = inputs()
    call = Launcher(*PATTERN.shape).prepare(x, weights)
    for threads, count in ((2, 0), (2, 1), (2, 1), (1, 2), (1, 2), (2, 3)):
        monkeypatch.setattr("ksgen.launch.plan.wanted_threads", lambda threads=threads: threads)
        x *= 2
        call.out[:] = 0
        check(call(), x, weights)
        assert len(recorded) == count
