"""Models with weights in eight bits: which layers are replaced, what the report says, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from ksgen.errors import KsgenError, SpecError
from ksgen.torch import KSLinear, quantize
from ksgen.torch.layer.linear import QuantizedKSLinear
from tests.support.native import chosen_native

CHAIN = [(3, 8, 16, 1), (2, 6, 4, 3)]  # 48 -> 24 -> 36
DTYPES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    torch.manual_seed(0)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def model_of() -> nn.Sequential:
    group = KSLinear.group([KSLinear([(6, 8, 6, 1)]), KSLinear([(1, 8, 6, 6)])])
    return nn.Sequential(KSLinear(CHAIN, activation="gelu"), nn.LayerNorm(36), group)


def test_a_model_in_bfloat16() -> None:
    model, x = model_of(), torch.randn(10, 48)
    with torch.no_grad():
        wanted = model(x)
        report = quantize(model, "bfloat16")
        assert relative(model(x), wanted) < 1e-2
    assert "in bfloat16, no scales" in str(report)
    assert report.bytes[1] == report.bytes[0] // 2 + 4 * 4


def test_a_models_layers_are_replaced_and_groups_go_on() -> None:
    model, x = model_of(), torch.randn(10, 48)  # too few for one launch of a group, which would be timed
    with torch.no_grad():
        wanted = model(x)
        report = quantize(model, "int8", inputs=x)
        assert relative(model(x), wanted) < 0.02
        torch.testing.assert_close(torch.cat(model[2].parts(model[1](model[0](x))), -1), model(x))
    assert [each.name for each in report.layers] == ["0", "2.0", "2.1"]
    assert all(isinstance(model.get_submodule(each.name), QuantizedKSLinear) for each in report.layers)
    assert report.bytes[1] < report.bytes[0] / 2
    assert all(0 < each.error < 0.02 for each in report.layers)
    assert "error of y" in str(report)
    assert str(report).endswith(
        f"3 layers in int8, a scale per output: {report.bytes[0]:,} bytes became {report.bytes[1]:,}."
    )
    assert (
        repr(report)
        == f"QuantizedReport(3 layers in int8, {report.bytes[0]:,} bytes before and {report.bytes[1]:,} after)"
    )
    assert "1. 6,8,6,1: int8 weights" in model[2].explain(1)


def test_layers_with_several_names_and_modules_that_do_not_train_stay_so() -> None:
    shared = KSLinear([(6, 6, 6, 1)])
    model = nn.Sequential(shared, nn.Dropout(), shared)
    model[1].eval()
    assert [each.name for each in quantize(model, "int8", inputs=torch.randn(2, 36)).layers] == ["0"]
    assert model[0] is model[2]
    assert isinstance(model[2], QuantizedKSLinear)
    assert (model.training, model[1].training, model[2].training) == (True, False, True)


def test_names_say_which_layers() -> None:
    model = model_of()
    report = quantize(model, "e4m3", "factor", names=["2.*"])
    assert [each.name for each in report.layers] == ["2.0", "2.1"]
    assert not isinstance(model[0], QuantizedKSLinear)
    assert "error of K" in str(report)
    for options, message in (
        ({"names": ["up"]}, r"names=\['up'\] name no KSLinear of the model; its layers: \['0'\]"),
        ({"names": ["0", "up"]}, r"names=\['up'\] name no KSLinear of the model; its layers: \['0'\]"),
        ({"names": 3}, "names=3; accepted: a list"),
        ({"names": "20"}, "names='20'; accepted: a list"),
    ):
        with pytest.raises(SpecError, match=message):
            quantize(model, "int8", **options)
    with pytest.raises(
        SpecError, match=r"the model is a single layer, which cannot be replaced in place; use KSLinear\.quantize"
    ):
        quantize(KSLinear(CHAIN), "int8")
    with pytest.raises(SpecError, match=r"model='model'; accepted: a torch\.nn\.Module"):
        quantize("model", "int8")


def test_nothing_is_changed_where_inputs_miss_a_layer() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.met, self.missed = KSLinear(CHAIN), KSLinear(CHAIN)

        def forward(self, x: Tensor) -> Tensor:
            return self.met(x=x)

    model = Half()
    with pytest.raises(SpecError, match="inputs do not reach missed; accepted: inputs that reach every layer"):
        quantize(model, "int8", inputs=torch.randn(2, 48))
    assert not model.met.has_stored_type
    assert not model.met._forward_pre_hooks
    assert quantize(model, "int8", names=["met"], inputs=[torch.randn(2, 48)]).layers[0].name == "met"


@pytest.mark.parametrize(
    ("storage", "inputs", "message"),
    [
        (
            "bfloat16",
            torch.ones(2, 48),
            "inputs were given with storage=bfloat16, which has no scales; accepted: a model without inputs",
        ),
        (
            "int8",
            torch.full((2, 48), torch.nan),
            "layer 0: x holds numbers that are not finite; accepted: finite inputs",
        ),
    ],
)
def test_wrong_inputs_of_a_model_are_reported_in_the_users_words(storage: str, inputs: Tensor, message: str) -> None:
    model = nn.Sequential(KSLinear(CHAIN))
    with pytest.raises(KsgenError, match=f"^{message}$"):
        quantize(model, storage, inputs=inputs)
    assert not isinstance(model[0], QuantizedKSLinear)
