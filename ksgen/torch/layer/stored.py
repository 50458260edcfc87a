"""Layers whose weights are stored in eight bits, or in bfloat16 for x in float32: their buffers and products.

The buffers move, load and are saved with the layer. Kernels multiply by the stored values directly. Gradients of x flow
through the dequantized values; the weights have no gradients.
"""

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakIdKeyDictionary

from ksgen.errors import LaunchError, ToolchainError
from ksgen.launch.chain import ChainLauncher
from ksgen.launch.weights import writes_to
from ksgen.pattern import Pattern
from ksgen.quantized import ROUNDED, Quantized, describe_scales
from ksgen.spec import STORAGES, Activation, Epilogue, Fuse, Layout
from ksgen.spec.storage import SAME, STORED, refused_x_precision, x_precisions
from ksgen.torch.layer.base import ChainLayer
from ksgen.torch.operators import ops
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.choice import disable_fusion, has_kernels, is_one_launch, launcher
from ksgen.torch.operators.frozen import despite_writes
from ksgen.torch.operators.meanwhile import unless_building
from ksgen.torch.operators.prepared import launcher_of_layers
from ksgen.torch.operators.products import finish
from ksgen.values import unlike


@dataclass(eq=False)
class CachedCalls:
    """Prepared calls with buffers in a known state."""

    seen: tuple[tuple[int, object], ...]  # fingerprints of the buffers
    calls: dict[Hashable, Any] = field(default_factory=dict)  # prepared calls; `Unprepared` for shapes without one


def fingerprint_of(tensor: Tensor) -> tuple[int, object]:
    """Fingerprint of a tensor, equal as long as no write is detected.

    Fingerprints of a tensor made in inference mode are never equal, because its writes are not detected.
    """
    writes = writes_to(tensor)
    return tensor.data_ptr(), object() if writes is None else writes


# operands by their tensor of values, each with the fingerprints of its tensors
_operands: MutableMapping[Tensor, tuple[tuple[object, ...], Quantized]] = WeakIdKeyDictionary()


def quantized_of(values: Tensor, scale: Tensor, storage: str, per: str, x_scale: float | None) -> Quantized:
    """Operand for launchers, which pack it once: the same object as long as no write to the tensors is detected."""
    seen = (*fingerprint_of(values), *fingerprint_of(scale), x_scale)
    cached = _operands.get(values)
    if cached is None or cached[0] != seen:
        made = Quantized(Pattern(*values.shape), storage, per, values.detach(), scale.detach(), x_scale=x_scale)
        cached = _operands[values] = seen, made
    return cached[1]


# ---- all factors of a layer


def multiply_stored(layer: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, precision: str) -> Tensor:
    """Output of a layer with stored weights, as a matrix in this precision."""
    if not ops.is_plain(x, bias, residual) or not x.numel() or not has_kernels(x.device):
        return by_operators(layer, x, bias, residual, ops.needs_gradient(x, bias, residual), precision)
    x, options = ops.rows_of(x), {"layout": layer.layout, "activation": layer.activation, "precision": precision}
    options |= {"bias": ops.contiguous(bias), "residual": ops.rows_of(residual)}
    launch = launcher_of_layers([layer])
    if x.device.type == "cuda" and layer.fuse == "auto" and len(layer.chain) > 1:
        return despite_writes(lambda: on_gpu(layer, launch, x, layer._ready_parts(), options))
    return despite_writes(lambda: launch(x, layer._ready_parts(), **options))


def on_gpu(
    layer: Any, launch: ChainLauncher, x: Tensor, parts: Sequence[Quantized], options: Mapping[str, Any]
) -> Tensor:
    """Run all factors in one launch if that is faster, else one by one.

    If the fused kernel cannot be built, the factors run one by one from then on.
    """
    epilogue = Epilogue(options["bias"] is not None, layer.activation, options["residual"] is not None)
    batch = x.shape[0 if layer.layout == "bsf" else 1]
    asked = {"precision": options["precision"], "layout": layer.layout, "epilogue": epilogue, "batch": batch}
    if is_one_launch(launch, x.device, **asked, weights=layer.storage, inputs=layer._inputs).is_one:
        try:
            return launch(x, parts, **options)
        except ToolchainError as error:
            disable_fusion(launch, error)
    return launcher_of_layers([layer], "no")(x, parts, **options)


def by_operators(
    layer: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, is_apart: bool, precision: str
) -> Tensor:
    """Multiply by PyTorch operators, which compilers and autograd see.

    With `is_apart`, PyTorch computes each factor's epilogue in separate operations. Exchanged features are copied.
    """

    def product(x: Tensor, weights: Any, bias: Any, activation: str, residual: Any, layout: str) -> Tensor:
        values, scale, x_scale = weights
        if ops.is_transformed() and x_scale is None:  # PyTorch applies no transform to the operator
            wide = _dequantized(values, scale, x.dtype)
            return ops.multiply_factor(x, wide, bias, activation, residual, layout, precision=None, backend="auto")
        more = layer.storage, layer.per, x_scale, precision
        if is_apart:
            return finish(
                _operator(x, values, scale, None, None, layout, "none", *more), bias, activation, residual, layout
            )
        return _operator(x, values, scale, bias, residual, layout, activation, *more)

    stored = list(zip(layer.values, layer.scales, layer._x_scales, strict=True))
    layouts, last = [layer.layout] * (1 + len(stored)), (bias, layer.activation, residual)
    return ops.multiply_each(ops.copying(product), x, stored, layouts, layer._exchanges, layer.between, last)


# ---- one factor as a PyTorch operator


def _dequantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights that values and scales represent."""
    return (values.to(torch.float32) * scale).to(dtype)


def _compute(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, layout: Layout,
    activation: Activation, storage: str, per: str, x_scale: float | None = None, precision: str | None = None,
) -> Tensor:  # fmt: skip
    """Multiply by one factor, with a kernel of ksgen, or on other devices with PyTorch and dequantized weights."""
    if ops._is_forward_mode():  # PyTorch would take such a derivative of the operator as zero
        raise LaunchError(
            "ksgen::multiply_quantized has no forward-mode derivatives; accepted: torch.func.jvp of a layer itself, "
            "whose x is not in eight bits"
        )
    kind = _kind_of(x, x_scale, precision)
    if not x.numel():
        return ops.empty_y(x, values, layout, dtype=kind)
    if not has_kernels(x.device):
        weights, added = values.float() * scale, [bias, residual]
        if x_scale is None:
            weights = weights.to(x.dtype)
        else:
            x, added = x.float() * x_scale, [None if each is None else each.float() for each in added]
        with torch.no_grad():
            return ops.multiply(x, weights, *added, layout=layout, activation=activation).to(kind)
    launch, rows, stored = launcher(*values.shape), ops.rows_of(x), (values, scale, storage, per, x_scale)
    options: dict[str, Any] = {"layout": layout, "activation": activation, "precision": dtype_name(kind)}
    options |= {"bias": ops.contiguous(bias), "residual": ops.rows_of(residual)}
    return unless_building(
        lambda: despite_writes(lambda: launch(rows, quantized_of(*stored), **options)),
        lambda: ops.empty_y(x, values, layout, dtype=kind).zero_(),
    )


def _kind_of(x: Tensor, x_scale: float | None, precision: str | None) -> torch.dtype:
    """Dtype of y: that of x, or of `precision` if x is in eight bits (float32 by default)."""
    return x.dtype if x_scale is None else getattr(torch, precision or "float32")


_operator = torch.library.custom_op(
    "ksgen::multiply_quantized",
    _compute,
    mutates_args=(),
    schema="(Tensor x, Tensor values, Tensor scale, Tensor? bias, Tensor? residual, str layout, str activation, "
    "str storage, str per, float? x_scale=None, str? precision=None) -> Tensor",
)
_operator.register_fake(
    lambda x, values, scale, bias, residual, layout, activation, storage, per, x_scale=None, precision=None: (
        ops.empty_y(x, values, layout, dtype=_kind_of(x, x_scale, precision))
    )
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, values, scale, _, _, ctx.layout, ctx.activation, *_ = inputs
    ctx.save_for_backward(values, scale)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Gradients of a product without an epilogue, which the layer applies separately if gradients are wanted."""
    if ctx.activation != "none" or any(ctx.needs_input_grad[3:5]):
        raise LaunchError("ksgen::multiply_quantized: gradients of its epilogue; accepted: a product without one")
    values, scale = ctx.saved_tensors
    wide = _dequantized(values, scale, gradient.dtype).transpose(1, 2).contiguous()
    of_x = ops.multiply(gradient, wide, layout=ctx.layout) if ctx.needs_input_grad[0] else None
    return of_x, *[None] * 10


_operator.register_autograd(_backward, setup_context=_keep)


register_flop_formula([torch.ops.ksgen.multiply_quantized])(ops.flops_of_product)


# ---- the layer


class StoredWeights(ChainLayer, nn.Module):
    """A layer with buffers `values_1`, `scale_1` and so on instead of trainable weights.

    Data derived from the buffers is cached until a write to one of them is detected.
    """

    _kind = "QuantizedKSLinear"
    has_stored_type = True
    storage: str
    per: str
    activation: str
    between: Activation
    fuse: Fuse
    bias: nn.Parameter | None
    _multiply: Callable[..., Tensor]  # that of `KSLinear`

    def _store(self, parts: Sequence[Quantized]) -> None:
        self.storage, self.per = parts[0].storage, parts[0].per
        for number, each in enumerate(parts, 1):
            self.register_buffer(f"values_{number}", each.values)
            self.register_buffer(f"scale_{number}", each.scale)
        where = parts[0].values.device
        self.register_buffer("saturated_of_each", torch.tensor([each.saturated for each in parts], device=where))
        self._x_scale = parts[0].x_scale
        if self._x_scale is not None:
            self.register_buffer("x_scale", torch.tensor(self._x_scale, dtype=torch.float32, device=where))
            self.register_buffer("x_saturated", torch.zeros((), dtype=torch.int64, device=where))
        self._forget()

    def _forget(self) -> None:
        """Drop the data derived from buffers, which belongs to this process and is never saved or copied."""
        self._ready = CachedCalls(())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    # ---- the weights

    def freeze(self) -> Self:
        """Return the layer unchanged: caching needs no declaration, because writes to the buffers are detected."""
        return self

    def thaw(self) -> Self:
        """Pack again at the next call.

        This is needed after a write that is not detected; `KSLinear.freeze` lists such writes.
        """
        for values in self.values:
            _operands.pop(values, None)
        self._forget()
        return self

    @property
    def is_frozen(self) -> bool:
        """Always true, because packed weights are cached."""
        return True

    @property
    def values(self) -> list[Tensor]:
        return [self.get_buffer(f"values_{number}") for number in range(1, len(self.chain) + 1)]

    @property
    def scales(self) -> list[Tensor]:
        return [self.get_buffer(f"scale_{number}") for number in range(1, len(self.chain) + 1)]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The weights that the values represent, one (a, b, c, d) per factor."""
        return [_dequantized(*each, dtype) for each in zip(self.values, self.scales, strict=True)]

    @property
    def saturated(self) -> list[int]:
        """Number of weights per factor that exceeded the largest value and were clipped to it."""
        found: list[int] = self.get_buffer("saturated_of_each").tolist()
        return found

    @property
    def saturated_inputs(self) -> int:
        """Number of elements of x that exceeded the largest value or were NaN, in all calls so far."""
        return 0 if self._x_scale is None else int(self.get_buffer("x_saturated"))

    @property
    def weight_bytes(self) -> int:
        """Bytes of values and scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.values, *self.scales))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move buffers without a cast: calls such as `model.bfloat16()` cast only the bias."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        *_, error_messages = others
        for name, buffer in self._buffers.items():
            saved = state_dict.get(prefix + name)
            # PyTorch would cast another dtype
            if buffer is not None and isinstance(saved, Tensor) and saved.dtype != buffer.dtype:
                kinds = f"is {dtype_name(saved.dtype)}, and this layer's {dtype_name(buffer.dtype)}"
                error_messages.append(f"{prefix}{name} {kinds}; quantize the layer to the storage of the saved one")
                return
        self.thaw()  # PyTorch swaps no tensors with weak references, if it loads by swapping
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._read_x_scale()

    def _read_x_scale(self) -> None:
        """Update the number `_x_scale` from its buffer."""
        if self._x_scale is not None and not (buffer := self.get_buffer("x_scale")).is_meta:
            self._x_scale = float(buffer)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            self._refuse_training()
        super().requires_grad_(requires_grad)
        return self

    def reset_parameters(self) -> None:
        self._refuse_training()

    def _refuse_training(self) -> None:
        raise LaunchError(
            f"{self._name()}: weights in {self.storage} are not trained; train the KSLinear, and quantize it then"
        )

    # ---- the product

    def _multiplied(self, x: Tensor, residual: Tensor | None) -> Tensor:
        y_shape = self._checked_y_shape(x, residual)
        rows, added = self._as_matrix(x), None if residual is None else self._as_matrix(residual)
        rows, bias, added, kind_if_uncast = ops.autocast(rows, self.bias, added, dtype_name(rows.dtype))
        if not STORED[self.storage].is_scaled and kind_if_uncast is None and rows.dtype != torch.float32:
            # like a float32 layer under autocast: x and the weights, which have no scales, are cast
            return self._multiply(x, self.values, self.bias, residual, self.activation)
        self._check_kinds(rows, bias, added)
        kind = dtype_name(rows.dtype)
        if self._x_scale is not None:
            rows = self._in_bytes(rows, added)
        return multiply_stored(self, rows, bias, added, kind).reshape(y_shape)

    def first_input(self, x: Tensor | None) -> Tensor | None:
        """Input of the first factor: x, or if x is quantized, the float32 values of its eight-bit form."""
        if x is None or self._x_scale is None:
            return x
        return self._in_bytes(x, None).float() * self._x_scale

    def _in_bytes(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Quantize x like the weights, and count the clipped elements, which are beyond the range.

        NaN is counted, too: floating-point storages keep NaN, and integers store 0. x / scale is rounded to float32
        before it is rounded to eight bits: a single rounding would take one more pass over x.
        """
        if ops.needs_gradient(x, residual):
            raise LaunchError(
                f"{self._name()}: x in eight bits has no gradients; call under torch.no_grad(), or quantize without "
                "x_too"
            )
        if not torch.compiler.is_compiling():
            if torch._C._functorch.is_batchedtensor(x):
                raise LaunchError(
                    f"{self._name()}: x in eight bits under torch.func.vmap; accepted: all of x in one call, or a "
                    "layer quantized without x_too"
                )
            self._ready_now()  # updates `_x_scale` if its buffer was written to
        assert self._x_scale is not None
        how = STORAGES[self.storage]
        with torch.no_grad():
            wide = x.float() / self._x_scale
            self.get_buffer("x_saturated").add_((~(wide.abs() <= how.largest * ROUNDED)).sum())  # counts NaN too
            clipped = wide.clamp(-how.largest, how.largest)
            return (clipped.round().nan_to_num(0.0) if how.mantissa is None else clipped).to(getattr(torch, how.dtype))

    def _check_kinds(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        if accepted := refused_x_precision(self.storage, kind := dtype_name(x.dtype)):
            raise LaunchError(f"{self._name()}: got x of {kind} for weights in {self.storage}; accepted: {accepted}")
        for name, given in (("bias", bias), ("residual", residual)):
            if given is not None and (wrong := unlike(name, dtype_name(given.dtype), kind)):
                raise LaunchError(f"{self._name()}: {wrong}")

    @property
    def _x_scales(self) -> list[float | None]:
        """Scale of each factor's input. Only the first factor may take eight bits; all others have None."""
        return [self._x_scale] + [None] * (len(self.chain) - 1)

    @property
    def _inputs(self) -> str:
        """Storage of the first factor's input."""
        return SAME if self._x_scale is None else self.storage

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32

    def _ready_now(self) -> CachedCalls:
        """Prepared calls with the buffers' current state; none are left after a write, move or replacement.

        The record is stored before anything is packed. A thaw during another thread's first call therefore drops what
        that call packs.
        """
        seen = tuple(
            [fingerprint_of(each) for name, each in self._buffers.items() if each is not None and name != "x_saturated"]
        )
        ready = self._ready
        if ready.seen != seen:
            self._read_x_scale()
            ready = self._ready = CachedCalls(seen)
        return ready

    def _ready_parts(self) -> list[Quantized]:
        """Operands of launchers, one per factor."""
        self._ready_now()  # updates `_x_scale` if its buffer was written to
        every = zip(self.values, self.scales, self._x_scales, strict=True)
        return [quantized_of(values, scale, self.storage, self.per, x_scale) for values, scale, x_scale in every]

    def _packed(self) -> list[Any]:
        """Weights of each factor as launchers accept them."""
        return list(launcher_of_layers([self])._weights_of_each(self._ready_parts()))

    def _multiplies(self, dtype: torch.dtype) -> bool:
        return dtype_name(dtype) in x_precisions(self.storage)

    def _prepared_calls(self) -> dict[Hashable, Any] | None:
        """Cache of prepared calls with these buffers; None if x is quantized before it is multiplied."""
        return None if self._x_scale is not None else self._ready_now().calls

    # ---- descriptions

    def _factors(self) -> Sequence[Tensor]:
        return self.dequantized()

    def _stored_words(self) -> list[str]:
        words = [f"weights={self.storage}", describe_scales(self.storage, self.per)]
        if not self.get_buffer("saturated_of_each").is_meta:
            words.append(f"{sum(self.saturated)} of {self.chain.weight_count} saturated")
        return words if self._x_scale is None else [*words, f"x in {self.storage} times {self._x_scale:.6g}"]
