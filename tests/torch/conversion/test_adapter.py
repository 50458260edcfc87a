"""Adapters: they begin as nothing, train alone, and merge into the dense layers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import nn  # noqa: E402  (after the skip)
from torch.nn.utils import prune  # noqa: E402

from ksgen import structures  # noqa: E402
from ksgen.errors import KsgenError, SpecError  # noqa: E402
from ksgen.pattern import Chain, Pattern  # noqa: E402
from ksgen.torch import KSLinear, convert, save_rule  # noqa: E402
from ksgen.torch.conversion.adapter import KSAdapter, adapt, merge  # noqa: E402
from ksgen.torch.conversion.rule import RuleEntry  # noqa: E402
from tests.torch.conversion.test_convert import Conv1D  # noqa: E402

UP, SQUARE = [(6, 4, 4, 1), (1, 48, 12, 2)], Chain((Pattern(2, 3, 12, 1), Pattern(1, 12, 3, 2)))  # 24 -> 96, 24 -> 24
PAIR = structures.dyad(24, 24, blocks=4)


def model_of() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 24), nn.Linear(24, 96, bias=False))


RULE = {"[0]": RuleEntry(SQUARE, 3), "[3]": UP}


def test_adapters_begin_as_nothing_train_alone_and_merge() -> None:
    model, x = model_of(), torch.randn(5, 24)
    dense = [each.clone() for each in model.parameters()]
    before = model(x)
    assert adapt(model, RULE) == ["0", "3"]
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [f"0.adapter.{part}.weights.{number}" for part in range(3) for number in range(2)] + [
        "3.adapter.weights.0", "3.adapter.weights.1"
    ]  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    after = model(x)
    torch.testing.assert_close(nn.functional.linear(x, model[0].weight, model[0].bias), model[0](x))
    assert merge(model) == ["0", "3"]
    assert [type(each) for each in model] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    torch.testing.assert_close(model(x), after)
    assert model[2].weight.equal(dense[2])
    assert not model[0].weight.equal(dense[0])


@pytest.mark.parametrize("change", [convert, adapt])
def test_a_weight_that_a_hook_computes_is_refused(change: Any) -> None:
    model = nn.Sequential(nn.Linear(24, 72), prune.l1_unstructured(nn.Linear(72, 96), "weight", 0.5))
    with torch.no_grad():
        model[1].weight_orig.mul_(2)  # `weight` is that of before until the next call
    with pytest.raises(SpecError, match=r"^1\.weight is computed by a hook at .*; accepted: a parameter"):
        change(model, {"1": "1,96,72,1"})
    assert type(model[1]) is nn.Linear
    prune.remove(model[1], "weight")
    change(model, {"1": "1,96,72,1"})
    assert type(model[1]) is not nn.Linear


def test_without_names_a_weight_that_a_hook_computes_stays() -> None:
    model = nn.Sequential(nn.Linear(64, 64), prune.l1_unstructured(nn.Linear(64, 64), "weight", 0.5))
    convert(model, budget=0.5, from_weights=False)
    assert [type(each) for each in model] == [KSLinear, nn.Linear]


def test_an_adapter_is_like_the_layer_it_adapts() -> None:
    linear = nn.Linear(24, 24).double().eval()
    adapter = KSAdapter(linear, RuleEntry(SQUARE), backend="einsum")
    assert (adapter.in_features, adapter.out_features, adapter.weight.dtype, adapter.training) == (
        24,
        24,
        torch.float64,
        False,
    )
    assert (adapter.bias is linear.bias, adapter.adapter.backend, adapter.adapter.weights[0].dtype) == (
        True,
        "einsum",
        torch.float64,
    )


def test_a_tied_layer_may_be_adapted_and_no_other_mistake_changes_anything() -> None:
    model = nn.ModuleDict({"up": nn.Linear(24, 96), "embedding": nn.Embedding(96, 24)})
    model["up"].weight = model["embedding"].weight
    with pytest.raises(SpecError, match="tied"):
        convert(model, {"up": UP})
    with pytest.raises(SpecError, match="up takes 24 features and gives 96"):
        adapt(model, {"up": SQUARE})
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert adapt(model, {"up": UP}) == ["up"]
    assert model["up"].base.weight is model["embedding"].weight


@pytest.mark.parametrize(("rule", "rows"), [(UP, 96), (SQUARE, 24), (structures.dyad(24, 96, blocks=4), 96)])
def test_conv1d_of_transformers_stays_one(rule: Any, rows: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Conv1D(nf=rows, nx=24)).double().eval(), torch.randn(5, 24).double()
    names, before = list(model.state_dict()), model[0].weight.detach().clone()
    adapt(model, {"[0]": rule})
    for parameter in model[0].adapter.parameters():
        nn.init.normal_(parameter)
    assert (model[0].in_features, model[0].out_features) == (24, rows)
    wanted = model(x)
    torch.testing.assert_close(nn.functional.linear(x, model[0].weight, model[0].bias), wanted)
    base = model[0].base
    assert merge(model) == ["0"]
    assert (type(model[0]), model[0].nf, model[0].training, list(model.state_dict())) == (Conv1D, rows, False, names)
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(model(x), wanted)
    assert base.weight.equal(before)


@pytest.mark.parametrize(
    "rule",
    [SQUARE, PAIR, RuleEntry(SQUARE, 2), RuleEntry.of(*PAIR, count=2)],
    ids=["chain", "sum", "group", "group of sums"],
)
@pytest.mark.parametrize("is_saved", [False, True])
def test_an_activation_of_an_adapter_is_refused(rule: Any, is_saved: bool, tmp_path: Any) -> None:
    """A sum would apply the activation to the output of the base, too, and a merge would lose it."""
    rows = 48 if isinstance(rule, RuleEntry) else 24
    model, options = nn.Sequential(nn.Linear(24, rows)), {"activation": "relu"}
    given: Any = {"[0]": rule}
    if is_saved:
        sparse = nn.Sequential(nn.Linear(24, rows))
        convert(sparse, given, from_weights=False)
        for each in sparse[0] if rows == 48 else sparse:
            each.activation = "relu"
        save_rule(sparse, tmp_path / "rule.json")
        given, options = tmp_path / "rule.json", {}
    with pytest.raises(SpecError) as caught:
        adapt(model, given, **options)
    message = "activation='relu' of an adapter; accepted: 'none', because `merge` adds matrices"
    assert str(caught.value) == message
    assert (type(model[0]), model[0].weight.requires_grad) == (nn.Linear, True)
    assert adapt(model, given, activation="none") == ["0"]


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"between": "relu"}, "'none', because `merge` adds matrices"),
        ({"layout": "bsl"}, "'bsf', the layout of x and y of the base"),
        ({"out_layout": "bsl"}, "'bsf', the layout of x and y of the base"),
    ],
)
def test_other_layouts_and_activations_of_an_adapter_are_refused(options: dict[str, str], accepted: str) -> None:
    """An adapter in batch-size-last would multiply the columns of a square x."""
    model, ((name, value),) = nn.Sequential(nn.Linear(24, 24)), options.items()
    with pytest.raises(SpecError) as caught:
        adapt(model, {"[0]": SQUARE}, **options)
    assert str(caught.value) == f"{name}={value!r} of an adapter; accepted: {accepted}"
    assert type(model[0]) is nn.Linear
    assert adapt(model, {"[0]": SQUARE}, out_layout="bsf") == ["0"]


@pytest.mark.parametrize("options", [{"backend": "nonsense"}, {"activation": "relu"}, {"between": "relu"}], ids=str)
def test_a_failure_freezes_nothing(options: dict[str, str]) -> None:
    model = nn.ModuleDict({"a": nn.Linear(24, 24), "b": nn.Linear(24, 24)})
    with pytest.raises(KsgenError):
        adapt(model, {"a": SQUARE, "b": "1,24,24,1"}, **options)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [type(each) for each in model.values()] == [nn.Linear, nn.Linear]


@pytest.mark.parametrize("key", ["up", "*.base", "up.base"])
def test_the_base_of_an_adapter_is_not_adapted_again(key: str) -> None:
    model = nn.ModuleDict({"up": nn.Linear(24, 24), "down": nn.Linear(24, 24)})
    names = list(model.state_dict())
    adapt(model, {"up": SQUARE})
    with pytest.raises(SpecError, match=r"^up\.base is the base of an adapter; `merge` the model first, or leave it"):
        adapt(model, {key: SQUARE, "down": SQUARE})
    assert adapt(model, {"down": SQUARE}) == ["down"]
    assert merge(model) == ["up", "down"]
    assert list(model.state_dict()) == names


# ---- PEFT's adapters on KSLinear


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": "all-linear"}], ids=str)
def test_lora_on_chains(options: dict[str, Any], tmp_path: Any) -> None:
    peft = pytest.importorskip("peft", reason="pip install -e '.[interop]'")

    def make() -> nn.Module:
        model = model_of()
        convert(model, {"[3]": UP}, from_weights=False)
        return model

    torch.manual_seed(1)
    model, x = make(), torch.randn(5, 24)
    before = model(x)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["3"], "r": 4} | options))
    torch.testing.assert_close(adapted(x), before)
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(x).square().mean().backward()
        optimizer.step()
    assert not torch.allclose(adapted(x), before)
    layer = adapted.base_model.model[3].get_base_layer()
    assert isinstance(layer, KSLinear)
    adapted.save_pretrained(tmp_path)
    fresh = make()
    fresh.load_state_dict(state)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(fresh, tmp_path)(x), adapted(x))
    with pytest.raises(RuntimeError, match="would write to weight, which is the product of the factors"):
        adapted.merge_and_unload()
