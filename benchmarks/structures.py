"""Structured layers as chains, their authors' forms in PyTorch, and `nn.Linear`: `python -m benchmarks.structures`.

`--merge` times chains of many factors before and after `ksgen.torch.optimize` instead. Weights are random, contenders
alternate, and times are medians in microseconds. "forward" is a frozen layer, "training" a step with all gradients.
"""

import os
from collections.abc import Callable
from itertools import product

import click
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.torch_cpu import Job, forward, medians_us
from ksgen import block_butterfly, kaleidoscope, square_dyadic, structures
from ksgen.measure.quiet import keep_freed_memory
from ksgen.pattern import Chain
from ksgen.structures import Structure
from ksgen.torch import KSLinear, optimize

os.environ.setdefault("KSGEN_COMPILE", "wait")

Form = Callable[[Tensor, dict[str, Tensor]], Tensor]


def btt(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Batched products, with a permutation of the intermediate."""
    first, second = state["W1"], state["W2"]
    columns, rows = len(first), len(second)
    inner = torch.bmm(x.unflatten(1, (columns, -1)).transpose(0, 1), first).unflatten(2, (rows, -1))
    return torch.bmm(inner.permute(2, 1, 0, 3).flatten(2), second).transpose(0, 1).flatten(1)


def gralora(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two sums by `einsum`, with a permutation of the intermediate, as in PEFT."""
    down, up = state["gralora_A"], state["gralora_B"]
    inner = torch.einsum("bni,nir->bnr", x.unflatten(1, (len(down), -1)), down).unflatten(2, (len(down), -1))
    return torch.einsum("bjr,jro->bjo", inner.transpose(1, 2).flatten(2), up).flatten(1)


def blast(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Batched products for C and B, a weighted sum for D."""
    right, inner, left = state["C"], state["D"], state["B"]
    down = torch.bmm(x.unflatten(1, (len(right), -1)).transpose(0, 1), right.transpose(1, 2))
    mixed = torch.einsum("qbr,pqr->pbr", down, inner)
    return torch.bmm(mixed, left.transpose(1, 2)).transpose(0, 1).flatten(1)


def monarch(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two batched products, with a permutation before and after the second one."""
    first, second = state["blkdiag1"], state["blkdiag2"]
    inner = torch.bmm(x.unflatten(1, (len(first), -1)).transpose(0, 1), first.transpose(1, 2))
    inner = inner.permute(1, 0, 2).flatten(1).unflatten(1, (-1, len(second))).permute(2, 0, 1)
    return torch.bmm(inner, second.transpose(1, 2)).permute(1, 2, 0).flatten(1)


def kronecker(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Two sums by `einsum`, over the columns of B and then over those of A."""
    left, right = state["A"], state["B"]
    inner = torch.einsum("bij,oj->bio", x.unflatten(1, (left.shape[1], -1)), right)
    return torch.einsum("bio,pi->bpo", inner, left).flatten(1)


CASES: dict[str, tuple[Structure, Form]] = {
    "btt(1024, 1024, blocks=32, rank=4)": (structures.btt(1024, 1024, 32, 4), btt),
    "btt(1024, 4096, blocks=32, rank=2)": (structures.btt(1024, 4096, 32, 2), btt),
    "gralora(1024, 1024, blocks=4, rank=64)": (structures.gralora(1024, 1024, 4, 64), gralora),
    "blast(1024, 4096, blocks=16, rank=128)": (structures.blast(1024, 4096, 16, 128), blast),
    "monarch(1024, 4096, blocks=32)": (structures.monarch(1024, 4096, 32), monarch),
    "kronecker(1024, 4096, blocks=(64, 32))": (structures.kronecker(1024, 4096, (64, 32)), kronecker),
}
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


def compared(structure: Structure, form: Form, rows: int, dtype: torch.dtype, is_training: bool) -> dict[str, Job]:
    """Jobs of one structure: ksgen, the authors' form, and the dense layer of the same sizes."""
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


@click.command()
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 16, 1568), show_default=True)
@click.option("--precision", "precisions", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--merge", is_flag=True, help="Time chains before and after `optimize`.")
@click.option("--threads", default=2, show_default=True)
@click.option("--runs", default=15, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Most seconds per line.")
def main(
    batches: tuple[int, ...], precisions: tuple[str, ...], merge: bool, threads: int, runs: int, seconds: float
) -> None:
    """Print a table of median times in microseconds."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    for precision, name, batch in product(precisions, MERGED if merge else CASES, batches):
        dtype, line = getattr(torch, precision), f"{name}, {precision}, batch {batch}"
        if merge:
            chain, jobs = merged(MERGED[name], batch, dtype)
            _print(f"{line}, to {chain}", medians_us(jobs, seconds, runs))
            continue
        for step in ("forward", "training"):
            jobs = compared(*CASES[name], batch, dtype, step == "training")
            with torch.set_grad_enabled(step == "training"):
                _print(f"{line}, {step}", medians_us(jobs, seconds, runs))


def _print(line: str, times: dict[str, float]) -> None:
    click.echo(f"{line}: {', '.join(f'{name} {us:.4g}' for name, us in times.items())}")


if __name__ == "__main__":
    main()
