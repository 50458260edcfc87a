"""Groups of layers with the same x, such as q, k and v: the base of their modules, and `KSLinears`.

One launch computes all of them if that is faster and no gradient is recorded.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError, ToolchainError
from ksgen.launch.fused import Verdict, least_rows
from ksgen.launch.memory import new_tensor
from ksgen.spec import Epilogue
from ksgen.torch.layer.base import ChainLayer, freeze, thaw
from ksgen.torch.operators import choice, frozen, prepared
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.frozen import operand
from ksgen.torch.operators.meanwhile import by_kernels
from ksgen.torch.operators.ops import contiguous, is_plain, rows_of
from ksgen.values import excerpt


class Layers(nn.ModuleList):
    """Layers that take the same x. Users may later replace any of them by another module."""

    def freeze(self) -> Self:
        """Freeze every layer, like `KSLinear.freeze`.

        Returns:
            The module itself.

        Examples:
            >>> from ksgen.torch import KSLinear, KSSum
            >>> KSSum([KSLinear("1,4,4,2"), KSLinear("2,4,4,1")]).eval().freeze().is_frozen
            True
        """
        freeze(self)
        return self

    def thaw(self) -> Self:
        """Thaw every layer.

        Returns:
            The module itself.

        Examples:
            >>> from ksgen.torch import KSLinear, KSSum
            >>> KSSum([KSLinear("1,4,4,2"), KSLinear("2,4,4,1")]).eval().freeze().thaw().is_frozen
            False
        """
        thaw(self)
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether all layers are frozen."""
        return all(getattr(layer, "is_frozen", False) for layer in self)

    def _explained(self, batch: int) -> list[str]:
        """Lines that explain each layer, with its number."""
        lines = []
        for number, each in enumerate(self, 1):
            other = f"{type(each).__name__}: no layer of ksgen, called directly"
            text = each.explain(batch) if hasattr(each, "explain") else other
            lines += [f"{number}. {line}" for line in text.splitlines()]
        return lines

    def _matrices(self) -> list[Tensor]:
        """Dense matrix of each layer."""
        return [_dense(layer, number) for number, layer in enumerate(self, 1)]


def _dense(layer: Any, number: int) -> Tensor:
    if hasattr(layer, "to_dense"):
        return layer.to_dense()
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return layer.weight
    raise LaunchError(
        f"layer {number} of the group is a {type(layer).__name__}, whose matrix is not known; accepted: layers of "
        "ksgen, and nn.Linear"
    )


class KSLinears(Layers):
    """Layers side by side that take the same x; their outputs are concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        if (found := self._prepared(x)) is not None:
            call, parameters = found
            if (y := prepared.unless_refused(call.run, x, None, parameters)) is not None:
                return y
        whole = self._whole(x)
        return self._each(x) if whole is None else whole

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Outputs per layer: slices of one tensor if one launch computed them all."""
        if (found := self._prepared(x)) is not None:
            call, parameters = found
            if (outputs := prepared.unless_refused(call.parts, x, parameters)) is not None:
                return outputs
        if (whole := self._whole(x)) is None:
            return [layer(x) for layer in self]
        axis, layers = -1 if self._first.layout == "bsf" else 0, list[Any](self)
        # not `split`, whose views cannot be written to while gradients are recorded
        parts: Sequence[Tensor] = whole.unsafe_split_with_sizes([layer.out_features for layer in layers], dim=axis)
        return parts

    def _prepared(self, x: Tensor) -> tuple[prepared.Prepared, prepared.Parameters] | None:
        layers: list[Any] = list(self._modules.values())
        is_apart = torch.compiler.is_compiling() or are_watched(layers)
        return None if is_apart else prepared.of_group(self, layers, x)

    def explain(self, batch: int = 1024) -> str:
        """Explain each layer, and whether one launch runs all of them.

        On a processor, the text includes the times of one launch and of a launch per layer, if they were measured.
        """
        lines = self._explained(batch)
        if not len(self) or not self._are_plain:
            return "\n".join(lines)
        layer = self._first
        if _place_of(layer.weights[0]) == "cuda" and len(self) > 1:
            verdict = Verdict(False, "the layers differ in more than their chains")
            if prepared.are_alike(list(self)):
                verdict = self._verdict(layer.weights[0], batch)
            lines.insert(0, f"{'one launch' if verdict.is_one else 'layer by layer'}: {verdict.why}")
        shapes = list(map(prepared.shapes_of, self))
        times = choice.describe_times(
            shapes, layer.weights[0].dtype, layer.layout, layer.activation, layer.bias is not None, batch, layer.between
        )
        return "\n".join([*lines, *times])

    def to_dense(self) -> Tensor:
        """Dense matrix of all layers, concatenated."""
        self._check_has_layers()
        return torch.cat(self._matrices())

    @property
    def _are_plain(self) -> bool:
        """Whether all layers store their weights in the type of x, as one launch requires."""
        return all(isinstance(layer, ChainLayer) and not layer.has_stored_type for layer in self)

    @property
    def _first(self) -> Any:
        return next(iter(self))

    def _each(self, x: Tensor) -> Tensor:
        """Outputs of the layers, called one by one, and concatenated.

        The layers' options are checked again, because they may have been set after grouping.
        """
        chains = [layer for part in self for layer in chain_layers(part)]
        splits = [each._parallel for each in chains]
        if len(self) > 1 and any(each is not None and each.gives_own_features for each in splits):
            # Concatenating one process's features of each layer would not give a contiguous shard of the full output.
            raise LaunchError(
                "a group whose outputs are split over processes; accepted: parts(x), or output_layouts=Replicate()"
            )
        self._check_has_layers()
        for layer in chains:
            layer._refuse_out_layout("a layer of a group")
        layouts = sorted({layer.layout for layer in chains})
        if len(layouts) > 1:
            raise LaunchError(f"a group with layers of layouts {', '.join(layouts)}; accepted: one layout, or parts(x)")
        return torch.cat([layer(x) for layer in self], dim=0 if layouts == ["bsl"] else -1)

    def _check_has_layers(self) -> None:
        if not len(self):  # for example an empty slice of a group
            raise LaunchError("a group without layers; accepted: one or more")

    def _whole(self, x: Tensor) -> Tensor | None:
        """All outputs by one launch; None if that is not supported or not faster.

        On a processor, one launch for all layers and separate calls of each layer are timed here.
        """
        if not self._fits_one_launch(x):
            return None
        if self._first.fuse == "yes":
            return self._in_one_launch(x)
        if _place_of(x) == "cuda":
            try:
                return by_kernels(lambda: self._in_one_launch(x))
            except ToolchainError as error:
                choice.disable_fusion(prepared.launcher_of_layers(list(self)), error)
                return None
        methods = {"ksgen": lambda: self._in_one_launch(x), "each": lambda: self._each(x)}
        layer, shapes = self._first, list(map(prepared.shapes_of, self))
        has_bias = layer.bias is not None
        job = choice.job_of("group", shapes, x.dtype, layer.layout, layer.activation, has_bias, False, layer.between)
        key = job, choice.size_of(x.numel() // layer.in_features), *methods
        return by_kernels(lambda: self._in_one_launch(x) if choice.faster(key, methods) == "ksgen" else None)

    def _verdict(self, like: Tensor, batch: int) -> Verdict:
        """Whether tensors of the type and device of `like` are multiplied by one launch, and why."""
        layer = self._first
        epilogue, wanted = Epilogue(layer.bias is not None, layer.activation), layer.precision or dtype_name(like.dtype)
        launcher = prepared.launcher_of_layers(list(self))
        return choice.is_one_launch(launcher, like.device, wanted, layer.layout, epilogue, batch)

    def _fits_one_launch(self, x: Tensor) -> bool:
        """Whether one launch can compute all outputs for x, and no verdict is against it.

        The layers may differ only in their chains, no hook may observe them, and no derivative may be recorded. On a
        GPU, measured times of a search decide, or else expected times.
        """
        if torch.compiler.is_compiling() or len(self) < 2 or not isinstance(x, Tensor) or not self._are_plain:
            return False
        place, least = _place_of(x), 1
        if place == "cpu" and self._first.fuse == "auto":  # for a smaller x, prepared calls of each layer are faster
            least = least_rows(torch.get_num_threads(), self._first.layout) * self._first.in_features
        if place not in choice.KERNEL_DEVICES or x.layout is not torch.strided or x.is_nested or x.numel() < least:
            return False
        layers = list[Any](self)
        if are_watched(layers) or not prepared.are_alike(layers) or torch.is_autocast_enabled(place):
            return False
        layer, tensors = layers[0], [tensor for each in layers for tensor in (*each.weights, each.bias)]
        if not is_plain(x, *tensors) or layer.fuse == "no" or not choice.is_ready(x.device):
            return False
        if x.dim() < 2 or x.shape[-1 if layer.layout == "bsf" else 0] != layer.in_features:
            return False
        if not all(prepared.fits(each, x) for each in layers):
            return False
        return layer.fuse == "yes" or self._verdict(x, x.numel() // layer.in_features).is_one

    def _in_one_launch(self, x: Tensor) -> Tensor:
        layers, first = list[Any](self), self._first
        for layer in layers:
            frozen.thaw_if_changed(layer)
        weights = [[operand(contiguous(each), False) for each in layer.weights] for layer in layers]
        bias = None if first.bias is None else [contiguous(layer.bias) for layer in layers if layer.bias is not None]
        is_bsf, features = first.layout == "bsf", sum(layer.out_features for layer in layers)
        rows = first._as_matrix(x)
        out = new_tensor(rows, *((rows.shape[0], features) if is_bsf else (features, rows.shape[1])))
        options: dict[str, Any] = {"layout": first.layout, "activation": first.activation, "precision": first.precision}
        prepared.launcher_of_layers(list(self))(rows_of(rows), weights, bias=bias, out=out, **options)
        return out.view((*x.shape[:-1], features) if is_bsf else (features, *x.shape[1:]))


def are_watched(layers: Sequence[Any]) -> bool:
    """Whether hooks observe calls of a layer, or a layer overrides the `forward` of `KSLinear`."""
    if nn.modules.module._has_any_global_hook():
        return True
    if any(type(each).forward is not ChainLayer.forward or "forward" in vars(each) for each in layers):
        return True
    return any(each._forward_hooks or each._forward_pre_hooks for each in layers)


def _place_of(tensor: Tensor) -> str:
    kind: str = tensor.device.type
    return kind


def chain_layers(layer: Any) -> list[Any]:
    """List the layer itself, or the layers of a `KSSum`; the list is empty for a module of another type."""
    parts = layer if isinstance(layer, Layers) and not isinstance(layer, KSLinears) else [layer]
    return [each for each in parts if isinstance(each, ChainLayer)]


def group(layers: Sequence[Any]) -> KSLinears:
    """Combine layers that take the same x into one module; `LaunchError` on layers that cannot be combined."""
    given = list(layers)
    chains = [chain_layers(layer) for layer in given]
    if not given or not all(chains) or any(layer.has_stored_type for each in chains for layer in each):
        raise LaunchError(f"layers={excerpt(given)}; accepted: a list of KSLinear, one or more, or of KSSum")
    if len({first.in_features for first, *_ in chains}) > 1:
        taken = ", ".join(str(first.in_features) for first, *_ in chains)
        raise LaunchError(f"layers that take {taken} features; accepted: layers that take the same x")
    for layer in chain.from_iterable(chains):
        layer._refuse_out_layout("a layer of a group")
    return KSLinears(given)
