"""KSLinear's `auto` compared with its other backends, on the processor: `python -m benchmarks.torch_cpu [--json]`.

Layers have one factor and no bias. The steps are forward with frozen layers, and forward with gradients of x and the
weights. All backends alternate on all cores, on memory that was used before, with a pause before each run. A row shows
the time of auto, and its ratio to each backend. A backend that takes four times as long as the best is dropped after
its first rounds.
"""

import json
import os
from collections.abc import Callable
from math import inf
from statistics import geometric_mean, median
from time import perf_counter_ns

import click
import torch

from ksgen.measure.host_memory import keep_freed_memory
from ksgen.measure.pause import rest
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from ksgen.torch import KSLinear
from ksgen.torch.operators.backends import BackendName

os.environ.setdefault("KSGEN_COMPILE", "wait")  # time kernels, and not what serves meanwhile

PATTERNS = [
    (2, 48, 192, 1), (1, 192, 48, 2), (6, 64, 64, 1), (1, 768, 192, 2), (1, 128, 128, 3),
    (1, 64, 64, 16), (4, 64, 64, 16), (1, 48, 48, 64), (16, 64, 256, 1), (1, 256, 256, 4), (64, 2, 2, 8),
]  # fmt: skip
WAYS: tuple[BackendName, ...] = ("auto", "ksgen", "strided", "bmm", "einsum", "dense")
FIRST, HOPELESS = 3, 4.0  # first rounds, which all backends run as warm-up; ratio to the best that drops a backend
TURN_US = 2000  # least duration of a round of the fastest backend
Job = Callable[[], object]


def forward(layer: KSLinear, x: torch.Tensor) -> Job:
    layer.eval().freeze()

    def run() -> object:
        with torch.no_grad():
            return layer(x)

    return run


def training(layer: KSLinear, x: torch.Tensor) -> Job:
    x = x.clone().requires_grad_()
    with torch.no_grad():
        y_gradient = torch.randn_like(layer(x))

    def run() -> object:
        found = torch.autograd.grad(layer(x), (x, *layer.parameters()), y_gradient)
        return [each.contiguous() for each in found]  # like stored gradients, whose layout some backends do not give

    return run


def medians_us(jobs: dict[str, Job], seconds: float, runs: int) -> dict[str, float]:
    """Median times of the jobs, which alternate, until each has its runs or the time is up.

    Short jobs run several times per round.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    end, order, repeats = perf_counter_ns() + seconds * 1e9, list(jobs), 1
    for turn in range(FIRST + runs):
        best = min((min(each) for each in times.values() if each), default=inf)
        if turn == FIRST:
            repeats = max(1, int(TURN_US / best))
        for name in order[::-1] if turn % 2 else order:  # vary the predecessor of each job
            if turn >= FIRST and min(times[name]) > HOPELESS * best:
                continue
            rest()
            begin = perf_counter_ns()
            for _ in range(repeats):
                jobs[name]()
            times[name].append((perf_counter_ns() - begin) / 1e3 / repeats)
        order.append(order.pop(0))  # rotate the first job
        if turn >= FIRST + 2 and perf_counter_ns() > end:
            break
    return {name: median(each[FIRST:] or each[1:]) for name, each in times.items()}


@click.command()
@click.option("--batch", "batches", default=(1, 16, 1024, 6272), multiple=True, show_default=True)
@click.option("--precision", "precisions", default=("float32", "bfloat16"), multiple=True, show_default=True)
@click.option("--steps", default=("forward", "training"), multiple=True, show_default=True)
@click.option("--runs", default=15, show_default=True)
@click.option("--most-seconds", default=1.0, show_default=True, help="For a row.")
@click.option("--json", "as_json", is_flag=True)
def main(
    batches: tuple[int, ...],
    precisions: tuple[str, ...],
    steps: tuple[str, ...],
    runs: int,
    most_seconds: float,
    as_json: bool,
) -> None:
    """Time every backend on every pattern."""
    torch.manual_seed(0)
    keep_freed_memory()
    kept: dict[str, list[tuple[float, float, str]]] = {}
    for precision in precisions:
        for shape in PATTERNS:
            for batch in batches:
                for layout in LAYOUTS:
                    for kind, made in (("forward", forward), ("training", training)):
                        if kind not in steps:
                            continue
                        dtype, features = getattr(torch, precision), Pattern(*shape).in_features
                        x = torch.randn((batch, features) if layout == "bsf" else (features, batch), dtype=dtype)
                        layers = {
                            each: KSLinear([shape], bias=False, layout=layout, dtype=dtype, backend=each)
                            for each in WAYS
                        }
                        took = medians_us({name: made(layer, x) for name, layer in layers.items()}, most_seconds, runs)
                        fastest = min(took, key=took.__getitem__)
                        row = {
                            "pattern": shape,
                            "batch": batch,
                            "layout": layout,
                            "precision": precision,
                            "kind": kind,
                            "us": took,
                        }
                        name = f"{kind} {precision} {layout} batch {batch}"
                        label = f"{','.join(map(str, shape))} {name}"
                        kept.setdefault(name, []).append(
                            (took["auto"] / took[fastest], took["bmm"] / took["auto"], label)
                        )
                        words = "  ".join(f"{each} {took[each] / took['auto']:.2f}" for each in WAYS[1:])
                        click.echo(json.dumps(row) if as_json else f"{label:52} auto {took['auto']:9.1f} us  {words}")
    for name, rows in kept.items():
        over_best, over_bmm = [each[0] for each in rows], [each[1] for each in rows]
        least, most = min(over_bmm), max(rows)
        summary = f"{name}: bmm over auto {geometric_mean(over_bmm):.2f}, at least {least:.2f}; "
        summary += f"auto over the best: median {median(over_best):.2f}, at most {most[0]:.2f} ({most[2].split()[0]})"
        click.echo(json.dumps({"summary": summary}) if as_json else summary)


if __name__ == "__main__":
    main()
