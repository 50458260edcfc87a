"""Tied weights: the parameter is one slice of them, and its gradient is the sum over all slices."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ksgen import structures
from ksgen.errors import LaunchError
from ksgen.pattern import Chain
from ksgen.torch import KSLinear, Tied, freeze
from ksgen.torch.operators import prepared, trained

B_FIRST, A_FIRST = structures.kronecker(24, 20, (5, 3)), structures.kronecker(24, 20, (2, 4))
SQUARE = structures.kronecker(16, 16, 4)


def drawn(structure: Any = B_FIRST, **options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear.from_structure(structure, **options)


def parts(layer: KSLinear) -> dict[str, Tensor]:
    """Parameters A and B of a Kronecker product in float64, as leaves."""
    names = ("B", "A") if layer.chain == B_FIRST.chain else ("A", "B")
    found = zip(names, layer.weights.parameters(), strict=True)
    return {name: each.detach().double().flatten(0, 1).squeeze(-1).clone().requires_grad_() for name, each in found}


def untied(layer: KSLinear) -> KSLinear:
    for name in list(layer.weights.parametrizations):
        parametrize.remove_parametrizations(layer.weights, name)
    return layer


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("structure", [B_FIRST, A_FIRST], ids=["B first", "A first"])
def test_values_and_gradients_are_those_of_the_kronecker_product(structure: Any, layout: Any, dtype: Any) -> None:
    layer = drawn(structure, layout=layout, dtype=dtype)
    x = torch.randn((33, 24) if layout == "bsf" else (24, 33)).to(dtype).requires_grad_()
    own, rows, bias = parts(layer), x.detach().double(), layer.bias.detach().double()
    rows = (rows if layout == "bsf" else rows.t()).requires_grad_()
    wanted = rows @ torch.kron(own["A"], own["B"]).t() + bias
    dy = torch.randn_like(wanted).to(dtype).double()
    gradients = torch.autograd.grad(wanted, [rows, *own.values()], dy)
    error = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.15}

    def check(y: Tensor) -> None:
        torch.testing.assert_close((y if layout == "bsf" else y.t()).double(), wanted.detach(), **error)

    for _ in range(3):  # the usual path, and a prepared step where there is one
        check(y := layer(x))
        found = torch.autograd.grad(y, [x, *layer.weights.parameters()], (dy if layout == "bsf" else dy.t()).to(dtype))
        of_x, *of_parts = gradients
        torch.testing.assert_close((found[0] if layout == "bsf" else found[0].t()).double(), of_x, **error)
        for each, truth in zip(found[1:], of_parts, strict=True):
            torch.testing.assert_close(each.double().reshape(truth.shape), truth, **error)
    for each in (layer, untied(layer)):
        each.eval().freeze()
        with torch.no_grad():
            for _ in range(3):
                check(each(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize(
    ("rows", "has_bias", "fastest"),
    [(33, True, "ksgen"), (33, False, "ksgen"), (33, False, "bmm"), (1, False, "ksgen")],
    ids=["repeated", "folded", "folded by PyTorch", "row"],
)
def test_values_and_gradients_of_weights_that_are_equal_along_both_axes(
    rows: int, has_bias: bool, fastest: str, layout: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "faster", lambda job, ways: fastest)
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "slices" if "slices" in ways else next(iter(ways)))
    structure = structures.of_chain(Chain(["2,12,12,1", "3,5,4,2"]), ("", "ad"))
    layer = drawn(structure, layout=layout, dtype=dtype, bias=has_bias)
    assert [tuple(each.shape) for each in layer.weights.parameters()] == [(2, 12, 12, 1), (1, 5, 4, 1)]
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer
    x = torch.randn((rows, 24) if layout == "bsf" else (24, rows)).to(dtype).requires_grad_()
    x_wide = (x if layout == "bsf" else x.t()).detach().double().requires_grad_()
    learned = [each.detach().double().requires_grad_() for each in layer.parameters()]
    *bias, first, part = learned
    middle = torch.einsum("sil,ikl->sik", x_wide.reshape(rows, 2, 12), first[..., 0]).reshape(rows, 3, 4, 2)
    wanted = sum(bias, torch.einsum("silj,kl->sikj", middle, part[0, :, :, 0]).reshape(rows, 30))
    dy = torch.randn_like(wanted).to(dtype).double()
    truths = torch.autograd.grad(wanted, [x_wide, *learned], dy)
    error = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.4}
    for each in copies:
        for _ in range(4):  # the usual path, then a prepared step and its replay
            y = each(x)
            torch.testing.assert_close((y if layout == "bsf" else y.t()).double(), wanted.detach(), **error)
            given = (dy if layout == "bsf" else dy.t()).to(dtype)
            of_x, *found = torch.autograd.grad(y, [x, *each.parameters()], given)
            found = [of_x if layout == "bsf" else of_x.t(), *found]
            for gradient, truth in zip(found, truths, strict=True):
                assert float((gradient.double() - truth).norm() / truth.norm()) < error["rtol"]
    for is_frozen in (False, True):
        layer.eval().freeze() if is_frozen else layer.eval()
        with torch.no_grad():
            for _ in range(4):
                y = layer(x)
                torch.testing.assert_close((y if layout == "bsf" else y.t()).double(), wanted.detach(), **error)


@pytest.mark.parametrize("backend", ["auto", "ksgen", "strided", "bmm", "einsum", "dense"])
def test_training_steps_are_those_of_the_parameters(backend: Any) -> None:
    layer = drawn(backend=backend, dtype=torch.float64)
    own, x = parts(layer), torch.randn(5, 24, dtype=torch.float64)
    assert sum(each.numel() for each in layer.weights.parameters()) == sum(each.numel() for each in own.values()) == 47
    bias = layer.bias.detach().clone().requires_grad_()
    steps = [torch.optim.SGD(each, lr=0.01) for each in (layer.parameters(), [*own.values(), bias])]
    for _ in range(3):
        for step, y in zip(steps, (layer(x), x @ torch.kron(own["A"], own["B"]).t() + bias), strict=True):
            step.zero_grad()
            y.square().sum().backward()
            step.step()
    torch.testing.assert_close(layer.to_dense(), torch.kron(own["A"], own["B"]))
    state = B_FIRST.to_state(layer.weights)
    assert all(torch.equal(state[name], each) for name, each in parts(layer).items())


def test_a_checkpoint_becomes_tied_weights() -> None:
    state = {"A": torch.randn(5, 3), "B": torch.randn(4, 8), "bias": torch.randn(20)}
    layer = KSLinear.from_structure(B_FIRST, state)
    assert [tuple(each.shape) for each in layer.weights.parameters()] == [(1, 4, 8, 1), (1, 5, 3, 1)]
    torch.testing.assert_close(layer.to_dense(), torch.kron(state["A"], state["B"]))
    assert all(torch.equal(each, state[name]) for name, each in B_FIRST.to_state(layer.weights).items())
    one_copy = KSLinear.from_structure(structures.kronecker(8, 6, (6, 8)))  # d = 1, so that A is not tied
    assert [name for name, _ in one_copy.weights.named_parameters()] == ["0", "parametrizations.1.original"]


def test_states_copies_and_casts() -> None:
    layer, other = drawn(), KSLinear.from_structure(B_FIRST)
    x = torch.randn(5, 24)
    other.load_state_dict(layer.state_dict())
    layer(x)  # the first call of a process at a shape may differ in its last bits from later ones
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(layer.double().weights[1], other.weights[1].double())
    assert layer.weights.parametrizations["0"].original.dtype == torch.float64
    empty = KSLinear.from_structure(B_FIRST, device="meta").to_empty(device="cpu")
    empty.load_state_dict(other.state_dict())
    assert torch.equal(empty(x), other(x))
    other.backend = "bmm"  # "auto" may choose another product without the compiler, which differs in the last bits
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), other(x))
    torch.testing.assert_close(other.quantize("int8").to_dense(), other.to_dense(), rtol=0.05, atol=0.01)


def test_initializers_write_to_the_slices() -> None:
    layer = drawn(SQUARE, dtype=torch.float64)
    before = layer.to_dense().detach()
    layer.reset_parameters()
    assert all(0.3 < each.abs().max() <= 0.5 for each in layer.weights.parameters())  # 1/sqrt(c), with c = 4
    assert not torch.equal(layer.to_dense(), before)
    nn.init.normal_(layer.weight, std=0.25)
    deviation = torch.cat([each.detach().flatten() for each in layer.weights.parameters()]).std()
    assert 0.3 < deviation < 0.7  # each of both factors has 1/sqrt(c), so that outputs vary as with a dense weight
    before = layer.to_dense().detach()
    with pytest.raises(LaunchError, match="add_ would write to weight, which is the product of the factors"):
        nn.init.normal_(layer.weight).add_(1)
    assert torch.equal(layer.to_dense(), before)
    setattr(layer.weights, "0", torch.ones(SQUARE.chain[0].shape, dtype=torch.float64))
    assert torch.equal(layer.weights.parametrizations["0"].original, torch.ones(1, 4, 4, 1))
    layer.weight.requires_grad_(False)
    assert not any(each.requires_grad for each in layer.weights.parameters())


def test_initial_matrices() -> None:
    orthogonal = drawn(SQUARE, init="orthogonal", dtype=torch.float64).to_dense()
    torch.testing.assert_close(orthogonal @ orthogonal.t(), torch.eye(16, dtype=torch.float64))
    assert torch.equal(drawn(SQUARE, init="identity").to_dense(), torch.eye(16))
    assert torch.equal(drawn(structures.kronecker(16, 32, (4, 2)), init="identity").to_dense(), torch.eye(32, 16))
    with pytest.raises(LaunchError, match=r"init='identity' has different weights where those of factor 1 are tied; a"):
        KSLinear.from_structure(structures.kronecker(16, 32, (8, 4)), init="identity")


def repetitions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The counts of slices that are repeated in memory from now on."""
    found: list[int] = []
    contiguous = Tensor.contiguous

    def counted(tensor: Tensor, *given: Any, **named: Any) -> Tensor:
        if 0 in tensor.stride():
            found.append(tensor.stride().count(0))
        return contiguous(tensor, *given, **named)

    monkeypatch.setattr(Tensor, "contiguous", counted)
    return found


def test_prepared_calls_of_a_frozen_layer_pack_the_slices() -> None:
    layer, x = drawn(backend="ksgen"), torch.randn(5, 24)
    expected = layer(x).detach()
    assert [getattr(each, "tie", None) for each in layer._packed()] == [None, None]
    layer.eval().freeze()
    with torch.no_grad():
        first, second = layer._packed()
        assert (first.tie, second.tie, layer._packed()[0] is first) == ("a", "d", True)
        for _ in range(3):
            torch.testing.assert_close(layer(x), expected)
        assert {(each.tie, bool(each._packed)) for each in layer._packed()} == {("a", True), ("d", True)}
        layer.weights.parametrizations["0"].original.mul_(2)
        with pytest.warns(UserWarning, match="frozen no more"):
            torch.testing.assert_close(layer(x) - layer.bias, 2 * (expected - layer.bias))


def test_slices_with_gaps_are_copied_to_be_packed() -> None:
    layer, x = drawn(backend="ksgen").eval(), torch.randn(5, 24)
    expected = layer(x).detach()
    for each in layer.weights.parameters():
        each.data = each.data.transpose(1, 2).contiguous().transpose(1, 2)
        assert not each.is_contiguous()
    layer.freeze()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(layer(x), expected)
        assert [each.tie for each in layer._packed()] == ["a", "d"]


def is_frozen_no_more(layer: KSLinear, what: str, x: Tensor) -> None:
    with torch.no_grad(), pytest.warns(UserWarning, match=f"KSLinear.* is frozen no more: weights.{what}"):
        layer(x)
    assert not layer.is_frozen
    torch.testing.assert_close(layer(x), copy.deepcopy(layer)(x))


def test_a_frozen_layer_repeats_its_slices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(drawn(), nn.ReLU()).eval()
    layer, x = model[0], torch.randn(5, 24)
    expected, found = model(x).detach(), repetitions(monkeypatch)
    assert (freeze(model), layer.is_frozen, freeze(model)) == (["0"], True, ["0"])
    with torch.no_grad():
        for _ in range(4):  # the usual path, then prepared calls
            torch.testing.assert_close(model(x), expected)
        assert all(torch.equal(one, other) for one, other in zip(layer.weights, layer.weights, strict=True))
    assert len(found) == 2
    assert set(layer.state_dict()) == {*(f"weights.parametrizations.{n}.original" for n in (0, 1)), "bias"}
    y = model(x)  # gradients reach the slices, and the layer stays frozen
    y.sum().backward()
    assert all(each.grad is not None for each in layer.weights.parameters())
    assert layer.is_frozen
    assert not layer.train().is_frozen
    found.clear()
    with torch.no_grad():
        model(x)
    assert len(found) == 2  # memory of the repetition is gone


@pytest.mark.parametrize("change", ["write", "optimizer", "load", "assigned", "cast", "repetition"])
def test_changes_of_a_slice_thaw(change: str) -> None:
    layer, x = drawn().eval().freeze(), torch.randn(5, 24)
    own = layer.weights.parametrizations["0"].original
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        if change == "write":
            own.mul_(2)
            torch.testing.assert_close(layer.to_dense(), copy.deepcopy(layer).to_dense())  # before any call
        elif change == "optimizer":
            own.grad = torch.ones_like(own)
            with pytest.warns(UserWarning, match="frozen no more: weights.* was in a step of Adam"):
                torch.optim.Adam([own], fused=True).step()
            torch.testing.assert_close(layer(x), copy.deepcopy(layer)(x))
            return
        elif change == "load":
            layer.load_state_dict(KSLinear.from_structure(B_FIRST).state_dict())
        elif change == "assigned":
            layer.load_state_dict(KSLinear.from_structure(B_FIRST).state_dict(), assign=True)
        elif change == "cast":
            layer.double()
            x = x.double()
        else:
            layer.weights[0][1:] = 0
    words = {
        "write": "parametrizations.0.original was written to",
        "load": "parametrizations.0.original was written to",
        "assigned": "parametrizations.0.original was replaced",
        "cast": "parametrizations.0.original got other memory",
        "repetition": "0 was written to",
    }
    is_frozen_no_more(layer, words[change], x)


def test_a_write_to_a_repetition_ends_with_it() -> None:
    """The layer thaws, and computes the repetition again from its slice, even while someone holds the written one."""
    layer = KSLinear("4,3,2,1", bias=False).eval().requires_grad_(False)
    parametrize.register_parametrization(layer.weights, "0", Tied(axis=0, count=4))
    wanted = layer.freeze().to_dense()
    held, x = layer.weights[0], torch.randn(5, 8)
    held.mul_(2)
    with pytest.warns(UserWarning, match="is frozen no more: weights.0 was written to"):
        layer(x)
    torch.testing.assert_close(layer(x), x @ wanted.T)


def test_frozen_groups_read_the_repetitions() -> None:
    layers = [KSLinear.from_structure(SQUARE) for _ in range(3)]
    group, x = KSLinear.group(layers).eval(), torch.randn(40, 16)
    expected = torch.cat([each(x) for each in layers], -1).detach()
    group.freeze()
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(group(x), expected)
    assert group.is_frozen


def test_copies_and_pickles_of_a_frozen_layer(tmp_path: Path) -> None:
    model, x = nn.Sequential(drawn(), nn.ReLU()).eval(), torch.randn(5, 24)
    expected = model(x).detach()
    freeze(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    shared = nn.ModuleList([model[0], copy.deepcopy(model[0])])
    shallow = copy.copy(model[0]).parameters()  # shares the parameters, and writes to none
    assert all(one is other for one, other in zip(shallow, model[0].parameters(), strict=True))
    for other in (loaded[0], copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model[0])), shared[1]):
        assert not other.is_frozen
        assert not other.weights.training
        assert repr(other) == repr(model[0])
        assert [tuple(each.shape) for each in other.weights.parameters()] == [(1, 4, 8, 1), (1, 5, 3, 1)]
        assert all(each.requires_grad for each in other.parameters())
        torch.testing.assert_close(other.freeze()(x).relu(), expected)
        other.load_state_dict(model[0].state_dict())
        untied(other.thaw())
        torch.testing.assert_close(other(x).relu(), expected)
    assert model[0].is_frozen
    weights = copy.deepcopy(model[0].weights)
    assert pickle.loads(pickle.dumps(model[0].weights.parametrizations["0"][0])).count == 3
    assert all(torch.equal(one, other) for one, other in zip(weights, model[0].weights, strict=True))
    partly = KSLinear(["2,3,4,2", "1,2,6,2"])
    parametrize.register_parametrization(partly.weights, "1", Tied(axis=3, count=2))
    again = pickle.loads(pickle.dumps(partly))
    assert torch.equal(again.to_dense(), partly.to_dense())
    parametrize.register_parametrization(partly.weights, "0", nn.Tanh())
    with pytest.raises(RuntimeError, match="parametrized modules is only supported through state_dict"):
        pickle.dumps(partly)


def test_layers_that_share_one_list_share_its_copy() -> None:
    model = nn.ModuleList([drawn(), drawn()])
    model[1].weights = model[0].weights
    copied, x = copy.deepcopy(model), torch.randn(5, 24)
    assert copied[0].weights is copied[1].weights
    assert copied[0].weights is not model[0].weights
    assert len(list(copied.parameters())) == 4  # two slices, and a bias per layer
    torch.nn.utils.parametrize.remove_parametrizations(copied[0].weights, "0")
    with torch.no_grad():
        copied[0].weights[0].mul_(2)
    torch.testing.assert_close(copied[1](x) - copied[1].bias, 2 * (model[1](x) - model[1].bias))
    alone = copy.deepcopy(model[0])
    assert alone.weights is not model[0].weights
    assert torch.equal(alone(x), model[0](x))


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("backend", ["auto", "ksgen", "strided"])
def test_a_call_repeats_each_slice_once(is_trained: bool, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the search for a prepared call nor its preparation repeats it again.

    A prepared step multiplies more rows by the slice of the first factor. Other prepared calls read both slices.
    """
    layer, x = drawn(backend=backend).train(is_trained).build(7), torch.randn(7, 24)
    monkeypatch.setattr(trained, "faster", lambda job, ways: "ksgen")
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "slices" if "slices" in ways else next(iter(ways)))
    prepared._calls.clear(), trained._steps.clear()
    found = repetitions(monkeypatch)
    with torch.set_grad_enabled(is_trained):
        for number in range(5):
            layer(x)
            is_prepared = backend != "strided" and number > (0 if is_trained else 1)
            assert len(found) == (int(is_trained) if is_prepared else 2)
            found.clear()
    known = (trained._steps if is_trained else prepared._calls).values()
    assert not any(isinstance(each, prepared.Unprepared) for each in known)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize(
    ("structure", "options", "adds"),
    [
        (B_FIRST, {"activation": "gelu"}, False),
        (A_FIRST, {"bias": False, "activation": "gelu"}, True),
        (B_FIRST, {"between": "relu"}, True),
    ],
    ids=["bias", "residual", "both"],
)
def test_calls_without_gradients_multiply_by_the_slices(
    structure: Any, options: Any, adds: bool, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untied layers of the same shapes have prepared calls of their own."""
    monkeypatch.setattr(prepared, "_calls", {})
    layer = drawn(structure, backend="ksgen", layout=layout, **options)
    plain = untied(copy.deepcopy(layer))

    def check(each: KSLinear, *given: Tensor) -> None:
        truth = copy.deepcopy(each).double()
        truth.backend = "einsum"
        for _ in range(3):
            wanted = truth(*[array.double() for array in given])
            torch.testing.assert_close(each(*given).double(), wanted, rtol=1e-4, atol=1e-4)

    for rows in (1, 3):
        shapes = [(rows, features) if layout == "bsf" else (features, rows) for features in (24, 20)]
        x, residual = map(torch.randn, shapes)
        given = (x, residual) if adds else (x,)
        with torch.no_grad():
            check(layer, *given)
            for each in plain.weights:  # no slices are equal any longer
                each[1:] *= 2
                each[..., 1:] *= 2
            check(plain, *given)
    calls = [each for each in prepared._calls.values() if isinstance(each, prepared.Prepared)]
    assert {prepared.reads_slices(each.step) for each in calls} == {True, False}


def test_slices_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_shapes: list[Any] = []
    uniform = Tensor.uniform_
    monkeypatch.setattr(
        Tensor,
        "uniform_",
        lambda each, *given, **named: (
            drawn_shapes.append(tuple(each.shape)) if not each.is_meta else None,
            uniform(each, *given, **named),
        )[1],
    )
    layer = drawn(dtype=torch.bfloat16, layout="bsl")
    assert drawn_shapes == [(1, 4, 8, 1), (1, 5, 3, 1), (20,)]
    assert (layer.weights[0].dtype, layer.layout, layer.init, layer.bias.is_meta) == (
        torch.bfloat16,
        "bsl",
        "uniform",
        False,
    )
    assert drawn(device="meta").bias.is_meta


def test_weights_that_became_plain_are_watched() -> None:
    model = nn.Sequential(drawn(), nn.ReLU()).eval()
    x = torch.randn(5, 24)
    expected = model(x).detach()
    layer = untied(model[0])
    assert all(each.is_contiguous() for each in layer.weights)
    assert freeze(model) == ["0"]
    with torch.no_grad():
        for _ in range(3):  # prepared calls
            torch.testing.assert_close(model(x), expected)
        layer.weights[0][1:] = 0  # these weights are no longer tied
        with pytest.warns(UserWarning, match=r"frozen no more: .*weights\.0 was written to"):
            model(x)
    with pytest.raises(LaunchError, match="weights of B differ along a of 3,4,8,1, where they are tied; equal ones"):
        B_FIRST.to_state(layer.weights)


def test_any_factor_can_be_tied() -> None:
    layer = KSLinear(["2,3,4,2", "1,2,6,2"], bias=False, dtype=torch.float64)
    first = layer.weights[0].detach().clone()
    parametrize.register_parametrization(layer.weights, "0", Tied(axis=3, count=2))
    assert torch.equal(layer.weights[0], first[..., :1].expand_as(first))
    assert "Tied(axis=3, count=2)" in repr(layer)
    x = torch.randn(4, 16, dtype=torch.float64)
    plain = layer.weights[0].detach().clone().requires_grad_()
    wanted = KSLinear.from_weights([plain, layer.weights[1]], dtype=torch.float64)
    layer(x).square().sum().backward()
    wanted(x).square().sum().backward()
    found = layer.weights.parametrizations["0"].original.grad
    torch.testing.assert_close(found, wanted.weights[0].grad.sum(3, keepdim=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": 1, "count": 2}, r"Tied: axis=1; accepted: 0 for a, 3 for d, or \(0, 3\) for both"),
        ({"axis": "a", "count": 2}, r"Tied: axis='a'; accepted: 0 for a, 3 for d, or \(0, 3\) for both"),
        ({"axis": (3, 0), "count": (2, 2)}, r"Tied: axis=\(3, 0\); accepted: 0 for a, 3 for d, or \(0, 3\) for both"),
        ({"axis": (0, 3), "count": 2}, r"Tied: count=2; accepted: a whole number from 1 for each axis"),
        ({"axis": 0, "count": 0}, r"Tied: count=0; accepted: a whole number from 1"),
        ({"axis": 0, "count": 1.5}, r"Tied: count=1.5; accepted: a whole number from 1"),
    ],
)
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Tied(**options)


@pytest.mark.parametrize("backend", ["auto", "strided"])
def test_other_parametrizations_are_computed_once_per_call(backend: Any) -> None:
    """One such as `spectral_norm` changes at each evaluation."""

    class Counted(nn.Module):
        count = 0

        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return weights * 1

    layer, counted = KSLinear("2,6,4,1", bias=False, backend=backend), Counted()
    parametrize.register_parametrization(layer.weights, "0", counted)
    x = torch.randn(5, 8)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            for _ in range(4):
                before = counted.count
                layer(x)
                assert counted.count == before + 1
