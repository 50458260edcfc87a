"""Prepared calls on a processor, which check little but x: frozen layers at known shapes, and small training steps.

`is_direct` is the only guard. The first call of a frozen layer at a shape takes the usual path, which reports errors.
The second call prepares; the methods are timed alternately. A layer is a group of one. A small training step is served
if timings (`ops.multiply`) found PyTorch's products to be the fastest for every factor. All other calls take the usual
path.
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
from ksgen.launch.plan import Call, Elsewhere
from ksgen.launch.planner import PLANNER
from ksgen.launch.weights import look_of
from ksgen.launcher import Weights
from ksgen.spec import Layout
from ksgen.spec.kernel import layout_word
from ksgen.torch.operators import choice, frozen, ops, products
from ksgen.torch.operators.backends import is_recomputed
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.choice import (
    chain_launcher,
    faster,
    group_launcher,
    has_kernels,
    is_ready,
    job_of,
    launcher,
    size_of,
)
from ksgen.torch.operators.frozen import derived
from ksgen.torch.operators.meanwhile import by_kernels
from ksgen.torch.operators.products import finish

BACKENDS = ("auto", "ksgen")  # backends with prepared calls
TRIED_COLUMNS = 64  # per thread: from there on, one launch is timed in batch-size-last, where launchers choose none
MOST_CALLS = 256  # prepared calls per layer
LINE_BYTES = 64  # line of a processor's cache; intermediates are aligned to it
OPTIONS = ("layout", "out_layout", "activation", "between", "fuse", "precision", "backend")  # equal in one launch
MET, UNFIT = "was met once", "is served the usual way, or refused there"  # states of a shape of x

Step = Callable[[Tensor, Tensor | None], Tensor]  # takes x and the residual as matrices
options_of = attrgetter(*OPTIONS)
_served: dict[Hashable, bool] = {}  # whether PyTorch's products serve a training step, by everything that affects it


class NotPreparedError(Exception):
    """Signals that no prepared call fits; the usual path serves the call or refuses it."""


def is_direct(x: Any, residual: Any = None) -> bool:
    """Whether x and a residual lie unchanged in host memory, without a trace, mode, transform or autocast."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a trace records every shape that is read
        return False
    if type(x) is not Tensor or not x.is_cpu:  # checked first: decides for every GPU tensor
        return False
    if torch._C._len_torch_dispatch_stack() or ops.is_transformed() or torch.is_autocast_enabled("cpu"):
        return False
    return _lies_here(x) and (residual is None or _lies_here(residual))


def _lies_here(tensor: Any) -> bool:
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if tensor.is_neg() or tensor.is_conj() or tensor.is_nested:
        return False
    at = tensor.data_ptr()  # 0 if empty or released; foreign memory may be misaligned
    return bool(at) and at % tensor.element_size() == 0


def serve(layer: Any, x: Any, residual: Any) -> Tensor | None:
    """Output of the layer by a prepared call; None if the usual path has to serve it."""
    if torch.is_grad_enabled():
        return _step(layer, x) if residual is None and is_direct(x) else None
    if not is_direct(x, residual) or (calls := layer._prepared_calls()) is None:
        return None
    found = _found(calls, (layer,), x, residual)
    return None if found is None else found.run(x, residual)


def of_group(group: nn.Module, layers: Sequence[Any], x: Any) -> "Prepared | None":
    """Prepared call for all outputs of layers on this x; None if the usual path has to serve them."""
    if torch.is_grad_enabled() or not is_direct(x) or (calls := frozen.calls_of_group(group, layers)) is None:
        return None
    return _found(calls, layers, x, None)


def _found(calls: dict[Hashable, Any], layers: Sequence[Any], x: Tensor, residual: Tensor | None) -> "Prepared | None":
    options = options_of(layers[0]) if len(layers) == 1 else tuple(map(options_of, layers))
    key = (x.shape, x.dtype, residual is None, options, torch.get_num_threads(), PLANNER.generation)
    found = calls.get(key)  # read once: another thread may drop all of them
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
    if not is_ready(x.device):
        return MET
    try:
        if len(layers) > 1 and not are_alike(layers):
            raise NotPreparedError
        for each in layers:
            _check_fits(each, x)
        job = _Job.of(layers, x, residual)
        return MET if job is None else by_kernels(lambda: Prepared(layers, x, job)) or MET
    except NotPreparedError:
        return UNFIT


def are_alike(layers: Sequence[Any]) -> bool:
    """Whether layers differ in their chains alone.

    False if y has another layout than x, which groups refuse.
    """
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
    """Operands of a prepared call: a matrix x, and outputs, which are slices of one y.

    A batch of one is a row in both layouts.
    """

    layout: Layout
    out_layout: Layout | None
    x: Tensor
    residual: Tensor | None
    y: Tensor
    outs: Sequence[Tensor]

    @classmethod
    def of(cls, layers: Sequence[Any], x: Tensor, residual: Tensor | None) -> "_Job | None":
        """Build the operands; None if this residual is refused."""
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
    def one(
        cls, layout: Layout, out_layout: Layout | None, x: Tensor, residual: Tensor | None, features: Sequence[int]
    ) -> "_Job":
        batch, axis = x.shape[0 if layout == "bsf" else 1], 1 if (out_layout or layout) == "bsf" else 0
        y = x.new_empty((batch, sum(features)) if axis else (sum(features), batch))
        return cls(layout, out_layout, x, residual, y, y.split(list(features), axis))

    @property
    def batch(self) -> int:
        return int(self.x.shape[0 if self.layout == "bsf" else 1])

    @property
    def is_alone(self) -> bool:
        """Whether the job belongs to a single layer."""
        return len(self.outs) == 1


def _y_shape(layers: Sequence[Any], x: Tensor) -> torch.Size:
    first = layers[0]
    whole, features = first._y_shape(x), sum(each.out_features for each in layers)  # refuses other features
    return torch.Size((*whole[:-1], features) if first.y_layout == "bsf" else (features, *whole[1:]))


class Prepared:
    """activation(X K^T + bias) + residual of frozen layers on one x, side by side, by the fastest method for a shape.

    Holds weights and biases, and no other array.
    """

    def __init__(self, layers: Sequence[Any], x: Tensor, job: _Job) -> None:
        first = layers[0]
        self._biases = [(each.bias, None if each.bias is None else look_of(each.bias)) for each in layers]
        self._x_shape, self._y_shape, self._dtype = job.x.shape, _y_shape(layers, x), x.dtype
        self._residual_shape, self._is_viewed = job.y.shape, job.y.shape != self._y_shape
        self._axis, self._features = -1 if first.layout == "bsf" else 0, [each.out_features for each in layers]
        self._each: list[Prepared] = []  # one per layer of a group, if that is the fastest
        self._step = self._fastest(layers, x, job)

    def holds(self, layers: Sequence[Any]) -> bool:
        """Whether each layer's bias is the one it was prepared for, at the same address."""
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
        """Outputs per layer: slices of one tensor if one call computed them all."""
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
    """Reshape to a matrix of that shape, only if needed: each PyTorch operator takes a microsecond."""
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


def _call(
    prepare: Callable[..., Call | None], job: _Job, x: Tensor, weights: Sequence[Any], is_chain: bool, **given: Any
) -> _Own | None:
    """Prepare a call whose launches copy nothing; None if there is none.

    Arguments that launchers refuse are left to the usual path.
    """
    flat = [each for own in weights for each in (own if isinstance(own, list) else [own])]
    if not all(isinstance(each, Weights) for each in flat):  # the weights have thawed
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
    """All factors of all layers in one launch, if one is available."""
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
            if not is_tried:  # otherwise one launch is unavailable
                raise
            return None
    if found is None:
        return None
    return _launches(job, [found], [{name: 2 + at for at, name in enumerate(each_chains(found.call.plan.kernel, "y"))}])


def _in_turn(layers: Sequence[Any], job: _Job) -> Step | None:
    """Launches of all layers sequentially, by one call: one launch per layer, or one per factor."""
    if job.out_layout is not None:
        return None
    own: list[_Own] = []
    places: list[dict[str, int]] = []
    passed: dict[int, int] = {}  # by operand number: elements of an intermediate; layers share its memory
    for number, (layer, out) in enumerate(zip(layers, job.outs, strict=True), 2):
        chain, packed = chain_launcher(shapes_of(layer), layer.between, layer.fuse), layer._packed()
        last: Mapping[str, Any] = {
            "bias": layer.bias,
            "activation": layer.activation,
            "residual": job.residual,
            "out": out,
        }
        if len(packed) > 1 and not job.is_alone and (whole := _call(chain.prepare, job, job.x, packed, True, **last)):
            own.append(whole)
            places.append({whole.call.plan.result: number})
            continue
        x, at = job.x, 0
        for to_go, factor, weights in zip(reversed(range(len(packed))), chain.factors, packed, strict=True):
            given, goes_to = last, number
            if to_go:
                to, goes_to = (
                    x.new_empty(checks.y_shape(factor.pattern, job.layout, job.batch)),
                    1 + len(layers) + to_go,
                )
                given = {"activation": layer.between, "out": to}
                passed[goes_to] = max(to.numel(), passed.get(goes_to, 0))
            if (call := _call(factor.prepare, job, x, [weights], False, **given)) is None:
                return None
            own.append(call)
            places.append({"x": at, call.call.plan.result: goes_to})
            x, at = given["out"], goes_to
    return _launches(job, own, places, [passed[place] for place in sorted(passed)])


def _launches(job: _Job, own: Sequence[_Own], places: Sequence[Mapping[str, int]], passed: Sequence[int] = ()) -> Step:
    """Combine launches into one call on host tensors, with one new y and scratch memory for intermediates.

    `passed` holds the elements of each intermediate. `places` maps operands to arrays: 0 is x, 1 the residual, then
    come the outputs and the intermediates.
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
    """Weights per factor: packed, and as a tensor for PyTorch's products.

    The tensor is None for stored weights, which PyTorch does not multiply by.
    """
    packed = layer._packed()
    return list(zip(packed, [None] * len(packed) if layer.is_stored else layer.weights, strict=True))


def _each_factor(layer: Any, job: _Job, only_kernels: bool) -> Step:
    """Run each factor by its fastest method."""
    steps, x = list[tuple[Callable[[Tensor], Tensor], Step]](), job.x
    every: Any = ops.transposed_at(layer.own_chain.turn, _operands(layer), job.layout, job.out_layout)
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
    job: _Job, packed: Any, weights: Tensor | None, bias: Tensor | None, activation: str, layout_of_job: str,
    only_kernels: bool
) -> Step:  # fmt: skip
    """Fastest method for one factor.

    `layout_of_job` is the layout under which its times are looked up.
    """
    if not isinstance(packed, Weights):  # the weights have thawed
        raise NotPreparedError
    layout, shape, ways = job.layout, packed.pattern.shape, dict[str, Step]()
    given: dict[str, Any] = {"bias": bias, "activation": activation, "residual": job.residual, "out": job.y}
    if call := _call(launcher(*shape).prepare, job, job.x, [packed], False, **given):
        ways["ksgen"] = _launches(job, [call], [{call.call.plan.result: 2}])
    if only_kernels or weights is None:
        if not ways:
            raise NotPreparedError
        return ways["ksgen"]
    matrices, blocks = derived(weights, products.by_matrix), derived(weights, products.blocks_of)

    def on_views(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(products.multiply(x, matrices, layout), bias, activation, residual, layout)

    def permuted(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(
            products.permuted_multiply(x, blocks, layout, shape[0], shape[3]), bias, activation, residual, layout
        )

    ways |= {"strided": on_views, "bmm": permuted}
    if weights.element_size() == 2:  # like in `ksgen.torch.operators.ops`
        ways["dense"] = _by_whole_matrix(derived(weights, products.to_dense), layout, bias, activation)
    kind = job_of(
        "prepared", [shape], job.x.dtype, layout_of_job, activation, bias is not None, job.residual is not None
    )
    timed = {name: partial(way, job.x, job.residual) for name, way in ways.items()}
    return ways[faster((kind, size_of(job.batch), *ways), timed)]


def _by_whole_matrix(matrix: Tensor, layout: str, bias: Tensor | None, activation: str) -> Step:
    def in_rows(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(functional.linear(x, matrix, bias), None, activation, residual, layout)

    def in_columns(x: Tensor, residual: Tensor | None) -> Tensor:
        return finish(matrix @ x, bias, activation, residual, layout)

    return in_rows if layout == "bsf" else in_columns


# ---- small training steps


def _step(layer: Any, x: Tensor) -> Tensor | None:
    """Output of the layer by direct calls of PyTorch's products; None if the usual path has to serve it.

    Checking everything again would cost as much as a small product.
    """
    own, chain, dtype = layer._parameters, layer.own_chain, x.dtype
    if "bias" not in own or "weights" not in layer._modules:  # a parametrization computes it at each access
        return None
    parameters = layer._modules["weights"]._parameters
    if len(parameters) != len(chain):
        return None
    bias = own["bias"]
    weights = [parameters.get(str(number)) for number in range(len(chain))]  # pruned weights have other names
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
        return None  # a checkpoint's second pass must equal the first
    if serves is None:
        serves = _is_served(layer, x, bias is not None)
        if serves is None:
            return None
        if len(_served) >= choice.REMEMBERED:
            _served.clear()
        _served[key] = serves
    return _product(layer, x, weights, bias) if serves else None


def steps_in_words(layer: Any, batch: int) -> list[str]:
    """Line of `explain` that training steps of so many rows run PyTorch's products, if timings selected them."""
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
    """Whether every factor's step was timed, and PyTorch's products were the fastest.

    None if one was not timed yet.
    """
    chain, layout = layer.own_chain, layer.layout
    if layer.backend != "auto" or layer.out_layout is not None or layer.precision not in (None, dtype_name(x.dtype)):
        return False
    if not is_ready(x.device):
        return None
    if layer.fuse == "yes" or is_recomputed(layer.intermediates, chain, (layer.between, layer.activation)):
        return False
    features, batch = x.shape[-1 if layout == "bsf" else 0] if x.dim() else 0, x.numel() // chain.in_features
    if features != chain.in_features or not 0 < batch <= ops.FEW_ENTRIES or not choice.has_kernels(x.device):
        return False
    *first, last = chain.factors
    steps = [(each, layer.between, False) for each in first] + [(last, layer.activation, has_bias)]
    for number, (pattern, activation, adds) in enumerate(steps):
        job = ops.step_job(
            pattern.shape, batch, x.dtype, layout, activation, adds, False, bool(number) or x.requires_grad
        )
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
