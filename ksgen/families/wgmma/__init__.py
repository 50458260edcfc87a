"""Hopper's family: tensor maps, mbarriers, wgmma."""

from ksgen.families.wgmma.family import Wgmma
from ksgen.families.wgmma.permuted import PermutedBlock, PermutedConstants
from ksgen.families.wgmma.registers import RegistersBlock, RegistersConstants
from ksgen.families.wgmma.shared import SharedBlock, SharedConstants

__all__ = [
    "PermutedBlock", "PermutedConstants", "RegistersBlock", "RegistersConstants", "SharedBlock",
    "SharedConstants", "Wgmma",
]  # fmt: skip
