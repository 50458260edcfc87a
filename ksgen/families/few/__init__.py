"""The families for small batches: one factor, two factors of a layer in one launch, and several layers on one X in one
launch."""

from ksgen.families.few.chain import FewChain
from ksgen.families.few.chain_shape import FewChainConstants
from ksgen.families.few.family import Few
from ksgen.families.few.group import FewGroup
from ksgen.families.few.group_constants import FewGroupConstants
from ksgen.families.few.shape import FewConstants, FewTiling

__all__ = ["Few", "FewChain", "FewChainConstants", "FewConstants", "FewGroup", "FewGroupConstants", "FewTiling"]
