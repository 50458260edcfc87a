"""Bias, activation and residual as PyTorch operations, for when they are not inside a kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # of the gradient and the input; differentiable itself


ACTIVATIONS = {
    "none": Activation(lambda values: values, lambda gradient, _: gradient),
    "relu": Activation(functional.relu, lambda gradient, values: _aten.threshold_backward(gradient, values, 0)),
    "gelu": Activation(functional.gelu, _aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda values: functional.gelu(values, approximate="tanh"),
        lambda gradient, values: _aten.gelu_backward(gradient, values, approximate="tanh"),
    ),
    "silu": Activation(functional.silu, _aten.silu_backward),
}


def finish(y: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, layout: str) -> Tensor:
    """activation(y + bias) + residual."""
    if bias is not None:
        y = y + (bias if layout == "bsf" else bias[:, None])
    y = ACTIVATIONS[activation].apply(y)
    return y if residual is None else y + residual
