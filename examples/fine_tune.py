"""Convert a Hugging Face model, made from a config, fine-tune it, and compare. Nothing is downloaded.

    python examples/fine_tune.py
    python examples/fine_tune.py --features 512 --layers 8 --steps 300

A small GPT-2 learns to continue sequences that count by a step. Then its feed-forward layers become Kronecker-sparse,
with products of factors nearest to the learned weights, and training continues.
"""

import argparse
import sys

import torch
from torch import Tensor

from ksgen.pattern import monarch
from ksgen.torch import convert

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("not run: transformers is not installed; pip install transformers")

NUMBERS, LENGTH = 64, 32


def sequences(count: int) -> Tensor:
    """Draw rows that count up by a random step, modulo `NUMBERS`."""
    first, step = torch.randint(NUMBERS, (count, 1)), torch.randint(1, 8, (count, 1))
    return (first + step * torch.arange(LENGTH)) % NUMBERS


def train(model: GPT2LMHeadModel, steps: int) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        tokens = sequences(64)
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()


def describe(model: GPT2LMHeadModel) -> str:
    """Describe the loss on new sequences, and the model's size."""
    torch.manual_seed(1)
    tokens = sequences(256)
    model.eval()
    with torch.no_grad():
        loss = float(model(tokens, labels=tokens).loss)
    return f"loss {loss:.3f}, {sum(each.numel() for each in model.parameters()):,} parameters"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--short", action="store_true", help="one small layer, a few steps")
    options = parser.parse_args()
    features, layers, steps = (64, 1, 5) if options.short else (options.features, options.layers, options.steps)

    torch.manual_seed(0)
    sizes = {"vocab_size": NUMBERS, "n_positions": LENGTH, "n_embd": features, "n_layer": layers, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    print(f"dense, at first:     {describe(model)}")
    train(model, steps)
    print(f"dense, trained:      {describe(model)}")
    up, down = monarch(features, 4 * features, 8, 8), monarch(4 * features, features, 8, 8)
    print(convert(model, {"c_fc": up, "*.mlp.c_proj": down}))
    print(f"sparse, converted:   {describe(model)}")
    train(model, steps)
    print(f"sparse, fine-tuned:  {describe(model)}")


if __name__ == "__main__":
    main()
