"""The vector families, for processors: one factor, and all factors of a layer."""

from ksgen.families.vector.chain import VectorChain, VectorChainConstants
from ksgen.families.vector.family import Vector
from ksgen.families.vector.shape import VectorConstants, VectorTiling

__all__ = ["Vector", "VectorChain", "VectorChainConstants", "VectorConstants", "VectorTiling"]
