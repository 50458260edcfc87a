"""The registry of kernel families: a family is one package here, its templates, and one line below."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ksgen.errors import ConstantsError, warn_deprecated
from ksgen.families.amx.family import Amx
from ksgen.families.base import MAP_ALIGNMENT, Bar, Constexpr, Geometry, Limits, Pass, TensorMap, Work, cuda_limits
from ksgen.families.cpu_gradient.family import CpuGradient
from ksgen.families.cpu_gradient.tiles import AmxGradientConstants
from ksgen.families.cpu_gradient.vectors import VectorGradientConstants
from ksgen.families.expected import MIN_SAVING, SMALL, batch_like, default_us, expected_us, plain_pays
from ksgen.families.family import Family, check
from ksgen.families.gemv.family import Gemv
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants
from ksgen.families.mma.family import Mma
from ksgen.families.operands import multiplied_by
from ksgen.families.rules import Rule
from ksgen.families.simt.family import Simt
from ksgen.families.vector.family import Vector
from ksgen.families.wgmma.family import Wgmma
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import is_word
from ksgen.values import excerpt

FAMILIES: dict[str, Family[Any]] = {
    family.name: family for family in (Amx(), Vector(), CpuGradient(), Wgmma(), Mma(), Simt(), Gemv(), Gradient())
}

# earlier names of families or of their variants, which callers and files may still use
ALIASES: dict[str, Family[Any]] = {
    "few": FAMILIES["gemv"],
    "few_chain": FAMILIES["gemv"],
    "few_group": FAMILIES["gemv"],
    "mma_chain": FAMILIES["mma"],
    "simt_chain": FAMILIES["simt"],
    "vector_chain": FAMILIES["vector"],
    "amx_chain": FAMILIES["amx"],
    "vector_gradient": CpuGradient(VectorGradientConstants),
    "amx_gradient": CpuGradient(AmxGradientConstants),
    "gradient_mma": Gradient(GradientMmaConstants),
    **{kind.entry_family: Wgmma(kind) for kind in Wgmma.tilings},
}


def family_named(name: str) -> Family[Any]:
    """Family of that name, or of an earlier name; `ConstantsError` lists the known ones."""
    if not is_word(name, FAMILIES) and not is_word(name, ALIASES):
        raise ConstantsError(f"unknown kernel family {excerpt(name)}; known: {', '.join(FAMILIES)}")
    return FAMILIES[name] if name in FAMILIES else ALIASES[name]


def requested_family(name: str) -> Family[Any]:
    """Family that a user names; an earlier name warns. Stored names are read by `family_named`, without a warning.

    A name that stands for one variant of a family does not warn, because no other name selects it.
    """
    family = family_named(name)
    if name in ALIASES and family is FAMILIES[family.name]:
        warn_deprecated(f"kernel family {name}", family.name)
    return family


def present_names(names: str) -> str:
    """Replace earlier names in a comma-separated list of families; unknown names stay."""
    present = (ALIASES[name].name if name in ALIASES else name for name in names.split(", "))
    return ", ".join(dict.fromkeys(present))


def takes_job(
    family: Family[Any], kernel: KernelSpec, limits: Limits, batch: int | None = None, aligned: bool = True
) -> bool:
    """Whether a family supports the kernel on a device with these limits, and accepts the batch."""
    return family.supports(kernel, limits) and (batch is None or family.takes(kernel, batch, aligned))


def families_for(
    kernel: KernelSpec, limits: Limits, batch: int | None = None, aligned: bool = True
) -> Iterator[Family[Any]]:
    """Yield the families that support the kernel on a device with these limits, and accept the batch.

    `aligned` says whether arrays begin at multiples of 16 bytes.
    """
    return (family for family in FAMILIES.values() if takes_job(family, kernel, limits, batch, aligned))


def meant_for(
    kernel: KernelSpec, limits: Limits, batch: int | None = None, aligned: bool = True
) -> Iterator[Family[Any]]:
    """Yield the families that support the kernel and are not barred on the device.

    Families for small batches are among them only if the batch is small.
    """
    is_small = batch_like(kernel, batch) <= SMALL[-1]
    for family in FAMILIES.values():
        is_meant = (is_small or not family.for_small_batches) and not limits.bar_of(family.name)
        if is_meant and takes_job(family, kernel, limits, batch, aligned):
            yield family


def family_for(
    kernel: KernelSpec, limits: Limits, batch: int | None = None, aligned: bool = True, all_families: bool = False
) -> Family[Any]:
    """Choose the family for a batch without wisdom: the one whose default is expected to be the fastest.

    Candidates are families chosen by default and those that the precision asks for; with `all_families`, all of them.
    On processors, and if times are unknown, the first candidate is chosen. `simt` supports every product of one factor,
    and `gradient` every gradient.
    """
    wanted = kernel.arithmetic.families
    candidates = [
        family
        for family in meant_for(kernel, limits, batch, aligned)
        if family.is_default(kernel, batch_like(kernel, batch)) or all_families or family.name in wanted
    ]
    if not candidates:
        barred = "".join(f"; {bar.family} is {bar.reason}" for bar in limits.bars)
        what = "run all factors in one launch" if len(kernel.factors) > 1 else "compute it"
        raise ConstantsError(f"{kernel.name}: no family can {what} on this device{barred}")
    if len(candidates) == 1 or limits.is_cpu:
        return candidates[0]

    def cost(family: Family[Any]) -> float:
        us = default_us(family, kernel, limits, batch)
        return us * (1 + MIN_SAVING) if plain_pays(family, kernel, limits) else us

    return min(candidates, key=cost)


def faster_family(
    name: str, kernel: KernelSpec, limits: Limits, batch: int | None = None, aligned: bool = True, constants: Any = None
) -> tuple[Family[Any], float] | None:
    """Find the family with the fastest default, and its speed-up over the family `name`.

    The latter has `constants`, or its default if there are none. The result is None if the speed-up is at most 1 +
    MIN_SAVING, or if times are unknown. Barred families count too. This looks at every family's search space, which
    takes up to a second.
    """
    named, all_allowed = family_named(name), replace(limits, bars=())
    candidates = (named, *meant_for(kernel, all_allowed, batch, aligned))
    us = {family: default_us(family, kernel, all_allowed, batch) for family in candidates}
    fastest = min(us, key=us.__getitem__)
    named_us = expected_us(named, kernel, all_allowed, batch, constants) if constants else us[named]
    return (fastest, named_us / us[fastest]) if named_us > us[fastest] * (1 + MIN_SAVING) > 0 else None


def family_of(constants: Any) -> Family[Any]:
    """The family whose constants these are."""
    return next(family for family in FAMILIES.values() if type(constants) in family.kinds)


def operand_of(kernel: KernelSpec, constants: Any) -> str | None:
    """Name of the operand that a kernel's tensor cores multiply; None if it uses plain multiply-adds."""
    family = family_of(constants)
    operand = multiplied_by(kernel, family.by_warpgroups)
    return operand.name if operand and constants.on_tensor_cores else None


__all__ = [
    "ALIASES", "FAMILIES", "MAP_ALIGNMENT", "Bar", "Constexpr", "Family", "Geometry", "Limits", "Pass", "Rule",
    "TensorMap", "Work", "check", "cuda_limits", "families_for", "family_for", "family_named", "family_of",
    "faster_family", "meant_for", "operand_of", "present_names", "requested_family", "takes_job",
]  # fmt: skip
