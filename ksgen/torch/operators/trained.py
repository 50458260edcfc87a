"""Prepared training steps of a layer on a processor: one call for all launches forward, and one backward.

The first call at a shape takes the usual path, which reports errors. The second call prepares. It times forward and
backward passes of all methods alternately, and later calls take the fastest method. Method "ksgen" uses the prepared
calls, "bmm" PyTorch's products without checks, and "each" the usual path. Weights are read at each call. The backward
call packs the weights of the adjoint factors from the same memory. All other calls take the usual path.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ksgen.errors import DeviceError, KsgenError, PatternError, ToolchainError
from ksgen.launch.checks import y_shape
from ksgen.launch.plan import Call
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Chain
from ksgen.spec.kernel import pattern_as_list
from ksgen.torch.operators import choice, frozen, ops, prepared, replay
from ksgen.torch.operators.backends import is_recomputed
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.choice import faster, has_kernels, is_ready, job_of, launcher, size_of
from ksgen.torch.operators.meanwhile import by_kernels
from ksgen.torch.operators.prepared import SEEN, UNFIT, Bound, NotPreparedError, Scratch, repeat_calls, scratch_memory
from ksgen.torch.operators.products import Exchange, exchange_of, natural

Method = Callable[..., Tensor]  # takes the layer, x, the bias and the weights


@dataclass(eq=False)
class PreparedStep:
    """A prepared step: its method, and its launches if a replay may repeat them."""

    run: Method
    trained: "Trained | None"


_steps: dict[Hashable, Any] = {}  # prepared steps: equal layers share them
_refused: set[Hashable] = set()  # steps whose kernels a compiler could not build; not retried in this generation


def multiply(layer: Any, x: Any, residual: Any) -> Tensor | None:
    """Output of the layer in a training step; None if it has to take the usual path."""
    if residual is not None or not _is_plain_step(x):
        return None
    if layer.has_stored_type or frozen.was_frozen(layer):
        return None
    seen = replay.snapshot(layer) if layer.backend in prepared.BACKENDS else None
    parameters = prepared.parameters_of(layer, x, True)
    if parameters is None or (step := _step_of(layer, x, parameters)) is None:
        return None
    y = None if step.run is _by_the_usual_path else step.run(layer, x, *parameters)
    if seen is not None and step.trained is not None:
        trained, wanted = step.trained, [each is not None and each.requires_grad for each in (x, *parameters)]
        in_python = None if step.run is trained else partial(step.run, layer)
        second = partial(_usual_gradients, layer.layout, trained.exchanges, wanted)
        shapes = [*trained.shapes[:-1], layer._y_shape(x)]
        if not replay.add(layer, seen, x, None, trained, shapes, trained.launches, in_python, second):
            step.trained = None
    return y


def multiply_by(make_layer: Callable[[], Any], x: Any, weights: Tensor) -> Tensor | None:
    """Product of x by weights that other operations compute; None if it has to take the usual path.

    `make_layer` returns a layer with one factor and no bias, whose parameters are not read. Compiled programs never
    call it, so that they do not trace how a layer is created.
    """
    if not _is_plain_step(x):
        return None
    layer, parameters = make_layer(), [None, weights]
    step = _step_of(layer, x, parameters)
    if step is None or step.run is _by_the_usual_path:
        return None
    return step.run(layer, x, *parameters)


def _is_plain_step(x: Any) -> bool:
    if not torch.is_grad_enabled() or not prepared.is_direct(x) or not x.is_cpu:
        return False
    return not ops.is_saved_otherwise()  # a checkpoint's second pass must equal the first


def _step_of(layer: Any, x: Tensor, parameters: list[Tensor | None]) -> PreparedStep | None:
    """Prepared step for these arrays, whose weights are made whole; None if the usual path has to be taken."""
    learned = [each is not None and each.requires_grad for each in parameters]
    if False in learned[1:]:
        return None
    shapes = [None if each is None else each.shape for each in parameters]
    options = prepared.options_of(layer), layer.intermediates, layer._exchanges
    form = x.shape, x.dtype, x.requires_grad, learned[0]
    key = *form, options, *shapes, torch.get_num_threads(), PLANNER.generation
    found = _steps.get(key)
    if found is None:
        if len(_steps) >= choice.REMEMBERED:
            _steps.clear()
        _steps[key] = SEEN
    elif found is SEEN:
        _steps[key] = found = _prepared(layer, x, prepared.make_whole(parameters))
    if type(found) is not PreparedStep:
        return None
    prepared.make_whole(parameters)
    return found


def _prepared(layer: Any, x: Tensor, parameters: Sequence[Any]) -> PreparedStep | str:
    """The fastest method; `UNFIT` if the usual path is fastest or required, `SEEN` if the fastest is not known yet."""
    chain, activations = layer.chain, (layer.between, layer.activation)
    is_usual = layer.precision in (None, dtype_name(x.dtype)) and layer.out_layout is None and layer.fuse != "yes"
    if not is_usual or layer.backend not in prepared.BACKENDS:
        return UNFIT
    if not is_ready(x.device):
        return SEEN
    if x.dtype.is_complex or not has_kernels(x.device) or is_recomputed(layer.intermediates, chain, activations):
        return UNFIT
    try:
        layer._y_shape(x)
        if parameters[0] is not None and parameters[0].shape != (layer.out_features,):
            return UNFIT
        return by_kernels(lambda: _fastest(layer, x, parameters)) or SEEN
    except (KsgenError, NotPreparedError):
        return UNFIT


def _fastest(layer: Any, x: Tensor, parameters: Sequence[Any]) -> PreparedStep | str:
    """Time the methods, and return the fastest; `UNFIT` if that is the usual path."""
    kind = "step" if x.requires_grad else "first step"
    job = job_of(
        kind, prepared.shapes_of(layer), x.dtype, layer.layout, layer.activation, parameters[0] is not None, False,
        layer.between,
    ), size_of(x.numel() // layer.in_features)  # fmt: skip
    methods: dict[str, Method] = {"each": _by_the_usual_path}
    if layer.backend == "auto":
        methods["bmm"] = _by_pytorch
    is_plain = layer.between == layer.activation == "none"
    if is_plain and (job, PLANNER.generation) not in _refused:
        try:
            methods["ksgen"] = Trained(layer, x, parameters)
        except ToolchainError:
            _refused.add((job, PLANNER.generation))
        except (DeviceError, NotPreparedError, PatternError):
            pass
    given = x, *parameters
    timed = {name: partial(ops._step, partial(method, layer), given) for name, method in methods.items()}
    name = faster((*job, *methods), timed)
    trained = methods.get("ksgen")
    if name == "each" and trained is None:
        return UNFIT
    return PreparedStep(methods[name], trained if isinstance(trained, Trained) and trained.launches else None)


def _by_the_usual_path(layer: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
    y: Tensor = layer._multiply(x, list(weights), bias, None, layer.activation)
    return y


def _by_pytorch(layer: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
    layout, last = layer.layout, len(weights) - 1
    is_matrix, exchanges = x.dim() == 2, layer._exchanges or (None,) * len(weights)
    rows = x if is_matrix else layer._as_matrix(x)
    for number, (each, exchange) in enumerate(zip(weights, exchanges, strict=True)):
        others = (bias, None, layout, layer.activation) if number == last else (None, None, layout, layer.between)
        rows = ops.multiply_by_pytorch(rows, each, *others, exchange)
    return rows if is_matrix else ops.shaped(rows, layer._y_shape(x), layer.activation)


class Trained:
    """`Method` of a layer without activations: one call for all launches forward, and one backward.

    Kernels exchange features between factors: forward, a factor stores them as the next one reads them. Backward, that
    factor's adjoint stores them as the first one's launches read them. Only the gradient of an exchanged y is copied.
    It holds no array.
    """

    def __init__(self, layer: Any, x: Tensor, parameters: Sequence[Any]) -> None:
        self.layout, self.exchanges = layer.layout, layer._exchanges or (None,) * len(layer.chain)
        *before, last = layer.chain
        self.factors = [launcher(*pattern_as_list(each)) for each in layer.chain]
        self._adjoints = Chain((*before, replace(last, store=""))).transpose.factors[::-1]
        rows = layer._as_matrix(x.detach()).contiguous()
        batch = rows.shape[0 if self.layout == "bsf" else 1]
        with torch.no_grad():
            self._outputs = [rows.new_empty(y_shape(each.pattern, self.layout, batch)) for each in self.factors]
            self._forward = _Launches(self._calls_forward(rows, parameters))
            self._backward = _Launches(self._calls_backward(rows, parameters, x.requires_grad))
        # the backward launches read the gradient of y in the order (i, k, j): this copies it
        self._of_y = exchange_of(last.transpose)
        # both directions as a replay launches them, which copies no gradient
        is_copied = self._of_y is not None and self._of_y.inputs is not None
        self.launches = [] if is_copied else [self._forward.launches, self._backward.launches]
        self.shapes = [each.shape for each in self._outputs]
        self._outputs = []  # only the preparation needs arrays

    def __call__(self, layer: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        is_matrix = x.dim() == 2
        rows = x if is_matrix else layer._as_matrix(x)
        y: Tensor = _TrainedProduct.apply(self, rows.contiguous(), bias, *weights)
        return y if is_matrix else ops.shaped(y, layer._y_shape(x), layer.activation)

    def _bound(self, prepare: Callable[..., Call | None], *arguments: Any, **options: Any) -> Call:
        call = prepare(*arguments, **options)
        if call is None or not call.plan.device.shares_host:
            raise NotPreparedError
        return call

    def _calls_forward(self, x: Tensor, parameters: Sequence[Any]) -> "_Calls":
        """Prepare the calls. Arrays are numbered: x, the bias, the weights of each factor, each factor's output."""
        bias, *weights = parameters
        calls, last = _Calls(2 + 2 * len(weights)), len(weights) - 1
        for number, (factor, each, y) in enumerate(zip(self.factors, weights, self._outputs, strict=True)):
            options: dict[str, Any] = {"layout": self.layout, "out": y, "bias": bias if number == last else None}
            call = self._bound(factor.prepare, x, each, **options)
            if number < last:
                call.keep_output()
            y_number = 2 + len(weights) + number
            places = {"x": y_number - 1 if number else 0, "bias": 1, call.plan.result: y_number}
            calls.add(Bound(call, (), [2 + number]), places)
            x = y
        return calls

    def _calls_backward(self, x: Tensor, parameters: Sequence[Any], wants_x: bool) -> "_Calls":
        """Prepare the calls, with arrays of the same shape in place of the gradients of each factor's X and Y.

        Arrays are numbered: each factor's input, the weights, the gradients of y, of the weights and of x.
        """
        _, *weights = parameters
        inputs, count = [x, *self._outputs[:-1]], len(weights)
        calls, y_gradient, y_number = _Calls(3 * count + 2), self._outputs[-1], 2 * count
        for number in reversed(range(count)):
            pattern = replace(self.factors[number].pattern, store="")
            gradient = x.new_empty(pattern.shape)
            factor = launcher(*pattern_as_list(pattern))
            call = factor._gradient_call(inputs[number], y_gradient, self.layout, gradient, None, None)
            if not call.plan.device.shares_host:
                raise NotPreparedError
            calls.add(Bound(call, (), ()), {"x": number, "grad_y": y_number, call.plan.result: 2 * count + 1 + number})
            if number or wants_x:
                adjoint = self._adjoints[number]
                call = self._bound(
                    launcher(*pattern_as_list(adjoint)).prepare, y_gradient, x.new_empty(adjoint.shape),
                    layout=self.layout, out=inputs[number],
                )  # fmt: skip
                if call.plan.adjoint_handle is None:
                    raise NotPreparedError
                if number:
                    call.keep_output()
                x_number = calls.scratch.add(inputs[number].nbytes) if number else 3 * count + 1
                calls.add(Bound(call, (), [count + number], True), {"x": y_number, call.plan.result: x_number})
                y_gradient, y_number = inputs[number], x_number
        return calls

    def forward(self, x: Tensor, bias: Tensor | None, weights: Sequence[Tensor]) -> list[Tensor]:
        """Output of each factor."""
        ys = [x.new_empty(*shape) for shape in self.shapes]
        self._forward([x, bias, *weights, *ys], x)
        return ys

    def backward(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], y_gradient: Tensor, wants_x: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Gradients of x and of the weights."""
        found = [each.new_empty(*each.shape) for each in weights]
        of_x = inputs[0].new_empty(*inputs[0].shape) if wants_x else None
        y_gradient = natural(y_gradient, self._of_y, self.layout).contiguous()
        self._backward([*inputs, *weights, y_gradient, *found, of_x], y_gradient)
        return of_x, found


class _Calls:
    """Prepared calls of one direction, the array numbers of their operands, and their scratch memory."""

    def __init__(self, arrays: int) -> None:
        self.bound, self.places, self.scratch = list[Bound](), list[Mapping[str, int]](), Scratch(arrays)

    def add(self, bound: Bound, places: Mapping[str, int]) -> None:
        self.bound.append(bound)
        self.places.append(places)


class _Launches:
    """All launches of one direction by one call."""

    def __init__(self, calls: _Calls) -> None:
        self._launch = repeat_calls(calls.bound, calls.places, calls.scratch)
        *self._begins, self._bytes = calls.scratch.offsets()

    @property
    def launches(self) -> replay.Launches:
        return replay.Launches(self._launch, self._begins, self._bytes)

    def __call__(self, arrays: Sequence[Tensor | None], like: Tensor) -> None:
        given = [0 if each is None else each.data_ptr() for each in arrays]
        memory = scratch_memory(like, self._bytes)
        begin = memory.data_ptr()
        self._launch([*given, *[begin + each for each in self._begins]])


class _TrainedProduct(torch.autograd.Function):
    """Product of all factors, whose intermediates are stored for the backward pass."""

    @staticmethod
    def forward(ctx: Any, trained: Trained, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        *intermediates, y = trained.forward(x, bias, weights)
        ctx.trained, ctx.threads = trained, torch.get_num_threads()
        ctx.save_for_backward(x, bias, *weights, *intermediates)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        trained: Trained = ctx.trained
        x, bias, *others = ctx.saved_tensors
        count = len(trained.factors)
        weights, inputs = others[:count], [x, *others[count:]]
        wants_x, wants_bias, *_ = wanted = ctx.needs_input_grad[1:]
        is_usual = prepared.is_direct(gradient) and torch.get_num_threads() == ctx.threads
        if torch.is_grad_enabled() or not is_usual:
            return None, *_by_autograd(trained.layout, trained.exchanges, (x, bias, *weights), gradient, wanted)
        of_bias = gradient.sum(0 if trained.layout == "bsf" else 1) if wants_bias else None
        of_x, of_weights = trained.backward(inputs, weights, gradient, wants_x)
        return None, of_x, of_bias, *of_weights


def _usual_gradients(
    layout: str,
    exchanges: Sequence[Exchange | None],
    wanted: Sequence[bool],
    gradient: Tensor,
    x: Tensor,
    *others: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of x, the bias and the weights for a replay, whose x and y have any number of dimensions."""
    rows, of_rows = (_rows(each, layout) for each in (x, gradient))
    of_x, *found = _by_autograd(layout, exchanges, (rows, *others), of_rows, wanted)
    return [None if of_x is None else of_x.reshape(x.shape), *found]


def _rows(tensor: Tensor, layout: str) -> Tensor:
    """Reshape to a matrix, unlike `ChainLayer._as_matrix` also a batch of gradients, which PyTorch cannot flatten."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(-1, tensor.shape[-1]) if layout == "bsf" else tensor.reshape(tensor.shape[0], -1)


def _by_autograd(
    layout: str,
    exchanges: Sequence[Exchange | None],
    given: Sequence[Tensor | None],
    gradient: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients by PyTorch's own operators: for second derivatives, batches of gradients and other thread counts."""
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        if not is_recorded:
            pairs = zip(given, wanted, strict=True)
            given = [None if each is None else each.detach().requires_grad_(wants) for each, wants in pairs]
        y, bias, *weights = given
        for number, (each, exchange) in enumerate(zip(weights, exchanges, strict=True), 1):
            added = bias if number == len(weights) else None
            y = ops.multiply_by_pytorch(y, each, added, None, layout, "none", exchange)
        sources = [each for each, wants in zip(given, wanted, strict=True) if wants]
        found = iter(torch.autograd.grad(y, sources, gradient, create_graph=is_recorded))
    return [next(found) if wants else None for wants in wanted]
