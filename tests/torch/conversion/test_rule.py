"""Tests of a model's rule: describe it, save it with the weights, read it, and get equal outputs in a new process."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import nn  # noqa: E402  (after the skip)

from ksgen.errors import KsgenError, SpecError  # noqa: E402
from ksgen.pattern import Chain, Pattern  # noqa: E402
from ksgen.torch import KSLinear, KSSum, convert, save_rule  # noqa: E402
from ksgen.torch.conversion.rule import RuleEntry, exactly, load_rule, rule_of  # noqa: E402
from ksgen.torch.layer.group import KSLinears  # noqa: E402

UP, SQUARE = Chain((Pattern(6, 4, 4, 1), Pattern(1, 48, 12, 2))), Chain((Pattern(2, 3, 12, 1), Pattern(1, 12, 3, 2)))
ROOT = Path(__file__).parents[3]
MAKE = """
import torch
from torch import nn
def dense():
    return nn.Sequential(nn.Linear(24, 72), nn.Linear(72, 24), nn.Sequential(nn.Linear(24, 96), nn.Linear(96, 5)))
"""
names: dict[str, Any] = {}
exec(MAKE, names)
dense = names["dense"]


def converted(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = dense()
    convert(model, {"[0]": RuleEntry(SQUARE, 3)}, from_weights=False, **options)
    convert(model, {"2.0": UP}, from_weights=False, backend="einsum", activation="gelu")
    return model


def test_what_a_rule_says(tmp_path: Path) -> None:
    model = converted()
    assert rule_of(model) == {
        "0": RuleEntry(SQUARE, 3),
        "2.0": RuleEntry(UP, 1, {"backend": "einsum", "activation": "gelu"}),
    }
    save_rule(model, tmp_path / "rule.json")
    assert json.loads((tmp_path / "rule.json").read_text()) == {
        "layers": {
            "0": {"chain": ["2,3,12,1", "1,12,3,2"], "count": 3},
            "2.0": {"chain": ["6,4,4,1", "1,48,12,2"], "backend": "einsum", "activation": "gelu"},
        }
    }
    assert load_rule(tmp_path / "rule.json") == exactly(rule_of(model))


def test_names_are_whole_names(tmp_path: Path) -> None:
    """`0` is no layer of the model inside."""
    model = converted()
    save_rule(model, tmp_path / "rule.json")
    again = dense()
    report = convert(again, tmp_path / "rule.json", from_weights=False)
    assert [layer.name for layer in report.layers] == ["0", "2.0"]
    assert isinstance(again[0], KSLinears)
    assert (again[2][0].backend, again[2][0].activation) == ("einsum", "gelu")
    again.load_state_dict(model.state_dict())
    x = torch.randn(5, 24)
    model(x)  # the first call of a process at a shape may differ in its last bits from later ones
    assert again(x).equal(model(x))


def test_layers_that_are_there_already_stay(tmp_path: Path) -> None:
    model = converted()
    save_rule(model, tmp_path / "rule.json")
    before = list(model.modules())
    assert "0 layers replaced" in str(convert(model, tmp_path / "rule.json", from_weights=False))
    assert list(model.modules()) == before
    with pytest.raises(SpecError, match=r"rule '\[0\]' names no layer of the model"):
        convert(model, {"[0]": UP}, from_weights=False)


FRESH = (
    MAKE
    + """
import sys
from importlib.util import find_spec
from ksgen.torch import convert
folder, *kinds = sys.argv[1:]
x, y = torch.load(folder + "/xy.pt")
for kind in kinds:
    if kind == "whole":
        model = torch.load(folder + "/model.pt", weights_only=False)
    else:
        model = dense()
        convert(model, folder + "/rule.json", from_weights=False)
        if kind == "safetensors":
            from safetensors.torch import load_model
            load_model(model, folder + "/model.safetensors")
        else:
            model.load_state_dict(torch.load(folder + "/state.pt"))
    model(x)  # the first call of a process at a shape may differ in its last bits from later ones
    print(kind, model(x).equal(y))
"""
)


def test_a_fresh_process_gives_the_same_back(tmp_path: Path) -> None:
    # not "auto": two processes may time backends differently, whose last bits differ
    model, x, kinds = converted(backend="einsum"), torch.randn(5, 24), ["whole", "state"]
    if find_spec("safetensors"):  # pip install -e '.[interop]'
        from safetensors.torch import save_model

        save_model(model, tmp_path / "model.safetensors")
        kinds.append("safetensors")
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model(x)
    torch.save((x, model(x).detach()), tmp_path / "xy.pt")
    save_rule(model, tmp_path / "rule.json")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path), *kinds], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout.splitlines(), done.returncode) == ([f"{kind} True" for kind in kinds], 0), done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"rule\.json: cannot be read as a rule \(Expecting"),
        ("[]", r"rule\.json: \[\] is not a rule; accepted: what save_rule writes"),
        (
            '{"layers": {"0": {"count": 2}}}',
            r"rule\.json: 0 is {'count': 2}; accepted: chain, and perhaps count, layout, precision",
        ),
        ('{"layers": {"0": {"chain": ["6,4,4"]}}}', r"rule\.json: 0: '6,4,4' is not a pattern"),
        ('{"layers": {"0": {"chain": []}}}', r"rule\.json: 0: factors=\[\]; accepted: one Pattern or more"),
        (
            '{"layers": {"0": {"chain": ["6,4,4,1"], "count": 0}}}',
            r"rule\.json: 0: count=0; accepted: a whole number of at least 1",
        ),
        ('{"layers": {"0": {"chain": ["6,4,4,1"], "sum": []}}}', "a sum has sum in place of chain"),
        ('{"layers": {"0": {"sum": []}}}', r"rule\.json: 0: sum=\[\]; accepted: a list of chains"),
        ('{"layers": {"0": {"sum": 5}}}', r"rule\.json: 0: sum=5; accepted: a list of chains"),
        (
            '{"layers": {"0": {"sum": [["6,4,4,1"], ["6,4,4,1"]], "count": 0}}}',
            r"rule\.json: 0: count=0; accepted: a whole number of at least 1",
        ),
        (
            '{"layers": {"0": {"sum": [["6,4,4,1"], ["6,4,3,1"]]}}}',
            "6,4,4,1 plus 6,4,3,1 have other features; accepted: a sum of chains with equal features",
        ),
    ],
)
def test_what_is_no_rule_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rule.json").write_text(content)
    with pytest.raises(SpecError, match=message):
        convert(dense(), tmp_path / "rule.json")


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"the Sequential has no KSLinear in it, so that there is no rule to save"):
        save_rule(dense(), tmp_path / "rule.json")
    with pytest.raises(SpecError, match=r"rule\.yaml; accepted: a name that ends in \.json"):
        save_rule(converted(), tmp_path / "rule.yaml")
    with pytest.raises(KsgenError, match="cannot be read as a rule"):
        convert(dense(), tmp_path / "nothing.json")
    mixed = nn.Sequential(KSLinears([KSLinear(SQUARE), KSLinear(SQUARE, layout="bsl")]))
    with pytest.raises(SpecError, match="the layers side by side differ"):
        save_rule(mixed, tmp_path / "rule.json")
    pair = KSSum([KSLinear(SQUARE), KSLinear(SQUARE, bias=False)])
    mixed = nn.Sequential(KSLinears([pair, KSLinear(SQUARE)]))
    message = r"the layers side by side differ \(2,3,12,1 then 1,12,3,2 plus 2,3,12,1 then 1,12,3,2, 2,3,12,1 then"
    with pytest.raises(SpecError, match=message):
        save_rule(mixed, tmp_path / "rule.json")
    assert rule_of(nn.Sequential(KSLinears([KSLinears([KSLinear(SQUARE)])]), KSLinears([nn.Linear(3, 4)]))) == {}


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_biases_are_saved_or_refused(is_group: bool, biases: tuple[bool, bool], tmp_path: Path) -> None:
    """`convert` gives a bias to the first layer of a sum, and to all layers of a group or to none."""
    layer = (KSLinears if is_group else KSSum)([KSLinear("1,24,24,1", bias=bias) for bias in biases])
    model, again = nn.Sequential(layer), nn.Sequential(nn.Linear(24, 24 * (1 + is_group), bias=biases[0]))
    if biases[1] if not is_group else biases[0] != biases[1]:
        text = "1,24,24,1, 1,24,24,1" if is_group else "1,24,24,1 plus 1,24,24,1"
        with pytest.raises(SpecError) as caught:
            save_rule(model, tmp_path / "rule.json")
        assert str(caught.value) == (
            f"some layers side by side have no bias ({text}); only a bias of all or none can be saved"
            if is_group
            else f"a later layer of a sum has a bias ({text}); only a bias of the first one can be saved"
        )
        return
    save_rule(model, tmp_path / "rule.json")
    convert(again, tmp_path / "rule.json", from_weights=False)
    again.load_state_dict(model.state_dict())


def test_side_by_side_is_once_at_least() -> None:
    with pytest.raises(KsgenError, match="count=0; accepted: a whole number of at least 1"):
        RuleEntry(SQUARE, 0)
