"""Tests of inductor's graphs: activations and sums move into the product if no gradient is recorded."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
pytest.importorskip("torch._inductor.custom_graph_pass", reason="PyTorch 2.6 or later")

from torch import nn  # noqa: E402  (after the skip)

from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.operators.fusing import FUSING, EpilogueFusion  # noqa: E402
from tests.support.libraries import needs_inductor  # noqa: E402


class Block(nn.Module):
    """x + down(activation(up(x)))"""

    def __init__(self, activation: nn.Module, layout: str = "bsf", backend: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (
            KSLinear([each], layout=layout, backend=backend) for each in ((2, 8, 4, 3), (4, 6, 12, 1))
        )
        self.activation = activation

    def forward(self, x: Any) -> Any:
        return x + self.down(self.activation(self.up(x)))


def compiled(model: nn.Module, x: Any, **options: Any) -> tuple[Any, list[tuple[str, bool]]]:
    """The output, and each product's activation and whether it adds a residual, as the graph has them after the
    pass.
    """
    found: list[tuple[str, bool]] = []

    def fuse_and_run(graph: Any, inputs: Any) -> Any:
        EpilogueFusion()(graph.graph)
        graph.graph.lint()
        graph.recompile()
        products = [node for node in graph.graph.nodes if node.target is torch.ops.ksgen.multiply.default]
        found.extend((node.args[6], node.args[3] is not None) for node in products)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, backend=fuse_and_run, fullgraph=True, **options)(x), found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("activation", "name", "layout", "is_dynamic"),
    [
        (nn.GELU(), "gelu", "bsf", False),
        (nn.GELU("tanh"), "gelu_tanh", "bsl", False),
        (nn.ReLU(), "relu", "bsf", True),
        (nn.ReLU(inplace=True), "relu", "bsl", True),
        (nn.SiLU(), "silu", "bsf", False),
    ],
)
def test_the_epilogue_moves_into_the_product(activation: nn.Module, name: str, layout: str, is_dynamic: bool) -> None:
    model, x = Block(activation, layout), torch.randn(5, 3, 24) if layout == "bsf" else torch.randn(24, 5, 3)
    with torch.no_grad():
        y, products = compiled(model, x, dynamic=is_dynamic)
        torch.testing.assert_close(y, model(x))
    assert products == [(name, False), ("none", True)]


def test_what_the_kernels_do_not_have_stays() -> None:
    model, x = Block(nn.Tanh()), torch.randn(5, 3, 24)
    with torch.no_grad():
        y, products = compiled(model, x)
        torch.testing.assert_close(y, model(x))
    assert products == [("none", False), ("none", True)]


def test_what_is_used_twice_or_of_another_shape_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = KSLinear([(2, 8, 4, 3)])

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            z = self.layer(x) + x[0, 0, 0]
            return y.relu() + y, z

    model, x = Twice(), torch.randn(5, 3, 24)
    with torch.no_grad():
        y, products = compiled(model, x)
        torch.testing.assert_close(y, model(x))
    assert products == [("none", False), ("none", False)]


def add_to_another(layer: KSLinear, x: Any, h: Any) -> Any:
    h += layer(x)
    return h


def add_to_a_view(layer: KSLinear, x: Any, h: Any) -> Any:
    v = h.view(-1, h.shape[-1])
    v.add_(layer(x))
    return h


def write_to_x(layer: KSLinear, x: Any, h: Any) -> Any:
    y = layer(x)
    x.mul_(0)
    return torch.relu(y)


def write_to_x_by_an_operator(layer: KSLinear, x: Any, h: Any) -> Any:
    y = layer(x)
    torch.ops.aten.mul_.Scalar(x, 0)
    return torch.relu(y)


def write_to_the_residual(layer: KSLinear, x: Any, h: Any) -> Any:
    y = layer(x)
    h *= 2
    return y + h


def record_gradients_again(layer: KSLinear, x: Any, h: Any) -> Any:
    with torch.no_grad():
        y = layer(x)
    return torch.relu(y)


@pytest.mark.parametrize(
    "function",
    [
        add_to_another,
        add_to_a_view,
        write_to_x,
        write_to_x_by_an_operator,
        write_to_the_residual,
        record_gradients_again,
    ],
)
def test_a_product_moves_over_no_write_and_no_mode(function: Any) -> None:
    layer = KSLinear("2,4,4,1")
    x, h = torch.randn(3, 8), torch.randn(3, 8, requires_grad=function is record_gradients_again)
    found, wanted = [(x.clone(), h.detach().clone()) for _ in range(2)]
    with torch.set_grad_enabled(h.requires_grad):
        y, products = compiled(lambda arrays: function(layer, *arrays), found)
        expected = function(layer, *wanted)
    torch.testing.assert_close((y, *found), (expected, *wanted))
    assert [step for step in products if step != ("none", False)] == []
    assert not y.requires_grad


def test_where_pytorch_multiplies_the_epilogue_is_left_to_inductor() -> None:
    model, x = Block(nn.GELU(), backend="strided"), torch.randn(5, 3, 24)
    with torch.no_grad():
        y, products = compiled(model, x)
        torch.testing.assert_close(y, model(x))
    assert products == [("none", False), ("none", False)]


def test_training_keeps_the_value_that_the_derivative_needs() -> None:
    model, x = Block(nn.GELU()), torch.randn(5, 3, 24)
    y, products = compiled(model, x)
    torch.testing.assert_close(y, model(x))
    assert products == [("none", False), ("none", False)]


@pytest.mark.slow
@needs_inductor
def test_in_inductor() -> None:
    model, x = Block(nn.GELU()), torch.randn(5, 3, 24)
    torch._dynamo.reset()
    fused = torch.compile(model, options=FUSING)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    gradients = [torch.autograd.grad(call(x).square().sum(), list(model.parameters())) for call in (fused, model)]
    torch.testing.assert_close(*gradients)
