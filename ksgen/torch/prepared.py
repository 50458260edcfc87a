"""Calls of a frozen layer on a processor, at shapes that it met before: checked, packed and chosen once, then little but the product.

The first call at a shape goes the usual way, which refuses what is wrong. The second prepares; the ways are timed beside each other.
Whatever is not plain, or not as it was, goes the usual way.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ksgen.errors import DeviceError, KsgenError, ToolchainError
from ksgen.launch import checks
from ksgen.launch.call import Call, Elsewhere
from ksgen.launch.planner import PLANNER
from ksgen.launch.weights import look_of
from ksgen.launcher import Weights
from ksgen.spec.kernel import layout_word
from ksgen.torch import frozen, products
from ksgen.torch.checks import dtype_name
from ksgen.torch.choice import chain_launcher, faster, has_kernels, job_of, launcher, size_of
from ksgen.torch.epilogue import finish
from ksgen.torch.frozen import made_of
from ksgen.torch.operands import operand
from ksgen.torch.ops import is_transformed, turned_at

BACKENDS = ("auto", "ksgen")  # that prepare
TRIED_COLUMNS = 64  # of the batch for each thread, from which one launch is timed in batch-size-last, where launchers take none by rule
MOST_CALLS = 256  # that a layer keeps

Step = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]  # of x as a matrix, bias and residual
Turn = Callable[[Tensor], Tensor]  # of what lies between, into the other layout where it changes
Run = Callable[[nn.Module, Tensor, Tensor | None], Tensor | None]  # of the layer, which nothing here may keep, x and residual as given


class Own(NamedTuple):
    """A launcher's prepared call, and the weights that it was packed from."""

    call: Call
    weights: Sequence[Weights]


class UnfitError(Exception):
    """No prepared call serves this: the usual way refuses it, or does it."""


def serve(layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """The layer's output by a call that is prepared; None where it has to go the usual way."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not lies_here(x) or not (residual is None or lies_here(residual)):
        return None
    calls = frozen.calls_of(layer, layer._modules["weights"]._parameters)
    if calls is None or torch.is_autocast_enabled("cpu") or is_transformed():
        return None
    if not begins_well(x) or not (residual is None or begins_well(residual)):
        return None
    options = (layer.layout, layer.out_layout, layer.activation, layer.between, layer.fuse, layer.precision, layer.backend)
    key = (x.shape, x.dtype, residual is None, *options, torch.get_num_threads(), PLANNER.generation)
    run = calls.get(key)
    if run is None:
        if len(calls) >= MOST_CALLS:
            calls.clear()
        calls[key] = _met
        return None
    if run is _met:
        run = calls[key] = _prepared(layer, x, residual)
    return run(layer, x, residual)


def lies_here(tensor: Tensor) -> bool:
    """Whether its values lie in a processor's memory, as they are."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)


def begins_well(tensor: Tensor) -> bool:
    """Not where it is empty, its memory was given up, or begins within an element, as memory of others may."""
    at = tensor.data_ptr()
    return bool(at) and at % tensor.element_size() == 0


def _met(layer: nn.Module, x: Tensor, residual: Tensor | None) -> None:
    """A shape that was met once."""


def _usual(layer: nn.Module, x: Tensor, residual: Tensor | None) -> None:
    """For what no prepared call serves."""


def _prepared(layer: Any, x: Tensor, residual: Tensor | None) -> Run:
    try:
        found = prepare(layer, x, residual)
    except UnfitError:
        return _usual
    return _met if found is None else found.run


def prepare(layer: Any, x: Tensor, residual: Tensor | None) -> "Prepared | None":
    """The call for such tensors; None where this residual is refused, `UnfitError` where no call serves the layer as it is."""
    bias = layer._parameters.get("bias")
    if layer.bias is not bias or layer.backend not in BACKENDS or layer.precision not in (None, dtype_name(x.dtype)):
        raise UnfitError
    if any(each.dtype != x.dtype for each in layer.weights):
        raise UnfitError
    if bias is not None:
        is_usual = type(bias) is nn.Parameter and bias.is_cpu and bias.is_contiguous() and bias.shape == (layer.out_features,)
        if not is_usual or bias.dtype != x.dtype:
            raise UnfitError
    if not has_kernels(x.device):
        raise UnfitError
    y_shape = tuple(layer._y_shape(x))  # which refuses other features
    if residual is not None and not _is_like(residual, x, y_shape):
        return None
    return Prepared(layer, x, bias, residual, y_shape)


def _is_like(residual: Tensor, x: Tensor, y_shape: tuple[int, ...]) -> bool:
    return residual.dtype == x.dtype and tuple(residual.shape) == y_shape


class Prepared:
    """activation(X K^T + bias) + residual with the weights of a frozen layer, by the fastest way for X of one shape."""

    def __init__(self, layer: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, y_shape: tuple[int, ...]) -> None:
        self._bias, self._look, self._y_shape = bias, None if bias is None else look_of(bias), y_shape
        rows, added = (
            layer._as_matrix(x.contiguous()),
            None if residual is None else layer._as_matrix(residual.contiguous(), layer.y_layout),
        )
        self._x_shape, self._added_shape = rows.shape, None if added is None else added.shape
        ways = _Ways(layer.layout, layer.out_layout, layer.backend == "ksgen", rows)
        self._step = ways.layer(list(layer.weights), rows, bias, added, layer.activation, layer.between, layer.fuse)

    def run(self, layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """The layer's output; None where bias or residual are not of the kind that it was prepared for."""
        if not self.holds(layer):
            return None
        if residual is not None:
            if not _is_like(residual, x, self._y_shape):
                return None
            residual = as_rows(residual, self._added_shape)
        y = self._step(as_rows(x, self._x_shape), self._bias, residual)
        return y if y.dim() == len(self._y_shape) else y.view(self._y_shape)

    def holds(self, layer: nn.Module) -> bool:
        """Whether the layer's bias is the one that it was prepared for, and lies where it did."""
        bias = self._bias
        return layer._parameters.get("bias") is bias and (bias is None or look_of(bias) == self._look)


def as_rows(tensor: Tensor, shape: torch.Size | None) -> Tensor:
    """A matrix of that shape: the tensor itself where it is one, as each operator of PyTorch's takes a microsecond."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor if tensor.shape == shape else tensor.view(shape)


class _Ways:
    """The ways to multiply X of one size, of which the fastest is taken. What they become keeps weights, and no other array."""

    def __init__(self, layout: str, out_layout: str | None, only_kernels: bool, x: Tensor) -> None:
        self._layout, self._out_layout = layout, out_layout
        self._only_kernels, self._batch = only_kernels, x.shape[0 if layout == "bsf" else 1]

    def layer(
        self,
        weights: list[Tensor],
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str,
        between_factors: str,
        fuse: str,
    ) -> Step:
        """All factors: in one launch, or one by one."""
        is_tried = (
            fuse == "auto" and self._layout == "bsl" and not self._only_kernels and self._batch >= TRIED_COLUMNS * torch.get_num_threads()
        )
        own = chain_launcher(tuple(tuple(each.shape) for each in weights), between_factors, "yes" if is_tried else fuse)
        ways: dict[str, Step] = {}
        is_whole = len(weights) > 1 or self._out_layout is not None  # else it is one product
        prepare, call = partial(own.prepare, out_layout=self._out_layout), None
        if is_whole and fuse != "no":
            try:
                call = call_of(prepare, x, weights, bias, residual, self._layout, activation, is_chain=True)
            except UnfitError:
                if not is_tried:  # else one launch cannot be had
                    raise
        if call:
            ways["ksgen"] = in_kernels([call], [checks.y_shape(own.chain[-1], self._out_layout or self._layout, self._batch)])
        if is_whole and fuse == "yes" and not ways:
            raise UnfitError
        if ways and (fuse == "yes" or self._only_kernels):
            return ways["ksgen"]
        steps, calls, between = list[tuple[Turn, Step]](), list[Own | None](), x
        *first, last = turned_at(own.chain.turn, weights, self._layout, self._out_layout)
        for turns, each, layout in first:
            between = turns(between)
            step, call = self._factor(each, between, None, None, between_factors, layout)
            steps.append((turns, step))
            calls.append(call)
            between = step(between, None, None)
        turns_last, each, layout = last
        finishing, call = self._factor(each, turns_last(between), bias, residual, activation, layout)
        if not is_whole:
            return finishing
        in_turn = [own_call for own_call in (*calls, call) if own_call is not None]

        def each_alone(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
            for turns, step in steps:
                x = step(turns(x), None, None)
            return finishing(turns_last(x), bias, residual)

        if self._out_layout is None and len(in_turn) == len(weights):
            ways["in turn"] = in_kernels(in_turn, [checks.y_shape(pattern, self._layout, self._batch) for pattern in own.chain])
        ways["each"] = each_alone
        return self._fastest(weights, activation, ways, x, bias, residual, layout_word(self._layout, self._out_layout), between_factors)

    def _factor(
        self, weights: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, layout: str
    ) -> tuple[Step, Own | None]:
        """One factor's fastest way, and its kernel's call."""
        a, b, c, d = weights.shape
        ways: dict[str, Step] = {}
        given, added, as_given = x, residual, layout
        if self._batch == 1:  # a single entry lies in memory as in both layouts
            given, added, as_given = x.view(1, -1), None if residual is None else residual.view(1, -1), "bsf"
        own = launcher(a, b, c, d)
        if call := call_of(own.prepare, given, [weights], bias, added, as_given, activation):
            ways["ksgen"] = in_kernels([call], [checks.y_shape(own.pattern, layout, self._batch)])
        if self._only_kernels:
            if not ways:
                raise UnfitError
            return ways["ksgen"], call
        matrices, blocks = made_of(weights, products.by_matrix), made_of(weights, products.blocks_of)

        def on_views(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
            return finish(products.multiply(x, matrices, layout), bias, activation, residual, layout)

        def permuted(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
            return finish(products.permuted_multiply(x, blocks, layout, a, d), bias, activation, residual, layout)

        ways |= {"strided": on_views, "bmm": permuted}
        if weights.element_size() == 2:  # as in `ksgen.torch.ops`
            ways["dense"] = _by_whole_matrix(made_of(weights, products.to_dense), layout, activation)
        return self._fastest([weights], activation, ways, x, bias, residual, layout), call

    def _fastest(
        self, weights: list[Tensor], activation: str, ways: Mapping[str, Step], x: Tensor, bias: Tensor | None, residual: Tensor | None,
        layout: str, between: str = "none",
    ) -> Step:  # fmt: skip
        if len(ways) == 1:
            return next(iter(ways.values()))
        shapes = [each.shape for each in weights]
        job = job_of("prepared", shapes, x.dtype, layout, activation, bias is not None, residual is not None, between)
        timed = {name: partial(way, x, bias, residual) for name, way in ways.items()}
        return ways[faster((job, size_of(self._batch), *ways), timed)]


def call_of(
    prepare: Callable[..., Call | None], x: Tensor, weights: Sequence[Tensor], bias: Any, residual: Any, layout: str, activation: str,
    is_chain: bool = False,
) -> Own | None:  # fmt: skip
    """A call whose launches take no copies; None where there is none. What launchers refuse, the usual way refuses."""
    packed = [operand(each, False) for each in weights]
    if not all(isinstance(each, Weights) for each in packed):  # they thawed meanwhile
        raise UnfitError
    extras = {name: each for name, each in (("bias", bias), ("residual", residual)) if each is not None}
    try:
        call = prepare(x, packed if is_chain else packed[0], layout=layout, activation=activation, **extras)
    except (DeviceError, ToolchainError):
        return None
    except KsgenError as error:
        raise UnfitError from error
    return Own(call, packed) if call is not None and call.plan.device.shares_host else None


def _by_whole_matrix(matrix: Tensor, layout: str, activation: str) -> Step:
    def in_rows(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return finish(functional.linear(x, matrix, bias), None, activation, residual, layout)

    def in_columns(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return finish(matrix @ x, bias, activation, residual, layout)

    return in_rows if layout == "bsf" else in_columns


def in_kernels(own: Sequence[Own], shapes: Sequence[tuple[int, int]]) -> Step:
    """Prepared calls, each on what the one before it wrote, on tensors of the host, with outputs of their own of these shapes."""
    count = len(own)
    places = [{"x": number, each.call.plan.result: number + 1} for number, each in enumerate(own)]
    places[-1] |= {"bias": count + 1, "residual": count + 2}
    launch = Elsewhere([each.call for each in own], places, [weights for each in own for weights in each.weights])
    *between, last = shapes

    def step(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y, passed = x.new_empty(last), [x.new_empty(shape) for shape in between]
        arrays = (x, *passed, y, bias, residual)
        launch([0 if each is None else each.data_ptr() for each in arrays])
        return y

    return step
