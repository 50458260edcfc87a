"""Cost of packing weights at each call, compared with weights packed once.

    python -m benchmarks.packing_cost [--json]

The kernel alone and the kernel with packing before it alternate on the selected device. Times are medians of --runs, by
the device's clock.
The host's cost of packing is in `benchmarks.launch_cost`.
"""

import json
from collections.abc import Callable
from statistics import median

import click
import numpy as np

from ksgen.devices import Device, find_device
from ksgen.devices.base import uploaded
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.plan import Plan
from ksgen.launch.planner import PLANNER
from ksgen.measure.queued import time_launches
from ksgen.paths import resource
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, KernelSpec, load

BATCHES = (1, 16, 1568, 25088)


def patterns() -> list[Pattern]:
    """Distinct patterns of ViT-S/16."""
    chains = load(resource("specs") / "vit.yaml").layers.values()
    return list(dict.fromkeys(pattern for chain in chains for pattern in chain))


def calls(device: Device, plan: Plan) -> dict[str, Callable[[], None]]:
    """Calls with and without packing, on zeros: the values do not affect a kernel's time."""
    pattern, dtype = plan.kernel.pattern, numpy_dtype(plan.kernel.dtype)
    sizes = (plan.batch * pattern.in_features, pattern.weight_count, plan.batch * pattern.out_features)
    x, weights, y = (uploaded(device, np.zeros(size, dtype)) for size in sizes)
    packed = plan.pack(weights, None)
    arguments = plan.arguments({"x": x, "weights": packed, plan.result: y, "workspace": plan.workspace()})

    def alone() -> None:
        plan.launch(arguments, None)

    def with_packing() -> None:
        plan.pack(weights, None, packed)
        plan.launch(arguments, None)

    return {"alone_us": alone, "with_packing_us": with_packing}


def medians_us(device: Device, jobs: dict[str, Callable[[], None]], runs: int) -> dict[str, float]:
    """Median times of the jobs, which alternate, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for run in range(runs):
        for name, job in jobs.items():
            times[name] += time_launches(device, job, runs=1, warmup=2 if run == 0 else 0)
    return {name: 1e6 * median(each) for name, each in times.items()}


@click.command()
@click.option("--batch", "batches", default=BATCHES, multiple=True, show_default=True)
@click.option("--precision", default="float32", type=click.Choice(list(PRECISIONS)), show_default=True)
@click.option("--layout", default="bsf", type=click.Choice(list(LAYOUTS)), show_default=True)
@click.option("--runs", default=51, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line per pattern and batch.")
def main(batches: tuple[int, ...], precision: str, layout: str, runs: int, as_json: bool) -> None:
    """Print both times, and their ratio."""
    device = find_device()
    if not as_json:
        click.echo(f"{device.name}, {precision}, {layout}")
    for pattern in patterns():
        kernel = KernelSpec(pattern, precision, layout)
        for batch in batches:
            took = medians_us(device, calls(device, PLANNER.plan(device, kernel, batch)), runs)
            ratio = took["with_packing_us"] / took["alone_us"]
            row: dict[str, object] = {"device": device.name, "pattern": str(pattern)}
            row |= {"precision": precision, "layout": layout, "batch": batch, **took}
            line = f"{pattern!s:12} batch {batch:5}  alone {took['alone_us']:9.1f} us"
            line += f"  with packing {took['with_packing_us']:9.1f} us  {ratio:5.2f}"
            click.echo(json.dumps(row | {"ratio": ratio}) if as_json else line)


if __name__ == "__main__":
    main()
