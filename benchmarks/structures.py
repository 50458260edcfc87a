"""Chains of many factors before and after `ksgen.torch.optimize`: `python -m benchmarks.structures`.

`--attention` times products by Monarch attention matrices instead, whose weights differ per sample and head, and are
new at each call. Weights are random, contenders alternate, and times are medians in microseconds.
`ksgen bench layers structures` compares structures with their authors' forms.
"""

import os
from copy import deepcopy
from functools import partial
from itertools import product
from math import isqrt, sqrt

import click
import torch
from torch import nn
from torch.nn import functional

from benchmarks.torch_cpu import Job, forward, medians_us
from ksgen import block_butterfly, kaleidoscope, square_dyadic
from ksgen.measure.trust import keep_freed_memory
from ksgen.pattern import Chain
from ksgen.torch import KSLinear, optimize

os.environ.setdefault("KSGEN_COMPILE", "wait")

SAMPLES, HEADS, WIDTH, SEQUENCES = 8, 6, 64, (196, 256)  # of attention: ViT-S/16 has 6 heads of 64 features
MERGED = {
    "square_dyadic(1024)": square_dyadic(1024),
    "block_butterfly(1024, 16)": block_butterfly(1024, 16),
    "kaleidoscope(256)": kaleidoscope(256),
}


def merged(chain: Chain, rows: int, dtype: torch.dtype) -> tuple[Chain, dict[str, Job]]:
    """Merged chain, and jobs of the layer before and after merging, and of a dense layer."""
    layer = KSLinear(chain, bias=False, dtype=dtype).eval()
    best = optimize(layer, batch=rows)
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=dtype)
    layers = {"layer": layer, "merged": best, "dense": dense}
    x = torch.randn(rows, layer.in_features, dtype=dtype)
    return best.chain, {name: forward(each, x) for name, each in layers.items()}


def attended(sequence: int, dtype: torch.dtype, samples: int = SAMPLES) -> dict[str, Job]:
    """Jobs that multiply values by one Monarch matrix per sample and head, and dense ones of the same sequence.

    All samples and heads are diagonal blocks of one chain, and values are (samples * heads * sequence, width). Every
    call packs or permutes the weights, but for `packed`. `dense` is given the attention matrices, and `sdpa` computes
    them.
    """
    side, count = isqrt(sequence), samples * HEADS
    chain = Chain.read([(count, side, side, side), (count * side, side, side, 1)])
    first = KSLinear(chain, bias=False, layout="bsl", dtype=dtype).eval()
    layers = {name: deepcopy(first) for name in ("auto", "ksgen", "strided", "bmm", "einsum")}
    for name, layer in layers.items():
        layer.backend = name
    layers["packed"] = deepcopy(layers["ksgen"]).freeze()
    values = torch.randn(count * sequence, WIDTH, dtype=dtype)
    for layer in layers.values():
        torch.testing.assert_close(layer(values), layers["einsum"](values), rtol=0.1, atol=0.1)
    by_head = values.view(samples, HEADS, sequence, WIDTH)
    queries, keys = torch.randn(2, *by_head.shape, dtype=dtype)
    matrices = (queries @ keys.transpose(-1, -2) / sqrt(WIDTH)).softmax(-1)
    jobs: dict[str, Job] = {name: partial(layer, values) for name, layer in layers.items()}
    return jobs | {
        "dense": lambda: matrices @ by_head,
        "sdpa": lambda: functional.scaled_dot_product_attention(queries, keys, by_head),
    }


@click.command()
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 16, 1568), show_default=True)
@click.option("--precision", "precisions", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--attention", is_flag=True, help=f"Time attention matrices of {SAMPLES} samples and {HEADS} heads.")
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Most seconds per line.")
def main(batches: tuple[int, ...], precisions: tuple[str, ...], attention: bool, threads: int, seconds: float) -> None:
    """Print a table of median times in microseconds."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    if attention:
        for precision, sequence in product(precisions, SEQUENCES):
            with torch.no_grad():
                jobs = attended(sequence, getattr(torch, precision))
                _print(f"attention over {sequence} tokens, {precision}", medians_us(jobs, seconds))
        return
    for precision, (name, given), batch in product(precisions, MERGED.items(), batches):
        chain, jobs = merged(given, batch, getattr(torch, precision))
        _print(f"{name}, {precision}, batch {batch}, to {chain}", medians_us(jobs, seconds))


def _print(line: str, times: dict[str, float]) -> None:
    click.echo(f"{line}: {', '.join(f'{name} {us:.4g}' for name, us in times.items())}")


if __name__ == "__main__":
    main()
