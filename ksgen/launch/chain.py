"""Chain launcher, y = chain(x, weights): one launch for all factors if a device has a family for that and it is
faster.
"""

from typing import Any, Unpack

from ksgen.errors import LaunchError
from ksgen.launch.base import BaseLauncher
from ksgen.launch.explain import checked, layer_options
from ksgen.launch.launcher import Launcher
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Activation, Fuse, Layout
from ksgen.spec.kernel import Stated, StatedOptions


class ChainLauncher(BaseLauncher):
    """Multiply by a product of Kronecker-sparse factors: y = chain(x, weights) computes one layer.

    If the device has a kernel for all factors and that is faster, one launch runs them. Otherwise factors are launched
    sequentially. Arguments that any factor would refuse are refused before the first launch.

    Args:
        *factors: Patterns or `Launcher`s, one per argument, in the order in which they multiply x; or one `Chain`, or
            one list of patterns. Options with which a `Launcher` was made are ignored, except `batches`.
        between: Activation after each factor but the last: "none", "relu", "gelu", "gelu_tanh" or "silu".
        fuse: Launches: "auto" runs one launch if that is faster, "no" one per factor. "yes" always runs one launch, and
            is an error if that is unavailable.
        out_layout: Layout of y for calls that name none: "bsf" or "bsl". None: that of x.
        **stated: Default options of calls, and operands (bias, residual) that each call must pass, as for a `Launcher`.

    Raises:
        PatternError: The factors do not fit each other.
        SpecError: The value of a stated option is not accepted, or two options exclude each other.
        LaunchError: `between`, `fuse` or `out_layout` is unknown, or no factor is given.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> layer = ksgen.ChainLauncher("1,2,2,2", "2,2,2,1", between="relu")
        >>> x = np.array([[1, -2, 3, -4]], np.float32)
        >>> weights = [np.ones((1, 2, 2, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)]
        >>> layer(x, weights)
        array([[4., 4., 4., 4.]], dtype=float32)
        >>> ksgen.ChainLauncher(ksgen.monarch(4, 4, 2, 2))
        ChainLauncher(Launcher(2, 2, 2, 1), Launcher(1, 2, 2, 2))
    """

    def __init__(
        self,
        *factors: Any,
        between: Activation = "none",
        fuse: Fuse = "auto",
        out_layout: Layout | None = None,
        **stated: Unpack[Stated],
    ) -> None:
        given = _factors(factors)
        self.chain = Chain(tuple(factor.pattern for factor in given))  # refuses factors that do not fit each other
        launchers = tuple(map(_plain, given, self.chain))
        self.batches = launchers[0].batches if len(launchers) == 1 else frozenset()
        options = layer_options(self.chain, between, fuse, out_layout)
        self._set_up((self.chain,), launchers, checked(self.chain, StatedOptions(**stated)), options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle that an earlier version of ksgen wrote: it holds the attributes."""
        options = {name: state[name] for name in ("between", "fuse", "out_layout")}
        self.__init__(*state["factors"], **options, **state["stated"].non_defaults)  # type: ignore[misc]


def _factors(given: tuple[Any, ...]) -> list[Launcher]:
    """Launchers of a layer's factors, given as launchers or patterns, one per argument, or as one chain."""
    if len(given) == 1 and not isinstance(given[0], Launcher):
        given = Chain.read(given[0]).factors
    if not given:
        raise LaunchError(
            "factors=(); accepted: Launchers or patterns, one per argument, in the order in which they multiply X; "
            "or a Chain"
        )
    return [factor for each in given for factor in (each.factors if isinstance(each, Launcher) else (Launcher(each),))]


def _plain(factor: Launcher, pattern: Pattern) -> Launcher:
    """Launcher of the chain's pattern, without stated options.

    A chain turns a later factor's `load` order into the previous factor's `store` order. So its patterns may differ
    from the launchers' own.
    """
    if factor.takes_lists or factor.options.non_defaults or factor.stated.non_defaults or factor.pattern != pattern:
        return Launcher(pattern, batches=sorted(factor.batches))
    return factor


def layer_of(given: Any) -> ChainLauncher:
    """Launcher of one layer of a group, given as a launcher, a chain or a pattern in any form."""
    if isinstance(given, Launcher):
        return ChainLauncher(given, **given.options.non_defaults, **given.stated.non_defaults)
    return given if isinstance(given, ChainLauncher) else ChainLauncher(given)
