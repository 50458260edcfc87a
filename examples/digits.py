"""Train a small classifier of digits with dense, masked and Kronecker-sparse layers: accuracy, memory, and a plot.

    python examples/digits.py                    # and digits.png, if matplotlib is installed
    python examples/digits.py --epochs 30 --width 2048

The masked layers have the same free parameters as the sparse ones, but store them in dense matrices full of zeros.
"""

import argparse
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional

from ksgen.torch import KSLinear

# One string per digit, one character per row of a digit; its three bits are the dots.
GLYPHS = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71222", "75757", "75717"]
DOTS = torch.tensor([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in glyph] for glyph in GLYPHS])


def digits(n: int) -> tuple[Tensor, Tensor]:
    """Draw n digits at random places in noise, as (n, 8 x 8), with their labels."""
    labels, x = torch.randint(10, (n,)), 0.25 * torch.randn(n, 8, 8)
    for image, label, row, column in zip(x, labels, torch.randint(1, 3, (n,)), torch.randint(2, 4, (n,)), strict=True):
        image[row : row + 5, column : column + 3] += DOTS[label]
    return x.flatten(1), labels


class Masked(nn.Linear):
    """Dense layer with only the entries on a pattern's support, drawn like those of `KSLinear`."""

    def __init__(self, pattern: tuple[int, int, int, int]) -> None:
        drawn = KSLinear([pattern]).to_dense().detach()
        super().__init__(drawn.shape[1], drawn.shape[0])
        self.weight = nn.Parameter(drawn)
        self.register_buffer("mask", (drawn != 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.mask, self.bias)


def train(model: nn.Module, epochs: int, examples: int) -> list[float]:
    """Train a model; returns the accuracy on other digits after each epoch."""
    torch.manual_seed(0)
    (x, labels), (test_x, test_labels) = digits(examples), digits(2000)
    optimizer, accuracy = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(epochs):
        for some in torch.randperm(examples).split(128):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[some]), labels[some]).backward()
            optimizer.step()
        accuracy.append(float((model(test_x).argmax(1) == test_labels).float().mean()))
    return accuracy


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--width", type=int, default=1024, help="a multiple of 64")
parser.add_argument("--short", action="store_true", help="a small network, three epochs")
options = parser.parse_args()
epochs, width, examples = (3, 128, 2048) if options.short else (options.epochs, options.width, 8192)
torch.manual_seed(0)
chain, found = [(8, width // 8, width // 8, 1), (1, 8, 8, width // 8)], {}
hidden = {"dense": nn.Linear(width, width), "masked": nn.Sequential(*map(Masked, chain)), "KSLinear": KSLinear(chain)}
for name, layer in hidden.items():
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), layer, nn.ReLU(), nn.Linear(width, 10))
    memory = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    found[name] = train(model, epochs, examples)
    print(f"{name:>8}: accuracy {found[name][-1]:.1%}, {memory / 1e6:.2f} MB of weights and masks")
if find_spec("matplotlib"):
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5, 3), layout="constrained").subplots()
    for name, accuracy in found.items():
        axes.plot(range(1, epochs + 1), accuracy, label=name)
    axes.set(xlabel="epoch", ylabel="accuracy on other digits")
    axes.legend(frameon=False)
    axes.figure.savefig("digits.png", dpi=150)
