"""Layers that replace a `torch.nn.Linear` by a chain: alone or grouped, with trainable or quantized weights."""

from ksgen.torch.layer.base import freeze, thaw
from ksgen.torch.layer.building import build, calibrate
from ksgen.torch.layer.convolution import KSConv1x1
from ksgen.torch.layer.linear import KSLinear, QuantizedKSLinear
from ksgen.torch.layer.sum import KSSum
from ksgen.torch.layer.tied import Tied

__all__ = ["KSConv1x1", "KSLinear", "KSSum", "QuantizedKSLinear", "Tied", "build", "calibrate", "freeze", "thaw"]
