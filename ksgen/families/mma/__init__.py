"""The tensor-core family: products of one factor, or of all factors of a layer."""

from ksgen.families.mma.chain import MmaChainConstants, MmaChainTiling
from ksgen.families.mma.family import Mma
from ksgen.families.mma.shape import MmaConstants, MmaTiling

__all__ = ["Mma", "MmaChainConstants", "MmaChainTiling", "MmaConstants", "MmaTiling"]
