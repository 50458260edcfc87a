"""Training steps of a layer: y with gradients recorded, then gradients of x, of all weights and of the biases.

Each contender trains the parameters by which it multiplies, in its own format. Their conversion from weights
(a, b, c, d) happens once, as at the creation of a layer, and is not timed. No optimizer runs.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ksgen.bench import baselines
from ksgen.bench.authors import FORMS, PUBLISHED
from ksgen.bench.baselines import PREPARING
from ksgen.bench.libraries import LayerProduct, Product, UnsupportedError, in_forms, states_of, structures_of
from ksgen.bench.problem import Gradients, LayerArrays
from ksgen.bench.roster import LAYER
from ksgen.pattern import Pattern
from ksgen.torch.layer.tied import initialized
from ksgen.torch.operators.backends import BACKENDS

Weights = Sequence[Sequence[Tensor]]  # (a, b, c, d), per chain


class StepResult(NamedTuple):
    """Outputs per chain, and the gradients of x, of the parameters and of the biases."""

    ys: Sequence[Tensor]
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class TrainedContender:
    """A contender in training: its product, and the tensors that it trains."""

    product: LayerProduct
    parameters: Sequence[Tensor]
    biases: Sequence[Tensor]
    convert: Callable[[Weights], Sequence[Tensor]] | None = None  # weights to parameters, differentiably


Train = Callable[[LayerArrays], TrainedContender]


def training_step(
    name: str, arrays: LayerArrays
) -> tuple[Callable[[int], StepResult], Callable[[StepResult], Gradients]]:
    """Training step of the contender with this name, on the set of arrays with a number, and its result's gradients.

    `UnsupportedError` if there is none.
    """
    if name not in TRAINED:
        raise UnsupportedError(f"{name} has no training step")
    trained = TRAINED[name](arrays)
    xs = [each.detach().requires_grad_() for each in arrays.sets]
    learned = [*trained.parameters, *trained.biases]

    def run(number: int) -> StepResult:
        x = xs[number]
        ys = trained.product(x)
        found = torch.autograd.grad(ys, [x, *learned], arrays.y_gradients)
        return StepResult(ys, [each.contiguous() for each in found])  # as PyTorch stores gradients

    for _ in range(PREPARING if name == LAYER else 0):
        run(0)
    return run, partial(_gradients, arrays, trained)


def _gradients(arrays: LayerArrays, trained: TrainedContender, result: StepResult) -> Gradients:
    """Gradients of a step, those of weights by the chain rule through their conversion, in float64.

    Those of weights are left out if they are not compared.
    """
    of_x, *others = result.gradients
    count = len(trained.parameters)
    weights: Sequence[Tensor] = ()
    if trained.convert and arrays.compares_all:
        wide = [[each.double().requires_grad_() for each in some] for some in arrays.weights]
        given = [each.double() for each in others[:count]]
        weights = torch.autograd.grad(trained.convert(wide), [*chain.from_iterable(wide)], given)
    return Gradients(of_x, weights, others[count:])


def _learned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies that take gradients."""
    return [each.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for each in tensors]


def _with_own_biases(arrays: LayerArrays) -> tuple[LayerArrays, list[Tensor]]:
    """The same arrays with copies of the biases that take gradients, and these copies."""
    own = copy(arrays)
    learned = _learned([each for each in arrays.biases if each is not None])
    own.biases = [*learned] or arrays.biases
    return own, learned


def by_backends(choose: Callable[[Pattern, str], str]) -> Train:
    """Train with the backend of `ksgen.torch` that is chosen for a factor's pattern and layout, factor by factor."""

    def train(arrays: LayerArrays) -> TrainedContender:
        pairs = [pair for each in arrays.layer.chains for pair in zip(each, arrays.layouts_of(each), strict=True)]
        chosen = [BACKENDS[choose(*pair)] for pair in pairs]

        def convert(weights: Weights) -> list[Tensor]:
            pairs = zip(chosen, chain.from_iterable(weights), strict=True)
            return [each if backend.prepare is None else backend.prepare(each) for backend, each in pairs]

        own, biases = _with_own_biases(arrays)
        parameters = _learned(convert(arrays.weights))
        remaining = zip(chosen, parameters, strict=True)

        def prepare(pattern: Pattern, layout: str, weights: Tensor) -> Product:
            backend, parameter = next(remaining)
            return lambda x: backend.multiply(x, parameter, layout, pattern)

        return TrainedContender(baselines.by_factors(prepare)(own), parameters, biases, convert)

    return train


def compiled(arrays: LayerArrays) -> TrainedContender:
    """Train with torch.compile of the einsums, which compiles the backward pass too."""
    torch.compiler.reset()  # code compiled for other shapes would make this one dynamic
    trained = by_backends(lambda *_: "einsum")(arrays)
    return replace(trained, product=torch.compile(trained.product, dynamic=False))


def dense(arrays: LayerArrays) -> TrainedContender:
    """Train the chains' stacked dense matrices. No weights of factors have gradients."""
    matrix, *biases = _learned([each for each in baselines.stacked(arrays) if each is not None])
    return TrainedContender(baselines.by_dense(arrays, matrix, biases[0] if biases else None), [matrix], biases)


def authors(arrays: LayerArrays) -> TrainedContender:
    """Train the parameters of the structure's authors in the form that they published."""
    structures = structures_of(arrays, PUBLISHED, FORMS)
    form = FORMS[structures[0].chain.name]

    def convert(weights: Weights) -> list[Tensor]:
        pairs = zip(structures, weights, strict=True)
        return [each for structure, some in pairs for each in structure.to_state(some).values()]

    own, biases = _with_own_biases(arrays)
    parameters = _learned(convert(arrays.weights))
    remaining = iter(parameters)
    states = states_of(arrays, [{name: next(remaining) for name in each.shapes} for each in structures])

    def product(state: dict[str, Tensor]) -> Product:
        return lambda x: form(x, state)

    return TrainedContender(in_forms(own, PUBLISHED, map(product, states)), parameters, biases, convert)


def layer(arrays: LayerArrays) -> TrainedContender:
    """Train a `KSLinear`, which chooses its kernels as in normal use; weights are tied as the layer's are."""
    layers = arrays.tied_linears()

    def convert(weights: Weights) -> list[Tensor]:
        pairs = zip(chain.from_iterable(weights), chain.from_iterable(arrays.layer.ties), strict=True)
        return [each if axis is None else each.narrow(axis, 0, 1) for each, axis in pairs]

    parameters = [each for one in layers for each in initialized(one.weights)]
    biases = [one.bias for one in layers if one.bias is not None]
    return TrainedContender(baselines.by_linears(arrays, layers), parameters, biases, convert)


TRAINED: dict[str, Train] = {
    "bmm": by_backends(lambda *_: "bmm"),
    # With d > 1, the operator of `strided` would convert the trained matrices in each step.
    "views": by_backends(lambda pattern, _: "strided" if pattern.d == 1 else "bmm"),
    "einsum": by_backends(lambda *_: "einsum"),
    "compiled": compiled,
    "authors": authors,
    "dense": dense,
    LAYER: layer,
}
