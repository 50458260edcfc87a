"""KSLinear's `auto` compared with its other backends, on the processor: `python -m benchmarks.torch_cpu [--json]`.

Layers have one factor and no bias. With `--layers` they are those of transformers with a bias, compared with
`nn.Linear` too. With `--convolutions` they are `KSConv1x1` in both memory formats, compared with `nn.Conv2d`, and the
batch counts images. The step "forward" has frozen layers, and "unfrozen" frozen ones of PyTorch's backends alone.
"compiled" is by `torch.compile`, if asked for. "training" has gradients of x and the weights. All backends alternate on
all cores, on memory that was used before, with a pause before each block of runs. A row shows the time of auto, and the
ratio of each backend's time to it.
"""

import json
from collections.abc import Callable
from itertools import product
from operator import itemgetter
from statistics import geometric_mean
from typing import Any, TextIO

import click
import torch
from torch import nn

from ksgen.bench.chains import transformers
from ksgen.measure.trust import Blocks, Runs, block_of, host_clock, keep_freed_memory, take_blocks
from ksgen.pattern import Chain, Pattern, Patterns, monarch
from ksgen.spec import LAYOUTS, Layout
from ksgen.torch import KSConv1x1, KSLinear, freeze
from ksgen.torch.layer.building import build_runs
from ksgen.torch.operators import replay
from ksgen.torch.operators.backends import BackendName
from ksgen.values import grouped

PATTERNS = [
    (2, 48, 192, 1), (1, 192, 48, 2), (6, 64, 64, 1), (1, 768, 192, 2), (1, 128, 128, 3),
    (1, 64, 64, 16), (4, 64, 64, 16), (1, 48, 48, 64), (16, 64, 256, 1), (1, 256, 256, 4), (64, 2, 2, 8),
]  # fmt: skip
BACKENDS: tuple[BackendName, ...] = ("auto", "ksgen", "strided", "bmm", "einsum", "dense")
BLOCK_S = 5e-3  # duration of a block: many fit into the time of a row
Job = Callable[[], object]


def inference(layer: nn.Module, x: torch.Tensor) -> Job:
    def run() -> object:
        with torch.no_grad():
            return layer(x)

    return run


def forward(layer: nn.Module, x: torch.Tensor) -> Job:
    freeze(layer.eval())
    return inference(layer, x)


def unfrozen(layer: nn.Linear, x: torch.Tensor) -> Job:
    if isinstance(layer.eval(), KSLinear) and layer.backend not in ("auto", "ksgen"):
        layer.freeze()
    return inference(layer, x)


def compiled(layer: nn.Linear, x: torch.Tensor) -> Job:
    run = inference(torch.compile(layer.eval()), x)
    run()
    return run


def training(layer: nn.Module, x: torch.Tensor) -> Job:
    x = x.clone().requires_grad_()
    with torch.no_grad():
        y_gradient = torch.randn_like(layer(x))

    def run() -> object:
        found = torch.autograd.grad(layer(x), (x, *layer.parameters()), y_gradient)
        return [each.contiguous() for each in found]  # as stored gradients are; some backends return another layout

    return run


def medians_us(jobs: dict[str, Job], seconds: float) -> dict[str, float]:
    """Median times of the jobs."""
    return {name: 1e6 * each.median for name, each in timed(jobs, seconds).items()}


def timed(jobs: dict[str, Job], seconds: float) -> dict[str, Blocks]:
    """Times of the jobs, whose blocks of runs alternate until all are known well enough, or the time is up."""

    def runs_of(job: Job) -> Runs:
        return lambda runs: [host_clock(job) for _ in range(runs)]

    for job in jobs.values():
        build_runs([job])  # else PyTorch's products would be timed until kernels are compiled
    timers = [block_of(runs_of(job), seconds=BLOCK_S) for job in jobs.values()]
    return dict(zip(jobs, take_blocks(timers, on_processor=True, most_seconds=seconds / len(jobs)), strict=True))


COMPILED = ("auto", "einsum", "linear")  # ways that are compiled: each takes seconds
STEPS = {"forward": forward, "unfrozen": unfrozen, "compiled": compiled, "training": training}


def chains_of_layers() -> dict[str, Chain]:
    """Layers of ViT-S, GPT-2 medium, and Llama with 1B and 7B parameters; two families each where specs have them."""
    found = {"small": Chain.read([(4, 48, 48, 1), (1, 256, 96, 2)])}
    sizes = ("384 to ", "1536 to 384", "1024 to ", "4096 to 1024")
    found |= {
        name: chain
        for name, chain in transformers().items()
        if name.startswith(("vit", "gpt2")) or (name.startswith("monarch") and any(each in name for each in sizes))
    }
    for model, ends in (("1B", ((2048, 2048), (2048, 8192), (8192, 2048))), ("7B", ((4096, 4096), (4096, 11264)))):
        found |= {f"{model}, {a} to {b}": monarch(a, b, 64, 64) for a, b in ends}
    return found


def layers_of(chain: Chain, layout: Layout, dtype: torch.dtype, has_bias: bool) -> dict[str, nn.Linear]:
    found: dict[str, nn.Linear] = {
        each: KSLinear(chain, bias=has_bias, layout=layout, dtype=dtype, backend=each) for each in BACKENDS
    }
    return found | ({"linear": nn.Linear(chain.in_features, chain.out_features, dtype=dtype)} if has_bias else {})


# Patterns and widths of images: grouped layers of ShuffleNet, then Monarch chains for the layers of a bottleneck.
CONVOLUTIONS: dict[str, tuple[Patterns, int]] = {
    "240 to 60, 3 groups": ("3,20,80,1", 28),
    "60 to 240, 3 groups": ("3,80,20,1", 28),
    "480 to 480, 8 groups": ("8,60,60,1", 14),
    "512 to 512": (monarch(512, 512, 16, 16), 14),
    "1024 to 1024": (monarch(1024, 1024, 32, 32), 7),
}


def convolutions(images: int, seconds: float, only: str) -> None:
    """Time 1x1 convolutions: sparse, dense, and grouped if the pattern has groups."""
    for words, (patterns, width) in CONVOLUTIONS.items():
        if only not in words:
            continue
        sparse = {"ksgen": KSConv1x1(patterns), "ksgen last": KSConv1x1(patterns, layout="bsf")}
        first, size = sparse["ksgen"].linear.chain[0], (sparse["ksgen"].in_channels, sparse["ksgen"].out_channels)
        counts = {"dense": 1} | ({"grouped": first.a} if "groups" in words else {})
        layers: dict[str, nn.Module] = {**sparse}
        for name, count in counts.items():
            layers |= {f"{name}{end}": nn.Conv2d(*size, 1, groups=count) for end in ("", " last")}
        x = torch.randn(images, size[0], width, width)
        for kind, step in (("forward", forward), ("training", training)):
            jobs = {
                name: step(layer, x.contiguous(memory_format=torch.channels_last) if "last" in name else x)
                for name, layer in layers.items()
            }
            took = medians_us(jobs, seconds)
            click.echo(
                f"{words}, {images} x {width} x {width}, {kind}: "
                + ", ".join(f"{name} {each:.0f} us" for name, each in took.items())
            )


@click.command()
@click.option("--convolutions", "are_convolutions", is_flag=True, help="Time 1x1 convolutions only.")
@click.option("--threads", default=0, help="0: all cores.")
@click.option("--layers", "are_layers", is_flag=True, help="Time layers of transformers instead of single factors.")
@click.option("--only", default="", help="Only layers or patterns whose names contain this.")
@click.option("--batch", "batches", default=(1, 16, 1024, 6272), multiple=True, show_default=True)
@click.option("--precision", "precisions", default=("float32", "bfloat16"), multiple=True, show_default=True)
@click.option("--steps", default=("forward", "training"), multiple=True, show_default=True)
@click.option("--most-seconds", default=1.0, show_default=True, help="Most seconds per row.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--read", type=click.File(), help="Print the table of rows that `--json` printed.")
def main(
    are_convolutions: bool,
    threads: int,
    are_layers: bool,
    only: str,
    batches: tuple[int, ...],
    precisions: tuple[str, ...],
    steps: tuple[str, ...],
    most_seconds: float,
    as_json: bool,
    read: TextIO | None,
) -> None:
    """Time every backend on every pattern."""
    torch.manual_seed(0)
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    if are_convolutions:
        for images in batches:
            convolutions(images, most_seconds, only)
        return
    if read:
        print_summary([json.loads(line) for line in read])
        return
    replay.load_now()  # else short calls would be timed before they are repeated without Python
    rows: list[dict[str, Any]] = []
    cases = chains_of_layers() if are_layers else {str(Pattern(*each)): Chain.read([each]) for each in PATTERNS}
    cases = {words: chain for words, chain in cases.items() if only in words}
    for precision, (words, chain), batch, layout in product(
        precisions, cases.items(), batches, LAYOUTS[:1] if are_layers else LAYOUTS
    ):
        for kind in (each for each in STEPS if each in steps):
            dtype, features = getattr(torch, precision), chain.in_features
            x = torch.randn((batch, features) if layout == "bsf" else (features, batch), dtype=dtype)
            layers = layers_of(chain, layout, dtype, are_layers)
            if kind == "compiled":
                torch._dynamo.reset()  # it compiles a function for at most eight layers
                layers = {name: layer for name, layer in layers.items() if name in COMPILED}
            jobs = {name: STEPS[kind](layer, x) for name, layer in layers.items()}
            blocks = timed(jobs, most_seconds)
            took = {name: 1e6 * each.median for name, each in blocks.items()}
            row = {"pattern": words, "batch": batch, "layout": layout, "precision": precision, "kind": kind}
            unreliable = [name for name, each in blocks.items() if each.why_unreliable]
            rows.append(row | {"us": {name: round(each, 1) for name, each in took.items()}, "unreliable": unreliable})
            label = f"{words} {kind} {precision} {layout} batch {batch}"
            others = (f"{each} {took[each] / took['auto']:.2f}" for each in took if each != "auto")
            line = f"{label:52} auto {took['auto']:9.1f} us  {'  '.join(others)}"
            click.echo(json.dumps(rows[-1]) if as_json else line)
    if not as_json:
        print_summary(rows)


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print a table of the times of other methods, divided by those of `auto`: geometric mean and least of all rows."""
    click.echo("| step | precision | layout | batch | rows | best other method | least | in | linear | least | in |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, group in grouped(rows, itemgetter("kind", "precision", "layout", "batch")).items():
        cells = [*name, len(group)]
        for ways in (BACKENDS[2:], ("linear",)):
            ratios = [
                (min(found) / row["us"]["auto"], row["pattern"])
                for row in group
                if (found := [row["us"][way] for way in ways if way in row["us"]])
            ]
            least, where = min(ratios, default=(0.0, ""))
            mean = geometric_mean([each for each, _ in ratios]) if ratios else 0.0
            cells += [f"{mean:.2f}", f"{least:.2f}", where] if ratios else ["", "", ""]
        click.echo(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
