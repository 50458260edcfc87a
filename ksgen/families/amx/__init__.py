"""The amx family, for processors with matrix tiles."""

from ksgen.families.amx.family import Amx
from ksgen.families.amx.shape import AmxConstants, Shape

__all__ = ["Amx", "AmxConstants", "Shape"]
