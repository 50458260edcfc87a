"""ys = group(x, weights): layers beside each other on one x, such as q, k and v; in one launch where a device has a family for that.

Refuses what any layer would refuse before the first one is launched.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ksgen.errors import LaunchError
from ksgen.families.signature import weights_of
from ksgen.launch.arrays import ArrayView, view
from ksgen.launch.call import Call
from ksgen.launch.chain import layer_of
from ksgen.launch.checks import check_memory, group_shape
from ksgen.launch.fused import FusedPlan, fused_plan
from ksgen.launch.memory import is_whole, new_array
from ksgen.launch.places import on_shared_group
from ksgen.launch.streams import device_and_stream
from ksgen.launch.views import CallOptions, views_of
from ksgen.launch.weights import Weights, check_packed, packed_in
from ksgen.spec import Epilogue
from ksgen.values import excerpt
from ksgen.words import counted

ADDED = ("bias", "residual")


class GroupLauncher:
    """Layers on one x. Each is a `ChainLauncher`, or the `Launcher` of its only factor."""

    def __init__(self, *layers: Any) -> None:
        self.layers = tuple(found for each in layers if (found := layer_of(each)))
        if not layers or len(self.layers) < len(layers):
            raise LaunchError(f"layers={excerpt(layers)}; accepted: ChainLaunchers or Launchers, one an argument")
        self.chains = tuple(layer.chain for layer in self.layers)
        if len({chain.in_features for chain in self.chains}) > 1:
            taken = ", ".join(f"{chain} takes {chain.in_features}" for chain in self.chains)
            raise LaunchError(f"{taken} features; accepted: layers that take the same x")

    def __repr__(self) -> str:
        return f"GroupLauncher({', '.join(map(repr, self.layers))})"

    def __call__(
        self,
        x: Any,
        weights: Sequence[Any],
        *,
        layout: str = "bsf",
        bias: Sequence[Any] | None = None,
        activation: str = "none",
        residual: Sequence[Any] | None = None,
        out: Any = None,
        stream: Any = None,
        precision: str | None = None,
    ) -> list[Any]:
        """The layers' outputs: in new arrays, which are slices of one if one launch wrote them, or where `out` says: one array for all
        of them beside each other, or a list of arrays.

        `weights` has a list of arrays for each layer, one a factor; `bias` and `residual`, where there are any, one array a layer.
        """
        options = CallOptions(layout, activation, stream, precision)
        own, added = self._own(weights), {"bias": self._each("bias", bias), "residual": self._each("residual", residual)}
        outs, views = self._outs(out, options), self._views(x, added, options)
        batch = self._check(views, own, outs, options)
        if fused := self._fused(views, own, outs, batch, options):
            return list(fused())
        ys = []
        for layer, each, to, *both in zip(self.layers, own, outs or [None] * len(own), *added.values(), strict=True):
            given = {name: array for name, array in zip((*ADDED, "out"), (*both, to), strict=True) if array is not None}
            ys.append(layer(x, each, layout=layout, activation=activation, stream=stream, precision=precision, **given))
        return ys

    # ---- what was given

    def _own(self, weights: Sequence[Any]) -> list[Sequence[Any]]:
        """A list of arrays for each layer."""
        own = self._each("weights", weights)
        lone = [len(layer.factors) == 1 and not isinstance(each, list | tuple) for layer, each in zip(self.layers, own, strict=True)]
        return [[each] if is_lone else layer.weights_of_each(each) for layer, each, is_lone in zip(self.layers, own, lone, strict=True)]

    def _each(self, name: str, given: Any) -> list[Any]:
        """One for each layer."""
        if given is None:
            return [None] * len(self.layers)
        if not isinstance(given, list | tuple) or len(given) != len(self.layers):
            got = counted(len(given), "entry", "entries") if isinstance(given, list | tuple) else excerpt(given)
            raise LaunchError(f"{self!r}: {name}: got {got}; {len(self.layers)} are needed, one a layer, in a list")
        return list(given)

    def _views(self, x: Any, added: Mapping[str, Sequence[Any]], options: CallOptions) -> dict[str, ArrayView]:
        """Of x and what is added, by the names of a group's operands."""
        named = {f"{name}_{number}": array for name in ADDED for number, array in enumerate(added[name], 1) if array is not None}
        return views_of({"x": x, **named}, options.stream)

    def _outs(self, out: Any, options: CallOptions) -> list[Any]:
        """An array for each layer; none where none was given."""
        if out is None or isinstance(out, list | tuple):
            return [] if out is None else self._each("out", out)
        ends, begin = [], 0
        for chain in self.chains:
            ends.append(slice(begin, begin := begin + chain.out_features))
        shape = tuple(getattr(out, "shape", ()))
        if len(shape) != 2 or shape[1 if options.layout == "bsf" else 0] != begin:
            raise LaunchError(f"{self!r}: got out of shape {shape}; one with {begin} features is needed, or a list of arrays")
        return [out[:, each] if options.layout == "bsf" else out[each] for each in ends]

    def _check(self, views: dict[str, ArrayView], own: Sequence[Sequence[Any]], outs: Sequence[Any], options: CallOptions) -> int:
        """The batch; `LaunchError` on what any layer would refuse, and on outputs that meet."""
        results = {f"out of layer {number}": view(out, f"out of layer {number}") for number, out in enumerate(outs, 1)}
        for number, (layer, weights) in enumerate(zip(self.layers, own, strict=True), 1):
            given = {each: views[f"{each}_{number}"] for each in ADDED if f"{each}_{number}" in views}
            name, own_views = f"out of layer {number}", layer.views_of_weights(weights)
            given |= {"out": results[name]} if outs else {}
            batch = layer.check(given | {"x": views["x"]}, own_views, options)
            others = {each: found for each, found in (views | results).items() if each not in (name, f"residual_{number}")}
            packed = {f"weights {at}": found for at, found in enumerate(own_views, 1) if found}
            check_memory(self, others | packed | {each: given[each] for each in given if each != "bias"})
        return batch

    # ---- one launch

    def _fused(
        self, views: dict[str, ArrayView], own: Sequence[Sequence[Any]], outs: Sequence[Any], batch: int, options: CallOptions
    ) -> Call | None:
        """All layers in one launch, on arrays of the host where they lie; None where that is not to be had."""
        own_views = [found for layer, each in zip(self.layers, own, strict=True) for found in layer.views_of_weights(each)]
        every = [*views.values(), *map(view, outs), *filter(None, own_views)]
        counts = [sum(f"{name}_{number}" in views for number in range(1, len(own) + 1)) for name in ADDED]
        if any(found.device != "host" or not is_whole(found) for found in every) or not set(counts) <= {0, len(own)}:
            return None
        device, stream = device_and_stream(self, "host", options.stream)
        if not device.shares_host:
            return None
        dtype = views["x"].dtype
        epilogue = Epilogue(bool(counts[0]), options.activation, bool(counts[1]))
        between = {layer.between for layer in self.layers if len(layer.factors) > 1} or {"none"}
        if len(between) > 1:
            return None
        fused = fused_plan(device, self.chains, options.precision or dtype, options.layout, epilogue, batch, "any", between=between.pop())
        if fused is None:
            return None
        if not outs:
            outs = self._outs(new_array(views["x"], group_shape(self.chains, options.layout, batch)), options)
        results = {f"y_{number}": view(out) for number, out in enumerate(outs, 1)}
        packed = self._packed(fused, own, own_views, dtype, stream)
        return on_shared_group(fused.whole, views | results, dict(zip(weights_of(fused.whole.kernel), packed, strict=True)), outs, stream)

    def _packed(
        self, fused: FusedPlan, own: Sequence[Sequence[Any]], own_views: Sequence[ArrayView | None], dtype: str, stream: Any
    ) -> list[Any]:
        factors = [factor for layer in self.layers for factor in layer.factors]
        packed = []
        for factor, plan, each, found in zip(factors, fused.factors, [each for weights in own for each in weights], own_views, strict=True):
            if isinstance(each, Weights):
                check_packed(self, each, factor.pattern, plan.device, dtype)
            packed.append(packed_in(plan, each, found, factor.rooms, stream))
        return packed
