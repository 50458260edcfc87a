"""Decode with weights in eight bits: a small language model generates tokens, one at a time, by float32 weights and by quantized ones.

    python examples/decode_8bit.py                    # eight blocks of GPT-2 medium's size, in half a minute
    python examples/decode_8bit.py --storage e4m3

With one token at a time the time is that of reading the weights. Their number is drawn, so what is generated means nothing: the share of
equal tokens says how far the models are apart. Scales are chosen from some inputs of the model's own.
"""

import argparse
from copy import deepcopy
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor, nn

from ksgen.torch import freeze, quantize
from ksgen.torch.models import GPT2_MEDIUM, LanguageModel, Language, make_sparse, rule


@torch.no_grad()
def decode(model: nn.Module, first: Tensor, count: int) -> tuple[Tensor, float]:
    """The likeliest next tokens, each by the last one alone, and seconds a token."""
    tokens = [first]
    for step in range(count + 2):
        if step == 2:  # which build, pack and choose
            begin = perf_counter()
        tokens.append(model(tokens[-1]).argmax(-1))
    return torch.cat(tokens, 1), (perf_counter() - begin) / count


def weight_bytes(model: nn.Module) -> int:
    """Of all blocks' layers, values and scales."""
    return sum(each.numel() * each.element_size() for each in model.state_dict().values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--storage", default="int8", help="int8, e4m3 or e5m2")
    options.add_argument("--blocks", type=int, default=8)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--short", action="store_true", help="a block and a few tokens, to see that it runs")
    given = options.parse_args()
    torch.manual_seed(0)
    depth, count = (1, 4) if given.short else (given.blocks, given.tokens)
    model = LanguageModel(replace(GPT2_MEDIUM, depth=depth), Language(vocabulary=2000, positions=64)).eval()
    make_sparse(model, rule("gpt2-medium"), from_weights=False)
    quantized = deepcopy(model)
    report = quantize(quantized, given.storage, inputs=model.random_inputs(1, 64))
    print(report)
    freeze(model)  # packs once, as nobody writes to the weights
    first = torch.zeros(1, 1, dtype=torch.long)
    wanted, seconds = decode(model, first, count)
    found, faster = decode(quantized, first, count)
    same = float((quantized(wanted[:, :64]).argmax(-1) == model(wanted[:, :64]).argmax(-1)).float().mean())
    print(f"float32: {1e3 * seconds:.2f} ms a token, {weight_bytes(model.blocks) / 1e6:.1f} MB of blocks")
    print(f"{given.storage}: {1e3 * faster:.2f} ms a token, {weight_bytes(quantized.blocks) / 1e6:.1f} MB of blocks")
    print(f"after the same tokens, {same:.0%} of the next ones are equal; generated: {found.shape[1] - 1}")


if __name__ == "__main__":
    main()
