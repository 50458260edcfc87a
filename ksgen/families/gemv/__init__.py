"""The family for small batches: one factor, two factors of a layer, or several layers on one X, in one launch."""

from ksgen.families.gemv.chain_shape import GemvChainConstants, GemvChainTiling
from ksgen.families.gemv.family import Gemv
from ksgen.families.gemv.group import GemvGroupConstants, GemvGroupTiling
from ksgen.families.gemv.shape import GemvConstants, GemvTiling

__all__ = [
    "Gemv", "GemvChainConstants", "GemvChainTiling", "GemvConstants", "GemvGroupConstants", "GemvGroupTiling",
    "GemvTiling",
]  # fmt: skip
