"""KSLinear: in the place of nn.Linear, built, called, moved, saved, compiled and exported; and what it refuses."""

import copy
import inspect
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import func, nn  # noqa: E402  (after the skip)
from torch._subclasses import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ksgen.errors import DeviceError, KsgenError, LaunchError, PatternError, SpecError  # noqa: E402
from ksgen.install import install_line  # noqa: E402
from ksgen.launch.plan import Plan  # noqa: E402
from ksgen.pattern import Chain, Pattern, monarch  # noqa: E402
from ksgen.spec import LAYOUTS  # noqa: E402
from ksgen.torch import KSLinear, factorize, multiply  # noqa: E402
from ksgen.torch.operators import choice  # noqa: E402
from ksgen.torch.operators.backends import NAMES, to_dense  # noqa: E402
from tests.support.emulated_tiles import needs_emulation  # noqa: E402
from tests.support.fake_gpu import FakeGpu  # noqa: E402
from tests.support.libraries import needs_inductor  # noqa: E402
from tests.support.native import chosen_native, saying_it_has_tiles  # noqa: E402
from tests.support.torch_cases import use_kernels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # block-sparse rows are in beta, says PyTorch
CHAIN = [(2, 8, 4, 3), (4, 6, 12, 1)]  # 24 -> 48 -> 24
ROOT = Path(__file__).parents[3]


def make(**options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(CHAIN, **options)


def x_of(layout: str = "bsf", *others: int) -> Any:
    torch.manual_seed(1)
    others = others or (5, 3)
    return torch.randn((*others, 24) if layout == "bsf" else (24, *others))


def dense_of(layer: KSLinear) -> Any:
    """The product of the factors, as one matrix."""
    matrix = torch.eye(layer.in_features, dtype=layer.weights[0].dtype)
    for weights in layer.weights:
        matrix = to_dense(weights) @ matrix
    return matrix


# ---- in the place of nn.Linear


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("others", [(), (5,), (5, 3), (2, 1, 4)], ids=str)
def test_as_a_linear_layer(others: tuple[int, ...], layout: str) -> None:
    layer = make(layout=layout)
    linear = nn.Linear(24, 24)
    linear.weight.data, linear.bias.data = dense_of(layer).data, layer.bias.data
    torch.manual_seed(1)
    x = torch.randn(*others, 24)
    given = x if layout == "bsf" else x.movedim(-1, 0)
    y = layer(given)
    torch.testing.assert_close(y if layout == "bsf" else y.movedim(0, -1), linear(x))


def test_patterns_are_given_in_any_form() -> None:
    patterns = [Pattern(*shape) for shape in CHAIN]
    for given in (CHAIN, patterns, tuple(patterns), [patterns[0], list(CHAIN[1])], Chain(tuple(patterns))):
        assert KSLinear(given).chain == Chain(tuple(patterns))
    assert KSLinear(patterns[0]).out_features == 48
    assert (KSLinear(monarch(64, 32, 8, 4)).in_features, KSLinear(monarch(64, 32, 8, 4)).out_features) == (64, 32)


def test_weights_begin_as_in_the_paper_and_the_bias_as_in_pytorch() -> None:
    layer = KSLinear([(6, 64, 64, 1), (1, 768, 192, 2)])
    for weights, c in zip(layer.weights, (64, 192), strict=True):
        most = c**-0.5
        assert 0.99 * most < weights.abs().max() <= most
        assert abs(float(weights.detach().mean())) < 0.01 * most
        assert float(weights.detach().std()) == pytest.approx(most / 3**0.5, rel=0.01)
    most = 384**-0.5
    assert 0.95 * most < layer.bias.abs().max() <= most


def test_a_layer_from_weights() -> None:
    layer = make(dtype=torch.float64)
    again = KSLinear.from_weights(layer.weights, layer.bias, activation="relu")
    x = x_of().double()
    torch.testing.assert_close(again(x), layer(x).relu())
    assert again.weights[0] is not layer.weights[0]
    assert KSLinear.from_weights([torch.randn(1, 4, 3, 2)]).bias is None
    with pytest.raises(PatternError, match=r"weights=\[\]; accepted: one or more tensors of shape \(a, b, c, d\)"):
        KSLinear.from_weights([])
    with pytest.raises(LaunchError, match=r"got bias of shape \(5,\); \(24,\) is needed"):
        KSLinear.from_weights(layer.weights, torch.zeros(5))


def test_activation_and_residual() -> None:
    layer, x, residual = make(activation="silu"), x_of(), x_of("bsf", 5, 3) * 2
    plain = KSLinear.from_weights(layer.weights, layer.bias)
    expected = nn.functional.silu(plain(x)) + residual
    torch.testing.assert_close(layer(x, residual=residual), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, residual=residual), expected)


def between_by_pytorch(layer: KSLinear, x: Any, activation: Any) -> Any:
    """Multiply by the layer's factors sequentially, as dense products."""
    first, last = (to_dense(each) for each in layer.weights)
    return functional.linear(activation(functional.linear(x, first)), last, layer.bias)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["auto", "ksgen", "bmm"])
def test_an_activation_between_factors(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, in several launches, in one and prepared; and derivatives, twice."""
    use_kernels(monkeypatch)
    layer, x = make(backend=backend, between="gelu", activation="relu", dtype=torch.float64), x_of("bsf", 80).double()
    expected = between_by_pytorch(layer, x, functional.gelu).relu()
    with torch.no_grad():
        for own in (layer, copy.deepcopy(layer).eval().freeze()):
            for _ in range(3):
                torch.testing.assert_close(own(x), expected)
    layer = make(backend=backend, between="silu", dtype=torch.float64)
    given = (x[:3, :].detach().requires_grad_(), *layer.weights)
    found = []
    for y in (layer(given[0]), between_by_pytorch(layer, given[0], functional.silu)):
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["ksgen", "bmm"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_y_in_another_layout(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the transpose of the layer's y in one layout, in all combinations of launches and gradients."""
    use_kernels(monkeypatch)
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    for chain in ([(2, 9, 5, 3), (1, 4, 18, 3)], [(2, 9, 5, 3)]):
        options: dict[str, Any] = {
            "layout": layout,
            "activation": "gelu",
            "between": "relu" if len(chain) > 1 else "none",
        }
        plain = KSLinear(chain, backend="bmm", dtype=torch.float64, **options)
        transposed = KSLinear(
            chain, backend=backend, dtype=torch.float64, out_layout=other, intermediates="recompute", **options
        )
        transposed.load_state_dict(plain.state_dict())
        features = transposed.out_features
        for shape in ((70,), (5, 7)):
            x = torch.randn(*(*shape, 30) if layout == "bsf" else (30, *shape), dtype=torch.float64, requires_grad=True)
            residual = torch.randn(*(*shape, features) if other == "bsf" else (features, *shape), dtype=torch.float64)
            wanted = plain(x).movedim(*(-1, 0) if layout == "bsf" else (0, -1)) + residual
            y = transposed(x, residual)
            torch.testing.assert_close(y, wanted)
            weights = torch.randn_like(y)
            for got, expected in zip(
                torch.autograd.grad((y * weights).sum(), [x, *transposed.parameters()]),
                torch.autograd.grad((wanted * weights).sum(), [x, *plain.parameters()]),
                strict=True,
            ):
                torch.testing.assert_close(got, expected)
            with torch.no_grad():
                for _ in range(3):  # frozen too
                    torch.testing.assert_close(transposed(x, residual), wanted)
                    transposed.freeze()
    assert f"out_layout={other}" in repr(transposed)
    assert KSLinear(chain, layout=layout, out_layout=layout).out_layout is None


def test_what_is_not_done_with_y_in_another_layout_is_refused() -> None:
    layer = KSLinear([(2, 9, 5, 3)], out_layout="bsl")
    with pytest.raises(LaunchError, match="out_layout='bsl' of a quantized layer; accepted: layers without it"):
        layer.quantize("int8")
    with pytest.raises(LaunchError, match="out_layout='bsl' of a layer of a group; accepted: layers without it"):
        KSLinear.group([layer, layer])
    with pytest.raises(SpecError, match="out_layout='bfs'; did you mean"):
        KSLinear([(2, 9, 5, 3)], out_layout="bfs")


@pytest.mark.parametrize("is_frozen", [False, True])
def test_fuse_says_how_many_launches(is_frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option applies to values alone. Recorded gradients take one launch per factor."""
    use_kernels(monkeypatch)
    launched: list[str] = []
    for name in ("launch", "launches"):  # the latter of what is recorded, once, and launched again and again
        own = getattr(Plan, name)
        monkeypatch.setattr(
            Plan, name, lambda plan, *given, own=own: launched.append(plan.kernel.job) or own(plan, *given)
        )
    for fuse, batch, job in (("yes", 3, "chain"), ("no", 800, "multiply")):
        layer, x = make(fuse=fuse, backend="ksgen"), torch.randn(batch, 24)
        expected = layer(x)
        assert f"fuse={fuse}" in repr(layer)
        layer = layer.eval().freeze() if is_frozen else layer
        launched.clear()
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(layer(x), expected)
        assert set(launched) == {job}


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_frozen", [False, True])
def test_so_it_is_of_matrix_tiles(is_frozen: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Emulated; where a precision asks for them. With the bits of one launch per factor."""
    needs_emulation()
    with saying_it_has_tiles(chosen_native(monkeypatch), tmp_path / "wisdom", monkeypatch):
        launched: list[str] = []
        for name in ("launch", "launches"):
            own = getattr(Plan, name)
            monkeypatch.setattr(
                Plan, name, lambda plan, *given, own=own: launched.append(plan.kernel.job) or own(plan, *given)
            )
        x, found = torch.randn(200, 24), []
        for fuse, job in (("yes", "chain"), ("no", "multiply")):
            layer = make(fuse=fuse, backend="ksgen", precision="bf16x6")
            layer = layer.eval().freeze() if is_frozen else layer
            with torch.no_grad():
                found.append(layer(x))
            assert set(launched) == {job}
            launched.clear()
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_one_launch_that_cannot_be_had_is_an_error() -> None:
    with (
        torch.no_grad(),
        pytest.raises(
            LaunchError, match="fuse='yes' of tensors on meta, for which there are no kernels; accepted: fuse="
        ),
    ):
        make(fuse="yes", device="meta")(torch.empty(3, 24, device="meta"))


def test_with_an_activation_between_a_layer_has_no_matrix() -> None:
    layer = make(between="relu")
    assert "between=relu" in repr(layer)
    for ask in (layer.to_dense, layer.to_linear, lambda: layer.weight + 0):
        with pytest.raises(LaunchError, match="with between='relu' the layer has no matrix; accepted: between='none'"):
            ask()
    with pytest.raises(LaunchError, match="between='relu' makes it nonlinear; accepted: 'none'"):
        KSLinear.from_linear(nn.Linear(24, 24), CHAIN, between="relu")
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x_of())
    torch.testing.assert_close(y, layer(x_of()))


def test_from_a_linear_layer_and_back() -> None:
    layer = make(dtype=torch.float64)
    linear, x = layer.to_linear(), x_of().double()
    assert type(linear) is nn.Linear
    torch.testing.assert_close(linear(x), layer(x))
    torch.testing.assert_close(layer.to_dense(), dense_of(layer))
    again = KSLinear.from_linear(linear, CHAIN, layout="bsl")
    torch.testing.assert_close(again.to_dense(), layer.to_dense())
    assert again.bias.equal(layer.bias)
    assert again.bias is not linear.bias
    assert make(bias=False, layout="bsl").eval().to_linear().bias is None
    assert not make().eval().to_linear().training
    with pytest.raises(LaunchError, match=r"an nn\.Linear has no activation='gelu'; apply it separately"):
        make(activation="gelu").to_linear()
    with pytest.raises(LaunchError, match=r"KSLinear\.from_linear: got Conv1d; accepted: an nn\.Linear"):
        KSLinear.from_linear(nn.Conv1d(3, 3, 1), CHAIN)


def test_from_a_layer_with_an_activation() -> None:
    layer, x = make(activation="relu"), x_of()
    with pytest.raises(LaunchError, match="the layer has activation='relu', which the new one would lack; accepted: a"):
        KSLinear.from_linear(layer, CHAIN)
    torch.testing.assert_close(KSLinear.from_linear(layer, CHAIN, activation="relu")(x), layer(x))


def test_from_a_weight_that_a_hook_computes_or_a_call_creates() -> None:
    linear = prune.l1_unstructured(nn.Linear(24, 24), "weight", 0.5)
    with pytest.raises(LaunchError, match=r"from_linear: weight is computed by a hook .*; accepted: a parameter, as"):
        KSLinear.from_linear(linear, CHAIN)
    with pytest.raises(LaunchError, match=r"from_linear: weight has no values before the first call of its lazy layer"):
        KSLinear.from_linear(nn.LazyLinear(24), CHAIN)
    prune.remove(linear, "weight")
    assert KSLinear.from_linear(linear, "1,24,24,1").to_dense().equal(linear.weight)


def test_autocast_does_not_round_the_matrix() -> None:
    layer = make()
    wanted = layer.to_dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for found in (layer.to_dense(), layer.weight + 0, layer.to_linear().weight):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_it_is_a_linear_layer_for_those_who_ask() -> None:
    layer = make()
    assert isinstance(layer, nn.Linear)
    assert [name for name, _ in layer.named_parameters()] == ["bias", "weights.0", "weights.1"]


def test_options_are_given_by_name() -> None:
    message = r"^KSLinear: 'bsl' by position; accepted: options by name, such as KSLinear\(patterns, layout='bsl'\)$"
    with pytest.raises(SpecError, match=message):
        KSLinear(CHAIN, True, "bsl", "float32")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"^bias=\(4, 6, 12, 1\); accepted: True or False"):  # patterns that are no list
        KSLinear(*CHAIN)  # type: ignore[arg-type]
    kinds = inspect.signature(KSLinear).parameters
    assert [name for name, each in kinds.items() if each.kind == each.POSITIONAL_OR_KEYWORD] == ["patterns", "bias"]
    advanced = (inspect.getdoc(KSLinear) or "").partition("Advanced:")[2].partition("Raises:")[0]
    for name in ("between", "layout", "out_layout", "backend", "fuse", "intermediates"):
        assert f"\n    {name}: " in advanced


def test_types_say_what_is_returned() -> None:
    layer = make()
    for method, found in (
        (KSLinear.group, KSLinear.group([layer, layer])),
        (KSLinear.quantize, layer.quantize("int8")),
    ):
        assert get_type_hints(method)["return"] is type(found)


# ---- what else PyTorch offers for layers


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_compiles_no_layer_and_the_message_says_what_does() -> None:
    layer = make()
    for module in (layer, nn.Sequential(layer), KSLinear.group([layer, layer]), layer.quantize("int8")):
        with pytest.raises(
            LaunchError,
            match=r"torch\.jit\.script cannot compile it; accepted: torch\.jit\.trace, torch\.export or torch\.c",
        ):
            torch.jit.script(module)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch 2.9 or later has Muon")
def test_muon_trains_matrices_next_to_an_optimizer_of_the_factors() -> None:
    model = nn.Sequential(make(), nn.Linear(24, 24))
    with pytest.raises(
        ValueError,
        match=r"Muon only supports 2D parameters whereas we found a parameter with size: torch\.Size\(\[2, 8, 4, 3\]",
    ):
        torch.optim.Muon([each for each in model.parameters() if each.ndim > 1])
    before = [each.detach().clone() for each in model.parameters()]
    optimizers = [
        torch.optim.Muon([each for each in model.parameters() if each.ndim == 2]),
        torch.optim.AdamW([each for each in model.parameters() if each.ndim != 2]),
    ]
    model(x_of()).square().sum().backward()
    for each in optimizers:
        each.step()
    assert not any(each.equal(old) for each, old in zip(model.parameters(), before, strict=True))


# ---- sequences of unequal lengths


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_jagged_tensors(compiler: str | None) -> None:
    torch.manual_seed(1)
    layer, rows = make(activation="gelu"), [torch.randn(count, 24) for count in (3, 1, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    torch._dynamo.reset()
    call = torch.compile(layer, backend=compiler) if compiler else layer
    y = call(x, x)
    for found, each in zip(y.unbind(), rows, strict=True):
        torch.testing.assert_close(found, layer(each, each))
    assert (y + x).shape == x.shape
    y.values().sum().backward()
    assert x.grad.values().any()
    assert layer.weights[0].grad.any()


class Doubled(KSLinear):
    def forward(self, *given: Any, **options: Any) -> Any:
        return 2 * super().forward(*given, **options)


def test_hooks_and_the_forward_of_a_subclass_run_once() -> None:
    torch.manual_seed(0)
    layer, x = Doubled(CHAIN), x_of()
    usual = make()
    torch.testing.assert_close(layer(x, after="relu"), 2 * usual(x).relu())
    layer.register_forward_pre_hook(lambda _, given: (3 * given[0],))
    layer.register_forward_hook(lambda _, given, y: 5 * y)
    jagged = torch.nested.nested_tensor([x[0], x[1][:2]], layout=torch.jagged)
    torch.testing.assert_close(layer(jagged).values(), 10 * usual(3 * jagged.values()))


def test_jagged_tensors_that_do_not_fit() -> None:
    x = torch.nested.nested_tensor([torch.randn(3, 24), torch.randn(5, 24)], layout=torch.jagged)
    with pytest.raises(LaunchError, match=r"x is a jagged tensor, whose features come last; accepted: layout='bsf'"):
        make(layout="bsl")(x)
    for residual in (
        torch.randn(8, 24),
        torch.nested.nested_tensor([torch.randn(4, 24), torch.randn(4, 24)], layout=torch.jagged),
    ):
        with pytest.raises(LaunchError, match="x is a jagged tensor; accepted: a residual with the same offsets"):
            make()(x, residual)
    with pytest.raises(LaunchError, match=r"got x of shape \(8, 23\)"):
        make()(torch.nested.nested_tensor([torch.randn(3, 23), torch.randn(5, 23)], layout=torch.jagged))


def test_jagged_tensors_of_ragged_features() -> None:
    x = torch.nested.nested_tensor([torch.randn(10, 24), torch.randn(14, 24)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(
        LaunchError, match=r"x is jagged in its last dimension, \(2, 24, j\d+\); accepted: features in that dimension"
    ):
        make()(x)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        "layer",
        "frozen",
        "group",
        "frozen group",
        "quantized",
        "residual",
        "residual of a jagged tensor",
        "multiply",
        "factorize",
    ],
)
def test_strided_nested_tensors_are_refused(kind: str, grad: bool) -> None:
    x, layer = torch.nested.nested_tensor([torch.randn(3, 24), torch.randn(5, 24)]), make().eval()
    calls = {
        "layer": layer,
        "frozen": make().eval().freeze(),
        "group": KSLinear.group([layer, layer]),
        "frozen group": KSLinear.group([layer, layer]).freeze(),
        "quantized": layer.quantize("int8"),
        "residual": lambda x: layer(torch.randn(8, 24), x),
        "residual of a jagged tensor": lambda x: layer(torch.nested.nested_tensor(x.unbind(), layout=torch.jagged), x),
        "multiply": lambda x: multiply(x, layer.weights[0]),
        "factorize": lambda x: factorize(x, CHAIN),
    }
    message = (
        r"(x|residual|weight) is a nested torch.strided tensor; accepted: a dense one, or "
        r"torch.nested.nested_tensor\((x|r|w).*jagged"
    )
    if "jagged" in kind:
        message = "x is a jagged tensor; accepted: a residual with the same offsets"
    with torch.set_grad_enabled(grad):
        for _ in range(2):  # the second time, frozen layers prepare their calls
            with pytest.raises(LaunchError, match=message):
                calls[kind](x)


# ---- traces, and transforms of empty batches


@pytest.mark.exhaustive
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "kind", ["layer", "gelu", "between", "bsl", "ksgen", "recompute", "frozen", "group", "frozen group", "quantized"]
)
def test_a_trace_is_the_same_with_and_without_gradients(kind: str, grad: bool) -> None:
    """`torch.jit.trace` traces twice, the second time without gradients, and compares all that was recorded."""
    options = {
        "gelu": {"activation": "gelu"},
        "between": {"between": "relu"},
        "bsl": {"layout": "bsl"},
        "ksgen": {"backend": "ksgen"},
        "recompute": {"intermediates": "recompute"},
    }.get(kind, {})
    layer: Any = KSLinear.group([make(), make()]) if "group" in kind else make(**options)
    layer = layer.quantize("int8") if kind == "quantized" else layer.eval().freeze() if "frozen" in kind else layer
    x, longer = (x_of(options.get("layout", "bsf"), count, 2) for count in (3, 4))
    with torch.set_grad_enabled(grad):
        for _ in range(3):  # from the third time on, calls may be prepared
            layer(x)
        traced = torch.jit.trace(layer, x)
        torch.testing.assert_close(traced(longer), layer(longer))
    for weights in layer.parameters():  # no constants of the program
        weights.data.mul_(2)
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.parametrize("options", [{}, {"layout": "bsl"}, {"backend": "einsum"}, {"activation": "gelu"}], ids=str)
def test_transforms_of_empty_batches(options: dict[str, Any]) -> None:
    layer, axis = make(**options), 1 if "layout" in options else 0
    x = x_of(options.get("layout", "bsf"), 3).narrow(axis, 0, 0)
    state = dict(layer.named_parameters())

    def of_weights(state: Any, x: Any) -> Any:
        return func.functional_call(layer, state, (x,))

    assert func.jacrev(layer)(x).shape == func.jacfwd(layer)(x).shape == (*x.shape, *x.shape)
    assert func.hessian(lambda x: layer(x).square().sum())(x).shape == (*x.shape, *x.shape)
    for name, found in func.jacrev(of_weights)(state, x).items():
        assert found.shape == (*x.shape, *state[name].shape)
    several = x_of(options.get("layout", "bsf"), 3)[None]
    assert func.vmap(layer)(several[:0]).shape == (0, *several.shape[1:])
    stacked = {name: each.detach()[None][:0] for name, each in state.items()}
    assert func.vmap(of_weights, (0, None))(stacked, several[0]).shape == (0, *several.shape[1:])
    per_sample = func.vmap(func.grad(lambda state, x: of_weights(state, x).sum()), (None, 0))(state, several[:0])
    assert {name: each.shape[1:] for name, each in per_sample.items()} == {
        name: each.shape for name, each in state.items()
    }


# ---- state, copies, moves


def test_the_state_loads_into_every_backend_and_layout() -> None:
    layer, x = make(), x_of("bsf", 5)
    assert {name: tuple(each.shape) for name, each in layer.state_dict().items()} == {
        "bias": (24,), "weights.0": CHAIN[0], "weights.1": CHAIN[1],
    }  # fmt: skip
    for backend in NAMES:
        for layout in LAYOUTS:
            other = KSLinear(CHAIN, backend=backend, layout=layout)
            other.load_state_dict(layer.state_dict())
            with torch.no_grad():
                y = other(x) if layout == "bsf" else other(x.t()).t()
            torch.testing.assert_close(y, layer(x).detach())


def test_how_a_layer_shows_itself() -> None:
    assert repr(make()).startswith("KSLinear(\n  2,8,4,3 then 4,6,12,1, in_features=24, out_features=24, bias=True\n")
    told = make(bias=False, layout="bsl", precision="tf32x3", backend="ksgen", activation="gelu").extra_repr()
    assert told.endswith("bias=False, layout=bsl, precision=tf32x3, backend=ksgen, activation=gelu")


@pytest.mark.parametrize("backend", ["auto", "bmm", "ksgen"])
def test_copies(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "ksgen":
        use_kernels(monkeypatch)
    layer, x = make(backend=backend), x_of()
    with torch.no_grad():
        y = layer(x)
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
            torch.testing.assert_close(other(x), y)
            other.weights[0].zero_()
        torch.testing.assert_close(layer(x), y)


def test_what_was_saved_before_there_were_options_is_read() -> None:
    layer, x = make(), x_of()
    y = layer(x)
    for name in ("between", "fuse", "intermediates"):
        del layer.__dict__[name]
    other = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(other(x), y)
    assert "between" not in repr(other)


def test_moves() -> None:
    layer, x = make(), x_of()
    y = layer(x)
    assert layer.double()(x.double()).dtype == torch.float64
    torch.testing.assert_close(layer.to(torch.bfloat16)(x.bfloat16()).float(), y, rtol=0.05, atol=0.05)
    empty = KSLinear(CHAIN, device="meta")
    assert empty(torch.empty(5, 24, device="meta")).shape == (5, 24)
    assert empty.to_empty(device="cpu")(x).shape == y.shape
    assert KSLinear(CHAIN, precision="bfloat16").weights[0].dtype == torch.bfloat16


class Half(nn.Module):
    def forward(self, weights: Any) -> Any:
        return weights / 2


def test_a_parametrization() -> None:
    layer, x = make(bias=False), x_of()
    y = layer(x)
    parametrize.register_parametrization(layer.weights, "0", Half())
    torch.testing.assert_close(layer(x), y / 2)
    layer(x).sum().backward()
    assert layer.weights.parametrizations["0"].original.grad is not None


@pytest.mark.parametrize("storage", ["", "bfloat16"])
def test_copies_of_a_compiled_layer_do_not_call_it(storage: str) -> None:
    layer: Any = make().quantize(storage) if storage else make()
    layer.compile(backend="eager")
    y, x = layer(x_of()), x_of()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.bias.add_(1)
        torch.testing.assert_close(other(x), y + 1)


@pytest.mark.parametrize("storage", ["", "bfloat16"])
def test_layers_whose_parameters_are_computed_are_copied(storage: str) -> None:
    layer: Any = make().quantize(storage) if storage else make()
    for module, name in ((layer, "bias"), *([] if storage else [(layer.weights, "0")])):
        parametrize.register_parametrization(module, name, Half())
    other, x = copy.deepcopy(layer), x_of()
    y = layer(x)
    torch.testing.assert_close(other(x), y)
    with torch.no_grad():
        other.parametrizations.bias.original.zero_()
    torch.testing.assert_close(other(x), y - layer.bias)


def test_checkpointing() -> None:
    layer, x = make(activation="gelu"), x_of().requires_grad_()
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    found = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), [x, *layer.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


# which PyTorch has in float32 alone
@pytest.mark.parametrize("backend", [name for name in NAMES if name not in ("bsr", "sparse")])
def test_autocast(backend: str) -> None:
    layer, x = make(activation="gelu", backend=backend), x_of()
    expected = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, residual=x_of())
        torch.testing.assert_close(y, expected + x_of().bfloat16(), rtol=0.02, atol=0.02)
        assert KSLinear(CHAIN, precision="tf32x3")(x).dtype == torch.bfloat16
        assert make(dtype=torch.float64)(x.double()).dtype == torch.float64  # as nn.Linear
    y.float().sum().backward()
    assert layer.weights[0].grad.dtype == torch.float32


# ---- compiled and exported


def check_compiled(layout: str, compiler: str) -> None:
    layer, x = make(layout=layout, activation="gelu"), x_of(layout).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    given = [x, *layer.parameters()]
    found = torch.autograd.grad(compiled(x).square().sum(), given)
    for one, other in zip(found, torch.autograd.grad(layer(x).square().sum(), given), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_without_a_break(layout: str) -> None:
    check_compiled(layout, "aot_eager")


@pytest.mark.slow
@needs_inductor
def test_compiled_by_inductor() -> None:
    check_compiled("bsf", "inductor")


@pytest.mark.exhaustive
# torch.compile makes no sparse tensors
@pytest.mark.parametrize("backend", [name for name in NAMES if name not in ("bsr", "sparse")])
def test_every_dense_backend_compiles(backend: str) -> None:
    layer, x = make(backend=backend), x_of()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", [[(2, 9, 5, 3)], [(2, 9, 5, 3), (1, 4, 18, 3)]])
def test_y_in_another_layout_compiles(chain: list[tuple[int, int, int, int]]) -> None:
    layer, x = KSLinear(chain, out_layout="bsl"), torch.randn(4, 30)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_for_any_batch(layout: str) -> None:
    layer = make(layout=layout, activation="gelu")
    batch = {0 if layout == "bsf" else 1: torch.export.Dim("batch", min=2, max=4096)}
    with torch.no_grad():
        exported = torch.export.export(layer, (x_of(layout),), dynamic_shapes={"x": batch})
        other = x_of(layout, 9, 3)
        torch.testing.assert_close(exported.module()(other), layer(other))
    products = [node for node in exported.graph.nodes if "ksgen.multiply" in str(node.target)]
    assert [node.args[6] for node in products] == ["none", "gelu"]  # without gradients, the activation is inside


def test_an_exported_program_says_which_import_it_needs(tmp_path: Path) -> None:
    with torch.no_grad():
        torch.export.save(torch.export.export(make(), (x_of(),)), tmp_path / "layer.pt2")
    program = """
import sys, torch
try: torch.export.load(sys.argv[1])
except Exception: print("refused")
import ksgen.torch
torch.export.load(sys.argv[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "layer.pt2")], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr
    assert "needs: import ksgen.torch" in done.stderr


def test_a_first_training_step_imports_nothing_that_takes_long() -> None:
    """`torch.autograd.grad` imports sympy, which takes half a second, where it is given gradients."""
    program = (
        "import sys, torch; from ksgen.torch import KSLinear; KSLinear('2,4,3,2')(torch.ones(70, 12)).sum().backward()"
        "; print('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_a_graph_of_fx_has_the_layer_as_a_leaf() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(make(), nn.ReLU())
            self.last = make()

        def forward(self, x: Any) -> Any:
            return self.last(self.inner(x), x)

    model, x = Added(), x_of()
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["inner.0", "inner.1", "last"]
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(LaunchError, match=r"is a leaf for torch\.fx; accepted: a model that holds it"):
        torch.fx.symbolic_trace(make())


def test_a_graph_of_fx_may_name_the_activation_at_each_call() -> None:
    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()

        def forward(self, x: Any, after: Any) -> Any:
            return self.layer(x, after=after)

    model, x = Activated(), x_of()
    traced = torch.fx.symbolic_trace(model)
    for after in ("none", "relu"):
        torch.testing.assert_close(traced(x, after), model(x, after))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "activation"), [("bsf", "gelu"), ("bsl", "silu")])
def test_onnx_holds_standard_operators(
    layout: str, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx", reason="pip install -e '.[interop]'")
    pytest.importorskip("onnxscript", reason="pip install -e '.[interop]'")
    runtime = pytest.importorskip("onnxruntime", reason="pip install -e '.[interop]'")
    use_kernels(monkeypatch)
    layer = make(layout=layout, activation=activation)
    batch = {0 if layout == "bsf" else 1: torch.export.Dim("batch", min=2, max=4096)}
    program = torch.onnx.export(layer, (x_of(layout),), dynamo=True, dynamic_shapes={"x": batch}, verbose=False)
    assert {node.domain for node in program.model.graph} == {""}
    program.save(tmp_path / "layer.onnx")
    session, x = runtime.InferenceSession(tmp_path / "layer.onnx"), x_of(layout, 9, 3)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), layer(x).detach(), rtol=1e-4, atol=1e-5)


# ---- who multiplies


def test_a_layer_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "KERNEL_DEVICES", {"cuda"})
    words = "bmm, as there are no kernels for tensors on cpu: permute, one batched product, permute back"
    for backend in ("auto", "ksgen"):
        assert make(backend=backend).explain() == f"2,8,4,3: {words}\n4,6,12,1: {words}"
    assert (
        make(backend="dense")
        .explain()
        .startswith("2,8,4,3: dense, as asked for: a product with the whole matrix, zeros included\n")
    )


def test_kernels_explain_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    told = make(backend="ksgen", activation="gelu").explain(batch=77).splitlines()
    assert told[0].startswith("2,8,4,3: ksgen: as asked for; ks_2x8x4x3_float32_bsf at batch 77 on ")
    assert "ks_4x6x12x1_float32_bsf_bias_gelu at batch 77" in told[1]
    assert "vector" in told[1]
    monkeypatch.setattr(choice, "_measured", {})
    layer = KSLinear([(2, 8, 4, 3)], bias=False)
    assert layer.explain(batch=7).startswith("2,8,4,3: ksgen: its first call times it and PyTorch's products")
    with torch.no_grad():
        layer(torch.randn(7, 24))
    assert re.match(r"2,8,4,3: (ksgen|strided): \d+ us here, (ksgen|strided) \d+ us", layer.explain(batch=7))


def test_a_layer_on_a_gpu_is_compared_with_the_dense_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_for", lambda _: FakeGpu())
    layer = KSLinear([(32, 24, 24, 1), (1, 32, 32, 24)], device="meta", dtype=torch.bfloat16)
    mode = FakeTensorMode()
    layer.weights = torch.nn.ParameterList(
        FakeTensor(mode, each.detach(), torch.device("cuda", 0)) for each in layer.weights
    )
    one, compared, *each = layer.explain(25088).splitlines()
    own_us = re.match(r"one launch: the cost model expects ([\d.]+) us for one launch at batch 25088, and ", one)
    assert own_us
    dense_us = (
        r"dense product of 768 to 768 features at batch 25088: the cost model expects [\d.]+ us, 1\.\d\d times the "
    )
    assert re.match(rf"{dense_us}{own_us[1]} us of these factors$", compared)
    assert [line.partition(":")[0] for line in each] == ["32,24,24,1", "1,32,32,24"]

    def absent(_: Any) -> None:
        raise DeviceError("no GPU, says this test")

    monkeypatch.setattr(choice, "device_for", absent)
    assert "dense product" not in layer.explain(25087)


# ---- what is refused


@pytest.mark.parametrize(
    ("patterns", "options", "kind", "message"),
    [
        (
            [(2, 8, 4, 3), (6, 64, 64, 1)],
            {},
            PatternError,
            r"2,8,4,3 gives 48 features, but the next pattern \(6,64,64,1\) takes 384",
        ),
        ([], {}, PatternError, r"accepted: one Pattern or more"),
        (
            [(2, 8, 4)],
            {},
            PatternError,
            r"factors\[0\]=\(2, 8, 4\); accepted: a Pattern, four numbers \(a, b, c, d\), or text",
        ),
        ("2,8,4", {}, PatternError, "'2,8,4' is not a pattern; accepted: whole numbers a,b,c,d"),
        ([(2, 0, 4, 3)], {}, PatternError, "b=0; accepted: a whole number from 1"),
        (CHAIN, {"layout": "bfs"}, SpecError, r"layout='bfs'; did you mean bsl\? accepted: bsf, bsl"),
        (CHAIN, {"backend": "einsums"}, SpecError, "backend='einsums'; did you mean einsum"),
        (CHAIN, {"precision": "tf32x"}, SpecError, "precision='tf32x'; did you mean tf32"),
        (CHAIN, {"activation": "geluu"}, SpecError, "activation='geluu'; did you mean gelu"),
        (CHAIN, {"fuse": "never"}, SpecError, "fuse='never'; accepted: auto, yes, no"),
        (
            CHAIN,
            {"fuse": "yes", "backend": "bmm"},
            SpecError,
            "fuse='yes' with backend='bmm'; accepted: backend='ksgen', whose kernels can run",
        ),
        (CHAIN, {"between": "geluu"}, SpecError, "between='geluu'; did you mean gelu"),
        (
            CHAIN[:1],
            {"between": "relu"},
            LaunchError,
            "between='relu' with one factor; accepted: between='none', or two factors or more",
        ),
        (
            CHAIN,
            {"between": "relu", "dtype": torch.complex64},
            SpecError,
            "between=relu of complex numbers, complex64; accepted: none",
        ),
        (CHAIN, {"bias": "yes"}, SpecError, "bias='yes'; accepted: True or False"),
        (CHAIN, {"dtype": torch.int64}, LaunchError, "tensors of int64; accepted: float32, float64, float16, bfloat16"),
        (
            CHAIN,
            {"precision": "tf32", "dtype": torch.float16},
            LaunchError,
            "precision='tf32' for x of float16; accepted: float16",
        ),
        (
            CHAIN,
            {"precision": "tf32", "backend": "bmm"},
            SpecError,
            "precision='tf32' with backend='bmm'; only ksgen's kernels have it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_what_cannot_be_built_is_refused(
    patterns: Any, options: dict[str, Any], kind: type[KsgenError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        KSLinear(patterns, **options)


@pytest.mark.parametrize("backend", ["auto", "einsum"])
def test_what_does_not_fit_is_refused(backend: str) -> None:
    layer, x = make(backend=backend), x_of()
    with pytest.raises(LaunchError, match=r"got x of shape \(5, 3, 23\); layout bsf wants \(\.\.\., 24\)"):
        layer(x[..., :23])
    with pytest.raises(
        LaunchError, match=r"got x of shape \(24, 5, 3\); layout bsf wants \(\.\.\., 24\); that fits layout bsl"
    ):
        layer(x_of("bsl"))
    with pytest.raises(
        LaunchError, match=r"got x of shape \(5, 3, 24\); layout bsl wants \(24, \.\.\.\); that fits layout bsf"
    ):
        make(backend=backend, layout="bsl")(x)
    with pytest.raises(LaunchError, match=r"got x of shape \(\)"):
        layer(torch.tensor(1.0))
    with pytest.raises(LaunchError, match=r"got residual of shape \(5, 2, 24\); \(5, 3, 24\) is needed"):
        layer(x, x[:, :2])
    with pytest.raises(LaunchError, match="got x of float64 and weights of float32; give both in one precision"):
        layer(x.double())
    with pytest.raises(LaunchError, match="x lies on meta and weights on cpu; give both in one place"):
        layer(x.to("meta"))
    with pytest.raises(LaunchError, match=r"KSLinear\(.*\): x is ndarray; accepted: a torch\.Tensor"):
        layer(x.numpy())


@pytest.mark.parametrize(
    ("options", "name", "value", "message"),
    [
        ({}, "activation", "nonsense", "activation='nonsense'; .*accepted: none, relu"),
        ({}, "activation", ["relu"], r"activation=\['relu'\]; .*accepted: none, relu"),
        ({}, "between", "geluu", "between='geluu'; did you mean gelu"),
        ({}, "layout", "bfs", r"layout='bfs'; did you mean bsl\? accepted: bsf, bsl"),
        ({}, "out_layout", "x", "out_layout='x'; accepted: bsf, bsl"),
        ({}, "backend", "einsums", "backend='einsums'; did you mean einsum"),
        (
            {"precision": "tf32x3"},
            "backend",
            "einsum",
            "precision='tf32x3' with backend='einsum'; only ksgen's kernels have it",
        ),
        (
            {"backend": "bmm"},
            "fuse",
            "yes",
            "fuse='yes' with backend='bmm'; accepted: backend='ksgen', whose kernels can run",
        ),
        ({}, "intermediates", "drop", "intermediates='drop'; accepted: keep, recompute, auto"),
        ({}, "precision", "tf33", "precision='tf33'; did you mean tf32"),
        ({"dtype": torch.float16}, "precision", "tf32", "precision='tf32' for x of float16; accepted: float16"),
        (
            {"dtype": torch.complex64},
            "activation",
            "relu",
            "activation=relu of complex numbers, complex64; accepted: none",
        ),
        ({}, "chain", CHAIN[:1], "chain cannot be set; accepted: a new KSLinear"),
    ],
)
def test_an_option_that_is_set_later_is_checked_at_once(
    options: dict[str, Any], name: str, value: Any, message: str
) -> None:
    layer = KSLinear(CHAIN, **options)
    before = getattr(layer, name)
    with pytest.raises(KsgenError, match=message):
        setattr(layer, name, value)
    assert getattr(layer, name) == before


def test_options_that_are_set_later_count() -> None:
    layer, x = make(), x_of()
    layer.activation, layer.backend, layer.between, layer.out_layout = "relu", "einsum", "silu", "bsl"
    wanted = KSLinear.from_weights(layer.weights, layer.bias, activation="relu", between="silu", backend="bmm")(x)
    torch.testing.assert_close(layer(x).movedim(0, -1), wanted)
    layer.out_layout = "bsf"
    assert layer.out_layout is None
    cast = make(precision="tf32x3").half()
    cast.activation = "relu"  # whatever the cast took away, which calls say
    cast.precision = None
    assert cast(x.half()).dtype == torch.float16


def test_a_precision_that_a_moved_layer_no_longer_has_is_refused() -> None:
    with pytest.raises(LaunchError, match="precision='tf32x3' for x of float16; accepted: float16"):
        make(precision="tf32x3").half()(x_of().half())


def test_without_pytorch_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", "import ksgen.torch"], env=environment, capture_output=True, text=True)
    assert (
        done.stderr.splitlines()[-1]
        == f"ModuleNotFoundError: ksgen.torch needs PyTorch 2.4 or later: {install_line('torch')}"
    )
    (tmp_path / "torch.py").write_text("class library: pass\n__version__ = '2.3.1'\n")
    done = subprocess.run([sys.executable, "-c", "import ksgen.torch"], env=environment, capture_output=True, text=True)
    assert "ImportError: ksgen.torch needs PyTorch 2.4 or later, and 2.3.1 is installed" in done.stderr
