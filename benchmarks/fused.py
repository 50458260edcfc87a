"""Layers on GPUs, by the cost model: all factors in one launch beside a launch for each: `python -m benchmarks.fused`; with
`--side-by-side 3`, three layers on one X, such as q, k and v, in one launch beside the layers one by one.

The 24 chains of `ksgen bench layers`. Bytes are those that cross memory at least; times are what the model expects of a target's usual
card. Nothing is measured here, and no GPU is needed.
"""

import json
from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

import click

from ksgen.bench.chains import transformers
from ksgen.families import cuda_limits
from ksgen.families.chains import factor_kernels
from ksgen.families.expected import default_us
from ksgen.families.gpus import gpu_of
from ksgen.launch.fused import apart_us, family_of_chain
from ksgen.pattern import Chain
from ksgen.spec import Epilogue, KernelSpec

_ROW = "{:30} {:>9} {:>9} {:>6}   {:>9} {:>9} {:>6}  {}"


def row(chain: Chain, precision: str, layout: str, target: str, batch: int, side_by_side: int = 1) -> dict[str, Any]:
    """Megabytes and microseconds of each factor's launch together, and of one launch, if there is one. Of a group: of a launch for each
    layer, the least there is; and of the layers as each is expected to be the fastest."""
    alone, limits = KernelSpec((chain.factors,), precision, layout, Epilogue()), cuda_limits(target)
    kernel = KernelSpec((chain.factors,) * side_by_side, precision, layout, Epilogue())
    each = [alone] * side_by_side if side_by_side > 1 else factor_kernels(kernel)
    found: dict[str, Any] = {
        "each_mb": sum(launch.bytes(batch) for launch in each) / 1e6,
        "one_mb": kernel.bytes(batch) / 1e6,
        "each_us": apart_us(kernel, limits, batch),
    }
    whole = family_of_chain(kernel, limits, batch)
    if whole is None:
        return found
    return found | {"one_us": default_us(whole, kernel, limits, batch), "by": f"{whole.name}, {whole.default(kernel, limits, batch)}"}


def lines(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A table, and what all of them gain."""
    yield _ROW.format("chain", "each, MB", "one, MB", "gain", "each, us", "one, us", "gain", "by")
    for name, found in rows.items():
        each, one = found["each_us"], found.get("one_us")
        mb = [f"{found[key]:.1f}" for key in ("each_mb", "one_mb")]
        us = [f"{each:.1f}", *([f"{one:.1f}", f"{each / one:.2f}"] if one else ["-", "-"])]
        yield _ROW.format(name, *mb, f"{_fewer(found):.2f}", *us, found.get("by", "no room"))
    gains = [found["each_us"] / found["one_us"] for found in rows.values() if "one_us" in found]
    taken = [gain for gain in gains if gain > 1]
    fewer = geometric_mean(map(_fewer, rows.values()))
    yield f"{len(rows)} chains: {fewer:.2f} times fewer bytes at the mean; one launch has room for {len(gains)}, and gains in {len(taken)}"
    if taken:
        whole = geometric_mean([*taken, *[1.0] * (len(rows) - len(taken))])
        few, most = min(taken), max(taken)
        yield f"gain of those {geometric_mean(taken):.2f} at the mean, {few:.2f} to {most:.2f}; of all, as chosen, {whole:.2f}"


def _fewer(found: dict[str, Any]) -> float:
    """Bytes of a launch for each factor over those of one."""
    gain: float = found["each_mb"] / found["one_mb"]
    return gain


@click.command()
@click.option("--batch", default=25088, show_default=True)
@click.option("--precision", "precisions", default=("bfloat16", "float32"), multiple=True, show_default=True)
@click.option("--layout", "layouts", default=("bsf", "bsl"), multiple=True, show_default=True)
@click.option("--target", "targets", default=("sm_80", "sm_90a"), multiple=True, show_default=True)
@click.option("--side-by-side", type=click.IntRange(min=1), default=1, show_default=True, help="Layers like each, on one X.")
@click.option("--json", "as_json", is_flag=True)
def main(batch: int, precisions: Sequence[str], layouts: Sequence[str], targets: Sequence[str], side_by_side: int, as_json: bool) -> None:
    """What the model and the counts say of every chain."""
    for target in targets:
        for precision in precisions:
            for layout in layouts:
                rows = {name: row(chain, precision, layout, target, batch, side_by_side) for name, chain in transformers().items()}
                told = {"target": target, "precision": precision, "layout": layout, "batch": batch}
                if as_json:
                    click.echo(json.dumps(told | {"chains": rows}))
                    continue
                rates = gpu_of(target).rates
                click.echo(f"\n{rates.card if rates else target} ({target}), {precision}, {layout}, batch {batch}")
                for line in lines(rows):
                    click.echo(line)


if __name__ == "__main__":
    main()
