"""The operators: right against float64, each other's derivatives, and what PyTorch's transforms make of them."""

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402  (after the skip)
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from ksgen.errors import DeviceError, LaunchError, ToolchainError  # noqa: E402
from ksgen.launch.checks import ArgumentChecks  # noqa: E402
from ksgen.launch.plan import Call  # noqa: E402
from ksgen.launcher import ChainLauncher, Launcher  # noqa: E402
from ksgen.measure.verify import tolerance  # noqa: E402
from ksgen.pattern import Pattern  # noqa: E402
from ksgen.spec import ACTIVATIONS, LAYOUTS, Epilogue, KernelSpec  # noqa: E402
from ksgen.torch import KSLinear, multiply  # noqa: E402
from ksgen.torch.operators import choice, ops, products  # noqa: E402
from ksgen.torch.operators.products import finish  # noqa: E402
from tests.support.native import chosen_native  # noqa: E402
from tests.support.torch_cases import SHAPES, error, matrix, truth, use_kernels  # noqa: E402

BATCH = 7
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["PyTorch", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select PyTorch's products, as without a compiler, or ksgen's kernels through OpenCL."""
    torch.manual_seed(0)
    if request.param == "kernels":
        use_kernels(monkeypatch)
    else:
        monkeypatch.setattr(choice, "KERNEL_DEVICES", {"cuda"})
    return str(request.param)


def tensors(
    shape: tuple[int, ...], layout: str, dtype: Any = torch.float64, requires_grad: bool = True
) -> tuple[Any, ...]:
    """x, weights, bias, residual."""
    a, b, c, d = shape
    options: dict[str, Any] = {"dtype": dtype, "requires_grad": requires_grad}
    x, residual = matrix(BATCH, a * c * d, layout, **options), matrix(BATCH, a * b * d, layout, **options)
    return x, torch.randn(shape, dtype=dtype).requires_grad_(requires_grad), torch.randn(a * b * d, **options), residual


# ---- slices of larger tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_are_read_where_they_lie(path: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices give the values and gradients of copies. Kernels make no copy."""
    shape = SHAPES[2]
    a, b, c, d = shape
    x, residual = (matrix(3 * BATCH, features, layout, torch.float32) for features in (a * c * d, 2 * a * b * d))
    if layout == "bsf":
        x, residual = torch.cat([x, x], 1)[BATCH : 2 * BATCH, 3 : 3 + a * c * d], residual[:BATCH, a * b * d :]
    else:
        x, residual = x[:, BATCH : 2 * BATCH], residual[a * b * d :, :BATCH]
    weights = torch.randn(shape)
    given = [x.detach().requires_grad_(), weights.requires_grad_(), residual.detach().requires_grad_()]
    copies = [each.detach().clone().requires_grad_() for each in given]
    assert not any(each.is_contiguous() for each in (x, residual))
    for chosen in (given, copies):
        multiply(chosen[0], chosen[1], None, chosen[2], layout=layout, activation="gelu").square().sum().backward()
    for one, other in zip(given, copies, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    names = []
    prepare = ArgumentChecks.find
    monkeypatch.setattr(
        ArgumentChecks, "find", lambda *given: names.append((found := prepare(*given)).kernel.name) or found
    )
    with torch.no_grad():
        y = multiply(x, weights, None, residual, layout=layout, backend="auto" if path == "PyTorch" else "ksgen")
    torch.testing.assert_close(
        y, finish(truth(x, weights, layout), None, "none", residual, layout).float(), rtol=1e-4, atol=1e-4
    )
    assert [name.endswith("_strided") for name in names] == ([] if path == "PyTorch" else [True])


# ---- products and gradients


def in_rings() -> list[Any]:
    """Every shape in float64 and every type of some shapes in the quick ring, and the rest later."""
    some = (torch.float64, SHAPES[2], SHAPES[3])
    return [
        pytest.param(
            shape, dtype, id=f"{shape}-{dtype}", marks=[] if dtype in some or shape in some else [pytest.mark.slow]
        )
        for shape in SHAPES
        for dtype in DTYPES
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dtype"), in_rings())
def test_product_and_epilogue(path: str, shape: tuple[int, ...], dtype: Any, layout: str) -> None:
    x, weights, bias, residual = tensors(shape, layout, dtype, requires_grad=False)
    most = tolerance(str(dtype).removeprefix("torch."), shape[2])
    y = multiply(x, weights, layout=layout, backend="ksgen")
    assert (y.dtype, y.is_contiguous()) == (dtype, True)
    assert error(y, truth(x, weights, layout)) <= 2 * most
    y = multiply(x, weights, bias, residual, layout=layout, activation="silu", backend="ksgen")
    assert error(y, truth(x, weights, layout, bias, "silu", residual)) <= 4 * most  # without kernels, each step rounds


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operator_itself_is_differentiable(path: str, activation: str, layout: str) -> None:
    """The backward pass computes the input of the fused activation again. The transposed K is differentiable too."""

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


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_every_precision(path: str, dtype: Any, layout: str) -> None:
    x, weights, bias, _ = tensors((2, 9, 5, 3), layout, dtype)
    y_gradient = matrix(BATCH, 54, layout, dtype)
    found = torch.autograd.grad(
        multiply(x, weights, bias, layout=layout, backend="ksgen"), (x, weights, bias), y_gradient
    )
    x, weights, bias = (each.detach().double().requires_grad_() for each in (x, weights, bias))
    expected = torch.autograd.grad(multiply(x, weights, bias, layout=layout), (x, weights, bias), y_gradient.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert error(one, other) <= 4 * tolerance(str(dtype).removeprefix("torch."), BATCH)


def test_gradients_may_be_expanded_and_inputs_strided(path: str) -> None:
    x, weights, bias, _ = tensors((2, 9, 5, 3), "bsf")
    plain = torch.autograd.grad(multiply(x, weights, bias, backend="ksgen").sum(), (x, weights, bias))
    apart = x.detach().t().contiguous().t().requires_grad_()
    strided = torch.autograd.grad(multiply(apart, weights, bias, backend="ksgen").sum(), (apart, weights, bias))
    for one, other in zip(plain, strided, strict=True):
        torch.testing.assert_close(one, other)


def test_functionalize(path: str) -> None:
    """PyTorch itself applies this transform to no autograd function."""
    x, weights, bias, residual = tensors((2, 3, 2, 2), "bsf", torch.float32, requires_grad=False)

    def product(x: Any) -> Any:
        return multiply(x, weights, bias, residual, activation="gelu", backend="ksgen")

    torch.testing.assert_close(functionalize(product)(x), product(x))
    torch.testing.assert_close(vmap(functionalize(product))(torch.stack([x, -x]))[1], product(-x))


def test_what_no_gradient_reads_is_not_kept(path: str) -> None:
    """A later write to it is no error, as in `nn.Linear`."""
    given = tensors((2, 9, 5, 3), "bsf")[:3]
    for learned, written in (((0,), 0), ((1,), 1), ((0, 1, 2), 2)):
        leaves = [each.detach().clone().requires_grad_(number in learned) for number, each in enumerate(given)]
        y = multiply(*leaves, backend="ksgen")
        with torch.no_grad():
            leaves[written].zero_()
        found = torch.autograd.grad(y.sum(), [leaves[number] for number in learned])
        wanted = torch.autograd.grad(multiply(*given, backend="ksgen").sum(), [given[number] for number in learned])
        torch.testing.assert_close(found, wanted)


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
        return lambda *given, **options: (
            asked.append((function.__name__, options["precision"])) or function(*given, **options)
        )

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
    monkeypatch.setattr(
        Launcher, "__call__", lambda *given, **options: seen.append(options["activation"]) or call(*given, **options)
    )
    x, weights, bias, residual = tensors((2, 9, 5, 3), "bsf", torch.float32)
    with torch.set_grad_enabled(recorded):
        y = multiply(x, weights, bias, residual, activation="gelu", backend="ksgen")
    assert seen == activations
    assert error(y.detach(), truth(x, weights, "bsf", bias, "gelu", residual)) < 1e-6


# ---- PyTorch's checks and transforms


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_opcheck_of_the_product(path: str, activation: str) -> None:
    x, weights, bias, residual = tensors((2, 9, 5, 3), "bsf", torch.float32)
    torch.library.opcheck(
        torch.ops.ksgen.multiply.default, (x, weights, bias, residual, "bsf", None, activation, False, "ksgen")
    )
    y = matrix(BATCH, 54, "bsl", torch.float32, requires_grad=True)
    torch.library.opcheck(
        torch.ops.ksgen.multiply.default, (y, weights, None, None, "bsl", None, "none", True, "ksgen")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_the_weights_gradient(path: str, layout: str) -> None:
    x, _, _, y = tensors((2, 9, 5, 3), layout, torch.float32)
    torch.library.opcheck(torch.ops.ksgen.weight_gradient.default, (x, y, 2, 3, layout, None, "ksgen"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "dims",
    [(0, None, None, None), (0, 0, None, 0), (None, 0, 0, None), (0, None, 0, 0), (None, None, None, 0)],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap(path: str, layout: str, dims: tuple[int | None, ...]) -> None:
    """What it maps over is the first dimension of what is mapped."""
    several = [
        torch.stack(each)
        for each in zip(*(tensors((2, 3, 5, 2), layout, requires_grad=False) for _ in range(3)), strict=True)
    ]
    given = [each if dim == 0 else each[0] for each, dim in zip(several, dims, strict=True)]

    def product(*each: Any) -> Any:
        return multiply(*each, layout=layout, activation="gelu", backend="ksgen")

    found = vmap(product, in_dims=dims)(*given)
    expected = [
        product(*(each[n] if dim == 0 else each for each, dim in zip(given, dims, strict=True))) for n in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_each_sample(path: str, layout: str) -> None:
    x, weights, _, _ = tensors((2, 3, 5, 2), layout, requires_grad=False)

    def loss(weights: Any, row: Any) -> Any:
        return (
            multiply(row[None] if layout == "bsf" else row[:, None], weights, layout=layout, backend="ksgen")
            .square()
            .sum()
        )

    found = vmap(grad(loss), in_dims=(None, 0 if layout == "bsf" else 1))(weights, x)
    rows = x if layout == "bsf" else x.t()
    torch.testing.assert_close(found, torch.stack([grad(loss)(weights, row) for row in rows]))


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not hasattr(torch.library.CustomOpDef, "register_vmap"), reason="PyTorch 2.5 and later have rules for operators"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_of_the_operators_themselves(layout: str) -> None:
    several = [
        torch.stack(each)
        for each in zip(*(tensors((2, 3, 5, 2), layout, requires_grad=False) for _ in range(3)), strict=True)
    ]
    x, weights, _, y = several

    def product(x: Any, weights: Any) -> Any:
        return torch.ops.ksgen.multiply(x, weights, None, None, layout, None, "none", False, "auto")

    def gradient(x: Any, y: Any) -> Any:
        return torch.ops.ksgen.weight_gradient(x, y, 2, 2, layout, None, "auto")

    for function, given in ((product, (x, weights)), (gradient, (x, y))):
        expected = torch.stack([function(*each) for each in zip(*given, strict=True)])
        torch.testing.assert_close(vmap(function)(*given), expected)


def test_several_gradients_at_once() -> None:
    layer, x = KSLinear("4,8,8,1"), torch.randn(300, 32, requires_grad=True)
    given, seeds = [x, *layer.parameters()], torch.randn(3, 300, 32)
    for _ in range(3):  # steps are prepared at the second call
        found = torch.autograd.grad(layer(x), given, seeds, is_grads_batched=True)
        wanted = zip(*(torch.autograd.grad(layer(x), given, seed) for seed in seeds), strict=True)
        for each, own in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, torch.stack(own), rtol=1e-4, atol=1e-4)


def test_a_hessian(path: str) -> None:
    x, weights, _, _ = tensors((2, 3, 5, 2), "bsf", requires_grad=False)
    found = jacrev(jacrev(lambda x: multiply(x, weights, backend="ksgen").square().sum()))(x[:1])
    kernel = jacrev(lambda x: multiply(x, weights))(x[:1]).view(12, 20)
    torch.testing.assert_close(found.view(20, 20), 2 * kernel.t() @ kernel)


@pytest.mark.parametrize("backend", ["ksgen", "strided"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_mode(path: str, layout: str, backend: str) -> None:
    """Alone, and over the backward pass, for every argument."""

    def product(*given: Any) -> Any:
        return multiply(*given, layout=layout, activation="gelu", backend=backend)

    given = tensors((2, 3, 2, 2), layout)
    assert gradcheck(product, given, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert gradgradcheck(product, given, check_fwd_over_rev=True, fast_mode=True)


def test_forward_mode_twice_and_over_itself(path: str) -> None:
    x, weights, _, _ = tensors((2, 3, 2, 2), "bsf", requires_grad=False)

    def loss(weights: Any) -> Any:
        return multiply(x, weights, activation="silu", backend="ksgen").square().sum()

    expected = jacrev(jacrev(loss))(weights)
    torch.testing.assert_close(jacfwd(jacrev(loss))(weights), expected)
    torch.testing.assert_close(jacfwd(jacfwd(loss))(weights), expected)
    with forward_ad.dual_level():
        y = multiply(forward_ad.make_dual(x, x), weights, backend="ksgen")
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, multiply(x, weights))
    with forward_ad.dual_level():
        y = multiply(
            x, weights, forward_ad.make_dual(torch.zeros(12).double(), torch.arange(12.0).double()), backend="ksgen"
        )
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, torch.arange(12.0).double().expand(BATCH, 12))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transforms_in_a_compiled_graph(layout: str) -> None:
    """Forward mode alone, over the backward pass, and over a function that is linear in what changes; and over
    stacked weights.
    """
    torch.manual_seed(0)
    given = tensors((2, 3, 2, 2), layout, torch.float32, requires_grad=False)

    def product(*given: Any) -> Any:
        return multiply(*given, layout=layout, activation="gelu")

    def weights_gradient(weights: Any) -> Any:
        return grad(lambda weights: product(given[0], weights, *given[2:]).square().sum())(weights)

    def transposed(residual: Any) -> Any:
        _, pull = vjp(product, *given)
        return jvp(pull, (residual,), (residual,))[1][:2]

    stacked = torch.stack([given[1], 2 * given[1]])
    calls = [
        lambda: jvp(product, given, given),
        lambda: jvp(weights_gradient, given[1:2], given[1:2]),
        lambda: transposed(given[3]),
        lambda: vmap(lambda weights: product(given[0], weights, *given[2:]))(stacked),
    ]
    for call in calls:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(), call())


def test_forward_mode_where_operators_are_seen(path: str) -> None:
    x, weights, _, _ = tensors((2, 3, 2, 2), "bsf", requires_grad=False)
    with FlopCounterMode(display=False) as counted:
        tangent = jvp(multiply, (x, weights), (x, weights))[1]
    torch.testing.assert_close(tangent, 2 * multiply(x, weights))
    assert counted.get_total_flops() > 0
    with pytest.raises(LaunchError, match="in an exported program have no forward-mode derivatives"):
        jvp(lambda x: torch.ops.ksgen.multiply(x, weights, None, None, "bsf", None, "none", False, "auto"), (x,), (x,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_are_counted(path: str, layout: str) -> None:
    """Two for each weight and row: forward, and for each of the two gradients."""
    x, weights, bias, _ = tensors((2, 9, 5, 3), layout)
    with FlopCounterMode(display=False) as counter:
        multiply(x, weights, bias, layout=layout, backend="ksgen").sum().backward()
    assert counter.get_total_flops() == 3 * 2 * BATCH * weights.numel()


def test_autocast_casts_a_weight_once_in_a_region(path: str) -> None:
    x, weights, _, _ = tensors((2, 9, 5, 3), "bsf", torch.float32)
    weights = torch.nn.Parameter(weights.detach())

    def casts() -> set[Any]:
        """The nodes by which gradients reach the weights."""
        found, nodes = set(), [multiply(x, weights, backend="ksgen").grad_fn]
        while nodes:
            node = nodes.pop()
            following = [each for each, _ in node.next_functions if each is not None]
            found |= {node for each in following if getattr(each, "variable", None) is weights}
            nodes += following
        return found

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert len(casts() | casts()) == 1
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: each, lambda each: pytest.fail("asked in the forward pass")
        ):
            assert len(casts() | casts()) == 2
        weights.grad = None
        y = multiply(x, weights, backend="ksgen") + multiply(x, weights, backend="ksgen")
        y.float().sum().backward()
        twice = weights.grad
        weights.grad = None
        multiply(x, weights, backend="ksgen").float().sum().backward()
        torch.testing.assert_close(twice, 2 * weights.grad)
    with torch.no_grad():
        weights.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not multiply(x, weights, backend="ksgen").any()  # another region, another cast
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        first = multiply(x, weights, backend="ksgen")
        with torch.no_grad():
            weights.add_(1)
        assert not first.equal(multiply(x, weights, backend="ksgen"))


def test_a_trace_multiplies_what_it_is_given(path: str) -> None:
    """A kernel's launch is nothing that `torch.jit.trace` can record: its result would be a constant."""
    x, weights, bias, _ = tensors((2, 9, 5, 3), "bsf", torch.float32, requires_grad=False)
    traced = torch.jit.trace(lambda x: multiply(x, weights, bias, activation="relu", backend="ksgen"), (x,))
    torch.testing.assert_close(traced(2 * x), multiply(2 * x, weights, bias, activation="relu"))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways are chosen as for a GPU's tensors: by rule, and kernels come first."""
    monkeypatch.setattr(choice, "_unbuilt", {})
    choice._warn_once.cache_clear()
    monkeypatch.setattr(choice, "has_kernels", lambda device: True)
    monkeypatch.setattr(choice, "is_measured_here", lambda kernel, device: False)
    monkeypatch.setattr(ops, "SMALL_BATCH", 0)
    monkeypatch.setattr(choice, "_choose", lambda *given: choice.BackendChoice("ksgen", "as this test says"))


def test_auto_goes_on_with_pytorch_and_warns_once_where_nothing_builds(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []

    def refuse(own: Launcher, x: Any, *_: Any, **__: Any) -> Any:
        called.append(own)
        raise ToolchainError(f"{own.pattern}: no cache holds it, and no CUDA compiler found")

    monkeypatch.setattr(Launcher, "__call__", refuse)

    def check(*shape: int) -> None:
        x, weights, bias, residual = tensors(shape, "bsf", requires_grad=False)
        y = multiply(x, weights, bias, residual, activation="relu")
        assert error(y, truth(x, weights, "bsf", bias, "relu", residual)) < 1e-12

    with pytest.warns(
        UserWarning, match="PyTorch multiplies, because no kernel is available: .* no CUDA compiler found"
    ):
        check(2, 9, 5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(2, 9, 5, 3)
        check(1, 4, 3, 5)
    assert len(called) == 2  # each pattern once
    found = choice.choose(
        KernelSpec(Pattern(1, 4, 3, 5), "float64", "bsf", Epilogue(True, "relu", True)), 7, torch.device("cpu")
    )
    assert found == choice.BackendChoice(
        "strided", "no kernel can be built: 1,4,3,5: no cache holds it, and no CUDA compiler found"
    )
    x, weights, _, _ = tensors((1, 4, 3, 5), "bsf")
    with pytest.raises(ToolchainError, match="no CUDA compiler found"):
        multiply(x, weights, backend="ksgen")


def test_auto_hides_no_other_error(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise DeviceError("the GPU context is lost")

    monkeypatch.setattr(Launcher, "__call__", lost)
    x, weights, _, _ = tensors((2, 9, 5, 3), "bsf")
    with pytest.raises(DeviceError, match="lost"):
        multiply(x, weights)


@pytest.mark.parametrize(("taken", "launches"), [("ksgen", 3), ("strided", 0)])
def test_auto_takes_the_faster_method(taken: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and both gradients."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(choice, "faster", lambda job, ways: taken)
    shape = (2, 9, 5, 3)
    called: list[Any] = []
    for name in ("__call__", "gradient"):
        own = getattr(Launcher, name)
        monkeypatch.setattr(
            Launcher, name, lambda *given, own=own, **options: called.append(own) or own(*given, **options)
        )
    x, weights, _, _ = tensors(shape, "bsf")
    assert gradcheck(lambda *given: multiply(*given), (x, weights), fast_mode=True)
    called.clear()
    multiply(x, weights).sum().backward()
    assert len(called) == launches


# ---- several factors


@pytest.mark.parametrize(
    ("layout", "out_layout", "batch", "is_one"),
    [("bsf", None, 1, False), ("bsf", None, 300, True), ("bsl", None, 300, False), ("bsl", "bsf", 300, True)],
)
def test_a_layer_is_timed_and_explained_as_what_its_launcher_does(
    layout: str, out_layout: str | None, batch: int, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_native(monkeypatch)
    monkeypatch.setattr(choice, "_measured", {})
    launched: set[bool] = set()
    prepared = ChainLauncher._prepared

    def watched(own: ChainLauncher, *given: Any) -> Any:
        found = prepared(own, *given)
        launched.add(isinstance(found, Call))
        return found

    monkeypatch.setattr(ChainLauncher, "_prepared", watched)
    layer = KSLinear([(6, 64, 64, 1), (1, 768, 192, 2)], layout=layout, out_layout=out_layout)
    with torch.no_grad():
        layer(matrix(batch, layer.in_features, layout, torch.float32))
    (told,) = [line for line in layer.explain(batch).splitlines() if line.startswith("all factors: ")]
    assert (launched, "one launch " in told.replace("one launch per", ""), "one launch per factor " in told) == (
        {is_one},
        is_one,
        not is_one,
    )


# ---- exchanged features

EXCHANGED = Pattern(2, 3, 2, 4, "k.j1:2.i.j2", "l.j.i")
ORDERS = (EXCHANGED.store, EXCHANGED.load)


def exchanging(layout: Any, backend: str = "ksgen", activation: str = "gelu_tanh") -> Any:
    exchange = products.exchange_of(EXCHANGED)
    return lambda x, weights, bias, residual: ops.multiply_factor(
        x, weights, bias, activation, residual, layout, exchange, precision=None, backend=backend
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_of_exchanged_features(path: str, layout: Any) -> None:
    """Forward mode, first and second derivatives, by kernels and by products on views."""
    given = tensors(EXCHANGED.shape, layout)

    def by_pytorch(*given: Any) -> Any:
        return ops.multiply_by_pytorch(*given, layout, "gelu_tanh", products.exchange_of(EXCHANGED))

    known = by_pytorch(*given)
    for backend in ("ksgen", "strided"):
        product = exchanging(layout, backend)
        torch.testing.assert_close(product(*given), known)
        assert gradcheck(product, given, fast_mode=True)
        assert gradgradcheck(product, given, fast_mode=True)
        own = tuple(each.detach() for each in given)
        tangents = tuple(torch.randn_like(each) for each in own)
        for one, other in zip(jvp(product, own, tangents), jvp(by_pytorch, own, tangents), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operators_exchange_features(path: str, layout: Any) -> None:
    x, weights, bias, residual = tensors(EXCHANGED.shape, layout)
    options = (layout, None, "none", False, "auto", *ORDERS)
    torch.library.opcheck(torch.ops.ksgen.multiply.default, (x, weights, bias, residual, *options))
    given = (x.detach(), residual.detach(), EXCHANGED.a, EXCHANGED.d, layout, None, "auto", *ORDERS)
    torch.library.opcheck(torch.ops.ksgen.weight_gradient.default, given)
    y = torch.ops.ksgen.multiply(x, weights, bias, residual, *options)
    torch.testing.assert_close(y, exchanging(layout, activation="none")(x, weights, bias, residual))
    (found,) = torch.autograd.grad(y, weights, residual.detach())
    torch.testing.assert_close(found, torch.ops.ksgen.weight_gradient(*given))
    # a transform in a compiled program takes PyTorch's operators
    product = exchanging(layout, activation="none")
    transformed = grad(lambda own: (product(x.detach(), own, None, None) * residual.detach()).sum())
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(weights.detach()), found)
    torch.testing.assert_close(ops._gradient_of_pytorch(*given), found)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "dims", [(0, 0, None, 0), (None, 0, 0, None), (0, None, None, None), (None, None, 0, None)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_of_exchanged_features(path: str, layout: Any, dims: tuple[int | None, ...]) -> None:
    """Values, and the gradients of each sample. What it maps over is the first dimension of what is mapped."""
    sets = zip(*(tensors(EXCHANGED.shape, layout, requires_grad=False) for _ in range(3)), strict=True)
    given = [torch.stack(each) if dim == 0 else each[0] for each, dim in zip(sets, dims, strict=True)]
    product = exchanging(layout, "strided" if path == "PyTorch" else "ksgen")

    def gradients(*each: Any) -> Any:
        return grad(lambda *own: product(*own).square().sum(), argnums=(0, 1))(*each)

    for function in (product, lambda *each: gradients(*each)[0], lambda *each: gradients(*each)[1]):
        own = [
            function(*(each[n] if dim == 0 else each for each, dim in zip(given, dims, strict=True))) for n in range(3)
        ]
        torch.testing.assert_close(vmap(function, in_dims=dims)(*given), torch.stack(own))


# ---- small steps of training


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that small steps of this test take in turn, without a look at the clock. All are tried at each step."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(ops, "SMALL_BATCH", BATCH)
    order = ["ksgen", "bmm"]

    def next_of(job: Any, ways: Any) -> str:
        if set(ways) != {"ksgen", "bmm"}:
            return "ksgen"
        for way in ways.values():
            way()
        return order.pop(0)

    monkeypatch.setattr(choice, "faster", next_of)
    return order


def by_kernels(y: Any) -> bool:
    """Whether a function of ours is in its graph."""
    met = [y.grad_fn]
    while met:
        node = met.pop()
        if "Plain" in type(node).__name__:
            return True
        met += [each for each, _ in node.next_functions if each is not None]
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "activation", "wants_x"), [(torch.float64, "gelu", True), (torch.float32, "none", False)]
)
def test_both_variants_of_a_small_step_are_right(
    dtype: Any, activation: str, wants_x: bool, layout: str, taken: list[str]
) -> None:
    x, weights, bias, residual = tensors((2, 9, 5, 3), layout, dtype)
    x.requires_grad_(wants_x)
    wanted = [each for each in (x, weights, bias, residual) if each.requires_grad]
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in (x, weights, bias, residual)]
    before = products.by_whole_matrix(exact[0], products.to_dense(exact[1]), layout)
    known = finish(before, exact[2], activation, exact[3], layout)
    upstream = torch.randn(known.shape, dtype=dtype)
    known_gradients = torch.autograd.grad(known, [each for each in exact if each.requires_grad], upstream.double())
    for way in ("ksgen", "bmm"):
        y = multiply(x, weights, bias, residual, layout=layout, activation=activation)
        assert by_kernels(y) == (way == "ksgen")
        assert y.is_contiguous()
        for got, want in zip((y, *torch.autograd.grad(y, wanted, upstream)), (known, *known_gradients), strict=True):
            assert error(got.detach(), want.detach()) < tolerance(
                "float64" if dtype == torch.float64 else "float32", 5 * BATCH
            )
    assert not taken
    assert all(each.grad is None for each in (x, weights, bias, residual))  # what is timed leaves nothing behind


def test_what_is_no_small_step_is_not_timed_as_one(taken: list[str]) -> None:
    x, weights, _, _ = tensors((2, 9, 5, 3), "bsf")
    with torch.no_grad():
        multiply(x, weights)
    multiply(x, weights.detach())  # frozen: nothing of ours is recorded for it
    multiply(x.repeat(2, 1), weights)
    multiply(x, weights, backend="ksgen")
    checkpoint(multiply, x, weights, use_reentrant=False).sum().backward()  # whose second pass must be as the first
    assert taken == ["ksgen", "bmm"]
    multiply(x, weights)
    assert taken == ["bmm"]


def test_a_checkpoint_repeats_its_first_pass_on_a_device_that_was_opened_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then is it known that the device has no kernels."""
    is_open = list[bool]()
    monkeypatch.setattr(choice, "is_ready", lambda device: bool(is_open))
    monkeypatch.setattr(choice, "has_kernels", lambda device: False)
    given = tensors((2, 9, 5, 3), "bsf")
    y = checkpoint(multiply, *given, use_reentrant=False)
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad(multiply(*given, backend="strided"), given, upstream)
    is_open.append(True)
    torch.testing.assert_close(torch.autograd.grad(y, given, upstream), expected)


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
