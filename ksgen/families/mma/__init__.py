"""The tensor-core families: one factor, and all factors of a layer."""

from ksgen.families.mma.chain import MmaChain, MmaChainConstants
from ksgen.families.mma.family import Mma
from ksgen.families.mma.shape import MmaConstants, Shape

__all__ = ["Mma", "MmaChain", "MmaChainConstants", "MmaConstants", "Shape"]
