"""The operators: right against float64, each other's derivatives, and what PyTorch's transforms make of them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402  (after the skip)
from torch.func import grad, jacrev, vmap  # noqa: E402

from ksgen.errors import DeviceError, LaunchError, SpecError, ToolchainError  # noqa: E402
from ksgen.launcher import Launcher  # noqa: E402
from ksgen.measure.verify import tolerance  # noqa: E402
from ksgen.pattern import Pattern  # noqa: E402
from ksgen.spec import ACTIVATIONS, LAYOUTS, Epilogue, KernelSpec  # noqa: E402
from ksgen.torch import choice, multiply, products  # noqa: E402
from tests.support.torch_cases import SHAPES, error, matrix, truth, use_kernels  # noqa: E402

BATCH = 7
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["PyTorch", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By PyTorch's products, as on any processor; and by ksgen's kernels, through OpenCL."""
    torch.manual_seed(0)
    if request.param == "kernels":
        use_kernels(monkeypatch)
    return str(request.param)


def tensors(shape: tuple[int, ...], layout: str, dtype: Any = torch.float64, requires_grad: bool = True) -> tuple[Any, ...]:
    """x, weights, bias, residual."""
    a, b, c, d = shape
    options: dict[str, Any] = {"dtype": dtype, "requires_grad": requires_grad}
    x, residual = matrix(BATCH, a * c * d, layout, **options), matrix(BATCH, a * b * d, layout, **options)
    return x, torch.randn(shape, dtype=dtype).requires_grad_(requires_grad), torch.randn(a * b * d, **options), residual


# ---- products and gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_epilogue(path: str, shape: tuple[int, ...], dtype: Any, layout: str) -> None:
    x, weights, bias, residual = tensors(shape, layout, dtype, requires_grad=False)
    most = tolerance(str(dtype).removeprefix("torch."), shape[2])
    y = multiply(x, weights, layout=layout, backend="ksgen")
    assert (y.dtype, y.is_contiguous()) == (dtype, True)
    assert error(y, truth(x, weights, layout)) <= 2 * most
    y = multiply(x, weights, bias, residual, layout=layout, activation="silu", backend="ksgen")
    assert error(y, truth(x, weights, layout, bias, "silu", residual)) <= 4 * most  # without kernels, each step rounds


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_and_second_derivatives(path: str, shape: tuple[int, ...], layout: str) -> None:
    def product(*given: Any) -> Any:
        return multiply(*given, layout=layout, activation="gelu_tanh", backend="ksgen")

    given = tensors(shape, layout)
    assert gradcheck(product, given, fast_mode=True)
    assert gradgradcheck(product, given, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_derivatives_of_products_on_views(shape: tuple[int, ...], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_ELEMENTS", 0)
    given = tensors(shape, layout)
    assert gradcheck(lambda *each: multiply(*each, layout=layout, backend="strided"), given, fast_mode=True)
    assert gradgradcheck(lambda *each: multiply(*each, layout=layout, backend="strided"), given, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operator_itself_is_differentiable(path: str, activation: str, layout: str) -> None:
    """With the activation inside: the backward pass computes its input again. And with the transposed K."""

    def fused(*given: Any) -> Any:
        return torch.ops.ksgen.multiply(*given, layout, None, activation, False, "ksgen")

    def transposed(y: Any, weights: Any) -> Any:
        return torch.ops.ksgen.multiply(y, weights, None, None, layout, None, "none", True, "ksgen")

    x, weights, bias, residual = tensors((2, 3, 2, 2), layout)
    assert gradcheck(fused, (x, weights, bias, residual), fast_mode=True)
    assert gradcheck(transposed, (residual, weights), fast_mode=True)
    torch.testing.assert_close(
        fused(x, weights, bias, residual), multiply(x, weights, bias, residual, layout=layout, activation=activation)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_every_precision(path: str, dtype: Any, layout: str) -> None:
    x, weights, bias, _ = tensors((2, 9, 5, 3), layout, dtype)
    y_gradient = matrix(BATCH, 54, layout, dtype)
    found = torch.autograd.grad(multiply(x, weights, bias, layout=layout, backend="ksgen"), (x, weights, bias), y_gradient)
    x, weights, bias = (each.detach().double().requires_grad_() for each in (x, weights, bias))
    expected = torch.autograd.grad(multiply(x, weights, bias, layout=layout), (x, weights, bias), y_gradient.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert error(one, other) <= 4 * tolerance(str(dtype).removeprefix("torch."), BATCH)


def test_many_small_products_are_one_of_copies_and_large_ones_are_views() -> None:
    shape, layout = (4, 5, 3, 6), "bsl"
    for batch, has_views in ((2, False), (4 * products.LEAST_ELEMENTS // 72 + 1, True)):
        x, weights = matrix(batch, 72, layout, torch.float64), torch.randn(shape, dtype=torch.float64)
        assert products._has_views(x, layout, 4, 6) is has_views
        y = multiply(x, weights, layout=layout, backend="strided")
        torch.testing.assert_close(y, truth(x, weights, layout))
        found = products.weight_gradient(x, y, layout, 4, 6)
        expected = torch.einsum("ikjs,icjs->ikcj", y.view(4, 5, 6, -1), x.view(4, 3, 6, -1))
        torch.testing.assert_close(found, expected)


def test_gradients_may_be_expanded_and_inputs_strided(path: str) -> None:
    x, weights, bias, _ = tensors((2, 9, 5, 3), "bsf")
    plain = torch.autograd.grad(multiply(x, weights, bias, backend="ksgen").sum(), (x, weights, bias))
    apart = x.detach().t().contiguous().t().requires_grad_()
    strided = torch.autograd.grad(multiply(apart, weights, bias, backend="ksgen").sum(), (apart, weights, bias))
    for one, other in zip(plain, strided, strict=True):
        torch.testing.assert_close(one, other)


def test_an_empty_batch(path: str) -> None:
    x, weights = torch.zeros(0, 30, requires_grad=True), torch.randn(2, 9, 5, 3, requires_grad=True)
    y = multiply(x, weights, backend="ksgen")
    assert y.shape == (0, 54)
    y.sum().backward()
    torch.testing.assert_close(weights.grad, torch.zeros(2, 9, 5, 3))


def test_gradients_of_fp16x3_keep_float32s_range(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    asked = []

    def noted(function: Any) -> Any:
        return lambda *given, **options: asked.append((function.__name__, options["precision"])) or function(*given, **options)

    monkeypatch.setattr(Launcher, "__call__", noted(Launcher.__call__))
    monkeypatch.setattr(Launcher, "gradient", noted(Launcher.gradient))
    x, weights, _, _ = tensors((2, 9, 5, 3), "bsf", torch.float32)
    multiply(x, weights, precision="fp16x3", backend="ksgen").sum().backward()
    assert asked == [("__call__", "fp16x3"), ("__call__", "tf32x3"), ("gradient", "tf32x3")]


@pytest.mark.parametrize(("recorded", "activations"), [(False, ["gelu"]), (True, ["none"])])
def test_the_activation_is_inside_where_no_gradient_is_recorded(
    monkeypatch: pytest.MonkeyPatch, recorded: bool, activations: list[str]
) -> None:
    use_kernels(monkeypatch)
    seen, call = [], Launcher.__call__
    monkeypatch.setattr(Launcher, "__call__", lambda *given, **options: seen.append(options["activation"]) or call(*given, **options))
    x, weights, bias, residual = tensors((2, 9, 5, 3), "bsf", torch.float32)
    with torch.set_grad_enabled(recorded):
        y = multiply(x, weights, bias, residual, activation="gelu", backend="ksgen")
    assert seen == activations
    assert error(y.detach(), truth(x, weights, "bsf", bias, "gelu", residual)) < 1e-6


# ---- PyTorch's checks and transforms


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_opcheck_of_the_product(path: str, activation: str) -> None:
    x, weights, bias, residual = tensors((2, 9, 5, 3), "bsf", torch.float32)
    torch.library.opcheck(torch.ops.ksgen.multiply.default, (x, weights, bias, residual, "bsf", None, activation, False, "ksgen"))
    y = matrix(BATCH, 54, "bsl", torch.float32, requires_grad=True)
    torch.library.opcheck(torch.ops.ksgen.multiply.default, (y, weights, None, None, "bsl", None, "none", True, "ksgen"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_the_weights_gradient(path: str, layout: str) -> None:
    x, _, _, y = tensors((2, 9, 5, 3), layout, torch.float32)
    torch.library.opcheck(torch.ops.ksgen.weight_gradient.default, (x, y, 2, 3, layout, None, "ksgen"))


@pytest.mark.parametrize(
    "dims", [(0, None, None, None), (0, 0, None, 0), (None, 0, 0, None), (0, None, 0, 0), (None, None, None, 0)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap(path: str, layout: str, dims: tuple[int | None, ...]) -> None:
    """What it maps over is the first dimension of what is mapped."""
    several = [torch.stack(each) for each in zip(*(tensors((2, 3, 5, 2), layout, requires_grad=False) for _ in range(3)), strict=True)]
    given = [each if dim == 0 else each[0] for each, dim in zip(several, dims, strict=True)]

    def product(*each: Any) -> Any:
        return multiply(*each, layout=layout, activation="gelu", backend="ksgen")

    found = vmap(product, in_dims=dims)(*given)
    expected = [product(*(each[n] if dim == 0 else each for each, dim in zip(given, dims, strict=True))) for n in range(3)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_each_sample(path: str, layout: str) -> None:
    x, weights, _, _ = tensors((2, 3, 5, 2), layout, requires_grad=False)

    def loss(weights: Any, row: Any) -> Any:
        return multiply(row[None] if layout == "bsf" else row[:, None], weights, layout=layout, backend="ksgen").square().sum()

    found = vmap(grad(loss), in_dims=(None, 0 if layout == "bsf" else 1))(weights, x)
    rows = x if layout == "bsf" else x.t()
    torch.testing.assert_close(found, torch.stack([grad(loss)(weights, row) for row in rows]))


@pytest.mark.skipif(not hasattr(torch.library.CustomOpDef, "register_vmap"), reason="PyTorch 2.5 and later have rules for operators")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_of_the_operators_themselves(layout: str) -> None:
    several = [torch.stack(each) for each in zip(*(tensors((2, 3, 5, 2), layout, requires_grad=False) for _ in range(3)), strict=True)]
    x, weights, _, y = several

    def product(x: Any, weights: Any) -> Any:
        return torch.ops.ksgen.multiply(x, weights, None, None, layout, None, "none", False, "auto")

    def gradient(x: Any, y: Any) -> Any:
        return torch.ops.ksgen.weight_gradient(x, y, 2, 2, layout, None, "auto")

    for function, given in ((product, (x, weights)), (gradient, (x, y))):
        expected = torch.stack([function(*each) for each in zip(*given, strict=True)])
        torch.testing.assert_close(vmap(function)(*given), expected)


def test_a_hessian(path: str) -> None:
    x, weights, _, _ = tensors((2, 3, 5, 2), "bsf", requires_grad=False)
    found = jacrev(jacrev(lambda x: multiply(x, weights, backend="ksgen").square().sum()))(x[:1])
    kernel = jacrev(lambda x: multiply(x, weights))(x[:1]).view(12, 20)
    torch.testing.assert_close(found.view(20, 20), 2 * kernel.t() @ kernel)


def test_forward_mode_is_refused_where_kernels_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    x, weights, _, _ = tensors((2, 3, 5, 2), "bsf", requires_grad=False)
    with pytest.raises(NotImplementedError, match="forward mode AD"):
        torch.func.jvp(lambda x: multiply(x, weights, backend="ksgen"), (x,), (x,))


# ---- what "auto" takes


@pytest.mark.parametrize(
    ("kernel", "backend", "why"),
    [
        (KernelSpec(Pattern(1, 64, 64, 16)), "ksgen", r"most to win: .*; \(b \+ c\)/\(bc\) = 0.0312"),
        (KernelSpec(Pattern(1, 192, 192, 4)), "ksgen", "something to win"),
        (KernelSpec(Pattern(1, 1024, 1024, 4)), "strided", "little to win"),
        (KernelSpec(Pattern(6, 64, 64, 1)), "strided", "nothing to win: d = 1"),
        (KernelSpec(Pattern(6, 64, 64, 4), layout="bsl"), "strided", "nothing to permute in bsl"),
        (KernelSpec(Pattern(6, 64, 64, 1), epilogue=Epilogue(bias=True, activation="gelu")), "ksgen", "but bias, gelu inside the kernel"),
        (KernelSpec(Pattern(6, 64, 64, 1), "tf32x3"), "ksgen", "PyTorch has no tf32x3 of its own"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_heuristic(kernel: KernelSpec, backend: str, why: str) -> None:
    found = choice.by_heuristic(kernel)
    assert found.backend == backend
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.why)


def test_what_was_measured_and_what_cannot_run_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, cuda = KernelSpec(Pattern(6, 64, 64, 1)), torch.device("cuda:0")
    monkeypatch.setattr(choice, "device_for", lambda place: place)
    known = SimpleNamespace(choice=lambda *given: SimpleNamespace(is_measured=True, why="wisdom, measured at batch 5"), generation=-1)
    monkeypatch.setattr(choice, "PLANNER", known)
    assert choice.choose(kernel, 5, cuda) == choice.Choice("ksgen", "wisdom, measured at batch 5")
    known.choice, known.generation = lambda *given: SimpleNamespace(is_measured=False), -2
    assert choice.choose(kernel, 5, cuda).backend == "strided"

    def nothing(place: Any) -> Any:
        raise DeviceError("no driver")

    monkeypatch.setattr(choice, "device_for", nothing)
    known.generation = -3
    assert choice.choose(kernel, 5, cuda) == choice.Choice("strided", "no kernel can be launched: no driver")


def test_a_processor_s_ways_are_timed_in_turns_and_the_faster_one_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def way(name: str, seconds: float) -> Any:
        def call() -> Any:
            calls.append(name)
            now[0] += seconds + (5.0 if len(calls) <= 2 else 0.0)  # the first turn builds

        return call

    monkeypatch.setattr(choice, "perf_counter", lambda: now[0])
    ways = {"ksgen": way("ksgen", 2.0), "strided": way("strided", 1.0)}
    assert choice.faster("a job of this test", ways) == "strided"
    assert calls == ["ksgen", "strided"] * choice.TURNS
    assert choice.measured("a job of this test") == {"ksgen": 2.0, "strided": 1.0}
    assert choice.faster("a job of this test", ways) == "strided"
    assert len(calls) == 2 * choice.TURNS


def test_where_no_kernel_can_be_had_pytorch_multiplies_and_it_is_said_once() -> None:
    def refused() -> Any:
        raise ToolchainError("no compiler, says this test")

    with pytest.warns(UserWarning, match="PyTorch multiplies, as no kernel can be had: no compiler, says this test"):
        assert choice.faster("a refused job", {"ksgen": refused, "strided": lambda: torch.ones(1)}) == "strided"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.faster("another refused job", {"ksgen": refused, "strided": lambda: torch.ones(1)}) == "strided"


@pytest.mark.parametrize(("taken", "launches"), [("ksgen", 3), ("strided", 0)])
def test_auto_takes_the_faster_way(taken: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and both gradients."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(choice, "faster", lambda job, ways: taken)
    shape = (2, 9, 5, 3)
    called: list[Any] = []
    for name in ("__call__", "gradient"):
        own = getattr(Launcher, name)
        monkeypatch.setattr(Launcher, name, lambda *given, own=own, **options: called.append(own) or own(*given, **options))
    x, weights, _, _ = tensors(shape, "bsf")
    assert gradcheck(lambda *given: multiply(*given), (x, weights), fast_mode=True)
    called.clear()
    multiply(x, weights).sum().backward()
    assert len(called) == launches


# ---- what is refused


def mistakes() -> list[tuple[str, dict[str, Any], type[Exception], str]]:
    x, y = torch.randn(BATCH, 30), torch.randn(BATCH, 54)
    return [
        ("features", {"x": x[:, :29]}, LaunchError, r"multiply by 2,9,5,3: got x of shape \(7, 29\); layout bsf wants \(batch, 30\)"),
        ("axes", {"x": x[0]}, LaunchError, r"got x of shape \(30,\)"),
        ("layout of x", {"layout": "bsl"}, LaunchError, r"got x of shape \(7, 30\); layout bsl wants \(30, batch\)"),
        ("weights", {"weights": x}, LaunchError, r"got weights of shape \(7, 30\); \(a, b, c, d\) is needed"),
        ("bias", {"bias": y[0, :5]}, LaunchError, r"got bias of shape \(5,\); \(54,\) is needed"),
        ("residual", {"residual": y[:3]}, LaunchError, r"got residual of shape \(3, 54\); \(7, 54\) is needed"),
        ("dtypes", {"x": x.double()}, LaunchError, "got x of float64 and weights of float32; give both in one precision"),
        ("dtype", {"x": x.int(), "weights": torch.ones(2, 9, 5, 3, dtype=torch.int32)}, LaunchError, "tensors of int32; accepted: float32"),
        ("devices", {"bias": torch.empty(54, device="meta")}, LaunchError, "x lies on cpu and bias on meta; give both in one place"),
        (
            "precision",
            {"precision": "float16"},
            LaunchError,
            "precision='float16' for tensors of float32; did you mean float32",
        ),
        (
            "strided",
            {"precision": "tf32x3", "backend": "strided"},
            SpecError,
            "precision='tf32x3' with backend='strided'; only",
        ),
        ("layout", {"layout": "bsk"}, SpecError, "layout='bsk'; did you mean bsl"),
        ("activation", {"activation": "gelu_tan"}, SpecError, "activation='gelu_tan'; did you mean gelu_tanh"),
        ("backend", {"backend": "stride"}, SpecError, "backend='stride'; did you mean strided"),
    ]


@pytest.mark.parametrize(("changes", "kind", "message"), [case[1:] for case in mistakes()], ids=[case[0] for case in mistakes()])
def test_what_does_not_fit_is_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"x": torch.randn(BATCH, 30), "weights": torch.randn(2, 9, 5, 3), **changes}
    with pytest.raises(kind, match=message):
        multiply(given.pop("x"), given.pop("weights"), **given)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_gradients_on_a_gpu(dtype: Any, layout: str) -> None:
    given = [each.detach().cuda().requires_grad_() for each in tensors((2, 64, 48, 4), layout, dtype)]
    y_gradient = matrix(BATCH, 512, layout, dtype).cuda()
    found = torch.autograd.grad(multiply(*given, layout=layout, backend="ksgen"), given, y_gradient)
    exact = [each.detach().cpu().double().requires_grad_() for each in given]
    expected = torch.autograd.grad(multiply(*exact, layout=layout), exact, y_gradient.cpu().double())
    for one, other in zip(found, expected, strict=True):
        assert error(one.cpu(), other) <= 4 * tolerance(str(dtype).removeprefix("torch."), 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_cuda_graph_on_a_gpu() -> None:
    x, weights = torch.randn(100, 768, device="cuda"), torch.randn(1, 64, 48, 16, device="cuda")
    expected = multiply(x, weights, backend="ksgen")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multiply(x, weights, backend="ksgen")
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(y, 2 * expected)
