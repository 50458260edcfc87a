"""Whole models as jobs: every contender computes the same model, with its own products in the layers that are sparse.

The batch of such a job counts sequences. The reference is the model in float64, with PyTorch's einsums.
"""

import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from math import nan, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ksgen.bench import models
from ksgen.bench.baselines import warm_up
from ksgen.bench.chains import MeasuredLayer
from ksgen.bench.problem import LayerJob, relative
from ksgen.bench.roster import FORWARD, LAYER, TRAINING, WHOLE
from ksgen.pattern import Chain
from ksgen.spec import PRECISIONS
from ksgen.torch.layer import KSLinear, freeze, thaw
from ksgen.values import cached_property

DENSE = "dense"
BACKEND = {LAYER: "auto"}  # of its KSLinear layers, if it is named otherwise
COMPARED = 1  # sequences whose outputs are compared
FIRST = "blocks.0.attention_norm.weight"  # parameter whose gradient is compared: it has come back through all blocks


class ModelSize(NamedTuple):
    """Sizes of a model: the chains of its sparse layers, and what its dense form has."""

    chains: tuple[Chain, ...]
    parameters: int
    multiplications: int  # per token, by the dense forms of the sparse layers
    tokens: int | None  # per sequence; None if the caller chooses


@dataclass(frozen=True)
class WholeJob(LayerJob):
    """Job of a whole model. `layer` has its name in rows, and one of its chains, for the device's ceilings."""

    model: str = ""
    tokens: int = 0  # per sequence

    @property
    def description(self) -> str:
        return WHOLE

    @property
    def bytes(self) -> int:
        """Bytes of the dense model's parameters. In training each has a gradient."""
        item_bytes = PRECISIONS[self.comparison.baselines].item_bytes
        return (2 if self.step == TRAINING else 1) * item_bytes * size_of(self.model).parameters

    @property
    def has_floor(self) -> bool:
        return False

    def multiplications(self, name: str) -> int:
        """Multiplications of a contender per sequence by its layers; 0, which is unknown, unless they are dense."""
        passes = 1 if self.step == FORWARD else 3
        return passes * self.tokens * size_of(self.model).multiplications if name == DENSE else 0

    def tolerance(self, arithmetic: str) -> float:
        """Largest error that rounding explains: that of one layer, as the steps of a random walk over all layers."""
        return sqrt(len(size_of(self.model).chains)) * super().tolerance(arithmetic)

    def problem(self, where: torch.device, seed: int) -> "ModelArrays":  # type: ignore[override]
        return ModelArrays(self, where, seed)


def whole_job(model: str, precision: str, batch: int, tokens: int, step: str = FORWARD) -> WholeJob:
    """Job of a model with this number of sequences. `tokens` per sequence apply to language models."""
    size = size_of(model)
    name = model if size.tokens else f"{model}, {tokens} tokens"
    widest = max(size.chains, key=lambda chain: chain.in_features)
    return WholeJob(MeasuredLayer(name, (widest,)), precision, "bsf", batch, step, model, size.tokens or tokens)


@cache
def size_of(model: str) -> ModelSize:
    with torch.device("meta"):
        dense = models.build(model)
    sparse = _sparse(dense, model)
    twins = list(_twins(dense, sparse))
    chains = tuple(layer.chain for _, layers in twins for layer in layers)
    multiplications = sum(linear.weight.numel() for linear, _ in twins)
    tokens = dense.positions.shape[1] if isinstance(dense, models.VisionTransformer) else None
    return ModelSize(chains, sum(each.numel() for each in dense.parameters()), multiplications, tokens)


def _sparse(dense: nn.Module, model: str) -> nn.Module:
    """Sparse form of a dense model with random chains. All other parameters are the same tensors."""
    sparse = deepcopy(dense, {id(each): each for each in dense.parameters()})
    models.make_sparse(sparse, models.rule(model), from_weights=False)
    return sparse


def _twins(dense: nn.Module, sparse: nn.Module) -> Sequence[tuple[nn.Linear, list[KSLinear]]]:
    """Dense layers, each with the sparse layers that compute its outputs."""
    found = []
    for name, linear in dense.named_modules():
        if isinstance(linear, nn.Linear):
            twin = sparse.get_submodule(name)
            layers = [twin] if isinstance(twin, KSLinear) else list(twin.children())
            if layers:
                found.append((linear, layers))
    return found


class ModelArrays:
    """A sparse model, its dense form, and random inputs. Equal jobs and seeds give equal arrays."""

    checked = COMPARED

    def __init__(self, job: WholeJob, where: torch.device, seed: int) -> None:
        self.job = job
        dtype = getattr(torch, PRECISIONS[job.comparison.baselines].dtype)
        with torch.random.fork_rng([where] if where.type == "cuda" else []), where, torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{job.words} {job.batch} {seed}".encode()))
            self.dense = models.build(job.model).to(dtype).eval()
            self.sparse = _sparse(self.dense, job.model)
            for linear, layers in _twins(self.dense, self.sparse):
                linear.weight = nn.Parameter(torch.cat([each.to_dense() for each in layers]))
                if linear.bias is not None:
                    linear.bias = nn.Parameter(torch.cat([each.bias for each in layers]))
            x = self.dense.random_inputs(job.batch, job.tokens)
            self.y_gradient = torch.randn_like(self.dense(x)) if job.step == TRAINING else None
        self.sets = [x]  # a model's weights exceed a cache

    def contender(self, name: str) -> Callable[[int], list[Tensor]]:
        """Return a run of the named contender: its outputs and, in training, the compared gradient.

        A training step computes the gradients of all parameters, without an optimizer.
        """
        shared = {id(each): each for each in self.dense.parameters()} if self.job.step == FORWARD else {}
        model = deepcopy(self.dense if name == DENSE else self.sparse, dict(shared))
        models.set_backend(model, BACKEND.get(name, name))
        run = self._step(model) if self.job.step == TRAINING else self._pass(model)
        if name == LAYER:
            warm_up(lambda: run(0))
        return run

    def _pass(self, model: nn.Module) -> Callable[[int], list[Tensor]]:
        freeze(model)
        return lambda number: [model(self.sets[number])]

    def _step(self, model: nn.Module) -> Callable[[int], list[Tensor]]:
        thaw(model)
        names, parameters = zip(*model.train().requires_grad_().named_parameters(), strict=True)
        first = names.index(FIRST)

        def run(number: int) -> list[Tensor]:
            y = model(self.sets[number])
            return [y, torch.autograd.grad(y, parameters, self.y_gradient)[first]]

        return run

    def error(self, found: Sequence[Tensor], gradients: None = None) -> float:
        """Largest relative error (Frobenius) of the first sequences' outputs, and of the gradient that is compared.

        NaN if any element is not finite, or if an array has another shape.
        """
        if not all(bool(torch.isfinite(each).all()) for each in found):
            return nan
        y, *others = found
        pairs = zip((y[:COMPARED], *others), self._truths, strict=True)
        errors = [relative(each.detach().double().cpu().numpy(), truth.cpu().numpy()) for each, truth in pairs]
        return float(np.max(errors))  # unlike `max`, NaN if any is

    @cached_property
    def _truths(self) -> list[Tensor]:
        model = deepcopy(self.sparse).double()
        models.set_backend(model, "einsum")
        (x,) = (each.double() if each.is_floating_point() else each for each in self.sets)
        if self.y_gradient is None:
            return [model(x[:COMPARED])]
        with torch.enable_grad():
            y = model.requires_grad_()(x)
            (gradient,) = torch.autograd.grad(y, [model.get_parameter(FIRST)], self.y_gradient.double())
        return [y[:COMPARED].detach(), gradient]
