"""Group launcher, ys = group(x, weights): layers on one x, such as q, k and v.

One launch runs all layers if a device has a family for that and it is faster.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView
from ksgen.launch.base import BaseLauncher, Given
from ksgen.launch.chain import ChainLauncher, layer_of
from ksgen.launch.checks import CheckedArguments, check_storage, per_chain
from ksgen.launch.explain import LaunchOptions
from ksgen.launch.places import outputs_in
from ksgen.launch.weights import Weights
from ksgen.spec import Fuse, Layout
from ksgen.spec.kernel import LayerOptions
from ksgen.spec.storage import SAME
from ksgen.values import counted, excerpt


class GroupLauncher(BaseLauncher):
    """Compute layers that take the same x, such as q, k and v: ys = group(x, weights).

    If the device has a kernel for all layers and that is faster, one launch runs them, and reads x from memory once.
    Otherwise each layer is launched. Arguments that any layer would refuse are refused before the first launch.

    Args:
        *layers: `ChainLauncher`s, `Launcher`s, chains or patterns, one per argument. All must take the same number of
            features and state the same options. None may have an `out_layout`. A layer with fuse="no" rules out one
            launch for the group; otherwise a layer with fuse="yes" requires it.

    Raises:
        PatternError: A layer is no chain.
        LaunchError: No layer is given, or layers take different features or have different options.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> group = ksgen.GroupLauncher("1,3,2,2", "1,3,2,2")
        >>> weights = np.ones((1, 3, 2, 2), np.float32)
        >>> q, k = group(np.ones((1, 4), np.float32), [[weights], [2 * weights]])
        >>> q
        array([[2., 2., 2., 2., 2., 2.]], dtype=float32)
        >>> k
        array([[4., 4., 4., 4., 4., 4.]], dtype=float32)
    """

    parts = "layer"
    kind = "group"
    gives_list = True
    accepted = "layers with fuse='auto' or 'no'"

    def __init__(self, *layers: Any) -> None:
        if not layers:
            raise LaunchError("layers=(); accepted: ChainLaunchers, Launchers or chains, one per argument")
        given = tuple(map(layer_of, layers))
        chains, stated = tuple(layer.chain for layer in given), given[0].stated
        if changed := [layer for layer in given if layer.out_layout]:
            raise LaunchError(f"{changed[0]!r} of a {self.kind}; accepted: layers without out_layout")
        if len({chain.in_features for chain in chains}) > 1:
            taken = ", ".join(f"{chain} takes {chain.in_features}" for chain in chains)
            raise LaunchError(f"{taken} features; accepted: layers that take the same x")
        if others := [layer for layer in given if layer.stated != stated]:
            raise LaunchError(
                f"{given[0]!r} and {others[0]!r} of a {self.kind} have different options; accepted: layers with equal "
                "options"
            )
        self._given = given
        self._layers = tuple(ChainLauncher(*layer.factors, **layer.options.non_defaults) for layer in given)
        self.batches = self._layers[0].batches if len(given) == 1 else frozenset()
        fuses = {layer.fuse for layer in given}
        activations = {layer.options.between for layer in given if len(layer.chain) > 1} or {"none"}
        between = activations.pop() if len(activations) == 1 else None
        fuse: Fuse = "no" if "no" in fuses else "yes" if "yes" in fuses else "auto"
        factors = [factor for layer in self.layers for factor in layer.factors]
        self._set_up(chains, factors, stated, LayerOptions(between or "none", None, fuse))
        self.between = between

    @property
    def layers(self) -> tuple[ChainLauncher, ...]:
        """Launchers, one per layer, without the stated options."""
        return self._layers

    @property
    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        return self._given, {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle that an earlier version of ksgen wrote: it holds the attributes."""
        stated = state["stated"].non_defaults
        layers = (ChainLauncher(*each.factors, **each.options.non_defaults, **stated) for each in state["layers"])
        self.__init__(*layers)  # type: ignore[misc]

    # ---- arguments

    def _weights_of_each(self, weights: Any) -> Sequence[Any]:
        found: list[Any] = []
        for layer, each in zip(self.layers, self._per_chain("weights", weights), strict=True):
            is_lone = len(layer.chain) == 1 and not isinstance(each, list | tuple)
            own = layer._weights_of_each([each] if is_lone else each)
            if self.stated.weights != SAME:
                check_storage(layer, self.stated, own)
            found += own
        return found

    def _per_chain(self, name: str, value: Any) -> Sequence[Any]:
        """Entries of an argument, one per layer."""
        if value is None:
            return [None] * len(self.layers)
        if not isinstance(value, list | tuple) or len(value) != len(self.layers):
            got = counted(len(value), "entry", "entries") if isinstance(value, list | tuple) else excerpt(value)
            raise LaunchError(f"{self!r}: {name}: got {got}; {len(self.layers)} are needed, one per layer, in a list")
        return list(value)

    def _add_outputs(self, out: Any, layout: str, arrays: dict[str, Any]) -> Any:
        if isinstance(out, list | tuple):
            outs = self._per_chain("out", out)
        else:
            features, shape = sum(chain.out_features for chain in self.chains), tuple(getattr(out, "shape", ()))
            if len(shape) != 2 or shape[1 if layout == "bsf" else 0] != features:
                raise LaunchError(
                    f"{self!r}: got out of shape {shape}; one with {features} features is needed, or a list of arrays"
                )
            try:
                outs = outputs_in(out, self.chains, layout)
            except TypeError:
                raise LaunchError(
                    f"{self!r}: out is of type {type(out).__name__}, which has no slices; give a list of arrays"
                ) from None
        arrays |= zip(self.names.out, outs, strict=True)
        return outs

    # ---- from arguments to a launch

    def _packed_memory(self, weights: Sequence[Any]) -> Mapping[str, ArrayView]:
        return {
            name: each.lies_in
            for name, each in zip(self.names.weights, weights, strict=True)
            if isinstance(each, Weights) and each.lies_in
        }

    def _one_by_one(self, given: Given, fit: CheckedArguments) -> list[Any]:
        """Launch the layers sequentially."""
        arrays, factor_weights, _, _, outs, options = given
        ys = []
        for number, (layer, weights) in enumerate(
            zip(self.layers, per_chain(self.chains, factor_weights), strict=True)
        ):
            added = {"bias": arrays.get(self.names.bias[number]), "residual": arrays.get(self.names.residual[number])}
            out = None if outs is None else outs[number]
            ys.append(
                layer(arrays["x"], weights, out=out, **added, **options._replace(precision=fit.precision)._asdict())
            )
        return ys

    def _parts_of(self, options: LaunchOptions, out_layout: Layout | None) -> list[tuple[Any, LaunchOptions]]:
        return [(layer, options) for layer in self.layers]

    def _describe_parts(self, layout: Layout, out_layout: Layout | None) -> str:
        return f"{self._title}: layer by layer"

    def _describe(self, layout: Layout, out_layout: Layout | None) -> str:
        return self._title
