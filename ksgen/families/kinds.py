"""Families of several methods, each with constants of its own: the fastest one that supports a kernel is the
default."""

from typing import Any

from ksgen.families.base import Limits
from ksgen.families.expected import MIN_SAVING, expected_us, plain_pays
from ksgen.families.family import Family, unsupported
from ksgen.spec import KernelSpec


class OfKinds(Family[Any]):
    """A family with a tiling for each kind of constants, several of which may support a kernel.

    If times are unknown, the first one that supports the kernel is the default. `only`, a class of constants, restricts
    kernels, defaults and search to its tiling.
    """

    def __init__(self, only: type[Any] | None = None) -> None:
        self.asked = [self.tilings[only]] if only else list(self.tilings.values())
        self.why = "; or ".join(each.why for each in self.asked)

    def suits(self, tiling: Any, kernel: KernelSpec, limits: Limits) -> bool:
        """Whether a tiling supports a kernel on a device with these limits."""
        raise NotImplementedError

    def able(self, kernel: KernelSpec, limits: Limits) -> list[Any]:
        """Tilings that support a kernel on a device with these limits."""
        return [each for each in self.asked if self.suits(each, kernel, limits)]

    def supports(self, kernel: KernelSpec, limits: Limits) -> bool:
        return bool(self.able(kernel, limits))

    def runs(self, kernel: KernelSpec, constants: Any, limits: Limits) -> bool:
        return self.tilings[type(constants)] in self.able(kernel, limits)

    def default_of(self, tiling: Any, kernel: KernelSpec, limits: Limits, batch: int | None) -> Any:
        """Default of one tiling."""
        raise NotImplementedError

    def defaults(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> list[Any]:
        return [self.default_of(each, kernel, limits, batch) for each in self.able(kernel, limits)]

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> Any:
        """Default of the tiling that is expected to be the fastest."""
        if not (found := self.defaults(kernel, limits, batch)):
            raise unsupported(self, kernel)

        def cost(constants: Any) -> float:
            us = expected_us(self, kernel, limits, batch, constants)
            return us * (1 + MIN_SAVING) if plain_pays(self, kernel, limits, constants) else us

        return found[0] if len(found) == 1 else min(found, key=cost)
