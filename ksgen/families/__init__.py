"""The registry of kernel families: a family is one module here, one template, and one line below."""

from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Family, Geometry, Limits, Rule, Work, check, cuda_limits
from ksgen.families.gradient import Gradient
from ksgen.families.gradient_mma import GradientMma
from ksgen.families.mma import Mma
from ksgen.families.simt import Simt
from ksgen.spec import KernelSpec

FAMILIES: dict[str, Family[Any]] = {family.name: family for family in (Mma(), Simt(), GradientMma(), Gradient())}


def family_named(name: str) -> Family[Any]:
    """The family of that name; `ConstantsError` lists the known ones."""
    if name not in FAMILIES:
        raise ConstantsError(f"unknown kernel family {name!r}; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(kernel: KernelSpec, limits: Limits) -> Family[Any]:
    """The first family that serves the kernel on such a device; `simt` and `gradient` serve every one of their jobs."""
    return next(family for family in FAMILIES.values() if family.serves(kernel, limits))


def family_of(constants: Any) -> Family[Any]:
    """The family whose constants these are."""
    return next(family for family in FAMILIES.values() if isinstance(constants, family.constants_type))


__all__ = [
    "FAMILIES",
    "Constexpr",
    "Family",
    "Geometry",
    "Limits",
    "Rule",
    "Work",
    "check",
    "cuda_limits",
    "family_for",
    "family_named",
    "family_of",
]
