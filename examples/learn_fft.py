"""Learn a fast Fourier transform from data: vectors and their transforms train a layer of butterfly factors.

    python examples/learn_fft.py                 # 64 points, in a minute
    python examples/learn_fft.py --size 256 --steps 10000

The layer never sees the formula. Outputs have the order of a fast transform, with their digits reversed. The learned
layer is compared with the exact transform of `ksgen.transforms`, which may also initialise a layer.
"""

import argparse

import torch
from torch import Tensor, nn

from ksgen import transforms
from ksgen.torch import KSLinear


def examples(count: int, size: int, order: Tensor) -> tuple[Tensor, Tensor]:
    """Draw vectors, and their unitary Fourier transforms in the order of the chain."""
    x = torch.randn(count, size, dtype=torch.complex64)
    y = torch.empty_like(x)
    y[:, order] = torch.fft.fft(x, norm="ortho")
    return x, y


def error(layer: nn.Module, size: int, order: Tensor) -> float:
    """Relative root mean square error on new vectors."""
    x, y = examples(1000, size, order)
    with torch.no_grad():
        return float((layer(x) - y).norm() / y.norm())


def learn(layer: nn.Module, size: int, order: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
    for step in range(steps):
        x, y = examples(64, size, order)
        loss = (layer(x) - y).abs().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 5) == 0:
            print(f"step {step}: loss {float(loss.detach()):.2e}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--short", action="store_true", help="a few steps, to see that it runs")
    given = options.parse_args()
    torch.manual_seed(0)
    exact = transforms.dft(given.size, radix=7)
    order = torch.from_numpy(exact.order)
    layer = KSLinear(exact.chain, bias=False, dtype=torch.complex64)
    print(f"{exact.chain}: {exact.chain.weight_count} weights, where the matrix has {given.size**2}")
    learn(layer, given.size, order, 40 if given.short else given.steps)
    print(f"learned: error {error(layer, given.size, order):.1e}")
    scaled = [torch.from_numpy(each) / each.shape[1] ** 0.5 for each in exact.weights]
    begun = KSLinear.from_weights([each.to(torch.complex64) for each in scaled])
    print(f"exact: error {error(begun, given.size, order):.1e}")


if __name__ == "__main__":
    main()
