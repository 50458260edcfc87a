"""A small classifier of digits with dense, masked and Kronecker-sparse layers: accuracy, seconds, memory, and a plot.

    python examples/digits.py                    # digits.png, if matplotlib is installed
    python examples/digits.py --epochs 30 --width 2048

The masked layers hold the same free numbers as the sparse ones, in dense matrices full of zeros: what PyTorch offers by itself.
"""

import argparse
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional

from ksgen.reference import to_dense
from ksgen.torch import KSLinear

GLYPHS = (  # 3 x 5 dots a digit, row by row
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111",
)  # fmt: skip


def digits(count: int) -> tuple[Tensor, Tensor]:
    """Digits at random places in noise, as (count, 8 x 8), and what they are."""
    dots = torch.tensor([[float(dot) for dot in glyph] for glyph in GLYPHS]).view(10, 5, 3)
    labels, x = torch.randint(10, (count,)), 0.25 * torch.randn(count, 8, 8)
    for image, label, row, column in zip(x, labels, torch.randint(1, 3, (count,)), torch.randint(2, 4, (count,)), strict=True):
        image[row : row + 5, column : column + 3] += dots[label]
    return x.flatten(1), labels


class Masked(nn.Linear):
    """A dense layer of which only the entries on a pattern's support count."""

    def __init__(self, pattern: tuple[int, int, int, int]) -> None:
        layer = KSLinear([pattern])
        super().__init__(layer.in_features, layer.out_features)
        self.register_buffer("mask", torch.from_numpy(to_dense(layer.chain[0], torch.ones(pattern).numpy())).float())
        nn.init.uniform_(self.weight, -(pattern[2] ** -0.5), pattern[2] ** -0.5)  # as KSLinear draws its own

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.mask, self.bias)


def models(width: int) -> dict[str, nn.Module]:
    """Three networks that differ in their square hidden layer."""
    chain = [(8, width // 8, width // 8, 1), (1, 8, 8, width // 8)]
    hidden = {
        "dense": nn.Linear(width, width), "masked": nn.Sequential(*map(Masked, chain)), "KSLinear": KSLinear(chain),
    }  # fmt: skip
    return {name: nn.Sequential(nn.Linear(64, width), nn.ReLU(), layer, nn.ReLU(), nn.Linear(width, 10)) for name, layer in hidden.items()}


def train(model: nn.Module, epochs: int, examples: int) -> tuple[list[float], float]:
    """Accuracy on other digits after each epoch, and the seconds of training."""
    torch.manual_seed(0)
    (x, labels), (test_x, test_labels) = digits(examples), digits(2000)
    optimizer, accuracy, seconds = torch.optim.Adam(model.parameters(), 1e-3), [], 0.0
    for _ in range(epochs):
        begin = perf_counter()
        for some in torch.randperm(examples).split(128):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[some]), labels[some]).backward()
            optimizer.step()
        seconds += perf_counter() - begin
        with torch.no_grad():
            accuracy.append(float((model(test_x).argmax(1) == test_labels).float().mean()))
    return accuracy, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--plot", default="digits.png")
    parser.add_argument("--short", action="store_true", help="a small network, three epochs, no plot")
    options = parser.parse_args()
    epochs, width, examples = (3, 128, 2048) if options.short else (options.epochs, options.width, 8192)

    torch.manual_seed(0)
    found = {}
    for name, model in models(width).items():
        found[name], seconds = train(model, epochs, examples)
        memory = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
        print(f"{name:>8}: accuracy {found[name][-1]:.1%} after {seconds:.1f} s of training, {memory / 1e6:.2f} MB of weights and masks")
    if not options.short:
        plot(found, options.plot)


def plot(found: dict[str, list[float]], path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for name, accuracy in found.items():
        axes.plot(range(1, len(accuracy) + 1), accuracy, label=name)
    axes.set(xlabel="epoch", ylabel="accuracy on other digits")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    print(f"{path}: accuracy by epoch")


if __name__ == "__main__":
    main()
