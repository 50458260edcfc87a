"""Shared by the tests of `ksgen.torch`: patterns, tensors, the float64 truth, and kernels on the processor."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from ksgen import reference
from ksgen.devices import Found, list_devices
from ksgen.pattern import Pattern

SHAPES = [(1, 6, 4, 1), (3, 2, 5, 1), (1, 4, 3, 5), (2, 9, 5, 3), (5, 3, 4, 2), (2, 1, 3, 2), (2, 4, 1, 3)]
HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())


def wrong_in_threads(call: Callable[[Any], Any], xs: Sequence[Any], wanted: Sequence[Any], times: int) -> list[int]:
    """A thread for each x, all at once: its number for each time that call(x) is not bit for bit what is wanted."""
    import torch

    wrong: list[int] = []

    def repeat(number: int) -> None:
        with torch.no_grad():
            wrong.extend(number for _ in range(times) if not torch.equal(call(xs[number]), wanted[number]))

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(xs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return wrong


@contextmanager
def operands_of_products() -> Iterator[set[Any]]:
    """The types of the operands of PyTorch's products meanwhile."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    types: set[Any] = set()

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm, torch.ops.aten.addmm):
                types.update(each.dtype for each in args[-2:])
            return func(*args, **kwargs or {})

    with Watched():
        yield types


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends tensors on the processor through the launcher's kernels, on OpenCL; also in small steps of training."""
    if not HAS_OPENCL:
        pytest.skip("no OpenCL device")
    from ksgen.torch.operators import choice, ops

    monkeypatch.setenv("KSGEN_DEVICE", "opencl:0")
    monkeypatch.setattr(choice, "KERNEL_DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(ops, "SMALL_BATCH", 0)


def matrix(batch: int, features: int, layout: str, dtype: Any, requires_grad: bool = False) -> Any:
    """A standard normal tensor."""
    import torch

    return (
        torch.randn((batch, features) if layout == "bsf" else (features, batch)).to(dtype).requires_grad_(requires_grad)
    )


def truth(x: Any, weights: Any, layout: str, bias: Any = None, activation: str = "none", residual: Any = None) -> Any:
    """The product in float64."""
    import torch

    x, weights, bias, residual = (
        None if each is None else each.detach().double().numpy() for each in (x, weights, bias, residual)
    )
    found = reference.multiply(
        Pattern(*weights.shape), x, weights, layout, bias=bias, activation=activation, residual=residual
    )
    return torch.from_numpy(found)


def error(found: Any, expected: Any) -> float:
    """The relative error, by Frobenius norms."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


BIAS_CHANGES = ("write", "data", "spread", "replace", "remove")


def change_bias(layer: Any, change: str) -> None:
    """Change a layer's bias in one of `BIAS_CHANGES`."""
    import torch

    if change == "write":
        layer.bias += 1
    elif change == "data":
        layer.bias.data = torch.full((layer.out_features,), 3.0)
    elif change == "spread":
        layer.bias.data = torch.arange(2.0 * layer.out_features)[::2]
    elif change == "replace":
        layer.bias = torch.nn.Parameter(torch.full((layer.out_features,), 5.0))
    else:
        layer.bias = None
