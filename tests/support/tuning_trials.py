"""Invented trials, for tests of how trials are shown."""

from functools import cache
from typing import Any

from ksgen.families import FAMILIES, cuda_limits, meant_for
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.tuning.trials import Trial

GPU = cuda_limits("sm_90a")
KERNELS = [
    KernelSpec(Pattern(1, 64, 48, 2), "float16", "bsl", Epilogue(True, "gelu", False)),
    KernelSpec(Pattern(6, 64, 64, 1), batch=70),
]


def trial(kernel: KernelSpec, family: str, constants: object, time_us: float | None, **more: object) -> Trial:
    known = {"median_us": time_us, "spread": 0.0213, "runs": 20} if time_us else {}
    facts = {
        "floor_us": 9.0,
        "predicted_us": 11.0,
        "bytes_per_s": 3.9e12,
        "flops_per_s": 5e13,
        "registers": 80,
        "shared_bytes": 4096,
    }
    state = "measured" if time_us else "pruned"
    return Trial(kernel, 70, "NVIDIA H200", family, constants, "0a0b0c0d", **{"state": state, **known, **facts, **more})  # type: ignore[arg-type]


@cache
def space_of(kernel: KernelSpec, family: str) -> tuple[Any, ...]:
    """All constants of a family: tens of thousands, for every test to take a few of."""
    return tuple(FAMILIES[family].space(kernel, GPU))


def some_trials(of_each: int = 12) -> list[Trial]:
    """Return trials of both kernels and all their families. Times fall, then rise. Every fifth candidate is pruned."""
    found = []
    for kernel in KERNELS:
        for name in [family.name for family in meant_for(kernel, GPU)]:
            space = space_of(kernel, name)
            for number, constants in enumerate(space[:: len(space) // of_each][:of_each]):
                time_us = None if number % 5 == 4 else 20.0 + 3 * abs(number - 6) + len(name) + kernel.pattern.a / 10
                found.append(
                    trial(
                        kernel,
                        name,
                        constants,
                        time_us,
                        reason="" if time_us else "spills 24 bytes",
                        predicted_us=12.0 + number,
                    )
                )
    return found
