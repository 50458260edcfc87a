"""The family of the weights' gradient on GPUs: by plain multiply-adds, or on tensor cores."""

from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants, GradientMmaTiling
from ksgen.families.gradient.plain import GradientConstants, GradientTiling

__all__ = ["Gradient", "GradientConstants", "GradientMmaConstants", "GradientMmaTiling", "GradientTiling"]
