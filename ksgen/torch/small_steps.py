"""Small steps of training on a processor, where PyTorch's products were the fastest for every factor of a layer: they are called at once.

A step that was timed before at these shapes (`ops.multiply`) need not look at everything again, which costs as much as a small product.
Whatever is not plain goes the usual way, and so does what was not timed yet.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.torch import choice, frozen, ops
from ksgen.torch.checks import dtype_name
from ksgen.torch.intermediates import is_recomputed
from ksgen.torch.prepared import lies_here

_served: dict[Hashable, bool] = {}  # whether PyTorch's products serve, by all that decides it


def serve(layer: Any, x: Tensor) -> Tensor | None:
    """The layer's output; None where it has to go the usual way."""
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or not torch.is_grad_enabled() or not lies_here(x):
        return None  # a trace records every shape that is read, and PyTorch compares it with a second one without gradients
    own, chain, dtype = layer._parameters, layer.own_chain, x.dtype
    parameters = layer._modules["weights"]._parameters
    if "bias" not in own or len(parameters) != len(chain):  # a parametrization makes it anew at each look
        return None
    bias, weights = own["bias"], [parameters.get(str(number)) for number in range(len(chain))]  # pruned ones have other names
    if not all(_is_plain(each, dtype, pattern.shape) for each, pattern in zip(weights, chain, strict=True)):
        return None
    if not all(each.requires_grad for each in weights) or not (bias is None or _is_plain(bias, dtype, (chain.out_features,))):
        return None
    of_layer = (layer.layout, layer.out_layout, layer.activation, layer.between, layer.fuse, layer.precision, layer.backend)
    key = (chain.factors, *of_layer, layer.intermediates, x.shape, dtype, x.requires_grad, bias is None, torch.get_num_threads())
    serves = _served.get(key)
    if serves is False or ops.is_transformed() or torch._C._len_torch_dispatch_stack():
        return None
    if torch.is_autocast_enabled("cpu") or layer._parallel is not None or frozen.was_frozen(layer):
        return None
    if ops.is_saved_otherwise():  # a checkpoint's second pass has to be as the first
        return None
    if serves is None:
        serves = _is_served(layer, x, bias is not None)
        if serves is None:
            return None
        if len(_served) >= choice.REMEMBERED:
            _served.clear()
        _served[key] = serves
    return _product(layer, x, weights, bias) if serves else None


def told(layer: Any, batch: int) -> list[str]:
    """Whether training steps of so many rows are PyTorch's products, in words; nothing where they are not, or were not timed."""
    first, is_bsf = layer.weights[0], layer.layout == "bsf"
    if not first.is_cpu or layer._parallel is not None or batch > ops.FEW_ENTRIES:
        return []
    x = torch.empty((batch, layer.in_features) if is_bsf else (layer.in_features, batch), dtype=first.dtype)
    if not any(_is_served(layer, x.requires_grad_(asks), layer.bias is not None) for asks in (False, True)):
        return []
    return [f"training steps at batch {batch}: bmm for every factor, the fastest when they were timed"]


def _is_plain(parameter: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return type(parameter) is nn.Parameter and parameter.dtype == dtype and parameter.is_cpu and parameter.shape == shape


def _is_served(layer: Any, x: Tensor, has_bias: bool) -> bool | None:
    """Whether every factor's step was timed, and PyTorch's products were the fastest; None where one was not timed yet."""
    chain, layout = layer.own_chain, layer.layout
    if layer.backend != "auto" or layer.out_layout is not None or layer.precision not in (None, dtype_name(x.dtype)):
        return False
    if layer.fuse == "yes" or is_recomputed(layer.intermediates, chain, (layer.between, layer.activation)):
        return False
    features, batch = x.shape[-1 if layout == "bsf" else 0] if x.dim() else 0, x.numel() // chain.in_features
    if features != chain.in_features or not 0 < batch <= ops.FEW_ENTRIES or not choice.has_kernels(x.device):
        return False
    *first, last = chain.factors
    steps = [(each, layer.between, False) for each in first] + [(last, layer.activation, has_bias)]
    for number, (pattern, activation, adds) in enumerate(steps):
        job = ops.step_job(pattern.shape, batch, x.dtype, layout, activation, adds, False, bool(number) or x.requires_grad)
        seconds = choice.measured(job)
        if not seconds:
            return None
        if min(seconds, key=seconds.__getitem__) != "bmm":
            return False
    return True


def _product(layer: Any, x: Tensor, weights: list[Any], bias: Tensor | None) -> Tensor:
    layout, last = layer.layout, len(weights) - 1
    is_matrix = x.dim() == 2
    rows = x if is_matrix else layer._as_matrix(x)
    for number, each in enumerate(weights):
        own = (bias, None, layout, layer.activation) if number == last else (None, None, layout, layer.between)
        rows = ops.multiply_by_pytorch(rows, each, *own)
    return rows if is_matrix else torch.ops.aten._unsafe_view(rows.contiguous(), layer._y_shape(x))
