"""`layer.weight` of `KSLinear` and `KSSum`: the matrix that an `nn.Linear` would have, dense only when it is read.

Shape, dtype and device are known without the values. Random draws and fills with zero write to the factors. Other
writes are refused, including writes to views of the values. An initializer may consist of several writes, such as a
draw and a truncation. If one of these is refused, the factors return to their state before the first one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ksgen.errors import LaunchError
from ksgen.launch.weights import writes_to
from ksgen.torch.layer.tied import initialized

_ATTRIBUTES = "shape dtype device layout ndim is_meta is_cuda is_cpu is_sparse is_quantized is_nested itemsize nbytes"
_KNOWN = {  # functions whose results need no values
    *(getattr(Tensor, name).__get__ for name in (*_ATTRIBUTES.split(), "grad", "grad_fn")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.get_device),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__),
}
_OPERATORS = "setitem iadd isub imul itruediv ifloordiv imatmul ipow set"
_WRITES = {f"__{name}__" for name in _OPERATORS.split()}
_NO_WRITES = {"requires_grad_", "detach_", "share_memory_"}  # functions named like writes that change no values
_SENDS = {"send", "isend", "gather"}  # collectives that only read their first argument


def is_traced(layer: Any) -> bool:
    """Whether a compiler reads a layer's weight, as a plain tensor.

    A layer with an activation stays lazy: PyTorch's fast paths take plain weights, and would leave the activation out.
    """
    is_compiling: bool = torch.compiler.is_compiling()
    return is_compiling and layer.activation == "none"


class Weight(Tensor):
    """Lazy matrix (out_features, in_features): each use computes it from the factors, to which gradients flow back."""

    _layer: Any
    _parts: Sequence[Tensor]  # weights of the layers of a sum
    _is_data = False  # whether gradients do not flow back, as from `weight.data`
    # copies of the factors before the draws of this object, and write counts of the factors after them
    _drawn: tuple[list[Tensor], list[object]] | None = None

    @staticmethod
    def __new__(cls, layer: Any, parts: Sequence[Tensor] = ()) -> "Weight":
        if parts:
            shape, dtype, device = parts[0].shape, parts[0].dtype, parts[0].device
        else:
            shape, dtype = (layer.out_features, layer.in_features), layer._dtype
            device = (layer.values if layer.has_stored_type else layer.weights)[0].device
        made: Weight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._layer, made._parts = layer, parts
        return made

    def __repr__(self, *_: Any, **__: Any) -> str:
        return (
            f"weight of {self._layer._name()}, as {tuple(self.shape)} of {self.dtype} on {self.device}; its "
            "values: to_dense()"
        )

    @property
    def _is_hf_initialized(self) -> bool:
        """Flag of transformers for weights that were loaded, and are therefore not initialised."""
        return all(getattr(each, "_is_hf_initialized", False) for each in self._factors)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, flag: bool) -> None:
        for each in self._factors:
            each._is_hf_initialized = flag

    @property
    def _factors(self) -> list[Tensor]:
        """Tensors that an initializer's draws write to; none for a layer that stores its weights in another type."""
        if self._parts:
            return [each for part in self._parts for each in (part._factors if isinstance(part, Weight) else [part])]
        return [] if self._stored else initialized(self._layer.weights)

    @property
    def _stored(self) -> list[Any]:
        """Layers that store their weights in another type."""
        if self._parts:
            return [layer for part in self._parts if isinstance(part, Weight) for layer in part._stored]
        return [self._layer] if self._layer.has_stored_type else []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function in _KNOWN:
            return super().__torch_function__(function, types, given, named)
        written = given[0] if given else named.get("tensor")
        handler = _HANDLERS.get(function) or _DRAWS.get(getattr(function, "__name__", ""))
        if isinstance(written, Weight) and handler:
            return handler(written, *given[1:], **{word: each for word, each in named.items() if word != "tensor"})
        _refuse_writes(function, given, named)
        with torch._C.DisableTorchFunctionSubclass():
            given, named = tree_map(_values, (given, named))
            return _called(function, given, named)

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Compute the dense values for calls from PyTorch's own C++ code. Refuses writes, which would be lost."""
        _refuse_writes(operator.overloadpacket, given, named or {})
        return operator(*tree_map(_dense, given), **tree_map(_dense, named or {}))

    def _as_data(self) -> "Weight":
        """The same matrix without gradients. A refused write to it undoes the draws of this object, too."""
        made = Weight(self._layer, self._parts)
        made._is_data, made._drawn = True, self._drawn
        return made

    def _computed(self) -> Tensor:
        dense: Tensor = self._layer.to_dense()
        return dense.detach() if self._is_data else dense

    def _refusal(self, what: str) -> LaunchError:
        """Build the error for a write, and undo the draws of this object.

        The draws stay if other code has written to the factors since.
        """
        for layer in self._stored:
            stored = f"is derived from weights in {layer.storage}"
            return LaunchError(
                f"{layer._name()}: {what} would write to weight, which {stored}; accepted: writes to the KSLinear "
                "before `quantize`"
            )
        factors = self._factors
        if self._drawn is not None and self._drawn[1] == _writes(factors):
            with torch.no_grad():
                for factor, before in zip(factors, self._drawn[0], strict=True):
                    factor.copy_(before)
            self._drawn = None
        return LaunchError(
            f"{self._layer._name()}: {what} would write to weight, which is {self._layer._weight_is}; accepted: writes "
            f"to those, draws around zero (`nn.init`), zeros, {self._layer._nearest}"
        )

    def _draw(self, deviation: float, is_uniform: bool, generator: Any) -> Self:
        """Draw the factors so that outputs vary as with a dense weight of this standard deviation."""
        if not deviation:
            _fill(self)
            return self
        with self._writing() as factors:
            drawn = [(part, deviation / sqrt(len(self._parts))) for part in self._parts]
            if not drawn:
                gain = (self._layer.in_features**0.5 * deviation) ** (1 / len(factors))  # of each factor
                for factor in factors:
                    std = gain / sqrt(factor.shape[2] * (2 if factor.is_complex() else 1))
                    drawn.append((torch.view_as_real(factor) if factor.is_complex() else factor, std))
            for values, std in drawn:
                if is_uniform:
                    values.uniform_(-sqrt(3) * std, sqrt(3) * std, generator=generator)
                else:
                    values.normal_(0, std, generator=generator)
        return self

    @contextmanager
    def _writing(self) -> Iterator[list[Tensor]]:
        """Provide the factors for writing, and copy them before. A refused write directly afterwards restores them."""
        if self._stored:
            raise self._refusal("an initializer")
        factors = self._factors
        if self._drawn is None or self._drawn[1] != _writes(factors):
            self._drawn = [each.detach().clone() for each in factors], []
        with torch.no_grad():
            yield factors
        self._drawn = self._drawn[0], _writes(factors)


class _Values(Tensor):
    """Values of a weight or a sum of biases, or a view of them. Writes are refused, because they would be lost."""

    _weight: Any  # builds the error

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        _refuse_writes(function, given, named)
        with torch._C.DisableTorchFunctionSubclass():
            return _called(function, given, named)


def _values(value: Any) -> Any:
    """Values of a weight; anything else unchanged."""
    if not isinstance(value, Weight):
        return value
    return refusing(value._computed(), value)


def refusing(values: Tensor, owner: Any) -> Tensor:
    """Computed values whose owner builds the error for a write."""
    made = values.as_subclass(_Values)
    made._weight = owner
    return made


def _called(function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a function on values.

    Results that share memory with the values become `_Values`, too, or read-only arrays; pickles and copies do not.
    """
    if function in (Tensor.__reduce_ex__, Tensor.__deepcopy__):
        return function(given[0].as_subclass(Tensor), *given[1:])
    weights = {_memory(each): each._weight for each in tree_leaves((given, named)) if isinstance(each, _Values)}

    def viewed(each: Any) -> Any:
        if not isinstance(each, Tensor) or isinstance(each, _Values) or (weight := weights.get(_memory(each))) is None:
            return each
        return refusing(each, weight)

    found = function(*given, **named)
    if function in (Tensor.numpy, Tensor.__array__):
        found.setflags(write=False)
    return tree_map(viewed, found)


def _refuse_writes(function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise `LaunchError` if a function would write to a weight, or to its values."""
    name = getattr(function, "__name__", "")
    written = [named.get("out")]
    is_in_place = name.endswith("_") and not name.startswith("__") and name not in _NO_WRITES
    is_collective = getattr(function, "__module__", "") == "torch.distributed.distributed_c10d" and name not in _SENDS
    if name in _WRITES or is_in_place or is_collective or named.get("inplace"):
        written += given[:1] or [named.get("tensor")]
    for each in tree_leaves(written):
        if isinstance(each, _Values) and name == "__set__" and function != Tensor.data.__set__:  # such as requires_grad
            continue
        if isinstance(each, Weight | _Values):
            weight = each._weight if isinstance(each, _Values) else each
            raise weight._refusal(f"{name}(out=...)" if each is named.get("out") else name)


def _memory(tensor: Tensor) -> object:
    """Key that tensors on the same storage share."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # under a transform, or sparse: no storage
        return id(tensor)


def _writes(factors: list[Tensor]) -> list[object]:
    """Identity and write count of each factor."""
    return [(id(each), writes_to(each)) for each in factors]


def _dense(value: Any) -> Any:
    return value._computed() if isinstance(value, Weight) else value


def _normal(weight: Weight, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Weight:
    if mean:
        raise weight._refusal(f"a draw around {mean}")
    return weight._draw(std, False, generator)


def _uniform(weight: Weight, a: float = 0.0, b: float = 1.0, *, generator: Any = None, **bounds: float) -> Weight:
    low, high = bounds.get("from", a), bounds.get("to", b)
    if low + high:
        raise weight._refusal(f"a draw from {low} to {high}")
    return weight._draw((high - low) / sqrt(12), True, generator)


def _kaiming_uniform(
    weight: Weight, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None
) -> Weight:
    fan = nn.init._calculate_correct_fan(weight, mode)  # refuses other modes
    return weight._draw(nn.init.calculate_gain(nonlinearity, a) / sqrt(fan), True, generator)


def _fill(weight: Weight, val: float = 0.0, *, value: float | None = None) -> Weight:
    if val if value is None else value:
        raise weight._refusal("a fill with other values than zero")
    with weight._writing() as factors:
        for each in weight._parts or factors[-1:]:
            each.zero_()  # the others stay: with all factors zero, all gradients would be zero
    return weight


def _require_gradient(weight: Weight, requires_grad: bool = True) -> Weight:
    if requires_grad and weight._stored:
        raise weight._refusal("training")
    for each in weight._factors:
        each.requires_grad_(requires_grad)
    return weight


def _refuse_hook(weight: Weight, *_: Any) -> None:
    raise LaunchError(
        f"{weight._layer._name()}: a hook on weight would be lost, because each use computes it; accepted: hooks on "
        "the factors in `weights` of a KSLinear"
    )


_DRAWS: dict[str, Callable[..., Any]] = {  # by name: methods, and functions of `nn.init`, which transformers wraps
    "normal_": _normal,
    "uniform_": _uniform,
    "kaiming_uniform_": _kaiming_uniform,
    "constant_": _fill,
    "fill_": _fill,
    "zero_": _fill,
}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad_: _require_gradient,
    Tensor.requires_grad.__set__: _require_gradient,
    Tensor.requires_grad.__get__: lambda weight: (
        not weight._is_data and any(each.requires_grad for each in weight._factors)
    ),
    Tensor.data.__get__: Weight._as_data,
    Tensor.register_hook: _refuse_hook,
    Tensor.register_post_accumulate_grad_hook: _refuse_hook,
    Tensor.__repr__: Weight.__repr__,
    Tensor.__deepcopy__: lambda weight, _: weight._layer.to_dense().detach(),
}
