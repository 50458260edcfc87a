"""ksgen in PyTorch: the layer `KSLinear` and its product `multiply`; `factorize`, `propose` and `convert` for dense matrices and models.

Nothing else in ksgen imports this package, except the benchmarks.
"""

from ksgen.install import install_line

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"ksgen.torch needs PyTorch 2.4 or later: {install_line('torch')}", name=error.name) from error

if not hasattr(torch.library, "custom_op"):
    raise ImportError(f"ksgen.torch needs PyTorch 2.4 or later, and {torch.__version__} is installed: {install_line('torch')}")

from ksgen.torch.base import freeze, thaw
from ksgen.torch.convert import convert
from ksgen.torch.factorize import factorize
from ksgen.torch.layer import KSLinear
from ksgen.torch.ops import multiply
from ksgen.torch.propose import propose
from ksgen.torch.quantized import quantize_model as quantize
from ksgen.torch.rule import save_rule

__all__ = ["KSLinear", "convert", "factorize", "freeze", "multiply", "propose", "quantize", "save_rule", "thaw"]


def __dir__() -> list[str]:
    return sorted(__all__)
