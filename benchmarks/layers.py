"""Layers, not factors, on the processor: all factors in one launch, and groups of layers in one: `python -m benchmarks.layers [--json]`.
With `--log FILE` each chain is kept as it is measured, and a later run goes on where one was stopped; `--minutes` stops one.

24 chains: those of the specs, and monarch, low-rank and butterfly chains of the sizes of transformers. Each by one launch, by a launch for
each factor, by PyTorch's batched products and as a dense layer; and three of them on the same x by one launch, and one by one. Frozen
layers, in turns on all cores, on memory that was used before, with a pause before each run.
"""

import json
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import geometric_mean, median
from time import monotonic

import click
import torch
from torch import nn

from benchmarks.torch_cpu import Job, medians_us
from ksgen.bench.host_memory import keep_freed_memory
from ksgen.errors import LaunchError
from ksgen.paths import resource
from ksgen.pattern import Chain, block_butterfly, low_rank, monarch
from ksgen.spec import load
from ksgen.torch import KSLinear

OF_TRANSFORMERS = ((384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768), (1024, 1024), (1024, 4096), (4096, 1024))
WAYS = ("one launch", "each factor", "bmm", "dense", "group", "three apart")
SIDE_BY_SIDE = 3  # as q, k and v
STOPPED = 3  # the exit status where time was up


def chains() -> dict[str, Chain]:
    """By name."""
    found = {
        f"{name} {layer}": chain for name in ("vit", "gpt2") for layer, chain in load(resource("specs") / f"{name}.yaml").layers.items()
    }
    found |= {f"monarch {inputs} to {outputs}": monarch(inputs, outputs, 32, 32) for inputs, outputs in OF_TRANSFORMERS}
    found |= {
        f"low rank {inputs} to {outputs}": low_rank(inputs, outputs, min(inputs, outputs) // 8) for inputs, outputs in OF_TRANSFORMERS[:6]
    }
    return found | {f"butterfly {features}, blocks of 64": block_butterfly(features, 64) for features in (512, 1024)}


def jobs(chain: Chain, batch: int, precision: str, layout: str) -> dict[str, Job]:
    """Every way, on one x."""
    options = {"layout": layout, "dtype": getattr(torch, precision), "bias": False}
    x = torch.randn((batch, chain.in_features) if layout == "bsf" else (chain.in_features, batch), dtype=options["dtype"])
    whole = [KSLinear(chain, backend="ksgen", **options).eval().freeze() for _ in range(SIDE_BY_SIDE)]
    factors = nn.Sequential(*(KSLinear([each], backend="ksgen", **options).eval().freeze() for each in chain))
    modules = {
        "one launch": whole[0],
        "each factor": factors,
        "bmm": KSLinear(chain, backend="bmm", **options).eval().freeze(),
        "dense": KSLinear([(1, chain.out_features, chain.in_features, 1)], backend="dense", **options).eval().freeze(),
        "group": KSLinear.group(whole),
    }
    axis = 1 if layout == "bsf" else 0

    def apart() -> object:
        return torch.cat([layer(x) for layer in whole], axis)

    return {name: lambda module=module: module(x) for name, module in modules.items()} | {"three apart": apart}


def timed(ways: dict[str, Job], seconds: float, runs: int) -> dict[str, float]:
    """Microseconds. Those of three layers have turns of their own: a way that is far slower than the best leaves."""
    with torch.no_grad():
        groups: Sequence[Sequence[str]] = (WAYS[:4], WAYS[4:])
        return {name: us for names in groups for name, us in medians_us({each: ways[each] for each in names}, seconds, runs).items()}


def key_of(chain: str, batch: int, layout: str, precision: str) -> tuple[str | int, ...]:
    """What rows of a log are of: of as many threads and the same PyTorch alone."""
    return chain, batch, layout, precision, torch.get_num_threads(), torch.__version__


def read_log(path: Path) -> dict[tuple[str | int, ...], dict[str, float]]:
    """What a log holds, by `key_of`. A last line that a kill cut off is dropped, from the file too."""
    if not path.exists():
        return {}
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    rows = map(json.loads, whole.splitlines())
    return {tuple(row[name] for name in ("chain", "batch", "layout", "precision", "threads", "torch")): row["us"] for row in rows}


@click.command()
@click.option("--batch", "batches", default=(1, 16, 1568), multiple=True, show_default=True)
@click.option("--precision", "precisions", default=("float32",), multiple=True, show_default=True)
@click.option("--layout", "layouts", default=("bsf", "bsl"), multiple=True, show_default=True)
@click.option("--runs", default=15, show_default=True)
@click.option("--most-seconds", default=0.5, show_default=True, help="For a chain.")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="A file to add rows to, and to take those from that it has.")
@click.option("--minutes", type=float, default=inf, help="Stop after so many; with --log the next run goes on.")
@click.option("--json", "as_json", is_flag=True)
def main(
    batches: Sequence[int], precisions: Sequence[str], layouts: Sequence[str], runs: int, most_seconds: float, log: Path | None,
    minutes: float, as_json: bool,
) -> None:  # fmt: skip
    """Time every way for every chain."""
    torch.manual_seed(0)
    keep_freed_memory()
    known, end = read_log(log) if log else {}, monotonic() + 60 * minutes
    for precision, layout, batch in ((each, layout, batch) for each in precisions for layout in layouts for batch in batches):
        ratios: dict[str, list[float]] = {}
        for name, chain in chains().items():
            job = key_of(name, batch, layout, precision)
            if job not in known and monotonic() > end:
                click.echo(f"stopped after {minutes:g} minutes at {name}, {precision} {layout} batch {batch}", err=True)
                raise SystemExit(STOPPED)
            try:
                us = known.get(job) or timed(jobs(chain, batch, precision, layout), most_seconds, runs)
            except LaunchError as error:
                raise click.ClickException(f"{name}: {error}") from error
            best = us["one launch"]
            for way in ("each factor", "bmm", "dense"):
                ratios.setdefault(way, []).append(us[way] / best)
            ratios.setdefault("three apart", []).append(us["three apart"] / us["group"])
            row = {"chain": name, "patterns": list(map(str, chain)), "batch": batch, "layout": layout, "precision": precision, "us": us}
            if log and job not in known:
                with log.open("a") as file:
                    file.write(json.dumps(row | {"threads": torch.get_num_threads(), "torch": torch.__version__}) + "\n")
            words = "  ".join(f"{way} {each[-1]:.2f}" for way, each in ratios.items())
            click.echo(
                json.dumps(row) if as_json else f"{name:32} {precision} {layout} batch {batch:4}  one launch {best:9.1f} us  {words}"
            )
        for way, each in ratios.items():
            beside = "a group" if way == "three apart" else "one launch"
            spread = f"{min(each, default=inf):.2f} to {max(each, default=inf):.2f}"
            said = f"{precision} {layout} batch {batch}: {way} over {beside}: "
            summary = f"{said}mean {geometric_mean(each):.2f}, median {median(each):.2f}, {spread}"
            click.echo(json.dumps({"summary": summary}) if as_json else summary)


if __name__ == "__main__":
    main()
