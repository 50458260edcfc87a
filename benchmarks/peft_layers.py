"""PEFT's OFT, BOFT and GraLoRA with and without `ksgen.torch.peft.accelerate`: `python -m benchmarks.peft_layers`.

"adapter" is a training step of one layer without its base layer, with gradients of x and of the parameters. It rotates
x, or updates y. "step" is a training step of a Llama with an adapter on every linear layer, and AdamW.
Contenders alternate. "MB" is what one layer stores for the backward pass and in buffers, without parameters.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import click
import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.torch_cpu import medians_us
from ksgen.measure.trust import keep_freed_memory
from ksgen.torch.peft import accelerate, replace_extension

os.environ.setdefault("KSGEN_COMPILE", "wait")

METHODS: dict[str, Callable[..., Any]] = {
    "OFT, blocks of 32": lambda **more: peft.OFTConfig(oft_block_size=32, **more),
    "BOFT, one factor, blocks of 8": lambda **more: peft.BOFTConfig(boft_block_size=8, **more),
    "BOFT, two factors, blocks of 8": lambda **more: peft.BOFTConfig(
        boft_block_size=8, boft_n_butterfly_factor=2, **more
    ),
    "GraLoRA, r=32, k=2": lambda **more: peft.GraloraConfig(r=32, gralora_k=2, **more),
    "GraLoRA, r=64, k=4": lambda **more: peft.GraloraConfig(r=64, gralora_k=4, **more),
}


class Free(nn.Linear):  # type: ignore[misc]
    """Base layer whose product costs nothing."""

    def __init__(self, features: int, y: Tensor | None) -> None:
        super().__init__(features, features, bias=False)
        self.y = y

    def forward(self, x: Tensor) -> Tensor:
        return x if self.y is None else self.y.detach()


def adapter_step(layer: Any, x: Tensor, y_gradient: Tensor) -> Callable[[], object]:
    wanted = [x, *(each for each in layer.parameters() if each.requires_grad)]
    return lambda: torch.autograd.grad(layer(x), wanted, y_gradient)


def stored_bytes(layer: Any, x: Tensor) -> int:
    """Bytes of a layer's buffers, and of what it stores for its backward pass, apart from x and parameters."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in layer.buffers()}
    given = {each.untyped_storage().data_ptr() for each in (x, *layer.parameters())}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = layer(x)
    del kept
    return sum(size for place, size in found.items() if place not in given)


def model_step(model: Any, rows: int) -> Callable[[], object]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    tokens = torch.randint(512, (8, rows // 8))

    def run() -> object:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return optimizer.step()

    return run


@click.command()
@click.option("--only", default="", help="Only methods whose names contain this.")
@click.option("--features", default=1024, show_default=True)
@click.option("--rows", default=1568, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--seconds", default=6.0, show_default=True, help="Most seconds per row of the table.")
@click.option("--steps/--no-steps", default=True, show_default=True, help="Time steps of a model, too.")
def main(only: str, features: int, rows: int, threads: int, seconds: float, steps: bool) -> None:
    """Time PEFT's layers and the accelerated ones."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    keep_freed_memory()
    replace_extension()
    x, y, y_gradient = (torch.randn(rows, features) for _ in range(3))
    x.requires_grad_()
    for name, configure in METHODS.items():
        if only not in name:
            continue
        base = nn.Sequential(Free(features, y if "GraLoRA" in name else None))
        theirs = peft.get_peft_model(base, configure(target_modules=["0"], init_weights=False)).base_model.model
        ours = copy.deepcopy(theirs)
        accelerate(ours)
        jobs = {key: adapter_step(each[0], x, y_gradient) for key, each in (("peft", theirs), ("ksgen", ours))}
        sizes = ", ".join(f"{stored_bytes(each[0], x) / 1e6:.1f}" for each in (theirs, ours))
        report(f"{name}: adapter", medians_us(jobs, seconds), f"; MB {sizes}")
        if steps:
            sizes_of = {"hidden_size": features, "intermediate_size": 2 * features, "num_attention_heads": 16}
            model = LlamaForCausalLM(LlamaConfig(**sizes_of, num_hidden_layers=2, vocab_size=512))
            adapted = peft.get_peft_model(model, configure(target_modules="all-linear"))
            faster = copy.deepcopy(adapted)
            accelerate(faster)
            found = {key: model_step(each, rows) for key, each in (("peft", adapted), ("ksgen", faster))}
            report(f"{name}: step", medians_us(found, seconds), "")


def report(name: str, took: dict[str, float], more: str) -> None:
    times = ", ".join(f"{key} {each / 1e3:.2f} ms" for key, each in took.items())
    click.echo(f"{name}: {times}: {took['peft'] / took['ksgen']:.2f} times as fast{more}")


if __name__ == "__main__":
    main()
