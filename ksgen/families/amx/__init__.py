"""The amx family, for processors with matrix tiles, and its chains."""

from ksgen.families.amx.chain import AmxChain, ChainConstants
from ksgen.families.amx.family import Amx
from ksgen.families.amx.shape import AmxConstants, Shape

__all__ = ["Amx", "AmxChain", "AmxConstants", "ChainConstants", "Shape"]
