"""The registry of kernel families: a family is one module here, one template, and one line below."""

from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.base import MAP_ALIGNMENT, Constexpr, Family, Geometry, Limits, Rule, TensorMap, Work, check, cuda_limits
from ksgen.families.gradient import Gradient
from ksgen.families.gradient_mma import GradientMma
from ksgen.families.mma import Mma
from ksgen.families.simt import Simt
from ksgen.families.wgmma import WgmmaRegisters, WgmmaShared
from ksgen.spec import KernelSpec

FAMILIES: dict[str, Family[Any]] = {
    family.name: family for family in (WgmmaShared(), WgmmaRegisters(), Mma(), Simt(), GradientMma(), Gradient())
}


def family_named(name: str) -> Family[Any]:
    """The family of that name; `ConstantsError` lists the known ones."""
    if name not in FAMILIES:
        raise ConstantsError(f"unknown kernel family {name!r}; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(kernel: KernelSpec, limits: Limits, batch: int | None = None, aligned: bool = True) -> Family[Any]:
    """The first measured family that serves the kernel on such a device, and takes the batch; `simt` and `gradient` serve all."""
    able = (family for family in FAMILIES.values() if family.measured and family.serves(kernel, limits))
    return next(family for family in able if batch is None or family.takes(kernel, batch, aligned))


def family_of(constants: Any) -> Family[Any]:
    """The family whose constants these are."""
    return next(family for family in FAMILIES.values() if isinstance(constants, family.constants_type))


__all__ = [
    "FAMILIES",
    "MAP_ALIGNMENT",
    "Constexpr",
    "Family",
    "Geometry",
    "Limits",
    "Rule",
    "TensorMap",
    "Work",
    "check",
    "cuda_limits",
    "family_for",
    "family_named",
    "family_of",
]
