"""The amx family, for processors with matrix tiles, and its chains."""

from ksgen.families.amx.chain import AmxChain, AmxChainConstants
from ksgen.families.amx.family import Amx
from ksgen.families.amx.shape import AmxConstants, AmxTiling

__all__ = ["Amx", "AmxChain", "AmxChainConstants", "AmxConstants", "AmxTiling"]
