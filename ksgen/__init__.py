"""ksgen multiplies by Kronecker-sparse matrices: it generates, builds, caches, tunes and launches the kernels.

    import ksgen
    multiply = ksgen.Launcher(1, 192, 48, 2)
    y = multiply(x, weights)

Names are imported when they are first used, so that `import ksgen` costs nothing. `ksgen.torch` (layers for PyTorch),
`ksgen.jax` (products in JAX) and `ksgen.transforms` (fast transforms as chains) are imported in the same way.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ksgen.calibration import calibrate
    from ksgen.errors import KsgenError
    from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher, SumLauncher, use_bundle
    from ksgen.pattern import (
        Chain,
        Pattern,
        blast,
        block_butterfly,
        btt,
        deformable_butterfly,
        kaleidoscope,
        low_rank,
        monarch,
        square_dyadic,
    )
    from ksgen.quantized import Quantized, QuantizedInputs, quantize, quantize_inputs
    from ksgen.tuning import tune

__version__ = "0.1.0"
try:
    STARTED_IN = os.getcwd()  # where relative paths of environment variables start, even if the program changes folder
except OSError:  # a folder that is gone
    STARTED_IN = os.sep
__all__ = [
    "Chain", "ChainLauncher", "GroupLauncher", "KsgenError", "Launcher", "Pattern", "Quantized", "QuantizedInputs",
    "SumLauncher", "__version__", "blast", "block_butterfly", "btt", "calibrate", "deformable_butterfly",
    "kaleidoscope", "low_rank", "monarch", "quantize", "quantize_inputs", "square_dyadic", "tune", "use_bundle",
]  # fmt: skip

_NAMES = {  # public names by the module that defines them
    "ksgen.calibration": ("calibrate",),
    "ksgen.errors": ("KsgenError",),
    "ksgen.launcher": ("ChainLauncher", "GroupLauncher", "Launcher", "SumLauncher", "use_bundle"),
    "ksgen.pattern": (
        "Chain", "Pattern", "blast", "block_butterfly", "btt", "deformable_butterfly", "kaleidoscope", "low_rank",
        "monarch", "square_dyadic",
    ),
    "ksgen.quantized": ("Quantized", "QuantizedInputs", "quantize", "quantize_inputs"),
    "ksgen.tuning": ("tune",),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

# modules that are imported at their first use, each with the library that it needs
_PACKAGES = {"jax": "jax", "structures": "ksgen", "torch": "torch", "transforms": "numpy"}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        try:
            return import_module(f"ksgen.{name}")
        except ModuleNotFoundError as error:  # `hasattr` and `getattr` with a default expect an AttributeError
            if error.name != _PACKAGES[name]:
                raise
            raise AttributeError(f"module 'ksgen' has no attribute {name!r}: {error}") from error
    if name not in _HOMES:
        raise AttributeError(f"module 'ksgen' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Names offered to users: the public names, and the packages whose library is installed. Imports none of them."""
    from importlib.util import find_spec

    return sorted({*__all__, *(name for name, library in _PACKAGES.items() if find_spec(library))})
