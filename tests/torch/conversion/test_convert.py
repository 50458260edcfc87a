"""convert: which layers are replaced and what of them stays, what the report says, and what is refused unchanged."""

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import nn  # noqa: E402  (after the skip)

from ksgen import structures  # noqa: E402
from ksgen.errors import KsgenError, LaunchError, SpecError  # noqa: E402
from ksgen.pattern import Chain, Pattern  # noqa: E402
from ksgen.spec import parse  # noqa: E402
from ksgen.structures import of_chain  # noqa: E402
from ksgen.torch import KSLinear, KSSum, propose, save_rule  # noqa: E402
from ksgen.torch.conversion.adapter import adapt, merge  # noqa: E402
from ksgen.torch.conversion.convert import convert  # noqa: E402
from ksgen.torch.conversion.projection import product_of  # noqa: E402
from ksgen.torch.conversion.propose import Proposal  # noqa: E402
from ksgen.torch.conversion.propose import offers as offers_of  # noqa: E402
from ksgen.torch.conversion.quantize import quantize_model  # noqa: E402
from ksgen.torch.conversion.rule import RuleEntry  # noqa: E402
from ksgen.torch.layer.group import KSLinears  # noqa: E402
from tests.support.program import ROOT  # noqa: E402

UP, DOWN = [(6, 4, 4, 1), (1, 48, 12, 2)], [(6, 4, 16, 1), (1, 8, 8, 3)]  # 24 -> 96, 96 -> 24
SQUARE = Chain((Pattern(2, 3, 12, 1), Pattern(1, 12, 3, 2)))  # 24 -> 24


class Conv1D(nn.Module):
    """Stand-in for Conv1D of transformers, whose weight is (in_features, out_features)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.mlp = nn.ModuleDict({"up": nn.Linear(24, 96), "down": nn.Linear(96, 24, bias=False)})


@pytest.fixture(autouse=True)
def _seed_and_one_thread() -> Iterator[None]:
    """Threads of several tests at once only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def blocks(count: int = 2) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(count)), "head": nn.Linear(24, 5)})


def exact(layer: nn.Linear, chain: Chain | list[tuple[int, int, int, int]]) -> None:
    """Gives a layer a weight that is a product of the chain's factors."""
    count = layer.out_features // KSLinear(chain).out_features
    products = [product_of([each.detach() for each in KSLinear(chain).weights]) for _ in range(count)]
    layer.weight.data.copy_(torch.cat(products))


def test_layers_of_a_product_go_on_as_they_were() -> None:
    model = blocks()
    x, wide = torch.randn(7, 3, 24), torch.randn(7, 3, 96)
    for block in model["blocks"]:
        exact(block.qkv, SQUARE)
        exact(block.mlp["up"], UP)
        exact(block.mlp["down"], DOWN)

    def outputs() -> list[torch.Tensor]:
        return [y for block in model["blocks"] for y in (block.qkv(x), block.mlp["up"](x), block.mlp["down"](wide))]

    before = outputs()
    report = convert(model, {"qkv": RuleEntry(SQUARE, 3), "blocks.*.up": UP, "down": DOWN})
    assert [type(block.qkv) for block in model["blocks"]] == [KSLinears, KSLinears]
    assert type(model["head"]) is nn.Linear
    for new, old in zip(outputs(), before, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    assert max(error for layer in report.layers for error in layer.relative_errors) < 1e-6


def test_the_report_counts() -> None:
    model = blocks()
    report = convert(model, {"up": UP, "down": DOWN})
    dense = 2 * (24 * 72 + 72 + 24 * 96 + 96 + 96 * 24) + 24 * 5 + 5
    sparse = 2 * (24 * 72 + 72 + (6 * 16 + 48 * 24) + 96 + (6 * 64 + 8 * 24)) + 24 * 5 + 5
    assert report.parameters == (dense, sparse)
    assert report.flops == (2 * 2 * 2 * 24 * 96, 2 * 2 * (6 * 16 + 48 * 24 + 6 * 64 + 8 * 24))
    assert [layer.name for layer in report.layers] == [
        f"blocks.{n}.mlp.{way}" for n in (0, 1) for way in ("up", "down")
    ]
    shown = str(report)
    assert "blocks.*.mlp.down │ x 2 │ 6,4,16,1 then 1,8,8,3" in shown
    assert f"4 layers replaced: {dense:,} parameters became {sparse:,} in the whole model" in shown
    assert "drawn" in str(convert(blocks(), {"up": UP}, from_weights=False))


def test_a_report_keeps_no_weights() -> None:
    report = convert(nn.Sequential(nn.Linear(256, 256)), {"0": ["16,16,16,1", "1,16,16,16"]})
    assert len(report.layers[0].relative_errors) == 1
    assert len(pickle.dumps(report)) < 2**12  # the weights have 2**15 bytes


def test_what_stays() -> None:
    model = blocks().bfloat16().eval()
    block = model["blocks"][0]
    block.mlp["up"].weight.requires_grad_(False)
    bias = block.mlp["up"].bias
    convert(model, {"up": UP, "down": DOWN}, backend="einsum")
    up, down = block.mlp["up"], block.mlp["down"]
    assert (up.weights[0].dtype, up.training, up.backend) == (torch.bfloat16, False, "einsum")
    assert torch.equal(up.bias, bias)
    assert down.bias is None
    assert [each.requires_grad for each in (up.weights[0], up.bias, down.weights[0])] == [False, True, True]
    model = blocks()
    model["blocks"][0].mlp["up"].bias.requires_grad_(False)
    convert(model, {"up": UP})
    assert [block.mlp["up"].bias.requires_grad for block in model["blocks"]] == [False, True]


@pytest.mark.parametrize("change", ["chain", "group", "sum", "adapt", "merge", "quantize"])
def test_hooks_move_to_the_new_layer(change: str) -> None:
    seen: list[str] = []
    model: Any = nn.Sequential(KSLinear("1,8,8,1") if change == "quantize" else nn.Linear(8, 8))
    layer, x, one = model[0], torch.randn(3, 8, requires_grad=True), Chain.read("1,8,8,1")

    def note(what: str) -> Callable[..., None]:
        return lambda module, *_, **__: seen.append(f"{what} {type(module).__name__}")

    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True),
        layer.register_forward_hook(note("forward"), with_kwargs=True, always_call=True),
        layer.register_full_backward_pre_hook(note("before backward")),
        layer.register_full_backward_hook(note("backward")),
    ]
    y = model(x)
    seen.clear()
    if change == "quantize":
        quantize_model(model, "int8")
    elif change in ("adapt", "merge"):
        adapt(model, {"0": one})
    else:
        rules: dict[str, Any] = {"group": RuleEntry(Chain.read("1,4,8,1"), 2), "sum": (of_chain(one), of_chain(one))}
        convert(model, {"0": rules.get(change, one)})
    if change == "merge":
        model[0].register_forward_hook(note("adapter's"))
        merge(model)
    assert model[0] is not layer
    torch.testing.assert_close(model(x), y, rtol=0.1, atol=0.1)  # of 2 x
    if change != "quantize":  # a layer for inference
        model(x).sum().backward()
    noted = ["forward"] + ["adapter's"] * (change == "merge")
    noted = noted if change == "quantize" else [*noted, *noted, "before backward", "backward"]
    assert seen == [f"{each} {type(model[0]).__name__}" for each in noted]
    for handle in handles:
        handle.remove()
    seen.clear()
    torch.testing.assert_close(model(2 * x), y, rtol=0.1, atol=0.1)
    layer(x)
    assert not [each for each in seen if "adapter's" not in each]


def test_fresh_weights_and_the_meta_device() -> None:
    model = blocks().to("meta")
    report = convert(model, {"up": UP}, from_weights=False)
    assert model["blocks"][0].mlp["up"].weights[0].is_meta
    assert report.layers[0].relative_errors == ()
    with pytest.raises(
        KsgenError,
        match=r"blocks\.0\.mlp\.down is on the meta device, so that it has no weights; accepted: from_weights=False",
    ):
        convert(model, {"down": DOWN})  # fmt: skip


@pytest.mark.parametrize("named", [{"rule": {"0": "1,4,8,1"}}, {"rule": {"1": "1,4,4,1"}}, {"budget": 0.5}])
def test_a_lazy_layer_needs_a_call_first(named: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    message = (
        r"^0\.weight has no values before the first call of its lazy layer; accepted: a model that was called once$"
    )
    with pytest.raises(SpecError, match=message):
        convert(model, **named)
    with pytest.raises(SpecError, match=message):
        adapt(model, {"1": "1,4,4,1"})
    model = nn.Sequential(nn.LazyLinear(4))
    model(torch.zeros(2, 8))
    assert len(convert(model, {"0": "1,4,8,1"}).layers) == 1


def test_conv1d_of_transformers() -> None:
    model = nn.Sequential(Conv1D(nf=96, nx=24))
    x = torch.randn(5, 24)
    model[0].weight.data.copy_(product_of([each.detach() for each in KSLinear(UP).weights]).T)
    before = model(x)
    report = convert(model, {"0": UP})
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert report.layers[0].flops[0] == 2 * 24 * 96


def test_a_second_rule_leaves_the_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks()
    convert(model, {"up": UP}, from_weights=False)
    first = model["blocks"][0].mlp["up"]
    assert len(convert(model, {"*.mlp.*": DOWN}, from_weights=False).layers) == 2
    assert model["blocks"][0].mlp["up"] is first


def test_an_encoder_of_pytorchs_that_looks_for_a_fast_path() -> None:
    """It reads the weights of its layers, and would multiply by them itself."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 96, dropout=0.0, batch_first=True), 2)
    convert(encoder, {"linear1": UP, "linear2": DOWN})
    dense, x = copy.deepcopy(encoder), torch.randn(2, 7, 24)
    for layer in dense.layers:
        layer.linear1, layer.linear2 = layer.linear1.to_linear(), layer.linear2.to_linear()
    for is_training, is_recorded in product((True, False), (True, False)):
        with torch.set_grad_enabled(is_recorded):
            torch.testing.assert_close(encoder.train(is_training)(x), dense.train(is_training)(x))
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 5:] = True
    with torch.no_grad():
        found, expected = (each.eval()(x, src_key_padding_mask=mask) for each in (encoder, dense))
    torch.testing.assert_close(found[~mask], expected[~mask])


def test_a_spec_and_its_path(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"layers:\n  up: {[list(each) for each in UP]}\n  down: {[list(each) for each in DOWN]}\n")
    assert len(convert(blocks(), path, from_weights=False).layers) == 4
    assert len(convert(blocks(3), str(path), from_weights=False).layers) == 6


def test_a_specs_layer_has_its_options(tmp_path: Path) -> None:
    square, model = "[[2, 3, 12, 1], [1, 12, 3, 2]]", blocks()
    spec = parse(f"layers: {{qkv: {{group: [{square}, {square}, {square}], between: relu, fuse: no}}}}")
    with pytest.raises(
        KsgenError, match=r"qkv: between='relu' makes the layer nonlinear, .*; accepted: from_weights=False"
    ):
        convert(model, spec)
    convert(model, spec, from_weights=False)
    assert {(part.between, part.fuse) for block in model["blocks"] for part in block.qkv} == {("relu", "no")}
    convert(
        transposed := blocks(),
        parse(f"layers: {{down: {{chain: {[list(each) for each in DOWN]}, out_layout: bsl}}}}"),
        from_weights=False,
    )
    assert {each.out_layout for each in transposed.modules() if isinstance(each, KSLinear)} == {"bsl"}
    back = parse(f"layers: {{down: {{chain: {[list(each) for each in DOWN]}, layout: bsl, out_layout: bsf}}}}")
    with pytest.raises(SpecError, match="layer down: layout=bsl with out_layout; accepted: layout=bsf"):
        convert(blocks(), back, from_weights=False)


KRONECKER = "{structure: kronecker, in_features: 24, out_features: 96, blocks: [4, 3]}"


@pytest.mark.parametrize(
    "rule",
    [
        {"up": structures.kronecker(24, 96, blocks=(4, 3))},
        f"layers: {{up: {{chain: {KRONECKER}}}}}",
        f"layers: {{up: {{chain: {KRONECKER}, tied: [a, d]}}}}",
        "layers: {up: {chain: [[3, 24, 8, 1], [1, 4, 3, 24]], tied: [a, d]}}",
    ],
    ids=["structure", "spec", "spec with ties", "chain with ties"],
)
def test_a_kronecker_product_stays_tied(rule: Any) -> None:
    model = blocks(1)
    up = model["blocks"][0].mlp["up"]
    a, b = torch.randn(4, 3), torch.randn(24, 8)
    up.weight.data.copy_(torch.kron(a, b))
    wanted = up.weight.detach().clone()
    report = convert(model, parse(rule) if isinstance(rule, str) else rule)
    layer = model["blocks"][0].mlp["up"]
    assert [tuple(each.shape) for each in layer.weights.parameters()] == [(1, 24, 8, 1), (1, 4, 3, 1)]
    torch.testing.assert_close(layer.to_dense().detach(), wanted)
    assert report.layers[0].parameters[1] == 24 * 8 + 4 * 3 + 96
    assert report.layers[0].relative_errors[0] < 1e-6


def test_weights_that_are_equal_along_both_axes_stay_tied(tmp_path: Path) -> None:
    model = blocks(1)
    up = model["blocks"][0].mlp["up"]
    part = torch.randn(16, 4)
    up.weight.data.copy_(torch.kron(torch.eye(3), torch.kron(part, torch.eye(2))))
    wanted = up.weight.detach().clone()
    convert(model, parse("layers: {up: {chain: [[3, 16, 4, 2]], tied: [ad]}}"))
    layer = model["blocks"][0].mlp["up"]
    assert [tuple(each.shape) for each in layer.weights.parameters()] == [(1, 16, 4, 1)]
    torch.testing.assert_close(layer.to_dense().detach(), wanted)
    save_rule(model, tmp_path / "rule.json")
    again = blocks(1)
    convert(again, tmp_path / "rule.json", from_weights=False)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again["blocks"][0].mlp["up"].to_dense(), layer.to_dense())


def test_a_group_of_kronecker_products_stays_tied() -> None:
    model = blocks(1)
    qkv = "{structure: kronecker, in_features: 24, out_features: 24, blocks: 4}"
    convert(model, parse(f"layers: {{qkv: {{group: [{qkv}, {qkv}, {qkv}]}}}}"))
    assert sum(each.numel() for each in model["blocks"][0].qkv.parameters()) == 3 * (16 + 36 + 24)


def test_ties_are_saved_with_a_rule(tmp_path: Path) -> None:
    model, rule = blocks(1), {"up": structures.kronecker(24, 96, blocks=(4, 3))}
    convert(model, rule)
    save_rule(model, tmp_path / "rule.json")
    again = blocks(1)
    convert(again, tmp_path / "rule.json", from_weights=False)
    again.load_state_dict(model.state_dict())
    x = torch.randn(5, 24)
    torch.testing.assert_close(again["blocks"][0].mlp["up"](x), model["blocks"][0].mlp["up"](x))
    assert "0 layers replaced" in str(convert(model, tmp_path / "rule.json"))
    adapted = blocks(1)
    adapt(adapted, tmp_path / "rule.json")
    adapter = adapted["blocks"][0].mlp["up"].adapter
    assert sum(each.numel() for each in adapter.parameters()) == 24 * 8 + 4 * 3
    assert not adapter.to_dense().any()


def test_structures_give_parameters_and_initial_weights() -> None:
    model, structure = blocks(1), structures.btt(24, 96, blocks=(4, 3), rank=2)
    convert(model, {"up": structure}, from_weights=False)
    scales = [float(each.std()) for each in model["blocks"][0].mlp["up"].weights]
    assert scales == pytest.approx([structure.scales["W1"], structure.scales["W2"]], rel=0.25)
    adapted = blocks(1)
    convert(adapted, {"up": structures.gralora(24, 96, blocks=3, rank=6)}, from_weights=False)
    deviations = [float(each.std()) for each in adapted["blocks"][0].mlp["up"].weights]
    assert deviations == pytest.approx([(3 * 8) ** -0.5, (3 * 6) ** -0.5], rel=0.25)
    rotated = blocks(1)
    convert(rotated, {"[b]locks.0.qkv": RuleEntry(structures.oft(24, block=6).chain, 3)})
    square = nn.Sequential(nn.Linear(24, 24))
    convert(square, {"[0]": structures.oft(24, block=6)})
    (blocks_of_it,) = structures.oft(24, block=6).to_state(square[0].weights).values()
    torch.testing.assert_close(blocks_of_it @ blocks_of_it.mT, torch.eye(6).expand(4, 6, 6))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"up": (of_chain(structures.monarch(24, 96, blocks=4).chain, ("a", "")), *structures.dyad(24, 96, 4))},
            "blocks.0.mlp.up: factorize: 4,6,6,1 then 1,24,6,4 with weights tied along a, none; accepted: one tied",
        ),
        (
            {"qkv": RuleEntry.of(*structures.dyad(24, 24, blocks=4), count=2)},
            "blocks.0.qkv takes 24 features and gives 72; 2 side by side of 4,6,6,1 plus 1,6,6,4@j.k would take 24 and "
            "give 48",
        ),
        (
            {"up": structures.dyad(24, 48, blocks=4)},
            "up takes 24 features and gives 96; 4,12,6,1 plus 1,12,6,4@j.k would take 24 and give 48",
        ),
        ({"qkv": RuleEntry.of(structures.gs(24, 24, blocks=4))}, "blocks.0.qkv takes 24 features and gives 72"),
        (
            "layers: {up: {chain: [[3, 24, 8, 1], [1, 4, 3, 24]], tied: [none, d]}}",
            "blocks.0.mlp.up: factorize: 3,24,8,1 then 1,4,3,24 with weights tied along none, d; accepted: one tied",
        ),
        (
            "layers: {up: {chain: [[3, 32, 8, 1]], tied: [ad]}}",
            "tied=ad of 3,32,8,1, whose d is 1; accepted: tied=a",
        ),
    ],
)
def test_structures_that_cannot_be_kept_are_refused_in_one_line(rule: Any, message: str) -> None:
    model = blocks(1)
    with pytest.raises(KsgenError) as caught:
        convert(model, parse(rule) if isinstance(rule, str) else rule)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(model["blocks"][0].mlp["up"]) is nn.Linear


@pytest.mark.parametrize(
    "rule",
    [
        {"up": structures.dyad(24, 96, blocks=4)},
        "layers: {up: {chain: {structure: dyad, in_features: 24, out_features: 96, blocks: 4}}}",
        "layers: {up: {sum: [[[4, 24, 6, 1]], ['1,24,6,4@j.k']]}}",
    ],
    ids=["structures", "spec", "spec of chains"],
)
def test_a_sum_of_chains_is_the_nearest_and_saved_with_a_rule(rule: Any, tmp_path: Path) -> None:
    model = blocks(1)
    up, exact = model["blocks"][0].mlp["up"], KSSum.from_structures(structures.dyad(24, 96, blocks=4))
    up.weight.data.copy_(exact.to_dense().detach())
    x, wanted, bias = torch.randn(5, 24), up.weight.detach().clone(), up.bias
    up.weight.requires_grad_(False)
    report = convert(model, parse(rule) if isinstance(rule, str) else rule)
    layer = model["blocks"][0].mlp["up"]
    assert type(layer) is KSSum
    assert [each.requires_grad for each in layer.parameters()] == [True, False, False]
    torch.testing.assert_close(layer(x), x @ wanted.t() + bias)
    (replaced,) = report.layers
    assert (replaced.parameters, replaced.flops) == ((24 * 96 + 96, 24 * 48 + 96), (2 * 24 * 96, 24 * 96))
    assert replaced.relative_errors[0] < 1e-6
    assert "4,24,6,1 plus 1,24,6,4@j.k" in str(report)
    layer.activation = "gelu"
    save_rule(model, tmp_path / "rule.json")
    again = blocks(1)
    convert(again, tmp_path / "rule.json", from_weights=False)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again["blocks"][0].mlp["up"](x), layer(x))
    assert "0 layers replaced" in str(convert(model, tmp_path / "rule.json"))
    adapted = blocks(1)
    adapt(adapted, tmp_path / "rule.json", activation="none")
    adapter = adapted["blocks"][0].mlp["up"]
    assert [float(each.abs().max()) for each in adapter.adapter.parameters()] == [0.0, 0.0]
    torch.testing.assert_close(adapter(x), adapter.base(x))


SUMS = {
    "low rank and a chain": (structures.monarch(24, 24, blocks=4), structures.low_rank(24, 24, rank=1)),
    "names of equal parameters": (structures.low_rank(24, 24, rank=1), of_chain(Chain(("2,4,12,1", "1,12,4,2")))),
    "three chains": (*structures.dyad(24, 24, blocks=4), structures.low_rank(24, 24, rank=1)),
    "one factor each": structures.dyad(24, 24, blocks=4),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("parts", list(SUMS.values()), ids=list(SUMS))
def test_sums_side_by_side_are_recovered_saved_and_trained(parts: Any, count: int, tmp_path: Path) -> None:
    truth = torch.cat([sum(KSLinear(each.chain).to_dense().detach() for each in parts) for _ in range(count)])

    def model_of() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 24 * count), nn.Tanh())

    model, rule = model_of(), {"[0]": RuleEntry.of(*parts, count=count)}
    model[0].weight.data.copy_(truth)
    x, bias = torch.randn(5, 24, requires_grad=True), model[0].bias.detach().clone()
    wanted = model(x)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), x)
    report = convert(model, rule)
    layer = model[0]
    assert type(layer) is (KSSum if count == 1 else KSLinears)
    assert max(report.layers[0].relative_errors) < 1e-6
    assert len(report.layers[0].relative_errors) == count
    assert f"plus {parts[-1].chain}{' x 3' if count > 1 else ''}" in str(report)
    assert report.layers[0].parameters[1] == layer_size(parts, count)
    torch.testing.assert_close(layer.to_dense().detach(), truth, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(model(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(grads[0], wanted_grad, rtol=1e-3, atol=1e-4)
    through_dense = torch.nn.functional.linear(x, layer.to_dense(), bias).tanh().square().sum()
    names = [name for name, _ in layer.named_parameters() if not name.endswith("bias")]
    factors = [layer.get_parameter(name) for name in names]
    for found, expected in zip(
        torch.autograd.grad(model(x).square().sum(), factors),
        torch.autograd.grad(through_dense, factors),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    save_rule(model, tmp_path / "rule.json")
    again = model_of()
    convert(again, tmp_path / "rule.json", from_weights=False)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    assert "0 layers replaced" in str(convert(model, tmp_path / "rule.json"))
    adapted = model_of()
    adapt(adapted, tmp_path / "rule.json")
    assert not adapted[0].adapter.to_dense().any()
    torch.testing.assert_close(adapted[0](x), adapted[0].base(x))


def layer_size(parts: Any, count: int) -> int:
    return count * (sum(each.chain.weight_count for each in parts) + 24)


def test_sums_side_by_side_are_candidates_for_q_k_and_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three parts are sums with other weights; a single sum from 24 to 72 features is farther."""
    pair = structures.dyad(24, 24, blocks=4)
    model = nn.Sequential(nn.Linear(24, 72))
    parts = [KSSum.from_structures(pair).to_dense().detach() for _ in range(3)]
    model[0].weight.data.copy_(torch.cat(parts))
    report = convert(model, ["0"], structures=["dyad"], budget=0.5)
    assert (report.layers[0].count, report.layers[0].chains) == (3, tuple(each.chain for each in pair))
    assert max(report.layers[0].relative_errors) < 1e-6


def test_a_layout_of_y_is_refused_in_a_group_of_sums() -> None:
    pair = [KSLinear("1,24,24,1", out_layout="bsl") for _ in range(2)]
    with pytest.raises(LaunchError, match="out_layout='bsl' of a layer of a group; accepted: layers without it"):
        KSLinear.group([KSSum(pair)])
    sums = [KSSum([KSLinear("1,24,24,1", layout=layout) for _ in range(2)]) for layout in ("bsf", "bsl")]
    with pytest.raises(LaunchError, match="layers of layouts bsf, bsl; accepted: one layout"):
        KSLinear.group(sums)(torch.ones(24, 24))
    with pytest.raises(LaunchError, match="layers that take 24, 12 features; accepted: layers that take the same x"):
        KSLinear.group([sums[0], KSLinear("1,12,12,1")])
    with pytest.raises(LaunchError, match=r"^layers=\[KSLinears\(.*\.\.\.; accepted: a list of KSLinear, one or"):
        KSLinear.group([KSLinear.group([KSLinear("1,12,12,1")])])


def test_ties_and_options_of_a_sum_are_saved_with_a_rule(tmp_path: Path) -> None:
    parts = structures.low_rank(24, 24, rank=2), structures.kronecker(24, 24, blocks=4)
    model = nn.Sequential(nn.Linear(24, 24))
    convert(model, {"[0]": parts}, from_weights=False, backend="einsum")
    save_rule(model, tmp_path / "rule.json")
    again = nn.Sequential(nn.Linear(24, 24))
    convert(again, tmp_path / "rule.json", from_weights=False)
    assert {each.backend for each in again[0]} == {"einsum"}
    again.load_state_dict(model.state_dict())
    assert sum(each.numel() for each in again[0].parameters()) == 24 + 2 * 48 + 16 + 36
    assert torch.equal(again[0].to_dense(), model[0].to_dense())
    again[0][1].backend = "auto"
    with pytest.raises(KsgenError, match=r"^the layers of a sum differ in their options \([0-9,a-z ]*\); only equal"):
        save_rule(again, tmp_path / "rule.json")


def of_two_backends() -> KSSum:
    layer = KSSum.from_structures(structures.dyad(24, 24, blocks=4))
    layer[1].backend = "strided"
    return layer


UNLIKE = {  # modules that no rule describes
    "unequal layers": lambda: KSLinear.group([KSLinear("2,12,12,1"), KSLinear("2,4,12,1")]),
    "a sum and a layer": lambda: KSLinear.group([KSSum.from_structures(SUMS["one factor each"]), KSLinear(SQUARE)]),
    "two backends": of_two_backends,
    "two biases": lambda: KSSum([KSLinear(SQUARE), KSLinear(SQUARE)]),
}


@pytest.mark.parametrize("change", [convert, adapt])
@pytest.mark.parametrize("make", list(UNLIKE.values()), ids=list(UNLIKE))
def test_other_layers_may_have_no_rule(make: Callable[[], nn.Module], change: Callable[..., Any]) -> None:
    model = nn.ModuleDict({"attention": make(), "up": nn.Linear(24, 24)})
    change(model, {"up": SQUARE})
    assert type(model["up"]) is not nn.Linear
    with pytest.raises(SpecError, match="rule 'attention' names no layer of the model"):
        change(model, {"attention": "1,24,24,1"})


def test_parameters_of_rotations_are_not_factorized() -> None:
    model = nn.Sequential(nn.Linear(24, 24))
    with pytest.raises(LaunchError, match="parameters of gs stand for rotations; accepted: orthogonal=False"):
        convert(model, {"[0]": structures.gs(24, 24, blocks=4)})
    convert(model, {"[0]": structures.gs(24, 24, blocks=4)}, from_weights=False)
    assert torch.equal(model[0].to_dense(), torch.eye(24))


def test_a_specs_group_is_chains_side_by_side() -> None:
    square = [[2, 3, 12, 1], [1, 12, 3, 2]]
    model = blocks()
    convert(model, parse(f"layers: {{qkv: {{group: [{square}, {square}, {square}]}}}}"), from_weights=False)
    assert [type(block.qkv) for block in model["blocks"]] == [KSLinears, KSLinears]
    with pytest.raises(KsgenError, match="layer qkv: the chains of its group differ; accepted: equal ones"):
        convert(blocks(), parse(f"layers: {{qkv: {{group: [{square}, [[1, 24, 24, 1]]]}}}}"), from_weights=False)


def test_a_module_with_two_names_stays_one() -> None:
    shared = nn.Linear(24, 96)
    model = nn.ModuleDict({"first": shared, "second": shared})
    convert(model, {"first": UP, "second": UP})
    assert model["first"] is model["second"]
    with pytest.raises(
        KsgenError, match=r"first\.weight is tied to second\.weight; untie it, or leave first out of the rule"
    ):
        convert(nn.ModuleDict({"first": shared, "second": shared}), {"first": UP})


def tied() -> nn.Module:
    model = nn.ModuleDict({"up": nn.Linear(24, 96), "embedding": nn.Embedding(96, 24)})
    model["up"].weight = model["embedding"].weight
    return model


@pytest.mark.parametrize(
    ("make", "rule", "message"),
    [
        (
            blocks,
            {"up": DOWN},
            "blocks.0.mlp.up takes 24 features and gives 96; 6,4,16,1 then 1,8,8,3 would take 96 and give 24",
        ),
        (
            blocks,
            {"qkv": RuleEntry(SQUARE, 2)},
            "blocks.0.qkv takes 24 features and gives 72; 2 side by side of 2,3,12,1",
        ),
        (
            blocks,
            {"up": UP, "upp": UP},
            "rule 'upp' names no layer of the model; its layers: ['blocks.0.qkv', 'blocks.0.mlp.up'",
        ),
        (blocks, {}, "rule={}; accepted: a mapping of names to chains, or a spec with layers"),
        (blocks, {"up": "6,4,4"}, "'6,4,4' is not a pattern; accepted: whole numbers a,b,c,d"),
        (tied, {"up": UP}, "up.weight is tied to embedding.weight; untie it, or leave up out of the rule"),
        (lambda: nn.Linear(24, 96), {"*": UP}, "the model is a single layer, which cannot be replaced in place"),
        (
            lambda: nn.MultiheadAttention(24, 2),
            {"out_proj": SQUARE},
            "out_proj is a NonDynamicallyQuantizableLinear, which its owner may",
        ),
    ],
)
def test_mistakes_change_nothing(make: Callable[[], nn.Module], rule: Any, message: str) -> None:
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(KsgenError) as caught:
        convert(model, rule)
    assert str(caught.value).startswith(message)
    assert [type(module) for module in model.modules()] == before


def test_with_a_budget_every_layer_gets_a_chain_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "no such device")  # so that nothing is measured
    model = tied_embedding(blocks())
    exact(model["blocks"][0].mlp["up"], UP)
    report = convert(model, budget=0.6)
    assert [layer.name for layer in report.layers] == [
        f"blocks.{n}.{name}" for n in (0, 1) for name in ("qkv", "mlp.up", "mlp.down")
    ]  # fmt: skip
    for layer in report.layers:
        assert layer.flops[1] <= 0.6 * layer.flops[0]
        assert min(layer.relative_errors) < 1
    found = {layer.name: layer for layer in report.layers}
    nearest = propose(24, 96, budget=0.6, weight=torch.randn(96, 24), device="cpu")
    assert found["blocks.1.mlp.up"].chains in [each.chains for each in nearest.looked_at]
    assert isinstance(model["tied"], nn.Linear)
    assert [layer.name for layer in convert(blocks(1), ["up"], budget=0.5, from_weights=False).layers] == [
        "blocks.0.mlp.up"
    ]


def offers(monkeypatch: pytest.MonkeyPatch, dense_us: float | None, *chains: tuple[float | None, float]) -> list[Chain]:
    """Let chains of 24 -> 96 features be offered with these times of a training step and errors.

    Nothing but them decides.
    """
    known = [Chain((Pattern(1, rank, 24, 1), Pattern(1, 96, rank, 1))) for rank in range(1, len(chains) + 1)]
    made = tuple(
        Proposal("", (structures.of_chain(chain),), 1.0, step_us=us)
        for chain, (us, _) in zip(known, chains, strict=True)
    )
    errors = dict(zip(known, (error for _, error in chains), strict=True))
    whole = Proposal("", (structures.of_chain(Chain((Pattern(1, 96, 24, 1),))),), 1.0, step_us=dense_us)
    module = import_module("ksgen.torch.convert")
    monkeypatch.setattr(module, "offers", lambda *_, **__: (whole, *made))
    monkeypatch.setattr(module, "errors_of", lambda weight, forms, advance: [errors[one.chain] for (one,) in forms])
    return known


@pytest.mark.parametrize(
    ("from_weights", "names", "taken"),
    [
        (True, None, "dyad"),
        (False, None, "kronecker"),
        (True, ["kronecker", "low_rank"], "kronecker"),
        (True, ("dyad", "low_rank"), "dyad"),
        (False, {"blast", "low_rank"}, "blast"),
    ],
)
def test_a_budget_gives_blast_and_ties_to_drawn_weights_alone(
    from_weights: bool, names: Any, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families that are named are taken in any case."""
    forms = {
        "kronecker": (structures.kronecker(24, 96, blocks=(4, 3)),),
        "blast": (structures.blast(24, 96, 4, 3),),
        "dyad": structures.dyad(24, 96, blocks=3),
        "low_rank": (structures.low_rank(24, 96, 2),),
    }
    us = {"kronecker": 1.0, "blast": 2.0, "dyad": 2.5, "low_rank": 3.0}

    def offered(*_: Any, structures: Any, budget: float, **__: Any) -> tuple[Proposal, ...]:
        assert budget == (0.9 if names is None else 0.3)
        made = (Proposal(name, form, 1.0, step_us=us[name]) for name, form in forms.items() if name in structures)
        return whole, *made

    whole = Proposal("", (structures.of_chain(Chain((Pattern(1, 96, 24, 1),))),), 1.0, step_us=10.0)
    monkeypatch.setattr(import_module("ksgen.torch.convert"), "offers", offered)
    model = nn.ModuleDict({"up": nn.Linear(24, 96)})
    torch.manual_seed(0)
    sources = {
        "kronecker": torch.kron(torch.randn(4, 3), torch.randn(24, 8)),
        "dyad": KSSum.from_structures(forms["dyad"]).to_dense().detach(),
    }
    if (exactly := taken if names else "kronecker") in sources:
        model["up"].weight.data.copy_(sources[exactly])
    (replaced,) = convert(
        model, from_weights=from_weights, **({"budget": 0.9} if names is None else {"structures": names})
    ).layers
    assert replaced.chains == tuple(each.chain for each in forms[taken])
    counts = {"kronecker": 24 * 8 + 4 * 3, "blast": 408, "dyad": 1536, "low_rank": 240}
    assert sum(each.numel() for each in model["up"].parameters()) - 96 == counts[taken]


@pytest.mark.parametrize(
    ("dense_us", "chains", "taken"),
    [
        (10.0, [(9.0, 0.200), (8.0, 0.205), (1.0, 0.207)], 1),  # of those within 3 %, the fastest training step
        (10.0, [(9.0, 0.2), (9.0, 0.199)], 1),
        (10.0, [(11.0, 0.1), (9.0, 0.2), (8.0, 0.3)], 1),  # a step that is slower than the dense layer's does not count
        (10.0, [(12.0, 0.200), (11.0, 0.205), (10.0, 0.3)], 1),  # unless all are
        (None, [(None, 0.205), (None, 0.2)], 1),  # times are unknown
    ],
)
def test_a_budgets_chain_is_the_fastest_in_training_of_the_nearest(
    dense_us: float | None, chains: list[tuple[float | None, float]], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = offers(monkeypatch, dense_us, *chains)
    (layer,) = convert(blocks(1), ["up"], budget=0.5).layers
    assert layer.chain == known[taken]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_errors_count_if_the_weights_norm_is_beyond_their_type(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = offers(monkeypatch, 10.0, (1.0, 0.3), (9.0, 0.2))
    model = blocks(1).to(dtype)
    model["blocks"][0].mlp["up"].weight.data.fill_(torch.finfo(dtype).max / 2)
    (layer,) = convert(model, ["up"], budget=0.5).layers
    assert layer.chain == known[1]


def test_a_chain_that_is_slower_than_the_dense_layer_is_not_factorized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one shape share the list of chains."""
    known = offers(monkeypatch, 10.0, (11.0, 0.1), (9.0, 0.2), (8.0, 0.3))
    module, asked, shapes = import_module("ksgen.torch.convert"), list[Chain](), list[tuple[int, int]]()
    errors, own = module.errors_of, module.offers

    def noting(weight: Any, forms: list[Any], advance: Callable[[], None]) -> list[float]:
        asked.extend(one.chain for (one,) in forms)
        return errors(weight, forms, advance)

    monkeypatch.setattr(module, "errors_of", noting)
    monkeypatch.setattr(module, "offers", lambda *shape, **options: shapes.append(shape) or own(*shape, **options))
    convert(blocks(2), ["up"], budget=0.5)
    assert asked == known[1:] * 2
    assert shapes == [(24, 96)]


FIRST_CONVERSION = """
import json
import sys

import torch

from ksgen.launch.planner import PLANNER
from ksgen.measure.roofline import Ceilings
from ksgen.torch import convert
from ksgen.torch.conversion import convert as conversion, times

chosen, factorized = [], []
choice, errors_of = PLANNER.choice, conversion.errors_of
times._ceilings = lambda *_: (Ceilings(1e10, 1e11), "")  # nothing is measured
PLANNER.choice = lambda *given: chosen.append(given) or choice(*given)
conversion.errors_of = lambda weight, forms, advance: factorized.extend(forms) or errors_of(weight, forms, advance)
before = set(sys.modules)
convert(torch.nn.Sequential(torch.nn.Linear(384, 384)), budget=0.3)
print(json.dumps([len(chosen), len(factorized), sorted(set(sys.modules) - before)]))
"""


def test_the_first_conversion_of_a_process_does_little(tmp_path: Path) -> None:
    """Counts: kernels whose time is expected, chains that are factorized, imports, and files of compiled kernels."""
    environment = {**os.environ, "KSGEN_DEVICE": "native", "KSGEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CONVERSION], env=environment, capture_output=True, text=True, check=True
    )
    chosen, factorized, modules = json.loads(done.stdout)
    assert 100 < chosen <= 400  # with all fused launches: 439
    assert 10 < factorized <= 25
    assert len(modules) <= 10, modules
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_budget_refuses_weights_that_no_kernel_multiplies() -> None:
    model = blocks(1).to(torch.float8_e4m3fn)
    with pytest.raises(SpecError, match=r"precision='float8_e4m3fn'; .*accepted: float32, float64"):
        convert(model, ["up"], budget=0.5, from_weights=False)


def test_the_bar_counts_chains_and_then_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "no such device")
    bars = list[list[Any]]()

    @contextmanager
    def bar(is_wanted: bool, title: str, total: int) -> Iterator[Callable[[], None]]:
        bars.append([is_wanted, title, total, 0])

        def advance() -> None:
            bars[-1][3] += 1

        yield advance

    monkeypatch.setattr(import_module("ksgen.torch.convert"), "progress_bar", bar)
    convert(blocks(2), ["qkv"], budget=0.5, progress=True)  # one chain, or three
    (_, title, total, done), last = bars
    assert (title, done) == ("choosing chains", total)
    assert total > 2
    assert last == [True, "factorizing", 2, 2]


def test_drawn_chains_are_the_fastest_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    known = offers(monkeypatch, 10.0, (9.0, 0.1), (8.0, 0.3))
    (layer,) = convert(blocks(1), ["up"], budget=0.5, from_weights=False).layers
    assert layer.chain == known[1]


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.up = nn.Linear(24, 96), nn.Linear(24, 96)

    def get_output_embeddings(self) -> nn.Module:
        """Output layer, as in models of transformers."""
        return self.own


def test_heads_embeddings_and_few_outputs_stay_dense_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, 10.0, (9.0, 0.1))
    dense = [
        "head",
        "lm_head",
        "classifier",
        "score",
        "patch_embed",
        "to_patch_embedding",
        "embeddings",
        "fc",
        "classification_head",
    ]
    sparse = ["up", "multi_head", "embedder", "fc1", "c_fc", "heads", "headline", "scores"]
    model = nn.ModuleDict({name: nn.ModuleDict({"1": nn.Linear(24, 96)}) for name in dense[:-2] + sparse})
    model.update({name: nn.Linear(24, 96) for name in dense[-2:]})
    model["few"], model["more"] = nn.Linear(24, 16), nn.Linear(24, 17)
    names = [layer.name for layer in named_by(model, monkeypatch)]
    assert sorted(names) == sorted([*(f"{name}.1" for name in sparse), "more"])
    assert [layer.name for layer in named_by(WithHead(), monkeypatch)] == ["up"]
    assert len(named_by(model, monkeypatch, ["*"])) == len(dense) + len(sparse) + 2


def named_by(model: nn.Module, monkeypatch: pytest.MonkeyPatch, names: list[str] | None = None) -> Any:
    """The layers that `convert` replaces, by cheap chains of their own shapes."""

    def one(columns: int, rows: int, **_: Any) -> tuple[Proposal, ...]:
        chain = Chain((Pattern(1, 1, columns, 1), Pattern(1, rows, 1, 1)))
        made = Proposal("", (structures.of_chain(chain),), 1.0, step_us=1.0)
        return replace(made, step_us=2.0), made

    monkeypatch.setattr(import_module("ksgen.torch.convert"), "offers", one)
    return convert(copy.deepcopy(model), names, budget=0.5, from_weights=False).layers


def test_a_model_of_heads_alone_is_refused() -> None:
    with pytest.raises(
        SpecError, match="heads, embeddings and those with at most 16 outputs; accepted: a list of names"
    ):
        convert(nn.ModuleDict({"head": nn.Linear(24, 96), "few": nn.Linear(24, 4)}), budget=0.5)


@pytest.mark.parametrize(("are_alike", "count"), [(True, 1), (False, 3)])
def test_a_budget_makes_one_chain_or_three_of_q_k_and_v(
    are_alike: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget fits one chain for weights of rank 6 together, and three chains for weights of rank 4 each."""
    monkeypatch.setenv("KSGEN_DEVICE", "no such device")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 72))
    rank = 6 if are_alike else 4
    read = [torch.randn(rank, 24)] * 3 if are_alike else torch.randn(3, rank, 24)
    with torch.no_grad():
        model[0].weight.copy_(torch.cat([torch.randn(24, rank) @ each for each in read]))
    x, before = torch.randn(5, 24), model[0]
    report = convert(model, budget=0.4)
    (layer,) = report.layers
    assert (layer.count, len(layer.relative_errors)) == (count, count)
    assert max(layer.relative_errors) < 1e-5
    assert layer.parameters[1] <= 0.4 * 24 * 72 + 72
    torch.testing.assert_close(model(x), before(x), atol=1e-4, rtol=1e-4)
    assert (" x 3" in str(report)) == (count == 3)


def tied_embedding(model: nn.Module) -> nn.Module:
    model["embedding"], model["tied"] = nn.Embedding(96, 24), nn.Linear(24, 96)
    model["tied"].weight = model["embedding"].weight
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("names", "budget", "message"),
    [
        ({"up": UP}, 0.3, "rule={'up': "),
        ([], 0.3, "rule=[] names no layer of the model; its layers: ['blocks.0.qkv'"),
        (["up", "dwon"], 0.3, "rule 'dwon' names no layer of the model; its layers: ['blocks.0.qkv'"),
        (["up"], 3, "budget=3; accepted: a share of the dense weights"),
        (["head"], 0.01, "budget=0.01: no chain from 24 to 5 features fits it, for head"),
    ],
)
def test_mistakes_with_a_budget_change_nothing(names: Any, budget: float, message: str) -> None:
    model = blocks()
    before = [type(module) for module in model.modules()]
    with pytest.raises(KsgenError) as caught:
        convert(model, names, budget=budget)
    assert str(caught.value).startswith(message)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    "options",
    [
        {"rule": {"qkv": RuleEntry(SQUARE, 3)}},
        {"rule": {"qkv": RuleEntry.of(*SUMS["one factor each"], count=3)}},
        {"rule": ["qkv"], "budget": 0.5},
    ],
    ids=["three chains", "three sums", "budget"],
)
def test_a_number_that_is_not_finite_is_named_with_its_layer_and_row(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "no such device")  # so that nothing is measured
    model = blocks()
    model["blocks"][1].qkv.weight.data[50, 7] = float("nan")
    with pytest.raises(LaunchError, match=r"^blocks\.1\.qkv: weight\[50, 7\]=nan; accepted: finite numbers$"):
        convert(model, **options)
    assert type(model["blocks"][0].qkv) is nn.Linear


def test_a_budgets_chain_may_have_merged_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("ksgen.torch.conversion.convert")

    def proposed(*sizes: int, **options: Any) -> Any:
        """Only the butterflies, which a smaller step of other families would hide."""
        whole, *offered = offers_of(*sizes, **options)
        return (whole, *(each for each in offered if each.family == "square_dyadic"))

    monkeypatch.setattr(module, "offers", proposed)
    lengths = []
    for merged in (False, True):
        model = nn.Sequential(nn.Linear(64, 64))
        (layer,) = convert(model, ["0"], budget=0.45, merge=merged, from_weights=False).layers
        assert layer.chain.weight_count <= 0.45 * 64**2
        lengths.append(len(layer.chain))
    assert lengths[1] < lengths[0] == 6
    with pytest.raises(SpecError, match="merge=True without a budget; accepted: merge=True with a budget"):
        convert(nn.Sequential(nn.Linear(64, 64)), {"0": "2,32,32,1"}, merge=True)
