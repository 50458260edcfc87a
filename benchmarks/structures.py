"""Structured layers as chains, their authors' forms in PyTorch, and `nn.Linear`: `python -m benchmarks.structures`.

`--merge` times chains of many factors before and after `ksgen.torch.optimize` instead. `--attention` times products by
Monarch attention matrices, whose weights differ per sample and head, and are new at each call. Weights are random,
contenders alternate, and times are medians in microseconds. "forward" is a frozen layer, "training" a step with all
gradients.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from math import isqrt, sqrt

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from benchmarks.torch_cpu import Job, forward, medians_us
from ksgen import block_butterfly, kaleidoscope, square_dyadic
from ksgen.bench.authors import FORMS
from ksgen.bench.chains import structured
from ksgen.measure.quiet import keep_freed_memory
from ksgen.pattern import Chain
from ksgen.structures import Structure
from ksgen.torch import KSLinear, optimize

os.environ.setdefault("KSGEN_COMPILE", "wait")

SAMPLES, HEADS, WIDTH, SEQUENCES = 8, 6, 64, (196, 256)  # of attention: ViT-S/16 has 6 heads of 64 features
MERGED = {
    "square_dyadic(1024)": square_dyadic(1024),
    "block_butterfly(1024, 16)": block_butterfly(1024, 16),
    "kaleidoscope(256)": kaleidoscope(256),
}


def training(run: Callable[[Tensor], Tensor], x: Tensor, learned: list[Tensor]) -> Job:
    """Step with gradients of x and of all weights."""

    def step() -> None:
        y = run(x)
        torch.autograd.grad(y, [x, *learned], torch.ones_like(y))

    return step


def compared(structure: Structure, rows: int, dtype: torch.dtype, is_training: bool) -> dict[str, Job]:
    """Jobs of one structure: ksgen, the authors' form, and the dense layer of the same sizes."""
    form = FORMS[structure.chain.name]
    state = {name: torch.randn(shape, dtype=dtype) / 32 for name, shape in structure.shapes.items()}
    layer = KSLinear.from_structure(structure, state).requires_grad_(is_training).train(is_training)
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=dtype).requires_grad_(is_training)
    x = torch.randn(rows, layer.in_features, dtype=dtype, requires_grad=is_training)
    torch.testing.assert_close(layer(x), form(x, state), rtol=0.1, atol=0.1)
    if not is_training:
        for name in list(getattr(layer.weights, "parametrizations", [])):  # tied weights, which cannot be frozen
            parametrize.remove_parametrizations(layer.weights, name)
        layer.freeze()
        return {"ksgen": lambda: layer(x), "authors": lambda: form(x, state), "dense": lambda: dense(x)}
    theirs = {name: each.requires_grad_() for name, each in state.items()}
    return {
        "ksgen": training(layer, x, list(layer.weights.parameters())),
        "authors": training(lambda given: form(given, theirs), x, list(theirs.values())),
        "dense": training(dense, x, [dense.weight]),
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
@click.option("--merge", is_flag=True, help="Time chains before and after `optimize`.")
@click.option("--attention", is_flag=True, help=f"Time attention matrices of {SAMPLES} samples and {HEADS} heads.")
@click.option("--threads", default=2, show_default=True)
@click.option("--runs", default=15, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Most seconds per line.")
def main(
    batches: tuple[int, ...],
    precisions: tuple[str, ...],
    merge: bool,
    attention: bool,
    threads: int,
    runs: int,
    seconds: float,
) -> None:
    """Print a table of median times in microseconds."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    if attention:
        for precision, sequence in product(precisions, SEQUENCES):
            with torch.no_grad():
                jobs = attended(sequence, getattr(torch, precision))
                _print(f"attention over {sequence} tokens, {precision}", medians_us(jobs, seconds, runs))
        return
    cases = structured()
    for precision, name, batch in product(precisions, MERGED if merge else cases, batches):
        dtype, line = getattr(torch, precision), f"{name}, {precision}, batch {batch}"
        if merge:
            chain, jobs = merged(MERGED[name], batch, dtype)
            _print(f"{line}, to {chain}", medians_us(jobs, seconds, runs))
            continue
        for step in ("forward", "training"):
            jobs = compared(cases[name], batch, dtype, step == "training")
            with torch.set_grad_enabled(step == "training"):
                _print(f"{line}, {step}", medians_us(jobs, seconds, runs))


def _print(line: str, times: dict[str, float]) -> None:
    click.echo(f"{line}: {', '.join(f'{name} {us:.4g}' for name, us in times.items())}")


if __name__ == "__main__":
    main()
