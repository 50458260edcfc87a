"""Kernels of gradients, with constants that hold all rules."""

from dataclasses import replace

from ksgen.spec import KernelSpec
from tests.support.kernels import kernel_of


def kernel(
    shape: tuple[int, ...] = (2, 37, 13, 5), precision: str = "float32", layout: str = "bsf", batch: int | None = None
) -> KernelSpec:
    return replace(kernel_of(shape, precision, layout, batch=batch), job="gradient")
