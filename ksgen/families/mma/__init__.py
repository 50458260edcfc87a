"""The tensor-core families: one factor, and all factors of a layer."""

from ksgen.families.mma.chain import MmaChain, MmaChainConstants
from ksgen.families.mma.family import Mma
from ksgen.families.mma.shape import MmaConstants, MmaTiling

__all__ = ["Mma", "MmaChain", "MmaChainConstants", "MmaConstants", "MmaTiling"]
