"""`layer.weight` of a `KSLinear`: the matrix that an `nn.Linear` would have. It is dense only when its values are asked for.

Knows shape, type and device without them. Draws and zeros reach the factors; other writes are refused.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ksgen.errors import LaunchError

_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_meta", "is_cuda", "is_cpu")),
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "grad", "grad_fn")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.get_device),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__),
}
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imatmul__", "__ipow__", "__set__"}


class Weight(Tensor):
    """(out_features, in_features). Its values are made of the factors at each use, and gradients go on to them."""

    _layer: Any

    @staticmethod
    def __new__(cls, layer: Any) -> "Weight":
        first, shape = layer.weights[0], (layer.out_features, layer.in_features)
        made: Weight = Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        made._layer = layer
        return made

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"weight of {self._layer._name()}, as {tuple(self.shape)} of {self.dtype} on {self.device}; its values: to_dense()"

    @property
    def _is_hf_initialized(self) -> bool:
        """By which transformers knows what it has loaded, and does not draw it anew."""
        return all(getattr(each, "_is_hf_initialized", False) for each in self._layer.weights)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, flag: bool) -> None:
        for each in self._layer.weights:
            each._is_hf_initialized = flag

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        named = named or {}
        if function in _KNOWN:
            return super().__torch_function__(function, types, given, named)
        written = given[0] if given else named.get("tensor")
        name = getattr(function, "__name__", "")
        if isinstance(written, Weight) and (own := _OWN.get(function) or _DRAWS.get(name)):
            return own(written, *given[1:], **{word: each for word, each in named.items() if word != "tensor"})
        if isinstance(written, Weight) and (name in _WRITES or (name.endswith("_") and not name.startswith("__"))):
            raise written._refusal(name)
        if isinstance(out := named.get("out"), Weight):
            raise out._refusal(f"{name}(out=...)")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*tree_map(_dense, given), **tree_map(_dense, named))

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """Where PyTorch's own C++ code meets it."""
        return operator(*tree_map(_dense, given), **tree_map(_dense, named or {}))

    def _refusal(self, what: str) -> LaunchError:
        return LaunchError(
            f"{self._layer._name()}: {what} would write to weight, which is the product of the factors in `weights`; accepted: writes to "
            "those, draws around zero (`nn.init`), zeros, or KSLinear.from_linear for the nearest product to a matrix"
        )

    def _draw(self, deviation: float, is_uniform: bool, generator: Any) -> Self:
        """Draw the factors so that outputs vary as with a dense weight of this standard deviation."""
        layer = self._layer
        of_each = (layer.in_features**0.5 * deviation) ** (1 / len(layer.weights))
        with torch.no_grad():
            for factor in layer.weights:
                own = of_each / sqrt(factor.shape[2] * (2 if factor.is_complex() else 1))
                each = torch.view_as_real(factor) if factor.is_complex() else factor
                if is_uniform:
                    each.uniform_(-sqrt(3) * own, sqrt(3) * own, generator=generator)
                else:
                    each.normal_(0, own, generator=generator)
        return self


def _dense(value: Any) -> Any:
    return value._layer.to_dense() if isinstance(value, Weight) else value


def _normal(weight: Weight, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Weight:
    if mean:
        raise weight._refusal(f"a draw around {mean}")
    return weight._draw(std, False, generator)


def _uniform(weight: Weight, a: float = 0.0, b: float = 1.0, *, generator: Any = None, **bounds: float) -> Weight:
    low, high = bounds.get("from", a), bounds.get("to", b)
    if low + high:
        raise weight._refusal(f"a draw from {low} to {high}")
    return weight._draw((high - low) / sqrt(12), True, generator)


def _kaiming_uniform(weight: Weight, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None) -> Weight:
    fan = weight.shape[1 if mode == "fan_in" else 0]
    return weight._draw(nn.init.calculate_gain(nonlinearity, a) / sqrt(fan), True, generator)


def _fill(weight: Weight, val: float = 0.0, *, value: float | None = None) -> Weight:
    if val if value is None else value:
        raise weight._refusal("a fill with other values than zero")
    with torch.no_grad():
        weight._layer.weights[-1].zero_()  # the others stay: were all zero, so were all gradients
    return weight


def _require_gradient(weight: Weight, requires_grad: bool = True) -> Weight:
    for each in weight._layer.weights:
        each.requires_grad_(requires_grad)
    return weight


def _requires_gradient(weight: Weight) -> bool:
    return any(each.requires_grad for each in weight._layer.weights)


_DRAWS: dict[str, Callable[..., Any]] = {  # by name: methods, and functions of `nn.init`, which transformers wraps
    "normal_": _normal,
    "uniform_": _uniform,
    "kaiming_uniform_": _kaiming_uniform,
    "constant_": _fill,
    "fill_": _fill,
    "zero_": _fill,
}
_OWN: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad_: _require_gradient,
    Tensor.requires_grad.__set__: _require_gradient,
    Tensor.requires_grad.__get__: _requires_gradient,
    Tensor.data.__get__: lambda weight: weight,
    Tensor.__repr__: Weight.__repr__,
    Tensor.__deepcopy__: lambda weight, _: weight._layer.to_dense().detach(),
}
