"""Kernels of warpgroups, with constants that hold all rules."""

from typing import Any

from ksgen.emit.render import render
from ksgen.families import check, cuda_limits
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

GPU = cuda_limits("sm_90a")


def kernel(precision: str = "float16", layout: str = "bsf", pattern: tuple[int, ...] = (2, 48, 64, 4)) -> KernelSpec:
    return KernelSpec(Pattern(*pattern), precision, layout)


def text_of(family: Any, each: KernelSpec, constants: Any) -> Any:
    check(family, each, constants, GPU)
    return render(each, constants)
