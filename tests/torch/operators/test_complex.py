"""Complex numbers in PyTorch: products, layers and PyTorch's own gradients of them, by its products and by kernels."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402  (after the skip)

from ksgen.errors import LaunchError, SpecError  # noqa: E402
from ksgen.spec import LAYOUTS  # noqa: E402
from ksgen.torch import KSLinear, multiply  # noqa: E402
from tests.support.torch_cases import use_kernels  # noqa: E402

SHAPE, BATCH = (2, 3, 5, 3), 7
DTYPES = {torch.complex64: 1e-4, torch.complex128: 1e-12}


@pytest.fixture(params=["strided", "ksgen"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    if request.param == "ksgen":
        use_kernels(monkeypatch)
    return str(request.param)


def in_layout(rows: Any, layout: str) -> Any:
    return rows if layout == "bsf" else rows.t()


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_and_its_gradients_are_those_of_einsum(dtype: Any, layout: str, backend: str) -> None:
    a, b, c, d = SHAPE
    x = in_layout(torch.randn(BATCH, a * c * d, dtype=dtype), layout).contiguous().requires_grad_()
    weights, bias = (
        torch.randn(SHAPE, dtype=dtype, requires_grad=True),
        torch.randn(a * b * d, dtype=dtype, requires_grad=True),
    )
    residual = in_layout(torch.randn(BATCH, a * b * d, dtype=dtype), layout).contiguous()
    given = (x, weights, bias)
    y = multiply(x, weights, bias, residual, layout=layout, backend=backend)
    blocks = in_layout(x, layout).reshape(BATCH, a, c, d)
    truth = in_layout(torch.einsum("silj,iklj->sikj", blocks, weights).reshape(BATCH, -1) + bias, layout) + residual
    gradient = torch.randn_like(truth)
    torch.testing.assert_close(y, truth, rtol=0, atol=DTYPES[dtype])
    for found, wanted in zip(
        torch.autograd.grad(y, given, gradient), torch.autograd.grad(truth, given, gradient), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=DTYPES[dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_of_derivatives(layout: str, backend: str) -> None:
    x = in_layout(torch.randn(2, 8, dtype=torch.complex128), layout).contiguous().requires_grad_()
    weights = torch.randn(2, 3, 2, 2, dtype=torch.complex128, requires_grad=True)

    def product(x: Any, weights: Any) -> Any:
        return multiply(x, weights, layout=layout, backend=backend)

    assert gradcheck(product, (x, weights), check_forward_ad=True)
    assert gradgradcheck(product, (x, weights))


def test_a_layer_is_its_dense_matrix_in_training_and_frozen(backend: str) -> None:
    layer = KSLinear([(1, 4, 4, 4), (4, 4, 4, 1)], dtype=torch.complex64, backend=backend)
    x = torch.randn(5, 16, dtype=torch.complex64)
    truth = torch.nn.functional.linear(x, layer.to_dense(), layer.bias)
    gradients = [
        torch.autograd.grad(y.abs().square().sum(), list(layer.parameters()), retain_graph=True)
        for y in (layer(x), truth)
    ]
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for y in (layer(x), layer.eval().freeze()(x)):
            torch.testing.assert_close(y, truth, rtol=0, atol=1e-5)


def test_what_is_only_noted_to_be_conjugated_is_so(backend: str) -> None:
    """x, weights, the residual and what comes back in backward, as `z.conj()` and `z.conj().imag` are."""
    x, weights = (
        torch.randn(5, 16, dtype=torch.complex64, requires_grad=True),
        torch.randn(1, 4, 4, 4, dtype=torch.complex64),
    )
    residual = torch.randn(5, 16, dtype=torch.complex64)
    found = multiply(x.conj(), weights.conj(), None, residual.conj(), backend=backend)
    truth = multiply(
        x.conj().resolve_conj(), weights.conj().resolve_conj(), None, residual.conj().resolve_conj(), backend="strided"
    )
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)
    gradients = [torch.autograd.grad((y.conj() * residual).real.sum(), x)[0] for y in (found, truth)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)
    negated = residual.conj().imag
    assert negated.is_neg()
    real = torch.randn(1, 4, 4, 4)
    truth = multiply(negated.resolve_neg().clone(), real, backend="strided")
    torch.testing.assert_close(multiply(negated, real, backend=backend), truth, rtol=0, atol=1e-5)


def test_a_frozen_layer_takes_what_is_conjugated_or_begins_within_an_element(backend: str) -> None:
    """Prepared calls take such inputs too."""
    for dtype, real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        layer = KSLinear([(1, 4, 4, 4)], dtype=dtype, backend=backend).eval().freeze()
        x = torch.randn(5, 16, dtype=dtype)
        memory = np.zeros(2 * 5 * 16 + 1, np.float32 if real is torch.float32 else np.float64)
        moved = torch.from_numpy(
            memory[1:].view(np.complex64 if dtype is torch.complex64 else np.complex128).reshape(5, 16)
        )
        moved.copy_(x)
        with torch.no_grad():
            truth, conjugated = layer(x), layer(x.conj().resolve_conj())
            for given, wanted in ((x, truth), (x.conj(), conjugated), (moved, truth)):
                torch.testing.assert_close(layer(given), wanted, rtol=0, atol=1e-5)


def test_autocast_leaves_complex_numbers_unchanged(backend: str) -> None:
    """Autocast does the same in `torch.nn.functional.linear`."""
    layer, x = (
        KSLinear([(2, 4, 4, 1)], dtype=torch.complex64, backend=backend),
        torch.randn(3, 8, dtype=torch.complex64),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            layer(x), torch.nn.functional.linear(x, layer.to_dense(), layer.bias), rtol=0, atol=1e-5
        )


def test_weights_are_drawn_as_wide_as_real_ones() -> None:
    """The real and the imaginary part are drawn so, by `nn.init` too."""
    torch.manual_seed(0)
    layer = KSLinear([(8, 64, 64, 1)], dtype=torch.complex64)
    (weights,) = layer.weights
    assert float(weights.detach().abs().square().mean() * 3 * 64) == pytest.approx(1, rel=0.05)
    assert max(float(weights.real.max()), float(weights.imag.max())) <= 1 / (2 * 64) ** 0.5
    torch.nn.init.normal_(layer.weight, std=0.5)
    rows = layer(torch.randn(64, 512, dtype=torch.complex64)) - layer.bias
    assert float(rows.detach().abs().square().mean()) == pytest.approx(512 * 0.25, rel=0.1)


def test_what_is_not_defined_for_complex_numbers_is_refused() -> None:
    weights, x = torch.randn(2, 4, 4, 1, dtype=torch.complex64), torch.randn(3, 8, dtype=torch.complex64)
    with pytest.raises(SpecError, match="activation=relu of complex numbers, complex64; accepted: none"):
        multiply(x, weights, activation="relu")
    with pytest.raises(SpecError, match="activation=relu of complex numbers, complex64; accepted: none"):
        KSLinear([(2, 4, 4, 1)], activation="relu", backend="bmm").to(torch.complex64)(x)
    with pytest.raises(SpecError, match="activation=gelu of complex numbers, complex128; accepted: none"):
        KSLinear([(2, 4, 4, 1)], dtype=torch.complex128, activation="gelu")
    with pytest.raises(LaunchError, match="got x of float32 and weights of complex64; give both in one precision"):
        multiply(x.real, weights)
