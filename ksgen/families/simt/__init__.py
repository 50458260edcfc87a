"""Plain multiply-adds: a factor by itself, and all factors of a layer in one launch."""

from ksgen.families.simt.chain import SimtChain, SimtChainConstants
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import Shape, SimtConstants

__all__ = ["Shape", "Simt", "SimtChain", "SimtChainConstants", "SimtConstants"]
