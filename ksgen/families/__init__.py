"""The registry of kernel families: a family is one module here, one template, and one line below."""

from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Family, Geometry, Limits, Rule, check, cuda_limits
from ksgen.families.simt import Simt
from ksgen.spec import KernelSpec

FAMILIES: dict[str, Family[Any]] = {family.name: family for family in (Simt(),)}


def family_named(name: str) -> Family[Any]:
    """The family of that name; `ConstantsError` lists the known ones."""
    if name not in FAMILIES:
        raise ConstantsError(f"unknown kernel family {name!r}; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(kernel: KernelSpec) -> Family[Any]:
    """The first family that serves the kernel; `simt` serves every one."""
    return next(family for family in FAMILIES.values() if family.serves(kernel))


__all__ = ["FAMILIES", "Constexpr", "Family", "Geometry", "Limits", "Rule", "check", "cuda_limits", "family_for", "family_named"]
