"""`multiply`: Y = X K^T on PyTorch tensors."""

from collections.abc import Callable

from torch import Tensor, einsum
from torch.nn import functional

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "silu": functional.silu,
}


def multiply(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    layout: str = "bsf",
    precision: str | None = None,
    activation: str = "none",
    backend: str = "auto",
) -> Tensor:
    """activation(X K^T + bias) + residual; x and y are (batch, features) in layout "bsf", (features, batch) in "bsl"."""
    a, b, c, d = weights.shape
    if layout == "bsf":
        y = einsum("sicj,ikcj->sikj", x.reshape(-1, a, c, d), weights).reshape(-1, a * b * d)
    else:
        y = einsum("icjs,ikcj->ikjs", x.reshape(a, c, d, -1), weights).reshape(a * b * d, -1)
    if bias is not None:
        y = y + (bias if layout == "bsf" else bias[:, None])
    y = _ACTIVATIONS[activation](y)
    return y if residual is None else y + residual
