"""Weights in eight bits, or in bfloat16 for x in float32, as the operand of a `KSLinear`: what launchers take of them, and products.

Kernels multiply by the values unchanged. Gradients of x flow through what the values stand for; the weights have none.
"""

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ksgen.errors import LaunchError, ToolchainError
from ksgen.launch.chain import ChainLauncher
from ksgen.launch.weights import WrittenError, writes_to
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized
from ksgen.spec import Epilogue
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.choice import chain_launcher, has_kernels, is_one_launch, launcher, never_one_launch
from ksgen.torch.operators.ops import contiguous, is_plain, multiply, rows_of
from ksgen.torch.operators.products import finish

MOST_TRIES = 8  # of a call during another thread's writes to the weights


@dataclass(eq=False)
class CachedOperand:
    """What was made of buffers that were seen so: what launchers take, and prepared calls; None for what the usual way does."""

    seen: tuple[tuple[int, object], ...]
    parts: list[Quantized] = field(default_factory=list)
    calls: dict[Hashable, Any] = field(default_factory=dict)


def seen_of(tensor: Tensor) -> tuple[int, object]:
    """Equal as long as no write is seen; never for a tensor made in inference mode, whose writes cannot be seen."""
    writes = writes_to(tensor)
    return tensor.data_ptr(), object() if writes is None else writes


_made: MutableMapping[Tensor, tuple[tuple[object, ...], Quantized]] = WeakIdKeyDictionary()  # by the tensor of values


def quantized_of(values: Tensor, scale: Tensor, storage: str, per: str, x_scale: float | None) -> Quantized:
    """What launchers take, and pack once: the same object as long as no write to the tensors is seen."""
    seen = (*seen_of(values), *seen_of(scale), x_scale)
    kept = _made.get(values)
    if kept is None or kept[0] != seen:
        made = Quantized(Pattern(*values.shape), storage, per, values.detach(), scale.detach(), x_scale=x_scale)
        kept = _made[values] = seen, made
    return kept[1]


def forget(values: Tensor) -> None:
    """Pack these values again at the next call."""
    _made.pop(values, None)


def _beside_writes(use: Callable[[], Tensor]) -> Tensor:
    """What `use` makes of weights that it looks at itself: again, where another thread wrote to them after that look."""
    for _ in range(MOST_TRIES - 1):
        try:
            return use()
        except WrittenError:
            continue
    return use()


# ---- all factors of a layer


def multiply_stored(layer: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, precision: str) -> Tensor:
    """The layer's output as a matrix in this precision, by the weights that it stores."""
    tensors = (x, bias, residual)
    needs_gradient = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    if needs_gradient or not is_plain(*tensors) or not x.numel() or not has_kernels(x.device):
        return by_operators(layer, x, bias, residual, needs_gradient, precision)
    x, residual = rows_of(x), rows_of(residual)
    bias = None if bias is None else contiguous(bias)
    options = {"layout": layer.layout, "activation": layer.activation, "bias": bias, "residual": residual, "precision": precision}
    own = chain_launcher(layer._shapes, layer.between, layer.fuse)
    if x.device.type == "cuda" and layer.fuse == "auto" and len(layer.chain) > 1:
        return _beside_writes(lambda: on_gpu(layer, own, x, layer._ready_parts(), options))
    return _beside_writes(lambda: own(x, layer._ready_parts(), **options))


def on_gpu(layer: Any, own: ChainLauncher, x: Tensor, parts: Sequence[Quantized], options: Mapping[str, Any]) -> Tensor:
    """All factors in one launch where that pays; one by one, and so from then on, where its kernel cannot be built."""
    epilogue = Epilogue(options["bias"] is not None, layer.activation, options["residual"] is not None)
    batch = x.shape[0 if layer.layout == "bsf" else 1]
    one = {"precision": options["precision"], "layout": layer.layout, "epilogue": epilogue, "batch": batch}
    if is_one_launch(own, x.device, **one, weights=layer.storage, inputs=layer._inputs).is_one:
        try:
            whole: Tensor = own(x, parts, **options)
            return whole
        except ToolchainError as error:
            never_one_launch(own, error)
    y: Tensor = chain_launcher(layer._shapes, layer.between, "no")(x, parts, **options)
    return y


def by_operators(layer: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, is_apart: bool, precision: str) -> Tensor:
    """Multiply by PyTorch operators, which compilers and autograd see. `is_apart`: each factor's epilogue is PyTorch's."""
    layout, last = layer.layout, len(layer.chain) - 1
    for number, (values, scale, x_scale) in enumerate(zip(layer.values, layer.scales, layer._x_scales, strict=True)):
        epilogue = (bias, layer.activation, residual) if number == last else (None, layer.between, None)
        own_bias, activation, own_residual = (None, "none", None) if is_apart else epilogue
        x = _operator(x, values, scale, own_bias, own_residual, layout, activation, layer.storage, layer.per, x_scale, precision)
        if is_apart:
            x = finish(x, *epilogue, layout)
    return x


# ---- one factor as a PyTorch operator


def _compute(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, layout: str, activation: str,
    storage: str, per: str, x_scale: float | None = None, precision: str | None = None,
) -> Tensor:  # fmt: skip
    kind = _kind_of(x, x_scale, precision)
    if not x.numel():
        return _empty(x, values, layout, kind)
    if not has_kernels(x.device) and x_scale is not None:
        added = [None if each is None else each.float() for each in (bias, residual)]
        with torch.no_grad():
            found = multiply(x.float() * x_scale, values.float() * scale, *added, layout=layout, activation=activation)
        return found.to(kind)
    if not has_kernels(x.device):
        wide = (values.to(torch.float32) * scale).to(x.dtype)
        with torch.no_grad():
            return multiply(x, wide, bias, residual, layout=layout, activation=activation)
    options = {"bias": None if bias is None else contiguous(bias), "residual": rows_of(residual), "precision": dtype_name(kind)}
    own, rows, what = launcher(*values.shape), rows_of(x), (values, scale, storage, per, x_scale)
    return _beside_writes(lambda: own(rows, quantized_of(*what), layout=layout, activation=activation, **options))


def _kind_of(x: Tensor, x_scale: float | None, precision: str | None) -> torch.dtype:
    """The dtype of y: x's own, unless that is in eight bits."""
    found: torch.dtype = x.dtype if x_scale is None else getattr(torch, precision or "float32")
    return found


def _empty(x: Tensor, values: Tensor, layout: str, kind: torch.dtype) -> Tensor:
    a, b, _, d = values.shape
    return x.new_empty((x.shape[0], a * b * d) if layout == "bsf" else (a * b * d, x.shape[1]), dtype=kind)


_operator = torch.library.custom_op(
    "ksgen::multiply_quantized",
    _compute,
    mutates_args=(),
    schema="(Tensor x, Tensor values, Tensor scale, Tensor? bias, Tensor? residual, str layout, str activation, str storage, "
    "str per, float? x_scale=None, str? precision=None) -> Tensor",
)


@_operator.register_fake
def _(
    x: Tensor, values: Tensor, scale: Tensor, bias: Any, residual: Any, layout: str, activation: str, storage: str, per: str,
    x_scale: float | None = None, precision: str | None = None,
) -> Tensor:  # fmt: skip
    return _empty(x, values, layout, _kind_of(x, x_scale, precision))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, values, scale, _, _, ctx.layout, ctx.activation, *_ = inputs
    ctx.save_for_backward(values, scale)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Gradients of a product without an epilogue, which the layer applies separately if gradients are wanted."""
    if ctx.activation != "none" or any(ctx.needs_input_grad[3:5]):
        raise LaunchError("ksgen::multiply_quantized: gradients of its epilogue; accepted: a product without one")
    values, scale = ctx.saved_tensors
    wide = (values.to(torch.float32) * scale).to(gradient.dtype).transpose(1, 2).contiguous()
    of_x = multiply(gradient, wide, layout=ctx.layout) if ctx.needs_input_grad[0] else None
    return of_x, *[None] * 10


_operator.register_autograd(_backward, setup_context=_keep)
