"""Layers of structured matrices take their authors' checkpoints, and compute what their authors' layers do."""

import re
from pathlib import Path

import pytest

from ksgen import structures
from ksgen.errors import LaunchError
from tests.support.libraries import library
from tests.support.native import chosen_native

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.torch import KSLinear, KSSum  # noqa: E402  (PyTorch may be missing)

PAGE = Path(__file__).parents[3] / "docs" / "structures.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_page_run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    exec(EXAMPLES[number], {})


def test_a_checkpoint_becomes_a_layer_and_comes_back() -> None:
    torch.manual_seed(0)
    structure = structures.blast(24, 20, blocks=(5, 3), rank=7)
    state = {name: torch.randn(shape) for name, shape in structure.shapes.items()} | {"bias": torch.randn(20)}
    layer = KSLinear.from_structure(structure, state)
    x = torch.randn(2, 33, 24, requires_grad=True)
    inner = torch.einsum("...jq,jrq->...jr", x.unflatten(-1, (3, 8)), state["C"])
    mixed = torch.einsum("...jr,ijr->...ir", inner, state["D"])
    truth = torch.einsum("...ir,ipr->...ip", mixed, state["B"]).flatten(-2) + state["bias"]
    torch.testing.assert_close(layer(x), truth, rtol=1e-4, atol=1e-4)
    back = structure.to_state([weight.detach() for weight in layer.weights])
    assert all(torch.equal(back[name], state[name]) for name in structure.shapes)
    layer(x).square().sum().backward()
    truth_gradient = torch.autograd.grad(truth.square().sum(), x)[0]
    torch.testing.assert_close(x.grad, truth_gradient, rtol=1e-3, atol=1e-3)


def test_without_a_checkpoint_weights_are_drawn() -> None:
    structure = structures.monarch(24, 12, blocks=3)
    layer = KSLinear.from_structure(structure, bias=False, dtype=torch.float64)
    assert [tuple(each.shape) for each in layer.weights] == [each.shape for each in structure.chain]
    assert layer.bias is None
    assert layer.weights[0].dtype == torch.float64
    assert {name: tuple(each.shape) for name, each in structure.to_state(layer.weights).items()} == structure.shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_gsoft_becomes_rotations(dtype: torch.dtype) -> None:
    structure = structures.gs(24, 24, blocks=4)
    first = KSLinear.from_structure(structure, dtype=dtype)
    assert torch.equal(first.to_dense(), torch.eye(24, dtype=dtype)), "as its authors initialize it"
    state = {name: torch.randn(shape).to(dtype) for name, shape in structure.shapes.items()}
    layer = KSLinear.from_structure(structure, state)
    assert layer.weights[0].dtype == dtype
    identity = torch.eye(6, dtype=torch.float64)
    skews = [(each.double() - each.double().mT) / 2 for each in state.values()]
    right, left = (torch.linalg.solve(identity - each, identity + each) for each in skews)
    x = torch.randn(5, 24).to(dtype)
    inner = torch.einsum("kqp,bkp->bkq", right, x.double().unflatten(1, (4, 6))).flatten(1)
    wanted = torch.einsum("lsr,brl->bsl", left, inner.unflatten(1, (6, 4))).flatten(1)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(layer(x).double(), wanted, rtol=tolerance, atol=tolerance)
    again = structure.from_state(structure.to_state(each.detach() for each in layer.weights))
    for weights, each in zip(again, layer.weights, strict=True):
        torch.testing.assert_close(weights, each.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "structure", [structures.oft(24, block=6), structures.boft(24, block=6, factors=3)], ids=["oft", "boft"]
)
def test_adapters_that_rotate_begin_as_the_identity(structure: structures.Structure) -> None:
    assert torch.equal(KSLinear.from_structure(structure).to_dense(), torch.eye(24))
    assert not torch.allclose(KSLinear.from_structure(structure, init="uniform").to_dense(), torch.eye(24))


def test_drawn_weights_have_the_structures_scales() -> None:
    torch.manual_seed(0)
    butterfly = structures.butterfly(512)
    for weights in KSLinear.from_structure(butterfly).weights:
        assert float(weights.detach().std()) == pytest.approx(2**-0.5, rel=0.1)
    layer = KSLinear.from_structure(structures.gralora(24, 15, blocks=3, rank=6), device="meta").to_empty(device="cpu")
    for _ in range(2):
        layer.reset_parameters()
        first, second = layer.weights
        assert not second.detach().any()
        assert float(first.detach().abs().max()) == pytest.approx(8**-0.5, rel=0.1)
        torch.nn.init.ones_(second)


def test_a_bias_has_the_name_and_shape_of_its_authors() -> None:
    structure = structures.btt(24, 20, blocks=(5, 3), rank=2)
    own = {name: torch.randn(shape) for name, shape in structure.shapes.items()}
    state = {"op_params.0": own["W1"], "op_params.1": own["W2"], "b": torch.randn(20)}
    wanted = KSLinear.from_structure(structure, {**own, "bias": state["b"]})
    layer = KSLinear.from_structure(structure, state)
    assert all(map(torch.equal, layer.parameters(), wanted.parameters()))
    for wrong in ({**own, "b": state["b"]}, {**state, "bias": state["b"]}):
        with pytest.raises(LaunchError, match=r"btt: got .*b.*; W1, W2 are needed, or op_params.0, op_params.1"):
            KSLinear.from_structure(structure, wrong)
    pair = structures.dyad(24, 20, blocks=4)
    parameters = {name: torch.randn(shape) for each in pair for name, shape in each.shapes.items()}
    column = torch.randn(20, 1)
    total, x = KSSum.from_structures(pair, {**parameters, "bias": column}), torch.randn(3, 24)
    wanted_sum = KSSum.from_structures(pair, {**parameters, "bias": column[:, 0]})
    total(x)  # the first call of a process at a shape may differ in its last bits from later ones
    assert torch.equal(total(x), wanted_sum(x))
    for shape in ((20, 2), (1, 20), (19, 1)):
        with pytest.raises(LaunchError, match=r"got bias of shape .*; \(20,\) is needed"):
            KSSum.from_structures(pair, {**parameters, "bias": torch.zeros(shape)})
    with pytest.raises(LaunchError, match=r"got bias of shape \(20, 1\); \(20,\) is needed"):
        KSLinear.from_structure(structure, {**own, "bias": column})  # only DYAD's is a column
    mixed = KSSum.from_structures(
        [structure, structures.low_rank(24, 20, 2)],
        {**state, "lora_A.weight": torch.ones(2, 24), "lora_B.weight": torch.ones(20, 2)},
    )
    torch.testing.assert_close(mixed(x), layer(x) + 2 * x.sum(1, keepdim=True), rtol=1e-4, atol=1e-4)


def test_a_wrong_checkpoint_is_refused() -> None:
    structure = structures.low_rank(8, 6, rank=2)
    state = {"A": torch.zeros(2, 8), "B": torch.zeros(6, 2)}
    with pytest.raises(LaunchError, match=r"low_rank: got A; A, B are needed"):
        KSLinear.from_structure(structure, {"A": state["A"]})
    for bias, given in ((True, {}), (False, {"bias": torch.zeros(6)})):
        message = f"bias={bias} and a state with(out)? 'bias'; accepted: bias=None, or a state that agrees"
        with pytest.raises(LaunchError, match=message):
            KSLinear.from_structure(structure, {**state, **given}, bias=bias)
        assert (KSLinear.from_structure(structure, {**state, **given}, bias=not bias).bias is None) == bias
    with pytest.raises(LaunchError, match=r"got bias of shape \(8,\); \(6,\) is needed"):
        KSLinear.from_structure(structure, {**state, "bias": torch.zeros(8)})
    for no_mapping in (list(state.values()), list(state)):
        accepted = "; accepted: a mapping of names to arrays or tensors$"
        with pytest.raises(LaunchError, match=rf"^KSLinear\.from_structure: state=.*{accepted}"):
            KSLinear.from_structure(structure, no_mapping)  # type: ignore[arg-type]
        with pytest.raises(LaunchError, match=rf"^KSSum: state=.*{accepted}"):
            KSSum.from_structures([structure], no_mapping)  # type: ignore[arg-type]
    assert KSLinear.from_structure(structure, torch.nn.ParameterDict(state)).in_features == 8
