"""What layers of a chain have in common: how x becomes a matrix, and which shape y has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ksgen.errors import LaunchError
from ksgen.pattern import Chain


class Folding:
    """A layer with `chain` and `layout`, which takes features last in batch-size-first, and first in batch-size-last."""

    chain: Chain
    layout: str
    __call__: Callable[..., Any]  # of nn.Module

    @property
    def in_features(self) -> int:
        return self.chain.in_features

    @property
    def out_features(self) -> int:
        return self.chain.out_features

    @property
    def y_layout(self) -> str:
        """Of y and the residual."""
        return self.layout

    @property
    def own_chain(self) -> Chain:
        """What this process multiplies by."""
        return self.chain

    def _name(self) -> str:
        return f"{type(self).__name__}({self.chain})"

    def _y_shape(self, x: Tensor) -> tuple[int, ...]:
        axis, other = (-1, 0) if self.layout == "bsf" else (0, -1)
        chain = self.own_chain
        if x.dim() == 0 or x.shape[axis] != chain.in_features:
            wanted = f"(..., {chain.in_features})" if self.layout == "bsf" else f"({chain.in_features}, ...)"
            fits = x.dim() > 1 and x.shape[other] == chain.in_features
            remedy = f"; that fits layout {'bsl' if self.layout == 'bsf' else 'bsf'}" if fits else ""
            raise LaunchError(f"{self._name()}: got x of shape {tuple(x.shape)}; layout {self.layout} wants {wanted}{remedy}")
        batch = x.shape[:-1] if self.layout == "bsf" else x.shape[1:]
        return (*batch, chain.out_features) if self.y_layout == "bsf" else (chain.out_features, *batch)

    def _checked_y_shape(self, x: Tensor, residual: Tensor | None) -> tuple[int, ...]:
        """The same; `LaunchError` on a residual of another shape."""
        y_shape = self._y_shape(x)
        if residual is not None and residual.shape != y_shape:
            shapes = f"got residual of shape {tuple(residual.shape)} beside x of shape {tuple(x.shape)}"
            raise LaunchError(f"{self._name()}: {shapes}; {tuple(y_shape)} is needed")
        return y_shape

    def _as_matrix(self, given: Tensor, layout: str | None = None) -> Tensor:
        """Folds all dimensions but the features into one batch, of x unless another layout is named."""
        is_bsf = (layout or self.layout) == "bsf"
        if given.dim() < 2:
            return given[None] if is_bsf else given[:, None]
        return given.flatten(0, -2) if is_bsf else given.flatten(1)  # unlike reshape(-1, ...), also where `vmap` maps over nothing

    def _of_jagged(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Multiply the concatenated rows of sequences of unequal lengths."""
        if "bsl" in (self.layout, self.y_layout):
            raise LaunchError(f"{self._name()}: x is a jagged tensor, whose features come last; accepted: layout='bsf', of y too")
        if x._ragged_idx == x.dim() - 1:
            raise LaunchError(f"{self._name()}: x is jagged in its last dimension, {tuple(x.shape)}; accepted: features there")
        if residual is not None and (getattr(residual, "layout", None) != torch.jagged or residual.shape[:-1] != x.shape[:-1]):
            raise LaunchError(f"{self._name()}: x is a jagged tensor; accepted: a residual with the same offsets")
        y = self(x.values(), None if residual is None else residual.values())
        known = {}  # before PyTorch 2.5
        if hasattr(x, "_maybe_min_seqlen"):
            known = {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}
        return torch.nested.nested_tensor_from_jagged(y, x.offsets(), lengths=x.lengths(), jagged_dim=x._ragged_idx, **known)
