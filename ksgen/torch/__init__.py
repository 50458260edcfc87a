"""ksgen in PyTorch: the layer `KSLinear`, its product `multiply`, and conversions of dense matrices and models.

The conversions are `factorize`, `propose`, `convert` and `quantize`. In ksgen, only benchmarks and commands import this
package.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ksgen.install import install_line

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ksgen.torch needs PyTorch 2.4 or later: {install_line('torch')}", name=error.name
    ) from error

if not hasattr(torch.library, "custom_op"):
    raise ImportError(
        f"ksgen.torch needs PyTorch 2.4 or later, and {torch.__version__} is installed: {install_line('torch')}"
    )

from ksgen.torch.conversion.convert import convert
from ksgen.torch.conversion.factorize import factorize
from ksgen.torch.conversion.merge import optimize
from ksgen.torch.conversion.propose import propose
from ksgen.torch.conversion.quantize import quantize_model as quantize
from ksgen.torch.conversion.rule import save_rule
from ksgen.torch.layer import KSConv1x1, KSLinear, KSSum, Tied, build, calibrate, freeze, thaw
from ksgen.torch.operators.ops import multiply

__all__ = [
    "KSConv1x1", "KSLinear", "KSSum", "Tied", "build", "calibrate", "convert", "factorize", "freeze", "multiply",
    "optimize", "propose", "quantize", "save_rule", "thaw",
]  # fmt: skip

# Short module names that programs import and that pickled layers and reports refer to; they name the same objects.
_PLACES = {
    "layer": "group weight splits",
    "operators": "ops products choice checks backends frozen prepared fusing autotuning",
    "conversion": "adapter convert factorize pretrained projection propose rule times",
}
PLACES = {
    f"ksgen.torch.{name}": f"ksgen.torch.{folder}.{name}" for folder, names in _PLACES.items() for name in names.split()
} | {
    "ksgen.torch.candidates": "ksgen.torch.conversion.propose",
    "ksgen.torch.epilogue": "ksgen.torch.operators.products",
    "ksgen.torch.intermediates": "ksgen.torch.operators.backends",
    "ksgen.torch.models": "ksgen.bench.models",
    "ksgen.torch.quantized": "ksgen.torch.conversion.quantize",
    "ksgen.torch.refinement": "ksgen.torch.conversion.projection",
    "ksgen.torch.report": "ksgen.torch.conversion.convert",
    "ksgen.torch.sharding": "ksgen.torch.parallel",
}


class _Places(MetaPathFinder, Loader):
    """Import hook that resolves a module's short name to its actual module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in PLACES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(PLACES[spec.name])
        spec.loader_state = module.__spec__  # importing overwrites this attribute; `exec_module` restores it
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state


# Register loaded modules now: importing one later would hide a function of the same name, such as `convert`.
for _name, _place in PLACES.items():
    if _place in sys.modules:
        sys.modules[_name] = sys.modules[_place]
        globals().setdefault(_name.rpartition(".")[2], sys.modules[_place])
sys.meta_path.append(_Places())


def __dir__() -> list[str]:
    return sorted(__all__)
