"""Split of a chain over processes: the axis per factor, the shard of each process, and the traffic.

Every shard is a smaller Kronecker-sparse factor. Does not use `torch.distributed`: `ksgen.torch.parallel` executes the
split.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

from torch.nn.utils import parametrize

from ksgen.errors import KsgenError, LaunchError, PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.values import counted, spanned

# placements of x and y: replicated, sharded along features, sharded along rows of the batch, or terms of a sum
WHOLE, FEATURES, ROWS, SUMS = "whole", "features", "rows", "sums"
# axes of a factor's weights: blocks, outputs of a block, inputs of a block
AXES = {None: "whole", 0: "along a", 1: "along k", 2: "along l"}


@dataclass(frozen=True)
class Style:
    """A style of tensor parallelism: placements of x and y, and the axes that it splits."""

    name: str
    takes: str  # placement of x
    gives: str  # placement of y, before terms are summed

    def axes(self, chain: Chain) -> tuple[int | None, ...]:
        """Axis along which each factor is split; None if the factor is replicated.

        Features of a process are contiguous. If x and y are both sharded, all factors are split along a. Otherwise one
        factor with a = 1 is split along k or l. Factors between it and the sharded features are split along a. All
        others are replicated.
        """
        if self.takes == self.gives:
            return (0,) * len(chain)
        single = [place for place, pattern in enumerate(chain) if pattern.a == 1]
        if not single:
            axis = "k" if self.takes == WHOLE else "l"
            raise PatternError(
                f"{self.name}: {chain} has no factor with a = 1, to be split along {axis}; accepted: KSBlockwise, "
                "which splits along a"
            )
        if self.takes == WHOLE:
            return (None,) * single[-1] + (1,) + (0,) * (len(chain) - 1 - single[-1])
        return (0,) * single[0] + (2,) + (None,) * (len(chain) - 1 - single[0])


STYLES = {
    "KSBlockwise": Style("KSBlockwise", FEATURES, FEATURES),
    "KSColwise": Style("KSColwise", WHOLE, FEATURES),
    "KSRowwise": Style("KSRowwise", FEATURES, SUMS),
}


@dataclass(frozen=True)
class Split:
    """A chain split over processes. `given` is the placement of x, and `asked` that of y."""

    style: Style
    chain: Chain
    axes: tuple[int | None, ...]
    processes: int
    given: str
    asked: str

    @property
    def own(self) -> Chain:
        """Chain that each process multiplies by."""
        return Chain(tuple(self._shard(*each) for each in zip(self.chain, self.axes, strict=True)))

    def _shard(self, pattern: Pattern, axis: int | None) -> Pattern:
        shape = list(pattern.shape)
        if axis is not None:
            shape[axis] //= self.processes
        a, b, c, d = shape
        return Pattern(a, b, c, d)

    @property
    def sums_intermediates(self) -> bool:
        """Whether processes hold terms of a sum between two factors, where an activation needs the sum itself."""
        return 2 in self.axes[:-1]

    @property
    def is_finished_later(self) -> bool:
        """Whether bias, activation and residual follow a sum over processes."""
        return self.style.gives == SUMS

    @property
    def finished(self) -> str:
        """Placement of y at the point where bias, activation and residual are added."""
        return self.asked if self.is_finished_later else self.style.gives

    def __str__(self) -> str:
        parts = [
            f"{_factors(place for place, each in enumerate(self.axes, 1) if each == axis)} {AXES[axis]}"
            for axis in dict.fromkeys(self.axes)
        ]
        share = self.own.weight_count / self.chain.weight_count
        return (
            f"{self.style.name} over {counted(self.processes, 'process', 'processes')}: {', '.join(parts)}; each "
            f"multiplies by {self.own}, {share:.0%} of the operations"
        )

    def explain(self, batch: int, item_bytes: int, has_bias: bool) -> str:
        """Describe the split, and the bytes that each process sends for a batch of that size."""
        x_bytes, y_bytes = (batch * size * item_bytes for size in (self.chain.in_features, self.chain.out_features))
        whole = [place for place, axis in enumerate(self.axes, 1) if axis is None]
        whole_bytes = sum(self.chain[place - 1].weight_count for place in whole) * item_bytes
        gives, takes = self.style.gives, self.style.takes
        forward = [(_step(self.given, takes), "x", x_bytes), (_step(gives, self.asked), "y", y_bytes)]
        sums_bias = has_bias and self.finished == ROWS
        backward = [
            (_step(self.asked, _gradient(gives)), "y's gradient", y_bytes),
            (_step(SUMS if takes == WHOLE else takes, _gradient(self.given)), "x's gradient", x_bytes),
            ("all-reduce" if whole else "", f"the gradient of {_factors(whole)}", whole_bytes),
            ("all-reduce" if sums_bias else "", "the bias's gradient", self.chain.out_features * item_bytes),
        ]
        return f"{self}; forward {self._sent(forward)}; backward {self._sent(backward)}"

    def _sent(self, steps: list[tuple[str, str, int]]) -> str:
        traffic = [
            f"{step} of {what}, {_size(self._bytes(step, size))} from each" for step, what, size in steps if step
        ]
        return " and ".join(traffic) or "sends nothing"

    def _bytes(self, step: str, size: int) -> float:
        """Bytes that each process sends, by ring algorithms, for an array of `size` bytes over all processes."""
        others = (self.processes - 1) / self.processes * size
        return {"all-reduce": 2 * others, "all-to-all": others / self.processes}.get(step, others)


def split(name: str, chain: Chain, processes: int, given: str = "", asked: str = "") -> Split:
    """Split a chain in that style; `PatternError` if `processes` does not divide all axes that are split.

    `given` is the placement of x, and `asked` that of y. By default, they are the style's; terms are summed.
    """
    if order := chain.exchanged:
        which = f"{chain}, whose {order.features} are exchanged"
        raise PatternError(f"{name} of {which}; accepted: {order.features} in the order {order.natural}")
    style = STYLES[name]
    axes = style.axes(chain)
    split_axes = [(place, axis) for place, axis in enumerate(axes) if axis is not None]
    common = gcd(*(chain[place].shape[axis] for place, axis in split_axes))
    for place, axis in split_axes:
        if chain[place].shape[axis] % processes:
            size = f"{'abc'[axis]}={chain[place].shape[axis]}"
            fit = [str(each) for each in range(2, common + 1) if common % each == 0][:8]
            accepted = (
                f"accepted: {', '.join(fit)} processes" if fit else "no number of processes divides all split axes"
            )
            raise PatternError(
                f"{name} over {processes} processes splits factor {place + 1}, {chain[place]}, {AXES[axis]}, and "
                f"{processes} does not divide {size}; {accepted}"
            )
    return Split(
        style, chain, axes, processes, given or style.takes, asked or (WHOLE if style.gives == SUMS else style.gives)
    )


def split_layer(name: str, layer: Any, processes: int, given: str = "", asked: str = "") -> Split:
    """Split a layer as `split` does; `LaunchError` if its options or ties exclude that."""
    title = layer._name()
    if parametrize.is_parametrized(layer.weights):
        raise LaunchError(f"{name}: {title} has parametrized weights, such as tied ones; accepted: plain ones")
    layer._refuse_out_layout(f"a layer that {name} splits")
    found = split(name, layer.chain, processes, given, asked)
    if layer.between != "none" and found.sums_intermediates:
        where = f"between={layer.between!r} comes before the sum over processes"
        raise LaunchError(f"{name}: {title}: {where}; accepted: KSBlockwise or KSColwise, or a layer without it")
    return found


def explain(layer: Any, processes: int, batch: int) -> Iterator[str]:
    """Describe how each style would split a layer, or why the style cannot."""
    item_bytes, has_bias = layer.weights[0].element_size(), layer.bias is not None
    for name in STYLES:
        try:
            yield split_layer(name, layer, processes).explain(batch, item_bytes, has_bias)
        except KsgenError as error:
            yield f"not {error}"


def _step(source: str, target: str) -> str:
    """Collective that converts one placement to another; empty if no communication is needed."""
    if source in (target, WHOLE):
        return ""
    if source == SUMS:
        return "all-reduce" if target == WHOLE else "reduce-scatter"
    return "all-gather" if target == WHOLE else "all-to-all"


def _gradient(placement: str) -> str:
    """Placement of the gradient of an array: each term of a sum has the gradient of the sum."""
    return WHOLE if placement == SUMS else placement


def _size(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"


def _factors(places: Iterable[int]) -> str:
    places = list(places)
    return f"{'factor' if len(places) == 1 else 'factors'} {spanned(places)}"
