"""ksgen multiplies by Kronecker-sparse matrices: it generates, builds, caches, tunes and launches the kernels.

    import ksgen
    multiply = ksgen.Launcher(1, 192, 48, 2)
    y = multiply(x, weights)

Names are imported when they are first used, so that `import ksgen` costs nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ksgen.errors import KsgenError
    from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher, use_bundle
    from ksgen.pattern import Chain, Pattern
    from ksgen.quantized import Quantized, QuantizedInputs, quantize, quantize_inputs
    from ksgen.tuning import tune

__version__ = "0.1.0"
try:
    STARTED_IN = os.getcwd()  # relative paths in the environment are meant from here, wherever the program goes later
except OSError:  # a folder that is gone
    STARTED_IN = os.sep
__all__ = [
    "Chain",
    "ChainLauncher",
    "GroupLauncher",
    "KsgenError",
    "Launcher",
    "Pattern",
    "Quantized",
    "QuantizedInputs",
    "__version__",
    "quantize",
    "quantize_inputs",
    "tune",
    "use_bundle",
]

_HOMES = {
    "Chain": "ksgen.pattern",
    "ChainLauncher": "ksgen.launcher",
    "GroupLauncher": "ksgen.launcher",
    "KsgenError": "ksgen.errors",
    "Launcher": "ksgen.launcher",
    "Pattern": "ksgen.pattern",
    "Quantized": "ksgen.quantized",
    "QuantizedInputs": "ksgen.quantized",
    "quantize": "ksgen.quantized",
    "quantize_inputs": "ksgen.quantized",
    "tune": "ksgen.tuning",
    "use_bundle": "ksgen.launcher",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ksgen' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
