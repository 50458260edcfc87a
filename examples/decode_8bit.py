"""Decode with weights in eight bits: a language model generates tokens from float32 and from quantized weights.

    python examples/decode_8bit.py                    # eight blocks of GPT-2 medium's size, in half a minute
    python examples/decode_8bit.py --storage e4m3

With one token at a time, reading the weights dominates the time. The weights are random, so the generated tokens mean
nothing. The share of equal tokens shows how far the models differ.
"""

import argparse
from copy import deepcopy
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from ksgen.bench.models import GPT2_MEDIUM, Language, LanguageModel
from ksgen.measure.trust import Watch, why_unreliable, with_reason
from ksgen.torch import build, convert, freeze, quantize


def chains(count: int, size: int) -> dict[str, list[tuple[int, int, int, int]]]:
    """Two factors per layer, for count * size features; 16 and 64 give those of specs/gpt2.yaml."""
    widths = {"qkv": 3, "projection": 1, "up": 4}
    found = {name: [(count, size, size, 1), (1, width * size, size, count)] for name, width in widths.items()}
    return found | {"down": [(count, size, 4 * size, 1), (1, size, size, count)]}


def decode(model: nn.Module, tokens: Tensor, count: int) -> tuple[Tensor, str]:
    """Generate the likeliest next tokens, each from the previous one alone, and describe the time per token."""
    taken_us, watch = [], Watch()
    with torch.no_grad():
        for _ in range(count + 2):
            begin = perf_counter()
            tokens = torch.cat([tokens, model(tokens[:, -1:]).argmax(-1)], 1)
            taken_us.append(1e6 * (perf_counter() - begin))
    own = taken_us[2:]  # the first ones build, pack and choose
    return tokens, with_reason(f"{median(own) / 1e3:.2f} ms a token", why_unreliable(own, [watch.others_share()]))


def equal(model: nn.Module, tokens: Tensor) -> float:
    """Share of tokens for which the model predicts the given next token."""
    with torch.no_grad():
        found = torch.cat([model(each).argmax(-1) for each in tokens[:, :-1].split(1, 1)], 1)
    return float((found == tokens[:, 1:]).float().mean())


def megabytes(model: nn.Module) -> float:
    return sum(each.numel() * each.element_size() for each in model.state_dict().values()) / 1e6


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--storage", default="int8", help="int8, e4m3 or e5m2")
    options.add_argument("--blocks", type=int, default=8)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--short", action="store_true", help="a small block and a few tokens, to see that it runs")
    given = options.parse_args()
    torch.manual_seed(0)
    count, size, depth = (4, 16, 1) if given.short else (16, 64, given.blocks)
    sizes = replace(GPT2_MEDIUM, features=count * size, depth=depth, heads=count)
    model = LanguageModel(sizes, Language(vocabulary=2000)).eval()
    convert(model, chains(count, size), from_weights=False)
    quantized = deepcopy(model)
    print(quantize(quantized, given.storage))
    freeze(model)  # packs once: the weights stay unchanged
    first = torch.zeros(1, 1, dtype=torch.long)
    for each in (model, quantized):
        build(each, first)  # compiles beforehand, because first calls would not wait for kernels
    wanted, took = decode(model, first, 4 if given.short else given.tokens)
    _, others_took = decode(quantized, first, 4 if given.short else given.tokens)
    print(f"float32: {took}, {megabytes(model.blocks):.2f} MB of blocks")
    print(f"{given.storage}: {others_took}, {megabytes(quantized.blocks):.2f} MB of blocks")
    print(f"after the same tokens, {equal(quantized, wanted):.0%} of the next ones are equal")


if __name__ == "__main__":
    main()
