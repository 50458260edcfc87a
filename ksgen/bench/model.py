"""Dense and Kronecker-sparse models: the paper's Tables 4 and 7, as ratios to the dense module.

The steps are forward passes with frozen sparse layers, decoding of one token per sequence after the earlier ones, and
training steps. A training step is a forward and a backward pass, and an update by stochastic gradient descent.

Table 6 is the share of feed-forward linear layers in a vision transformer's forward pass, with dense layers. These
layers are timed alone, on inputs of their size, alternating with the full model.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from statistics import median, quantiles

import torch
from torch import Tensor, nn

from ksgen.bench import models
from ksgen.bench.baselines import warm_up
from ksgen.bench.models import VIT_S16, Vision, VisionTransformer
from ksgen.bench.roster import DECODE, FORWARD, LAYERS, TRAINING
from ksgen.bench.tables import published
from ksgen.measure.trust import Watch, keep_freed_memory, rest, why_unreliable
from ksgen.spec import LAYOUTS
from ksgen.torch.conversion.times import clock_on
from ksgen.torch.layer import KSLinear, freeze, thaw

WARMUP_RUNS = 3  # the first allocates memory; the second may get memory that another call's first run freed


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)


def seconds_in_turn(
    calls: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each call, round by round; each round begins with another call.

    On a processor, freed memory is not returned to the system, and calls alternate from the first warm-up run on. The
    memory layout is then stable.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
    for _ in range(WARMUP_RUNS):
        for call in calls.values():
            call()
    names, clock = list(calls), clock_on(device)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if not on_gpu:
                rest()
            seconds[name].append(clock(calls[name]))
    return seconds


@dataclass(frozen=True)
class Module:
    """Module that is a row of the tables."""

    path: str  # within a block; "" is the block, or the model in the row `WHOLE`
    paper_ratio: float  # ratio that the paper reports: its own kernel, ViT-S/16, float32, on an A100
    has_bias: bool | None = None  # only linear layers have one


RATE = 1e-6  # learning rate, small enough to avoid overflow
WHOLE = "whole"
DENSE = "nn.Linear"  # not "dense", which is the name of a backend
MODULES = {  # a linear layer is named as its matrix, outputs x inputs
    "linear N x N": Module("attention.projection", 0.50, has_bias=False),
    "linear N x N + bias": Module("attention.projection", 0.66, has_bias=True),
    "linear 4N x N": Module("feed_forward.up", 0.78, has_bias=False),
    "linear 4N x N + bias": Module("feed_forward.up", 0.90, has_bias=True),
    "linear N x 4N": Module("feed_forward.down", 0.58, has_bias=False),
    "linear N x 4N + bias": Module("feed_forward.down", 0.61, has_bias=True),
    "feed-forward": Module("feed_forward", 0.77),
    "attention": Module("attention", 0.79),
    "block": Module("", 0.78),
    WHOLE: Module("", 0.78),
}


@dataclass(frozen=True)
class ModelJob:
    """Options of a measurement.

    `batch` counts sequences. `tokens` per sequence apply to language models; ViT-S/16 has 197 per image.
    """

    model: str
    precisions: tuple[str, ...]
    backends: tuple[str, ...]
    device: torch.device
    batch: int
    tokens: int
    repeats: int
    steps: tuple[str, ...] = (FORWARD,)
    layers: tuple[str, ...] = LAYERS  # layers that become sparse
    layouts: tuple[str, ...] = LAYOUTS[:1]  # of the sparse models' blocks


@dataclass(frozen=True)
class ModelRow:
    """Results of one module: microseconds of its dense and sparse form, and the ratio of each round."""

    module: str
    step: str
    precision: str
    backend: str  # and the layout of the sparse model's blocks, if it is "bsl"
    dense_us: Spread
    sparse_us: Spread
    ratio: Spread
    paper_ratio: float | None
    others_share: float | None = None  # share of processor time that other programs used
    doubt: str = ""  # why the ratio is unreliable; empty if it is reliable


def measure(job: ModelJob) -> Iterator[ModelRow]:
    """Measure a row per precision, step, module and backend. Dense and sparse alternate.

    Forward passes record no gradients, and their sparse layers are frozen: weights are prepared once. Kernels are
    compiled beforehand, and calls are prepared.
    """
    watch, on_processors = Watch(), job.device.type == "cpu"
    for precision, step in product(job.precisions, job.steps):
        variants = _variants(job, getattr(torch, precision), step)
        for name, module in modules_of(job).items():
            calls = {variant: _call(job, name, model, step) for variant, model in variants.items()}
            with torch.set_grad_enabled(step == TRAINING):  # PyTorch's sparse products fail in inference mode
                for variant in variants:
                    if variant != DENSE:
                        warm_up(calls[variant])
                watch.look()  # compilers are done
                seconds = seconds_in_turn(calls, job.repeats, job.device)
            is_papers = (job.model, precision, step, set(job.layers)) == ("vit-s16", "float32", FORWARD, set(LAYERS))
            paper = module.paper_ratio if is_papers else None
            dense, others = seconds.pop(DENSE), watch.others_share()
            for backend, sparse in seconds.items():
                ratios = [ours / theirs for ours, theirs in zip(sparse, dense, strict=True)]
                why = why_unreliable(ratios, [others] if on_processors else ())
                dense_us, sparse_us = (Spread.of([1e6 * second for second in each]) for each in (dense, sparse))
                ratio = Spread.of(ratios)
                yield ModelRow(name, step, precision, backend, dense_us, sparse_us, ratio, paper, others, why)


def modules_of(job: ModelJob) -> dict[str, Module]:
    """Rows with at least one sparse layer; a row with a bias only if the model's layers have biases."""
    biases = (None, False, models.MODELS[job.model]["torch"].has_biases)
    layers_of = {"feed_forward": ("up", "down"), "attention": ("qkv", "projection"), "": LAYERS}
    return {
        name: each
        for name, each in MODULES.items()
        if each.has_bias in biases and set(layers_of.get(each.path, (each.path.rpartition(".")[2],))) & set(job.layers)
    }


def _variants(job: ModelJob, dtype: torch.dtype, step: str) -> dict[str, nn.Module]:
    """Dense model, and a sparse one per layout and backend, whose sparse layers have the same random weights.

    All other parameters are those of the dense model, in memory once unless they are trained.
    """
    with job.device:
        dense = models.build(job.model).to(dtype).eval()
    shared = {id(each): each for each in dense.parameters()} if step != TRAINING else {}
    sparse = deepcopy(dense, dict(shared))
    rule = models.rule(job.model)
    chains = {name: chain for name, chain in rule.items() if models.ROLES.get(name, name) in job.layers}
    models.make_sparse(sparse, chains, from_weights=False)
    variants = {DENSE: dense}
    for layout, backend in product(job.layouts, job.backends):
        name = backend if layout == "bsf" else f"{backend} {layout}"
        model = variants[name] = deepcopy(sparse, dict(shared))
        models.set_backend(model, backend)
        if layout == "bsl" and isinstance(model, VisionTransformer):
            model.put_features_first()
        if step != TRAINING:
            freeze(model)
    if step == DECODE:
        for model in variants.values():
            model.begin_decoding(job.batch, job.tokens).length = job.tokens - 1
    return variants if step != TRAINING else {name: model.train() for name, model in variants.items()}


def _call(job: ModelJob, name: str, model: nn.Module, step: str) -> Callable[[], object]:
    """Call of one module of a model, on the same random inputs for every model."""
    torch.manual_seed(0)
    part, inputs = _part(replace(job, tokens=1) if step == DECODE else job, name, model)
    if step != TRAINING:
        return lambda: part(*inputs)
    thaw(part)
    optimizer = torch.optim.SGD(part.parameters(), lr=RATE)
    recorded = [each.requires_grad_() for each in inputs if each.is_floating_point() and part is not model]

    def train() -> None:
        optimizer.zero_grad()
        for each in recorded:
            each.grad = None
        loss = part(*inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    return train


def _part(job: ModelJob, name: str, model: nn.Module) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Module of a model, and random arguments for it."""
    if name == WHOLE:
        return model, (model.random_inputs(job.batch, job.tokens),)
    module = MODULES[name]
    block = model.get_submodule("blocks.0")
    part = block.get_submodule(module.path)
    if module.has_bias is not None:
        part = _linear(part, module.has_bias)
    scale = block.get_submodule("attention_norm").weight
    tokens = model.positions.shape[1] if isinstance(model, VisionTransformer) else job.tokens
    x = torch.randn(
        job.batch, tokens, getattr(part, "in_features", scale.numel()), dtype=scale.dtype, device=scale.device
    )
    if getattr(part, "layout", getattr(model, "layout", "bsf")) == "bsl":
        x = x.movedim(-1, 0).contiguous()
    return part, (x, x) if isinstance(part, models.Attention | models.FeedForward) else (x,)


def _linear(layer: nn.Module, has_bias: bool) -> nn.Module:
    """Standalone copy of a layer: without its activation, and with or without its bias."""
    layer = deepcopy(layer)
    if isinstance(layer, KSLinear):
        layer.activation = "none"
    if not has_bias:
        layer.bias = None
    freeze(layer)
    return layer


# ---- Table 6

VISION_MODELS = {  # names in the paper
    "ViT-S/16": (VIT_S16, Vision()),
    "ViT-B/16": (replace(VIT_S16, features=768, heads=12), Vision()),
    "ViT-L/16": (replace(VIT_S16, features=1024, heads=16, depth=24), Vision()),
    "ViT-H/14": (replace(VIT_S16, features=1280, heads=16, depth=32), Vision(patch=14)),
}


@dataclass(frozen=True)
class Share:
    """Share of the feed-forward linear layers in the forward pass of one model, in one precision."""

    model: str
    precision: str
    whole_us: float
    layers_us: float  # sum over all blocks
    share: float
    paper: float | None
    others_share: float | None = None  # share of processor time that other programs used
    doubt: str = ""  # why the share is unreliable; empty if it is reliable


def measure_shares(
    names: tuple[str, ...], precisions: tuple[str, ...], where: torch.device, batch: int, repeats: int
) -> Iterator[Share]:
    """Measure a share per model and precision. Only one model at a time is in memory."""
    watch = Watch()
    timed = {"whole": WHOLE, "up": "linear 4N x N + bias", "down": "linear N x 4N + bias"}
    for name, precision in product(names, precisions):
        shape, ends = VISION_MODELS[name]
        job = ModelJob(name, (precision,), (), where, batch, tokens=0, repeats=repeats)
        with where:
            model = VisionTransformer(shape, ends).to(getattr(torch, precision)).eval()
        calls = {part: _call(job, module, model, FORWARD) for part, module in timed.items()}
        with torch.inference_mode():
            seconds = seconds_in_turn(calls, repeats, where)
        whole, up, down = (median(seconds[part]) for part in timed)
        layers, others = shape.depth * (up + down), watch.others_share()
        rounds = zip(seconds["up"], seconds["down"], seconds["whole"], strict=True)
        shares = [shape.depth * (first + second) / all_s for first, second, all_s in rounds]
        why = why_unreliable(shares, [others] if where.type == "cpu" else ())
        paper = published()["vit_linear_share"][name].get(precision)
        yield Share(name, precision, 1e6 * whole, 1e6 * layers, layers / whole, paper, others, why)
