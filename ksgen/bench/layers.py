"""Contenders of the benchmark for full layers.

Ours are one launch of all factors, one launch per layer of a group, and one launch per factor. The others are a frozen
`KSLinear`, PyTorch's products per factor, and the dense layer of the same shape.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ksgen import __version__
from ksgen.bench.baselines import BASELINES, PREPARING, Prepare, Product, UnsupportedError, library_version
from ksgen.bench.contenders import Contender, ReadyContender, arithmetics, by_calls, in_place, rendered, torch_device
from ksgen.bench.problem import LayerArrays, LayerJob
from ksgen.bench.roster import EACH_FACTOR, EACH_LAYER, LAYER, ONE_LAUNCH, OUR_METHODS
from ksgen.devices.base import Device
from ksgen.emit.render import Source
from ksgen.emit.templates import template_digest
from ksgen.families import family_for
from ksgen.families.chains import factor_kernels, layer_kernels
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.fused import packing_choices, verdict
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Pattern
from ksgen.spec import PRECISIONS, KernelSpec
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.operators.products import ACTIVATIONS, chain_to_dense, finish


def layer_contenders(job: LayerJob, device: Device, names: Sequence[str]) -> Iterator[Contender]:
    """All named contenders for the layer, ours first."""
    is_group, is_single = len(job.layer.chains) > 1, sum(map(len, job.layer.chains)) == 1
    for name in OUR_METHODS:
        if name not in names or (name == EACH_LAYER and not is_group) or (name == EACH_FACTOR and is_single):
            continue
        for arithmetic in arithmetics(job, device):
            yield from _ours(job, device, name, arithmetic)
    yield from (_theirs(job, device, name) for name in _BASELINES if name in names)


# ---- ours


def _ours(job: LayerJob, device: Device, name: str, arithmetic: str) -> Iterator[Contender]:
    kernel = job.kernel(arithmetic)
    launches = _launches(kernel, name)
    refusal = next((why for each in launches if (why := _why_unavailable(device, each, job.batch))), "")
    for choices in [[]] if refusal else _choices(device, launches, job.batch):
        digests = dict.fromkeys(template_digest(each.family) for each in choices)
        yield Contender(
            job,
            name,
            "tuned" if any(each.from_wisdom for each in choices) else "default",
            arithmetic,
            " ".join(("ksgen", __version__, *digests)),
            partial(_prepare, device, launches, choices, refusal),
            extra_bytes=2 * job.bytes,
            multiplications=sum(chain.weight_count for chain in job.layer.chains),
            family=", ".join(dict.fromkeys(each.family for each in choices)),
            constants="; ".join(dict.fromkeys(str(each.constants) for each in choices)),
            why=choices[0].why if choices else refusal,
            sources=partial(_sources, device, launches, choices),
        )


def _choices(device: Device, launches: Sequence[KernelSpec], batch: int) -> Iterator[list[Choice]]:
    """Yield the launchers' choices, one per launch.

    On a processor, then yield the defaults of families that launchers take only on request.
    """
    yield [PLANNER.choice(device, each, batch) for each in launches]
    limits = limits_of(device)
    if limits.is_cpu:
        usual = [family_for(each, limits, batch) for each in launches]
        families = [family_for(each, limits, batch, all_families=True) for each in launches]
        if families != usual:
            pairs = zip(launches, families, strict=True)
            yield [
                Choice(family.name, family.default(each, limits, batch), "the family's default")
                for each, family in pairs
            ]


def _prepare(
    device: Device, launches: Sequence[KernelSpec], choices: Sequence[Choice], refusal: str, arrays: LayerArrays
) -> ReadyContender:
    """Prepare calls on PyTorch's own memory, with weights packed once. Several launches are separate calls."""
    if refusal:
        raise UnsupportedError(refusal)
    pairs, batch = zip(launches, choices, strict=True), arrays.job.batch
    plans = [PLANNER.plan_of(device, kernel, batch, choice) for kernel, choice in pairs]
    return in_place(plans, arrays)


def _launches(kernel: KernelSpec, name: str) -> list[KernelSpec]:
    """Kernels in the order of their launches, chain by chain.

    The last kernel of each chain writes its outputs with the strides of `kernel`, as one launch would.
    """
    if name == ONE_LAUNCH or not kernel.is_chain:
        return [kernel]
    if name == EACH_LAYER:
        return layer_kernels(kernel)
    ends = set(accumulate(map(len, kernel.chains)))
    return [
        replace(each, stride=kernel.stride) if number in ends else each
        for number, each in enumerate(factor_kernels(kernel), 1)
    ]


def _why_unavailable(device: Device, kernel: KernelSpec, batch: int) -> str:
    """Reason why one launch is unavailable; empty if it is available."""
    if not kernel.is_chain:
        return ""
    found = verdict(device, kernel, batch, "yes")
    return "" if found.is_one else found.why


def _sources(device: Device, launches: Sequence[KernelSpec], choices: Sequence[Choice]) -> list[Source]:
    """Sources of the launches, and of the kernels that pack weights for them."""
    found = []
    for kernel, choice in zip(launches, choices, strict=False):  # without choices there is nothing to launch
        packed = packing_choices(kernel, choice.family, choice.constants) if kernel.is_chain else []
        found += [rendered(each, chosen, device.dialect) for each, chosen in ((kernel, choice), *packed)]
    return found


# ---- theirs


@dataclass(frozen=True)
class _Baseline:
    """A baseline: a short description, its preparation, and whether it multiplies by the dense matrix."""

    says: str
    prepare: Callable[[LayerArrays], Callable[[Tensor], Sequence[Tensor]]]
    is_dense: bool = False


def _theirs(job: LayerJob, device: Device, name: str) -> Contender:
    baseline, where = _BASELINES[name], torch_device(device)

    def prepare(arrays: LayerArrays) -> ReadyContender:
        product = baseline.prepare(arrays)
        return by_calls(lambda number: product(arrays.sets[number]), where.type == "cuda")

    chains = job.layer.chains
    dense = chains[0].in_features * sum(chain.out_features for chain in chains)
    multiplied = dense if baseline.is_dense else sum(chain.weight_count for chain in chains)
    arithmetic = job.comparison.baselines
    identity = library_version("torch") if name != "layer" else f"ksgen {__version__}, {library_version('torch')}"
    extra = 2 * job.bytes + 2 * multiplied * PRECISIONS[arithmetic].item_bytes
    return Contender(job, name, "", arithmetic, identity, prepare, extra, multiplied, why=baseline.says)


def _factor_by_factor(prepare: Prepare, arrays: LayerArrays) -> Callable[[Tensor], Sequence[Tensor]]:
    """Multiply by every factor with a PyTorch product, then apply the layer's other operations."""
    layer, transposes = arrays.layer, arrays.y_layout != arrays.layout
    between = ACTIVATIONS[layer.between].apply

    def layout_of(number: int, first_transposed: int) -> str:
        return arrays.layout if number < first_transposed else arrays.y_layout

    products = [
        [
            prepare(pattern, layout_of(number, chain.transposing_factor), factor)
            for number, (pattern, factor) in enumerate(zip(chain, weights, strict=True))
        ]
        for chain, weights in zip(layer.chains, arrays.weights, strict=True)
    ]

    def of_chain(place: int, x: Tensor) -> Tensor:
        for number, product in enumerate(products[place]):
            x = between(x) if number else x
            x = product(x.t().contiguous() if transposes and number == layer.chains[place].transposing_factor else x)
        y = finish(x, arrays.biases[place], layer.epilogue.activation, arrays.residuals[place], arrays.y_layout)
        return y.contiguous()

    return lambda x: [of_chain(place, x) for place in range(len(products))]


def _by_views(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    return BASELINES["bmm" if layout == "bsf" and pattern.d > 1 else "strided"].prepare(pattern, layout, weights)


def _dense(arrays: LayerArrays) -> Callable[[Tensor], Sequence[Tensor]]:
    """Multiply with `torch.nn.functional.linear` by the chains' stacked dense matrices."""
    layer, dtype = arrays.layer, arrays.sets[0].dtype
    if layer.between != "none":
        raise UnsupportedError(f"a layer with {layer.between} between its factors has no dense matrix")
    pairs = zip(layer.chains, arrays.weights, strict=True)
    matrices = [chain_to_dense(chain, [each.double() for each in weights]) for chain, weights in pairs]
    matrix = torch.cat(matrices).to(dtype)
    biases = [each for each in arrays.biases if each is not None]
    bias = torch.cat(biases) if biases else None
    x_is_bsf, y_is_bsf = arrays.layout == "bsf", arrays.y_layout == "bsf"
    residuals = [each for each in arrays.residuals if each is not None]
    residual = torch.cat(residuals, 1 if y_is_bsf else 0) if residuals else None
    activation, column = layer.epilogue.activation, None if bias is None else bias[:, None]

    def product(x: Tensor) -> list[Tensor]:
        if y_is_bsf:
            y = functional.linear(x if x_is_bsf else x.t(), matrix, bias)
        else:
            columns = x.t() if x_is_bsf else x
            y = matrix @ columns if column is None else torch.addmm(column, matrix, columns)
        return arrays.apart(finish(y, None, activation, residual, arrays.y_layout))

    return product


def _layer(arrays: LayerArrays) -> Callable[[Tensor], Sequence[Tensor]]:
    """Multiply with a frozen `KSLinear`, which chooses its backend as in normal use."""
    layer = arrays.layer
    options: dict[str, Any] = {"layout": arrays.layout, "out_layout": layer.out_layout, "fuse": layer.fuse}
    options |= {"activation": layer.epilogue.activation}
    layers = [
        KSLinear.from_weights(weights, bias, between=layer.between if len(weights) > 1 else "none", **options)
        .eval()
        .freeze()
        for weights, bias in zip(arrays.weights, arrays.biases, strict=True)
    ]
    residual = arrays.residuals[0]
    if len(layers) > 1 and layer.epilogue.residual:
        raise UnsupportedError("KSLinear.group adds no residual")
    group = KSLinear.group(layers) if len(layers) > 1 else None

    def product(x: Tensor) -> Sequence[Tensor]:
        return [layers[0](x, residual)] if group is None else arrays.apart(group(x))

    for _ in range(PREPARING):
        product(arrays.sets[0])
    return product


_BASELINES = {
    LAYER: _Baseline(BASELINES[LAYER].says, _layer),
    "bmm": _Baseline(
        "each factor by permuting, one batched product, permuting back",
        partial(_factor_by_factor, BASELINES["bmm"].prepare),
    ),
    "views": _Baseline(
        "each factor by batched products on views where it has any, else as bmm", partial(_factor_by_factor, _by_views)
    ),
    "dense": _Baseline("the dense layer of the same shape: torch.nn.functional.linear", _dense, is_dense=True),
}
