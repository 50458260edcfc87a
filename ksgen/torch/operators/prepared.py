"""Calls on a processor that look at little but x: of frozen layers at shapes met before, and small steps of training.

`is_direct` is the one guard. The first call of a frozen layer at a shape goes the usual way, which refuses what is
wrong. The second prepares; the ways are timed in turns. A layer is a group of one. A small step of training is served
if PyTorch's products were timed (`ops.multiply`) to be the fastest for every factor. All other calls go the usual way.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ksgen.errors import DeviceError, KsgenError, ToolchainError
from ksgen.families.signature import each_chains
from ksgen.launch import checks
from ksgen.launch.call import Call, Elsewhere
from ksgen.launch.planner import PLANNER
from ksgen.launch.weights import look_of
from ksgen.launcher import Weights
from ksgen.spec.kernel import layout_word
from ksgen.torch.operators import choice, frozen, ops, products
from ksgen.torch.operators.backends import is_recomputed
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.choice import chain_launcher, faster, group_launcher, has_kernels, job_of, launcher, size_of
from ksgen.torch.operators.frozen import made_of
from ksgen.torch.operators.products import finish

BACKENDS = ("auto", "ksgen")  # that prepare
TRIED_COLUMNS = 64  # per thread: from there, one launch is timed in batch-size-last, where launchers take none by rule
MOST_CALLS = 256  # that a layer keeps
LINE_BYTES = 64  # of a processor's cache, at which intermediates begin
OPTIONS = ("layout", "out_layout", "activation", "between", "fuse", "precision", "backend")  # equal in one launch
MET, UNFIT = "was met once", "is served the usual way, or refused there"  # of a shape of x

Step = Callable[[Tensor, Tensor | None], Tensor]  # of x and the residual as matrices
options_of = attrgetter(*OPTIONS)
_served: dict[Hashable, bool] = {}  # whether PyTorch's products serve a step of training, by all that decides it


class NotPreparedError(Exception):
    """No prepared call serves this: the usual way refuses it, or does it."""


def is_direct(x: Any, residual: Any = None) -> bool:
    """Whether x and a residual lie unchanged in a processor's memory, without a trace, mode, transform or autocast."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a trace records every shape that is read
        return False
    if type(x) is not Tensor or not x.is_cpu:  # asked first, as it is so on every GPU
        return False
    if torch._C._len_torch_dispatch_stack() or ops.is_transformed() or torch.is_autocast_enabled("cpu"):
        return False
    return _lies_here(x) and (residual is None or _lies_here(residual))


def _lies_here(tensor: Any) -> bool:
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if tensor.is_neg() or tensor.is_conj() or tensor.is_nested:
        return False
    at = tensor.data_ptr()  # 0 if it is empty or its memory was given up; memory of others may begin in an element
    return bool(at) and at % tensor.element_size() == 0


def serve(layer: Any, x: Any, residual: Any) -> Tensor | None:
    """The layer's output; None where it goes the usual way."""
    if torch.is_grad_enabled():
        return _step(layer, x) if residual is None and is_direct(x) else None
    if not is_direct(x, residual) or (calls := layer._prepared_calls()) is None:
        return None
    found = _found(calls, (layer,), x, residual)
    return None if found is None else found.run(x, residual)


def of_group(group: nn.Module, layers: Sequence[Any], x: Any) -> "Prepared | None":
    """What serves all outputs of layers on this x, side by side or apart; None where they go the usual way."""
    if torch.is_grad_enabled() or not is_direct(x) or (calls := frozen.calls_of_group(group, layers)) is None:
        return None
    return _found(calls, layers, x, None)


def _found(calls: dict[Hashable, Any], layers: Sequence[Any], x: Tensor, residual: Tensor | None) -> "Prepared | None":
    options = options_of(layers[0]) if len(layers) == 1 else tuple(map(options_of, layers))
    key = (x.shape, x.dtype, residual is None, options, torch.get_num_threads(), PLANNER.generation)
    found = calls.get(key)  # asked once: another thread may drop all of them
    if found is None:
        if len(calls) >= MOST_CALLS:
            calls.clear()
        calls[key] = MET
    elif found is MET:
        calls[key] = found = _prepared(layers, x, residual)
    if type(found) is not Prepared:
        return None
    if not found.holds(layers):
        calls[key] = MET
        return None
    return found if residual is None or found.takes(residual) else None


def _prepared(layers: Sequence[Any], x: Tensor, residual: Tensor | None) -> "Prepared | str":
    try:
        if len(layers) > 1 and not are_alike(layers):
            raise NotPreparedError
        for each in layers:
            _check_fits(each, x)
        job = _Job.of(layers, x, residual)
        return MET if job is None else Prepared(layers, x, job)
    except NotPreparedError:
        return UNFIT


def are_alike(layers: Sequence[Any]) -> bool:
    """Whether they differ in their chains alone. Not where y has another layout than x, which groups refuse."""
    return len({(options_of(each), each.bias is None) for each in layers}) == 1 and layers[0].out_layout is None


def _check_fits(layer: Any, x: Tensor) -> None:
    """Raise `NotPreparedError` if no prepared call serves the layer."""
    bias = layer._parameters.get("bias")
    if layer.bias is not bias or layer.backend not in BACKENDS or layer.precision not in (None, dtype_name(x.dtype)):
        raise NotPreparedError
    if bias is not None and (not _is_plain(bias, x.dtype, (layer.out_features,)) or not bias.is_contiguous()):
        raise NotPreparedError
    if not layer._multiplies(x.dtype) or not has_kernels(x.device):
        raise NotPreparedError


def shapes_of(layer: Any) -> tuple[tuple[int, int, int, int], ...]:
    return tuple([pattern.shape for pattern in layer.own_chain])


class _Job(NamedTuple):
    """What is prepared: a matrix x, and outputs, slices of one y. A batch of one is a row in both layouts."""

    layout: str
    out_layout: str | None
    x: Tensor
    residual: Tensor | None
    y: Tensor
    outs: Sequence[Tensor]

    @classmethod
    def of(cls, layers: Sequence[Any], x: Tensor, residual: Tensor | None) -> "_Job | None":
        """None where this residual is refused."""
        first = layers[0]
        y_shape = _y_shape(layers, x)
        if residual is not None and (residual.dtype != x.dtype or residual.shape != y_shape):
            return None
        layout, out_layout, rows, added = first.layout, first.out_layout, first._as_matrix(x.contiguous()), residual
        if added is not None:
            added = first._as_matrix(added.contiguous(), first.y_layout)
        if rows.shape[0 if layout == "bsf" else 1] == 1:
            layout, out_layout, rows = "bsf", None, rows.reshape(1, -1)
            added = None if added is None else added.reshape(1, -1)
        return cls.one(layout, out_layout, rows, added, [each.out_features for each in layers])

    @classmethod
    def one(cls, layout: str, out_layout: str | None, x: Tensor, residual: Tensor | None, features: Sequence[int]) -> "_Job":
        batch, axis = x.shape[0 if layout == "bsf" else 1], 1 if (out_layout or layout) == "bsf" else 0
        y = x.new_empty((batch, sum(features)) if axis else (sum(features), batch))
        return cls(layout, out_layout, x, residual, y, y.split(list(features), axis))

    @property
    def batch(self) -> int:
        return int(self.x.shape[0 if self.layout == "bsf" else 1])

    @property
    def is_alone(self) -> bool:
        """Whether it is one layer's."""
        return len(self.outs) == 1


def _y_shape(layers: Sequence[Any], x: Tensor) -> torch.Size:
    first = layers[0]
    whole, features = first._y_shape(x), sum(each.out_features for each in layers)  # which refuses other features
    return torch.Size((*whole[:-1], features) if first.y_layout == "bsf" else (features, *whole[1:]))


class Prepared:
    """activation(X K^T + bias) + residual of frozen layers on one x, side by side, by the fastest way for one shape.

    Keeps weights and biases, and no other array.
    """

    def __init__(self, layers: Sequence[Any], x: Tensor, job: _Job) -> None:
        first = layers[0]
        self._biases = [(each.bias, None if each.bias is None else look_of(each.bias)) for each in layers]
        self._x_shape, self._y_shape, self._dtype = job.x.shape, _y_shape(layers, x), x.dtype
        self._residual_shape, self._is_viewed = job.y.shape, job.y.shape != self._y_shape
        self._axis, self._features = -1 if first.layout == "bsf" else 0, [each.out_features for each in layers]
        self._each: list[Prepared] = []  # of each layer of a group, if that is the fastest
        self._step = self._fastest(layers, x, job)

    def holds(self, layers: Sequence[Any]) -> bool:
        """Whether each layer's bias is the one that it was prepared for, and lies where it did."""
        for layer, (own, look) in zip(layers, self._biases):  # noqa: B905  # strict=True takes time
            if layer._parameters.get("bias") is not own or (own is not None and look_of(own) != look):
                return False
        return True

    def takes(self, residual: Tensor) -> bool:
        return bool(residual.dtype == self._dtype and residual.shape == self._y_shape)

    def run(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._each:
            return torch.cat(self.parts(x), self._axis)
        y = self._step(_rows(x, self._x_shape), None if residual is None else _rows(residual, self._residual_shape))
        return y.view(self._y_shape) if self._is_viewed else y

    def parts(self, x: Tensor) -> list[Tensor]:
        """The outputs of layers apart: slices of one tensor where one call made them all."""
        if self._each:
            return [each.run(x) for each in self._each]
        return list(self.run(x).split(self._features, self._axis))

    def _fastest(self, layers: Sequence[Any], x: Tensor, job: _Job) -> Step:
        first, ways = layers[0], dict[str, Step]()
        only_kernels = first.backend == "ksgen" or first.is_stored
        if job.is_alone and len(first.own_chain) == 1 and job.out_layout is None:
            return _factor(job, *_operands(first)[0], first.bias, first.activation, first.layout, only_kernels)
        if way := _in_one_launch(layers, job, only_kernels):
            ways["ksgen"] = way
        if first.fuse == "yes" or (ways and only_kernels and job.is_alone):
            if not ways:
                raise NotPreparedError
            return ways["ksgen"]
        if way := _in_turn(layers, job):
            ways["in turn"] = way
        if job.is_alone and not (ways and only_kernels):
            ways["each"] = _each_factor(first, job, only_kernels)
        timed: dict[str, Callable[[], Tensor]] = {name: partial(way, job.x, job.residual) for name, way in ways.items()}
        if not job.is_alone:
            alone = [Prepared([each], x, one) for each in layers if (one := _Job.of([each], x, None))]
            timed["each"] = lambda: torch.cat([each.run(x) for each in alone], self._axis)
        name = _timed_fastest("prepared" if job.is_alone else "prepared group", layers, job, timed)
        if name not in ways:
            self._each = alone
        return ways.get(name, lambda x, residual: x)  # the latter is never called


def _rows(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A matrix of that shape: the tensor itself where it is one, as each operator of PyTorch's takes a microsecond."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor if tensor.shape == shape else tensor.view(shape)


def _timed_fastest(kind: str, layers: Sequence[Any], job: _Job, timed: Mapping[str, Callable[[], Tensor]]) -> str:
    if len(timed) == 1:
        return next(iter(timed))
    first, shapes = layers[0], [shapes_of(each) for each in layers]
    layout, added = layout_word(first.layout, first.out_layout), (first.bias is not None, job.residual is not None)
    patterns: Any = shapes[0] if job.is_alone else shapes
    own = job_of(kind, patterns, job.x.dtype, layout, first.activation, *added, first.between)
    return faster((own, size_of(job.batch), *timed), timed)


class _Own(NamedTuple):
    """A launcher's prepared call, and the weights that it was packed from."""

    call: Call
    weights: Sequence[Weights]


def _call(prepare: Callable[..., Call | None], job: _Job, x: Tensor, weights: Sequence[Any], is_chain: bool, **given: Any) -> _Own | None:
    """A call whose launches take no copies; None where there is none. What launchers refuse, the usual way refuses."""
    flat = [each for own in weights for each in (own if isinstance(own, list) else [own])]
    if not all(isinstance(each, Weights) for each in flat):  # they thawed meanwhile
        raise NotPreparedError
    given = {name: each for name, each in given.items() if each is not None}
    try:
        call = prepare(x, weights if is_chain else weights[0], layout=job.layout, **given)
    except (DeviceError, ToolchainError):
        return None
    except KsgenError as error:
        raise NotPreparedError from error
    return _Own(call, flat) if call is not None and call.plan.device.shares_host else None


def _in_one_launch(layers: Sequence[Any], job: _Job, only_kernels: bool) -> Step | None:
    """All factors of all layers at once, where a launch of them is to be had."""
    first, weights = layers[0], [each._packed() for each in layers]
    if first.fuse == "no":
        return None
    given: dict[str, Any] = {"activation": first.activation, "residual": job.residual}
    if not job.is_alone:
        group = group_launcher(tuple(map(shapes_of, layers)), first.between, first.fuse)
        given["bias"] = None if first.bias is None else [each.bias for each in layers]
        found = _call(group.prepare, job, job.x, weights, True, out=list(job.outs), **given)
    else:
        is_tried = first.fuse == "auto" and job.layout == "bsl" and not only_kernels
        is_tried &= job.batch >= TRIED_COLUMNS * torch.get_num_threads()
        chain = chain_launcher(shapes_of(first), first.between, "yes" if is_tried else first.fuse)
        prepare = partial(chain.prepare, out_layout=job.out_layout)
        try:
            found = _call(prepare, job, job.x, weights[0], True, out=job.y, bias=first.bias, **given)
        except NotPreparedError:
            if not is_tried:  # else one launch cannot be had
                raise
            return None
    if found is None:
        return None
    return _launches(job, [found], [{name: 2 + at for at, name in enumerate(each_chains(found.call.plan.kernel, "y"))}])


def _in_turn(layers: Sequence[Any], job: _Job) -> Step | None:
    """The launches of each layer, sequentially, by one call: one of all its factors or one per factor."""
    if job.out_layout is not None:
        return None
    own: list[_Own] = []
    places: list[dict[str, int]] = []
    passed: dict[int, int] = {}  # by the place given: elements of an intermediate, in the same memory for all layers
    for number, (layer, out) in enumerate(zip(layers, job.outs, strict=True), 2):
        chain, packed = chain_launcher(shapes_of(layer), layer.between, layer.fuse), layer._packed()
        last: Mapping[str, Any] = {"bias": layer.bias, "activation": layer.activation, "residual": job.residual, "out": out}
        if len(packed) > 1 and not job.is_alone and (whole := _call(chain.prepare, job, job.x, packed, True, **last)):
            own.append(whole)
            places.append({whole.call.plan.result: number})
            continue
        x, at = job.x, 0
        for to_go, factor, weights in zip(reversed(range(len(packed))), chain.factors, packed, strict=True):
            given, goes_to = last, number
            if to_go:
                to, goes_to = x.new_empty(checks.y_shape(factor.pattern, job.layout, job.batch)), 1 + len(layers) + to_go
                given = {"activation": layer.between, "out": to}
                passed[goes_to] = max(to.numel(), passed.get(goes_to, 0))
            if (call := _call(factor.prepare, job, x, [weights], False, **given)) is None:
                return None
            own.append(call)
            places.append({"x": at, call.call.plan.result: goes_to})
            x, at = given["out"], goes_to
    return _launches(job, own, places, [passed[place] for place in sorted(passed)])


def _launches(job: _Job, own: Sequence[_Own], places: Sequence[Mapping[str, int]], passed: Sequence[int] = ()) -> Step:
    """Launches by one call, on tensors of the host, into one new y and memory for intermediates of that many elements.

    `places` say which array each operand is: 0 for x, 1 for the residual, then the outputs, then intermediates.
    """
    every = [{"x": 0, "residual": 1, **each} for each in places]
    launch = Elsewhere([each.call for each in own], every, [weights for each in own for weights in each.weights])
    shape, size = job.y.shape, job.y.element_size()
    outs, line = [out.storage_offset() * size for out in job.outs], LINE_BYTES // size
    *begins, scratch = accumulate((-(-count // line) * line for count in passed), initial=0)
    begins = [at * size for at in begins]

    def alone(x: Tensor, residual: Tensor | None) -> Tensor:
        y = x.new_empty(shape)
        launch((x.data_ptr(), 0 if residual is None else residual.data_ptr(), y.data_ptr()))
        return y

    if len(outs) == 1 and not scratch:
        return alone

    def step(x: Tensor, residual: Tensor | None) -> Tensor:
        y = x.new_empty(shape)
        at, more = y.data_ptr(), x.new_empty(scratch) if scratch else y
        between = more.data_ptr()
        arrays = [x.data_ptr(), 0 if residual is None else residual.data_ptr(), *[at + each for each in outs]]
        launch([*arrays, *[between + each for each in begins]])
        return y

    return step


def _operands(layer: Any) -> list[tuple[Weights, Tensor | None]]:
    """Each factor's weights: packed, and as PyTorch multiplies by them, which it does not by stored ones."""
    packed = layer._packed()
    return list(zip(packed, [None] * len(packed) if layer.is_stored else layer.weights, strict=True))


def _each_factor(layer: Any, job: _Job, only_kernels: bool) -> Step:
    """Each factor by its fastest way."""
    steps, x = list[tuple[Callable[[Tensor], Tensor], Step]](), job.x
    every: Any = ops.turned_at(layer.own_chain.turn, _operands(layer), job.layout, job.out_layout)
    for number, (pattern, (turns, operands, layout)) in enumerate(zip(layer.own_chain, every, strict=True), 1):
        is_last, x = number == len(every), turns(x)
        own = _Job.one(layout, None, x, job.residual if is_last else None, [pattern.out_features])
        bias, activation = (layer.bias, layer.activation) if is_last else (None, layer.between)
        steps.append((turns, _factor(own, operands[0], operands[1], bias, activation, layout, only_kernels)))
        if not is_last:
            x = steps[-1][1](x, None)
    *first, (last_turn, last) = steps

    def each_alone(x: Tensor, residual: Tensor | None) -> Tensor:
        for turns, step in first:
            x = step(turns(x), None)
        return last(last_turn(x), residual)

    return each_alone


def _factor(
    job: _Job, packed: Any, weights: Tensor | None, bias: Tensor | None, activation: str, layout_of_job: str, only_kernels: bool
) -> Step:  # fmt: skip
    """One factor's fastest way. `layout_of_job`: the layout under which its times are looked up."""
    if not isinstance(packed, Weights):  # they thawed meanwhile
        raise NotPreparedError
    layout, shape, ways = job.layout, packed.pattern.shape, dict[str, Step]()
    given: dict[str, Any] = {"bias": bias, "activation": activation, "residual": job.residual, "out": job.y}
    if call := _call(launcher(*shape).prepare, job, job.x, [packed], False, **given):
        ways["ksgen"] = _launches(job, [call], [{call.call.plan.result: 2}])
    if only_kernels or weights is None:
        if not ways:
            raise NotPreparedError
        return ways["ksgen"]
    matrices, blocks = made_of(weights, products.by_matrix), made_of(weights, products.blocks_of)

    def on_views(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(products.multiply(x, matrices, layout), bias, activation, residual, layout)

    def permuted(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(products.permuted_multiply(x, blocks, layout, shape[0], shape[3]), bias, activation, residual, layout)

    ways |= {"strided": on_views, "bmm": permuted}
    if weights.element_size() == 2:  # as in `ksgen.torch.operators.ops`
        ways["dense"] = _by_whole_matrix(made_of(weights, products.to_dense), layout, bias, activation)
    kind = job_of("prepared", [shape], job.x.dtype, layout_of_job, activation, bias is not None, job.residual is not None)
    timed = {name: partial(way, job.x, job.residual) for name, way in ways.items()}
    return ways[faster((kind, size_of(job.batch), *ways), timed)]


def _by_whole_matrix(matrix: Tensor, layout: str, bias: Tensor | None, activation: str) -> Step:
    def in_rows(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(functional.linear(x, matrix, bias), None, activation, residual, layout)

    def in_columns(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(matrix @ x, bias, activation, residual, layout)

    return in_rows if layout == "bsf" else in_columns


# ---- small steps of training


def _step(layer: Any, x: Tensor) -> Tensor | None:
    """The layer's output by PyTorch's products, called at once; None where it goes the usual way.

    Looking at everything again would cost as much as a small product.
    """
    own, chain, dtype = layer._parameters, layer.own_chain, x.dtype
    if "bias" not in own or "weights" not in layer._modules:  # a parametrization computes it at each look
        return None
    parameters = layer._modules["weights"]._parameters
    if len(parameters) != len(chain):
        return None
    bias = own["bias"]
    weights = [parameters.get(str(number)) for number in range(len(chain))]  # pruned ones have other names
    if not all(_is_plain(each, dtype, pattern.shape) for each, pattern in zip(weights, chain, strict=True)):
        return None
    if not all(each.requires_grad for each in weights):
        return None
    if not (bias is None or _is_plain(bias, dtype, (chain.out_features,))):
        return None
    options = options_of(layer), layer.intermediates, bias is None
    key = (chain.factors, options, x.shape, dtype, x.requires_grad, torch.get_num_threads())
    serves = _served.get(key)
    if serves is False or layer._parallel is not None or frozen.was_frozen(layer) or ops.is_saved_otherwise():
        return None  # as for a checkpoint, whose second pass has to be as the first
    if serves is None:
        serves = _is_served(layer, x, bias is not None)
        if serves is None:
            return None
        if len(_served) >= choice.REMEMBERED:
            _served.clear()
        _served[key] = serves
    return _product(layer, x, weights, bias) if serves else None


def told_of_steps(layer: Any, batch: int) -> list[str]:
    """Whether training steps of so many rows are PyTorch's products, in words; nothing unless they were timed so."""
    first, is_bsf = layer.weights[0], layer.layout == "bsf"
    if not first.is_cpu or layer._parallel is not None or batch > ops.FEW_ENTRIES:
        return []
    x = torch.empty((batch, layer.in_features) if is_bsf else (layer.in_features, batch), dtype=first.dtype)
    if not any(_is_served(layer, x.requires_grad_(asks), layer.bias is not None) for asks in (False, True)):
        return []
    return [f"training steps at batch {batch}: bmm for every factor, the fastest when they were timed"]


def _is_plain(parameter: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    is_own = type(parameter) is nn.Parameter and parameter.is_cpu
    return is_own and parameter.dtype == dtype and parameter.shape == shape


def _is_served(layer: Any, x: Tensor, has_bias: bool) -> bool | None:
    """Whether every factor's step was timed, and PyTorch's products were the fastest; None if one was not timed yet."""
    chain, layout = layer.own_chain, layer.layout
    if layer.backend != "auto" or layer.out_layout is not None or layer.precision not in (None, dtype_name(x.dtype)):
        return False
    if layer.fuse == "yes" or is_recomputed(layer.intermediates, chain, (layer.between, layer.activation)):
        return False
    features, batch = x.shape[-1 if layout == "bsf" else 0] if x.dim() else 0, x.numel() // chain.in_features
    if features != chain.in_features or not 0 < batch <= ops.FEW_ENTRIES or not choice.has_kernels(x.device):
        return False
    *first, last = chain.factors
    steps = [(each, layer.between, False) for each in first] + [(last, layer.activation, has_bias)]
    for number, (pattern, activation, adds) in enumerate(steps):
        job = ops.step_job(pattern.shape, batch, x.dtype, layout, activation, adds, False, bool(number) or x.requires_grad)
        seconds = choice.measured(job)
        if not seconds:
            return None
        if min(seconds, key=seconds.__getitem__) != "bmm":
            return False
    return True


def _product(layer: Any, x: Tensor, weights: list[Any], bias: Tensor | None) -> Tensor:
    layout, last = layer.layout, len(weights) - 1
    is_matrix = x.dim() == 2
    rows = x if is_matrix else layer._as_matrix(x)
    for number, each in enumerate(weights):
        own = (bias, None, layout, layer.activation) if number == last else (None, None, layout, layer.between)
        rows = ops.multiply_by_pytorch(rows, each, *own)
    return rows if is_matrix else torch.ops.aten._unsafe_view(rows.contiguous(), layer._y_shape(x))
