"""Group launcher, ys = group(x, weights): layers on one x, such as q, k and v.

One launch runs all layers if a device has a family for that. Arguments that any layer would refuse are refused before
the first launch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ksgen.devices import find_device
from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView, CallOptions, view, views_of
from ksgen.launch.call import Call
from ksgen.launch.chain import layer_of, with_precision
from ksgen.launch.checks import check_memory
from ksgen.launch.one_launch import OneLaunch
from ksgen.launch.places import outputs_in
from ksgen.launch.stated import ADDED, check_storage, docstring, explained, operand, options_of_call
from ksgen.launch.weights import Weights, check_stored, inputs_of, storage_of
from ksgen.spec import Activation, ByteStorage, Epilogue, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import LayerOptions, StatedOptions, checked_batch, is_layer
from ksgen.spec.storage import Same
from ksgen.values import excerpt
from ksgen.words import counted


class _Given(NamedTuple):
    """Checked arguments of a call: arrays and views by operand name, and one list per kind with an entry per layer."""

    arrays: Mapping[str, Any]
    views: dict[str, ArrayView]
    own: list[Sequence[Any]]
    added: Mapping[str, list[Any]]
    outs: list[Any]
    batch: int
    options: CallOptions


class GroupLauncher(OneLaunch):
    """Compute layers that take the same x, such as q, k and v: ys = group(x, weights).

    If the device has a kernel for all layers and that is faster, one launch runs them and reads x once. Otherwise each
    layer is launched. Arguments that any layer would refuse are refused before the first launch.

    Args:
        *layers: `ChainLauncher`s, `Launcher`s, chains or patterns, one per argument. All must take as many features and
            state the same options. None may have an `out_layout`. One layer with fuse="no" rules out one launch; else
            one with "yes" requires it.

    Raises:
        PatternError: A layer is no chain.
        LaunchError: No layer is given, or layers take different features or state different options.

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
    accepted = "layers with fuse='auto' or 'no'"

    def __init__(self, *layers: Any) -> None:
        if not layers:
            raise LaunchError("layers=(); accepted: ChainLaunchers, Launchers or chains, one an argument")
        given = tuple(map(layer_of, layers))
        self.layers = tuple(layer._stating(StatedOptions()) for layer in given)
        self.chains, self.stated = tuple(layer.chain for layer in given), given[0].stated
        if changed := [layer for layer in self.layers if layer.out_layout]:
            raise LaunchError(f"{changed[0]!r} of a group; accepted: layers without out_layout")
        if len({chain.in_features for chain in self.chains}) > 1:
            taken = ", ".join(f"{chain} takes {chain.in_features}" for chain in self.chains)
            raise LaunchError(f"{taken} features; accepted: layers that take the same x")
        if others := [layer for layer in given if layer.stated != self.stated]:
            raise LaunchError(f"{given[0]!r} and {others[0]!r} of a group state different options; accepted: layers that state the same")
        self.factors = tuple(factor for layer in self.layers for factor in layer.factors)
        fuses = {layer.fuse for layer in self.layers}
        self.fuse = "no" if "no" in fuses else "yes" if "yes" in fuses else "auto"
        between = {layer.between for layer in self.layers if len(layer.factors) > 1} or {"none"}
        self.between = between.pop() if len(between) == 1 else None
        self.__doc__ = docstring(self.chains, self.stated, LayerOptions(self.between or "none", None, self.fuse))

    def __repr__(self) -> str:
        return f"GroupLauncher({', '.join(repr(layer._stating(self.stated)) for layer in self.layers)})"

    def __call__(
        self,
        x: Any,
        weights: Sequence[Any],
        *,
        layout: Layout | None = None,
        bias: Any = None,
        activation: Activation | None = None,
        residual: Any = None,
        out: Any = None,
        stream: Any = None,
        precision: PrecisionName | None = None,
    ) -> list[Any]:
        """Compute the outputs of all layers.

        Args:
            x: Input of every layer, (batch, in_features) in layout "bsf", or (in_features, batch) in "bsl".
            weights: List with one list per layer, which has one array (a, b, c, d) per factor. A layer of one factor
                may have the array alone. Results of `Launcher.pack` or `ksgen.quantize` are accepted too.
            layout: Layout of x and the outputs: "bsf" or "bsl". None: the stated one, "bsf" by default.
            bias: List with one array (out_features,) or None per layer. False omits a stated bias.
            activation: Activation of every layer. None: the stated one, "none" by default.
            residual: List with one array like the layer's output, or None, per layer. False omits a stated residual.
            out: One array with the features of all layers, or a list with one array per layer. None: new arrays.
            stream: CUDA stream or pyopencl queue to launch on. None: the stream of the arrays.
            precision: Arithmetic of all products, like in a call of a `Launcher`.

        Returns:
            A list with one array per layer. New arrays are slices of one array if one launch wrote them.

        Raises:
            LaunchError: Arguments do not fit a layer or each other, or fuse="yes" is unavailable.
            DeviceError: No device can run the call.
            ToolchainError: No compiler is available, and no binary is cached.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> group = ksgen.GroupLauncher("1,3,2,2", "1,3,2,2")
            >>> x, weights = np.ones((1, 4), np.float32), np.ones((1, 3, 2, 2), np.float32)
            >>> [y.shape for y in group(x, [weights, weights])]
            [(1, 6), (1, 6)]
            >>> group(x, [weights])
            Traceback (most recent call last):
            ...
            ksgen.errors.LaunchError: GroupLauncher(...): weights: got 1 entry; 2 are needed, one per layer, in a list
        """
        given = self._read(x, weights, bias, residual, out, options_of_call(self.stated, layout, activation, stream, precision))
        if fused := self._fused(given):
            return list(fused())
        ys, outs = [], given.outs or [None] * len(self.layers)
        options = given.options._asdict()
        for layer, each, to, *both in zip(self.layers, given.own, outs, *given.added.values(), strict=True):
            more = {name: array for name, array in zip((*ADDED, "out"), (*both, to), strict=True) if array is not None}
            ys.append(layer(x, each, **options, **more))
        return ys

    def prepare(
        self,
        x: Any,
        weights: Sequence[Any],
        *,
        layout: Layout | None = None,
        bias: Any = None,
        activation: Activation | None = None,
        residual: Any = None,
        out: Any = None,
        precision: PrecisionName | None = None,
    ) -> Call | None:
        """Prepare a call of all layers as one launch, like `Launcher.prepare`.

        Args:
            x: Input, like in a call.
            weights: List with the weights of each layer.
            layout: Layout of x and the outputs.
            bias: List with one array or None per layer.
            activation: Activation of every layer.
            residual: List with one array or None per layer.
            out: One array for all outputs, or a list of arrays. None: new arrays, which every launch writes again.
            precision: Arithmetic of all products.

        Returns:
            A `Call` that returns the list of outputs, or None if the layers are launched one by one.

        Raises:
            LaunchError: Arguments do not fit a layer or each other, or fuse="yes" is unavailable.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> yes = ksgen.ChainLauncher("1,3,2,2", fuse="yes")
            >>> weights = np.ones((1, 3, 2, 2), np.float32)
            >>> call = ksgen.GroupLauncher(yes, yes).prepare(np.ones((1, 4), np.float32), [weights, weights])
            >>> len(call())
            2
        """
        given = self._read(x, weights, bias, residual, out, options_of_call(self.stated, layout, activation, None, precision))
        if call := self._fused(given):
            own = [each for weights_of_it in given.own for each in weights_of_it if not isinstance(each, Weights)]
            call.keep += tuple(storage_of(view(each)) for each in (*given.arrays.values(), *own, *call.out))
        return call

    def explain(
        self,
        batch: int,
        *,
        precision: PrecisionName | None = None,
        layout: Layout | None = None,
        epilogue: Epilogue | None = None,
        device: str | None = None,
        weights: WeightStorage | Same | None = None,
        inputs: ByteStorage | Same | None = None,
    ) -> str:
        """Explain whether one launch runs all layers on a device, by which family, and why.

        None stands for the stated option. Without a stated option it stands for float32, "bsf" and unquantized arrays.

        Args:
            batch: Batch size of the call.
            precision: Arithmetic, such as "float16".
            layout: "bsf" or "bsl".
            epilogue: `ksgen.spec.Epilogue` of every layer: bias, activation and residual.
            device: Device, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
            weights: Storage of the weights: "same", "int8", "e4m3", "e5m2" or "bfloat16".
            inputs: Storage of x: "same", "int8", "e4m3" or "e5m2".

        Returns:
            One line for one launch; otherwise a line with the reason, and the explanation of each layer.

        Raises:
            SpecError: An option is unknown, or two options exclude each other.
            DeviceError: The device does not exist.

        Examples:
            >>> import ksgen
            >>> no = ksgen.ChainLauncher("1,3,2,2", fuse="no")
            >>> print(ksgen.GroupLauncher(no, no).explain(batch=4))
            1,3,2,2, ... 1,3,2,2: layer by layer; fuse='no'
            1,3,2,2: one launch per factor; there is one
            ks_1x3x2x2_float32_bsf at batch 4 on ...
        """
        batch, where = checked_batch(batch), find_device(device)
        what = explained(self.stated, precision, layout, epilogue, weights, inputs)
        name, found = self._title, self._verdict(where, batch=batch, **what._asdict())
        if found.is_one:
            why = self._explain_one_launch(found, where, batch, *what[:3], None, *what[3:])
            return f"{name} at batch {batch} on {where.name}: {why}"
        each = [layer.explain(batch, device=device, **what._asdict()) for layer in self.layers]
        return "\n".join([f"{name}: layer by layer; {found.why}", *each])

    # ---- arguments

    def _read(self, x: Any, weights: Sequence[Any], bias: Any, residual: Any, out: Any, options: CallOptions) -> _Given:
        """Read and check the arguments of a call; `LaunchError` on those that any layer would refuse."""
        own, added = self._own(weights), {"bias": self._added("bias", bias), "residual": self._added("residual", residual)}
        outs, arrays = self._outs(out, options), self._arrays(x, added)
        inputs = self._inputs(own)
        found = {"out": outs, **added}  # the first of them that is given decides the dtype
        first = {name: next((array for array in each if array is not None), None) for name, each in found.items()}
        given = {"x": x, **{name: array for name, array in first.items() if array is not None}}
        options = with_precision(self, given, own[0], options)
        views = views_of(arrays, options.stream)
        return _Given(arrays, views, own, added, outs, self._check(views, own, outs, options, inputs), options)

    def _own(self, weights: Sequence[Any]) -> list[Sequence[Any]]:
        """Weights as one list of arrays per layer."""
        own = self._each("weights", weights)
        lone = [len(layer.factors) == 1 and not isinstance(each, list | tuple) for layer, each in zip(self.layers, own, strict=True)]
        found = [layer._weights_of_each([each] if is_lone else each) for layer, each, is_lone in zip(self.layers, own, lone, strict=True)]
        for each in found:
            check_storage(self, self.stated, each)
        return found

    def _inputs(self, own: Sequence[Sequence[Any]]) -> str:
        """Storage of the x that all layers take."""
        found = list(map(inputs_of, own))
        if others := [number for number, each in enumerate(found, 1) if each != found[0]]:
            how = f"those of layer 1 as {found[0]} and those of layer {others[0]} as {found[others[0] - 1]}"
            raise LaunchError(f"{self!r}: first weights multiply x in different storage, {how}; accepted: one storage for all of them")
        return found[0]

    def _each(self, name: str, given: Any) -> list[Any]:
        """Values of an argument, one per layer."""
        if given is None:
            return [None] * len(self.layers)
        if not isinstance(given, list | tuple) or len(given) != len(self.layers):
            got = counted(len(given), "entry", "entries") if isinstance(given, list | tuple) else excerpt(given)
            raise LaunchError(f"{self!r}: {name}: got {got}; {len(self.layers)} are needed, one per layer, in a list")
        return list(given)

    def _added(self, name: str, given: Any) -> list[Any]:
        """Bias or residual per layer: an array, or None."""
        each, is_stated = self._each(name, None if given is False else given), given is not False and getattr(self.stated, name)
        return [operand(self, name, array, is_stated, "an array per layer, in a list") for array in each]

    def _arrays(self, x: Any, added: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Arrays x, bias and residual by the names of a group's operands."""
        named = ((name, array) for operand in ADDED for name, array in zip(self._names(operand), added[operand], strict=True))
        return {"x": x, **{name: array for name, array in named if array is not None}}

    def _outs(self, out: Any, options: CallOptions) -> list[Any]:
        """Output arrays, one per layer; empty if none was given."""
        if out is None or isinstance(out, list | tuple):
            return [] if out is None else self._each("out", out)
        features, shape = sum(chain.out_features for chain in self.chains), tuple(getattr(out, "shape", ()))
        if len(shape) != 2 or shape[1 if options.layout == "bsf" else 0] != features:
            raise LaunchError(f"{self!r}: got out of shape {shape}; one with {features} features is needed, or a list of arrays")
        return outputs_in(out, self.chains, options.layout)

    def _check(
        self, views: dict[str, ArrayView], own: Sequence[Sequence[Any]], outs: Sequence[Any], options: CallOptions, inputs: str
    ) -> int:
        """Return the batch size; `LaunchError` on arguments that any layer would refuse, and on overlapping outputs."""
        results = {f"out of layer {number}": view(out, f"out of layer {number}") for number, out in enumerate(outs, 1)}
        views_of_each = [layer._views_of_weights(weights) for layer, weights in zip(self.layers, own, strict=True)]
        read = dict[str, ArrayView]()  # reads of all layers: an output is written before later layers read their operands
        for number, (weights, found_views) in enumerate(zip(own, views_of_each, strict=True), 1):
            for at, (each, found) in enumerate(zip(weights, found_views, strict=True), 1):
                if lies_in := each.lies_in if isinstance(each, Weights) else found:
                    read[f"weights {at} of layer {number}"] = lies_in
        for number, (layer, weights, own_views) in enumerate(zip(self.layers, own, views_of_each, strict=True), 1):
            named = {each: self._names(each)[number - 1] for each in ADDED}
            given = {each: views[name] for each, name in named.items() if name in views}
            name = f"out of layer {number}"
            given |= {"out": results[name]} if outs else {}
            batch = layer._check(given | {"x": views["x"]}, own_views, options, inputs=inputs)
            for each in weights:
                if isinstance(each, Weights):
                    check_stored(self, each, options.precision or views["x"].dtype)
            others = {each: found for each, found in (views | results).items() if each not in (name, named["residual"])}
            check_memory(self, others | read | {each: given[each] for each in given if each != "bias"})
        return batch

    def _fused(self, call: _Given) -> Call | None:
        """Call of all layers as one launch; None if unavailable."""
        if not is_layer(self.chains, call.options.layout, None):
            return None
        own_views = [found for layer, each in zip(self.layers, call.own, strict=True) for found in layer._views_of_weights(each)]
        outs = dict(zip(self._out_names, call.outs, strict=True)) if call.outs else {}
        views = call.views | {name: view(each) for name, each in outs.items()}
        found = self._one_launch({**call.arrays, **outs}, views, call.own, own_views, call.outs or None, call.batch, call.options)
        if found and not isinstance(found.out, list):  # a group of one layer
            found.out = [found.out]
        return found
