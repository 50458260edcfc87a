"""`KSLinear`: a chain of Kronecker-sparse factors in place of a `torch.nn.Linear`. Does not compute products itself."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, Self

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError, PatternError
from ksgen.pattern import Chain, Patterns
from ksgen.quantized import ROUNDED, Quantized, quantize, quantize_inputs, scales_told
from ksgen.spec import LAYOUTS, PRECISIONS, STORAGES, Epilogue, KernelSpec
from ksgen.spec.kernel import checked_batch
from ksgen.spec.storage import SAME, STORED, refused_beside, taken_beside
from ksgen.torch import frozen
from ksgen.torch.backends import NAMES
from ksgen.torch.base import ChainLayer
from ksgen.torch.checks import (
    check_activation,
    check_backend,
    check_device,
    check_dtype,
    check_fuse,
    check_precision,
    check_tensors,
    check_words,
    dtype_name,
)
from ksgen.torch.choice import chain_launcher
from ksgen.torch.epilogue import ACTIVATIONS
from ksgen.torch.explained import explained
from ksgen.torch.factorize import factorize
from ksgen.torch.group import group
from ksgen.torch.intermediates import INTERMEDIATES, is_recomputed, multiply_between
from ksgen.torch.operands import operand
from ksgen.torch.ops import autocast, multiply
from ksgen.torch.products import chain_to_dense
from ksgen.torch.splits import checked_processes
from ksgen.torch.stored import Ready, forget, multiply_stored, quantized_of, seen_of
from ksgen.torch.weight import Weight
from ksgen.values import excerpt, listed

CALIBRATED_ROWS = 4096  # of x, from which a layer's scales are chosen
OPTIONS: dict[str, Any] = {  # that may be set later, with their defaults
    "layout": "bsf", "precision": None, "backend": "auto", "activation": "none", "between": "none", "fuse": "auto", "intermediates": "keep",
    "out_layout": None,
}  # fmt: skip


class KSLinear(ChainLayer, nn.Linear):
    """y = activation(x K^T + bias) + residual, where K is a product of Kronecker-sparse factors; or what the factors give one after the
    other with the activation `between` them.

    `patterns` are listed from the factor that meets x first to the last one. `weights` holds one parameter of shape
    (a, b, c, d) for each. x is (..., in_features) in layout "bsf" and (in_features, ...) in "bsl"; y alike, or as `out_layout` says.
    An `nn.Linear` whose `weight` is K, made of the factors when its values are asked for.
    """

    between, fuse, intermediates = "none", "auto", "keep"  # of what was saved before there was a choice
    _settable: Collection[str] = tuple(OPTIONS)  # options that may be set later
    _fixed: Mapping[str, str] = {"chain": "a new KSLinear"}  # what cannot be set, and what is accepted

    def __init__(
        self,
        patterns: Patterns,
        bias: bool = True,
        layout: str = "bsf",
        precision: str | None = None,
        backend: str = "auto",
        activation: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
        between: str = "none",
        fuse: str = "auto",
        intermediates: str = "keep",
        out_layout: str | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which makes a dense parameter
        self.chain = Chain.read(patterns)
        options: dict[str, Any] = {
            "layout": layout, "precision": precision, "backend": backend, "activation": activation, "between": between, "fuse": fuse,
            "intermediates": intermediates, "out_layout": out_layout,
        }  # fmt: skip
        check_device(device)
        dtype = checked_dtype(self.chain, bias, dtype, **options)
        for name, value in options.items():
            self._set(name, value)
        self.weights = nn.ParameterList(torch.empty(pattern.shape, device=device, dtype=dtype) for pattern in self.chain)
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_weights(cls, weights: Iterable[Tensor], bias: Tensor | None = None, **options: Any) -> "KSLinear":
        """A layer with copies of these weights, one (a, b, c, d) per factor, from the one that meets x first."""
        if not (given := listed(weights)):
            raise PatternError(f"weights={excerpt(weights)}; accepted: one tensor of shape (a, b, c, d) or more")
        check_tensors("KSLinear.from_weights", bias=bias, **{f"weights[{place}]": each for place, each in enumerate(given)})
        options = {"device": given[0].device, "dtype": given[0].dtype} | options
        layer = cls([tuple(each.shape) for each in given], bias=bias is not None, **options)
        if bias is not None and bias.shape != layer.bias.shape:
            raise LaunchError(f"{layer._name()}: got bias of shape {tuple(bias.shape)}; {tuple(layer.bias.shape)} is needed")
        with torch.no_grad():
            for parameter, value in zip([*layer.weights, layer.bias], [*given, bias], strict=True):
                if value is not None:
                    parameter.copy_(value)
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Module, patterns: Patterns, *, refine: int = 0, **options: Any) -> "KSLinear":
        """The layer whose K is near an `nn.Linear`'s weight: its factorization by `factorize`. The bias is copied."""
        if not isinstance(linear, nn.Linear):
            raise LaunchError(f"KSLinear.from_linear: got {type(linear).__name__}; accepted: an nn.Linear")
        if options.get("between", "none") != "none":
            raise LaunchError(f"KSLinear.from_linear: between={excerpt(options['between'])}, with which no layer is near a matrix")
        found = factorize(linear.weight.detach(), patterns, refine=refine)
        options = {"device": linear.weight.device, "dtype": linear.weight.dtype} | options
        return cls.from_weights(found.weights, linear.bias, **options)

    def to_linear(self) -> nn.Linear:
        """The `nn.Linear` with the same matrix and bias. Features come last in its x, as in layout "bsf"."""
        if self.activation != "none":
            raise LaunchError(
                f"{self._name()}: an nn.Linear has no activation={self.activation!r}; apply it apart, and set it to 'none' first"
            )
        return dense_layer(self.to_dense(), self.bias).train(self.training)

    def to_dense(self) -> Tensor:
        """K, (out_features, in_features), differentiable. Of sharded weights it is gathered: every process has to ask."""
        if self.between != "none":
            raise LaunchError(f"{self._name()}: with between={self.between!r} it has no matrix; accepted: a layer without it")
        return chain_to_dense(self._factors()).contiguous()

    def _factors(self) -> Sequence[Tensor]:
        """The weights as K is made of them."""
        return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in self.weights]

    @property
    def weight(self) -> Tensor:
        """K, which is dense only when its values are asked for. A plain tensor for a compiler, which leaves out what nobody uses."""
        return self.to_dense() if self.is_stored or torch.compiler.is_compiling() else Weight(self)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise LaunchError(
            f"{self._name()}: weight is the product of the factors in `weights`, and cannot be set; accepted: KSLinear.from_linear"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # of a parameter, PyTorch would say that the attribute exists
            object.__setattr__(self, name, value)
        if name in OPTIONS and name not in self._settable:  # it would be an attribute that nobody reads
            raise LaunchError(f"{self._name()}: {name} is no option of it; accepted: {', '.join(self._settable)}")
        if name in OPTIONS:
            options = {each: getattr(self, each) for each in OPTIONS} | {name: value}
            is_of_weights = name == "precision" or self.precision is None  # else a cast may have taken the precision away, which calls say
            checked_dtype(self.chain, self.bias is not None, self._dtype if is_of_weights else None, **options)
            if self._parallel is not None and options["out_layout"] not in (None, options["layout"]):
                raise LaunchError(f"{self._name()}: {name}={value!r} would turn y of a layer that is split; accepted: y as x is")
            self._set(name, value)
            return
        if name in self._fixed and name in vars(self):
            raise LaunchError(f"{self._name()}: {name} cannot be set; accepted: {self._fixed[name]}")
        super().__setattr__(name, value)

    @property
    def _dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    def _set(self, name: str, value: Any) -> None:
        """An option that was checked."""
        super().__setattr__(name, value)
        if name in ("layout", "out_layout") and self.out_layout == self.layout:
            super().__setattr__("out_layout", None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As for any module, except by PyTorch's `ColwiseParallel`, which takes the weights for those of an `nn.Linear`."""
        if name.startswith("weights."):
            raise LaunchError(
                f"{self._name()}: {name} cannot be registered; accepted for tensor parallelism: styles of ksgen.torch.parallel"
            )
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Draw weights uniformly in +-1/sqrt(c), as in the paper, and the bias in +-1/sqrt(in_features), as `nn.Linear` does."""
        for pattern, weights in zip(self.chain, self.weights, strict=True):
            _draw(weights, 1 / sqrt(pattern.c))
        if self.bias is not None:
            _draw(self.bias, 1 / sqrt(self.in_features))

    def _multiplied(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if not torch.compiler.is_compiling():
            frozen.look_after(self, self._own_weights)
        if self._parallel is not None:
            y: Tensor = self._parallel(self, x, residual)
            return y
        return self._multiply(x, list(self.weights), self.bias, residual, self.activation)

    def _multiply(self, x: Tensor, weights: list[Tensor], bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
        """By weights of this process's own chain."""
        y_shape = self._checked_y_shape(x, residual)
        rows, added = self._as_matrix(x), None if residual is None else self._as_matrix(residual, self.y_layout)
        options: dict[str, Any] = {"layout": self.layout, "precision": self.precision, "activation": activation}
        options |= {"between": self.between, "fuse": self.fuse}
        if self.out_layout is not None:
            options |= {"out_layout": self.out_layout, "turn": self.own_chain.turn}
        again = self.intermediates != "keep" and is_recomputed(self.intermediates, self.own_chain, (self.between, activation))
        y = multiply_between(again, self.backend, rows, weights, bias, added, **options)
        if torch.jit.is_tracing():
            return y.reshape(y_shape)  # records where the shape comes from; the operator below, its numbers
        return y if y.shape == y_shape else torch.ops.aten._unsafe_view(y.contiguous(), y_shape)  # no view, as FSDP2 wants it

    @staticmethod
    def group(layers: "Sequence[KSLinear]") -> nn.Module:
        """Layers that take the same x, such as q, k and v, as one module that gives their outputs beside each other: in one launch
        where that is faster, if only the values are needed. `parts(x)` gives them apart."""
        return group(layers)

    def freeze(self) -> Self:
        """Declare that nobody will write to the weights. What is made of them is made once, and kept until they thaw.

        A write that can be seen ends it, with a warning: one that PyTorch counts, a move, a load, a step of an optimizer, and
        `train()` does silently. A write through `.data`, NumPy, a collective or a CUDA graph's replay cannot be seen: thaw first.
        Copies of a frozen layer are not frozen.
        """
        self._freeze(self._name())
        return self

    def _freeze(self, name: str) -> bool:
        weights, again = self._own_weights(), self._own_weights()
        if any(weights[each] is not again[each] for each in weights):
            raise LaunchError(f"{name}: its weights are computed at each use, by a parametrization; such a layer cannot be frozen")
        return frozen.freeze(self, name, weights)

    def thaw(self) -> Self:
        """Make everything anew at each call from now on. Frees what was kept, except memory that CUDA graphs read."""
        frozen.thaw(self)
        return self

    @property
    def is_frozen(self) -> bool:
        return frozen.is_frozen(self, self._own_weights())

    def train(self, mode: bool = True) -> Self:
        """As for any module. Training thaws the layer."""
        if mode:
            self.thaw()
        super().train(mode)
        return self

    def quantize(self, storage: str, per: str = "output", *, x: Tensor | None = None, x_too: bool = False) -> "QuantizedKSLinear":
        """A layer for inference with these weights in eight bits, "int8", "e4m3" or "e5m2", and a scale per factor, per i or per output;
        or in "bfloat16", without scales, for x of float32.

        With `x`, inputs as this layer meets them, scales are chosen so that what the factors make of it changes least. With `x_too`, x
        is in eight bits as well before the first factor, with the one scale by which none of that `x` saturates. This layer stays as it is.
        """
        self.refuse_turned("a quantized layer")
        own = dtype_name(self._dtype)
        if isinstance(storage, str) and storage in STORED and not STORED[storage].is_scaled and own not in taken_beside(storage):
            already = f", or this one, whose weights are {own}" if own == storage else ""
            wanted = f"a layer of {', '.join(taken_beside(storage))}{already}"
            raise LaunchError(f"{self._name()}: weights of {own} in {storage}; accepted: {wanted}")
        if type(x_too) is not bool:
            raise LaunchError(f"{self._name()}: x_too={excerpt(x_too)}; accepted: True or False")
        if x_too and x is None:
            raise LaunchError(f"{self._name()}: x_too=True without x; accepted: x as the layer meets it, from which its scale is found")
        if self.split is not None:
            raise LaunchError(f"{self._name()}: split over processes; accepted: a layer that one process has whole")
        if self.precision not in (None, own):
            raise LaunchError(f"{self._name()}: precision={self.precision}; accepted of a layer to quantize: None")
        with torch.inference_mode(False), torch.no_grad():  # writes to tensors made in inference mode are not seen
            rows = None if x is None else self._calibration_rows(x)
            parts: list[Quantized] = []
            for weights in self.weights:
                inputs = {"x_scale": quantize_inputs(rows, storage).scale} if x_too and not parts else {}
                parts.append(made := quantize(weights, storage, per, x=rows, layout=self.layout, **inputs))
                if rows is not None:  # as the next factor meets it
                    rows = multiply(rows.float(), made.dequantized(), layout=self.layout, activation=self.between, backend="strided")
            stored = QuantizedKSLinear(self, parts)
        return stored.train(self.training)

    def _calibration_rows(self, x: Tensor) -> Tensor:
        """The rows of x from which scales are chosen, as a matrix."""
        check_tensors(self._name(), x=x)
        self._y_shape(x)  # which refuses other features
        rows = self._as_matrix(x.detach())
        return rows[:CALIBRATED_ROWS] if self.layout == "bsf" else rows[:, :CALIBRATED_ROWS]

    def _packed(self) -> list[Any]:
        """Each factor's weights as launchers take them: packed once if they are frozen."""
        return [operand(each, False) for each in self.weights]

    def _multiplies(self, dtype: torch.dtype) -> bool:
        """Whether the weights multiply x of this type."""
        return all(each.dtype == dtype for each in self.weights)

    def _prepared_calls(self) -> dict[Hashable, Any] | None:
        """Calls that were prepared with the weights as they are; None where they are not frozen."""
        return frozen.calls_of(self, self._modules["weights"]._parameters)

    def _own_weights(self) -> dict[str, Tensor]:
        return {f"weights.{number}": weights for number, weights in enumerate(self.weights)}

    def explain(self, batch: int = 1024, processes: int = 1) -> str:
        """Which backend multiplies each factor at a batch of that many rows, on the weights' device, and why; and how long all took.

        Of a layer that is split, or for several `processes`: what each way to split it takes and sends.
        """
        return explained(self, checked_batch(batch), checked_processes(processes))

    def extra_repr(self) -> str:
        words = [str(self.chain), f"in_features={self.in_features}", f"out_features={self.out_features}", f"bias={self.bias is not None}"]
        words += self._stored_words()
        words += [f"{name}={getattr(self, name)}" for name in self._settable if getattr(self, name) != OPTIONS[name]]
        words += [] if self.split is None else [f"here {self.own_chain}"]
        return ", ".join(words)

    def _stored_words(self) -> list[str]:
        """How its weights are stored, where that is said."""
        return []


class QuantizedKSLinear(KSLinear):
    """A `KSLinear` for inference that stores its weights in eight bits, or in bfloat16 for x of float32. Made by `KSLinear.quantize`.

    `values_1`, `scale_1` and so on are buffers, from the factor that meets x first. x is float32, or float16 or bfloat16 beside weights in
    eight bits; with an `x_scale`, which is a buffer then, it becomes as the weights are before the first factor, and `x_saturated` counts
    what was beyond that.
    """

    is_stored = True
    backend, precision = "auto", None
    _settable = ("layout", "activation", "between", "fuse")
    _fixed = dict.fromkeys(("chain", "storage", "per"), "a KSLinear that is quantized so")
    _x_scale: float | None = None  # of what was saved before x could be in eight bits

    def __init__(self, layer: KSLinear, parts: Sequence[Quantized]) -> None:
        nn.Module.__init__(self)
        self.chain = layer.chain
        for name in self._settable:
            self._set(name, getattr(layer, name))
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

    def _forget(self) -> None:
        """What was made of buffers: it belongs to this process, and is never saved or copied."""
        self._ready = Ready(())

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
            forget(values)
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
            self._refuse_training()
        super().requires_grad_(requires_grad)
        return self

    def reset_parameters(self) -> None:
        self._refuse_training()

    def _refuse_training(self) -> None:
        raise LaunchError(f"{self._name()}: weights in {self.storage} are not trained; train the KSLinear, and quantize it then")

    def quantize(self, *_: Any, **__: Any) -> "QuantizedKSLinear":
        raise LaunchError(f"{self._name()}: its weights are in {self.storage} already; accepted: the KSLinear that it was made of")

    # ---- the product

    def _multiplied(self, x: Tensor, residual: Tensor | None) -> Tensor:
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
        return multiply_stored(self, rows, bias, added, kind).reshape(y_shape)

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
            self._ready_now()  # which looks whether the scale was written to
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

    @property
    def _x_scales(self) -> list[float | None]:
        """Of the x that each factor takes: only the first one's may be in eight bits."""
        return [self._x_scale] + [None] * (len(self.chain) - 1)

    @property
    def _inputs(self) -> str:
        """How the x is stored that the first factor takes."""
        return SAME if self._x_scale is None else self.storage

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def _shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        return tuple(pattern.shape for pattern in self.chain)

    def _ready_now(self) -> Ready:
        """What is made of buffers as they are: another one, once they were written to, moved or replaced.

        It is kept before anything is made, so that a thaw beside another thread's first call drops what that one makes.
        """
        seen = tuple([seen_of(each) for name, each in self._buffers.items() if each is not None and name != "x_saturated"])
        made = self._ready
        if made.seen != seen:
            self._read_x_scale()
            made = self._ready = Ready(seen)
        if not made.parts:
            every = zip(self.values, self.scales, self._x_scales, strict=True)
            made.parts = [quantized_of(values, scale, self.storage, self.per, beside) for values, scale, beside in every]
        return made

    def _ready_parts(self) -> list[Quantized]:
        return self._ready_now().parts

    def _packed(self) -> list[Any]:
        """Each factor's weights as launchers take them."""
        return list(chain_launcher(self._shapes, self.between, self.fuse).weights_of_each(self._ready_now().parts))

    def _multiplies(self, dtype: torch.dtype) -> bool:
        return dtype_name(dtype) in taken_beside(self.storage)

    def _prepared_calls(self) -> dict[Hashable, Any] | None:
        """Those of the buffers as they are; none where x becomes eight bits first."""
        return None if self._x_scale is not None else self._ready_now().calls

    # ---- words

    def _factors(self) -> Sequence[Tensor]:
        return self.dequantized()

    def _stored_words(self) -> list[str]:
        saturated = f"{sum(self.saturated)} of {self.chain.weight_count} saturated"
        x = [] if self._x_scale is None else [f"x in {self.storage} times {self._x_scale:.6g}"]
        return [f"weights={self.storage}", scales_told(self.storage, self.per), saturated, *x]


def checked_dtype(
    chain: Chain, bias: bool, dtype: torch.dtype | None, *, layout: str, precision: str | None, backend: str, activation: str,
    between: str, fuse: str, intermediates: str, out_layout: str | None,
) -> torch.dtype:  # fmt: skip
    """The type of the weights, by default that of the precision; an error on an option that is not accepted, or not beside the others."""
    check_words(backend=(backend, NAMES), between=(between, ACTIVATIONS), intermediates=(intermediates, INTERMEDIATES))
    if between != "none" and len(chain) < 2:
        raise LaunchError(f"KSLinear({chain}): between={between!r} where there is one factor; accepted: 'none', or two or more")
    check_words(layout=(layout, LAYOUTS))
    check_words(out_layout=(layout if out_layout is None else out_layout, LAYOUTS))
    for pattern in chain:  # refuses unknown words, and sizes beyond memory
        KernelSpec(pattern, "float32" if precision is None else precision, layout, Epilogue(bias, activation))
    if dtype is None:
        dtype = torch.get_default_dtype() if precision is None else getattr(torch, PRECISIONS[precision].dtype)
    check_dtype(dtype)
    check_precision(precision, dtype_name(dtype))
    check_activation(activation, dtype)
    check_activation(between, dtype, "between")
    check_backend(backend, precision, dtype)
    check_fuse(fuse, backend)
    return dtype


def _draw(parameter: Tensor, bound: float) -> None:
    """Uniform within these bounds. Both parts of a complex number, which then varies as a real one would."""
    parts, bound = (torch.view_as_real(parameter.detach()), bound / sqrt(2)) if parameter.is_complex() else (parameter, bound)
    nn.init.uniform_(parts, -bound, bound)


def dense_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An `nn.Linear` with copies of these."""
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear
