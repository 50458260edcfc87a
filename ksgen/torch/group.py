"""Layers beside each other on one x, such as q, k and v: on a processor in one launch, if only the values are needed."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError
from ksgen.launch.fused import LEAST_ENTRIES
from ksgen.launcher import GroupLauncher
from ksgen.torch import frozen
from ksgen.torch.checks import dtype_name
from ksgen.torch.choice import REMEMBERED, chain_launcher, faster, has_kernels, job_of, size_of, told_of
from ksgen.torch.layer import KSLinear
from ksgen.torch.operands import operand
from ksgen.torch.ops import contiguous, is_plain, rows_of

Shapes = tuple[tuple[int, int, int, int], ...]  # of a chain's patterns


class KSLinears(nn.ModuleList):
    """Layers side by side. They take the same x, and their outputs are concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        if (ways := self._ways(x)) is None:
            return self._each(x)
        return ways[self._fastest(x, ways)]()

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Their outputs apart: slices of one tensor where one launch made them all."""
        ways = self._ways(x)
        if ways is None or self._fastest(x, ways) == "each":
            return [layer(x) for layer in self]
        axis = -1 if self._first.layout == "bsf" else 0
        whole: Tensor = ways["ksgen"]()
        parts: Sequence[Tensor] = whole.split([layer.out_features for layer in self._linears()], dim=axis)
        return parts

    def explain(self, batch: int = 1024) -> str:
        """What each layer says of itself, and how long one launch of all took."""
        lines, layer = (
            [f"{number}. {line}" for number, each in enumerate(self._linears(), 1) for line in each.explain(batch).splitlines()],
            self._first,
        )
        shapes = [tuple(weights.shape) for each in self._linears() for weights in each.weights]
        told = told_of(shapes, layer.weights[0].dtype, layer.layout, layer.activation, layer.bias is not None, batch, layer.between)
        return "\n".join([*lines, *told])

    def to_dense(self) -> Tensor:
        """The matrix of all of them."""
        return torch.cat([layer.to_dense() for layer in self])

    @property
    def _first(self) -> KSLinear:
        return next(self._linears())

    def _linears(self) -> Iterator[KSLinear]:
        for layer in self:
            assert isinstance(layer, KSLinear)
            yield layer

    def _each(self, x: Tensor) -> Tensor:
        if len(self) > 1 and any(layer._parallel is not None and layer._parallel.gives_own_features for layer in self._linears()):
            # A process's own features of each, beside each other, are no neighbours of the whole.
            raise LaunchError("a group whose outputs are split over processes; accepted: parts(x), or output_layouts=Replicate()")
        return torch.cat([layer(x) for layer in self], dim=-1 if len(self) == 0 or self._first.layout == "bsf" else 0)

    def _fastest(self, x: Tensor, ways: Any) -> str:
        layer, shapes = self._first, [weights.shape for each in self._linears() for weights in each.weights]
        job = job_of("group", shapes, x.dtype, layer.layout, layer.activation, layer.bias is not None, False, layer.between)
        batch = x.numel() // layer.in_features
        return faster((job, size_of(batch), *ways), ways)

    def _ways(self, x: Tensor) -> Any:
        """To multiply by all of them, where there is more than one."""
        if not self._is_served(x):
            return None
        return {"ksgen": lambda: self._in_one_launch(x), "each": lambda: self._each(x)}

    def _is_served(self, x: Tensor) -> bool:
        """Whether one launch could: the layers differ in their chains alone, and nobody watches or takes derivatives."""
        if torch.compiler.is_compiling() or len(self) < 2 or not isinstance(x, Tensor):
            return False
        if (
            x.device.type != "cpu"
            or x.layout is not torch.strided
            or x.numel() < LEAST_ENTRIES * torch.get_num_threads() * self._first.in_features
        ):
            return False
        layers = list(self._linears())
        if any(each._forward_hooks or each._forward_pre_hooks for each in layers):  # which want to see each layer called
            return False
        kinds = {(each.layout, each.precision, each.activation, each.between, each.backend, each.bias is None) for each in layers}
        tensors = [tensor for each in layers for tensor in (*each.weights, each.bias)]
        if len(kinds) > 1 or not is_plain(x, *tensors) or torch.is_autocast_enabled("cpu") or not has_kernels(x.device):
            return False
        layer, features = layers[0], x.shape[-1] if layers[0].layout == "bsf" else x.shape[0]
        is_usual = layer.backend in ("auto", "ksgen") and layer.precision in (None, dtype_name(x.dtype)) and features == layer.in_features
        return x.dim() > 1 and is_usual and all(tensor is None or tensor.dtype == x.dtype for tensor in tensors)

    def _in_one_launch(self, x: Tensor) -> Tensor:
        layers, layer = list(self._linears()), self._first
        for one in layers:
            frozen.look_after(one, one._own_weights)
        own = _launcher(tuple(tuple(tuple(each.shape) for each in one.weights) for one in layers), layer.between)
        weights = [[operand(contiguous(each), False) for each in one.weights] for one in layers]
        bias = None if layer.bias is None else [contiguous(one.bias) for one in layers if one.bias is not None]
        is_bsf, features = layer.layout == "bsf", sum(one.out_features for one in layers)
        rows = layer._as_matrix(x)
        out = rows.new_empty((rows.shape[0], features) if is_bsf else (features, rows.shape[1]))
        own(rows_of(rows), weights, layout=layer.layout, bias=bias, activation=layer.activation, out=out)
        return out.view((*x.shape[:-1], features) if is_bsf else (features, *x.shape[1:]))


@lru_cache(REMEMBERED)
def _launcher(chains: tuple[Shapes, ...], between: str) -> GroupLauncher:
    return GroupLauncher(*(chain_launcher(chain, between) for chain in chains))


def group(layers: Sequence[KSLinear]) -> KSLinears:
    """Layers that take the same x as one module; `LaunchError` on any that do not."""
    given = list(layers)
    if not given or not all(isinstance(layer, KSLinear) for layer in given):
        raise LaunchError(f"layers={given!r}; accepted: a list of KSLinear, one or more")
    if len({layer.in_features for layer in given}) > 1:
        taken = ", ".join(str(layer.in_features) for layer in given)
        raise LaunchError(f"layers that take {taken} features; accepted: those that take the same x")
    return KSLinears(given)
