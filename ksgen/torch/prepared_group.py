"""Calls of a group of frozen layers on a processor, at shapes that it met before: as `ksgen.torch.prepared` serves a layer alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ksgen.families.signature import each_chains
from ksgen.launch import checks
from ksgen.launch.call import Call, Elsewhere
from ksgen.launch.planner import PLANNER
from ksgen.torch import frozen, prepared
from ksgen.torch.choice import chain_launcher, faster, group_launcher, job_of, size_of
from ksgen.torch.layer import KSLinear
from ksgen.torch.ops import is_transformed
from ksgen.torch.prepared import Own, UnfitError, as_rows, begins_well, call_of, lies_here

LINE_BYTES = 64  # of a processor's cache, at which what lies between factors begins
ALIKE = ("layout", "out_layout", "activation", "between", "fuse", "precision", "backend")  # options of layers of one launch
UNMET, UNFIT = "was never met", "is served the usual way, or refused there"  # of a shape of x

Whole = Callable[[Tensor], Tensor]  # all outputs, of x as a matrix


def whole(group: nn.Module, x: Tensor) -> Tensor | None:
    """All outputs beside each other by a call that is prepared; None where they have to go the usual way."""
    layers, found = _found(group, x)
    return None if found is None else found.whole(layers, x)


def parts(group: nn.Module, x: Tensor) -> Sequence[Tensor] | None:
    """The same apart."""
    layers, found = _found(group, x)
    return None if found is None else found.parts(layers, x)


def _found(group: nn.Module, x: Any) -> "tuple[Sequence[Any], _Prepared | None]":
    """The layers, and what was prepared for them and such an x."""
    layers: list[Any] = list(group._modules.values())
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not lies_here(x):
        return layers, None
    calls = frozen.calls_of_group(group, layers)
    if calls is None or torch.is_autocast_enabled("cpu") or is_transformed() or not begins_well(x):
        return layers, None
    if are_watched(layers):
        return layers, None
    key = (x.shape, x.dtype, *map(_options, layers), torch.get_num_threads(), PLANNER.generation)
    found = calls.get(key, UNMET)  # asked once: another thread may drop all of them
    if found == UNMET:
        if len(calls) >= prepared.MOST_CALLS:
            calls.clear()
        calls[key] = None
    elif found is None:
        calls[key] = found = _prepared(layers, x)
    return layers, found if isinstance(found, _Prepared) else None


def _prepared(layers: Sequence[Any], x: Tensor) -> "_Prepared | str":
    if len(layers) < 2 or not are_alike(layers):
        return UNFIT
    try:
        return _Prepared(layers, [prepared.prepare(each, x, None) for each in layers], x)
    except UnfitError:
        return UNFIT


def are_alike(layers: Sequence[Any]) -> bool:
    """Whether they differ in their chains alone. Not where they turn y, which groups refuse."""
    return len({(_options(each), each.bias is None) for each in layers}) == 1 and layers[0].out_layout is None


def are_watched(layers: Sequence[Any]) -> bool:
    """Whether somebody wants to see each layer called, or one of them is called otherwise than a KSLinear."""
    return any(each._forward_hooks or each._forward_pre_hooks or not _is_usual(each) for each in layers)


def _is_usual(layer: Any) -> bool:
    return type(layer).forward is KSLinear.forward and "forward" not in vars(layer)


def shapes_of(layers: Sequence[Any]) -> list[tuple[tuple[int, ...], ...]]:
    """Of each layer's weights: what a group's ways are timed as."""
    return [tuple(tuple(weights.shape) for weights in layer.weights) for layer in layers]


def _options(layer: Any) -> tuple[Any, ...]:
    return tuple([getattr(layer, name) for name in ALIKE])


class _Job(NamedTuple):
    """What is prepared: layers on a matrix x, and their outputs, slices of one y. A single entry is taken as a row in both layouts."""

    layers: Sequence[Any]
    layout: str
    x: Tensor
    y: Tensor
    outs: Sequence[Tensor]

    @property
    def batch(self) -> int:
        return int(self.x.shape[0 if self.layout == "bsf" else 1])


class _Prepared:
    """The outputs of layers that differ in their chains alone, by the fastest way for x of one shape. Keeps weights, and no other array."""

    def __init__(self, layers: Sequence[Any], alone: Sequence[Any], x: Tensor) -> None:
        first, self._alone = layers[0], alone
        self._axis, self._features = -1 if first.layout == "bsf" else 0, [each.out_features for each in layers]
        rows, count = first._as_matrix(x.contiguous()), sum(self._features)
        self._x_shape, batch = rows.shape, rows.shape[0 if first.layout == "bsf" else 1]
        self._y_shape = (*x.shape[:-1], count) if first.layout == "bsf" else (count, *x.shape[1:])
        layout = "bsf" if batch == 1 else first.layout
        y = x.new_empty((batch, count) if layout == "bsf" else (count, batch))
        outs = y.split(self._features, 1 if layout == "bsf" else 0)
        job = _Job(layers, layout, rows.view(1, -1) if batch == 1 else rows, y, outs)
        ways: dict[str, Whole] = {}
        if way := _in_one_launch(job):
            ways["ksgen"] = way
        if first.fuse == "yes" and not ways:
            raise UnfitError
        if first.fuse != "yes" and (way := _in_turn(job)):
            ways["in turn"] = way
        timed: dict[str, Callable[[], Tensor]] = {name: partial(self._by, way, x) for name, way in ways.items()}
        if first.fuse != "yes":
            timed["each"] = lambda: torch.cat(self._each(layers, x) or [], self._axis)
        kind = job_of(
            "prepared group", shapes_of(layers), x.dtype, first.layout, first.activation, first.bias is not None, False, first.between
        )
        self._way = ways.get(faster((kind, size_of(batch), *timed), timed) if len(timed) > 1 else next(iter(timed)))

    def whole(self, layers: Sequence[Any], x: Tensor) -> Tensor | None:
        """None where a layer's bias is not the one that it was prepared for."""
        if self._way is None:
            found = self._each(layers, x)
            return None if found is None else torch.cat(found, self._axis)
        if not all(map(prepared.Prepared.holds, self._alone, layers)):
            return None
        return self._by(self._way, x)

    def parts(self, layers: Sequence[Any], x: Tensor) -> Sequence[Tensor] | None:
        if self._way is None:
            return self._each(layers, x)
        if (y := self.whole(layers, x)) is None:
            return None
        found: Sequence[Tensor] = y.split(self._features, self._axis)
        return found

    def _by(self, way: Whole, x: Tensor) -> Tensor:
        y = way(as_rows(x, self._x_shape))
        return y if y.shape == self._y_shape else y.view(self._y_shape)

    def _each(self, layers: Sequence[Any], x: Tensor) -> list[Tensor] | None:
        ys = [own.run(layer, x, None) for own, layer in zip(self._alone, layers, strict=True)]
        found = [y for y in ys if y is not None]
        return found if len(found) == len(ys) else None


def _in_one_launch(job: _Job) -> Whole | None:
    """All layers at once, where a launch of them is to be had."""
    first, each_has = job.layers[0], [len(layer.weights) for layer in job.layers]
    own = group_launcher(tuple(tuple(pattern.shape for pattern in layer.chain) for layer in job.layers), first.between, first.fuse)

    def prepare(x: Tensor, packed: Sequence[Any], **options: Any) -> Call | None:
        left = iter(packed)
        return own.prepare(x, [list(islice(left, count)) for count in each_has], out=list(job.outs), **options)

    bias = None if first.bias is None else [layer.bias for layer in job.layers]
    weights = [each for layer in job.layers for each in layer.weights]
    call = _call(job, prepare, job.x, weights, True, bias=bias, activation=first.activation)
    if call is None:
        return None
    return _Launches(job, [call], [{"x": 0} | {name: at for at, name in enumerate(each_chains(call.call.plan.kernel, "y"), 1)}], ())


def _in_turn(job: _Job) -> Whole | None:
    """The launches of each layer, one layer after the other: one of all its factors, or one of each, as its launcher has it."""
    own: list[Own] = []
    places: list[dict[str, int]] = []
    between: dict[int, int] = {}  # by the place given: elements of what lies between factors, in the same memory for all layers
    for number, (layer, out) in enumerate(zip(job.layers, job.outs, strict=True), 1):
        chain = chain_launcher(tuple(pattern.shape for pattern in layer.chain), layer.between, layer.fuse)
        last: Mapping[str, Any] = {"bias": layer.bias, "activation": layer.activation}
        if len(chain.factors) > 1 and (whole := _call(job, partial(chain.prepare, out=out), job.x, layer.weights, True, **last)):
            own.append(whole)
            places.append({"x": 0, whole.call.plan.result: number})
            continue
        x, at = job.x, 0
        for to_go, factor, weights in zip(reversed(range(len(chain.factors))), chain.factors, layer.weights, strict=True):
            to, goes_to = out, number
            if to_go:
                to, goes_to = x.new_empty(checks.y_shape(factor.pattern, job.layout, job.batch)), len(job.layers) + to_go
                between[goes_to] = max(to.numel(), between.get(goes_to, 0))
            options = {"bias": None, "activation": layer.between} if to_go else last
            if (call := _call(job, partial(factor.prepare, out=to), x, [weights], **options)) is None:
                return None
            own.append(call)
            places.append({"x": at, call.call.plan.result: goes_to})
            x, at = to, goes_to
    return _Launches(job, own, places, [between[place] for place in sorted(between)])


def _call(
    job: _Job, prepare: Any, x: Tensor, weights: Sequence[Tensor], is_chain: bool = False, *, bias: Any, activation: str
) -> Own | None:
    return call_of(prepare, x, list(weights), bias, None, job.layout, activation, is_chain)


class _Launches:
    """Launches by one call, on tensors of the host, into one new y and what lies between."""

    def __init__(self, job: _Job, own: Sequence[Own], places: Sequence[Mapping[str, int]], between: Sequence[int]) -> None:
        self._launch = Elsewhere([each.call for each in own], places, [weights for each in own for weights in each.weights])
        self._shape, size = job.y.shape, job.y.element_size()
        self._outs = [out.storage_offset() * size for out in job.outs]
        line = LINE_BYTES // size
        *self._between, self._scratch = accumulate((-(-count // line) * line for count in between), initial=0)
        self._between = [at * size for at in self._between]

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(self._shape)
        at, scratch = y.data_ptr(), x.new_empty(self._scratch) if self._scratch else y
        between = scratch.data_ptr()
        self._launch([x.data_ptr(), *[at + each for each in self._outs], *[between + each for each in self._between]])
        return y
