"""How near `ksgen.torch.factorize` comes to random matrices, and in which time: python benchmarks/factorize.py

Medians of several runs on this machine's processor, or on its GPU with `--device cuda`. Every run has another matrix of
standard normal entries, the hardest there is: all its directions are of the same size.
"""

import argparse
from statistics import median

import torch

from ksgen.pattern import Chain, Pattern, monarch, square_dyadic
from ksgen.torch import factorize

CHAINS = {
    "ViT-S/16 attention": Chain((Pattern(2, 48, 192, 1), Pattern(1, 192, 48, 2))),
    "ViT-S/16 up": Chain((Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2))),
    "ViT-S/16 down": Chain((Pattern(6, 64, 256, 1), Pattern(1, 128, 128, 3))),
    "GPT-2 medium up": Chain((Pattern(16, 64, 64, 1), Pattern(1, 256, 64, 16))),
    "Monarch 4096": monarch(4096, 4096, 64, 64),
    "butterfly 1024": square_dyadic(1024),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(f"{'chain':20} {'matrix':>12} {'method':>13} {'error':>6} {'median, s':>10}")
    for name, chain in CHAINS.items():
        shape = chain.out_features, chain.in_features
        found = [factorize(torch.randn(shape, device=arguments.device), chain) for _ in range(arguments.runs)]
        error, seconds = (median(getattr(each, figure) for each in found) for figure in ("relative_error", "seconds"))
        print(f"{name:20} {shape[0]:>5} x {shape[1]:>4} {found[0].method:>13} {error:6.3f} {seconds:10.3f}")


if __name__ == "__main__":
    main()
