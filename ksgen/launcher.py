"""The launchers that users call, and that emitted modules import: `y = launcher(x, weights)`.

A launcher holds all kernels of one pattern, and a chain launcher those of one layer. A group launcher serves several
layers on one x, and a sum launcher a sum of chains. `ksgen.launch` implements them.
"""

from ksgen.launch.chain import ChainLauncher
from ksgen.launch.group import GroupLauncher
from ksgen.launch.launcher import Launcher
from ksgen.launch.plan import Call
from ksgen.launch.planner import PLANNER
from ksgen.launch.sum import SumLauncher
from ksgen.launch.weights import Weights

__all__ = ["Call", "ChainLauncher", "GroupLauncher", "Launcher", "SumLauncher", "Weights", "use_bundle"]


def use_bundle(path: str) -> None:
    """Use the binaries and wisdom of a bundle in every launcher of this process.

    A bundle holds binaries. One that was written with `--device-name` also holds that device's wisdom. A machine
    without a compiler can launch these kernels.
    `ksgen bundle specs/vit.yaml --arch sm_90a -o vit.ksb` writes one. The bundle that was added last is searched first.
    The user's own wisdom precedes that of bundles.

    Args:
        path: File of the bundle, such as "vit.ksb". It must stay in place.

    Raises:
        KsgenError: The file is missing or is not a bundle.

    Examples:
        >>> import ksgen
        >>> ksgen.use_bundle("missing.ksb")
        Traceback (most recent call last):
        ...
        ksgen.errors.KsgenError: ...missing.ksb: there is no such bundle; ...
    """
    PLANNER.use_bundle(path)
