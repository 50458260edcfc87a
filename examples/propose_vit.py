"""Propose chains to replace ViT-S/16's linear layers, on this machine or for another GPU.

python examples/propose_vit.py                                # this machine, by the cost model
python examples/propose_vit.py --device sm_90a --precision float16
python examples/propose_vit.py --measure --most 1             # timed as layers, against nn.Linear
"""

import argparse

import torch
from torch import nn

from ksgen.bench import models
from ksgen.torch import propose


def layers(model: nn.Module) -> dict[tuple[int, int], list[str]]:
    """Linear layers of the blocks, by inputs and outputs: one proposal serves all equal ones."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith("blocks."):
            found.setdefault((layer.in_features, layer.out_features), []).append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.3, help="share of the dense weights that a chain may have")
    parser.add_argument("--device", help="cpu, cuda, or a CUDA target such as sm_90a; the default is what PyTorch has")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--measure", action="store_true", help="time the chains on the device")
    parser.add_argument("--most", type=int, default=2, help="chains of a family")
    parser.add_argument("--short", action="store_true", help="one shape of layer alone")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = models.build("vit-s16")
    parameters = sum(each.numel() for each in model.parameters())
    saved = 0
    for (inputs, outputs), names in list(layers(model).items())[: 1 if options.short else None]:
        found = propose(
            inputs, outputs, budget=options.budget, device=options.device, precision=options.precision,
            measure=options.measure,
            most=options.most,
        )  # fmt: skip
        print(f"\n{len(names)} layers of {inputs} to {outputs} features, such as {names[0]}")
        print(found)
        fastest = min(found, key=lambda each: each.us)
        saved += len(names) * (found.dense.parameters - fastest.parameters)
    print(f"\nWith the fastest chain of each: {parameters - saved:,} of {parameters:,} parameters.")


if __name__ == "__main__":
    main()
