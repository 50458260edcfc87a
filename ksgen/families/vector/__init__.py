"""The vector family, for processors: one factor, or all factors of a layer."""

from ksgen.families.vector.chain import VectorChainConstants, VectorChainTiling
from ksgen.families.vector.family import Vector
from ksgen.families.vector.shape import VectorConstants, VectorTiling

__all__ = ["Vector", "VectorChainConstants", "VectorChainTiling", "VectorConstants", "VectorTiling"]
