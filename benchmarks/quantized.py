"""Errors of weights in eight bits, and times of a small batch: `python -m benchmarks.quantized [--json]`.

Errors are those of a sparse block of ViT-S/16 and one of GPT-2 medium, with random weights and inputs. Nothing is
downloaded; a trained model has other errors. Errors are relative, by the Frobenius norm, for the output of each layer
and of the block. The inputs differ from those of the calibration.

With --times, each job runs all layers of all blocks of a model once, each on its own x. Like a decoder, it reads the
weights sequentially from memory. Jobs alternate, on all cores.
"""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.torch_cpu import Job, medians_us
from ksgen.bench.models import GPT2_MEDIUM, SPECS, VIT_S16, TransformerBlock, TransformerSize, make_sparse, rule
from ksgen.measure.trust import keep_freed_memory
from ksgen.paths import resource
from ksgen.quantized import PER, Per
from ksgen.spec import STORAGES, WeightStorage, load
from ksgen.torch import KSLinear, quantize

SHAPES = {"vit-s16": VIT_S16, "gpt2-medium": GPT2_MEDIUM}
ROWS = 256  # of x, for calibration and for errors
X_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Error:
    """Error of one layer, or of a full block."""

    model: str
    storage: str
    per: str
    is_calibrated: bool
    is_x_too: bool  # whether x is in eight bits before each layer
    layer: str
    error: float
    saturated: int
    weights: int
    saturated_inputs: int  # elements of x


def block_of(name: str) -> TransformerBlock:
    """Create a sparse block with random weights."""
    block = SHAPES[name].block()
    make_sparse(block, rule(name), from_weights=False)
    block.eval()
    return block


def outputs(block: TransformerBlock, x: Tensor) -> dict[str, Tensor]:
    """Outputs of each layer and of the block, by name."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        # without the residual
        return lambda layer, given, y: found.update({name: y - given[1] if len(given) > 1 else y})

    layers = [(name, each) for name, each in block.named_modules() if hasattr(each, "chain")]
    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers]
    with torch.no_grad():
        whole = block(x)
    for handle in handles:
        handle.remove()
    return found | {"block": whole - x}  # without the residual


def errors(name: str, storages: tuple[WeightStorage, ...], pers: tuple[Per, ...]) -> Iterator[Error]:
    block, shape = block_of(name), SHAPES[name]
    calibration, x = (torch.randn(1, ROWS, shape.features) for _ in range(2))
    wanted = outputs(block, x)
    given = ((None, False), (calibration, False), (calibration, True))
    for storage, per, (inputs, x_too) in product(storages, pers, given):
        quantized = deepcopy(block)
        report = quantize(quantized, storage, per, inputs=inputs, x_too=x_too)
        found, counts = outputs(quantized, x), dict[str, tuple[int, int, int]]()
        for each in report.layers:
            saturated_inputs = quantized.get_submodule(each.name).saturated_inputs
            counts[each.name] = each.saturated, each.chain.weight_count, saturated_inputs
        counts["block"] = tuple(map(sum, zip(*counts.values(), strict=True)))  # type: ignore[assignment]
        for layer, y in wanted.items():
            error = float((found[layer] - y).norm() / y.norm())
            yield Error(name, storage, per, inputs is not None, x_too, layer, error, *counts[layer])


def layers_of(name: str, shape: TransformerSize, dtype: torch.dtype) -> list[KSLinear]:
    """Layers of all blocks."""
    chains = load(resource("specs") / SPECS[name]).layers
    counts = {"attention": 4} if name == "vit-s16" else {}
    each = [chain for layer, chain in chains.items() for _ in range(counts.get(layer, 1))]
    return [KSLinear(chain, bias=False, dtype=dtype).eval() for _ in range(shape.depth) for chain in each]


def jobs(name: str, batch: int) -> dict[str, Job]:
    """Jobs that run all layers once, by the storage of x and of the weights."""
    found: dict[str, Job] = {}
    for kind in X_DTYPES:
        layers = layers_of(name, SHAPES[name], getattr(torch, kind))
        xs = {
            width: torch.randn(batch, width, dtype=layers[0].weights[0].dtype)
            for width in {each.in_features for each in layers}
        }
        storages: tuple[Any, ...] = (kind, *STORAGES)
        for storage in storages:
            if storage in STORAGES:  # all blocks repeat the values of one, in separate memory
                by_chain = {each.chain: each for each in layers}
                quantized = {chain: each.quantize(storage) for chain, each in by_chain.items()}
                stored: list[nn.Module] = [deepcopy(quantized[each.chain]) for each in layers]
            else:
                stored = [*(each.freeze() for each in layers)]

            def run(stored: list[nn.Module] = stored, xs: dict[int, Tensor] = xs) -> None:
                with torch.no_grad():
                    for layer in stored:
                        layer(xs[layer.in_features])

            found[f"x in {kind}, weights in {storage}"] = run
    return found


@click.command()
@click.option(
    "--model", "models", type=click.Choice(list(SHAPES)), default=tuple(SHAPES), multiple=True, show_default=True
)
@click.option(
    "--storage",
    "storages",
    type=click.Choice(list(STORAGES)),
    default=tuple(STORAGES),
    multiple=True,
    show_default=True,
)
@click.option("--per", "pers", type=click.Choice(list(PER)), default=tuple(PER), multiple=True, show_default=True)
@click.option("--times", is_flag=True, help="Print times instead of errors.")
@click.option("--batch", default=1, show_default=True, help="Batch size of the times.")
@click.option("--most-seconds", default=4.0, show_default=True, help="Most seconds to time a model.")
@click.option("--json", "as_json", is_flag=True)
def main(
    models: tuple[str, ...],
    storages: tuple[WeightStorage, ...],
    pers: tuple[Per, ...],
    times: bool,
    batch: int,
    most_seconds: float,
    as_json: bool,
) -> None:
    """Print errors of both models' layers, or times of all of them."""
    torch.manual_seed(0)
    if times:
        keep_freed_memory()
    for name in models:
        if times:
            us = medians_us(jobs(name, batch), most_seconds)
            first = us["x in float32, weights in float32"]
            for way, each in us.items():
                row: dict[str, Any] = {"model": name, "batch": batch, "way": way}
                row |= {"us": round(each, 1), "of_float32": round(each / first, 3)}
                line = f"{name:12} batch {batch:3}  {way:36} {each:9.0f} us  {each / first:.2f}"
                click.echo(json.dumps(row) if as_json else line)
            continue
        for found in errors(name, storages, pers):
            if as_json:
                click.echo(json.dumps(vars(found)))
            else:
                scales = f"{found.storage}, a scale per {found.per}{', chosen for x' if found.is_calibrated else ''}"
                scales += ", x too" if found.is_x_too else ""
                clipped = f"{found.saturated} of {found.weights} saturated"
                clipped += f", {found.saturated_inputs} of x" if found.is_x_too else ""
                click.echo(f"{name:12} {scales:47} {found.layer:24} {found.error:.4f}  {clipped}")


if __name__ == "__main__":
    main()
