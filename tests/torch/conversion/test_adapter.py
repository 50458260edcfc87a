"""Adapters: they begin as nothing, train alone, and merge into the dense layers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import nn  # noqa: E402  (after the skip)

from ksgen.errors import SpecError  # noqa: E402
from ksgen.pattern import Chain, Pattern  # noqa: E402
from ksgen.torch import KSLinear, convert  # noqa: E402
from ksgen.torch.conversion.adapter import KSAdapter, adapt, merge  # noqa: E402
from ksgen.torch.conversion.rule import RuleEntry  # noqa: E402

UP, SQUARE = [(6, 4, 4, 1), (1, 48, 12, 2)], Chain((Pattern(2, 3, 12, 1), Pattern(1, 12, 3, 2)))  # 24 -> 96, 24 -> 24


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
