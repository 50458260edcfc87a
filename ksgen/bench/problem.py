"""Jobs of a benchmark, and the arrays of one job on the device, with the float64 references for its results.

The job of a product is a layer of one factor without a name.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from math import nan
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksgen.bench.chains import MeasuredLayer
from ksgen.bench.roster import AND, COMPARISONS, FORWARD, PLUS, TRAINING, Comparison
from ksgen.families.chains import layer_kernels
from ksgen.measure.verify import CACHE_BYTES, MOST_REFERENCE_FLOPS, Problem, tolerance
from ksgen.pattern import Chain, Pattern
from ksgen.spec import PRECISIONS, KernelSpec
from ksgen.spec.kernel import SLICES, is_layer, layer_launch, sum_steps
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.layer.tied import tie
from ksgen.torch.operators.products import finish
from ksgen.values import cached_property

MOST_SETS = 64  # largest number of sets of X and Y, which runs use in turn
_ENDS, _BETWEEN = 16, 16  # compared rows of the batch: at each end, where tiles may be ragged, and in between


@dataclass(frozen=True)
class LayerJob:
    """Job that all contenders compute: a layer, or a product."""

    layer: MeasuredLayer
    precision: str  # a name in COMPARISONS
    layout: str
    batch: int
    step: str = FORWARD  # or TRAINING: the output, then the gradients of x, of all weights and of the bias

    @property
    def comparison(self) -> Comparison:
        return COMPARISONS[self.precision]

    @property
    def pattern(self) -> Pattern:
        """Pattern of a product."""
        return self.layer.chains[0][0]

    @property
    def description(self) -> str:
        """Description of the layer: its factors, and its other operations."""
        kernel = self.kernel(self.comparison.baselines)
        transposed = (f"to {kernel.y_layout}",) if kernel.out_layout else ()
        between = () if self.layer.between == "none" else (f"{self.layer.between} between",)
        chains = (PLUS if self.layer.is_sum else AND).join(map(str, kernel.chains))
        tied = (f"tied {' '.join(each or 'none' for each in self.layer.tied)}",) if self.layer.tied else ()
        fuse = () if self.layer.fuse == "auto" else (f"fuse {self.layer.fuse}",)
        return ", ".join((chains, *between, *kernel.epilogue.words, *transposed, *tied, *fuse))

    @property
    def words(self) -> str:
        return f"{self.layer.name}: {self.description}" if self.layer.name else self.description

    @property
    def key(self) -> str:
        step = "" if self.step == FORWARD else f" {self.step}"
        return f"{self.words} {self.precision} {self.layout} {self.batch}{step}"

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the job in its rows."""
        named = {"pattern": self.description} | ({"layer": self.layer.name} if self.layer.name else {})
        kind = {"precision": self.precision, "layout": self.layout, "batch": self.batch, "step": self.step}
        return named | kind

    @property
    def has_floor(self) -> bool:
        """Whether memory traffic and arithmetic bound its time from below. Chains of a sum share y."""
        return self.step == FORWARD and not self.layer.is_sum

    @property
    def bytes(self) -> int:
        """Bytes of the arrays, including intermediates of separate launches. In training each has a gradient."""
        kernel = self.kernel(self.comparison.baselines)
        between = sum(each.out_features for chain in self.layer.chains for each in chain.factors[:-1])
        arrays = kernel.bytes(self.batch) + self.batch * kernel.item_bytes * between
        return 2 * arrays if self.step == TRAINING else arrays

    def kernel(self, arithmetic: str) -> KernelSpec:
        """Kernel of the full job in one launch; of a sum, the group of its chains."""
        layer = self.layer
        if not is_layer(layer.chains, self.layout, layer.out_layout):
            return KernelSpec(self.pattern, arithmetic, self.layout, layer.epilogue)
        return layer_launch(
            layer.chains, arithmetic, self.layout, layer.epilogue, between=layer.between, out_layout=layer.out_layout
        )

    def factor(self, arithmetic: str) -> KernelSpec:
        """Kernel of one factor of the job. Its instructions are those by which the device's ceilings are measured."""
        return KernelSpec(self.layer.chains[0][-1], arithmetic, self.layout)

    def tolerance(self, arithmetic: str) -> float:
        """Largest error that rounding explains: over the factors of the worst chain, or over all chains of a sum.

        In training, gradients pass all factors back, and sums over the batch follow.
        """
        worst = sum if self.layer.is_sum else max
        most = worst([sum(tolerance(arithmetic, pattern.c) for pattern in chain) for chain in self.layer.chains])
        if self.step == FORWARD:
            return most
        back = worst([sum(tolerance(arithmetic, pattern.b) for pattern in chain) for chain in self.layer.chains])
        return most + back + tolerance(arithmetic, self.batch)

    def problem(self, where: torch.device, seed: int) -> "LayerArrays":
        return LayerArrays(self, where, seed)


def product_job(pattern: Pattern, precision: str, layout: str, batch: int, step: str = FORWARD) -> LayerJob:
    """Job of one product."""
    return LayerJob(MeasuredLayer("", (Chain((pattern,)),)), precision, layout, batch, step)


@dataclass(frozen=True)
class Gradients:
    """Results of a training step in addition to y."""

    x: Tensor
    weights: Sequence[Tensor]  # (a, b, c, d), one per factor; empty if the contender trains another format
    biases: Sequence[Tensor]  # one per output, or one of all outputs


class LayerArrays:
    """Arrays that the contenders of one job work on: weights per factor, any bias and residual, and sets of X.

    Together they exceed a cache, unless that takes more than `MOST_SETS` sets. Equal jobs and seeds give equal arrays.
    A job in training has the arrays of the forward job, and given gradients of y.
    """

    def __init__(self, job: LayerJob, where: torch.device, seed: int) -> None:
        self.kernel = kernel = job.kernel(job.comparison.baselines)
        self.job, self.layer, self.layout, self.y_layout = job, job.layer, job.layout, kernel.y_layout
        dtype = getattr(torch, PRECISIONS[job.comparison.baselines].dtype)
        draw = torch.Generator(where).manual_seed(zlib.crc32(f"{job.words} {job.batch} {seed}".encode()))

        def uniform(pattern: Pattern) -> Tensor:
            drawn = torch.rand(pattern.shape, generator=draw, device=where) * 2 - 1
            return (drawn / pattern.c**0.5).to(dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=where).to(dtype)

        drawn = [[uniform(pattern) for pattern in chain] for chain in job.layer.chains]
        self.weights = [_with_ties(*each) for each in zip(drawn, job.layer.ties, strict=True)]
        x = normal(*self._shape(kernel.in_features, self.layout))
        # as many copies as make the arrays of all sets exceed the cache
        self.sets = [x, *(x.clone() for _ in range(min(CACHE_BYTES // job.bytes, MOST_SETS - 1)))]
        added = kernel.epilogue
        self.biases = [normal(count) if added.bias else None for count in self.features]
        self.residuals = [normal(*shape) if added.residual else None for shape in self.y_shapes]
        self.y_gradients = [normal(*shape) for shape in self.y_shapes] if job.step == TRAINING else []

    def in_float32(self) -> "LayerArrays":
        """The same arrays in float32, and a single set of X."""
        wide = copy(self)
        wide.weights = [[each.float() for each in weights] for weights in self.weights]
        wide.sets = [self.sets[0].float()]
        wide.biases, wide.residuals = (
            [None if each is None else each.float() for each in some] for some in (self.biases, self.residuals)
        )
        return wide

    @property
    def features(self) -> list[int]:
        """Number of features per output: of each chain, or of the sum of all."""
        return [chain.out_features for chain in self.layer.chains[: 1 if self.layer.is_sum else None]]

    @property
    def y_shapes(self) -> list[tuple[int, int]]:
        """Shape of each output."""
        return [self._shape(count, self.y_layout) for count in self.features]

    def _shape(self, features: int, layout: str) -> tuple[int, int]:
        return (self.job.batch, features) if layout == "bsf" else (features, self.job.batch)

    def layouts_of(self, chain: Chain) -> list[str]:
        """Layout in which each factor of a chain multiplies."""
        first = chain.transposing_factor
        return [self.layout if number < first else self.y_layout for number in range(len(chain))]

    def apart(self, y: Tensor) -> list[Tensor]:
        """Outputs as slices of one array."""
        return list(y.split(self.features, 1 if self.y_layout == "bsf" else 0))

    def finished(self, products: Iterable[Tensor]) -> list[Tensor]:
        """Contiguous outputs: each chain's product, or their sum, with the bias, the activation and the residual."""
        steps = self.layer.epilogue
        outputs = [reduce(add, products)] if self.layer.is_sum else products
        return [
            finish(y, bias, steps.activation, residual, self.y_layout, steps.residual_first).contiguous()
            for y, bias, residual in zip(outputs, self.biases, self.residuals, strict=True)
        ]

    def outputs(self) -> list[Tensor]:
        """New outputs, as slices of one array filled with NaN."""
        return self.apart(self.sets[0].new_full(self._shape(sum(self.features), self.y_layout), nan))

    def linears(self, **options: Any) -> list[KSLinear]:
        """New `KSLinear` layers with the job's weights, biases and options, one per chain; calls take a residual.

        The activation of a sum is none of its layers'.
        """
        layer = self.layer
        usual: dict[str, Any] = {"layout": self.layout, "out_layout": layer.out_layout, "fuse": layer.fuse}
        usual |= {"activation": "none" if layer.is_sum else layer.epilogue.activation}
        return [
            KSLinear.from_weights(
                weights, bias, patterns=chain, between=layer.between if len(chain) > 1 else "none", **usual | options
            )
            for chain, weights, bias in zip_longest(layer.chains, self.weights, self.biases)
        ]

    def tied_linears(self) -> list[KSLinear]:
        """New `KSLinear` layers like `linears`, whose weights are tied as the layer's are."""
        layers = self.linears()
        for one, ties in zip(layers, self.layer.ties, strict=True):
            tie(one.weights, ties)
        return layers

    def error(self, ys: Sequence[Tensor], gradients: Gradients | None = None) -> float:
        """Largest relative error (Frobenius) of the outputs and gradients over the compared rows of the batch.

        Gradients of weights and biases are compared if `compares_all`. NaN if any element is not finite, or if an array
        has another shape.
        """
        given, shapes = [*ys], [*self.y_shapes]
        if gradients:
            given += [gradients.x, *gradients.weights, *gradients.biases]
            shapes += [tuple(self.sets[0].shape)]
        found = [tuple(each.shape) for each in given[: len(shapes)]]
        if found != shapes or not all(bool(torch.isfinite(each).all()) for each in given):
            return nan
        pairs = [(self._sample(y, self.y_layout), truth) for y, truth in zip(ys, self._truths, strict=True)]
        pairs += self._pairs(gradients) if gradients else ()
        return float(np.max([relative(*pair) for pair in pairs]))

    def _pairs(self, found: Gradients) -> Iterator[tuple[Any, Any]]:
        """Gradients that are compared, in float64, each with its true value. Ties sum the gradients of weights."""
        true = self._true_gradients
        yield self._sample(found.x, self.layout), _wide(true.x)
        if not self.compares_all:
            return
        names = [name for some in self.layer.ties for name in some]
        for one, other, name in zip(found.weights, true.weights, names, strict=bool(found.weights)):
            yield tuple(_wide(each.sum_to_size(each[SLICES[name]].shape)) for each in (one, other))
        if found.biases:
            yield _wide(torch.cat([*found.biases])), _wide(torch.cat([*true.biases]))

    @property
    def checked(self) -> int:
        """Number of compared rows of the batch."""
        return len(self._compared)

    @property
    def compares_all(self) -> bool:
        """Whether all rows of the batch are compared, as gradients of weights and biases need them."""
        return self.checked == self.job.batch

    @cached_property
    def _compared(self) -> Tensor:
        """Indices of the compared rows of the batch: all in training, if the reference takes about a second."""
        batch, where = self.job.batch, self.sets[0].device
        takes_all = self.job.step == TRAINING and self.kernel.flops(batch) <= MOST_REFERENCE_FLOPS
        if takes_all or batch <= 2 * _ENDS + _BETWEEN:
            return torch.arange(batch, device=where)
        ends = [*range(_ENDS), *range(batch - _ENDS, batch)]
        between = torch.linspace(0, batch - 1, _BETWEEN).round().long().tolist()
        return torch.tensor(sorted({*ends, *between}), device=where)

    @cached_property
    def _truths(self) -> list[Any]:
        """Compared rows of each output, in float64. Each chain of a sum adds the sum of the earlier ones."""
        x, truths = self._sample(self.sets[0], self.layout), list[Any]()
        kernels = layer_kernels(self.kernel)
        if self.layer.is_sum:
            kernels = [
                replace(kernel, epilogue=replace(kernel.epilogue, **steps))
                for kernel, steps in zip(kernels, sum_steps(len(kernels)), strict=True)
            ]
        for kernel, weights, bias, residual in zip_longest(kernels, self.weights, self.biases, self.residuals):
            *before, last = (_wide(factor) for factor in weights)
            added = None if residual is None else self._sample(residual, self.y_layout)
            added = truths[-1] if self.layer.is_sum and truths else added
            bias = None if bias is None else _wide(bias)
            truths.append(Problem(kernel, self.checked, x, last, bias, added, before=tuple(before)).truth)
        return truths[-1:] if self.layer.is_sum else truths

    @cached_property
    def _true_gradients(self) -> Gradients:
        """Gradients by PyTorch's autograd in float64, of the compared rows of the batch alone."""
        linears = self.linears(backend="einsum", fuse="auto", activation="none")
        layers, steps = [each.to("cpu", torch.float64) for each in linears], self.layer.epilogue
        x = torch.from_numpy(self._sample(self.sets[0], self.layout)).requires_grad_()
        given = [torch.from_numpy(self._sample(each, self.y_layout)) for each in self.y_gradients]
        weights = [each for layer in layers for each in layer.weights]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        ys = []
        with torch.enable_grad():
            products = [layer(x) for layer in layers]
            outputs = [reduce(add, products)] if self.layer.is_sum else products
            for y, residual in zip(outputs, self.residuals, strict=True):
                added = None if residual is None else torch.from_numpy(self._sample(residual, self.y_layout))
                ys.append(finish(y, None, steps.activation, added, self.y_layout, steps.residual_first))
            of_x, *others = torch.autograd.grad(ys, [x, *weights, *biases], given)
        return Gradients(of_x, others[: len(weights)], others[len(weights) :])

    def _sample(self, array: Tensor, layout: str) -> Any:
        """Compared rows of an array, in float64."""
        return _wide(array.index_select(0 if layout == "bsf" else 1, self._compared.to(array.device)))


def _with_ties(weights: list[Tensor], ties: tuple[str, ...]) -> list[Tensor]:
    """Weights of a chain. Where they are tied, their first slice is repeated."""
    pairs = zip(weights, ties, strict=True)
    return [weight[SLICES[name]].expand_as(weight).contiguous() for weight, name in pairs]


def _wide(tensor: Tensor) -> Any:
    return tensor.detach().double().cpu().numpy()


def relative(found: Any, truth: Any) -> float:
    """Relative error (Frobenius); NaN for another shape."""
    return float(np.linalg.norm(found - truth) / (np.linalg.norm(truth) or 1.0)) if found.shape == truth.shape else nan
