"""Layers with weights in eight bits, or in bfloat16 beside x in float32, for inference: made of `KSLinear`, one by one or in a whole model.

Kernels multiply by the values as they are. Gradients of x flow through what the values stand for; the weights have none.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from io import StringIO
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ksgen.errors import LaunchError, SpecError, ToolchainError
from ksgen.launch.chain import ChainLauncher
from ksgen.launch.weights import WrittenError, writes_to
from ksgen.pattern import Chain, Pattern
from ksgen.quantized import ROUNDED, Quantized, quantize, quantize_inputs, scales_told
from ksgen.spec import STORAGES, Epilogue
from ksgen.spec.kernel import is_word
from ksgen.spec.storage import SAME, STORED, refused_beside, taken_beside
from ksgen.torch import prepared
from ksgen.torch.checks import check_tensors, dtype_name
from ksgen.torch.choice import chain_launcher, has_kernels, is_one_launch, launcher, never_one_launch
from ksgen.torch.convert import put
from ksgen.torch.epilogue import finish
from ksgen.torch.folding import Folding
from ksgen.torch.intermediates import multiply_between
from ksgen.torch.layer import OPTIONS, KSLinear, checked_dtype
from ksgen.torch.ops import autocast, contiguous, is_plain, multiply, rows_of
from ksgen.torch.rule import write_stored
from ksgen.values import excerpt, listed
from ksgen.words import counted

SETTABLE = ("layout", "activation", "between", "fuse")  # options that may be set later
CALIBRATED_ROWS = 4096  # of x, from which a layer's scales are chosen
MOST_TRIES = 8  # of a call beside another thread's writes to the weights


class QuantizedKSLinear(Folding, nn.Module):
    """y = activation(x K^T + bias) + residual by weights in eight bits, with the activation `between` factors of the layer that it was.

    Made by `KSLinear.quantize`.

    `values_1`, `scale_1` and so on are buffers, from the factor that meets x first. x is float32, or float16 or bfloat16 beside weights in
    eight bits; with an `x_scale`, which is a buffer then, it becomes as the weights are before the first factor, and `x_saturated` counts
    what was beyond that.
    """

    bias: nn.Parameter | None
    is_stored = True
    backend, precision, out_layout = "auto", None, None
    _x_scale: float | None = None  # of what was saved before x could be in eight bits

    def __init__(self, layer: KSLinear, parts: Sequence[Quantized]) -> None:
        super().__init__()
        self.chain, self.layout, self.activation = layer.chain, layer.layout, layer.activation
        self.between, self.fuse = layer.between, layer.fuse
        self.storage, self.per = parts[0].storage, parts[0].per
        for number, each in enumerate(parts, 1):
            self.register_buffer(f"values_{number}", each.values)
            self.register_buffer(f"scale_{number}", each.scale)
        self.register_buffer("saturated_of_each", torch.tensor([each.saturated for each in parts]))
        self._x_scale = parts[0].x_scale
        if self._x_scale is not None:
            where = parts[0].values.device
            self.register_buffer("x_scale", torch.tensor(self._x_scale, dtype=torch.float32, device=where))
            self.register_buffer("x_saturated", torch.zeros((), dtype=torch.int64, device=where))
        bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        self.register_parameter("bias", bias)
        self._forget()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS and name not in SETTABLE:  # it would be an attribute that nobody reads
            raise LaunchError(f"{self._name()}: {name} is no option of it; accepted: {', '.join(SETTABLE)}")
        if name in vars(self):
            if name in ("chain", "storage", "per"):
                raise LaunchError(f"{self._name()}: {name} cannot be set; accepted: a KSLinear that is quantized so")
            if name in SETTABLE:
                options = OPTIONS | {each: getattr(self, each) for each in SETTABLE} | {name: value}
                checked_dtype(self.chain, self.bias is not None, torch.float32, **options)
        super().__setattr__(name, value)

    def _forget(self) -> None:
        """What was made of buffers: it belongs to this process, and is never saved or copied."""
        self._ready = _Ready(())

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name != "_ready"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    # ---- the weights

    def freeze(self) -> Self:
        """Nothing to declare: what is made of the weights is kept, and calls are prepared, as long as no write to them is seen."""
        return self

    def thaw(self) -> Self:
        """Make everything anew at the next call: after a write that cannot be seen, as `KSLinear.freeze` lists them."""
        for values in self.values:
            _made.pop(values, None)
        self._forget()
        return self

    @property
    def is_frozen(self) -> bool:
        """Always, as what is made of the weights is kept."""
        return True

    @property
    def values(self) -> list[Tensor]:
        return [self.get_buffer(f"values_{number}") for number in range(1, len(self.chain) + 1)]

    @property
    def scales(self) -> list[Tensor]:
        return [self.get_buffer(f"scale_{number}") for number in range(1, len(self.chain) + 1)]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The weights that the values stand for, one (a, b, c, d) per factor."""
        return [(values.to(torch.float32) * scale).to(dtype) for values, scale in zip(self.values, self.scales, strict=True)]

    @property
    def saturated(self) -> list[int]:
        """Of each factor, the weights that became the largest value though they are beyond it."""
        found: list[int] = self.get_buffer("saturated_of_each").tolist()
        return found

    @property
    def saturated_inputs(self) -> int:
        """Elements of x, in all calls so far, that became the largest value though they are beyond it."""
        return 0 if self._x_scale is None else int(self.get_buffer("x_saturated"))

    @property
    def weight_bytes(self) -> int:
        """Of values and scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.values, *self.scales))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves values and scales, and leaves them as they are stored where others are cast: `model.bfloat16()` is about x."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        *_, error_messages = others
        for name, own in self._buffers.items():
            given = state_dict.get(prefix + name)
            if own is not None and isinstance(given, Tensor) and given.dtype != own.dtype:  # which PyTorch would cast
                kinds = f"is {dtype_name(given.dtype)}, and this layer's {dtype_name(own.dtype)}"
                error_messages.append(f"{prefix}{name} {kinds}; quantize the layer as that one was")
                return
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._read_x_scale()

    def _read_x_scale(self) -> None:
        if self._x_scale is not None and not (own := self.get_buffer("x_scale")).is_meta:
            self._x_scale = float(own)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            raise LaunchError(f"{self._name()}: weights in {self.storage} are not trained; train the KSLinear, and quantize it then")
        super().requires_grad_(requires_grad)
        return self

    def quantize(self, *_: Any, **__: Any) -> nn.Module:
        raise LaunchError(f"{self._name()}: its weights are in {self.storage} already; accepted: the KSLinear that it was made of")

    # ---- the product

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if (y := prepared.serve(self, x, residual)) is not None:
            return y
        if isinstance(x, Tensor) and x.layout is torch.jagged:
            return self._of_jagged(x, residual)
        check_tensors(self._name(), x=x, residual=residual)
        y_shape = self._checked_y_shape(x, residual)
        rows, added = self._as_matrix(x), None if residual is None else self._as_matrix(residual)
        given = rows, added
        rows, bias, added, own_kind = autocast(rows, self.bias, added, dtype_name(rows.dtype))  # own_kind: None where it took x
        if not STORED[self.storage].is_scaled and own_kind is None and rows.dtype != torch.float32:
            return self._cast_multiply(*given).reshape(y_shape)
        self._check_kinds(rows, bias, added)
        kind = dtype_name(rows.dtype)
        if self._x_scale is not None:
            rows = self._in_bytes(rows, added)
        return self._multiply(rows, bias, added, kind).reshape(y_shape)

    def _cast_multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """As autocast has a layer of float32 multiply: x, and the weights, which have no scales, in autocast's type."""
        options: dict[str, Any] = {"layout": self.layout, "precision": None, "activation": self.activation, "between": self.between}
        return multiply_between(False, "auto", x, self.values, self.bias, residual, fuse=self.fuse, **options)

    def as_met(self, x: Tensor | None) -> Tensor | None:
        """What x becomes before the first factor: itself, or in float32 what its eight bits stand for."""
        if x is None or self._x_scale is None:
            return x
        return self._in_bytes(x, None).float() * self._x_scale

    def _in_bytes(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """x as the weights are. What is beyond the largest value becomes it, and is counted; so is NaN, which floats keep, and which
        becomes 0 in whole numbers. x over the scale is rounded to float32 first: one more pass over x would be needed to round it once."""
        if torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad)):
            raise LaunchError(f"{self._name()}: x in eight bits has no gradients; call under torch.no_grad(), or quantize without x_too")
        if not torch.compiler.is_compiling():
            self._quantized()  # which looks whether the scale was written to
        assert self._x_scale is not None
        how = STORAGES[self.storage]
        with torch.no_grad():
            wide = x.float() / self._x_scale
            self.get_buffer("x_saturated").add_((~(wide.abs() <= how.largest * ROUNDED)).sum())  # NaN too, which whole numbers cannot hold
            kept = wide.clamp(-how.largest, how.largest)
            return (kept.round().nan_to_num(0.0) if how.mantissa is None else kept).to(getattr(torch, how.dtype))

    def _check_kinds(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        if accepted := refused_beside(self.storage, kind := dtype_name(x.dtype)):
            raise LaunchError(f"{self._name()}: got x of {kind} for weights in {self.storage}; accepted: {accepted}")
        for name, given in (("bias", bias), ("residual", residual)):
            if given is not None and given.dtype != x.dtype:
                raise LaunchError(f"{self._name()}: got x of {kind} and {name} of {dtype_name(given.dtype)}; give both in one precision")

    def _multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str) -> Tensor:
        tensors = (x, bias, residual)
        needs_gradient = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
        if needs_gradient or not is_plain(*tensors):
            return self._by_operators(x, bias, residual, needs_gradient, kind)
        if not x.numel() or not has_kernels(x.device):
            return self._by_operators(x, bias, residual, False, kind)
        x, residual = rows_of(x), rows_of(residual)
        bias = None if bias is None else contiguous(bias)
        options = {"layout": self.layout, "activation": self.activation, "bias": bias, "residual": residual, "precision": kind}
        own = chain_launcher(self._shapes, self.between, self.fuse)
        if x.device.type == "cuda" and self.fuse == "auto" and len(self.chain) > 1:
            return _beside_writes(lambda: self._on_gpu(own, x, self._quantized().parts, options))
        return _beside_writes(lambda: own(x, self._quantized().parts, **options))

    def _on_gpu(self, own: ChainLauncher, x: Tensor, parts: Sequence[Quantized], options: Mapping[str, Any]) -> Tensor:
        """All factors in one launch where that pays; one by one, and so from then on, where its kernel cannot be built."""
        epilogue = Epilogue(options["bias"] is not None, self.activation, options["residual"] is not None)
        batch = x.shape[0 if self.layout == "bsf" else 1]
        one = {"precision": options["precision"], "layout": self.layout, "epilogue": epilogue, "batch": batch}
        if is_one_launch(own, x.device, **one, weights=self.storage, inputs=self._inputs).is_one:
            try:
                whole: Tensor = own(x, parts, **options)
                return whole
            except ToolchainError as error:
                never_one_launch(own, error)
        y: Tensor = chain_launcher(self._shapes, self.between, "no")(x, parts, **options)
        return y

    def _by_operators(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, is_apart: bool, kind: str) -> Tensor:
        """By PyTorch operators, which compilers and autograd see. `is_apart`: each factor's epilogue is PyTorch's."""
        last = len(self.chain) - 1
        for factor in range(last):
            if is_apart:
                x = finish(self._by_operator(factor, x, kind), None, self.between, None, self.layout)
            else:
                x = self._by_operator(factor, x, kind, activation=self.between)
        if is_apart:
            return finish(self._by_operator(last, x, kind), bias, self.activation, residual, self.layout)
        return self._by_operator(last, x, kind, bias, residual, self.activation)

    def _by_operator(
        self, factor: int, x: Tensor, kind: str, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
    ) -> Tensor:
        values, scale, x_scale = self.values[factor], self.scales[factor], self._x_scales[factor]
        return _operator(x, values, scale, bias, residual, self.layout, activation, self.storage, self.per, x_scale, kind)

    @property
    def _x_scales(self) -> list[float | None]:
        """Of the x that each factor takes: only the first one's may be in eight bits."""
        return [self._x_scale] + [None] * (len(self.chain) - 1)

    @property
    def _inputs(self) -> str:
        """How the x is stored that the first factor takes."""
        return SAME if self._x_scale is None else self.storage

    @property
    def _shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        return tuple(pattern.shape for pattern in self.chain)

    def _quantized(self) -> "_Ready":
        """What is made of buffers as they are: another one, once they were written to, moved or replaced.

        It is kept before anything is made, so that a thaw beside another thread's first call drops what that one makes.
        """
        seen = tuple([_seen(each) for name, each in self._buffers.items() if each is not None and name != "x_saturated"])
        made = self._ready
        if made.seen != seen:
            self._read_x_scale()
            made = self._ready = _Ready(seen)
        if not made.parts:
            every = zip(self.values, self.scales, self._x_scales, strict=True)
            made.parts = [_made_of(values, scale, self.storage, self.per, beside) for values, scale, beside in every]
        return made

    def _packed(self) -> list[Any]:
        """Each factor's weights as launchers take them."""
        return list(chain_launcher(self._shapes, self.between, self.fuse).weights_of_each(self._quantized().parts))

    def _multiplies(self, dtype: torch.dtype) -> bool:
        return dtype_name(dtype) in taken_beside(self.storage)

    def _prepared_calls(self) -> dict[Hashable, Any] | None:
        """Those of the buffers as they are; none where x becomes eight bits first."""
        return None if self._x_scale is not None else self._quantized().calls

    # ---- words

    def explain(self, batch: int = 1024) -> str:
        """Whether all factors are one launch at a batch of that many rows of bias's type, or float32; how each factor's weights are stored,
        and which kernel multiplies by it alone."""
        device = self.values[0].device
        kind = "float32" if self.bias is None else dtype_name(self.bias.dtype)
        last = Epilogue(self.bias is not None, self.activation)
        lines, apart = list[str](), [""] * (len(self.chain) == 1)  # of each factor's launch, if each has one
        if has_kernels(device) and len(self.chain) > 1:
            own, one = chain_launcher(self._shapes, self.between, self.fuse), {"weights": self.storage, "inputs": self._inputs}
            whole = own.explain(batch, precision=kind, layout=self.layout, epilogue=last, **one)
            first, *apart = whole.splitlines()
            lines.append(first)
        for number, (each, count) in enumerate(zip(self.chain, self.saturated, strict=True), 1):
            stored = f"{each}: {self.storage} weights with {scales_told(self.storage, self.per)}, {count} of {each.weight_count} saturated"
            has_bytes_in = number == 1 and self._x_scale is not None
            if has_bytes_in:
                stored += f"; x in {self.storage} times {self._x_scale:.6g}, {self.saturated_inputs} of its elements saturated so far"
            if has_kernels(device) and not apart:
                lines.append(stored)
            elif has_kernels(device):
                epilogue = last if number == len(self.chain) else Epilogue(activation=self.between)
                options: dict[str, Any] = {"layout": self.layout, "epilogue": epilogue, "weights": self.storage}
                options |= {"inputs": self._inputs} if number == 1 else {}
                lines.append(f"{stored}; {launcher(*each.shape).explain(batch, precision=kind, **options)}")
            else:
                lines.append(f"{stored}; PyTorch multiplies by what they stand for, as ksgen has no kernels on {device}")
        return "\n".join(lines)

    def to_dense(self) -> Tensor:
        """K, (out_features, in_features), of what the values stand for, in float32."""
        if self.between != "none":
            raise LaunchError(f"{self._name()}: with between={self.between!r} it has no matrix; accepted: a layer without it")
        return KSLinear.from_weights(self.dequantized(), layout=self.layout).to_dense().detach()

    def extra_repr(self) -> str:
        words = [str(self.chain), f"in_features={self.in_features}", f"out_features={self.out_features}", f"bias={self.bias is not None}"]
        words += [
            f"weights={self.storage}",
            scales_told(self.storage, self.per),
            f"{sum(self.saturated)} of {self.chain.weight_count} saturated",
        ]
        words += [] if self._x_scale is None else [f"x in {self.storage} times {self._x_scale:.6g}"]
        words += [f"{name}={getattr(self, name)}" for name in SETTABLE if getattr(self, name) != OPTIONS[name]]
        return ", ".join(words)


@dataclass(eq=False)
class _Ready:
    """What was made of buffers that were seen so: what launchers take, and prepared calls; None for what the usual way does."""

    seen: tuple[tuple[int, object], ...]
    parts: list[Quantized] = field(default_factory=list)
    calls: dict[Hashable, Any] = field(default_factory=dict)


def _seen(tensor: Tensor) -> tuple[int, object]:
    """Equal as long as nobody is seen to write; never of a tensor made in inference mode, whose writes nobody sees."""
    writes = writes_to(tensor)
    return tensor.data_ptr(), object() if writes is None else writes


_made: MutableMapping[Tensor, tuple[tuple[object, ...], Quantized]] = WeakIdKeyDictionary()  # by the tensor of values


def _made_of(values: Tensor, scale: Tensor, storage: str, per: str, x_scale: float | None) -> Quantized:
    """What launchers take, and pack once: the same object as long as nobody is seen to write to the tensors."""
    seen = (*_seen(values), *_seen(scale), x_scale)
    kept = _made.get(values)
    if kept is None or kept[0] != seen:
        made = Quantized(Pattern(*values.shape), storage, per, values.detach(), scale.detach(), x_scale=x_scale)
        kept = _made[values] = seen, made
    return kept[1]


def _beside_writes(use: Callable[[], Tensor]) -> Tensor:
    """What `use` makes of weights that it looks at itself: again, where another thread wrote to them after that look."""
    for _ in range(MOST_TRIES - 1):
        try:
            return use()
        except WrittenError:
            continue
    return use()


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
    return _beside_writes(lambda: own(rows, _made_of(*what), layout=layout, activation=activation, **options))


def _kind_of(x: Tensor, x_scale: float | None, precision: str | None) -> torch.dtype:
    """Of y: x's own, unless that is in eight bits."""
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
    """Of a product without an epilogue, which the layer applies apart where gradients are wanted."""
    if ctx.activation != "none" or any(ctx.needs_input_grad[3:5]):
        raise LaunchError("ksgen::multiply_quantized: gradients of its epilogue; accepted: a product without one")
    values, scale = ctx.saved_tensors
    wide = (values.to(torch.float32) * scale).to(gradient.dtype).transpose(1, 2).contiguous()
    of_x = multiply(gradient, wide, layout=ctx.layout) if ctx.needs_input_grad[0] else None
    return of_x, *[None] * 10


_operator.register_autograd(_backward, setup_context=_keep)


# ---- layers and models


def quantized(
    layer: KSLinear, storage: str, per: str = "output", x: Tensor | None = None, x_too: bool = False
) -> QuantizedKSLinear:  # fmt: skip
    """What `KSLinear.quantize` gives."""
    layer.refuse_turned("a quantized layer")
    own = dtype_name(layer.weights[0].dtype)
    if isinstance(storage, str) and storage in STORED and not STORED[storage].is_scaled and own not in taken_beside(storage):
        wanted = f"a layer of {', '.join(taken_beside(storage))}" + (f", or this one, whose weights are {own}" if own == storage else "")
        raise LaunchError(f"{layer._name()}: weights of {own} in {storage}; accepted: {wanted}")
    if type(x_too) is not bool:
        raise LaunchError(f"{layer._name()}: x_too={excerpt(x_too)}; accepted: True or False")
    if x_too and x is None:
        raise LaunchError(f"{layer._name()}: x_too=True without x; accepted: x as the layer meets it, from which its scale is found")
    if layer.split is not None:
        raise LaunchError(f"{layer._name()}: split over processes; accepted: a layer that one process has whole")
    if layer.precision not in (None, dtype_name(layer.weights[0].dtype)):
        raise LaunchError(f"{layer._name()}: precision={layer.precision}; accepted of a layer to quantize: None")
    with torch.inference_mode(False), torch.no_grad():  # writes to tensors made in inference mode are not seen
        rows = None if x is None else _rows(layer, x)
        parts: list[Quantized] = []
        for weights in layer.weights:
            beside = {"x_scale": quantize_inputs(rows, storage).scale} if x_too and not parts else {}
            parts.append(made := quantize(weights, storage, per, x=rows, layout=layer.layout, **beside))
            if rows is not None:  # as the next factor meets it
                rows = multiply(rows.float(), made.dequantized(), layout=layer.layout, activation=layer.between, backend="strided")
        made_of_them = QuantizedKSLinear(layer, parts)
    made_of_them.train(layer.training)
    return made_of_them


def _rows(layer: KSLinear, x: Tensor) -> Tensor:
    check_tensors(layer._name(), x=x)
    layer._y_shape(x)  # which refuses other features
    rows = layer._as_matrix(x.detach())
    return rows[:CALIBRATED_ROWS] if layer.layout == "bsf" else rows[:, :CALIBRATED_ROWS]


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer of a model, before and after."""

    name: str
    chain: Chain
    bytes: tuple[int, int]  # of the weights
    error: float  # of K, relative, by the Frobenius norm; of all weights, where something lies between factors; of y, where x was given
    saturated: int


@dataclass(frozen=True)
class QuantizedReport:
    """The result of `quantize`. `print(report)` shows a table."""

    storage: str
    per: str  # of scales, where the storage has any
    is_calibrated: bool
    layers: tuple[QuantizedLayer, ...]

    @property
    def bytes(self) -> tuple[int, int]:
        return sum(each.bytes[0] for each in self.layers), sum(each.bytes[1] for each in self.layers)

    def __repr__(self) -> str:
        before, after = self.bytes
        return f"QuantizedReport({counted(len(self.layers), 'layer')} in {self.storage}, {before:,} bytes before and {after:,} after)"

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table()
        of = "of y" if self.is_calibrated else "of K"
        for title in ("layer", "chain", "bytes", "share", f"error {of}", "saturated"):
            table.add_column(title, justify="left" if title in ("layer", "chain") else "right", no_wrap=True)
        for each in self.layers:
            before, after = each.bytes
            share, saturated = f"{after / before:.1%}", f"{each.saturated} of {each.chain.weight_count}"
            table.add_row(each.name, str(each.chain), f"{after:,}", share, f"{each.error:.4f}", saturated)
        text = StringIO()
        Console(file=text, width=200, highlight=False).print(table)
        before, after = self.bytes
        what = f"{counted(len(self.layers), 'layer')} in {self.storage}, {scales_told(self.storage, self.per)}"
        return f"{text.getvalue()}{what}: {before:,} bytes became {after:,}."


def quantize_model(
    model: nn.Module, storage: str, per: str = "output", *, names: Iterable[str] | None = None, inputs: Any = None, x_too: bool = False
) -> QuantizedReport:
    """Replace, in place, every `KSLinear` of a model, or those that `names` fit, by one with weights in eight bits, for inference.

    With `inputs`, what the model is called with (a tensor, or a list of arguments), each layer's scales are chosen for the x that it
    then meets. With `x_too`, x is in eight bits before a layer's first factor, with a scale that was found on `inputs`. If anything is
    wrong, nothing is changed.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={excerpt(model)}; accepted: a torch.nn.Module")
    if (keys := ("*",) if names is None else listed(names)) is None:
        raise SpecError(f"names={excerpt(names)}; accepted: a list of layers' names, or of patterns of names")
    there = {name: layer for name, layer in model.named_modules() if isinstance(layer, KSLinear)}
    found = {name: layer for name, layer in there.items() if any(fnmatchcase(name, str(key)) for key in keys)}
    if not there and any(isinstance(layer, QuantizedKSLinear) for layer in model.modules()):
        raise SpecError("every KSLinear of the model is quantized already; accepted: the model before it was quantized")
    if not found:
        raise SpecError(f"names={excerpt(names)} name no KSLinear of the model; its layers: {excerpt(list(there))}")
    if "" in found:
        raise SpecError("the model is a single layer, which cannot be replaced in place; use KSLinear.quantize")
    if x_too and inputs is None:
        raise SpecError("x_too=True without inputs; accepted: inputs as the model meets them, from which scales of x are found")
    if inputs is not None and is_word(storage, STORED) and not STORED[storage].is_scaled:
        raise SpecError(f"inputs were given with storage={storage}, which has no scales; accepted: a model without inputs")
    met = {} if inputs is None else _met(model, found, inputs)
    new = {name: _quantized_of(name, layer, storage, per, met.get(name), x_too) for name, layer in found.items()}
    told = tuple(_told(name, layer, new[name], met.get(name)) for name, layer in found.items())
    made = {layer: new[name] for name, layer in found.items()}
    for name, layer in list(model.named_modules(remove_duplicate=False)):  # one that has several names stays one
        if layer in made:
            put(model, name, made[layer])
    write_stored(model, found, storage)
    return QuantizedReport(storage, per, bool(met), told)


def _quantized_of(name: str, layer: KSLinear, storage: str, per: str, x: Tensor | None, x_too: bool) -> QuantizedKSLinear:
    """Of a layer of a model, which its errors name: x is what it meets, as the user gave inputs of the model."""
    try:
        return quantized(layer, storage, per, x, x_too)
    except LaunchError as error:
        raise LaunchError(f"layer {name}: {error}") from error


def _met(model: nn.Module, layers: Mapping[str, KSLinear], inputs: Any) -> dict[str, Tensor]:
    """What x each layer meets, of one call of the model."""
    met: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def keep(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            assert isinstance(layer, KSLinear)
            met.setdefault(name, _rows(layer, given[0] if given else named["x"]).clone())

        return keep

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    were_training = [(each, each.training) for each in model.modules()]  # some may be otherwise than the model
    try:
        with torch.no_grad():
            model.eval()(*(inputs if isinstance(inputs, list | tuple) else (inputs,)))
    finally:
        for each, was_training in were_training:
            each.training = was_training
        for handle in handles:
            handle.remove()
    if missing := sorted(set(layers) - set(met)):
        raise SpecError(f"inputs reach no {', '.join(missing)}; accepted: inputs that every layer meets, or names of those that do")
    return met


def _told(name: str, before: KSLinear, after: QuantizedKSLinear, x: Tensor | None) -> QuantizedLayer:
    sizes = sum(each.numel() * each.element_size() for each in before.weights), after.weight_bytes
    with torch.no_grad():
        wanted = _seen_by(x, [each.float() for each in before.weights], before)
        found = _seen_by(after.as_met(x), after.dequantized(), before)
        error = float((found - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny))
    return QuantizedLayer(name, before.chain, sizes, error, sum(after.saturated))


def _seen_by(x: Tensor | None, weights: Sequence[Tensor], like: KSLinear) -> Tensor:
    """What x becomes by these weights; K, where there is no x; the weights, where there is no K."""
    if x is None and like.between != "none":
        return torch.cat([each.flatten() for each in weights])
    layer = KSLinear.from_weights(weights, layout=like.layout, between=like.between, backend="strided")
    return layer.to_dense() if x is None else layer(x.float())
