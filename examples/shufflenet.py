"""Train a block of ShuffleNet on small images: grouped 1x1 convolutions with the channel shuffle, exactly as patterns.

    python examples/shufflenet.py --channels 240 --groups 3

A convolution with g groups and the channel shuffle after it are one Kronecker-sparse matrix, so one product replaces
both. Both models start with the same weights and see the same images, so losses agree. Only times per step differ.
"""

import argparse
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from ksgen.torch import KSConv1x1

CLASSES, SIZE = 4, 14


class Block(nn.Module):
    """ShuffleNet's unit: grouped 1x1, shuffle, depthwise 3x3, grouped 1x1, and the sum with x."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        inner = channels // 4
        self.down = nn.Sequential(nn.Conv2d(channels, inner, 1, groups=groups), nn.ChannelShuffle(groups))
        self.up = nn.Conv2d(inner, channels, 1, groups=groups)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (inner, inner, channels)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.depthwise(relu(self.norms[0](self.down(x)))))
        return relu(x + self.norms[2](self.up(y)))


def images(count: int) -> tuple[Tensor, Tensor]:
    """Draw stripes in one of four directions, in noise, with their labels."""
    labels, places = torch.randint(CLASSES, (count,)), torch.arange(SIZE, dtype=torch.float32)
    angles = labels * torch.pi / CLASSES
    along = angles.cos()[:, None, None] * places + angles.sin()[:, None, None] * places[:, None]
    waves = torch.sin(1.5 * along + 6 * torch.rand(count, 1, 1))
    return (waves + 0.5 * torch.randn(count, SIZE, SIZE))[:, None], labels


def train(name: str, options: argparse.Namespace) -> None:
    """Train one kind of model, and print its losses, its accuracy on other images, and the time of a step."""
    torch.manual_seed(0)
    block = Block(options.channels, options.groups)
    stem, head = nn.Conv2d(1, options.channels, 3, padding=1), nn.Linear(options.channels, CLASSES)
    model = nn.Sequential(stem, nn.ReLU(), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    if name == "ksgen":
        block.down, block.up = KSConv1x1.from_conv(block.down[0], shuffle=True), KSConv1x1.from_conv(block.up)
    torch.manual_seed(1)
    optimizer, losses, times = torch.optim.Adam(model.parameters(), 3e-3), [], []
    for _ in range(options.steps):
        x, labels = images(32)
        begin = perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        times.append(perf_counter() - begin)
        losses.append(float(loss.detach()))
    x, labels = images(256)
    right = float((model.eval()(x).argmax(1) == labels).float().mean())
    took = 1e3 * sorted(times)[len(times) // 2]
    print(f"{name:>7}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {right:.0%} of others right, {took:.1f} ms a step")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--channels", type=int, default=240, help="a multiple of 4 times the groups")
parser.add_argument("--groups", type=int, default=3)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--short", action="store_true", help="few channels, a few steps")
options = parser.parse_args()
if options.short:
    options.channels, options.groups, options.steps = 24, 3, 12
train("PyTorch", options)
train("ksgen", options)
