"""The SIMT family: plain multiply-adds of one factor, or of all factors of a layer."""

from ksgen.families.simt.chain import SimtChainConstants, SimtChainTiling
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants, SimtTiling

__all__ = ["Simt", "SimtChainConstants", "SimtChainTiling", "SimtConstants", "SimtTiling"]
