"""`KSLinear` of chains whose factors exchange their outputs: values, gradients, options that it refuses."""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

import ksgen
from ksgen import structures
from ksgen.errors import LaunchError
from tests.support.exchange import stored_order
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")

from ksgen.torch import KSLinear, quantize  # noqa: E402
from ksgen.torch.operators.products import Exchange  # noqa: E402

CHAINS = (
    ("4,24,16,1@k1:6.i.k2", "6,16,16,1"),
    ("1,16,16,4@j.k",),
    ("4,16,8,1@k1:8.i.k2", "1,8,8,8@j.k"),
    ("l.i@4,16,8,1",),
    ("j1:2.l.i.j2@2,8,4,4@j.i.k", "8,4,8,1"),
)


def truth(layer: Any, x: Any) -> Any:
    """Factor by factor: einsum, with the orders of features by tables of indices."""
    rows = x if layer.layout == "bsf" else x.t()
    for number, (pattern, weights) in enumerate(zip(layer.chain, layer.weights, strict=True), 1):
        rows = rows[:, torch.tensor(stored_order(pattern.inputs)).argsort()]
        rows = torch.einsum("sicj,ikcj->sikj", rows.unflatten(1, (pattern.a, pattern.c, pattern.d)), weights).flatten(1)
        rows = rows[:, torch.tensor(stored_order(pattern.outputs))]
        rows = rows.relu() if layer.between == "relu" and number < len(layer.chain) else rows
    y = rows + layer.bias
    return y if layer.layout == "bsf" else y.t()


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("backend", ["auto", "ksgen", "bmm", "einsum", "strided", "dense"])
@pytest.mark.parametrize("chain", CHAINS)
def test_values_and_gradients(chain: Sequence[str], backend: str, layout: Any) -> None:
    torch.manual_seed(0)
    layer = KSLinear(list(chain), layout=layout, backend=backend, between="relu" if len(chain) > 1 else "none")
    x = torch.randn(7, layer.in_features)
    x = (x if layout == "bsf" else x.t().contiguous()).requires_grad_()
    wanted = truth(layer, x)
    learned = [x, *layer.weights, layer.bias]
    gradients = torch.autograd.grad(wanted.square().sum(), learned)
    y = layer(x)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    for found, each in zip(torch.autograd.grad(y.square().sum(), learned), gradients, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)
        layer.eval().freeze()
        for _ in range(3):  # the second call would prepare
            torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chain", [CHAINS[2], CHAINS[4]])
def test_its_matrix_has_the_exchanged_rows_and_columns(chain: Sequence[str]) -> None:
    layer = KSLinear(list(chain))
    x = torch.randn(3, 32)
    torch.testing.assert_close(x @ layer.to_dense().t() + layer.bias, truth(layer, x), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.weight.detach() + 0, layer.to_dense())


@pytest.mark.parametrize("backend", ["bmm", "auto"])
def test_compiled_exported_and_pickled(backend: Any) -> None:
    layer, x = KSLinear(list(CHAINS[0]), backend=backend), torch.randn(5, 64)
    wanted = truth(layer, x)
    again = pickle.loads(pickle.dumps(layer))
    assert again.chain == layer.chain
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for each in (layer, again, compiled, torch.export.export(layer, (x,)).module()):
        torch.testing.assert_close(each(x), wanted, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(each(x).square().sum(), list(layer.weights)) for each in (compiled, layer)]
    for found, own in zip(*gradients, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-3)
    assert "4,24,16,1@k1:6.i.k2:4 then 6,16,16,1" in repr(layer)


@pytest.mark.parametrize("fuse", ["auto", "yes"])
def test_a_group(fuse: Any) -> None:
    parts = [KSLinear(list(each), bias=False, fuse=fuse) for each in (CHAINS[0], ["4,24,16,1"])]
    x = torch.randn(5, 64)
    torch.testing.assert_close(KSLinear.group(parts)(x), torch.cat([each(x) for each in parts], 1))
    with torch.no_grad():
        torch.testing.assert_close(KSLinear.group(parts)(x), torch.cat([each(x) for each in parts], 1))


def test_an_exchange_and_a_layer_of_a_structure() -> None:
    structure = structures.btt(64, 32, blocks=(2, 4), rank=3)
    state = {name: torch.randn(shape) for name, shape in structure.shapes.items()}
    layer = KSLinear.from_structure(structure, state)
    x = torch.randn(5, 64)
    inner = torch.einsum("smi,minr->snmr", x.unflatten(1, (4, 16)), state["W1"].unflatten(2, (2, 3)))
    wanted = torch.einsum("snmr,nmro->sno", inner, state["W2"].unflatten(1, (4, 3))).flatten(1)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)
    torch.manual_seed(0)
    drawn = KSLinear.from_structure(structures.btt(1024, 1024, blocks=32, rank=4))
    for weights, scale in zip(drawn.weights, structures.btt(1024, 1024, 32, 4).scales.values(), strict=True):
        assert float(weights.detach().std()) == pytest.approx(scale, rel=0.05)
    orthogonal = KSLinear.from_structure(structures.btt(64, 64, blocks=4, rank=4), init="orthogonal").to_dense()
    torch.testing.assert_close(orthogonal @ orthogonal.t(), torch.eye(64), rtol=0, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("chain", CHAINS)
def test_eight_bits(chain: Sequence[str], layout: Any) -> None:
    torch.manual_seed(0)
    layer = KSLinear(list(chain), layout=layout, between="relu" if len(chain) > 1 else "none", activation="relu")
    rows = torch.randn(40, layer.in_features)
    x = rows if layout == "bsf" else rows.t().contiguous()
    plain, both = layer.quantize("int8"), layer.quantize("int8", x=x, x_too=True)
    with torch.no_grad():
        own = [KSLinear.from_weights(each.dequantized(), layer.bias, patterns=layer.chain) for each in (plain, both)]
    for each, exact in zip((plain, both), own, strict=True):
        exact.layout, exact.between = layout, layer.between
        given = each.first_input(x)
        wanted = truth(exact, given).relu()
        with torch.no_grad():
            for _ in range(3):  # the second call would prepare
                torch.testing.assert_close(each(x), wanted, rtol=1e-4, atol=1e-4)
        again = pickle.loads(pickle.dumps(each))
        assert torch.equal(again(x), each(x))
        assert each.chain == layer.chain
        assert (each(x) - layer(x)).norm() < 0.05 * layer(x).norm()
    learned = x.clone().requires_grad_()  # PyTorch's operators, which copy
    (found,) = torch.autograd.grad(plain(learned).square().sum(), learned)
    (wanted,) = torch.autograd.grad(truth(own[0], learned).relu().square().sum(), learned)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert "int8 weights" in plain.explain()


def test_scales_fit_rows_in_the_natural_order() -> None:
    """Inputs of each factor differ in size, so that their order matters."""
    torch.manual_seed(0)
    layer = KSLinear(list(CHAINS[4]), bias=False)
    rows = torch.randn(40, 32) * torch.logspace(-2, 2, 32)
    stored = layer.quantize("int8", x=rows)
    for pattern, weights, scale in zip(layer.chain, layer.weights, stored.scales, strict=True):
        rows = rows[:, torch.tensor(stored_order(pattern.inputs)).argsort()]
        wanted = ksgen.quantize(weights.detach(), "int8", x=rows)
        assert torch.equal(scale, wanted.scale)
        blocks = wanted.dequantized()
        rows = torch.einsum("sicj,ikcj->sikj", rows.unflatten(1, (pattern.a, pattern.c, pattern.d)), blocks).flatten(1)
        rows = rows[:, torch.tensor(stored_order(pattern.outputs))]


def test_a_model_in_eight_bits_and_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(KSLinear(list(CHAINS[4])), torch.nn.ReLU(), KSLinear(list(CHAINS[2])))
    x = torch.randn(9, 32)
    wanted = model(x)
    report = quantize(model, "int8", inputs=x)
    assert max(each.error for each in report.layers) < 0.02
    assert (model(x) - wanted).norm() < 0.05 * wanted.norm()
    layer = KSLinear(list(CHAINS[2]))
    stored = layer.quantize("bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert (stored(x).float() - layer(x).float()).norm() < 0.05 * layer(x).float().norm()


@pytest.mark.parametrize(
    "structure", [structures.btt(64, 32, blocks=(2, 4), rank=3), structures.boft(64, block=8, factors=3)], ids=str
)
def test_a_dense_layer_becomes_one_that_exchanges(structure: structures.Structure) -> None:
    torch.manual_seed(0)
    dense = KSLinear.from_structure(structure, init="uniform").to_linear()
    layer, x = KSLinear.from_linear(dense, structure.chain), torch.randn(5, 64)
    assert layer.chain == structure.chain
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-4)


def test_what_it_refuses() -> None:
    layer = KSLinear("1,16,16,4@j.k")
    with pytest.raises(LaunchError, match=r"init='identity' for 1,16,16,4@j.k, whose outputs are exchanged; accepted:"):
        KSLinear("1,16,16,4@j.k", init="identity")
    with pytest.raises(
        LaunchError, match=r"l.i@4,4,4,1, whose inputs are exchanged; accepted: inputs in the order i.l.j"
    ):
        KSLinear("l.i@4,4,4,1", init="identity")
    with pytest.raises(LaunchError, match=r"got weights of shapes \[\(1, 2, 2, 1\)\]; \[\(1, 4, 4, 1\)\] are needed"):
        KSLinear.from_weights([torch.ones(1, 2, 2, 1)], patterns="1,4,4,1")
    assert "1,16,16,4@j.k, whose outputs are exchanged" in layer.explain(processes=2)


def test_layers_of_earlier_pickles_exchange_outputs() -> None:
    """An exchange consisted of the order, the shape and the axes of the outputs."""
    layer = KSLinear("1,16,16,4@j.k")
    known, layer._exchanges = layer._exchanges, (Exchange("j.k", (16, 4), (1, 0)),)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(layer))
    assert again._exchanges == known
