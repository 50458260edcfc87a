"""Hopper's families: tensor maps, mbarriers, wgmma. A kind for each way in which X reaches the tensor cores.

Decides the tiles of `wgmma_*.cu.j2`; their design is docs/kernels.md. Never renders, compiles or runs.
"""

from ksgen.families.wgmma.permuted import PermutedConstants, WgmmaPermuted
from ksgen.families.wgmma.registers import RegistersConstants, WgmmaRegisters
from ksgen.families.wgmma.shared import SharedConstants, WgmmaShared

__all__ = ["PermutedConstants", "RegistersConstants", "SharedConstants", "WgmmaPermuted", "WgmmaRegisters", "WgmmaShared"]
