"""Fine-tune a Llama, made from a config, with PEFT's OFT, BOFT or GraLoRA by ksgen's products. Nothing is downloaded.

    python examples/fine_tune_boft.py
    python examples/fine_tune_boft.py --method oft --features 1024

Both models start with the same adapters and see the same sequences, so losses agree. Only times per step differ.
"""

import argparse
import copy
import sys
from time import perf_counter

import torch
from torch import Tensor, nn

try:
    from peft import BOFTConfig, GraloraConfig, OFTConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("not run: PEFT is not installed; pip install peft")

from ksgen.torch.peft import accelerate, replace_extension

NUMBERS, LENGTH = 64, 32
METHODS = {
    "boft": BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=2, target_modules="all-linear"),
    "gralora": GraloraConfig(r=16, gralora_k=2, target_modules="all-linear"),
    "oft": OFTConfig(oft_block_size=16, target_modules="all-linear"),
}


def sequences(count: int) -> Tensor:
    """Draw rows that count up by a random step, modulo `NUMBERS`."""
    first, step = torch.randint(NUMBERS, (count, 1)), torch.randint(1, 8, (count, 1))
    return (first + step * torch.arange(LENGTH)) % NUMBERS


def train(model: nn.Module, steps: int) -> str:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 3e-3)
    losses, times = [], []
    for _ in range(steps):
        tokens = sequences(48)
        begin = perf_counter()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        times.append(perf_counter() - begin)
        losses.append(float(loss.detach()))
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {1e3 * sorted(times)[steps // 2]:.1f} ms a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=list(METHODS), default="boft")
    parser.add_argument("--features", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--short", action="store_true", help="one small layer, a few steps")
    options = parser.parse_args()
    features, layers, steps = (64, 1, 5) if options.short else (options.features, options.layers, options.steps)

    torch.manual_seed(0)
    replace_extension()  # PEFT builds several factors of BOFT only with its CUDA extension, or with this
    sizes = {"hidden_size": features, "intermediate_size": 2 * features, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=NUMBERS))
    theirs = get_peft_model(model, METHODS[options.method])
    ours = copy.deepcopy(theirs)
    print(f"{len(accelerate(ours))} layers accelerated")
    print(f"PEFT:  {train(theirs, steps)}")
    print(f"ksgen: {train(ours, steps)}")


if __name__ == "__main__":
    main()
