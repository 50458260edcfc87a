"""All factors of a layer in one launch, where a device has a family for that: which plan, and when it is worth it. Never launches."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ksgen.build.build import AbsentCompiler, compiling_is_forbidden
from ksgen.devices.base import Device
from ksgen.errors import ToolchainError
from ksgen.families import family_named
from ksgen.families.vector import factor_kernels
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.plan import Plan
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.kernel import CHAIN

LEAST_ENTRIES = 16  # of the batch for each core: below, factors are shared out by their outputs, each by itself
REMEMBERED = 1024  # plans: one for each layer and batch


@dataclass(frozen=True, eq=False)
class FusedPlan:
    """The launch of all factors, and how each one's weights are packed for it."""

    whole: Plan
    factors: tuple[Plan, ...]


def fused_plan(
    device: Device, chains: tuple[Chain, ...], precision: str, layout: str, epilogue: Epilogue, batch: int, stride: str = "dense"
) -> FusedPlan | None:
    """The plan of a chain as one launch, or of several on one X; None where they are better served factor by factor."""
    if not device.shares_host or sum(map(len, chains)) < 2 or batch < LEAST_ENTRIES * device.limits.multiprocessors:
        return None
    where: Any = device  # devices are hashed by their identity
    return _plan(where, tuple(chain.factors for chain in chains), precision, layout, epilogue, batch, stride, PLANNER.generation)


@lru_cache(REMEMBERED)
def _plan(
    device: Any,
    chains: tuple[tuple[Pattern, ...], ...],
    precision: str,
    layout: str,
    epilogue: Epilogue,
    batch: int,
    stride: str,
    generation: int,
) -> FusedPlan | None:
    (*before, last), *beside = chains
    kernel = KernelSpec(last, precision, layout, epilogue, job=CHAIN, before=tuple(before), stride=stride, beside=tuple(beside))
    alone, limits = KernelSpec(last, precision, layout), limits_of(device)
    if any(family_named(wanted).serves(alone, limits) for wanted in kernel.arithmetic.families):  # which have no chains
        return None
    try:
        whole = PLANNER.plan(device, kernel, batch)
        constants = [replace(each, parts=1) for each in whole.choice.constants.parsed]
        factors = [replace(each, epilogue=Epilogue()) for each in factor_kernels(kernel)]
        packings = tuple(
            PLANNER.plan_of(device, each, batch, Choice("vector", own, "part of a chain"))
            for each, own in zip(factors, constants, strict=True)
        )
    except ToolchainError:
        if not compiling_is_forbidden() and not isinstance(device.compiler(), AbsentCompiler):
            raise
        return None  # bundles hold each factor by itself
    return FusedPlan(whole, packings)
