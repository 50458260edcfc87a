"""Launchers: the arrays they take, the memory and streams they use, and what they refuse before anything is launched."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ksgen
from ksgen import launcher as launchers
from ksgen import plan, reference
from ksgen.devices import Found, find_device, list_devices
from ksgen.errors import KsgenError, LaunchError
from ksgen.launcher import ChainLauncher, Launcher, Weights
from ksgen.pattern import Pattern
from ksgen.plan import Planner
from ksgen.spec import LAYOUTS, PRECISIONS
from ksgen.verify import tolerance
from tests.fake_gpu import FakeArray, FakeGpu, TextCompiler
from tests.simt import is_installed

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
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The device of every CUDA array, with a planner of its own."""
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    fake = FakeGpu()
    monkeypatch.setattr(launchers, "device_for", lambda place: fake if place != "host" else find_device())
    monkeypatch.setattr(launchers, "PLANNER", Planner())
    monkeypatch.setattr(plan, "build", lambda text, entry, target, compiler, caches: TextCompiler().compile(text, entry, target))
    return fake


@pytest.fixture
def ks() -> Launcher:
    return Launcher(*SHAPE)


# ---- NumPy, through OpenCL


@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
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
    with pytest.raises(LaunchError, match="got 1 weight arrays; 2 are needed, one a factor"):
        ChainLauncher(first, then)(x, [weights])


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
    assert "simt (tile_batch=" in told
    assert told.endswith("the family's default: no search has been run for this kernel on this device")


# ---- CUDA arrays, through the emulator


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_cuda_arrays_are_used_where_they_are(gpu: FakeGpu, ks: Launcher, precision: str, layout: str) -> None:
    x, weights = inputs(precision, layout)
    features = PATTERN.out_features
    out = FakeArray(
        gpu, np.full((BATCH, features) if layout == "bsf" else (features, BATCH), np.nan, np.float32).astype(dtype_of(precision))
    )
    y = ks(FakeArray(gpu, x), FakeArray(gpu, weights), layout=layout, out=out)
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


def test_weights_that_cannot_tell_are_packed_at_every_call_and_kept_ones_once(gpu: FakeGpu, ks: Launcher) -> None:
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


def test_inside_a_capture_nothing_compiles_allocates_or_waits(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    on_gpu, out = FakeArray(gpu, x), FakeArray(gpu, np.zeros((BATCH, PATTERN.out_features), np.float32))
    kept = ks.pack(FakeArray(gpu, weights))
    gpu.capturing = True
    with pytest.raises(LaunchError, match=r"the first use of a kernel builds and loads it.*before the capture, call launcher.prepare"):
        ks(on_gpu, kept, out=out)
    gpu.capturing = False
    ks.prepare(on_gpu, kept, out=out)
    gpu.capturing = True
    ks(on_gpu, kept, out=out)
    with pytest.raises(LaunchError, match=r"packs them at every call.*from launcher.pack"):
        ks(on_gpu, FakeArray(gpu, weights), out=out)
    gpu.capturing = False
    gpu.synchronize()
    check(out.content, x, weights)


def test_memory_of_an_unknown_library_needs_out(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    with pytest.raises(LaunchError, match="not how to make more of it; give out="):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights))


def test_a_foreign_stream_leaves_pycuda_for_the_driver(gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    pycuda = FakeGpu(runtime="pycuda", supports_foreign_streams=False)
    asked = []

    def find(name: str) -> FakeGpu:
        asked.append(name)
        return gpu

    monkeypatch.setattr(launchers, "device_for", lambda place: pycuda)
    monkeypatch.setattr(launchers, "find_device", find)
    assert launchers._device_and_stream(("cuda", 0), 5, 5) == (gpu, 5)
    assert launchers._device_and_stream(("cuda", 0), 0, 0) == (pycuda, 0)
    assert asked == ["driver:0"]


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
        ("list", {"x": x.tolist()}, "x is a list; give a NumPy array"),
        ("stream", {"stream": "fast"}, "stream is a str; give a CUDA stream's handle"),
    ]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in mistakes()], ids=[case[0] for case in mistakes()])
def test_what_does_not_fit_is_refused(ks: Launcher, changes: dict[str, Any], message: str) -> None:
    x, weights = inputs()
    given = {"x": x, "weights": weights, **changes}
    with pytest.raises(LaunchError, match=message):
        ks(given.pop("x"), given.pop("weights"), **given)


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
        ks(FakeArray(gpu, x), Weights(PATTERN, "float32", FakeGpu(name="Other GPU", index=1), 0, None))
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
    array.__cuda_array_interface__["data"] = (int(x.memory) + 2**45, False)
    with pytest.raises(LaunchError, match=r"a batch of 1099511627776 needs \d+ blocks; a launch has at most 2147483647"):
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
@pytest.mark.parametrize("precision", PRECISIONS)
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
