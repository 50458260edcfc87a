"""The families for few batch entries: one factor, and two factors of a layer in one launch."""

from ksgen.families.few.chain import FewChain
from ksgen.families.few.chain_shape import FewChainConstants
from ksgen.families.few.family import Few
from ksgen.families.few.shape import FewConstants, Shape

__all__ = ["Few", "FewChain", "FewChainConstants", "FewConstants", "Shape"]
