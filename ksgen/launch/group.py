"""ys = group(x, weights): layers beside each other on one x, such as q, k and v; in one launch where a device has a family for that.

Refuses what any layer would refuse before the first one is launched.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ksgen.devices import find_device
from ksgen.devices.base import Device
from ksgen.errors import LaunchError
from ksgen.families.signature import weights_of
from ksgen.launch.arrays import ArrayView, common_device, view
from ksgen.launch.call import Call
from ksgen.launch.chain import layer_of, with_precision
from ksgen.launch.checks import check_memory, group_shape
from ksgen.launch.fused import STORED_OTHERWISE, WITHIN_AN_ELEMENT, FusedPlan, Verdict, copied_to, fused_plan, verdict
from ksgen.launch.launcher import bytes_saved
from ksgen.launch.memory import is_whole
from ksgen.launch.places import new_outs, on_device_group, on_shared_group
from ksgen.launch.planner import PLANNER
from ksgen.launch.stated import ADDED, check_storage, docstring, explained, operand, options_of_call
from ksgen.launch.streams import where_to_work
from ksgen.launch.views import CallOptions, views_of
from ksgen.launch.weights import Weights, check_packed, check_stored, inputs_of, packed_in, storage_of, stored_alike
from ksgen.spec import PRECISIONS, Epilogue, KernelSpec
from ksgen.spec.kernel import LayerOptions, StatedOptions, checked_batch
from ksgen.spec.storage import BYTE_TYPES, SAME
from ksgen.values import excerpt
from ksgen.words import counted

BETWEEN_DIFFERS = "the activations between their factors differ"


class _Given(NamedTuple):
    """What a call was given, checked: arrays and their views by the names of a group's operands, and a list of each kind, one a layer."""

    arrays: Mapping[str, Any]
    views: dict[str, ArrayView]
    own: list[Sequence[Any]]
    added: Mapping[str, list[Any]]
    outs: list[Any]
    batch: int
    options: CallOptions


class GroupLauncher:
    """Layers on one x. Each is a `ChainLauncher`, the `Launcher` of its only factor, or a chain. What they state they state alike."""

    parts = "layer"

    def __init__(self, *layers: Any) -> None:
        if not layers:
            raise LaunchError("layers=(); accepted: ChainLaunchers, Launchers or chains, one an argument")
        given = tuple(map(layer_of, layers))
        self.layers = tuple(layer.stating(StatedOptions()) for layer in given)
        self.chains, self.stated = tuple(layer.chain for layer in given), given[0].stated
        if turned := [layer for layer in self.layers if layer.out_layout]:
            raise LaunchError(f"{turned[0]!r} of a group; accepted: layers without out_layout")
        if len({chain.in_features for chain in self.chains}) > 1:
            taken = ", ".join(f"{chain} takes {chain.in_features}" for chain in self.chains)
            raise LaunchError(f"{taken} features; accepted: layers that take the same x")
        if others := [layer for layer in given if layer.stated != self.stated]:
            raise LaunchError(f"{given[0]!r} and {others[0]!r} of a group state different options; accepted: layers that state the same")
        self.__doc__ = docstring(self.chains, self.stated, LayerOptions(self._between or "none", None, self._fuse))

    @property
    def title(self) -> str:
        return ", beside ".join(map(str, self.chains))

    def __repr__(self) -> str:
        return f"GroupLauncher({', '.join(repr(layer.stating(self.stated)) for layer in self.layers)})"

    def __call__(
        self,
        x: Any,
        weights: Sequence[Any],
        *,
        layout: str | None = None,
        bias: Any = None,
        activation: str | None = None,
        residual: Any = None,
        out: Any = None,
        stream: Any = None,
        precision: str | None = None,
    ) -> list[Any]:
        """The layers' outputs: in new arrays, which are slices of one if one launch wrote them, or where `out` says: one array for all
        of them beside each other, or a list of arrays.

        `weights` has a list of arrays for each layer, one a factor; `bias` and `residual`, where there are any, one array a layer. What the
        layers state is as in a call of a `Launcher`.
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
        layout: str | None = None,
        bias: Any = None,
        activation: str | None = None,
        residual: Any = None,
        out: Any = None,
        precision: str | None = None,
    ) -> Call | None:
        """Everything but the launch of all layers as one, as `Launcher.prepare` does; None where they are launched one by one."""
        given = self._read(x, weights, bias, residual, out, options_of_call(self.stated, layout, activation, None, precision))
        if call := self._fused(given):
            own = [each for weights_of_it in given.own for each in weights_of_it if not isinstance(each, Weights)]
            call.keep += tuple(storage_of(view(each)) for each in (*given.arrays.values(), *own, *call.out))
        return call

    def explain(
        self, batch: int, *, precision: str | None = None, layout: str | None = None, epilogue: Epilogue | None = None,
        device: str | None = None, weights: str | None = None, inputs: str | None = None,
    ) -> str:  # fmt: skip
        """Whether all layers are one launch on a device, by which family, and why; or what serves each of them. Options are as a
        `ChainLauncher` takes them."""
        batch, where = checked_batch(batch), find_device(device)
        what: dict[str, Any] = explained(self.stated, precision, layout, epilogue, weights, inputs)._asdict()
        name, found = self.title, self.verdict(where, batch=batch, **what)
        if found.is_one:
            choice = PLANNER.choice(where, kernel := self._kernel(where, **what), batch)
            by = f"{choice.family}, {choice.constants}; {found.why}{bytes_saved(kernel, batch)}"
            return f"{name} at batch {batch} on {where.name}: one launch, by {by}"
        each = [layer.explain(batch, device=device, **what) for layer in self.layers]
        return "\n".join([f"{name}: layer by layer; {found.why}", *each])

    def verdict(
        self, device: Device, precision: str, layout: str, epilogue: Epilogue, batch: int, weights: str = SAME, inputs: str = SAME
    ) -> Verdict:
        """Whether a call is one launch on a device, and why."""
        if sum(map(len, self.chains)) == 1:
            return Verdict(False, "there is one")
        if self._fuse == "no":
            return Verdict(False, "fuse='no'")
        if self._between is None:
            return Verdict(False, BETWEEN_DIFFERS)
        return verdict(device, self._kernel(device, precision, layout, epilogue, weights, inputs), batch, self._fuse)

    @property
    def _fuse(self) -> str:
        """Of the group: "no" where a layer says so, else "yes" where one does."""
        found = {layer.fuse for layer in self.layers}
        return next((word for word in ("no", "yes") if word in found), "auto")

    def _check_asked(self, why: str) -> None:
        """Raise `LaunchError` where one launch was asked for and cannot be had."""
        if self._fuse == "yes" and sum(map(len, self.chains)) > 1:
            raise LaunchError(f"{self!r}: {why}; accepted: layers with fuse='auto' or 'no'")

    @property
    def _between(self) -> str | None:
        """The activation between the factors of each; None where they differ."""
        found = {layer.between for layer in self.layers if len(layer.factors) > 1} or {"none"}
        return found.pop() if len(found) == 1 else None

    def _kernel(self, device: Device, precision: str, layout: str, epilogue: Epilogue, weights: str, inputs: str) -> KernelSpec:
        """Of one launch into one array, whose columns are slices."""
        stride = "any" if device.shares_host or layout == "bsf" else "dense"
        options: dict[str, Any] = {"stride": stride, "between": self._between or "none", "weights": weights, "inputs": inputs}
        return KernelSpec(tuple(self.chains), precision, layout, epilogue, **options)

    # ---- what was given

    def _read(self, x: Any, weights: Sequence[Any], bias: Any, residual: Any, out: Any, options: CallOptions) -> _Given:
        """What a call was given; `LaunchError` on what any layer would refuse."""
        own, added = self._own(weights), {"bias": self._added("bias", bias), "residual": self._added("residual", residual)}
        outs, arrays = self._outs(out, options), self._arrays(x, added)
        inputs = self._inputs(own)
        found = {"out": outs, **added}  # of which the first that is there tells the type
        first = {name: next((array for array in each if array is not None), None) for name, each in found.items()}
        given = {"x": x, **{name: array for name, array in first.items() if array is not None}}
        options = with_precision(self, given, own[0], options)
        views = views_of(arrays, options.stream)
        return _Given(arrays, views, own, added, outs, self._check(views, own, outs, options, inputs), options)

    def _own(self, weights: Sequence[Any]) -> list[Sequence[Any]]:
        """A list of arrays for each layer."""
        own = self._each("weights", weights)
        lone = [len(layer.factors) == 1 and not isinstance(each, list | tuple) for layer, each in zip(self.layers, own, strict=True)]
        found = [layer.weights_of_each([each] if is_lone else each) for layer, each, is_lone in zip(self.layers, own, lone, strict=True)]
        for each in found:
            check_storage(self, self.stated, each)
        return found

    def _inputs(self, own: Sequence[Sequence[Any]]) -> str:
        """How the x is stored that all layers take."""
        found = list(map(inputs_of, own))
        if others := [number for number, each in enumerate(found, 1) if each != found[0]]:
            told = f"those of layer 1 as {found[0]} and those of layer {others[0]} as {found[others[0] - 1]}"
            raise LaunchError(f"{self!r}: first weights multiply x in different storage, {told}; accepted: one storage for all of them")
        return found[0]

    def _each(self, name: str, given: Any) -> list[Any]:
        """One for each layer."""
        if given is None:
            return [None] * len(self.layers)
        if not isinstance(given, list | tuple) or len(given) != len(self.layers):
            got = counted(len(given), "entry", "entries") if isinstance(given, list | tuple) else excerpt(given)
            raise LaunchError(f"{self!r}: {name}: got {got}; {len(self.layers)} are needed, one a layer, in a list")
        return list(given)

    def _added(self, name: str, given: Any) -> list[Any]:
        """An array for each layer, or None."""
        each, is_stated = self._each(name, None if given is False else given), given is not False and getattr(self.stated, name)
        return [operand(self, name, array, is_stated, "an array per layer, in a list") for array in each]

    def _arrays(self, x: Any, added: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """x and what is added, by the names of a group's operands."""
        named = {f"{name}_{number}": array for name in ADDED for number, array in enumerate(added[name], 1) if array is not None}
        return {"x": x, **named}

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

    def _check(
        self, views: dict[str, ArrayView], own: Sequence[Sequence[Any]], outs: Sequence[Any], options: CallOptions, inputs: str
    ) -> int:
        """The batch; `LaunchError` on what any layer would refuse, and on outputs that meet."""
        results = {f"out of layer {number}": view(out, f"out of layer {number}") for number, out in enumerate(outs, 1)}
        views_of_each = [layer.views_of_weights(weights) for layer, weights in zip(self.layers, own, strict=True)]
        read = dict[str, ArrayView]()  # of all layers, as an output is written before later layers read theirs
        for number, (weights, found_views) in enumerate(zip(own, views_of_each, strict=True), 1):
            for at, (each, found) in enumerate(zip(weights, found_views, strict=True), 1):
                if lies_in := each.lies_in if isinstance(each, Weights) else found:
                    read[f"weights {at} of layer {number}"] = lies_in
        for number, (layer, weights, own_views) in enumerate(zip(self.layers, own, views_of_each, strict=True), 1):
            given = {each: views[f"{each}_{number}"] for each in ADDED if f"{each}_{number}" in views}
            name = f"out of layer {number}"
            given |= {"out": results[name]} if outs else {}
            batch = layer.check(given | {"x": views["x"]}, own_views, options, inputs=inputs)
            for each in weights:
                if isinstance(each, Weights):
                    check_stored(self, each, options.precision or views["x"].dtype)
            others = {each: found for each, found in (views | results).items() if each not in (name, f"residual_{number}")}
            check_memory(self, others | read | {each: given[each] for each in given if each != "bias"})
        return batch

    # ---- one launch

    def _fused(self, call: _Given) -> Call | None:
        """All layers in one launch, on arrays of a GPU or of the host where they lie; None where that is not to be had."""
        arrays, views, own, outs, batch, options = call.arrays, call.views, call.own, call.outs, call.batch, call.options
        own_views = [found for layer, each in zip(self.layers, own, strict=True) for found in layer.views_of_weights(each)]
        flat = [each for weights in own for each in weights]
        given: dict[str, Any] = {f"weights of factor {at}": each for at, each in enumerate(flat, 1) if not isinstance(each, Weights)}
        given |= {**{f"y_{number}": out for number, out in enumerate(outs, 1)}, **arrays}
        every = views | {name: found for name, found in zip(_numbered("weights of factor", own_views), own_views, strict=True) if found}
        every |= {name: view(given[name]) for name in given if name not in every}
        counts = [sum(f"{name}_{number}" in views for number in range(1, len(own) + 1)) for name in ADDED]
        if not set(counts) <= {0, len(own)}:
            self._check_asked("only some layers have a bias, or a residual")
            return None
        place = common_device(every)
        if place == "host" and not all(map(is_whole, every.values())):
            self._check_asked(WITHIN_AN_ELEMENT)
            return None
        device, stream, every = where_to_work(self, place, given, every, options.stream)
        if place == "host" and not device.shares_host:
            self._check_asked(copied_to(device))
            return None
        has_bytes_in = views["x"].dtype in BYTE_TYPES
        dtype = PRECISIONS[options.precision].dtype if has_bytes_in and options.precision else views["x"].dtype
        epilogue = Epilogue(bool(counts[0]), options.activation, bool(counts[1]))
        if self._between is None or self._fuse == "no":
            self._check_asked(BETWEEN_DIFFERS)
            return None
        are_beside = not outs and options.layout == "bsf"  # in one array, whose rows lie apart
        rows = [found for name, found in every.items() if not name.startswith("weights")]
        stride = "any" if place == "host" or are_beside or any(found.strides is not None for found in rows) else "dense"
        what = options.precision or dtype, options.layout, epilogue
        stored = stored_alike(own)
        fused = fused_plan(device, self.chains, *what, batch, stride, stream, self._between, fuse=self._fuse, stored=stored)
        if fused is None and self._fuse == "yes":  # asked for only then: separate launches would ask at each call
            self._check_asked(STORED_OTHERWISE if stored is None else self.verdict(device, *what, batch, *stored).why)
        if fused is None:
            return None
        if not outs:
            shape = group_shape(self.chains, options.layout, batch)
            outs = self._outs(new_outs(every["x"], shape, device, stream, dtype if has_bytes_in else None), options)
            every |= {f"y_{number}": view(out) for number, out in enumerate(outs, 1)}
        at = [every.get(name) for name in _numbered("weights of factor", own_views)]
        packed = dict(zip(weights_of(fused.whole.kernel), self._packed(fused, own, at, dtype, stream), strict=True))
        operands = {name: found for name, found in every.items() if not name.startswith("weights")}
        return (on_shared_group if place == "host" else on_device_group)(fused.whole, operands, packed, outs, stream)

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


def _numbered(name: str, of: Sequence[Any]) -> list[str]:
    return [f"{name} {number}" for number in range(1, len(of) + 1)]
