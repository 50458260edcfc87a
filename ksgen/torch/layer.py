"""`KSLinear`: a chain of Kronecker-sparse factors in place of a `torch.nn.Linear`. Does not compute products itself."""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any, Self

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError, PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import PRECISIONS, Epilogue, KernelSpec
from ksgen.spec.kernel import checked_batch
from ksgen.torch import frozen
from ksgen.torch.backends import NAMES, explain, multiply_all_by
from ksgen.torch.checks import check_backend, check_device, check_dtype, check_precision, check_tensors, check_words, dtype_name
from ksgen.values import excerpt, listed

Patterns = Chain | Pattern | Sequence[Pattern | Sequence[int]]


class KSLinear(nn.Module):
    """y = activation(x K^T + bias) + residual, where K is a product of Kronecker-sparse factors.

    `patterns` are listed from the factor that meets x first to the last one. `weights` holds one parameter of shape
    (a, b, c, d) for each. x is (..., in_features) in layout "bsf" and (in_features, ...) in "bsl"; y alike.
    """

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
    ) -> None:
        super().__init__()
        self.chain = as_chain(patterns)
        check_words(backend=(backend, NAMES))
        for pattern in self.chain:  # refuses unknown words, and sizes beyond memory
            KernelSpec(pattern, "float32" if precision is None else precision, layout, Epilogue(bias, activation))
        check_device(device)
        if dtype is None:
            dtype = torch.get_default_dtype() if precision is None else getattr(torch, PRECISIONS[precision].dtype)
        check_dtype(dtype)
        check_precision(precision, dtype_name(dtype))
        check_backend(backend, precision, dtype)
        self.layout, self.precision, self.backend, self.activation = layout, precision, backend, activation
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

    @property
    def in_features(self) -> int:
        return self.chain.in_features

    @property
    def out_features(self) -> int:
        return self.chain.out_features

    def reset_parameters(self) -> None:
        """Draw weights uniformly in +-1/sqrt(c), as in the paper, and the bias in +-1/sqrt(in_features), as `nn.Linear` does."""
        for pattern, weights in zip(self.chain, self.weights, strict=True):
            nn.init.uniform_(weights, -1 / sqrt(pattern.c), 1 / sqrt(pattern.c))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / sqrt(self.in_features), 1 / sqrt(self.in_features))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        check_tensors(self._name(), x=x, residual=residual)
        if not torch.compiler.is_compiling():
            frozen.look_after(self, self._own_weights)
        y_shape = self._y_shape(x)
        if residual is not None and residual.shape != y_shape:
            shapes = f"got residual of shape {tuple(residual.shape)} beside x of shape {tuple(x.shape)}"
            raise LaunchError(f"{self._name()}: {shapes}; {tuple(y_shape)} is needed")
        rows, added = self._as_matrix(x), None if residual is None else self._as_matrix(residual)
        options = {"layout": self.layout, "precision": self.precision}
        y = multiply_all_by(self.backend, rows, list(self.weights), self.bias, added, activation=self.activation, **options)
        return y.reshape(y_shape)

    def freeze(self) -> Self:
        """Declare that nobody will write to the weights. What is made of them is made once, and kept until they thaw.

        A write that can be seen ends it, with a warning: one that PyTorch counts, a move, a load, a step of an optimizer, and
        `train()` does silently. A write through `.data`, NumPy, a collective or a CUDA graph's replay cannot be seen: thaw first.
        Copies of a frozen layer are not frozen.
        """
        return self._freeze(self._name())

    def _freeze(self, name: str) -> Self:
        weights, again = self._own_weights(), self._own_weights()
        if any(weights[each] is not again[each] for each in weights):
            raise LaunchError(f"{name}: its weights are computed at each use, by a parametrization; such a layer cannot be frozen")
        frozen.freeze(self, name, weights)
        return self

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

    def _own_weights(self) -> dict[str, Tensor]:
        return {f"weights.{number}": weights for number, weights in enumerate(self.weights)}

    def explain(self, batch: int = 1024) -> str:
        """Which backend multiplies each factor at a batch of that many rows, on the weights' device, and why."""
        batch, lines = checked_batch(batch), []
        for number, (pattern, weights) in enumerate(zip(self.chain, self.weights, strict=True), start=1):
            is_last = number == len(self.chain)
            epilogue = Epilogue(self.bias is not None, self.activation) if is_last else Epilogue()
            kernel = KernelSpec(pattern, self.precision or dtype_name(weights.dtype), self.layout, epilogue)
            lines.append(f"{pattern}: {explain(self.backend, kernel, batch, weights.device)}")
        return "\n".join(lines)

    def extra_repr(self) -> str:
        words = [str(self.chain), f"in_features={self.in_features}", f"out_features={self.out_features}", f"bias={self.bias is not None}"]
        options = {"layout": "bsf", "precision": None, "backend": "auto", "activation": "none"}
        words += [f"{name}={getattr(self, name)}" for name, usual in options.items() if getattr(self, name) != usual]
        return ", ".join(words)

    def _y_shape(self, x: Tensor) -> tuple[int, ...]:
        axis, other = (-1, 0) if self.layout == "bsf" else (0, -1)
        if x.dim() == 0 or x.shape[axis] != self.in_features:
            wanted = f"(..., {self.in_features})" if self.layout == "bsf" else f"({self.in_features}, ...)"
            fits = x.dim() > 1 and x.shape[other] == self.in_features
            remedy = f"; that fits layout {'bsl' if self.layout == 'bsf' else 'bsf'}" if fits else ""
            raise LaunchError(f"{self._name()}: got x of shape {tuple(x.shape)}; layout {self.layout} wants {wanted}{remedy}")
        return (*x.shape[:-1], self.out_features) if self.layout == "bsf" else (self.out_features, *x.shape[1:])

    def _as_matrix(self, given: Tensor) -> Tensor:
        """Folds all dimensions but the features into one batch."""
        return given.reshape(-1, given.shape[-1]) if self.layout == "bsf" else given.reshape(given.shape[0], -1)

    def _name(self) -> str:
        return f"KSLinear({self.chain})"


def freeze(model: nn.Module) -> list[str]:
    """Declare that nobody will write to the weights. What is made of them is made once, and kept until they thaw.

    A write that can be seen thaws them, with a warning: a write that PyTorch counts, a move, a load, an optimizer's step.
    `train()` thaws silently. Writes through `.data`, NumPy, a collective or a CUDA graph's replay cannot be seen: thaw first.
    Copies of a frozen layer are not frozen.
    """
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, KSLinear)]
    for name, layer in found:
        layer._freeze(f"{name}, a {layer._name()}," if name else layer._name())
    return [name for name, _ in found]


def thaw(model: nn.Module) -> list[str]:
    """`thaw()` every frozen `KSLinear` of a model. Returns their names."""
    return [name for name, layer in model.named_modules() if isinstance(layer, KSLinear) and frozen.thaw(layer)]


def as_chain(patterns: Patterns) -> Chain:
    """A chain, from a Chain, a Pattern, or a sequence of patterns and (a, b, c, d)."""
    if isinstance(patterns, Chain):
        return patterns
    if isinstance(patterns, Pattern):
        return Chain((patterns,))
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise PatternError(f"patterns={excerpt(patterns)}; accepted: a Chain, a Pattern, or a list of (a, b, c, d)")
    return Chain(tuple(each if isinstance(each, Pattern) else _pattern(place, each) for place, each in enumerate(patterns)))


def _pattern(place: int, shape: Any) -> Pattern:
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 4:
        raise PatternError(f"patterns[{place}]={excerpt(shape)}; accepted: a Pattern, or four numbers (a, b, c, d)")
    return Pattern(*shape)
