"""Launchers: the arrays they take, the memory and streams they use, and what they refuse before anything is launched."""

import contextlib
import copy
import os
import pickle
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ksgen
from ksgen import reference
from ksgen.devices import Found, device_for, find_device, list_devices
from ksgen.errors import DeviceError, KsgenError, LaunchError, PatternError, SpecError
from ksgen.families import FAMILIES
from ksgen.launch import arrays, fits, planner, streams
from ksgen.launch import launcher as launchers
from ksgen.launch.choice import choice_by_name, limits_of
from ksgen.launch.planner import Planner
from ksgen.launcher import ChainLauncher, Launcher, Weights
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from tests.emulator import is_installed
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeStorage, FakeTensor, TextCompiler

HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
SHAPE = (2, 9, 5, 3)
PATTERN = Pattern(*SHAPE)
BATCH = 37
RANDOM = np.random.default_rng(7)


def dtype_of(precision: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if precision == "bfloat16" else precision)


def draw(*shape: int, precision: str = "float32") -> Any:
    return RANDOM.standard_normal(shape, np.float32).astype(dtype_of(precision))


def inputs(precision: str = "float32", layout: str = "bsf", batch: int = BATCH) -> tuple[Any, Any]:
    x = (batch, PATTERN.in_features) if layout == "bsf" else (PATTERN.in_features, batch)
    return draw(*x, precision=precision), draw(*SHAPE, precision=precision)


def check(y: Any, x: Any, weights: Any, layout: str = "bsf", precision: str = "float32", **epilogue: Any) -> None:
    truth = reference.multiply(Pattern(*weights.shape), x, weights, layout, **epilogue)
    assert y.shape == truth.shape
    error = np.linalg.norm(np.asarray(y).astype(np.float64) - truth) / np.linalg.norm(truth)
    assert error <= 2 * tolerance(precision, weights.shape[2]), error


@pytest.fixture
def compiler() -> TextCompiler:
    return TextCompiler()


def plan_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Planner()
    for module in (launchers, planner):
        monkeypatch.setattr(module, "PLANNER", own)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: TextCompiler) -> FakeGpu:
    """The device of every CUDA array, with a planner and a cache of its own."""
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    fake = FakeGpu()
    monkeypatch.setattr(streams, "device_for", lambda place: fake if place[0] == "cuda" else device_for(place))
    plan_anew(monkeypatch)
    monkeypatch.setitem(arrays._readers, FakeTensor, FakeTensor.read)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("ksgen.build.build.find_compiler", lambda: compiler)
    return fake


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams that PyTorch is asked to give memory on, where those are not its current one."""
    streams = []

    class Cuda:
        @staticmethod
        def ExternalStream(handle: int, device: Any) -> int:  # noqa: N802  (PyTorch's name)
            return handle

        @staticmethod
        @contextlib.contextmanager
        def stream(handle: int) -> Any:
            streams.append(handle)
            yield

    monkeypatch.setattr(FakeTensor, "device", "cuda:0", raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda, is_grad_enabled=lambda: False, Tensor=FakeTensor))
    return streams


@pytest.fixture
def ks() -> Launcher:
    return Launcher(*SHAPE)


# ---- NumPy, through OpenCL


@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", arrays.DTYPES)
def test_numpy_arrays(ks: Launcher, precision: str, layout: str) -> None:
    x, weights = inputs(precision, layout)
    y = ks(x, weights, layout=layout)
    assert y.dtype == x.dtype
    check(y, x, weights, layout, precision)


@needs_opencl
def test_epilogue_and_out(ks: Launcher) -> None:
    x, weights = inputs()
    bias, residual = draw(PATTERN.out_features), draw(BATCH, PATTERN.out_features)
    out = np.full_like(residual, np.nan)
    y = ks(x, weights, bias=bias, activation="gelu", residual=residual, out=out)
    assert y is out
    check(y, x, weights, bias=bias, activation="gelu", residual=residual)
    expected = y.copy()
    ks(x, weights, bias=bias, activation="gelu", residual=residual, out=residual)  # in place
    np.testing.assert_array_equal(residual, expected)


@needs_opencl
def test_arrays_that_changed_are_seen(ks: Launcher) -> None:
    x, weights = inputs()
    ks(x, weights)
    weights *= 3
    check(ks(x, weights), x, weights)
    call = ks.prepare(x, weights)
    x += 1
    check(call(), x, weights)


@needs_opencl
def test_packed_weights_serve_every_layout_and_batch(ks: Launcher) -> None:
    _, weights = inputs()
    kept = ks.pack(weights)
    for layout in LAYOUTS:
        for batch in (1, 5):
            x, _ = inputs(layout=layout, batch=batch)
            check(ks(x, kept, layout=layout), x, weights, layout)


@needs_opencl
def test_a_chain_is_its_factors_one_after_another() -> None:
    first, then = Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3)
    x, weights = inputs()
    more, bias = draw(1, 4, 18, 3), draw(12)
    y = ChainLauncher(first, then)(x, [weights, more], bias=bias, activation="relu")
    middle = reference.multiply(PATTERN, x, weights, "bsf")
    check(y, middle, more, bias=bias, activation="relu")
    with pytest.raises(LaunchError, match="got 1 weight array; 2 are needed, one a factor"):
        ChainLauncher(first, then)(x, [weights])
    with pytest.raises(PatternError, match="gives 12 features and 2,9,5,3, next in the chain, takes 30"):
        ChainLauncher(then, first)
    with pytest.raises(LaunchError, match=r"factors=\(\); accepted: Launchers, one an argument"):
        ChainLauncher()


def test_a_chain_refuses_before_its_first_factor_is_launched(gpu: FakeGpu) -> None:
    chain = ChainLauncher(Launcher(*SHAPE), Launcher(1, 4, 18, 3))
    x, weights = inputs()
    ready, own, more = FakeTensor(gpu, x), FakeTensor(gpu, weights), FakeTensor(gpu, draw(1, 4, 18, 3))
    with pytest.raises(LaunchError, match=r"got weights of shape \(1, 4, 18, 2\); \(1, 4, 18, 3\) is needed"):
        chain(ready, [own, FakeTensor(gpu, draw(1, 4, 18, 2))])
    with pytest.raises(LaunchError, match=r"got bias of shape \(54,\); \(12,\) is needed"):
        chain(ready, [own, more], bias=FakeTensor(gpu, draw(54)))
    with pytest.raises(LaunchError, match="activation 'tanh' is unknown"):
        chain(ready, [own, more], activation="tanh")
    assert gpu.launches == []
    y = chain(ready, [own, more])
    gpu.synchronize()
    check(y.data.content, reference.multiply(PATTERN, x, weights, "bsf"), more.data.content)


@needs_opencl
def test_one_launcher_may_be_several_factors() -> None:
    square = Launcher(2, 3, 3, 1)
    x, first, then, bias = draw(4, 6), draw(2, 3, 3, 1), draw(2, 3, 3, 1), draw(6)
    y = ChainLauncher(square, square)(x, [first, then], bias=bias)
    check(y, reference.multiply(square.pattern, x, first, "bsf"), then, bias=bias)


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


@needs_opencl
def test_many_threads_may_call_one_launcher(ks: Launcher) -> None:
    failures = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        x, weights = random.standard_normal((seed, PATTERN.in_features), np.float32), random.standard_normal(SHAPE, np.float32)
        for _ in range(10):
            try:
                check(ks(x, weights), x, weights)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@needs_opencl
def test_a_batch_with_a_kernel_of_its_own_takes_it() -> None:
    ks = Launcher(*SHAPE, batches=[BATCH])
    x, weights = inputs()
    assert ks.prepare(x, weights).plan.kernel.batch == BATCH
    assert ks.prepare(x[:5], weights).plan.kernel.batch is None
    check(ks(x, weights), x, weights)


@needs_opencl
def test_explain_names_family_constants_and_reason(ks: Launcher) -> None:
    told = ks.explain(100)
    assert told.startswith("ks_2x9x5x3_float32_bsf at batch 100 on ")
    assert "vector (vector registers full of sums" in told
    assert ", block=" in told
    assert told.endswith("the family's default: no search has been run for this kernel on this device")
    with pytest.raises(SpecError, match="batch=0; accepted: a whole number from 1 up"):
        ks.explain(0)
    with pytest.raises(SpecError, match="batch=0"):
        Launcher(*SHAPE, batches=[0])


# ---- CUDA arrays, through the emulator


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", arrays.DTYPES)
def test_cuda_arrays_are_used_where_they_are(gpu: FakeGpu, ks: Launcher, precision: str, layout: str) -> None:
    x, weights = inputs(precision, layout)
    features = PATTERN.out_features
    out = FakeArray(
        gpu, np.full((BATCH, features) if layout == "bsf" else (features, BATCH), np.nan, np.float32).astype(dtype_of(precision))
    )
    kept = FakeArray(gpu, weights)  # its packed form is freed with it, which waits
    y = ks(FakeArray(gpu, x), kept, layout=layout, out=out)
    assert y is out
    assert np.isnan(out.content.astype(np.float64)).all()  # nothing was waited for
    gpu.synchronize()
    check(out.content, x, weights, layout, precision)


def test_the_epilogue_of_cuda_arrays(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    bias, residual = draw(PATTERN.out_features), draw(BATCH, PATTERN.out_features)
    out = FakeArray(gpu, np.zeros_like(residual))
    given = {"bias": FakeArray(gpu, bias), "residual": FakeArray(gpu, residual)}
    ks(FakeArray(gpu, x), FakeArray(gpu, weights), activation="silu", out=out, **given)
    gpu.synchronize()
    check(out.content, x, weights, bias=bias, activation="silu", residual=residual)


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


def zeros(gpu: FakeGpu, layout: str = "bsf") -> FakeArray:
    shape = (BATCH, PATTERN.out_features)
    return FakeArray(gpu, np.zeros(shape if layout == "bsf" else shape[::-1], np.float32))


def test_inside_a_capture_nothing_compiles_allocates_or_waits(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    on_gpu, out, kept = FakeArray(gpu, x), zeros(gpu), ks.pack(FakeArray(gpu, weights))
    gpu.begin_capture()
    with pytest.raises(LaunchError, match=r"builds and loads its kernel.*cannot record; before the capture, call launcher.prepare"):
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


def test_a_graph_of_tensors_packs_them_at_every_replay_whoever_wrote(gpu: FakeGpu, ks: Launcher) -> None:
    """A training step, say: a replay's writes are counted by nobody."""
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


# ---- weights that change


def packs(gpu: FakeGpu) -> int:
    return sum(entry.endswith("_pack") for entry, _ in gpu.launches)


def written(tensor: FakeTensor, content: Any) -> None:
    """By who is counted by nobody: a fused optimizer, a collective, `.data`."""
    tensor.data.content[...] = content


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
    assert not ks.rooms._rooms  # nothing is kept of a tensor


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
def test_an_array_that_takes_a_dead_ones_place_is_packed_anew(gpu: FakeGpu, ks: Launcher, kind: Any) -> None:
    x, _ = inputs()
    ready, out = FakeArray(gpu, x), zeros(gpu)
    for _ in range(5):  # CPython gives the same id to the next object of the same size
        _, weights = inputs()
        array = kind(gpu, weights)
        ks(ready, array, out=out)
        gpu.synchronize()
        check(out.content, x, weights)
        del array
    assert not ks.rooms._rooms


def test_an_arrays_room_stays_in_its_place_and_goes_when_the_array_moves(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    array, ready, out = FakeArray(gpu, weights), FakeArray(gpu, x), zeros(gpu)
    calls = [ks.prepare(ready, array, out=out) for _ in range(2)]
    first, second = (call.arguments[call.plan.operands.index("weights")] for call in calls)
    assert first is second
    array.show(gpu, 2 * weights)
    ks(ready, array, out=out)
    gpu.synchronize()
    check(out.content, x, 2 * weights)
    assert [len(room.buffers) for room in ks.rooms._rooms.values()] == [1]


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
    with pytest.raises(LaunchError, match="device='cuda' says where host arrays go; these weights lie on a device already"):
        ks.pack(late, device="cuda")


@pytest.mark.parametrize(("write", "what"), [(counted, "was written to"), (moved_away, "got other memory")])
def test_packed_weights_of_a_tensor_that_changed_are_refused_at_every_use(gpu: FakeGpu, ks: Launcher, write: Any, what: str) -> None:
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
            with pytest.raises(LaunchError, match=f"the tensor behind these weights {what} after launcher.pack; pack it again"):
                use()
    assert len(gpu.launches) == launched
    ks(ready, ks.pack(tensor), out=out)
    gpu.synchronize()
    check(out.content, x, 2 * weights)


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


def test_a_prepared_call_reads_its_arrays_anew_and_keeps_their_memory(gpu: FakeGpu, ks: Launcher) -> None:
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


# ---- which stream, which device


def test_work_of_another_stream_is_waited_for_or_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    late, out = FakeArray(gpu, np.full_like(x, np.nan), stream=9), zeros(gpu)
    kept = ks.pack(FakeArray(gpu, weights))
    gpu._queues[9] = [lambda: late.content.__setitem__(..., x)]
    ks(late, kept, out=out, stream=5)
    gpu.synchronize(5)
    check(out.content, x, weights)
    with pytest.raises(LaunchError, match="x works on stream 9 and weights on 4; give stream=, on which the work of both is waited for"):
        ks(late, FakeArray(gpu, weights, stream=4), out=out)
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


def test_dlpack_arrays_are_made_ready_for_the_stream_of_the_launch(gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Jax(FakeArray):
        pass

    def read(array: Jax, name: str, stream: Any) -> arrays.ArrayView:
        asked.append(stream)
        pointer = array.__cuda_array_interface__["data"][0]
        return arrays.ArrayView("dlpack", pointer, array.shape, "float32", True, ("cuda", 0), stream, array, False)

    monkeypatch.setitem(arrays._readers, Jax, read)
    x, weights = inputs()
    out = zeros(gpu)
    ks(FakeTensor(gpu, x, stream=6), Jax(gpu, weights), out=out)
    assert asked[-1] == 6
    ks(Jax(gpu, x), Jax(gpu, weights), out=out, stream=5)
    assert asked[-2:] == [5, 5]
    gpu.synchronize(6)
    check(out.content, x, weights)


def test_output_and_room_come_from_the_memory_of_the_stream_that_writes_them(gpu: FakeGpu, ks: Launcher, entered: list[int]) -> None:
    """PyTorch gives out memory that its current stream may still read."""
    x, weights = inputs()
    y = ks(FakeTensor(gpu, x, stream=6), FakeTensor(gpu, weights, stream=6))
    assert (type(y), entered) == (FakeTensor, [])
    y = ks(FakeTensor(gpu, x, stream=6), FakeTensor(gpu, weights, stream=6), stream=5)
    assert entered == [5, 5]
    gpu.synchronize(5)
    check(y.data.content, x, weights)


def test_float32_arrays_may_ask_for_tensor_cores(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    out = zeros(gpu)
    for precision, error in (("tf32x3", 1e-6), ("tf32", 1e-3), (None, 1e-6)):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=out, precision=precision)
        gpu.synchronize()
        truth = reference.multiply(PATTERN, x, weights, "bsf")
        assert 0 < np.linalg.norm(out.content - truth) / np.linalg.norm(truth) < error
    with pytest.raises(LaunchError, match="precision='float16' for arrays of float32; accepted: float32, tf32, tf32x3, fp16x3"):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=out, precision="float16")
    with pytest.raises(LaunchError, match="precision='half' for arrays of float32"):
        ChainLauncher(ks)(FakeArray(gpu, x), [FakeArray(gpu, weights)], out=out, precision="half")


def test_arrays_that_tensor_maps_cannot_describe_are_served_by_another_family(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wgmma_shared", "wgmma_registers"):
        monkeypatch.setattr(FAMILIES[name], "measured", True)
    ks = Launcher(2, 24, 16, 3)
    weights = draw(2, 24, 16, 3, precision="float16")
    given = FakeArray(gpu, weights)

    def launch(batch: int, shift: int = 0, shift_out: int = 0, **extras: int) -> str:
        """The entry that served the call; `extras` are added, each so many elements past a boundary."""
        x = draw(96, batch, precision="float16")
        out, array = FakeArray(gpu, x), FakeArray(gpu, x)
        out.show(gpu, moved(np.full((144, batch), np.nan, np.float16), shift_out))
        array.show(gpu, moved(x, shift))
        added = {name: draw(144, *[batch] * (name == "residual"), precision="float16") for name in extras}
        shown = {name: FakeArray(gpu, x) for name in extras}
        for name, given_shift in extras.items():
            shown[name].show(gpu, moved(added[name], given_shift))
        for _ in range(2):
            ks(array, given, layout="bsl", out=out, **shown)
        gpu.synchronize()
        check(out.content, x, weights, "bsl", "float16", **added)
        return gpu.launches[-1][0]

    by_map = launch(40)
    assert len(gpu.encoded) == 2  # x and y, once
    assert launch(40) == by_map
    assert len(gpu.encoded) == 4  # another x and y
    assert len({launch(41), launch(40, shift=1), launch(40, shift_out=2)} - {by_map}) == 1
    assert len(gpu.encoded) == 4
    launch(40, bias=0, residual=0)
    assert len(gpu.encoded) == 6
    for extras in ({"bias": 1, "residual": 0}, {"bias": 0, "residual": 4}):  # which their kernels read 16 bytes at a time
        launch(40, **extras)
    assert len(gpu.encoded) == 6


# ---- kernels of several launches


@pytest.fixture
def permuting(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Its kernels permute X into a workspace, multiply there, and permute Y back."""

    def choose(_: Planner, device: Any, kernel: Any, batch: int, aligned: bool = True) -> Any:
        return choice_by_name("wgmma_permuted", kernel, batch, limits_of(device))

    monkeypatch.setattr(Planner, "choice", choose)
    return Launcher(1, 16, 8, 2)


def in_16_bits() -> tuple[Any, Any]:
    return draw(BATCH, 16, precision="float16"), draw(1, 16, 8, 2, precision="float16")


def launched(gpu: FakeGpu) -> list[str]:
    """Ends of the entries' names: none of the one that multiplies."""
    return [re.sub(r"^ks_1x16x8x2_float16_bsf_[0-9a-f]{8}_?", "", entry) for entry, _ in gpu.launches]


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


def moved(array: Any, elements: int) -> Any:
    """A copy that begins so many elements past a 16-byte boundary."""
    memory = np.empty(array.size + 16, array.dtype)
    first = -memory.ctypes.data % 16 // array.itemsize + elements
    copy = memory[first : first + array.size].reshape(array.shape)
    copy[...] = array
    return copy


def test_overflow_of_fp16x3_is_reported_for_host_arrays(gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)
    x, weights = np.ones((BATCH, PATTERN.in_features), np.float32), np.ones(SHAPE, np.float32)
    np.testing.assert_array_equal(ks(x, weights, precision="fp16x3"), np.full((BATCH, PATTERN.out_features), 5))
    x[7, 5] = 7e4
    with pytest.raises(
        LaunchError, match=r"fp16x3 takes \|x\| up to 65504 and \|weights\| up to 63.9; got x up to 7e\+04, weights up to 1; take tf32x3"
    ):
        ks(x, weights, precision="fp16x3")
    np.testing.assert_allclose(ks(x, weights, precision="tf32x3")[7, 2], 70004, rtol=1e-6)
    x[7, 5] = np.nan  # the caller's own
    assert np.isnan(ks(x, weights, precision="fp16x3")[7, 2])


def test_overflow_of_fp16x3_is_reported_whichever_family_serves(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)
    monkeypatch.setattr(FAMILIES["wgmma_registers"], "measured", True)
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


def test_memory_of_an_unknown_library_needs_out(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    with pytest.raises(LaunchError, match="not how to make more of it; give out="):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights))


def test_a_foreign_stream_leaves_pycuda_for_the_driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        handle = 12

    pycuda, asked = FakeGpu(runtime="pycuda", supports_foreign_streams=False), []
    monkeypatch.setattr(streams, "device_for", lambda place: pycuda)
    monkeypatch.setattr(streams, "find_device", lambda name: asked.append(name) or gpu)
    monkeypatch.setitem(sys.modules, "pycuda.driver", SimpleNamespace(Stream=Stream))
    own = Stream()
    for stream, device, handle in ((5, gpu, 5), (0, pycuda, None), (1, pycuda, None), (None, pycuda, None), (own, pycuda, own)):
        assert streams.device_and_stream("ks", ("cuda", 0), stream) == (device, handle)
    assert asked == ["driver:0"]

    def none_there(name: str) -> FakeGpu:
        raise DeviceError("no driver")

    monkeypatch.setattr(streams, "find_device", none_there)
    with pytest.raises(
        LaunchError, match="PyCUDA cannot launch on a stream of another library, and the driver runtime is not there: no driver"
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
        with pytest.raises(LaunchError, match=f"stream {stream} is a CUDA stream, and .* wants a pyopencl CommandQueue, or None"):
            ks(*on_device, stream=stream)
        with pytest.raises(LaunchError, match="is a CUDA stream"):
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
    with pytest.raises(LaunchError, match="stream is a pyopencl CommandQueue, and x lies on a CUDA device; give a CUDA stream"):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu), stream=queue)


# ---- compiled once


def test_compiled_on_first_use_and_from_the_cache_after_that(
    gpu: FakeGpu, ks: Launcher, compiler: TextCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights = inputs()
    for batch in (1, 5, BATCH):
        out = FakeArray(gpu, np.zeros((batch, PATTERN.out_features), np.float32))
        ks(FakeArray(gpu, x[:batch]), FakeArray(gpu, weights), out=out)
        gpu.synchronize()
        check(out.content, x[:batch], weights)
    assert compiler.compiled == ["ks_2x9x5x3_float32_bsf"]
    plan_anew(monkeypatch)  # another process
    Launcher(*SHAPE)(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    assert len(compiler.compiled) == 1


def test_a_batch_that_is_new_to_a_loaded_kernel_can_be_captured(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    kept = ks.pack(FakeArray(gpu, weights))
    ks.prepare(FakeArray(gpu, x), kept, out=zeros(gpu))
    ready, out = FakeArray(gpu, x[:5]), FakeArray(gpu, np.zeros((5, PATTERN.out_features), np.float32))
    gpu.begin_capture()
    ks(ready, kept, out=out)
    gpu.end_capture()()
    check(out.content, x[:5], weights)


def test_a_launcher_forgets_batches_rather_than_grow(gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "MOST_FITS", 3)
    kept = ks.pack(FakeArray(gpu, inputs()[1]))
    for batch in range(1, 9):
        x, out = (FakeArray(gpu, np.zeros((batch, size), np.float32)) for size in (PATTERN.in_features, PATTERN.out_features))
        ks.prepare(x, kept, out=out)
    assert len(ks._fits) <= 3


def test_launchers_can_be_copied_and_sent_to_other_processes(gpu: FakeGpu) -> None:
    ks = Launcher(*SHAPE, batches=[BATCH])
    x, weights = inputs()
    ks(FakeArray(gpu, x), FakeTensor(gpu, weights), out=zeros(gpu))
    for copied in (copy.deepcopy(ks), pickle.loads(pickle.dumps(ks))):
        assert (copied.pattern, copied.batches) == (ks.pattern, ks.batches)
    assert repr(copy.deepcopy(ChainLauncher(ks))) == "ChainLauncher(Launcher(2, 9, 5, 3))"


# ---- what is refused


def mistakes() -> list[tuple[str, dict[str, Any], str]]:
    x, weights = inputs()
    y = np.zeros((BATCH, PATTERN.out_features), np.float32)
    read_only = y.copy()
    read_only.flags.writeable = False
    both = np.zeros(x.size + y.size, np.float32)
    return [
        ("features", {"x": x[:, :29].copy()}, r"Launcher\(2, 9, 5, 3\): got x of shape \(37, 29\); layout bsf wants \(batch, 30\)"),
        ("axes", {"x": x[0]}, r"got x of shape \(30,\)"),
        ("empty", {"x": x[:0]}, "with a batch of at least 1"),
        ("layout of x", {"layout": "bsl"}, r"layout bsl wants \(30, batch\)"),
        ("layout", {"layout": "nchw"}, "layout 'nchw' is unknown; accepted: bsf, bsl"),
        ("activation", {"activation": "tanh"}, "activation 'tanh' is unknown; accepted: none, relu"),
        ("weights", {"weights": weights[..., :2].copy()}, r"got weights of shape \(2, 9, 5, 2\); \(2, 9, 5, 3\) is needed"),
        ("precision", {"weights": weights.astype(np.float64)}, "got float64 for weights and float32 for x; give both in one precision"),
        ("integers", {"x": x.astype(int)}, "x is of int64; give float32"),
        ("stride", {"x": np.asfortranarray(x)}, "x is not row-major without gaps; give a contiguous copy of it"),
        ("bias", {"bias": y[0, :5].copy()}, r"got bias of shape \(5,\); \(54,\) is needed"),
        ("residual", {"residual": y[:3].copy()}, r"got residual of shape \(3, 54\); \(37, 54\) is needed"),
        ("out", {"out": y[:3].copy()}, r"got out of shape \(3, 54\)"),
        ("read-only", {"out": read_only}, "out is read-only; give an array that can be written to"),
        ("overlap", {"x": both[: x.size].reshape(x.shape), "out": both[x.size - 8 : -8].reshape(y.shape)}, "out shares memory with x"),
        ("list", {"x": x.tolist()}, "x is a list; give np.asarray.*, or a NumPy array"),
        ("stream", {"stream": "fast"}, "stream is a str; give a CUDA stream's handle"),
    ]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in mistakes()], ids=[case[0] for case in mistakes()])
def test_what_does_not_fit_is_refused(ks: Launcher, changes: dict[str, Any], message: str) -> None:
    x, weights = inputs()
    given = {"x": x, "weights": weights, **changes}
    with pytest.raises(LaunchError, match=message):
        ks(given.pop("x"), given.pop("weights"), **given)


def test_an_address_inside_a_number_is_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    array = FakeArray(gpu, x)
    array.__cuda_array_interface__["data"] = (array.__cuda_array_interface__["data"][0] + 2, False)
    with pytest.raises(LaunchError, match=r"x starts inside a float32, at 0x.*; give a copy of it"):
        ks(array, FakeArray(gpu, weights), out=zeros(gpu))


def test_arrays_in_two_places_are_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    with pytest.raises(LaunchError, match=r"x lies on a CUDA device and weights on the host; give both in one place"):
        ks(FakeArray(gpu, x), weights)


def test_packed_weights_of_something_else_are_refused(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    kept = ks.pack(FakeArray(gpu, weights))
    with pytest.raises(LaunchError, match="these weights were packed for pattern 2,9,5,3"):
        Launcher(2, 8, 5, 3)(FakeArray(gpu, x), kept)
    with pytest.raises(LaunchError, match="packed weights are float32 and x is float64"):
        ks(FakeArray(gpu, x.astype(np.float64)), kept)
    with pytest.raises(LaunchError, match="packed weights lie on Other GPU and x on Fake GPU; pack them on that device"):
        ks(FakeArray(gpu, x), Weights(PATTERN, "float32", FakeGpu(name="Other GPU", index=1), 0))
    with pytest.raises(LaunchError, match=r"got weights of shape \(9, 5, 3\)"):
        ks.pack(weights[0])


def test_a_batch_beyond_a_launch_is_refused(gpu: FakeGpu) -> None:
    class Huge(FakeArray):
        pass

    ks = Launcher(1, 1, 1, 1)
    x, y, weights = (Huge(gpu, np.zeros(shape, np.float32)) for shape in ((1, 1), (1, 1), (1, 1, 1, 1)))
    for array in (x, y):
        array.__cuda_array_interface__["shape"] = (2**40, 1)
    array = y
    array.__cuda_array_interface__["data"] = (x.content.ctypes.data + 2**45, False)
    with pytest.raises(
        LaunchError, match=r"ks_1x1x1x1_float32_bsf: a batch of 1099511627776 needs \d+ blocks; a launch has at most 2147483647"
    ):
        ks(x, weights, out=array)


# ---- the whole way


PRODUCTION = """
import sys
import numpy as np, ksgen
if len(sys.argv) > 1:
    ksgen.use_bundle(sys.argv[1])
x, w = np.ones((4, 30), np.float32), np.ones((2, 9, 5, 3), np.float32)
print(float(ksgen.Launcher(2, 9, 5, 3)(x, w)[3, 7]))
"""


@needs_opencl
def test_production_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "KSGEN_CACHE_DIR": str(tmp_path / "cache")}
    forbidden = {**environment, "KSGEN_NO_COMPILE": "1"}

    def run(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", PRODUCTION], env=env, capture_output=True, text=True)

    cold = run(forbidden)
    assert cold.returncode == 1
    assert "ToolchainError: ks_2x9x5x3_float32_bsf" in cold.stderr
    assert run(environment).stdout == "5.0\n"
    assert run(forbidden).stdout == "5.0\n"


def test_the_package_offers_the_launcher() -> None:
    assert repr(ksgen.Launcher(1, 2, 3, 4)) == "Launcher(1, 2, 3, 4)"
    with pytest.raises(KsgenError, match="accepted"):
        ksgen.Launcher(1, 0, 3, 4)


# ---- PyTorch


def torch_or_skip() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@needs_opencl
@pytest.mark.parametrize("precision", arrays.DTYPES)
def test_torch_tensors_on_the_processor(ks: Launcher, precision: str) -> None:
    torch = torch_or_skip()
    x, weights = torch.randn(BATCH, PATTERN.in_features), torch.randn(*SHAPE)
    x, weights = x.to(getattr(torch, precision)), weights.to(getattr(torch, precision))
    y = ks(x, weights)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == x.dtype
    check(y.double().numpy(), x.double().numpy(), weights.double().numpy(), precision=precision)


@needs_opencl
def test_torch_gradients_are_refused_not_lost(ks: Launcher) -> None:
    torch = torch_or_skip()
    x, weights = torch.randn(BATCH, PATTERN.in_features), torch.randn(*SHAPE, requires_grad=True)
    with pytest.raises(LaunchError, match="weights requires gradients, which launchers do not record"):
        ks(x, weights)
    with torch.no_grad():
        assert ks(x, weights).shape == (BATCH, PATTERN.out_features)
