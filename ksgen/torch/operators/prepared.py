"""Prepared calls of layers while no gradient is recorded. They check x, and little else.

`is_direct` checks x, and `parameters_of` the parameters. The first call of a layer at a shape takes the usual path,
which reports errors. The second call prepares; under deterministic algorithms, the first one does. On a processor, the
methods are timed alternately; on a GPU, `ksgen.torch.operators.choice` decides. Weights of frozen layers are packed
once. Other weights are read and packed at each call, because their changes cannot be detected reliably. A single layer
counts as a group of one. Calls that cannot be prepared take the usual path.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from ksgen.build.background import awaited, is_pending, progress, undisturbed
from ksgen.devices.base import HUGE_BYTES, RefusedError, use_huge_pages
from ksgen.errors import DeviceError, KsgenError, ToolchainError
from ksgen.families import MAP_ALIGNMENT
from ksgen.families.signature import each_chains
from ksgen.launch import checks
from ksgen.launch.arrays import current_stream
from ksgen.launch.plan import Call, RepeatedCalls
from ksgen.launch.planner import PLANNER
from ksgen.launcher import Weights
from ksgen.spec import Activation, Epilogue, Fuse, Layout
from ksgen.spec.kernel import layout_word, pattern_as_list
from ksgen.torch.operators import choice, frozen, ops, products, replay
from ksgen.torch.operators.backends import BACKENDS as PRODUCTS
from ksgen.torch.operators.checks import dtype_name, is_eager
from ksgen.torch.operators.choice import faster, has_kernels, job_of, launcher_of, size_of
from ksgen.torch.operators.factors import Ties, factors_of, steps_of, tie_of, ties_of, views_of, whole_shapes
from ksgen.torch.operators.frozen import derived_for
from ksgen.torch.operators.launches import Calls, Launches
from ksgen.torch.operators.meanwhile import by_kernels, may_prepare, preparing
from ksgen.torch.operators.products import finish

BACKENDS = ("auto", "ksgen")  # backends with prepared calls
# least columns of X per thread for which one launch is timed in batch-size-last; launchers never choose one there
TRIED_COLUMNS = 64
REMEDY = "layer.build(batch=...) compiles beforehand, in parallel"  # for calls that wait
MOST_CALLS = 256  # prepared calls per frozen layer
# options that must be equal for all layers of one launch
OPTIONS = ("layout", "out_layout", "activation", "between", "fuse", "precision", "backend")
UNFIT = "takes the usual path, or is refused there"  # state of a shape of x
NAMES = tuple(map(str, range(64)))  # names of a layer's weights

Result = TypeVar("Result")
# parameters that a call reads: the bias of each layer, then weights that are not frozen
Parameters = Sequence[Tensor | None]
Step = Callable[[Tensor, Tensor | None, Parameters], Tensor]  # takes x and the residual as matrices
options_of = attrgetter(*OPTIONS)
_calls: dict[Hashable, Any] = {}  # prepared calls of layers that are not frozen: equal layers share them


class Unprepared:
    """State of a shape of x that has no prepared call yet."""

    def __init__(self, since: object = None) -> None:
        """`since` is what `progress` returned before the last attempt to prepare; None before the first one."""
        self._since = since

    @property
    def is_due(self) -> bool:
        """Whether to prepare: not while the background has finished nothing since the last attempt."""
        return not is_pending(self._since)


class NotPreparedError(Exception):
    """Signals that no prepared call fits; the usual path computes the result or refuses the call."""


def is_direct(x: Any, residual: Any = None) -> bool:
    """Whether x and residual are plain tensors, and no trace, mode, transform, autocast or graph capture is active."""
    if not is_eager() or forward_ad._current_level >= 0:  # a trace records every shape that is read
        return False
    if not (_lies_in_memory(x) and (residual is None or _lies_in_memory(residual))):
        return False
    if x.is_cpu:
        return not torch.is_autocast_enabled("cpu")
    return not (torch.is_autocast_enabled("cuda") or torch.cuda.is_current_stream_capturing())


def state_of(
    states: dict[Hashable, Any], key: Hashable, most: int, layer: Any, x: Tensor, prepare: Callable[[], Any]
) -> Any:
    """State of a shape of x among at most `most` states: what `prepare` returned, or `Unprepared`.

    The first call at a shape only notes it, because many shapes occur once. Under deterministic algorithms, it
    prepares, so that the last bits of its results are those of later calls, and warns if it waits. Later calls wait in
    `awaited` on the usual path, if at all.
    """
    found, prepares_at_once = states.get(key), x.is_cpu and torch.are_deterministic_algorithms_enabled()
    if found is None:
        if len(states) >= most:
            states.clear()
        states[key] = found = Unprepared()
        if not prepares_at_once:
            return found
    if type(found) is Unprepared and found.is_due and (x.is_cuda or may_prepare()):  # on a GPU, nothing is timed
        with preparing(), awaited(layer._name(), REMEDY) if prepares_at_once else nullcontext():
            states[key] = found = prepare()
    return found


def _lies_in_memory(tensor: Any) -> bool:
    """Whether this is a plain tensor whose values lie unchanged at its address."""
    kind = type(tensor)
    if (kind is not Tensor and kind is not nn.Parameter) or not (tensor.is_cpu or tensor.is_cuda):
        return False
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj() or tensor.is_nested:
        return False
    try:
        address = tensor.data_ptr()  # 0 if empty or released; foreign memory may be misaligned
    except RuntimeError:  # a batch of gradients, as with `is_grads_batched`
        return False
    return bool(address) and address % (tensor.element_size() if tensor.is_cpu else MAP_ALIGNMENT) == 0


def multiply(layer: Any, x: Any, residual: Any, after: str = "none") -> Tensor | None:
    """Output of the layer by a prepared call; None if it has to take the usual path.

    `after` is an activation that follows the residual. The layer itself then has none.
    """
    if torch.is_grad_enabled() or not is_direct(x, residual):
        return None
    may_replay = after == "none" and x.is_cpu and layer.backend in BACKENDS
    seen = replay.snapshot(layer) if may_replay else None
    y, call = _multiplied(layer, x, residual, after)
    if seen is None or y is None or call is None or (kernels := call.kernels) is None:
        return y
    if kernels.reads_slices:
        seen = seen.repeating([()] * len(layer.chain))
    usual = None if call.is_by_kernels else lambda x, *_: _multiplied(layer, x, residual, after)[0]
    replay.add(layer, seen, x, residual, call, kernels, y.shape, usual)
    return y


def _multiplied(layer: Any, x: Any, residual: Any, after: str) -> "tuple[Tensor | None, Prepared | None]":
    """Output by a prepared call, and that call."""
    calls = layer._prepared_calls()
    if calls is None and frozen.was_frozen(layer):  # its weights changed: the usual path reports it
        return None, None
    if (parameters := parameters_of(layer, x, calls is None)) is None:
        return None, None
    if ties := ties_of(layer) if calls is None else ():
        parameters[1:] = views_of(parameters[1:], ties)
    if (call := _found(calls, (layer,), x, residual, parameters, after, ties=ties)) is None:
        return None, None
    step = call.step  # read once: another thread may settle another one
    read = parameters if reads_slices(step) else make_whole(parameters)
    return unless_refused(call.run, x, residual, read, step), call


def unless_refused(run: Callable[..., Result], *arguments: Any) -> Result | None:
    """Result of a prepared call; None if the device refuses a launch: the usual path then takes another kernel."""
    try:
        return undisturbed(run, *arguments)
    except RefusedError:
        return None


def of_group(
    group: nn.Module, layers: Sequence[Any], x: Any, residual: Any = None, after: str = "none", adds: bool = False
) -> "tuple[Prepared, Parameters] | None":
    """Prepared call of a group's layers on this x, and the parameters that it reads; None: take the usual path.

    `adds` says that the layers form a sum. Only sums have a residual, or an activation `after`.
    """
    if torch.is_grad_enabled() or not is_direct(x, residual):
        return None
    if (calls := frozen.calls_of_group(group, layers)) is None:
        return None
    parameters: list[Tensor | None] = []
    for layer in layers:
        if (of_layer := parameters_of(layer, x, False)) is None:
            return None
        parameters += of_layer
    call = _found(calls, layers, x, residual, parameters, after, adds)
    return None if call is None else (call, make_whole(parameters))


def parameters_of(layer: Any, x: Tensor, has_weights: bool) -> list[Tensor | None] | None:
    """Parameters of a layer that a call reads; None if one of them is not plain memory like x.

    Pruning and parametrizations compute a parameter at each access, and remove the stored one of that name. The
    parameter of tied weights is their slice. A layer with any other computed parameter takes the usual path.
    """
    stored = layer._parameters
    if "bias" not in stored or layer._parallel is not None:
        return None
    found: list[Any] = [stored["bias"]]
    if not has_weights and found[0] is None:
        return found
    if has_weights:
        if layer.has_stored_type or "weights" not in layer._modules:
            return None
        weights = layer._modules["weights"]
        stored = weights._parameters
        computed = steps_of(layer)
        # other parametrizations are left to the usual path: they may be costly, or change at each evaluation
        if (
            computed
            and layer.backend in BACKENDS
            and all(hasattr(each, "repeats") for steps in computed.values() for each in steps)
        ):
            for name in NAMES[: len(weights)]:
                is_tied = tie_of(computed.get(name, ()))
                found.append(computed[name].original if is_tied else getattr(weights, name))
        else:
            found += [stored.get(name) for name in NAMES[: len(stored)]]
        if whole_shapes(found[1:], ties_of(layer) if computed else ()) != layer.chain.shapes:
            return None
    dtype, place = x.dtype, x.get_device()
    for number, each in enumerate(found):
        if each is None and not number:
            continue
        if not _lies_in_memory(each) or each.dtype != dtype or each.get_device() != place:
            return None
        if not each.is_contiguous() and 0 not in each.stride():
            return None
    return found


def make_whole(parameters: list[Tensor | None]) -> list[Tensor | None]:
    """Replace views that repeat a slice by copies, once; return the list."""
    for number, each in enumerate(parameters):
        if each is not None:
            parameters[number] = each.contiguous()
    return parameters


def _found(
    calls: dict[Hashable, Any] | None,
    layers: Sequence[Any],
    x: Tensor,
    residual: Tensor | None,
    parameters: list[Tensor | None],
    after: str = "none",
    adds: bool = False,
    ties: Ties = (),
) -> "Prepared | None":
    """Prepared call for these arrays; None if there is none yet, or if the usual path has to be taken.

    `calls` are those of frozen layers; None if the layers are not frozen. `ties` are those of the weights that are
    read.
    """
    options = options_of(layers[0]) if len(layers) == 1 else tuple(map(options_of, layers))
    shapes = layers[0]._exchanges, ties, *[None if each is None else each.shape for each in parameters]
    stream = current_stream(x.get_device()) if x.is_cuda else None
    form = x.shape, x.dtype, x.get_device(), stream, residual is None
    key = *form, options, after, shapes, torch.get_num_threads(), PLANNER.generation
    most = choice.REMEMBERED if calls is None else MOST_CALLS
    calls = _calls if calls is None else calls
    found = calls.get(key)  # read once: another thread may drop all of them
    if found is None or type(found) is Unprepared:
        prepare = partial(_prepared, layers, x, residual, parameters, after, adds, ties)
        found = state_of(calls, key, most, layers[0], x, prepare)
    elif type(found) is Prepared and not found.is_open:
        calls[key] = found = Unprepared()
    return found if type(found) is Prepared and found.takes(x, residual) else None


def _prepared(
    layers: Sequence[Any], x: Tensor, residual: Tensor | None, parameters: Parameters, after: str, adds: bool,
    ties: Ties,
) -> "Prepared | Unprepared | str":  # fmt: skip
    """Prepare a call; `Unprepared` if it has to be tried again later, `UNFIT` if none can be prepared."""
    seen, slices = Unprepared(progress()), parameters if ties and x.is_cpu else ()
    if not choice.is_ready(x.device):
        return seen
    try:
        if len(layers) > 1 and not (form_sum if adds else are_alike)(layers):
            return UNFIT
        if not all(fits(each, x) for each in layers):
            return UNFIT
        job = _Job.of(layers, x, make_whole([*parameters]), after, adds)
        if residual is not None:
            if (residual.dtype, residual.shape, residual.device) != (x.dtype, job.y_shape, x.device):
                return seen  # the usual path reports it
            job = job._replace(residual=_rows(residual, job.y.shape))
        return by_kernels(lambda: Prepared(layers, x, job._replace(slices=slices))) or seen
    except NotPreparedError:
        return UNFIT


def are_alike(layers: Sequence[Any]) -> bool:
    """Whether layers differ only in their chains and weights.

    False if y has another layout than x, because groups refuse that.
    """
    return len({(options_of(each), each.bias is None) for each in layers}) == 1 and layers[0].out_layout is None


def form_sum(layers: Sequence[Any]) -> bool:
    """Whether layers can add to one y."""
    needed = attrgetter("layout", "out_layout", "activation", "in_features", "out_features")
    return len({needed(each) for each in layers}) == 1 and layers[0].activation == "none"


def fits(layer: Any, x: Tensor) -> bool:
    """Whether kernels multiply x by the layer's weights directly. On processors, only in the precision of x."""
    if layer.backend not in BACKENDS or not (x.is_cuda or layer.precision in (None, dtype_name(x.dtype))):
        return False
    bias = layer.bias
    if bias is not None and (bias.shape, bias.dtype) != ((layer.out_features,), x.dtype):
        return False
    return bool(layer._multiplies(x.dtype) and has_kernels(x.device))


def shapes_of(layer: Any) -> tuple[tuple[Any, ...], ...]:
    """Arguments of each factor's `Pattern`."""
    return tuple([tuple(pattern_as_list(pattern)) for pattern in layer.own_chain])


def launcher_of_layers(layers: Sequence[Any], fuse: Fuse | None = None) -> Any:
    """Launcher of a layer, or of several layers on one x. `fuse` replaces the option of the layers."""
    first, shapes = layers[0], tuple(map(shapes_of, layers))
    options = first.between, fuse or first.fuse
    return choice.group_launcher(shapes, *options) if len(layers) > 1 else choice.chain_launcher(shapes[0], *options)


class _Job(NamedTuple):
    """Operands of a prepared call: a matrix x, outputs that are slices of one y or in a sum y itself, and parameters.

    A batch of one is a row in both layouts. Arrays are numbered in this order: x, the residual, the outputs, the
    parameters that each call reads, and scratch memory.
    """

    layout: Layout
    out_layout: Layout | None
    x: Tensor
    residual: Tensor | None
    y: Tensor
    outs: Sequence[Tensor]
    parameters: Parameters
    activation: Activation = "none"  # of the last factors
    residual_first: bool = False
    adds: bool = False  # whether the outputs are added
    slices: Parameters = ()  # the parameters, with views of slices as tied weights; empty if nothing is tied
    y_shape: Sequence[int] = ()  # of y as the caller sees it

    @classmethod
    def of(
        cls, layers: Sequence[Any], x: Tensor, parameters: Parameters, after: str = "none", adds: bool = False
    ) -> "_Job":
        """Build the operands, without a residual."""
        adds &= len(layers) > 1
        first, features = layers[0], [each.out_features for each in (layers[:1] if adds else layers)]
        y_shape = first._y_shape(x)  # raises an error if the features of x do not fit
        y_shape = (*y_shape[:-1], sum(features)) if first.y_layout == "bsf" else (sum(features), *y_shape[1:])
        layout, out_layout, rows = first.layout, first.out_layout, first._as_matrix(x.contiguous())
        if rows.shape[0 if layout == "bsf" else 1] == 1:
            layout, out_layout, rows = "bsf", None, rows.reshape(1, -1)
        batch, axis = rows.shape[0 if layout == "bsf" else 1], 1 if (out_layout or layout) == "bsf" else 0
        y = x.new_empty((batch, sum(features)) if axis else (sum(features), batch))
        outs = [y] * len(layers) if adds else y.split(features, axis)
        activation: Any = first.activation if after == "none" else after
        residual_first = after != "none"
        return cls(
            layout, out_layout, rows, None, y, outs, parameters, activation, residual_first, adds, y_shape=y_shape
        )

    @property
    def batch(self) -> int:
        return int(self.x.shape[0 if self.layout == "bsf" else 1])

    @property
    def is_alone(self) -> bool:
        """Whether the job belongs to a single layer."""
        return len(self.outs) == 1

    @property
    def weights(self) -> Sequence[Any]:
        """Weights that each call reads; none if they are frozen."""
        return self.parameters[len(self.outs) :]

    @property
    def first_bias(self) -> int:
        """Number of the first layer's bias among the arrays."""
        return 2 + len(self.outs)

    @property
    def first_weight(self) -> int:
        return self.first_bias + len(self.outs)

    def calls(self) -> Calls:
        return Calls(self.first_bias + len(self.parameters))


class Prepared(replay.Replaceable):
    """Prepared call that computes activation(X K^T + bias) + residual of layers on one x, side by side or as a sum.

    It uses the fastest method for the shape of x. It holds the packed weights of frozen layers, and no other array.
    """

    def __init__(self, layers: Sequence[Any], x: Tensor, job: _Job) -> None:
        self._adds, self._features = job.adds, [each.out_features for each in layers]
        self._x_shape, self._y_shape, self._dtype = job.x.shape, torch.Size(job.y_shape), x.dtype
        self._residual_shape, self._is_viewed = job.y.shape, job.y.shape != self._y_shape
        self._axis = -1 if layers[0].layout == "bsf" else 0
        self._each: list[Prepared] = []  # one per layer of a group, if that is the fastest method
        methods = (self._by_rule if x.is_cuda else self._fastest)(layers, x, job)
        super().__init__(methods, _Launches)
        self._launch: RepeatedCalls | None = None
        if x.is_cuda and self.kernels:  # a user may detach the context of a GPU, where no replay repeats launches
            self._launch, self.kernels = self.kernels.launch, None

    @property
    def is_open(self) -> bool:
        """Whether the device of the launches still works."""
        return (self._launch is None or self._launch.is_open) and all(each.is_open for each in self._each)

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        """Whether this call accepts these arrays, whose parameters have the shapes that it was prepared for."""
        if x.is_cuda and not (x.is_contiguous() and (residual is None or residual.is_contiguous())):
            return False  # kernels read slices in place
        if residual is None:
            return True
        fits: bool = residual.dtype == self._dtype and residual.shape == self._y_shape
        return fits and residual.get_device() == x.get_device()

    def run(self, x: Tensor, residual: Tensor | None, parameters: Parameters, step: "Step | None" = None) -> Tensor:
        """Run the call, by this step if one is given."""
        if self._each:
            return self._by_each(self._each, x, residual, parameters)
        added = None if residual is None else _rows(residual, self._residual_shape)
        y = (step or self.step)(_rows(x, self._x_shape), added, parameters)
        return y.view(*self._y_shape) if self._is_viewed else y

    def parts(self, x: Tensor, parameters: Parameters) -> list[Tensor]:
        """Outputs per layer: slices of one tensor if one call computed them all."""
        if self._each:
            return [each.run(x, None, [bias]) for each, bias in zip(self._each, parameters, strict=True)]
        return list(self.run(x, None, parameters).unsafe_split_with_sizes(self._features, self._axis))

    def _by_each(self, each: "Sequence[Prepared]", x: Tensor, residual: Tensor | None, parameters: Parameters) -> Any:
        """Output by one prepared call per layer."""
        pairs = zip(each, parameters, strict=True)
        if not self._adds:
            return torch.cat([one.run(x, None, [bias]) for one, bias in pairs], self._axis)
        y = residual
        for one, bias in pairs:
            y = one.run(x, y, [bias])
        return y

    def _alone(self, layers: Sequence[Any], x: Tensor, job: _Job) -> "list[Prepared]":
        """One prepared call per layer of a group."""
        found = list[Prepared]()
        for number, (layer, bias) in enumerate(zip(layers, job.parameters, strict=True), 1):
            is_end = job.adds and number == len(layers)
            one = _Job.of([layer], x, [bias], job.activation if is_end else "none")
            if job.adds and (found or job.residual is not None):
                one = one._replace(residual=x.new_zeros(self._residual_shape))
            found.append(Prepared([layer], x, one))
        return found

    def _by_rule(self, layers: Sequence[Any], x: Tensor, job: _Job) -> Sequence[Step]:
        """Method on a GPU: one launch, if that is expected to be faster.

        Otherwise it is one call with one launch per factor, or none but one prepared call per layer of a group.
        """
        if _is_one_launch(layers, job):
            if (method := _in_one_launch(layers, job, True)) is None:
                raise NotPreparedError
        elif job.is_alone:
            if layers[0].fuse == "yes" or not _use_kernels(layers[0], job) or (method := _in_turn(layers, job)) is None:
                raise NotPreparedError
        else:
            self._each = self._alone(layers, x, job)
            return []
        return [method]

    def _fastest(self, layers: Sequence[Any], x: Tensor, job: _Job) -> Sequence[Step]:
        """Methods on a processor, the fastest first; none if one prepared call per layer of a group is the fastest."""
        first, methods, given = layers[0], dict[str, Any](), job.slices or job.parameters
        only_kernels = all(each.backend == "ksgen" or each.has_stored_type for each in layers)
        if job.is_alone and len(first.own_chain) == 1 and job.out_layout is None:
            return _factor(first, 0, job, _packed(first, job)[0], first.layout, only_kernels)
        if job.slices and first.fuse != "yes" and (method := _in_turn(layers, job)):
            if only_kernels:
                return [method]
            methods["slices"] = method
        ties, job = ties_of(first) if job.slices else (), job._replace(slices=())
        if method := _in_one_launch(layers, job, only_kernels):
            methods["ksgen"] = method
        if not job.adds and (first.fuse == "yes" or (methods and only_kernels and job.is_alone)):
            if not methods:
                raise NotPreparedError
            return [methods["ksgen"]]
        if method := _in_turn(layers, job):
            methods["in turn"] = method
            if job.adds and only_kernels:
                return [method]
        if job.is_alone and not (methods and only_kernels):
            methods["each"] = _each_factor(first, job, only_kernels)
        timed: dict[str, Callable[[], Tensor]] = {
            name: partial(_run, method, job.x, job.residual, given) for name, method in methods.items()
        }
        if not job.is_alone:
            alone = self._alone(layers, x, job)
            timed["each"] = partial(self._by_each, alone, x, job.residual, job.parameters)
        name = _timed_fastest(layers, job, timed, ties)
        if name not in methods:
            self._each = alone
            return []
        return [methods[name], *methods.values()]


def _run(method: Step, x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
    """Run a method on whole parameters, or on views of slices if it reads these."""
    return method(x, residual, parameters if reads_slices(method) else make_whole([*parameters]))


def reads_slices(method: Step) -> bool:
    """Whether a method takes views of the slices of tied weights."""
    return isinstance(method, _Launches) and method.reads_slices


def _rows(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Reshape to a matrix of that shape, only if needed: each PyTorch operator takes a microsecond."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor if tensor.shape == shape else tensor.view(*shape)  # a `torch.Size` costs a microsecond more


def _kind(job: _Job) -> str:
    """Kind of the job, one of `choice.KINDS`."""
    return "called" if job.weights else "prepared"


def _timed_fastest(layers: Sequence[Any], job: _Job, timed: Mapping[str, Callable[[], Tensor]], ties: Ties) -> str:
    if len(timed) == 1:
        return next(iter(timed))
    first, shapes = layers[0], [shapes_of(each) for each in layers]
    layout, bias, between = layout_word(first.layout, first.out_layout), first.bias is not None, first.between
    if job.adds:
        bias, between = words_of_sum(layers)
    patterns: Any = shapes[0] if job.is_alone else shapes
    kind = _kind(job) if job.is_alone else "prepared sum" if job.adds else "prepared group"
    timed_job = job_of(kind, patterns, job.x.dtype, layout, job.activation, bias, job.residual is not None, between)
    return faster((timed_job, size_of(job.batch), *ties, *timed), timed)


def words_of_sum(layers: Sequence[Any]) -> tuple[Any, Any]:
    """Words in the key of a sum's times: which layers have a bias, and options in which the layers may differ."""
    options = [
        (each.between, each.fuse, each.backend, *((each.storage, each._inputs) if each.has_stored_type else ()))
        for each in layers
    ]
    return tuple([each.bias is not None for each in layers]), tuple(options)


# ---- what a GPU runs


def _is_one_launch(layers: Sequence[Any], job: _Job) -> bool:
    """Whether one launch computes all factors of all layers on a GPU."""
    first = layers[0]
    if job.adds:
        return False
    if first.fuse != "auto" or (job.is_alone and len(first.own_chain) == 1):
        return bool(first.fuse == "yes")
    epilogue = Epilogue(*_steps(job))
    more: dict[str, Any] = {"weights": first.storage, "inputs": first._inputs} if first.has_stored_type else {}
    if job.is_alone:
        more["out_layout"] = job.out_layout
    wanted = first.precision or dtype_name(job.x.dtype)
    launch = launcher_of_layers(layers)
    return choice.is_one_launch(launch, job.x.device, wanted, job.layout, epilogue, job.batch, **more).is_one


def _steps(job: _Job) -> tuple[bool, str, bool, bool]:
    """Arguments of the epilogue of a job's last factors."""
    return job.parameters[0] is not None, job.activation, job.residual is not None, job.residual_first


def _use_kernels(layer: Any, job: _Job) -> bool:
    """Whether a GPU multiplies by every factor with a kernel of ksgen."""
    if layer.has_stored_type or layer.backend == "ksgen":
        return True
    wanted, last = layer.precision or dtype_name(job.x.dtype), len(layer.own_chain)
    for number, pattern in enumerate(layer.own_chain, 1):
        epilogue = _steps(job) if number == last else (False, layer.between)
        kernel = choice._kernel(launcher_of(pattern), wanted, job.layout, epilogue)
        if choice.choose(kernel, job.batch, job.x.device).backend != "ksgen":
            return False
    return True


# ---- launches


def _packed(layer: Any, job: _Job) -> list[Any]:
    """Weights of a layer as launchers take them: packed ones of a frozen layer, else its parameters."""
    if job.weights:
        return list(job.weights)
    packed: list[Any] = layer._packed()
    if not all(isinstance(each, Weights) for each in packed):  # the layer was thawed meanwhile
        raise NotPreparedError
    return packed


def _call(prepare: Callable[..., Call | None], x: Tensor, weights: Any, **options: Any) -> Call | None:
    """Prepare a call whose launches copy no array; None if the launcher has no such call.

    Raises `NotPreparedError` if the launcher refuses the arguments: the usual path reports the error.
    """
    options = {name: each for name, each in options.items() if each is not None}
    try:
        return prepare(x, weights, **options)
    except (DeviceError, ToolchainError):
        return None
    except KsgenError as error:
        raise NotPreparedError from error


def _in_one_launch(layers: Sequence[Any], job: _Job, only_kernels: bool) -> "_Launches | None":
    """All factors of all layers in one launch, if one is available."""
    first, weights = layers[0], [_packed(each, job) for each in layers]
    if first.fuse == "no" or job.adds:
        return None
    biases = None if job.parameters[0] is None else list(job.parameters[: len(layers)])
    options: dict[str, Any] = {"layout": job.layout, "precision": first.precision, "residual": job.residual}
    options |= {"activation": job.activation, "residual_first": job.residual_first}
    if not job.is_alone:
        prepare = launcher_of_layers(layers).prepare
        found = _call(prepare, job.x, weights, out=list(job.outs), bias=biases, **options)
    else:
        is_tried = first.fuse == "auto" and job.layout == "bsl" and not only_kernels
        is_tried &= job.batch >= TRIED_COLUMNS * torch.get_num_threads()
        prepare = launcher_of_layers(layers, "yes" if is_tried else None).prepare
        options |= {"bias": job.parameters[0], "out": job.y, "out_layout": job.out_layout}
        try:
            found = _call(prepare, job.x, weights[0], **options)
        except NotPreparedError:
            if not is_tried:  # otherwise one launch was only a trial
                raise
            return None
    if found is None:
        return None
    outs = {name: 2 + index for index, name in enumerate(each_chains(found.plan.kernel, "y"))}
    added = {name: job.first_bias + index for index, name in enumerate(each_chains(found.plan.kernel, "bias"))}
    calls, numbers = job.calls(), [job.first_weight + index for index in range(len(job.weights))]
    calls.add(found, {**outs, **added}, [each for of_layer in weights for each in of_layer], numbers)
    return _Launches(job, calls)


def _in_turn(layers: Sequence[Any], job: _Job) -> "_Launches | None":
    """Launches of all layers sequentially, by one call: one launch per layer, or one per factor.

    With `job.slices`, they read slices of the tied weights of one layer; None if they cannot.
    """
    if job.out_layout is not None:
        return None
    # array numbers of the intermediates, whose memory the layers share
    calls, intermediates = job.calls(), list[int]()
    for number, (layer, out) in enumerate(zip(layers, job.outs, strict=True)):
        chain, weights = launcher_of_layers([layer]), _packed(layer, job)
        last: dict[str, Any] = {
            "layout": job.layout,
            "bias": job.parameters[number],
            "activation": job.activation,
            "residual": job.residual,
            "residual_first": job.residual_first,
            "out": out,
        }
        added = {"bias": job.first_bias + number}
        if job.adds and number:  # to the sum of the earlier layers
            last["residual"], added["residual"] = out, 1 + number
        is_read_next = job.adds and number + 1 < len(layers)
        if is_read_next:
            last["activation"] = "none"
        has_bias, has_residual = last["bias"] is not None, last["residual"] is not None
        ties = ties_of(layer) if job.slices else ()
        factors = factors_of(layer.own_chain, ties, job.layout, job.batch, (has_bias, has_residual))
        if not job.is_alone and len(weights) > 1 and (fused := _call(chain.prepare, job.x, weights, **last)):
            if is_read_next:
                fused.keep_output()
            calls.add(fused, {fused.plan.result: 2 + number, **added}, weights)
            continue
        x, x_number = job.x, 0
        for place, (factor, weight) in enumerate(zip(factors, weights, strict=True)):
            options, y_number, is_last = last, 2 + number, place + 1 == len(weights)
            if factor.is_folded or factor.whole:
                a, _, _, d = factor.pattern.shape
                part: Any = job.slices[1 + place]
                weight = part[:a, ..., :d]
            if is_last and factor.is_folded:
                options = last | {"out": factor.out(out)}
                if has_bias:  # of a single row
                    options |= {"bias": None, "residual": last["bias"], "residual_first": True}
                    added["residual"] = job.first_bias + number
                if options["residual"] is not None:
                    options["residual"] = factor.out(options["residual"])
            if not is_last:
                y = x.new_empty(checks.y_shape(factor.pattern, factor.layout, factor.batch))
                if place == len(intermediates):
                    intermediates.append(calls.reserve(0))
                y_number = intermediates[place]
                calls.enlarge(y_number, y.nbytes)
                options = {"activation": layer.between, "out": y}
            numbers = [job.first_weight + place] if job.weights else []
            options = options | {"layout": factor.layout, "precision": layer.precision}
            call = _call(launcher_of(factor.pattern).prepare, factor.x(x), weight, **options)
            if call is None or (factor.whole and not call.plan.kernel.tied):
                return None
            if is_read_next or not is_last:
                call.keep_output()
            places = {"x": x_number, call.plan.result: y_number} | (added if is_last else {})
            calls.add(call, places, [weight], numbers)
            x, x_number = options["out"], y_number
    return _Launches(job, calls, bool(job.slices))


class _Launches(Launches):
    """`Step` that runs the launches of one prepared call, with a new y each time."""

    def __init__(self, job: _Job, calls: Calls, reads_slices: bool = False) -> None:
        super().__init__(calls)
        self.reads_slices, size = reads_slices, job.y.element_size()
        self._shape, self._outs = job.y.shape, [out.storage_offset() * size for out in job.outs]
        self._is_large = job.y.is_cpu and job.y.nbytes >= HUGE_BYTES

    def __call__(self, x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
        y = x.new_empty(*self._shape)  # as numbers, which PyTorch reads twice as fast as a `torch.Size`
        begin, added = y.data_ptr(), 0 if residual is None else residual.data_ptr()
        if self._is_large:
            use_huge_pages(begin, y.nbytes)
        given = [0 if each is None else each.data_ptr() for each in parameters]
        self.run([x.data_ptr(), added, *[begin + each for each in self._outs], *given], x)
        return y


# ---- one factor by its fastest method


def _each_factor(layer: Any, job: _Job, only_kernels: bool) -> Step:
    """Run each factor by its fastest method."""
    chain, steps, x = layer.own_chain, list[Step](), job.x
    layouts = ops.layouts_of(len(chain), job.layout, job.out_layout, chain.transposing_factor)
    for place, (weights, layout) in enumerate(zip(_packed(layer, job), layouts[1:], strict=True)):
        is_transposing, y = layout != layouts[place], x.new_empty(checks.y_shape(chain[place], layout, job.batch))
        x = x.t().contiguous() if is_transposing else x
        of_factor = _Job(layout, None, x, None, y, [y], [None, *job.parameters[1:]], layer.between)
        if place + 1 == len(chain):
            ending: Any = job.parameters, job.activation, job.residual_first
            of_factor = _Job(layout, None, x, job.residual, y, [y], *ending)
        step, *_ = _factor(layer, place, of_factor, weights, layout, only_kernels)
        steps.append(_transposing(step) if is_transposing else step)
        if place + 1 < len(chain):
            x = step(x, None, job.parameters)
    *first, last = steps

    def each_alone(x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
        for step in first:
            x = step(x, None, parameters)
        return last(x, residual, parameters)

    return each_alone


def _transposing(step: Step) -> Step:
    """The step for x in the other layout."""
    return lambda x, residual, parameters: step(x.t().contiguous(), residual, parameters)


def _factor(layer: Any, place: int, job: _Job, weights: Any, layout_of_job: str, only_kernels: bool) -> Sequence[Step]:
    """Methods for a factor of a layer, the fastest first.

    `job` has the operands of this factor. `layout_of_job` is the layout in the key of its times.
    """
    layout, activation, residual_first, bias = job.layout, job.activation, job.residual_first, job.parameters[0]
    pattern, has_bias, methods = layer.own_chain[place], bias is not None, dict[str, Any]()
    options: dict[str, Any] = {"bias": bias, "activation": activation, "residual_first": residual_first}
    options |= {"layout": layout, "residual": job.residual, "out": job.y}
    exchange = products.exchange_of(pattern)
    if call := _call(launcher_of(pattern).prepare, job.x, weights, **options):
        calls, numbers = job.calls(), [job.first_weight + place] if job.weights else []
        calls.add(call, {call.plan.result: 2, "bias": job.first_bias}, [weights], numbers)
        methods["ksgen"] = _Launches(job, calls)
    if only_kernels or layer.has_stored_type:
        if not methods:
            raise NotPreparedError
        return [methods["ksgen"]]

    def made_by(make: Callable[[Tensor], Tensor]) -> Callable[[Parameters], Tensor]:
        """Function that returns make(weights) at each call; computed only once if the weights are frozen."""
        if job.weights:
            return lambda parameters: make(parameters[1 + place])
        made = derived_for(job.x, layer.weights[place], make)
        return lambda _: made

    def by_pytorch(name: str, make: Callable[[Tensor], Tensor], product: Callable[[Tensor, Tensor], Tensor]) -> None:
        ready = made_by(make)

        def step(x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
            rows = products.natural(x, exchange, layout)
            y = products.exchanged(product(rows, ready(parameters)), exchange, layout)
            return finish(y, parameters[0] if has_bias else None, activation, residual, layout, residual_first)

        methods[name] = step

    a, _, _, d = pattern.shape
    by_pytorch("strided", products.by_matrix, lambda x, matrices: products.multiply(x, matrices, layout))
    by_pytorch("bmm", products.blocks_of, lambda x, blocks: products.permuted_multiply(x, blocks, layout, a, d))
    if job.weights:  # reads the parameters without a permuted copy
        by_pytorch("einsum", lambda raw: raw, lambda x, raw: PRODUCTS["einsum"].multiply(x, raw, layout, pattern))
    elif exchange is None and products.may_be_dense(job.x, pattern):
        dense = made_by(products.to_dense)

        def in_rows(x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
            y = functional.linear(x, dense(parameters), parameters[0] if has_bias else None)
            return finish(y, None, activation, residual, layout, residual_first)

        def in_columns(x: Tensor, residual: Tensor | None, parameters: Parameters) -> Tensor:
            bias = parameters[0] if has_bias else None
            return finish(dense(parameters) @ x, bias, activation, residual, layout, residual_first)

        methods["dense"] = in_rows if layout == "bsf" else in_columns
    shapes, has_residual = [pattern_as_list(pattern)], job.residual is not None
    key = job_of(_kind(job), shapes, job.x.dtype, layout_of_job, activation, has_bias, has_residual)
    timed = {name: partial(method, job.x, job.residual, job.parameters) for name, method in methods.items()}
    return [methods[faster((key, size_of(job.batch), *methods), timed)], *methods.values()]
