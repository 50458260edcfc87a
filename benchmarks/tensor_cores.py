"""Our kernels beside the best that PyTorch offers without copying: `python benchmarks/tensor_cores.py OUT.jsonl`.

On the stratified patterns, in one run, interleaved: what a launcher takes in float16 and tf32x3, the default of each
tensor-core family that serves the pattern and batch, and the same pattern by zero-copy batched products (cuBLAS). In
batch-size-first with d > 1 cuBLAS has no zero-copy form: there, by permuting, multiplying and permuting back, and for small d
by one product with zeros between. float32 baselines are strict (no TF32). Each time stands beside its error against float64.
With --device cpu it is a rehearsal on the processor.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import click
import torch

from ksgen.devices import Device, find_device
from ksgen.families import FAMILIES
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.plan import PLANNER, choice_by_name, limits_of
from ksgen.reference import multiply
from ksgen.roofline import measure_ceilings
from ksgen.spec import LAYOUTS, KernelSpec, stratified

Product = Callable[[], torch.Tensor]
JOBS = (("float16", torch.float16), ("tf32x3", torch.float32))
MOST_DENSIFIED = 4  # j that are worth zeros
ROTATED_BYTES = 256 * 2**20  # more than a last-level cache holds


def by_matrix(weights: torch.Tensor) -> torch.Tensor:
    """(a, d, b, c): one contiguous matrix for each (i, j)."""
    return weights.permute(0, 3, 1, 2).contiguous()


def zero_copy_last(pattern: Pattern, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> Product:
    """min(a, d) batched products on views of X and Y."""
    a, b, c, d = pattern.shape
    x4, y4, matrices = x.view(a, c, d, -1), y.view(a, b, d, -1), by_matrix(weights)

    def product() -> torch.Tensor:
        if a <= d:
            for i in range(a):
                torch.bmm(matrices[i], x4[i].permute(1, 0, 2), out=y4[i].permute(1, 0, 2))
        else:
            for j in range(d):
                torch.bmm(matrices[:, j], x4[:, :, j], out=y4[:, :, j])
        return y

    return product


def zero_copy_first(pattern: Pattern, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> Product:
    """d = 1: one batched product on views."""
    a, b, c, _ = pattern.shape
    x3, y3 = x.view(-1, a, c).permute(1, 0, 2), y.view(-1, a, b).permute(1, 0, 2)
    transposed = weights[..., 0].transpose(1, 2)

    def product() -> torch.Tensor:
        torch.bmm(x3, transposed, out=y3)
        return y

    return product


def three_passes(pattern: Pattern, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> Product:
    """Permute, multiply, permute back, each into memory that is there already."""
    a, b, c, d = pattern.shape
    matrices = by_matrix(weights).view(a * d, b, c).transpose(1, 2)
    moved = torch.empty(a, d, len(x), c, dtype=x.dtype, device=x.device)
    result = torch.empty(a * d, len(x), b, dtype=x.dtype, device=x.device)

    def product() -> torch.Tensor:
        moved.copy_(x.view(-1, a, c, d).permute(1, 3, 0, 2))
        torch.bmm(moved.view(a * d, -1, c), matrices, out=result)
        y.view(-1, a, b, d).copy_(result.view(a, d, -1, b).permute(2, 0, 3, 1))
        return y

    return product


def densified(pattern: Pattern, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> Product:
    """The pattern (a, b d, c d, 1) with zeros."""
    a, b, c, d = pattern.shape
    wide = torch.zeros(a, b, d, c, d, dtype=x.dtype, device=x.device)
    for j in range(d):
        wide[:, :, j, :, j] = weights[..., j]
    return zero_copy_first(Pattern(a, b * d, c * d, 1), x, wide.view(a, b * d, c * d, 1), y)


def contenders(pattern: Pattern, layout: str, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> dict[str, Product]:
    if layout == "bsl":
        return {"bmm, zero-copy": zero_copy_last(pattern, x, weights, y)}
    if pattern.d == 1:
        return {"bmm, zero-copy": zero_copy_first(pattern, x, weights, y)}
    found = {"permute, bmm, permute": three_passes(pattern, x, weights, y)}
    if pattern.d <= MOST_DENSIFIED:
        found["bmm, densified"] = densified(pattern, x, weights, y)
    return found


def by_family(name: str, runtime: Device, kernel: KernelSpec, batch: int, weights: torch.Tensor) -> Callable[..., Product]:
    """Products by a family's default, whatever a launcher would take."""
    plan = PLANNER.plan_of(runtime, kernel, batch, choice_by_name(name, kernel, batch, limits_of(runtime)))
    stream = torch.cuda.current_stream().cuda_stream if weights.is_cuda else None
    packed = plan.pack(weights.data_ptr(), stream)

    def product_of(x: torch.Tensor, y: torch.Tensor) -> Product:
        def product() -> torch.Tensor:
            plan.launch((x.data_ptr(), packed, y.data_ptr(), batch), stream)
            return y

        return product

    return product_of


def families_of(runtime: Device, kernel: KernelSpec, batch: int) -> list[str]:
    """Those for tensor cores that serve the kernel and take the batch there."""
    limits = limits_of(runtime)
    able = (name for name, family in FAMILIES.items() if family.serves(kernel, limits) and family.takes(kernel, batch, True))
    return [name for name in able if name != "simt"]


def seconds_of(product: Product, device: torch.device) -> float:
    if device.type == "cpu":
        begin = perf_counter()
        product()
        return perf_counter() - begin
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    product()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def measure(
    pattern: Pattern, precision: str, dtype: torch.dtype, layout: str, batch: int, runs: int, device: torch.device, runtime: Device
) -> list[dict[str, Any]]:
    """A row for each contender: ours first, then each family's."""
    torch.manual_seed(0)
    kernel = KernelSpec(pattern, precision, layout)
    ks = Launcher(*pattern.shape)
    weights = ((torch.rand(pattern.shape) * 2 - 1) / pattern.c**0.5).to(dtype).to(device)
    shapes = [(batch, size) if layout == "bsf" else (size, batch) for size in (pattern.in_features, pattern.out_features)]
    sets = max(1, min(8, ROTATED_BYTES // kernel.bytes(batch)))
    pairs = [(torch.randn(shapes[0], device=device).to(dtype), torch.empty(shapes[1], dtype=dtype, device=device)) for _ in range(sets)]
    products: dict[str, list[Product]] = {}
    named = {f"ksgen {name}": by_family(name, runtime, kernel, batch, weights) for name in families_of(runtime, kernel, batch)}
    for x, y in pairs:
        products.setdefault("ksgen", []).append(ks.prepare(x, weights, layout=layout, out=y, precision=precision))
        for name, product_of in named.items():
            products.setdefault(name, []).append(product_of(x, y))
        for name, product in contenders(pattern, layout, x, weights, y).items():
            products.setdefault(name, []).append(product)
    errors = {name: error_of(pattern, layout, pairs[0], weights, each[0]) for name, each in products.items()}
    seconds: dict[str, list[float]] = {name: [] for name in products}
    for run in range(-2, runs):  # two to warm up
        for name, each in products.items():
            took = seconds_of(each[run % sets], device)
            if run >= 0:
                seconds[name].append(took)
    best = min(median(each) for name, each in seconds.items() if not name.startswith("ksgen"))
    return [
        {
            "pattern": list(pattern.shape),
            "precision": precision,
            "layout": layout,
            "batch": batch,
            "contender": name,
            "median_us": median(each) * 1e6,
            "fastest_us": min(each) * 1e6,
            "slowest_us": max(each) * 1e6,
            "error": errors[name],
            "gbyte_per_s": kernel.bytes(batch) / median(each) / 1e9,
            "tflop_per_s": kernel.flops(batch) / median(each) / 1e12,
            "best_baseline_over_this": best / median(each),
            "why": ks.explain(batch, precision=precision, layout=layout) if name == "ksgen" else "",
        }
        for name, each in seconds.items()
    ]


def operand_of(device: str, precision: str) -> str | None:
    """What tensor cores multiply, where there are any."""
    return None if device == "cpu" else {"float16": "f16"}.get(precision, "tf32")


def error_of(pattern: Pattern, layout: str, pair: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, product: Product) -> float:
    """Relative, Frobenius, on both ends of the batch; the output is NaN before."""
    x, y = pair
    y.fill_(float("nan"))
    product()
    ends = torch.cat([torch.arange(16), torch.arange(-16, 0)]).to(x.device) % (len(x) if layout == "bsf" else x.shape[1])
    dimension = 0 if layout == "bsf" else 1
    given, found = (each.index_select(dimension, ends).double().cpu().numpy() for each in (x, y))
    truth = multiply(pattern, given, weights.double().cpu().numpy(), layout)
    return float(((found - truth) ** 2).sum() ** 0.5 / (truth**2).sum() ** 0.5)


def line_of(row: dict[str, Any]) -> str:
    rate = f"{row['gbyte_per_s']:7.0f} GB/s  {row['tflop_per_s']:6.1f} TFLOP/s  {row['share_of_floor']:4.0%} of the floor"
    beside = f"{row['best_baseline_over_this']:5.2f} x the best baseline, error {row['error']:.1e}"
    return f"{row['contender']:22} {row['median_us']:9.1f} us  {rate}  {beside}"


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--patterns", default=60, show_default=True, help="How many of the stratified ones.")
@click.option("--batch", default=25088, show_default=True)
@click.option("--runs", default=10, show_default=True)
@click.option("--minutes", default=8.0, show_default=True, help="Stop then: the most telling patterns come first.")
@click.option("--device", default="cuda", show_default=True)
def main(out: Path, patterns: int, batch: int, runs: int, minutes: float, device: str) -> None:
    """Write a JSON line for each pattern, precision, layout and contender."""
    torch.backends.cuda.matmul.allow_tf32 = False
    where, end = torch.device(device), monotonic() + 60 * minutes
    head = {"device": torch.cuda.get_device_name() if where.type == "cuda" else "cpu", "torch": torch.__version__}
    runtime = find_device("opencl" if device == "cpu" else "driver")  # which launches on PyTorch's stream
    ceilings = {precision: measure_ceilings(runtime, precision, operand_of(device, precision)) for precision, _ in JOBS}
    with out.open("a", encoding="utf-8") as file, torch.no_grad():
        for pattern in stratified(patterns):
            for precision, dtype in JOBS:
                for layout in LAYOUTS:
                    if monotonic() > end:
                        click.echo(f"stopped after {minutes} minutes")
                        return
                    rows = measure(pattern, precision, dtype, layout, batch, runs, where, runtime)
                    floor_us = ceilings[precision].floor_s(KernelSpec(pattern, precision, layout), batch) * 1e6
                    for row in rows:
                        row |= {"floor_us": floor_us, "share_of_floor": floor_us / row["median_us"]}
                    file.writelines(json.dumps(head | row) + "\n" for row in rows)
                    file.flush()
                    for ours in (row for row in rows if row["contender"].startswith("ksgen")):
                        click.echo(f"{pattern!s:18} {precision:8} {layout}  {line_of(ours)}")


if __name__ == "__main__":
    main()
