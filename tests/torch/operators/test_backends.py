"""Tests of the backends: each agrees with float64 in both layouts, is differentiable, and takes unchanged weights."""

from typing import Any, get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen import reference  # noqa: E402  (after the skip)
from ksgen.errors import LaunchError  # noqa: E402
from ksgen.pattern import Pattern  # noqa: E402
from ksgen.spec import ACTIVATIONS, LAYOUTS  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.operators.backends import BACKENDS, NAMES, BackendName, to_dense  # noqa: E402
from tests.support.torch_cases import SHAPES, error, matrix, truth, use_kernels  # noqa: E402

BATCH = 7
pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # block-sparse rows are in beta, says PyTorch
differentiable = pytest.mark.parametrize("name", [name for name in BACKENDS if name != "bsr"])


def test_the_type_of_the_option_lists_the_backends() -> None:
    assert get_args(BackendName) == NAMES


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 12, 8, 3)], ids=str)
def test_products(shape: tuple[int, ...], name: str, layout: str) -> None:
    torch.manual_seed(0)
    x, weights = (
        matrix(BATCH, shape[0] * shape[2] * shape[3], layout, torch.float64),
        torch.randn(shape, dtype=torch.float64),
    )
    y = BACKENDS[name](x, weights, layout)
    torch.testing.assert_close(y, truth(x, weights, layout))
    weights.mul_(-2)
    torch.testing.assert_close(BACKENDS[name](x, weights, layout), -2 * y)


@pytest.mark.parametrize("layout", LAYOUTS)
@differentiable
def test_gradients(name: str, layout: str) -> None:
    torch.manual_seed(0)
    x = matrix(BATCH, 30, layout, torch.float64, requires_grad=True)
    weights = torch.randn(2, 9, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: BACKENDS[name](*given, layout), (x, weights), fast_mode=True)


@pytest.mark.parametrize("name", BACKENDS)
def test_another_default_device(name: str) -> None:
    layer, x = KSLinear([(2, 8, 4, 3)], backend=name), torch.randn(BATCH, 24)
    with torch.no_grad():
        wanted = layer(x)
        with torch.device("meta"):
            found = layer(x)
    torch.testing.assert_close(found, wanted)


def test_strided_under_a_transform() -> None:
    layer = KSLinear([(2, 8, 4, 3)], backend="strided")
    x = torch.randn(5, BATCH, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))


def test_bsr_refuses_gradients() -> None:
    layer = KSLinear([(2, 8, 4, 3)], backend="bsr")
    x = torch.randn(BATCH, 24)
    with pytest.raises(LaunchError, match=r"backend='bsr' has no gradients in PyTorch; call under torch.no_grad\(\)"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (BATCH, 48)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_many_layers_at_once(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vmap` over stacked weights."""
    if name == "ksgen":
        use_kernels(monkeypatch)
    layers = [KSLinear([(2, 8, 4, 3), (4, 6, 12, 1)], layout=layout, backend=name) for _ in range(3)]
    x = matrix(BATCH, 24, layout, torch.float32)
    with torch.no_grad():
        stacked, _ = torch.func.stack_module_state(layers)
        found = torch.func.vmap(lambda state: torch.func.functional_call(layers[0], state, (x,)))(stacked)
        torch.testing.assert_close(found, torch.stack([layer(x) for layer in layers]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["bsr", "sparse"])
def test_forward_mode_of_sparse_tensors(name: str, layout: str) -> None:
    torch.manual_seed(0)
    layer, x = (
        KSLinear([(2, 8, 4, 3)], backend=name, layout=layout, bias=False),
        matrix(BATCH, 24, layout, torch.float32),
    )
    with torch.no_grad():
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (2 * x,))[1], 2 * layer(x))


@pytest.mark.parametrize("name", ["bsr", "sparse"])
def test_what_pytorch_has_no_sparse_product_for_is_refused_in_words(name: str) -> None:
    x = matrix(BATCH, 24, "bsf", torch.bfloat16)
    words = (
        rf"PyTorch has no product with torch.sparse_{'bsr' if name == 'bsr' else 'csr'} of bfloat16 on cpu "
        rf"\(.*\); take another backend"
    )
    with torch.no_grad(), pytest.raises(LaunchError, match=words):
        KSLinear([(2, 8, 4, 3)], backend=name, dtype=torch.bfloat16)(x)
    layer = KSLinear([(2, 8, 4, 3)], backend=name).freeze()
    with (
        torch.inference_mode(),
        pytest.raises(LaunchError, match=r"of float32 on cpu, for frozen weights in inference mode \("),
    ):
        layer(x.float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_is_the_references(shape: tuple[int, ...]) -> None:
    weights = torch.randn(shape, dtype=torch.float64)
    np.testing.assert_array_equal(to_dense(weights).numpy(), reference.to_dense(Pattern(*shape), weights.numpy()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_layers_agree_by_every_backend(
    name: str, activation: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain with bias, activation and residual; "ksgen" by its kernels."""
    torch.manual_seed(0)
    if name == "ksgen":
        use_kernels(monkeypatch)
    layer = KSLinear([(2, 8, 4, 3), (4, 6, 12, 1)], layout=layout, backend=name, activation=activation)
    x, residual = matrix(BATCH, 24, layout, torch.float32), matrix(BATCH, 24, layout, torch.float32)
    between = truth(x, layer.weights[0], layout)
    expected = truth(between, layer.weights[1], layout, layer.bias, activation, residual)
    with torch.no_grad():
        assert error(layer(x, residual), expected) < 1e-6


def trained(name: str, layout: str, steps: int = 60) -> list[float]:
    """Losses of a small regression, from the same weights, data and order for every backend."""
    torch.manual_seed(1)
    rows, targets = torch.randn(64, 24, dtype=torch.float64), torch.randn(64, 36, dtype=torch.float64)
    first = KSLinear([(2, 8, 4, 3)], layout=layout, backend=name, activation="gelu", dtype=torch.float64)
    second = KSLinear([(4, 6, 12, 1), (1, 9, 6, 4)], layout=layout, backend=name, dtype=torch.float64)
    optimizer, losses = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.02), []
    x = rows if layout == "bsf" else rows.t().contiguous()
    for _ in range(steps):
        y: Any = second(first(x))
        loss = (y - (targets if layout == "bsf" else targets.t())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["PyTorch", "kernels", "strided", "bmm", "einsum", "sparse"])
def test_training_reaches_what_the_masked_dense_layers_reach(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained("dense", layout)
    if name == "kernels":
        use_kernels(monkeypatch)
    losses = trained("ksgen" if name in ("PyTorch", "kernels") else name, layout)
    assert losses[-1] < 0.6 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
