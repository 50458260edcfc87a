"""The layer: a chain in place of a `torch.nn.Linear`, alone or in a group, with weights that train or are stored in eight bits."""

from ksgen.torch.layer.base import freeze, thaw
from ksgen.torch.layer.linear import KSLinear, QuantizedKSLinear

__all__ = ["KSLinear", "QuantizedKSLinear", "freeze", "thaw"]
