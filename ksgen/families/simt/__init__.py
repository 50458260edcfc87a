"""Plain multiply-adds: a factor by itself, and all factors of a layer in one launch."""

from ksgen.families.simt.chain import SimtChain, SimtChainConstants
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants, SimtTiling

__all__ = ["Simt", "SimtChain", "SimtChainConstants", "SimtConstants", "SimtTiling"]
