"""Tests of PyCUDA and cuda-bindings, from emitting to comparing, on an NVIDIA GPU or else on the stand-in machine.

The stand-in's streams run as late as may be, so that a missing wait or a wrong stream shows as NaN; a GPU's may hide
it.
"""

import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ksgen import reference
from ksgen.build.build import build
from ksgen.devices import find_device
from ksgen.devices.libcuda import ArgumentBlock
from ksgen.errors import DeviceError, LaunchError
from ksgen.families import TensorMap, family_named
from ksgen.families.gpus import begins_early
from ksgen.launch.choice import Choice, choice_by_name, limits_of
from ksgen.launch.planner import PLANNER, Planner
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.measure.verify import Bench, make_problem, measure, tolerance
from ksgen.pattern import Pattern
from ksgen.quantized import quantize, quantize_inputs
from ksgen.spec import KernelSpec
from tests.ptx import render
from tests.support.device_arrays import CudaArray, DeviceArray, DlpackArray

pytestmark = [pytest.mark.gpu, pytest.mark.stand_in]
on_both = pytest.mark.parametrize("runtime", ["pycuda", "driver"])
on_driver = pytest.mark.parametrize("runtime", ["driver"])
on_pycuda = pytest.mark.parametrize("runtime", ["pycuda"])

SHAPE = (2, 9, 5, 3)
PATTERN = Pattern(*SHAPE)
BATCH = 37
Array = np.ndarray[Any, Any]


@pytest.fixture
def device(runtime: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KSGEN_DEVICE", runtime)
    try:
        return find_device(runtime)
    except DeviceError as absent:
        pytest.skip(str(absent))


@pytest.fixture
def ks() -> Launcher:
    return Launcher(*SHAPE)


def draw(*shape: int, precision: str = "float32", seed: int = 0) -> Array:
    dtype = ml_dtypes.bfloat16 if precision == "bfloat16" else precision
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(dtype)


def inputs(precision: str = "float32", layout: str = "bsf") -> tuple[Array, Array]:
    x = (BATCH, PATTERN.in_features) if layout == "bsf" else (PATTERN.in_features, BATCH)
    return draw(*x, precision=precision), draw(*SHAPE, precision=precision, seed=1)


def out_like(layout: str = "bsf", precision: str = "float32") -> Array:
    shape = (BATCH, PATTERN.out_features)
    return np.empty(
        shape if layout == "bsf" else shape[::-1], ml_dtypes.bfloat16 if precision == "bfloat16" else precision
    )


def check(y: Array, x: Array, weights: Array, layout: str = "bsf", precision: str = "float32", **epilogue: Any) -> None:
    truth = reference.multiply(Pattern(*weights.shape), x, weights, layout, **epilogue)
    assert y.shape == truth.shape
    error = np.linalg.norm(y.astype(np.float64) - truth) / np.linalg.norm(truth)
    assert error <= 2 * tolerance(precision, weights.shape[2]), error


# ---- host arrays


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize(
    ("precision", "layout"), [("float32", "bsf"), ("float32", "bsl"), ("float16", "bsf"), ("bfloat16", "bsl")]
)
def test_numpy_arrays(device: Any, ks: Launcher, precision: str, layout: str) -> None:
    x, weights = inputs(precision, layout)
    y = ks(x, weights, layout=layout)
    assert y.dtype == x.dtype
    check(y, x, weights, layout, precision)
    check(ks(x, ks.pack(weights), layout=layout), x, weights, layout, precision)


@on_both
def test_an_epilogue_into_out(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    bias, residual, out = draw(PATTERN.out_features), draw(BATCH, PATTERN.out_features), out_like()
    given = {"bias": bias, "activation": "gelu", "residual": residual}
    assert ks(x, weights, out=out, **given) is out
    check(out, x, weights, **given)


@on_both
def test_a_chain(device: Any) -> None:
    chain = ChainLauncher(Launcher(*SHAPE), Launcher(1, 4, 18, 3))
    x, weights = inputs()
    more = draw(1, 4, 18, 3)
    check(chain(x, [weights, more]), reference.multiply(PATTERN, x, weights, "bsf"), more)


@on_both
def test_threads_without_a_context_call_and_drop(device: Any, ks: Launcher) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x, weights = draw(seed, PATTERN.in_features), draw(*SHAPE, seed=seed)
            for _ in range(3):
                check(ks(x, weights), x, weights)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@on_both
def test_runs_are_timed_by_the_devices_clock(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    call = ks.prepare(CudaArray(device, x), CudaArray(device, weights), out=CudaArray(device, out_like()))
    seconds = device.time(call, None, runs=3, warmup=1)
    assert len(seconds) == 3
    assert all(0 < each < 1 for each in seconds)


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize(
    ("family", "precision", "layout"),
    [
        ("wgmma_shared", "float16", "bsl"),
        ("wgmma_registers", "float16", "bsf"),
        ("wgmma_registers", "tf32x3", "bsl"),
        ("wgmma_permuted", "bfloat16", "bsf"),
    ],
)
def test_kernels_that_take_tensor_maps(device: Any, family: str, precision: str, layout: str) -> None:
    if not limits_of(device).warpgroups:
        pytest.skip(f"{device.name} has no warpgroup instructions")
    kernel = KernelSpec(Pattern(2, 24, 24, 4), precision, layout)
    assert measure(device, kernel, 80, runs=0, family=family).passed


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize("storage", ["e4m3", "e5m2"])
def test_a_tensor_map_of_x_in_eight_bits(device: Any, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not limits_of(device).warpgroups:
        pytest.skip(f"{device.name} has no warpgroup instructions")

    def choose(_: Planner, on: Any, kernel: KernelSpec, batch: int, aligned: bool = True) -> Choice:
        return choice_by_name("wgmma_shared", kernel, batch, limits_of(on))

    monkeypatch.setattr(Planner, "choice", choose)
    PLANNER.forget()
    x, weights = quantize_inputs(draw(BATCH, 96), storage), draw(2, 24, 48, 1)
    stored, ks = quantize(weights, storage, x_scale=x.scale), Launcher(2, 24, 48, 1)
    meant = [reference.dequantized(each.values, np.float32(each.scale)) for each in (x, stored)]
    check(ks(x.values, stored, precision="bfloat16"), *meant, precision="bfloat16")
    out = CudaArray(device, np.empty((BATCH, 48), np.float16), is_written=False)
    ks(CudaArray(device, x.values.view(np.uint8)), ks.pack(stored), out=out)
    check(out.content(), *meant, precision="float16")
    PLANNER.forget()


@pytest.fixture
def early_chain(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChainLauncher]:
    """Two factors in float16 whose launches begin early: by Hopper's families, one of each."""
    if device.target != "sm_90a":
        pytest.skip(f"{device.name} has no launches that begin early")

    def choose(_: Planner, on: Any, kernel: KernelSpec, batch: int, aligned: bool = True) -> Choice:
        return choice_by_name(
            "wgmma_shared" if kernel.pattern.a == 4 else "wgmma_registers", kernel, batch, limits_of(on)
        )

    monkeypatch.setattr(Planner, "choice", choose)
    PLANNER.forget()
    yield ChainLauncher(Launcher(4, 16, 16, 1), Launcher(1, 24, 16, 4))
    PLANNER.forget()


def chain_arrays() -> tuple[Array, list[Array], Array, Array]:
    """X, the weights of both factors, and memory for what is between them and for Y."""
    weights = [draw(4, 16, 16, 1, precision="float16"), draw(1, 24, 16, 4, precision="float16")]
    return (
        draw(BATCH, 64, precision="float16"),
        weights,
        np.empty((BATCH, 64), np.float16),
        np.empty((BATCH, 96), np.float16),
    )


def check_chain(y: Array, x: Array, weights: list[Array]) -> None:
    check(y, reference.multiply(Pattern(*weights[0].shape), x, weights[0], "bsf"), weights[1], precision="float16")


@on_both
def test_a_chain_whose_launches_begin_early(device: Any, early_chain: ChainLauncher) -> None:
    x, weights, _, _ = chain_arrays()
    check_chain(early_chain(x, weights), x, weights)
    families = [
        factor.prepare(x, own).plan.choice.family for factor, own in zip(early_chain.factors, weights, strict=True)
    ]
    assert families == ["wgmma", "wgmma"]


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize(("family", "layout"), [("wgmma_shared", "bsl"), ("wgmma_registers", "bsf")])
def test_blocks_in_clusters(device: Any, family: str, layout: str) -> None:
    """A plain launch suffices: the source sets the cluster size, and the grid has whole clusters."""
    kernel, limits = KernelSpec(Pattern(2, 24, 24, 2), "float16", layout), limits_of(device)
    if not limits.warpgroups:
        pytest.skip(f"{device.name} has no warpgroup instructions")
    constants = replace(family_named(family).default(kernel, limits), cluster_batch=2)
    plan = PLANNER.plan_of(device, kernel, 520, Choice(family, constants, "a test"))
    bench = Bench(device, make_problem(kernel, 520))
    error, _ = bench.check(plan, bench.pack(plan))
    assert error <= tolerance("float16", 24)


@pytest.fixture
def permuting(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Provide a launcher whose calls are three launches with a workspace between them."""
    if not limits_of(device).warpgroups:
        pytest.skip(f"{device.name} has no warpgroup instructions")

    def choose(_: Planner, on: Any, kernel: KernelSpec, batch: int, aligned: bool = True) -> Choice:
        return choice_by_name("wgmma_permuted", kernel, batch, limits_of(on))

    monkeypatch.setattr(Planner, "choice", choose)
    yield Launcher(2, 24, 16, 4)
    PLANNER.forget()


def in_16_bits(seed: int = 0) -> tuple[Array, Array]:
    return draw(BATCH, 128, precision="float16", seed=seed), draw(2, 24, 16, 4, precision="float16", seed=seed)


@on_both
def test_several_launches_of_one_call(device: Any, permuting: Launcher) -> None:
    x, weights = in_16_bits()
    check(permuting(x, weights), x, weights, precision="float16")
    kept, out = permuting.pack(weights), CudaArray(device, np.empty((BATCH, 192), np.float16), is_written=False)
    given = CudaArray(device, 0 * x)
    with new_stream(device) as stream:
        put(device, given, x, stream)
        permuting(given, kept, out=out, stream=stream)
        check(out.content(stream), x, weights, precision="float16")
        call = permuting.prepare(given, kept, out=out, stream=stream)
        device.upload(given.memory, 2 * x)
        with captured(device, handle_of(stream)) as replay:
            with pytest.raises(LaunchError, match="allocates its workspace"):
                permuting(given, kept, out=out, stream=stream)
            call()
        replay()
        check(out.content(stream), 2 * x, weights, precision="float16")


@on_pycuda
def test_several_launches_on_gpuarrays(device: Any, permuting: Launcher) -> None:
    with inside(device):
        from pycuda import gpuarray

        x, weights = in_16_bits()
        y = permuting(gpuarray.to_gpu(x), gpuarray.to_gpu(weights))
        check(y.get(), x, weights, precision="float16")


@on_both
def test_a_map_that_cuda_refuses_is_named(device: Any) -> None:
    if device.target != "sm_90a":
        pytest.skip(f"{device.name} has no tensor maps")
    described = TensorMap("x", 2, (40, 3, 16), (80, 240), (64, 1, 32), 128)
    with pytest.raises(
        DeviceError, match=re.escape("describing TensorMap(operand='x', item_bytes=2, sizes=(40, 3, 16)")
    ):
        device.encode_map(described, 8)


@pytest.mark.exhaustive
@on_both
@pytest.mark.parametrize(("precision", "layout"), [("float32", "bsf"), ("float16", "bsl")])
def test_the_gradient_of_the_weights(device: Any, ks: Launcher, precision: str, layout: str) -> None:
    x, _ = inputs(precision, layout)
    grad_y = draw(*out_like(layout).shape, precision=precision, seed=2)
    truth = reference.gradient(PATTERN, x, grad_y, layout)
    own = CudaArray(device, np.empty(SHAPE, x.dtype), is_written=False)
    assert ks.gradient(CudaArray(device, x), CudaArray(device, grad_y), layout=layout, out=own) is own
    for got in (ks.gradient(x, grad_y, layout=layout), own.content()):
        assert np.linalg.norm(got.astype(np.float64) - truth) <= 2 * tolerance(precision, BATCH) * np.linalg.norm(truth)


# ---- device arrays


@on_both
@pytest.mark.parametrize("kind", [CudaArray, DlpackArray])
def test_device_arrays_are_used_where_they_are(device: Any, ks: Launcher, kind: type[DeviceArray]) -> None:
    x, weights = inputs()
    out = kind(device, out_like(), is_written=False)
    assert ks(kind(device, x), kind(device, weights), out=out) is out
    check(out.content(), x, weights)


@on_both
def test_dlpack_is_asked_for_the_stream_of_the_call(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    given, out = DlpackArray(device, x), DlpackArray(device, out_like())
    with new_stream(device) as stream:
        ks(given, ks.pack(weights), out=out, stream=stream)
        assert given.asked == [handle_of(stream)]
        check(out.content(stream), x, weights)


@on_pycuda
def test_gpuarrays(device: Any, ks: Launcher) -> None:
    with inside(device):
        from pycuda import gpuarray

        x, weights = inputs()
        given, own = gpuarray.to_gpu(x), gpuarray.to_gpu(weights)
        y = ks(given, own)
        assert type(y) is gpuarray.GPUArray
        check(y.get(), x, weights)
        out = gpuarray.empty((BATCH, PATTERN.out_features), np.float32)
        assert ks(given, ks.pack(own), out=out) is out
        check(out.get(), x, weights)


# ---- streams


@contextmanager
def inside(device: Any) -> Iterator[None]:
    """The device's context, current on this thread."""
    with device._inside("a test"):
        yield


@contextmanager
def new_stream(device: Any, flags: int = 0) -> Iterator[Any]:
    """A stream as the runtime's users have it: PyCUDA's own, or a handle."""
    with inside(device):
        if device.runtime == "pycuda":
            stream = device._driver.Stream()
            yield stream
            stream.synchronize()
            del stream
        else:
            stream = int(cuda(device).cuStreamCreate(flags)[1])
            yield stream
            cuda(device).cuStreamDestroy(stream)


def handle_of(stream: Any) -> int:
    return stream if isinstance(stream, int) else int(stream.handle)


def cuda(device: Any) -> Any:
    """cuda-bindings' driver."""
    return find_device("driver:0")._cu


def put(device: Any, array: DeviceArray, content: Array, stream: Any) -> None:
    """Copy into the array in the stream's order, and wait for nothing.

    `content` must live until the stream has come there.
    """
    with inside(device):
        if device.runtime == "pycuda":
            device._driver.memcpy_htod_async(array.pointer, content, stream)
        else:
            (status,) = cuda(device).cuMemcpyHtoDAsync(array.pointer, content.ctypes.data, content.nbytes, stream)
            assert not status


@on_both
def test_work_is_done_in_the_callers_stream(device: Any, ks: Launcher) -> None:
    """What the stream was given before comes first, the weights' too."""
    x, weights = inputs()
    given, own, out = CudaArray(device, 0 * x), CudaArray(device, 0 * weights), CudaArray(device, out_like())
    with new_stream(device) as stream:
        put(device, given, x, stream)
        put(device, own, weights, stream)
        ks(given, own, out=out, stream=stream)
        check(out.content(stream), x, weights)


@on_driver
def test_a_stream_that_waits_for_no_other(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    given, own, out = CudaArray(device, 0 * x), CudaArray(device, 0 * weights), CudaArray(device, out_like())
    with new_stream(device, int(cuda(device).CUstream_flags.CU_STREAM_NON_BLOCKING)) as stream:
        put(device, given, x, stream)
        put(device, own, weights, stream)
        ks(given, own, out=out, stream=stream)
        check(out.content(stream), x, weights)


@on_both
def test_an_array_that_names_its_stream_is_waited_for(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    given, out = CudaArray(device, 0 * x), CudaArray(device, out_like())
    kept = ks.pack(weights)
    with new_stream(device) as producer, new_stream(device) as stream:
        given.stream = handle_of(producer)
        put(device, given, x, producer)
        ks(given, kept, out=out, stream=stream)
        check(out.content(stream), x, weights)


@on_both
def test_packed_weights_serve_every_stream(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    given, out = CudaArray(device, x), CudaArray(device, out_like())
    own = CudaArray(device, 0 * weights)
    with new_stream(device) as first, new_stream(device) as second:
        put(device, own, weights, first)
        kept = ks.pack(own, stream=first)
        for stream in (second, first, None):
            ks(given, kept, out=out, stream=stream)
            check(out.content(stream), x, weights)


@on_pycuda
def test_a_handle_under_pycuda_goes_to_the_driver_runtime(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    given, out = CudaArray(device, 0 * x), CudaArray(device, out_like())
    kept = ks.pack(weights)
    with new_stream(device) as stream:
        put(device, given, x, stream)
        call = ks.prepare(given, kept, out=out, stream=handle_of(stream))
        assert call.plan.device.runtime == "driver"
        call()
        check(out.content(stream), x, weights)


# ---- arrays without memory


@on_both
@pytest.mark.parametrize("name", ["x", "weights", "out"])
def test_arrays_at_address_0_and_where_cuda_knows_no_memory_are_refused(device: Any, ks: Launcher, name: str) -> None:
    class Elsewhere(CudaArray):
        place = 0

        @property
        def pointer(self) -> int:
            return self.place

    x, weights = inputs()
    given = {"x": x, "weights": weights, "out": out_like()}
    arrays = {each: (Elsewhere if each == name else CudaArray)(device, content) for each, content in given.items()}
    freed = index(arrays[name].memory)
    arrays[name].memory = None  # type: ignore[assignment]
    for place, told in (
        (0, "lies at address 0"),
        (freed, "lies at 0x[0-9a-f]+, which is not memory of CUDA and may have been freed"),
    ):
        arrays[name].place = place  # type: ignore[attr-defined]
        with pytest.raises(LaunchError, match=f"{name} .*{told}.*give an array with memory"):
            ks(**arrays)
        if name == "weights":
            with pytest.raises(LaunchError, match=told):
                ks.pack(arrays[name])


@on_pycuda
def test_a_freed_gpuarray_is_refused(device: Any, ks: Launcher) -> None:
    with inside(device):
        from pycuda import gpuarray

        x, weights = map(gpuarray.to_gpu, inputs())
        x.gpudata.free()
        with pytest.raises(
            LaunchError,
            match=r"x lies at 0x[0-9a-f]+, which is not memory of CUDA and may have been freed; give",
        ):
            ks(x, weights)
        check(ks(gpuarray.to_gpu(inputs()[0]), weights).get(), *inputs())


# ---- launches that interrupt each other


TWICE = """
extern "C" __global__ void twice(int* y) {
    wait_for_previous_grid();
    y[threadIdx.x] *= 2;
    allow_next_grid();
}
"""


@pytest.mark.parametrize(("runtime", "early"), [("driver", False), ("driver", True), ("pycuda", True)])
def test_a_launch_that_interrupts_another_of_its_kernel_has_its_own_arguments(
    device: Any, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may run between packing and launching."""
    if device.target != "sm_90a":
        pytest.skip(f"{device.name} has no launches that begin early")
    pack, interrupting = ArgumentBlock.pack, list[Callable[[], None]]()

    def interrupted(block: ArgumentBlock, args: Any) -> int:
        address = pack(block, args)
        if interrupting:
            interrupting.pop()()
        return address

    monkeypatch.setattr(ArgumentBlock, "pack", interrupted)
    kernel = device.load(build(render(TWICE), "twice", device.target, device.compiler()), "twice", 0, early)
    one, other = (CudaArray(device, np.full(32, value, np.int32)) for value in (1, 10))
    interrupting += [lambda: device.launch(kernel, 1, 32, 0, (other.memory,), None)] * 2
    for _ in range(3):
        device.launch(kernel, 1, 32, 0, (one.memory,), None)
    assert not interrupting
    assert (set(one.content().tolist()), set(other.content().tolist())) == ({8}, {40})


# ---- CUDA graphs


@contextmanager
def captured(device: Any, stream: int) -> Iterator[Callable[[], None]]:
    """What happens inside is recorded; the replay of it, for afterwards."""
    cu, graphs = cuda(device), []

    def replay() -> None:
        (status,) = cu.cuGraphLaunch(graphs[0], stream)
        assert not status

    (status,) = cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    assert not status
    yield replay
    status, graph = cu.cuStreamEndCapture(stream)
    assert not status, status
    status, executable = cu.cuGraphInstantiate(graph, 0)
    assert not status
    graphs.append(executable)


@on_both
def test_a_graph_replays_on_new_data(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    given, own, out = CudaArray(device, x), CudaArray(device, weights), CudaArray(device, out_like(), is_written=False)
    with new_stream(device) as stream:
        ks.prepare(given, own, out=out, stream=stream)
        with captured(device, handle_of(stream)) as replay:
            ks(given, own, out=out, stream=stream)
        for factor in (1, 2):
            device.upload(given.memory, factor * x)
            device.upload(own.memory, -factor * weights)
            replay()
            check(out.content(stream), factor * x, -factor * weights)


@on_both
def test_a_graph_replays_launches_that_begin_early(device: Any, early_chain: ChainLauncher) -> None:
    """Launches wait for each other, and for launches that pack the weights again."""
    x, weights, between, y = chain_arrays()
    given, own, middle, out = (
        CudaArray(device, x),
        [CudaArray(device, each) for each in weights],
        *(CudaArray(device, e) for e in (between, y)),
    )
    first, second = early_chain.factors
    with new_stream(device) as stream:

        def call() -> None:
            first(given, own[0], out=middle, stream=stream)
            second(middle, own[1], out=out, stream=stream)

        call()
        check_chain(out.content(stream), x, weights)
        with captured(device, handle_of(stream)) as replay:
            call()
        for factor in (2, -1):
            device.upload(given.memory, factor * x)
            device.upload(own[0].memory, -weights[0])
            replay()
            check_chain(out.content(stream), factor * x, [-weights[0], weights[1]])


@on_both
def test_a_graph_replays_small_batches_whose_launches_begin_early(device: Any) -> None:
    """A layer at a batch of one, with packed weights: one launch per factor, nothing else."""
    if not begins_early(device.target):
        pytest.skip(f"{device.name} has no launches that begin early")
    x, weights, between, y = (each[:1] if isinstance(each, np.ndarray) else each for each in chain_arrays())
    first, second = Launcher(*weights[0].shape), Launcher(*weights[1].shape)
    given, own = CudaArray(device, x), [CudaArray(device, each) for each in weights]
    middle, out = CudaArray(device, between), CudaArray(device, y)
    with new_stream(device) as stream:
        kept = [ks.pack(each, stream=stream) for ks, each in zip((first, second), own, strict=True)]
        calls = [
            first.prepare(given, kept[0], out=middle, stream=stream),
            second.prepare(middle, kept[1], out=out, stream=stream),
        ]
        assert [(call.plan.choice.family, call.plan.choice.constants.early) for call in calls] == [("gemv", 1)] * 2
        for call in calls:
            call()
        check_chain(out.content(stream), x, weights)
        with captured(device, handle_of(stream)) as replay:
            for call in calls:
                call()
        for factor in (2, -1):
            device.upload(given.memory, factor * x)
            replay()
            check_chain(out.content(stream), factor * x, weights)


@on_both
def test_a_first_use_is_refused_and_spoils_no_capture(device: Any, ks: Launcher) -> None:
    x, weights = inputs()
    given, own, out = CudaArray(device, x), CudaArray(device, weights), CudaArray(device, out_like())
    kept, other = ks.pack(own), [CudaArray(device, draw(*shape)) for shape in ((3, 20), (2, 9, 5, 2), (3, 36))]
    with new_stream(device) as stream:
        ks.prepare(given, kept, out=out, stream=stream)
        with captured(device, handle_of(stream)) as replay:
            with pytest.raises(LaunchError, match="builds and loads its kernel"):
                Launcher(2, 9, 5, 2)(other[0], other[1], out=other[2], stream=stream)
            with pytest.raises(LaunchError, match="packs its weights for the first time"):
                ks(given, own, out=out, stream=stream)
            with pytest.raises(LaunchError, match="allocates its output"):
                ks(given, kept, stream=stream)
            ks(given, kept, out=out, stream=stream)
        replay()
        check(out.content(stream), x, weights)


@on_both
def test_what_is_dropped_inside_a_capture_does_not_spoil_it(device: Any, ks: Launcher) -> None:
    """Memory and kernels may be collected as garbage at any time."""
    x, weights = inputs()
    given, out, kept = CudaArray(device, x), CudaArray(device, out_like()), ks.pack(weights)
    with new_stream(device) as stream:
        plan = ks.prepare(given, kept, out=out, stream=stream).plan
        dropped = [CudaArray(device, x), ks.pack(weights)]
        dropped += [device.load(plan.binary, plan.source.entry, 0, early) for early in (False, True)]
        with captured(device, handle_of(stream)) as replay:
            dropped.clear()
            gc.collect()
            ks(given, kept, out=out, stream=stream)
        replay()
        check(out.content(stream), x, weights)


@on_both
@pytest.mark.parametrize("job", ["multiply", "gradient", "pack"])
def test_host_arrays_in_another_thread_do_not_end_a_capture(device: Any, ks: Launcher, job: str) -> None:
    """The captured stream waits for the default one, the mode is the strictest one, and kernels are loaded
    meanwhile.
    """
    x, weights = inputs()
    given, out, kept = CudaArray(device, x), CudaArray(device, out_like()), ks.pack(weights)
    results: list[Any] = []

    def work() -> None:
        PLANNER.forget()
        PLANNER._loaded.clear()
        if job == "multiply":
            results.append(ks(x, weights))
        elif job == "gradient":
            results.append(ks.gradient(x, np.zeros_like(out_like())))
        else:
            results.append(ks(x, ks.pack(weights)))

    with new_stream(device) as stream:
        call = ks.prepare(given, kept, out=out, stream=stream)
        with captured(device, handle_of(stream)) as replay:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            call()
        replay()
        check(out.content(stream), x, weights)
    assert len(results) == 1
    if job == "gradient":
        assert not results[0].any()
    else:
        check(results[0], x, weights)


@on_both
def test_a_chain_without_intermediates_is_refused_by_what_it_lacks(device: Any) -> None:
    chain = ChainLauncher(Launcher(*SHAPE), Launcher(1, 4, 18, 3), fuse="no")
    x, weights = inputs()
    given, out = CudaArray(device, x), CudaArray(device, np.empty((BATCH, 12), np.float32))
    own = [CudaArray(device, weights), CudaArray(device, draw(1, 4, 18, 3))]
    told = (
        r"launched one by one here, and ksgen cannot allocate arrays like x, CudaArray, for intermediates; accepted: "
        r"arrays of PyTorch"
    )
    with pytest.raises(LaunchError, match=told):
        chain(given, own, out=out)


@on_pycuda
def test_a_chain_that_allocates_intermediates_is_refused_inside_a_capture(device: Any) -> None:
    chain = ChainLauncher(Launcher(*SHAPE), Launcher(1, 4, 18, 3), fuse="no")
    with new_stream(device) as stream:
        from pycuda import gpuarray

        x, out = gpuarray.to_gpu(inputs()[0]), gpuarray.empty((BATCH, 12), np.float32)
        own = [gpuarray.to_gpu(inputs()[1]), gpuarray.to_gpu(draw(1, 4, 18, 3))]
        with captured(device, handle_of(stream)):
            told = (
                "launches factors one by one, and allocates their intermediates, which a CUDA graph cannot record; "
                "give PyTorch's tensors"
            )
            with pytest.raises(LaunchError, match=told):
                chain(x, own, out=out, stream=stream)
