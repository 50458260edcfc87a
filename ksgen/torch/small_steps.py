"""Small steps of training on a processor, where PyTorch's products were the fastest for every factor of a layer: they are called at once.

A step that was timed before at these shapes (`ops.multiply`) takes a third less so, as looking at everything again costs as much as a small
product. Whatever is not plain goes the usual way, and so does what was not timed yet.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.spec import LAYOUTS
from ksgen.torch import choice, frozen, ops, products
from ksgen.torch.checks import dtype_name
from ksgen.torch.epilogue import ACTIVATIONS, finish
from ksgen.torch.intermediates import is_recomputed

_known: dict[Hashable, bool] = {}  # whether PyTorch's products serve, by all that decides it


def serve(layer: Any, x: Tensor) -> Tensor | None:
    """The layer's output; None where it has to go the usual way."""
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or type(x) is not Tensor
        or not x.is_cpu
        or x.layout is not torch.strided
    ):
        return None
    parameters, bias = layer._modules["weights"]._parameters, layer._parameters.get("bias")
    weights, dtype = tuple(parameters.values()), x.dtype
    of_layer = (layer.own_chain.factors, layer.layout, layer.out_layout, layer.activation, layer.between, layer.fuse, layer.precision)
    others = (layer.backend, layer.intermediates, layer.bias is bias, bias is None, torch.get_num_threads())
    key = (x.shape, dtype, x.requires_grad, *of_layer, *others)
    is_known = _known.get(key)
    if is_known is False or ops.is_transformed() or torch._C._len_torch_dispatch_stack():
        return None
    if torch.is_autocast_enabled("cpu") or torch.jit.is_tracing() or layer._parallel is not None or frozen.is_known(layer):
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # a checkpoint's second pass has to be as the first
        return None
    if len(weights) != len(layer.own_chain):
        return None
    for pattern, each in zip(layer.own_chain, weights, strict=True):
        if (
            type(each) is not nn.Parameter
            or each.dtype != dtype
            or not each.requires_grad
            or not each.is_cpu
            or each.shape != pattern.shape
        ):
            return None
    if bias is not None and (type(bias) is not nn.Parameter or bias.dtype != dtype or not bias.is_cpu or bias.dim() != 1):
        return None
    if is_known is None:
        found = _is_served(layer, x, bias is not None)
        if found is None:
            return None
        if len(_known) >= choice.REMEMBERED:
            _known.clear()
        _known[key] = found
        if not found:
            return None
    return _product(layer, x, weights, bias)


def _is_served(layer: Any, x: Tensor, has_bias: bool) -> bool | None:
    """Whether every factor's step was timed, and PyTorch's products were the fastest; None where one was not timed yet."""
    chain, layout = layer.own_chain, layer.layout
    if layer.backend != "auto" or layer.out_layout is not None or layer.precision not in (None, dtype_name(x.dtype)):
        return False
    if layout not in LAYOUTS or layer.fuse == "yes" or layer.activation not in ACTIVATIONS or layer.between not in ACTIVATIONS:
        return False
    if layer.bias is not layer._parameters.get("bias") or is_recomputed(layer.intermediates, chain, (layer.between, layer.activation)):
        return False
    features, batch = x.shape[-1 if layout == "bsf" else 0] if x.dim() else 0, x.numel() // chain.in_features
    if features != chain.in_features or not 0 < batch <= ops.FEW_ENTRIES or not choice.has_kernels(x.device):
        return False
    *first, last = chain.factors
    steps = [(each, layer.between, False) for each in first] + [(last, layer.activation, has_bias)]
    for number, (pattern, activation, adds) in enumerate(steps):
        kind = "trained" if number or x.requires_grad else "trained first"
        job = choice.job_of(kind, [pattern.shape], x.dtype, layout, activation, adds, False)
        seconds = choice.measured((job, choice.size_of(batch), "ksgen", "bmm"))
        if not seconds:
            return None
        if min(seconds, key=seconds.__getitem__) != "bmm":
            return False
    return True


def _product(layer: Any, x: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    layout, last = layer.layout, len(weights) - 1
    is_matrix = x.dim() == 2
    rows = x if is_matrix else layer._as_matrix(x)
    for number, each in enumerate(weights):
        a, _, _, d = each.shape
        rows = products.permuted_multiply(rows, products.blocks_of(each), layout, a, d)
        rows = finish(rows, bias, layer.activation, None, layout) if number == last else finish(rows, None, layer.between, None, layout)
    return rows if is_matrix else torch.ops.aten._unsafe_view(rows.contiguous(), layer._y_shape(x))
