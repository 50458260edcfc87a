"""Epilogues as PyTorch operations: activations as ksgen defines them, and their derivatives."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen import reference  # noqa: E402  (after the skip)
from ksgen.spec import ACTIVATIONS, LAYOUTS  # noqa: E402
from ksgen.torch.operators import products as epilogue  # noqa: E402


def test_every_activation_is_here() -> None:
    assert set(epilogue.ACTIVATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_the_references_and_its_derivative_autograds(name: str) -> None:
    values = torch.linspace(-6, 6, 200, dtype=torch.float64).requires_grad_()
    activation = epilogue.ACTIVATIONS[name]
    y = activation.apply(values)
    np.testing.assert_allclose(
        y.detach().numpy(), reference._ACTIVATIONS[name](values.detach().numpy()), rtol=1e-12, atol=1e-12
    )
    gradient = torch.randn(200, dtype=torch.float64)
    (expected,) = torch.autograd.grad(y, values, gradient)
    torch.testing.assert_close(activation.backward(gradient, values.detach()), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bias_comes_before_the_activation_and_the_residual_after_it(layout: str) -> None:
    y, bias, residual = torch.tensor([[-3.0, 1.0]]), torch.tensor([1.0, -4.0]), torch.tensor([[10.0, 20.0]])
    turn = (lambda each: each) if layout == "bsf" else torch.t
    found = epilogue.finish(turn(y), bias, "relu", turn(residual), layout)
    torch.testing.assert_close(turn(found), torch.tensor([[10.0, 20.0]]))
    assert epilogue.finish(y, None, "none", None, layout) is y
