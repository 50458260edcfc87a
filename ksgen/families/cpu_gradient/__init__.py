"""The gradient family for processors: by vectors, or by matrix tiles."""

from ksgen.families.cpu_gradient.family import CpuGradient
from ksgen.families.cpu_gradient.tiles import AmxGradientConstants, AmxGradientTiling
from ksgen.families.cpu_gradient.vectors import VectorGradientConstants, VectorGradientTiling

__all__ = [
    "AmxGradientConstants",
    "AmxGradientTiling",
    "CpuGradient",
    "VectorGradientConstants",
    "VectorGradientTiling",
]
