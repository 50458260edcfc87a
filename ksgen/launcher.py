"""The calls that users make, and that emitted modules import: `y = launcher(x, weights)`.

A launcher holds all kernels of one pattern, a chain launcher those of one layer; `ksgen.launch` has what they do.
"""

from ksgen.launch.call import Call
from ksgen.launch.chain import ChainLauncher
from ksgen.launch.group import GroupLauncher
from ksgen.launch.launcher import Launcher
from ksgen.launch.planner import PLANNER
from ksgen.launch.weights import Weights

__all__ = ["Call", "ChainLauncher", "GroupLauncher", "Launcher", "Weights", "use_bundle"]


def use_bundle(path: str) -> None:
    """Serve every launcher of this process from a bundle first: `ksgen.use_bundle("vit.ksb")`."""
    PLANNER.use_bundle(path)
