"""Error and time of `ksgen.torch.factorize` on random matrices: python benchmarks/factorize.py

Medians of several runs on this machine's processor, or on its GPU with `--device cuda`. Every run has another matrix of
standard normal elements. This is the hardest case, because all directions have the same size. `--lazylinop` compares
with lazylinop's `ksd` on products of long chains, which both should recover; the two alternate. `--convert` times the
first conversions by budget of this process.
"""

import argparse
from functools import partial
from statistics import median

import torch
from torch import nn

from ksgen.measure.trust import host_clock
from ksgen.pattern import Chain, Pattern, monarch, square_dyadic
from ksgen.torch import convert, factorize
from ksgen.torch.conversion.projection import product_of, relative_error

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
    parser.add_argument(
        "--lazylinop",
        action="store_true",
        help="compare with lazylinop on the processor, on products of square dyadic chains",
    )
    parser.add_argument(
        "--convert",
        action="store_true",
        help="time `convert(model, budget=0.3)` for layers of 384 x 384: the first layer, the second, and six at once",
    )
    arguments = parser.parse_args()
    if arguments.lazylinop:
        lazylinop(arguments.runs)
        return
    if arguments.convert:
        conversions(arguments.device)
        return
    print(f"{'chain':20} {'matrix':>12} {'method':>13} {'error':>6} {'median, s':>10}")
    for name, chain in CHAINS.items():
        shape = chain.out_features, chain.in_features
        found = [factorize(torch.randn(shape, device=arguments.device), chain) for _ in range(arguments.runs)]
        error, seconds = (median(getattr(each, figure) for each in found) for figure in ("relative_error", "seconds"))
        print(f"{name:20} {shape[0]:>5} x {shape[1]:>4} {found[0].method:>13} {error:6.3f} {seconds:10.3f}")


def conversions(device: str) -> None:
    """Print the time per layer. Kernels, their times and their rates are stored by process or machine."""
    print(f"{'layers':>6} {'s per layer':>11}")
    for count in (1, 1, 6):
        model = nn.Sequential(*(nn.Linear(384, 384, device=device) for _ in range(count)))
        print(f"{count:6} {host_clock(partial(convert, model, budget=0.3)) / count:11.3f}")


def lazylinop(runs: int) -> None:
    from lazylinop.butterfly import Chain as TheirChain
    from lazylinop.butterfly import ksd

    print(f"{'features':>8} {'ours, ms':>9} {'error':>8} {'lazylinop, ms':>14} {'error':>8}")
    for features in (64, 256, 1024):
        chain, their_chain = square_dyadic(features), TheirChain.square_dyadic((features, features))
        matrix = product_of([torch.randn(pattern.shape) for pattern in chain])
        methods = [partial(factorize, matrix, chain), partial(ksd, matrix, their_chain)]
        for method in methods:
            method()
        times = [[host_clock(method) for method in methods] for _ in range(runs)]
        ours, theirs = (1e3 * median(some) for some in zip(*times, strict=True))
        their_error = relative_error(matrix, [(methods[1]() @ torch.eye(features))[None, :, :, None]])
        print(
            f"{features:8} {ours:9.2f} {factorize(matrix, chain).relative_error:8.1e} {theirs:14.2f} {their_error:8.1e}"
        )


if __name__ == "__main__":
    main()
