"""Prepared training steps of a layer on a processor: one call for all launches forward, and one backward.

The first call at a shape takes the usual path, which reports errors. The second call prepares the step; under
deterministic algorithms, the first one does. It times forward and backward passes of all methods alternately, and later
calls use the fastest method:

- "ksgen": the prepared calls.
- "swapped": the prepared calls, with the last factor's operands exchanged (`Factor.is_swapped`).
- "bmm": PyTorch's products without checks.
- "each": the usual path.

Weights are read at each call. The backward call packs the weights of the adjoint factors from the same memory. Calls
that no step supports take the usual path. Of tied weights, a step receives the slices, and most factors multiply by
these directly (`ksgen.torch.operators.factors`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ksgen.build.background import progress, undisturbed
from ksgen.errors import DeviceError, KsgenError, PatternError, ToolchainError
from ksgen.launch.checks import y_shape
from ksgen.launch.memory import new_tensor
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Chain
from ksgen.torch.operators import choice, frozen, ops, prepared, replay
from ksgen.torch.operators.backends import is_recomputed
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.choice import chain_launcher, faster, has_kernels, is_ready, job_of, launcher_of, size_of
from ksgen.torch.operators.factors import Factor, factors_of, swapped, ties_of, views_of
from ksgen.torch.operators.launches import Calls, Launches
from ksgen.torch.operators.meanwhile import by_kernels
from ksgen.torch.operators.prepared import UNFIT, NotPreparedError, Unprepared
from ksgen.torch.operators.products import ACTIVATIONS, exchange_of, order_of
from ksgen.torch.operators.replay import Replaceable

Method = Callable[..., Tensor]  # takes the layer, x, the residual, the bias and the weights


# prepared steps, each a `Replaceable` that runs a `Method`: equal layers share them
_steps: dict[Hashable, Any] = {}
# jobs and methods whose kernels no compiler could build; not retried in this generation of plans
_refused: set[Hashable] = set()


def multiply(layer: Any, x: Any, residual: Any) -> Tensor | None:
    """Output of the layer in a training step; None if it has to take the usual path."""
    if not _is_plain_step(x, residual):
        return None
    if layer.has_stored_type or frozen.was_frozen(layer):
        return None
    seen = replay.snapshot(layer) if layer.backend in prepared.BACKENDS else None
    parameters = prepared.parameters_of(layer, x, True)
    if parameters is None or (call := _step_of(layer, x, residual, parameters)) is None:
        return None
    y = None if call.step is _by_the_usual_path else undisturbed(call.step, layer, x, residual, *parameters)
    if seen is not None and (kernels := call.kernels) is not None:
        wanted = [each is not None and each.requires_grad for each in (x, *parameters[1:])]
        usual = None if call.is_by_kernels else lambda x, *own: call.step(layer, x, residual, *own)
        second = partial(_usual_gradients, kernels, wanted)
        seen = seen.repeating([each.whole for each in kernels.factors])
        replay.add(layer, seen, x, residual, call, kernels, layer._y_shape(x), usual, second)
    return y


def multiply_by(make_layer: Callable[[], Any], x: Any, weights: Tensor) -> Tensor | None:
    """Product of x by weights that other operations compute; None if it has to take the usual path.

    `make_layer` returns a layer with one factor and no bias, whose parameters are not read. It is not called while
    `torch.compile` traces, so that no program contains the creation of a layer.
    """
    if not _is_plain_step(x):
        return None
    layer, parameters = make_layer(), [None, weights]
    call = _step_of(layer, x, None, parameters)
    if call is None or call.step is _by_the_usual_path:
        return None
    return undisturbed(call.step, layer, x, None, *parameters)


def _is_plain_step(x: Any, residual: Any = None) -> bool:
    if not torch.is_grad_enabled() or not prepared.is_direct(x, residual) or not x.is_cpu:
        return False
    if residual is not None and not residual.is_cpu:
        return False
    return not ops.is_saved_otherwise()  # a checkpoint's second pass must equal the first


def _step_of(layer: Any, x: Tensor, residual: Tensor | None, parameters: list[Tensor | None]) -> Replaceable | None:
    """Prepared step for these arrays; None if the usual path has to be taken.

    In `parameters`, views that repeat a slice are replaced by copies.
    """
    learned = [each is not None and each.requires_grad for each in parameters]
    if False in learned[1:]:
        return None
    shapes = [None if each is None else each.shape for each in parameters]
    options = prepared.options_of(layer), layer.intermediates, layer._exchanges, ties_of(layer)
    form = x.shape, x.dtype, x.requires_grad, learned[0], residual is not None and (residual.shape, residual.dtype)
    key = *form, options, *shapes, torch.get_num_threads(), PLANNER.generation
    found = _steps.get(key)
    if found is None or type(found) is Unprepared:
        prepare = partial(_prepared, layer, x, residual, parameters)
        found = prepared.state_of(_steps, key, choice.REMEMBERED, layer, x, prepare)
    if type(found) is not Replaceable:
        return None
    prepared.make_whole(parameters)
    return found


def _prepared(
    layer: Any, x: Tensor, residual: Tensor | None, parameters: Sequence[Any]
) -> Replaceable | Unprepared | str:
    """Step with the fastest method; `UNFIT` if the usual path is required or fastest, `Unprepared` if not known yet."""
    seen = Unprepared(progress())
    chain, activations = layer.chain, (layer.between, layer.activation)
    is_usual = layer.precision in (None, dtype_name(x.dtype)) and layer.out_layout is None and layer.fuse != "yes"
    if not is_usual or layer.backend not in prepared.BACKENDS:
        return UNFIT
    if not is_ready(x.device):
        return seen
    if x.dtype.is_complex or not has_kernels(x.device) or is_recomputed(layer.intermediates, chain, activations):
        return UNFIT
    try:
        layer._checked_y_shape(x, residual)
        if residual is not None and residual.dtype != x.dtype:
            return UNFIT
        if parameters[0] is not None and parameters[0].shape != (layer.out_features,):
            return UNFIT
        whole = prepared.make_whole([*parameters])
        return by_kernels(lambda: _fastest(layer, x, residual, whole)) or seen
    except (KsgenError, NotPreparedError):
        return UNFIT


def _fastest(layer: Any, x: Tensor, residual: Tensor | None, parameters: Sequence[Any]) -> Replaceable | str:
    """Time the methods, and return a step with the fastest; `UNFIT` if only the usual path can be used."""
    kind = "step" if x.requires_grad else "first step"
    job: tuple[Hashable, ...] = job_of(
        kind, prepared.shapes_of(layer), x.dtype, layer.layout, layer.activation, parameters[0] is not None,
        residual is not None, layer.between,
    ), size_of(x.numel() // layer.in_features), *ties_of(layer)  # fmt: skip
    methods: dict[str, Method] = {"each": _by_the_usual_path}
    factors = _factors(layer, x, residual, parameters[0])
    if layer.backend == "auto":
        methods["bmm"] = partial(_by_pytorch, factors)
    is_plain = layer.between == layer.activation == "none"
    lasts = {"ksgen": None, "swapped": swapped(layer.chain, factors[-1], parameters[0] is not None)}
    for each, last in lasts.items():
        if not is_plain or (last is None and each == "swapped") or (job, each, PLANNER.generation) in _refused:
            continue
        try:
            methods[each] = Trained(layer, x, residual, parameters, last)
        except ToolchainError:
            _refused.add((job, each, PLANNER.generation))
        except (DeviceError, NotPreparedError, PatternError):
            pass
    given = x, residual, *parameters
    timed = {name: partial(ops._step, partial(method, layer), given) for name, method in methods.items()}
    name = faster((*job, *methods), timed)
    step = Replaceable([methods[name], *methods.values()], Trained)
    return UNFIT if name == "each" and step.kernels is None else step


def _by_the_usual_path(layer: Any, x: Tensor, residual: Tensor | None, bias: Tensor | None, *weights: Tensor) -> Tensor:
    ties = ties_of(layer)
    whole = prepared.make_whole(views_of(weights, ties)) if ties else list(weights)
    return layer._multiply(x, whole, bias, residual, layer.activation)


def _by_pytorch(
    factors: Sequence[Factor], layer: Any, x: Tensor, residual: Tensor | None, bias: Tensor | None, *weights: Tensor
) -> Tensor:
    is_matrix = x.dim() == 2
    rows = x if is_matrix else layer._as_matrix(x)
    y = _by_operators(layer.layout, factors, (rows, bias, *weights), (layer.between, layer.activation))
    y = y if is_matrix else ops.shaped(y, layer._y_shape(x), layer.activation)
    return y if residual is None else y + residual


def _factors(layer: Any, x: Tensor, residual: Tensor | None, bias: Tensor | None) -> tuple[Factor, ...]:
    batch = x.numel() // layer.in_features
    return factors_of(layer.chain, ties_of(layer), layer.layout, batch, (bias is not None, residual is not None))


def _by_operators(
    layout: str, factors: Sequence[Factor], given: Sequence[Any], activations: tuple[str, str] = ("none", "none")
) -> Tensor:
    """Multiply by PyTorch's own operators, which autograd differentiates.

    `given` holds x as a matrix, the bias and the weights. `activations` are the one between factors, and the one after
    the last factor.
    """
    (x, bias, *weights), last = given, len(factors) - 1
    for number, (factor, each) in enumerate(zip(factors, weights, strict=True)):
        added, activation = (bias, activations[1]) if number == last else (None, activations[0])
        whole = factor.weights(each)
        if factor.is_folded:  # with a bias, x has a single row, and the bias has the shape of the folded y
            product = ops.multiply_by_pytorch(factor.x(x), whole, None, None, factor.layout, "none")
            x = ACTIVATIONS[activation].apply(product if added is None else product + factor.y(added))
        else:
            x = ops.multiply_by_pytorch(factor.x(x), whole, added, None, layout, activation, factor.exchange)
    if not factors[-1].is_folded:
        return x
    batch = given[0].shape[0 if layout == "bsf" else 1]
    return ops.shaped(x, (batch, -1) if layout == "bsf" else (-1, batch), activation)


class Trained:
    """`Method` of a layer without activations: one call for all launches forward, and one backward.

    Kernels exchange features between two factors. Forward, the first factor stores its outputs in the order in which
    the second one reads them. Backward, the adjoint of the second one stores their gradients in the order in which the
    first one's launches read them. Only the gradient of an exchanged y is copied. An instance holds no array.
    """

    def __init__(
        self, layer: Any, x: Tensor, residual: Tensor | None, parameters: Sequence[Any], last: Factor | None = None
    ) -> None:
        """Prepare the launches. `last` is the swapped last factor; None: the operands are not exchanged."""
        self.layout, self.factors = layer.layout, _factors(layer, x, residual, parameters[0])
        self._has_residual = residual is not None
        self._launched = self.factors if last is None else (*self.factors[:-1], last)
        *before, stored = layer.chain
        natural = Chain((*before, replace(stored, store="")))
        self._adjoints = [
            each.pattern.transpose if each.is_folded or each.is_swapped else adjoint
            for each, adjoint in zip(self._launched, natural.transpose.factors[::-1], strict=True)
        ]
        # shape and axes of a copy of y's gradient, if the backward launches read it in another order; else empty
        of_y, batch = exchange_of(stored.transpose), x.numel() // layer.in_features
        self.order = order_of(of_y and of_y.inputs, self.layout, batch)
        if last is not None:
            self.order = (batch, stored.d, stored.b), (2, 0, 1)
        # whether the backward launches also write the bias's gradient: only if they read y's gradient without a copy
        learns_bias = parameters[0] is not None and parameters[0].requires_grad
        self.sums_bias = learns_bias and not self.order[1] and not self.factors[-1].is_folded
        rows = layer._as_matrix(x.detach()).contiguous()
        with torch.no_grad():
            pairs = zip(self.factors, parameters[1:], strict=True)
            weights = [given.new_empty(each.whole) if each.whole else given for each, given in pairs]
            self._given = [each.shape for each in (rows, *weights)]
            self._outputs = [rows.new_empty(y_shape(each, self.layout, batch)) for each in layer.chain]
            # of both directions
            self.launches = (
                Launches(self._calls_forward(rows, parameters[0], weights)),
                Launches(self._calls_backward(rows, parameters[0], weights, x.requires_grad)),
            )
        self.shapes = [each.shape for each in self._outputs]
        self._outputs = []  # arrays are needed only until here

    def __call__(self, layer: Any, x: Tensor, residual: Tensor | None, bias: Tensor | None, *weights: Tensor) -> Tensor:
        is_matrix = x.dim() == 2
        rows = x if is_matrix else layer._as_matrix(x)
        whole = [each.weights(given) for each, given in zip(self.factors, weights, strict=True)]
        added = None if residual is None else layer._as_matrix(residual).contiguous()
        y: Tensor = _TrainedProduct.apply(self, rows.contiguous(), bias, added, *whole)
        return y if is_matrix else ops.shaped(y, layer._y_shape(x), layer.activation)

    def _calls_forward(self, x: Tensor, bias: Tensor | None, weights: Sequence[Tensor]) -> Calls:
        """Prepare the forward calls.

        Arrays are numbered in this order: x, the bias, the weights of each factor, each factor's output, the residual.
        """
        count = len(weights)
        calls, x_number = Calls(2 + 2 * count + self._has_residual), 0
        for number, (factor, each, y) in enumerate(zip(self._launched, weights, self._outputs, strict=True)):
            first, second = _operands(factor, (x, x_number), (each, 2 + number))
            options, places = dict[str, Any](layout=factor.layout, out=factor.out(y)), {"x": first.number}
            is_last, y_number = number + 1 == count, 2 + count + number
            if is_last and self._has_residual:
                options["residual"], places["residual"] = factor.out(torch.empty_like(y)), 2 + 2 * count
            if is_last and bias is not None:
                name = "residual" if factor.is_folded else "bias"
                options[name], places[name] = factor.out(bias) if factor.is_folded else bias, 1
            if factor.is_swapped:
                chain = chain_launcher((factor.pattern.shape,), "none", "yes")
                call = chain.prepare(first.array, [second.array], out_layout="bsl", **options)
            else:
                call = launcher_of(factor.pattern).prepare(first.array, second.array, **options)
            if call is None:
                raise NotPreparedError
            if not is_last:
                call.keep_output()
            calls.add(call, places | {call.plan.result: y_number}, numbers=[second.number])
            x, x_number = y, y_number
        return calls

    def _calls_backward(self, x: Tensor, bias: Tensor | None, weights: Sequence[Tensor], wants_x: bool) -> Calls:
        """Prepare the backward calls. Each factor's X and Y stand for their gradients, which have the same shapes.

        Arrays are numbered in this order: each factor's input, its weights, and the gradients of y, of the weights, of
        x and of the bias.
        """
        inputs, count = [x, *self._outputs[:-1]], len(weights)
        calls, y_gradient, y_number = Calls(3 * count + 3), self._outputs[-1], 2 * count
        for number, factor in reversed(list(enumerate(self._launched))):
            x_number = calls.reserve(inputs[number].nbytes) if number else 3 * count + 1 if wants_x else None
            of_x = inputs[number], number, x_number
            of_weights = weights[number], count + number, 2 * count + 1 + number
            first, second = _operands(factor, of_x, of_weights)
            of_y, layout = factor.y(y_gradient), factor.layout
            if second.result is not None:
                multiply, like = launcher_of(replace(factor.pattern, store="")), torch.empty_like(second.array)
                of_bias = torch.empty_like(bias) if self.sums_bias and number + 1 == count else None
                call = multiply._gradient_call(first.array, of_y, layout, like, None, None, of_bias)
                places = {"x": first.number, "grad_y": y_number, call.plan.result: second.result}
                if of_bias is not None:
                    places["bias"] = 3 * count + 2
                calls.add(call, places)
            if first.result is not None:
                adjoint = self._adjoints[number]
                stand_in, out = x.new_empty(adjoint.shape), torch.empty_like(first.array)
                call = launcher_of(adjoint).prepare(of_y, stand_in, layout=layout, out=out)
                if call is None or call.plan.adjoint_handle is None:
                    raise NotPreparedError
                if number and not factor.is_swapped:
                    call.keep_output()
                places = {"x": y_number, call.plan.result: first.result}
                calls.add(call, places, numbers=[second.number], are_adjoint=True)
            y_gradient, y_number = inputs[number], x_number or 0
        return calls

    def reads(self, given: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether the backward launches can read x and the weights.

        They cannot if a tensor's `data` was replaced by other memory since. PyTorch does not count that as a write.
        """
        return all(
            each.is_cpu and each.dtype == dtype and each.shape == shape and each.is_contiguous()
            for each, shape in zip(given, self._given, strict=True)
        )


class _Operand(NamedTuple):
    """Array of a call, its number, and the number of its gradient (None if that is not wanted)."""

    array: Tensor
    number: int
    result: int | None = None


def _operands(factor: Factor, x: tuple[Any, ...], weights: tuple[Any, ...]) -> tuple[_Operand, _Operand]:
    """Operands that a factor's kernels take as x and as the weights: exchanged if the factor is swapped."""
    first, second = _Operand(*x), _Operand(*weights)
    if factor.is_swapped:
        first, second = second, first._replace(array=first.array.reshape(factor.pattern.shape))
    return first._replace(array=factor.x(first.array)), second


def _addresses(arrays: Sequence[Tensor | None]) -> list[int]:
    return [0 if each is None else each.data_ptr() for each in arrays]


class _TrainedProduct(torch.autograd.Function):
    """Product of all factors by prepared launches. It saves the intermediates for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, trained: Trained, x: Tensor, bias: Tensor | None, residual: Tensor | None, *weights: Tensor
    ) -> Tensor:
        ys, added = [new_tensor(x, *shape) for shape in trained.shapes], [] if residual is None else [residual]
        trained.launches[0].run(_addresses([x, bias, *weights, *ys, *added]), x)
        *intermediates, y = ys
        ctx.trained, ctx.threads = trained, torch.get_num_threads()
        ctx.save_for_backward(x, *weights, *intermediates)  # not the bias: like `nn.Linear`'s, it may be written to
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        trained: Trained = ctx.trained
        x, *others = ctx.saved_tensors
        count, features = len(trained.factors), 1 if trained.layout == "bsf" else 0
        weights, inputs = others[:count], [x, *others[count:]]
        _, wants_x, wants_bias, wants_residual, *wanted = ctx.needs_input_grad
        of_bias, of_residual = None, gradient if wants_residual else None
        is_usual = prepared.is_direct(gradient) and torch.get_num_threads() == ctx.threads
        is_usual = is_usual and trained.reads((x, *weights), gradient.dtype)
        if torch.is_grad_enabled() or not is_usual:
            of_x, *of_weights = _by_autograd(trained, (x, *weights), gradient, [wants_x, *wanted])
        else:
            of_weights = [new_tensor(each, *each.shape) for each in weights]
            of_x = new_tensor(x, *x.shape) if wants_x else None
            of_bias = gradient.new_empty(gradient.shape[features]) if trained.sums_bias else None
            digits, axes = trained.order
            in_order = (gradient.reshape(digits).permute(axes) if axes else gradient).contiguous()
            addresses = _addresses([*inputs, *weights, in_order, *of_weights, of_x, of_bias])
            undisturbed(trained.launches[1].run, addresses, in_order)
        if wants_bias and of_bias is None:
            of_bias = gradient.sum(1 - features)
        return None, of_x, of_bias, of_residual, *of_weights


def _usual_gradients(
    trained: Trained, wanted: Sequence[bool], gradient: Tensor, x: Tensor, *weights: Tensor
) -> list[Tensor | None]:
    """Gradients of x and the weights by PyTorch's operators, for a replay.

    x and y may have any number of dimensions.
    """
    rows, of_rows = (_rows(each, trained.layout) for each in (x, gradient))
    of_x, *found = _by_autograd(trained, (rows, *weights), of_rows, wanted)
    return [None if of_x is None else of_x.reshape(x.shape), *found]


def _rows(tensor: Tensor, layout: str) -> Tensor:
    """Reshape to a matrix. Unlike `ChainLayer._as_matrix`, this supports batched gradients (`is_grads_batched`)."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(-1, tensor.shape[-1]) if layout == "bsf" else tensor.reshape(tensor.shape[0], -1)


def _by_autograd(
    trained: Trained, given: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients by PyTorch's own operators, for second derivatives, batched gradients and other numbers of threads.

    `given` holds x and the weights. A bias would not change these gradients.
    """
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        pairs = zip(given, wanted, strict=True)
        if is_recorded:  # as views, because x may depend on the weights, and because hooks must run once
            given = [each.view_as(each) for each in given]
        else:
            given = [each.detach().requires_grad_(wants) for each, wants in pairs]
        y = _by_operators(trained.layout, trained.factors, (given[0], None, *given[1:]))
        sources = [each for each, wants in zip(given, wanted, strict=True) if wants]
        found = iter(torch.autograd.grad(y, sources, gradient, create_graph=is_recorded))
    return [next(found) if wants else None for wants in wanted]
