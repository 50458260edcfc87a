"""`KSSum`: one matrix that is a sum of chains, accumulated by the layers' residuals."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ksgen import structures
from ksgen.errors import LaunchError, SpecError
from ksgen.torch import KSLinear, KSSum, build, convert, freeze, thaw
from ksgen.torch.layer import base
from ksgen.torch.layer.base import ChainLayer

CHAINS = (["1,6,4,4", "2,10,12,1"], ["4,5,4,1"], ["1,20,16,1"])


def made(biases: tuple[bool, ...] = (True, False, True), **options: Any) -> KSSum:
    torch.manual_seed(0)
    return KSSum([KSLinear(each, bias=bias, **options) for each, bias in zip(CHAINS, biases, strict=True)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layout", "out_layout"), [("bsf", None), ("bsl", None), ("bsf", "bsl")])
def test_values_and_gradients_are_those_of_the_dense_sum(layout: Any, out_layout: Any, dtype: Any) -> None:
    model = made(layout=layout, out_layout=out_layout, dtype=dtype)
    x = torch.randn((33, 16) if layout == "bsf" else (16, 33)).to(dtype).requires_grad_()
    is_bsf = (out_layout or layout) == "bsf"
    residual = torch.randn((33, 20) if is_bsf else (20, 33)).to(dtype)

    def rows(each: Tensor, is_bsf: bool = is_bsf) -> Tensor:
        return (each if is_bsf else each.t()).double()

    doubled = copy.deepcopy(model).double()
    given = rows(x.detach(), layout == "bsf").requires_grad_()
    y = given @ sum(each.to_dense() for each in doubled).t() + doubled[0].bias + doubled[2].bias  # type: ignore[operator]
    wanted = y + rows(residual)
    learned, weights = list(model.parameters()), list(doubled.parameters())
    dy = torch.randn_like(residual)
    gradients = torch.autograd.grad(wanted, [given, *weights], rows(dy))
    error = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.15}
    for _ in range(3):
        found = model(x, residual)
        torch.testing.assert_close(rows(found), wanted.detach(), **error)
        of_x, *others = torch.autograd.grad(found, [x, *learned], dy)
        for each, truth in zip([rows(of_x, layout == "bsf"), *others], gradients, strict=True):
            torch.testing.assert_close(each.double(), truth, **error)
    model.eval().freeze()
    with torch.no_grad():
        for _ in range(3):  # prepared calls
            torch.testing.assert_close(rows(model(x)), y.detach(), **error)
            torch.testing.assert_close(rows(model(x, residual)), wanted.detach(), **error)


def test_each_layer_adds_the_earlier_ones_as_its_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    given, forward = list[Any](), ChainLayer.forward

    def watched(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        given.append(residual)
        given.append(y := forward(self, x, residual))
        return y

    monkeypatch.setattr(KSLinear, "forward", watched)
    with torch.no_grad():
        y = made()(torch.randn(3, 5, 16))
    first, *residuals, last = given
    assert first is None
    assert last is y
    assert residuals[0] is residuals[1]
    assert residuals[2] is residuals[3]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("backend", ["ksgen", "auto"])
def test_an_activation_follows_the_sum(layout: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls without gradients apply it inside the last kernel."""
    model, doubled = (made(layout=layout, backend=backend) for _ in range(2))
    model.activation, doubled = "gelu", doubled.double()
    x, residual = torch.randn(33, 16), torch.randn(33, 20)
    total = x.double() @ doubled.to_dense().t() + doubled[0].bias + doubled[2].bias + residual.double()
    wanted, dy = nn.functional.gelu(total), torch.randn(33, 20)
    given = [each if layout == "bsf" else each.t().contiguous() for each in (x, residual)]

    def check(y: Tensor) -> None:
        torch.testing.assert_close((y if layout == "bsf" else y.t()).double(), wanted.detach(), rtol=1e-4, atol=1e-4)

    for _ in range(3):
        check(y := model(*given))
    gradients = torch.autograd.grad(y, list(model.parameters()), dy if layout == "bsf" else dy.t())
    truths = torch.autograd.grad(wanted, list(doubled.parameters()), dy.double())
    for found, truth in zip(gradients, truths, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4)
    for each in (model, model.eval().freeze()):
        with torch.no_grad(), monkeypatch.context() as patch:
            check(each(*given))
            check(each(*given))
            patch.setattr(base, "activated", lambda *_, **__: pytest.fail("apart"))
            check(each(*given))
    check(torch.compile(model, fullgraph=True, backend="aot_eager")(*given))


def test_a_layer_applies_an_activation_after_the_residual() -> None:
    layer, x, residual = KSLinear("2,6,4,1", activation="silu"), torch.randn(5, 8), torch.randn(5, 12)
    expected = (layer(x) + residual).relu()
    for context in (torch.enable_grad(), torch.no_grad()):
        for _ in range(3):
            with context:
                torch.testing.assert_close(layer(x, residual, after="relu"), expected)
    with pytest.raises(SpecError, match=r"^after='reul'; did you mean relu"):
        layer(x, residual, after="reul")
    with torch.no_grad(), pytest.raises(SpecError, match=r"^after='reul'; did you mean relu"):
        KSLinear("2,6,4,1")(x, residual, after="reul")
    with pytest.raises(SpecError, match="after=relu of complex numbers"):
        KSLinear("2,6,4,1", dtype=torch.complex64)(x.to(torch.complex64), after="relu")
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, residual, after="relu"), layer(x, residual, after="relu"))


class Plain(KSLinear):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x, residual)


def test_a_layer_with_a_forward_of_its_own_needs_no_activation() -> None:
    torch.manual_seed(0)
    model, x = KSSum([KSLinear("2,6,4,1"), Plain("1,12,8,1")], "relu"), torch.randn(5, 8)
    expected = (x @ model.to_dense().t() + model[0].bias + model[1].bias).relu()
    for context in (torch.enable_grad(), torch.no_grad()):
        for _ in range(3):
            with context:
                torch.testing.assert_close(model(x), expected)


def test_functions_for_models_reach_the_layers() -> None:
    model = nn.Sequential(made(), nn.ReLU()).eval()
    x = torch.randn(2, 3, 16)
    expected = x @ model[0].to_dense().t() + model[0][0].bias + model[0][2].bias
    build(model, x)
    assert freeze(model) == ["0.0", "0.1", "0.2"]
    assert model[0].is_frozen
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected.relu())
    assert thaw(model) == ["0.0", "0.1", "0.2"]
    assert not model[0].is_frozen
    assert model[0].freeze() is model[0]
    assert model[0].is_frozen
    assert not model[0].thaw().is_frozen
    lines = model[0].explain(batch=4).splitlines()
    assert [line.partition(":")[0] for line in lines if line[0].isdigit() and line[1] == "."][:2] == [
        "1. 1,6,4,4",
        "1. 2,10,12,1",
    ]
    with pytest.raises(SpecError, match="batch=0"):
        model[0].explain(batch=0)


def test_states_copies_and_programs() -> None:
    # one method for all calls: others differ in the last bits, and times would choose
    (model, other), x = [made(backend="strided") for _ in range(2)], torch.randn(3, 16)
    assert list(model.state_dict())[:3] == ["0.bias", "0.weights.0", "0.weights.1"]
    nn.init.zeros_(other[0].bias)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
    model.activation = "gelu"
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_a_graph_of_fx_has_an_activation_after_a_residual() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = KSLinear("2,6,4,1", backend="strided")

        def forward(self, x: Any, residual: Any) -> Any:
            return self.layer(x, residual, after="relu")

    model, x, residual = Added(), torch.randn(5, 8), torch.randn(5, 12)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            traced = torch.fx.symbolic_trace(model)
            assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["layer"]
            torch.testing.assert_close(traced(x, residual), model(x, residual))


def test_a_slice_of_a_sum_keeps_its_activation() -> None:
    model, x = made(backend="strided"), torch.randn(5, 16)
    model.activation = "silu"
    part = model[1:]
    assert (type(part), part.activation) == (KSSum, "silu")
    assert list(part) == [model[1], model[2]]
    torch.testing.assert_close(part(x), nn.functional.silu(model[1](x) + model[2](x)))


def dyad(state: dict[str, Tensor], variant: str) -> Tensor:
    """The authors' layer, which has features first, of the unit vectors."""
    k, outputs, inputs = state["wl"].shape
    x = torch.eye(k * inputs, dtype=state["wl"].dtype)
    strided = x.reshape(inputs, k, -1).transpose(0, 1)
    permuted = state["wu"].bmm(strided if variant in ("it", "dt") else x.reshape(k, inputs, -1))
    permuted = permuted.transpose(0, 1) if variant in ("ot", "dt") else permuted
    return state["wl"].bmm(x.reshape(k, inputs, -1)).reshape(k * outputs, -1) + permuted.reshape(k * outputs, -1)


@pytest.mark.parametrize("variant", ["it", "ot", "dt"])
def test_a_checkpoint_of_dyad_becomes_a_sum(variant: Any) -> None:
    torch.manual_seed(0)
    matrices = structures.dyad(24, 20, blocks=4, variant=variant)
    state = {name: torch.randn(shape) for each in matrices for name, shape in each.shapes.items()}
    state["bias"] = torch.randn(20)
    model = KSSum.from_structures(matrices, state)
    assert [each.bias is not None for each in model] == [True, False]
    x = torch.randn(7, 24, requires_grad=True)
    wanted = x @ dyad(state, variant).t() + state["bias"]
    torch.testing.assert_close(model(x), wanted)
    (found,), (truth,) = (torch.autograd.grad(y.square().sum(), x) for y in (model(x), wanted))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)
    model.eval().freeze()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)
    for one, layer in zip(matrices, model, strict=True):
        assert all(torch.equal(each, state[name]) for name, each in one.to_state(layer.weights).items())


def test_a_sum_without_a_checkpoint_is_drawn() -> None:
    torch.manual_seed(0)
    model = KSSum.from_structures(structures.dyad(512, 512, blocks=4), layout="bsl", dtype=torch.float64)
    assert [(each.layout, each.bias is not None) for each in model] == [("bsl", True), ("bsl", False)]
    for each in model:
        assert float(each.weights[0].detach().std()) == pytest.approx(1 / (3 * 512) ** 0.5, rel=0.02)
    assert KSSum.from_structures(structures.dyad(24, 20, blocks=4), bias=False)[0].bias is None
    assert KSSum.from_structures(structures.dyad(24, 20, blocks=4), activation="silu").activation == "silu"


def test_what_is_refused() -> None:
    one, pair = KSLinear("1,4,4,2"), structures.dyad(24, 20, blocks=4)
    for given in ([one], [one, nn.Linear(8, 8)], one, 3):
        with pytest.raises(LaunchError, match=r"^KSSum: layers=.*; accepted: a list of two KSLinear or more$"):
            KSSum(given)  # type: ignore[arg-type]
    for other, message in {
        "1,4,5,2": "in_features of 8, 10",
        "1,5,4,2": "out_features of 8, 10",
    }.items():
        with pytest.raises(LaunchError, match=f"KSSum: layers with {message}; accepted: equal ones"):
            KSSum([one, KSLinear(other)])
    with pytest.raises(LaunchError, match="KSSum: layers with layout of bsf, bsl; accepted: equal ones"):
        KSSum([one, KSLinear("2,4,4,1", layout="bsl")])
    with pytest.raises(LaunchError, match="KSSum: layers with out_layout of None, bsl; accepted: equal ones"):
        KSSum([one, KSLinear("2,4,4,1", out_layout="bsl")])
    with pytest.raises(
        LaunchError, match=r"KSSum: KSLinear\(2,4,4,1\) has activation='relu'; accepted: 'none', and an"
    ):
        KSSum([one, KSLinear("2,4,4,1", activation="relu")])
    with pytest.raises(SpecError, match="activation='reul'; did you mean relu"):
        KSSum([one, KSLinear("2,4,4,1")], activation="reul")  # type: ignore[arg-type]
    model = KSSum([one, KSLinear("2,4,4,1")])
    one.activation = "gelu"
    with pytest.raises(LaunchError, match=r"KSSum: KSLinear\(1,4,4,2\) has activation='gelu'"):
        model(torch.zeros(1, 8))
    one.activation, one.layout = "none", "bsl"
    with pytest.raises(LaunchError, match="KSSum: layers with layout of bsl, bsf; accepted: equal ones"):
        model(torch.zeros(8, 8))
    state = {name: torch.zeros(shape) for each in pair for name, shape in each.shapes.items()}
    with pytest.raises(LaunchError, match="KSSum: got other, which no structure has"):
        KSSum.from_structures(pair, {**state, "other": torch.zeros(1)})
    peft = (structures.boft(24, block=4, factors=2), structures.low_rank(24, 24, rank=2))
    parameters = {name: torch.zeros(shape) for each in peft for name, shape in each.published.shapes.items()}
    with pytest.raises(
        LaunchError, match=r"got other, which .*; accepted: boft_R, boft_s, bias, lora_A\.weight, lora_B\.weight$"
    ):
        KSSum.from_structures(peft, {**parameters, "other": torch.zeros(1)})
    scaled = {**parameters, "boft_s": torch.ones(24, 1)}
    assert KSSum.from_structures(peft, scaled).to_dense().equal(torch.eye(24))
    with pytest.raises(LaunchError, match="boft: got boft_s that is not 1, which scales outputs"):
        KSSum.from_structures(peft, {**scaled, "boft_s": torch.full((24, 1), 2.0)})
    with pytest.raises(LaunchError, match=r"KSSum: got wl; needed: wl, wu$"):
        KSSum.from_structures(pair, {"wl": state["wl"]})
    with pytest.raises(LaunchError, match=r"KSSum: got no parameters; needed: wl, wu$"):
        KSSum.from_structures(pair, {})
    twice, matrices = [structures.low_rank(8, 6, 2)] * 2, {"A": torch.zeros(2, 8), "B": torch.zeros(6, 2)}
    with pytest.raises(LaunchError, match="KSSum: several structures have the parameters A, B; accepted: a state for"):
        KSSum.from_structures(twice, matrices)
    assert len(KSSum.from_structures(twice)) == 2  # without a state, names do not matter


def test_a_refusal_to_freeze_leaves_all_layers_unfrozen() -> None:
    model = KSSum([KSLinear("1,6,4,2"), KSLinear("2,6,4,1"), KSLinear("2,6,4,1")]).eval()
    nn.utils.parametrize.register_parametrization(model[2].weights, "0", nn.Tanh())
    model[1].freeze()
    for refused in (model.freeze, lambda: freeze(model)):
        with pytest.raises(LaunchError, match="by a parametrization; such a layer cannot be frozen"):
            refused()
        assert [each.is_frozen for each in model][:2] == [False, True]


def test_other_modules_may_replace_layers() -> None:
    layer, x = KSSum([KSLinear("1,6,4,2"), KSLinear("2,6,4,1")]), torch.randn(5, 8)
    for number in range(2):
        layer[number] = nn.Linear(8, 12)
        expected = layer[0](x) + layer[1](x)
        torch.testing.assert_close(layer(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected)
    layer[0] = KSLinear("1,1,8,1")
    layer[1] = KSLinear("2,6,4,1")
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(LaunchError, match="layers with out_features of 1, 12; accepted: equal ones"):
            layer(x)


@pytest.mark.filterwarnings("ignore")
def test_a_sum_is_traced() -> None:
    layer, x = KSSum([KSLinear("1,6,4,2"), KSLinear("2,6,4,1")]), torch.randn(5, 8)
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), layer(x))


def test_structures_are_one_or_several() -> None:
    pair = structures.dyad(64, 32, blocks=4)
    with pytest.raises(LaunchError, match=r"from_structure: structure=.*KSSum.from_structures takes several"):
        KSLinear.from_structure(pair)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"KSSum: structures=.*; accepted: a list of two structures or more"):
        KSSum.from_structures(pair[0])  # type: ignore[arg-type]
    layer = KSSum.from_structures(pair)
    del layer[1], layer[0]
    for residual in (None, torch.randn(5, 32)):
        with pytest.raises(LaunchError, match="KSSum: it has no layers; accepted: two KSLinear or more"):
            layer(torch.randn(5, 64), residual)


def test_its_weight_is_known_without_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(dtype=torch.float64)
    layer.activation, layer[0].between = "relu", "gelu"
    weight = layer.weight
    with monkeypatch.context() as patch:
        patch.setattr(KSLinear, "to_dense", lambda _: pytest.fail("the values were asked for"))
        assert (weight.shape, weight.dtype, weight.device.type, weight.requires_grad) == (
            (20, 16),
            torch.float64,
            "cpu",
            True,
        )
        assert repr(weight) == "weight of KSSum, as (20, 16) of torch.float64 on cpu; its values: to_dense()"
        assert layer.to(torch.float32).weight.dtype == torch.float32
        weight.requires_grad_(False)
        assert not any(each.requires_grad for part in layer for each in part.weights)
    with pytest.raises(LaunchError, match="with between='gelu' the layer has no matrix"):
        weight.clone()
    layer[1] = nn.Sequential()
    assert not hasattr(layer, "weight")


def test_the_values_of_its_weight_are_the_sum() -> None:
    layer, x = made(dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    expected, y = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, expected)
    for found, truth in zip(
        *(torch.autograd.grad(each.square().sum(), list(layer.parameters())) for each in (y, expected)), strict=True
    ):
        torch.testing.assert_close(found, truth)
    assert layer.bias.equal(layer[0].bias + layer[2].bias)
    assert made((False, True, False)).bias is not None
    assert (one := made((False, True, False))).bias is one[1].bias
    assert made((False,) * 3).bias is None
    for apart in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert list(apart.state_dict()) == list(layer.state_dict())
        assert "weight" not in apart.state_dict()
        assert apart.weight.equal(layer.weight)
    layer[1] = nn.Linear(16, 20, dtype=torch.float64)
    torch.testing.assert_close(nn.functional.linear(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize(
    "draw", [lambda weight: weight.normal_(0, 0.1), nn.init.kaiming_normal_, nn.init.xavier_uniform_]
)
def test_a_draw_of_its_weight_reaches_the_layers(draw: Any) -> None:
    """Outputs vary as with a dense weight: the mean square of K says how much."""
    layer, dense = made(), torch.empty(20, 16)
    layer[1] = nn.Linear(16, 20)
    found, wanted = [], []
    for _ in range(100):
        draw(layer.weight)
        found.append(layer.to_dense().detach().square().mean())
        wanted.append(draw(dense).square().mean())
    assert float(torch.stack(found).mean()) == pytest.approx(float(torch.stack(wanted).mean()), rel=0.1)
    nn.init.zeros_(layer.weight)
    assert not layer.to_dense().any()
    assert layer[0].weights[0].any()


def test_other_writes_to_its_weight_are_refused() -> None:
    layer = made()
    before = [each.clone() for each in layer.parameters()]
    for write in (nn.init.orthogonal_, lambda weight: weight.normal_().mul_(2)):
        with pytest.raises(
            LaunchError,
            match=r"^KSSum: \w+ would write to weight, which is the sum of products of the factors in the layers' "
            r"`weights`; accepted: writes to those, .* or KSSum.from_structures with the state of `factorize` for",
        ):
            write(layer.weight)
    for name in ("weight", "bias"):
        for value in (nn.Parameter(torch.zeros(20, 16)), torch.zeros(20, 16), None):
            with pytest.raises(LaunchError, match=f"^KSSum: {name} is a sum over the layers, and cannot be set; acce"):
                setattr(layer, name, value)
    with pytest.raises(LaunchError, match=r"^KSSum: a hook on weight would be lost.*; accepted: hooks on the factors"):
        layer.weight.register_hook(print)
    assert all(each.equal(old) for each, old in zip(layer.parameters(), before, strict=True))
    layer[1] = layer[1].quantize("int8")
    assert layer.weight.dtype == torch.float32
    with pytest.raises(LaunchError, match=r"zero_|an initializer would write to weight, which is derived from weights"):
        nn.init.zeros_(layer.weight)
    assert all(each.equal(old) for each, old in zip(layer[0].parameters(), before, strict=False))


@pytest.mark.parametrize(
    "write", [nn.init.zeros_, lambda bias: bias.data.copy_(torch.ones(20)), lambda bias: bias[2:].add_(1)]
)
def test_writes_to_its_sum_of_biases_are_refused(write: Any) -> None:
    layer = made()
    message = r"^KSSum: \w+_ would write to bias, which is the sum of the layers' biases; accepted: writes to those$"
    with torch.no_grad(), pytest.raises(LaunchError, match=message):
        write(layer.bias)
    layer = made((False, True, False))
    with torch.no_grad():
        write(layer.bias)  # the layer's own


def test_compilers_see_a_dense_weight() -> None:
    layer, x = made(), torch.randn(5, 16)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: nn.functional.linear(x.to(layer.weight.dtype), layer.weight, layer.bias),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    "layer",
    [KSLinear([(1, 128, 64, 1)], activation="relu"), KSSum([KSLinear([(1, 128, 64, 1)]) for _ in range(2)], "relu")],
    ids=["layer", "sum"],
)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compilers_leave_layers_with_an_activation_to_pytorch(layer: Any) -> None:
    """PyTorch's fast path would multiply by their dense weights, and leave the activation out."""
    torch._dynamo.reset()
    model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True).eval()
    model.linear1, x = layer, torch.randn(2, 8, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [("linear1",), ("linear2",), ("linear1", "linear2")], ids="+".join)
@pytest.mark.parametrize("kind", ["encoder", "encoders", "decoder"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformers_of_pytorch_call_it(kind: str, names: tuple[str, ...]) -> None:
    """They read weights and biases to choose their fast path, which would multiply by the dense weights."""
    torch.manual_seed(0)
    make: Any = nn.TransformerDecoderLayer if kind == "decoder" else nn.TransformerEncoderLayer
    model = make(d_model=64, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(model, 2) if kind == "encoders" else model
    sums = {"linear1": structures.dyad(64, 128, 4), "linear2": structures.dyad(128, 64, 4)}
    convert(model, {"*." * (kind == "encoders") + name: sums[name] for name in names})
    dense = copy.deepcopy(model)
    for part in dense.layers if kind == "encoders" else [dense]:
        for name in names:
            layer = getattr(part, name)
            assert isinstance(layer, KSSum)
            linear = nn.Linear(*reversed(layer.weight.shape))
            linear.load_state_dict({"weight": layer.weight.detach().clone(), "bias": layer.bias})
            setattr(part, name, linear)
    x, padded = torch.randn(3, 7, 64), torch.zeros(3, 7, dtype=torch.bool)
    padded[0, 5:] = True
    given = (x, torch.randn(3, 5, 64)) if kind == "decoder" else (x,)
    masks: list[dict[str, Tensor]] = [{}] if kind == "decoder" else [{}, {"src_key_padding_mask": padded}]
    for is_training, has_gradient in ((True, True), (False, True), (False, False)):
        model.train(is_training), dense.train(is_training)
        for mask in masks:
            with torch.set_grad_enabled(has_gradient):
                y, wanted = model(*given, **mask), dense(*given, **mask)
                torch.backends.mha.set_fastpath_enabled(False)
                try:
                    apart = model(*given, **mask)
                finally:
                    torch.backends.mha.set_fastpath_enabled(True)
            read = ~padded if mask else slice(None)
            torch.testing.assert_close(y[read], apart[read])
            torch.testing.assert_close(y[read], wanted[read], rtol=1e-4, atol=1e-5)
