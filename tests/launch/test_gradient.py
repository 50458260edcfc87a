"""The gradient of the weights: its call, its parts of the batch, its rules.

Its kernels are checked in `test_families.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.emit.render import PORTABLE, emit, render
from ksgen.errors import LaunchError, SpecError
from ksgen.families import cuda_limits
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants
from ksgen.families.gradient.plain import GradientConstants
from ksgen.launch import arrays, streams
from ksgen.launch.memory import numpy_dtype
from ksgen.launcher import Launcher
from ksgen.measure.verify import compare, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from ksgen.spec import parse as parse_spec
from ksgen.wisdom import Entry, Wisdom, dump, parse_export
from tests.measure.test_verify import needs_opencl
from tests.support import kernels
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.gradients import kernel
from tests.support.kernels import in_emulator, source_of
from tests.support.libraries import library

FAMILY, TENSOR_CORES = Gradient(GradientConstants), Gradient(GradientMmaConstants)
SHAPE, BATCH = (2, 9, 5, 3), 300  # a batch of several parts
PATTERN = Pattern(*SHAPE)
MMA_CASES = [("gradient_mma", "float16"), ("gradient_mma", "tf32")]
Array = np.ndarray[Any, Any]


def inputs(precision: str = "float32", layout: str = "bsf", batch: int = BATCH) -> tuple[Array, Array]:
    problem = make_problem(kernel(SHAPE, precision, layout), batch)
    assert problem.grad_y is not None
    return problem.x, problem.grad_y


def agrees(got: Any, x: Array, grad_y: Array, layout: str = "bsf", precision: str = "float32") -> None:
    truth = reference.gradient(PATTERN, x, grad_y, layout)
    assert np.linalg.norm(got.astype(truth.dtype) - truth) <= tolerance(precision, BATCH) * np.linalg.norm(truth)


# ---- what is right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_derivative_of_the_product(layout: str) -> None:
    """Y is linear in W: <dY, Y(V)> = <dW, V> for any V."""
    x, grad_y = inputs("float64", layout, 7)
    grad = reference.gradient(PATTERN, x, grad_y, layout)
    for seed in range(3):
        towards = np.random.default_rng(seed).standard_normal(SHAPE)
        y = reference.multiply(PATTERN, x, towards, layout)
        assert np.isclose((grad_y * y).sum(), (grad * towards).sum())
    with pytest.raises(LaunchError, match=r"grad_y has shape .*; accepted: \((54, 7|7, 54)\)"):
        reference.gradient(PATTERN, x, x, layout)
    with pytest.raises(LaunchError, match="layout='nchw'; accepted: bsf, bsl"):
        reference.gradient(PATTERN, x, grad_y, "nchw")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_wrong_weight_is_found_in_a_sample_too(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(kernel((2, 9, 5, 30), layout=layout), 100)
    right = problem.truth.astype(np.float32)
    assert compare(problem, right)[0] < 1e-7
    wrong = right.copy()
    wrong[1, 3, 2, 29] += 1
    assert compare(problem, wrong)[0] > tolerance("float32", 100)
    monkeypatch.setattr("ksgen.measure.verify.MOST_REFERENCE_FLOPS", problem.kernel.flops(100) / 4)
    assert compare(problem, right)[0] < 1e-7
    assert compare(problem, wrong)[0] > tolerance("float32", 100)  # the last j is always there
    assert np.isnan(compare(problem, np.full_like(right, np.nan))[0])


# ---- the call


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "precision", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in arrays.DTYPES[1:])]
)
def test_numpy_arrays(precision: str, layout: str) -> None:
    x, grad_y = inputs(precision, layout)
    grad = Launcher(*SHAPE).gradient(x, grad_y, layout=layout)
    assert (grad.dtype, grad.shape) == (x.dtype, SHAPE)
    agrees(grad, x, grad_y, layout, precision)


@pytest.mark.libraries
@needs_opencl
def test_out_and_tensors_on_the_host() -> None:
    torch = library("torch")
    x, grad_y = inputs()
    out = np.full(SHAPE, np.nan, np.float32)
    assert Launcher(*SHAPE).gradient(x, grad_y, out=out) is out
    grad = Launcher(*SHAPE).gradient(torch.tensor(x), torch.tensor(grad_y))
    assert isinstance(grad, torch.Tensor)
    np.testing.assert_array_equal(grad.numpy(), out)


@needs_opencl
def test_explain_names_the_family_of_a_gradient() -> None:
    ks = Launcher(*SHAPE, batches=[7])
    told = ks.explain(BATCH, job="gradient")
    assert told.startswith("ks_2x9x5x3_float32_bsf_gradient at batch 300 on ")
    assert (
        "cpu_gradient (the weights' gradient by matrix tiles: processors that have them; or the weights' gradient "
        "from vector registers full of sums: processors), "
        "along=" in told
    )
    assert ks.explain(7, job="gradient").startswith("ks_2x9x5x3_float32_bsf_batch7_gradient")
    with pytest.raises(SpecError, match="job='grad'; did you mean gradient"):
        ks.explain(BATCH, job="grad")
    with pytest.raises(SpecError, match="job=gradient with relu; accepted: no epilogue"):
        ks.explain(BATCH, job="gradient", epilogue=Epilogue(activation="relu"))


@needs_opencl
def test_tf32_is_plain_float32_where_there_are_no_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "opencl")  # whose kernels use no matrix tiles
    x, grad_y = inputs()
    ks = Launcher(*SHAPE)
    np.testing.assert_array_equal(ks.gradient(x, grad_y, precision="tf32x3"), ks.gradient(x, grad_y))


def test_tensors_work_on_their_stream_and_nothing_is_waited_for(gpu: FakeGpu) -> None:
    x, grad_y = inputs()
    grad = Launcher(*SHAPE).gradient(FakeTensor(gpu, x, stream=7), FakeTensor(gpu, grad_y, stream=7))
    assert gpu.launches == [("ks_2x9x5x3_float32_bsf_gradient", 7), ("ks_2x9x5x3_float32_bsf_gradient_sum", 7)]
    assert gpu.waits == []
    gpu.synchronize(7)
    agrees(grad.data.content, x, grad_y)


def test_a_short_batch_takes_one_launch(gpu: FakeGpu) -> None:
    x, grad_y = inputs(batch=65)
    grad = Launcher(*SHAPE).gradient(FakeTensor(gpu, x), FakeTensor(gpu, grad_y))
    assert [entry for entry, _ in gpu.launches] == ["ks_2x9x5x3_float32_bsf_gradient"]
    gpu.synchronize()
    agrees(grad.data.content, x, grad_y)


def test_arrays_whose_library_gives_no_memory_need_out_and_are_waited_for(gpu: FakeGpu) -> None:
    x, grad_y = inputs()
    out, ks = FakeArray(gpu, np.zeros(SHAPE, np.float32)), Launcher(*SHAPE)
    with pytest.raises(LaunchError, match=r"no way to allocate an output; give out="):
        ks.gradient(FakeArray(gpu, x), FakeArray(gpu, grad_y))
    assert ks.gradient(FakeArray(gpu, x), FakeArray(gpu, grad_y), out=out, stream=5) is out
    gpu.synchronize(5)
    agrees(out.content, x, grad_y)


def test_a_batch_of_its_own_has_a_kernel_of_its_own(gpu: FakeGpu) -> None:
    x, grad_y = inputs()
    Launcher(*SHAPE, batches=[BATCH]).gradient(FakeTensor(gpu, x), FakeTensor(gpu, grad_y))
    assert gpu.launches[0][0] == "ks_2x9x5x3_float32_bsf_batch300_gradient"


def test_inside_a_capture_nothing_compiles_or_allocates(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad_y = inputs()
    ks, out = Launcher(*SHAPE), FakeArray(gpu, np.zeros(SHAPE, np.float32))
    tensors, others = [(kind(gpu, x), kind(gpu, grad_y)) for kind in (FakeTensor, FakeArray)]
    gpu.begin_capture()
    with pytest.raises(
        LaunchError, match=r"builds and loads its kernel.*cannot record; call it once before the capture"
    ):
        ks.gradient(*tensors)
    gpu.end_capture()
    ks.gradient(*tensors)
    gpu.synchronize()
    gpu.begin_capture()
    grad = ks.gradient(*tensors)
    with pytest.raises(LaunchError, match=r"allocates its output.*give out="):
        ks.gradient(*others)
    with pytest.raises(LaunchError, match=r"allocates its workspace.*give PyTorch's tensors"):
        ks.gradient(*others, out=out)
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)
    with pytest.raises(LaunchError, match=r"copies arrays from the host.*give arrays that lie on the device"):
        ks.gradient(x, grad_y)
    gpu.end_capture()()
    gpu.synchronize()
    agrees(grad.data.content, x, grad_y)


def mistakes() -> list[tuple[str, dict[str, Any], str]]:
    x, grad_y = inputs()
    out = np.zeros(SHAPE, np.float32)
    read_only = out.copy()
    read_only.flags.writeable = False
    return [
        (
            "x",
            {"x": x[:, :29].copy()},
            r"Launcher\(2, 9, 5, 3\): got x of shape \(300, 29\); layout bsf wants \(batch, 30\)",
        ),
        ("grad_y", {"grad_y": grad_y[:, :50].copy()}, r"got grad_y of shape \(300, 50\); \(300, 54\) is needed"),
        ("batch", {"grad_y": grad_y[:50].copy()}, r"got grad_y of shape \(50, 54\); \(300, 54\) is needed"),
        ("layout", {"layout": "nchw"}, "layout='nchw'; accepted: bsf, bsl"),
        ("layout of x", {"layout": "bsl"}, r"layout bsl wants \(30, batch\)"),
        (
            "dtype",
            {"grad_y": grad_y.astype(np.float64)},
            "got x of float32 and grad_y of float64; give both in one precision",
        ),
        ("integers", {"x": x.astype(int)}, "x is of int64; give float32"),
        (
            "stride",
            {"grad_y": np.asfortranarray(grad_y)},
            "grad_y must be row-major, without gaps; give a contiguous copy of it",
        ),
        (
            "precision",
            {"precision": "float16"},
            "precision='float16' for x of float32; accepted: float32, tf32, tf32x3, fp16x3",
        ),
        ("out", {"out": out[:1].copy()}, r"got out of shape \(1, 9, 5, 3\); \(2, 9, 5, 3\) is needed"),
        ("read-only", {"out": read_only}, "out is read-only; give an array that can be written to"),
        ("overlap", {"x": x, "out": x.reshape(-1)[: out.size].reshape(SHAPE)}, "out shares memory with x"),
        ("list", {"grad_y": grad_y.tolist()}, "grad_y is a list; give np.asarray"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"), [case[1:] for case in mistakes()], ids=[case[0] for case in mistakes()]
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    x, grad_y = inputs()
    given = {"x": x, "grad_y": grad_y, **changes}
    with pytest.raises(LaunchError, match=message):
        Launcher(*SHAPE).gradient(given.pop("x"), given.pop("grad_y"), **given)


@pytest.mark.libraries
def test_tensors_that_record_gradients_are_refused() -> None:
    torch = library("torch")
    x, grad_y = map(torch.tensor, inputs())
    with pytest.raises(LaunchError, match="x requires gradients, which launchers do not record"):
        Launcher(*SHAPE).gradient(x.requires_grad_(), grad_y)


# ---- a job is part of a kernel


def test_a_gradient_has_a_name_a_digest_and_a_file_of_its_own() -> None:
    multiply, gradient = KernelSpec(Pattern(6, 64, 64, 1)), KernelSpec(Pattern(6, 64, 64, 1), job="gradient")
    assert gradient.name == "ks_6x64x64x1_float32_bsf_gradient"
    assert gradient.digest != multiply.digest
    assert gradient.digest in render(gradient).text
    assert (
        f"spec {multiply.digest}\n"
        in (Path(__file__).parents[2] / "generated/vit/ks_6x64x64x1_float32_bsf.cu").read_text()
    )
    assert (gradient.flops(100), gradient.bytes(100)) == (multiply.flops(100), multiply.bytes(100))
    assert render(gradient).second_entry == "ks_6x64x64x1_float32_bsf_gradient_sum"


@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_call_also_sums_a_bias(layout: str) -> None:
    x, grad_y = inputs(layout=layout)
    bias, out = np.empty(PATTERN.out_features, np.float32), np.empty(SHAPE, np.float32)

    def call(bias: Array) -> Any:
        return Launcher(*SHAPE)._gradient_call(x, grad_y, layout, out, None, None, bias)()

    agrees(call(bias), x, grad_y, layout)
    np.testing.assert_allclose(bias, grad_y.astype(np.float64).sum(0 if layout == "bsf" else 1), rtol=1e-4, atol=1e-4)
    read_only = bias.copy()
    read_only.flags.writeable = False
    for message, wrong in {
        "bias is read-only": read_only,
        "out shares memory with bias": out.reshape(-1)[: bias.size],
        "bias shares memory with grad_y": grad_y.reshape(-1)[: bias.size],
        r"got bias of shape \(9,\); \(54,\) is needed": bias[:9],
    }.items():
        with pytest.raises(LaunchError, match=message):
            call(wrong)


def test_what_a_job_cannot_be() -> None:
    with pytest.raises(SpecError, match="job='gradients'; did you mean gradient\\? accepted: multiply, gradient"):
        KernelSpec(PATTERN, job="gradients")
    with pytest.raises(SpecError, match="job=gradient with bias, relu; accepted: no epilogue, or a bias"):
        KernelSpec(PATTERN, epilogue=Epilogue(True, "relu"), job="gradient")


def test_a_gradient_with_a_bias() -> None:
    """It has a name of its own, no kernel on GPUs, and wisdom of the gradient without a bias."""
    plain, with_bias = (KernelSpec(PATTERN, epilogue=Epilogue(bias=each), job="gradient") for each in (False, True))
    assert (with_bias.name, with_bias.words) == ("ks_2x9x5x3_float32_bsf_bias_gradient", ("bias", "gradient"))
    limits = cuda_limits("sm_90")
    assert [FAMILY.supports(each, limits) for each in (plain, with_bias)] == [True, False]


def test_a_spec_with_gradients_is_emitted_with_them(tmp_path: Path) -> None:
    spec = parse_spec("kernels: [{pattern: [1,6,4,2], gradients: true}]", "small.yaml")
    sources = emit(spec, tmp_path / "small")
    assert [source.family for source in sources] == ["simt", "gradient", "simt"]
    rows = json.loads((tmp_path / "small/manifest.json").read_text())["kernels"]
    assert [row.get("job") for row in rows] == [None, "gradient", None]
    assert (tmp_path / "small/ks_1x6x4x2_float32_bsf_gradient.cu").is_file()
    assert "ks_1_4_6_2" in (tmp_path / "small/launchers.py").read_text()


def test_wisdom_keeps_jobs_apart() -> None:
    spec = kernel()
    constants = FAMILY.default(spec, PORTABLE["cuda"])
    entry = Entry(spec, 1000, "gradient", constants, {"median_us": 1.0})
    (again,) = parse_export(dump("GPU", Wisdom([entry])), "file")["GPU"]
    assert again == entry
    assert Wisdom([entry]).lookup(spec, 900) == entry
    assert Wisdom([entry]).lookup(replace(spec, epilogue=Epilogue(bias=True)), 900) == entry
    assert Wisdom([entry]).lookup(replace(spec, job="multiply"), 900) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "precision"), [("gradient", "float32"), ("gradient", "float16"), *MMA_CASES])
def test_memory_that_is_not_aligned_to_16_bytes(family: str, precision: str, layout: str) -> None:
    for shift in (1, 2):
        kernels.check(source_of(family, kernel((2, 48, 16, 4), precision, layout)), 64, in_emulator(), shift=shift)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gradient", "gradient_mma"])
def test_16_bit_sums_are_float32(family: str) -> None:
    """A thousand ones on top of 2048, where float16 counts by two, and bfloat16 by sixteen."""
    for precision in ("float16", "bfloat16"):
        source = source_of(family, kernel((1, 4, 4, 1), precision))
        ones = np.ones((3072, 4), numpy_dtype(precision))
        problem = replace(make_problem(source.kernel, 3072), x=ones, grad_y=ones)
        assert (kernels.differentiate(problem, source, in_emulator()) == 3072).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "own"), [("sm_90a", 32), ("sm_80", 16)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_promoted_sums_are_as_good_as_float32_ones(layout: str, target: str, own: int) -> None:
    """Tensor cores cut their sums off: over 2048 entries in one part, that would cost ten times float32's own
    rounding.
    """
    source = source_of("gradient_mma", kernel((1, 16, 16, 1), "tf32x3", layout), limits=cuda_limits(target))
    assert source.constants.promote == own
    problem = make_problem(source.kernel, 2048)
    errors = {}
    for promote in (own, 4096):
        constants = replace(source.constants, parts=1, promote=promote)
        got = kernels.differentiate(
            problem, source_of("gradient_mma", source.kernel, constants), in_emulator(target=target)
        )
        errors[promote] = compare(problem, got)[0]
    assert errors[own] < 4e-7
    assert errors[4096] > 2e-6


def test_gradients_of_fp16x3_take_numbers_that_float16_has_not() -> None:
    source = source_of("gradient_mma", kernel(SHAPE, "fp16x3"))
    problem = make_problem(source.kernel, 300)
    assert problem.grad_y is not None
    tiny = replace(problem, grad_y=problem.grad_y * np.float32(1e-9))
    got = kernels.differentiate(tiny, source, in_emulator()).astype(np.float64)
    truth = tiny.truth
    assert np.linalg.norm(got - truth) <= tolerance("fp16x3", 300) * np.linalg.norm(truth)
