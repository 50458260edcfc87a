"""What `ksgen.torch` does with tensors on the processor, beside torch.einsum: `python benchmarks/torch_cpu.py [--json]`.

Forward, and forward with backward for x and the weights, in both layouts, in turn on all cores, with a pause before each run;
medians of --runs, on memory that was used before. "auto" is the faster of ksgen's kernels and PyTorch's products on views, as it was
timed when the product was first met; a row says which. Weights are packed at each call.
"""

import json
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import click
import torch

from ksgen.bench.host_memory import keep_freed_memory
from ksgen.measure.pause import rest
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec
from ksgen.torch.backends import BACKENDS
from ksgen.torch.choice import choose
from ksgen.torch.ops import multiply

PATTERNS = [
    (2, 48, 192, 1), (1, 192, 48, 2), (6, 64, 64, 1), (1, 768, 192, 2), (1, 128, 128, 3),
    (1, 64, 64, 16), (4, 64, 64, 16), (1, 48, 48, 64), (16, 64, 256, 1), (1, 256, 256, 4), (64, 2, 2, 8),
]  # fmt: skip
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forward(product: Product, x: torch.Tensor, weights: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return product(x, weights)

    return run


def training(product: Product, x: torch.Tensor, weights: torch.Tensor) -> Callable[[], object]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with torch.no_grad():
        y_gradient = torch.randn_like(product(x, weights))
    return lambda: torch.autograd.grad(product(x, weights), (x, weights), y_gradient)


def median_ms(jobs: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Of each job, in turn with the others."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for run in range(-2, runs):  # two to warm up
        for name, job in jobs.items():
            rest()
            begin = perf_counter_ns()
            job()
            if run >= 0:
                times[name].append((perf_counter_ns() - begin) / 1e6)
    return {name: median(each) for name, each in times.items()}


@click.command()
@click.option("--batch", "batches", default=(32, 1024), multiple=True, show_default=True)
@click.option("--runs", default=21, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(batches: tuple[int, ...], runs: int, as_json: bool) -> None:
    """Time both ways on every pattern."""
    torch.manual_seed(0)
    keep_freed_memory()
    ratios: dict[str, list[float]] = {}
    for shape in PATTERNS:
        pattern, weights = Pattern(*shape), (torch.rand(shape) * 2 - 1) / shape[2] ** 0.5
        for batch in batches:
            for layout in LAYOUTS:
                x = torch.randn((batch, pattern.in_features) if layout == "bsf" else (pattern.in_features, batch))
                ways: dict[str, Product] = {
                    "ksgen": lambda x, weights, layout=layout: multiply(x, weights, layout=layout),
                    "einsum": lambda x, weights, layout=layout: BACKENDS["einsum"](x, weights, layout),
                }
                for kind, made in (("forward", forward), ("training", training)):
                    took = median_ms({name: made(way, x, weights) for name, way in ways.items()}, runs)
                    ratio = took["einsum"] / took["ksgen"]
                    ratios.setdefault(f"{kind} {layout}", []).append(ratio)
                    chosen = choose(KernelSpec(pattern, "float32", layout), batch, x.device).backend
                    row = {
                        "pattern": shape,
                        "batch": batch,
                        "layout": layout,
                        "kind": kind,
                        "auto": chosen,
                        **took,
                        "einsum_over_ksgen": ratio,
                    }
                    words = f"{pattern!s:12} batch {batch:5} {layout} {kind:8}  ksgen ({chosen:7}) {took['ksgen']:8.3f} ms"
                    click.echo(json.dumps(row) if as_json else f"{words}  einsum {took['einsum']:8.3f} ms  {ratio:5.2f}")
    for kind, each in ratios.items():
        summary = {"kind": kind, "einsum_over_ksgen_median": median(each), "least": min(each), "most": max(each)}
        click.echo(json.dumps(summary) if as_json else f"{kind}: median {median(each):.2f}, from {min(each):.2f} to {max(each):.2f}")


if __name__ == "__main__":
    main()
