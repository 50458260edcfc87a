"""Tensor parallelism: `KSLinear` split over the processes of a mesh, with styles for PyTorch's `parallelize_module`.

`ksgen.torch.layer.splits` computes the split. This module makes the layer's weights DTensors, and each process
multiplies by its shards.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ksgen.errors import LaunchError
from ksgen.torch.layer.group import KSLinears
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.layer.splits import FEATURES, ROWS, STYLES, SUMS, WHOLE, Split, split_layer
from ksgen.torch.operators.checks import check_activation
from ksgen.torch.operators.ops import autocast
from ksgen.torch.operators.products import finish
from ksgen.values import excerpt, misfit


class _KSParallel(ParallelStyle):
    """Base of the styles, with the options of PyTorch's own styles.

    By default, x and y have the placements of the style.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        for name, given in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if given is not None and not isinstance(given, (Replicate, Shard)):
                raise LaunchError(
                    f"{type(self).__name__}: {name}={excerpt(given)}; accepted: Replicate() or Shard(dimension)"
                )
        self.input_layouts, self.output_layouts, self.use_local_output = input_layouts, output_layouts, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, KSLinears):
            for each in module:
                self._apply(each, device_mesh)
        elif isinstance(module, KSLinear) and not module.has_stored_type:
            self._split(module, device_mesh)
        else:
            raise LaunchError(
                f"{type(self).__name__}: got {type(module).__name__}; accepted: a KSLinear, or a group of them"
            )
        return module

    def _split(self, layer: KSLinear, mesh: DeviceMesh) -> None:
        name = type(self).__name__
        if layer._parallel is not None or any(isinstance(each, DTensor) for each in layer.parameters()):
            raise LaunchError(
                f"{name}: {layer._name()} is sharded already; accepted: plain weights, to which fully_shard comes later"
            )
        if mesh.ndim != 1:
            raise LaunchError(f"{name}: a mesh of {mesh.ndim} dimensions; accepted: one dimension, such as mesh['tp']")
        features = Shard(-1 if layer.layout == "bsf" else 0)
        style = STYLES[name]
        of_x = self.input_layouts or (Replicate() if style.takes == WHOLE else features)
        of_y = self.output_layouts or (Replicate() if style.gives == SUMS else features)
        chain_split = split_layer(
            name, layer, mesh.size(), _placement_name(of_x, layer.layout), _placement_name(of_y, layer.layout)
        )
        layer.thaw()
        for number, (axis, weights) in enumerate(zip(chain_split.axes, list(layer.weights), strict=True)):
            layer.weights[number] = self._distributed(weights, mesh, Replicate() if axis is None else Shard(axis))
        if layer.bias is not None:
            layer.bias = self._distributed(
                layer.bias, mesh, Shard(0) if chain_split.finished == FEATURES else Replicate()
            )
        layer._parallel = Parallel(chain_split, mesh, of_x, of_y, features, self.use_local_output)

    def _distributed(self, tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
        source = {"src_data_rank": self.src_data_rank} if hasattr(self, "src_data_rank") else {}  # since PyTorch 2.7
        whole = distribute_tensor(tensor.detach(), mesh, [placement], **source)
        return nn.Parameter(whole, requires_grad=tensor.requires_grad)


class KSBlockwise(_KSParallel):
    """Split every factor along a.

    Features of x and y are sharded, and processes exchange nothing.
    """


class KSColwise(_KSParallel):
    """Split the last factor with a = 1 along k, and the factors after it along a.

    x is replicated, and the features of y are sharded.
    """


class KSRowwise(_KSParallel):
    """Split the first factor with a = 1 along l, and the factors before it along a.

    Features of x are sharded; y is summed over processes.
    """


@dataclass(frozen=True)
class Parallel:
    """Multiplication of a layer on each process of a mesh."""

    split: Split
    mesh: DeviceMesh
    given: Placement  # placement of x, if it is a plain tensor
    asked: Placement  # placement of y
    features: Shard  # placement of x or y with sharded features
    gives_local: bool  # whether y is a plain tensor, not a DTensor

    def __deepcopy__(self, memo: Any) -> "Parallel":
        return self

    def __call__(self, layer: KSLinear, x: Tensor, residual: Tensor | None) -> Tensor:
        for placement in (self.given, self.asked):
            if placement != self.features and self._shards_features(placement, x):
                raise LaunchError(
                    f"{layer._name()}: {placement} of {x.dim()} dimensions shards the features; accepted: "
                    f"{self.features}"
                )
        check_activation(layer.activation, layer.weights[0].dtype)
        weights = [self._shard(each) for each in layer.weights]
        bias = None if layer.bias is None else self._shard(layer.bias, is_term=self.split.finished == ROWS)
        x = self._own_part(x, self.given, Replicate() if self.split.style.takes == WHOLE else self.features)
        if residual is not None:
            wanted = self.asked if self.split.is_finished_later else self.features
            residual = self._own_part(residual, self.asked, wanted)
        if not self.split.is_finished_later:
            y = layer._multiply(x, weights, bias, residual, layer.activation)
            if self.gives_own_features:
                return y
            whole = self._distributed(y, self.features).redistribute(placements=[self.asked])
            return whole.to_local() if self.gives_local else whole
        terms = self._distributed(layer._multiply(x, weights, None, None, "none"), Partial())
        whole = terms.redistribute(placements=[self.asked])
        y = whole.to_local()
        if residual is not None and (wrong := misfit("residual", residual.shape, y.shape)):
            raise LaunchError(f"{layer._name()}: {wrong}")
        y, bias, residual, _ = autocast(y, bias, residual, None)
        rows, added = layer._as_matrix(y), None if residual is None else layer._as_matrix(residual)
        y = finish(rows, bias, layer.activation, added, layer.layout).view(y.shape)
        if self.gives_local:
            return y
        return DTensor.from_local(y, self.mesh, [self.asked], run_check=False, shape=whole.shape, stride=whole.stride())

    @property
    def gives_own_features(self) -> bool:
        """Whether y is a plain tensor that holds only the features of this process."""
        return self.gives_local and self.asked == self.features

    def _shards_features(self, placement: Placement, x: Tensor) -> bool:
        return isinstance(placement, Shard) and x.dim() > 0 and placement.dim % x.dim() == self.features.dim % x.dim()

    def _shard(self, parameter: Any, is_term: bool = True) -> Tensor:
        """Shard of a parameter on this process.

        If the parameter is replicated and each process computes a term of its gradient, the terms are summed.
        """
        if not isinstance(parameter, DTensor):
            raise LaunchError(
                f"a split KSLinear has a parameter that is a {type(parameter).__name__}; accepted: the DTensors "
                "that its style created"
            )
        if not (torch.is_grad_enabled() and parameter.requires_grad) or not (
            is_term and parameter.placements == (Replicate(),)
        ):
            return parameter.to_local()
        return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])

    def _own_part(self, tensor: Any, given: Placement, wanted: Placement) -> Tensor:
        """Shard of x or of a residual on this process, in the wanted placement.

        `given` is the placement of a plain tensor; a DTensor has a placement already.
        """
        is_term = wanted.is_replicate() and self.split.style.takes == WHOLE
        if not isinstance(tensor, DTensor):
            if given == wanted and not (is_term and torch.is_grad_enabled() and tensor.requires_grad):
                return tensor
            tensor = self._distributed(tensor, given)
        return tensor.redistribute(placements=[wanted]).to_local(grad_placements=[Partial()] if is_term else None)

    def _distributed(self, tensor: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(tensor, self.mesh, [placement], run_check=False)


def _placement_name(placement: Placement, layout: str) -> str:
    """Convert a placement of x or y to the names that `ksgen.torch.layer.splits` uses."""
    if placement.is_replicate():
        return WHOLE
    return FEATURES if placement == Shard(-1 if layout == "bsf" else 0) else ROWS


# ---- FSDP2


def shard_placement(parameter: nn.Parameter, count: int | None = None) -> Shard | None:
    """First dimension that divides evenly, for `fully_shard(model, shard_placement_fn=shard_placement)`.

    `count` is the number of processes that share the parameter, by default all. Pass it if the mesh shards over fewer.
    FSDP2 shards the first dimension, which is a: often 1, so that one process would hold the full factor. That
    dimension stays the choice (None) if it has at least `count` elements, or if no other dimension divides.
    """
    count = torch.distributed.get_world_size() if count is None else count
    if parameter.dim() == 0 or parameter.shape[0] >= count:
        return None
    return next(
        (Shard(place) for place, size in enumerate(parameter.shape) if size >= count and size % count == 0), None
    )
