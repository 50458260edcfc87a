"""Convert a Llama, made from a config, to Monarch or BLAST layers, train both, and decode. Nothing is downloaded.

    python examples/convert_llama.py
    python examples/convert_llama.py --structure blast --features 1024

The sparse model starts with the products of factors that are nearest to the dense model's matrices.
"""

import argparse
import copy
import sys
from time import perf_counter

import torch
from torch import Tensor, nn

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("not run: transformers is not installed; pip install transformers")

import ksgen
from ksgen.torch import build, convert, freeze

NUMBERS, LENGTH, PROMPT = 64, 32, 8
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def chain(structure: str, columns: int, rows: int) -> ksgen.Chain:
    """Chain with about a fifth of the dense weights."""
    if structure == "monarch":
        return ksgen.monarch(columns, rows, 8, 8)
    return ksgen.blast(columns, rows, 4, 4, rank=columns * rows // (columns + rows) // 4)


def sequences(count: int) -> Tensor:
    """Draw rows that count up by a random step, modulo `NUMBERS`."""
    first, step = torch.randint(NUMBERS, (count, 1)), torch.randint(1, 8, (count, 1))
    return (first + step * torch.arange(LENGTH)) % NUMBERS


def train(model: nn.Module, steps: int) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(steps):
        tokens = sequences(32)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--structure", choices=("monarch", "blast"), default="monarch")
parser.add_argument("--features", type=int, default=512, help="a multiple of 128")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--short", action="store_true", help="one small layer, a few steps")
options = parser.parse_args()
features, steps = (128, 10) if options.short else (options.features, options.steps)
torch.manual_seed(0)
sizes = {"hidden_size": features, "intermediate_size": 4 * features, "num_attention_heads": 8}
sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 1 if options.short else 2, "vocab_size": NUMBERS}
config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)
dense = LlamaForCausalLM(config)
sparse = copy.deepcopy(dense)
shapes = {name: layer.weight.shape for name, layer in dense.named_modules() if name.endswith(LAYERS)}
print(convert(sparse, {name: chain(options.structure, *shape[::-1]) for name, shape in shapes.items()}))
for name, model in (("dense", dense), (options.structure, sparse)):
    losses, tokens = train(model, steps), sequences(16)
    freeze(model.eval())
    prompt, mask = tokens[:, :PROMPT], torch.ones(16, PROMPT)
    for inputs in (prompt, prompt[:, :1]):  # for the prefill, and for a step of decoding
        build(model, inputs)
    begin = perf_counter()
    found = model.generate(prompt, attention_mask=mask, max_new_tokens=LENGTH - PROMPT, do_sample=False)
    ms = 1e3 * (perf_counter() - begin) / (LENGTH - PROMPT)
    right = float((found[:, PROMPT:] == tokens[:, PROMPT:]).float().mean())
    print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {right:.0%} of the next numbers right, {ms:.1f} ms each")
