"""The amx family, for processors with matrix tiles: one factor, or all factors of a layer."""

from ksgen.families.amx.chain import AmxChainConstants, AmxChainTiling
from ksgen.families.amx.family import Amx
from ksgen.families.amx.shape import AmxConstants, AmxTiling

__all__ = ["Amx", "AmxChainConstants", "AmxChainTiling", "AmxConstants", "AmxTiling"]
