"""Kernels for tensor cores, with constants that hold all rules."""

from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec


def kernel(precision: str = "float16", layout: str = "bsf", pattern: Pattern = Pattern(2, 48, 64, 4)) -> KernelSpec:  # noqa: B008
    return KernelSpec(pattern, precision, layout)
