"""The vector families, for processors: one factor, and all factors of a layer."""

from ksgen.families.vector.chain import ChainConstants, VectorChain
from ksgen.families.vector.family import Vector
from ksgen.families.vector.shape import Shape, VectorConstants

__all__ = ["ChainConstants", "Shape", "Vector", "VectorChain", "VectorConstants"]
