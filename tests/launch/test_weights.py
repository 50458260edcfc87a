"""Weights: packed before every launch, or once by `pack`; what of a change can be noticed is refused."""

import threading
from typing import Any

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launcher import Launcher, SumLauncher, Weights
from ksgen.spec import LAYOUTS
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeStorage, FakeTensor
from tests.support.launching import BATCH, PATTERN, check, inputs, needs_opencl, written, zeros


@needs_opencl
def test_packed_weights_serve_every_layout_and_batch(ks: Launcher) -> None:
    _, weights = inputs()
    kept = ks.pack(weights)
    for layout in LAYOUTS:
        for batch in (1, 5):
            x, _ = inputs(layout=layout, batch=batch)
            check(ks(x, kept, layout=layout), x, weights, layout)


def test_weights_are_packed_at_every_call_and_kept_ones_once(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    on_gpu, out = FakeArray(gpu, weights), FakeArray(gpu, np.zeros((BATCH, PATTERN.out_features), np.float32))
    for _ in range(2):
        ks(FakeArray(gpu, x), on_gpu, out=out)
    assert [entry.endswith("_pack") for entry, _ in gpu.launches] == [True, False] * 2
    on_gpu.content *= 2
    ks(FakeArray(gpu, x), on_gpu, out=out)
    gpu.synchronize()
    check(out.content, x, 2 * weights)
    gpu.launches.clear()
    kept = ks.pack(on_gpu)
    for stream in (0, 5):  # packing is waited for: the packed weights serve every stream
        ks(FakeArray(gpu, x), kept, out=out, stream=stream)
        gpu.synchronize(stream)
        check(out.content, x, 2 * weights)
    assert [entry.endswith("_pack") for entry, _ in gpu.launches] == [True, False, False]


def counted(tensor: FakeTensor, content: Any) -> None:
    tensor.write(content)


def moved_away(tensor: FakeTensor, content: Any) -> None:
    tensor.data = FakeStorage(content)


def moved_and_back(tensor: FakeTensor, content: Any) -> None:
    """`module.half().float()`: other memory at the same address."""
    memory = tensor.data.content
    memory[...] = content
    tensor.data = FakeStorage(memory)


@pytest.mark.parametrize("write", [written, counted, moved_away, moved_and_back])
def test_tensors_are_packed_before_every_launch(gpu: FakeGpu, ks: Launcher, write: Any) -> None:
    x, weights = inputs()
    tensor, ready, out = FakeTensor(gpu, weights, stream=5), FakeArray(gpu, x), zeros(gpu)
    for factor in (1, 2, -1):
        write(tensor, factor * weights)
        for given in (tensor, tensor.view()):
            out.content[...] = np.nan
            ks(ready, given, out=out)
            assert gpu.waits == []
            gpu.synchronize(5)
            check(out.content, x, factor * weights)
            gpu.waits.clear()
    assert [entry.endswith("_pack") for entry, _ in gpu.launches] == [True, False] * 6
    assert not ks.buffers._forms  # nothing is kept of a tensor


def test_streams_pack_for_themselves(gpu: FakeGpu, ks: Launcher, entered: list[int]) -> None:
    x, weights = inputs()
    tensor, ready = FakeTensor(gpu, weights), FakeArray(gpu, x)
    ks(ready, tensor, out=zeros(gpu), stream=5)
    out = zeros(gpu)
    ks(ready, tensor, out=out, stream=7)
    gpu.synchronize(7)
    check(out.content, x, weights)
    assert entered == [5, 7]


@pytest.mark.parametrize("kind", [FakeTensor, FakeArray])
def test_an_array_at_the_address_of_a_deleted_one_is_packed_again(gpu: FakeGpu, ks: Launcher, kind: Any) -> None:
    x, _ = inputs()
    ready, out = FakeArray(gpu, x), zeros(gpu)
    for _ in range(5):  # CPython gives the same id to the next object of the same size
        _, weights = inputs()
        array = kind(gpu, weights)
        ks(ready, array, out=out)
        gpu.synchronize()
        check(out.content, x, weights)
        del array
    assert not ks.buffers._forms


def test_an_arrays_pack_buffer_stays_in_its_place_and_goes_when_the_array_moves(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    array, ready, out = FakeArray(gpu, weights), FakeArray(gpu, x), zeros(gpu)
    calls = [ks.prepare(ready, array, out=out) for _ in range(2)]
    first, second = (call.arguments[call.plan.operands.index("weights")] for call in calls)
    assert first is second
    array.show(gpu, 2 * weights)
    ks(ready, array, out=out)
    gpu.synchronize()
    check(out.content, x, 2 * weights)
    assert [len(buffer.buffers) for buffer in ks.buffers._forms.values()] == [1]


def test_arrays_without_weak_references_are_packed_for_the_call(gpu: FakeGpu, ks: Launcher) -> None:
    class Slots:
        __slots__ = ("__cuda_array_interface__",)

    x, weights = inputs()
    shown, array, out = FakeArray(gpu, weights), Slots(), zeros(gpu)
    array.__cuda_array_interface__ = shown.__cuda_array_interface__
    for factor in (1, 2):
        shown.content[...] = factor * weights
        ks(FakeArray(gpu, x), array, out=out)
        gpu.synchronize()
        check(out.content, x, factor * weights)


def test_weights_are_complete_when_pack_returns(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    late, out = FakeArray(gpu, np.full_like(weights, np.nan), stream=9), zeros(gpu)
    gpu._queues[9] = [lambda: late.content.__setitem__(..., weights)]  # still to be written, on stream 9
    kept = ks.pack(late)
    ks(FakeArray(gpu, x), kept, out=out, stream=5)
    gpu.synchronize(5)
    check(out.content, x, weights)
    with pytest.raises(
        LaunchError, match="device='cuda' says where host arrays go; these weights lie on a device already"
    ):
        ks.pack(late, device="cuda")


@pytest.mark.parametrize(("write", "what"), [(counted, "was written to"), (moved_away, "got other memory")])
def test_packed_weights_of_a_tensor_that_changed_are_refused_at_every_use(
    gpu: FakeGpu, ks: Launcher, write: Any, what: str
) -> None:
    x, weights = inputs()
    tensor, ready, out = FakeTensor(gpu, weights), FakeArray(gpu, x), zeros(gpu)
    kept = ks.pack(tensor)
    call = ks.prepare(ready, kept, out=out)
    call()
    gpu.synchronize()
    check(out.content, x, weights)
    write(tensor, 2 * weights)
    launched = len(gpu.launches)
    for use in (call, lambda: ks(ready, kept, out=out), lambda: ks.prepare(ready, kept, out=out)):
        for _ in range(2):
            with pytest.raises(
                LaunchError, match=f"the tensor behind these weights {what} after launcher.pack; pack it again"
            ):
                use()
    assert len(gpu.launches) == launched
    ks(ready, ks.pack(tensor), out=out)
    gpu.synchronize()
    check(out.content, x, 2 * weights)


def test_packed_weights_of_a_tensor_that_changed_are_refused_before_the_first_of_several_launches(gpu: FakeGpu) -> None:
    """The first chain of a sum would already overwrite y."""
    x, weights = inputs()
    tensor, total = FakeTensor(gpu, weights), SumLauncher(PATTERN, PATTERN)
    kept = total.layers[1].factors[0].pack(tensor)
    given = FakeArray(gpu, x), [[FakeArray(gpu, weights)], [kept]]
    prepared = total.prepare(*given, out=zeros(gpu))
    gpu.launches.clear()
    tensor.write(2 * weights)
    for call in (prepared, lambda: total(*given, out=zeros(gpu))):
        with pytest.raises(LaunchError, match="the tensor behind these weights was written to after"):
            call()
    assert not gpu.launches


def test_two_threads_pack_and_launch_side_by_side(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    failures: list[BaseException] = []

    def work(stream: int, own: Any) -> None:
        out = zeros(gpu)
        try:
            for _ in range(3):
                ks(FakeArray(gpu, x), own, out=out, stream=stream)
                gpu.synchronize(stream)
                check(out.content, x, weights)
        except BaseException as error:
            failures.append(error)

    own = FakeArray(gpu, weights)
    threads = [threading.Thread(target=work, args=(stream, own)) for stream in (5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_packed_weights_of_something_else_are_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    kept = ks.pack(FakeArray(gpu, weights))
    with pytest.raises(LaunchError, match="these weights were packed for pattern 2,9,5,3"):
        Launcher(2, 8, 5, 3)(FakeArray(gpu, x), kept)
    with pytest.raises(LaunchError, match="packed weights are float32 and x is float64"):
        ks(FakeArray(gpu, x.astype(np.float64)), kept)
    with pytest.raises(
        LaunchError, match="packed weights lie on Other GPU and x on Fake GPU; pack them on that device"
    ):
        ks(FakeArray(gpu, x), Weights(PATTERN, "float32", FakeGpu(name="Other GPU", index=1), 0))
    with pytest.raises(LaunchError, match=r"got weights of shape \(9, 5, 3\)"):
        ks.pack(weights[0])
