"""Factors as prepared calls launch them: unchanged, or as factors of another size.

**Folded.** In batch-size-first, weights that are equal along a act like weights (1, b, c, d) on `a` times as many rows.
In batch-size-last, weights that are equal along d act like weights (a, b, c, 1) on `d` times as many columns. A
single row is a column too. X and Y stay in the same memory. Weights that are equal along both axes are folded along one
of them and repeated along the other. All other tied weights are repeated.

**Swapped.** For a = 1, the weights can be read as b rows of c * d features. The n rows of x are then weights
(1, n, c, d) that multiply these rows. So x is packed instead of the weights, which are larger.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ksgen.pattern import Chain, Pattern
from ksgen.spec import Layout
from ksgen.torch.operators.choice import REMEMBERED
from ksgen.torch.operators.products import Exchange, exchange_of

MOST_SWAPPED = 64  # rows of x that are packed as weights


class Tie(NamedTuple):
    """Axis or axes along which a factor's weights are equal, and the number of slices of each.

    The parameter is one slice.
    """

    axis: int | tuple[int, ...]
    slices: int | tuple[int, ...]

    @property
    def counts(self) -> dict[int, int]:
        """Number of slices by axis."""
        axes, slices = ([each] if isinstance(each, int) else each for each in self)
        return dict(zip(axes, slices, strict=True))

    @property
    def name(self) -> str:
        """The axes as specs name them."""
        return "".join("abcd"[axis] for axis in self.counts)

    def shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of all slices, given that of one; empty for any other shape."""
        counts = self.counts
        is_slice = all(part[axis : axis + 1] == (1,) for axis in counts)
        return tuple([counts.get(axis, size) for axis, size in enumerate(part)]) if is_slice else ()


Ties = tuple[Tie | None, ...]  # one per factor; empty if none are tied


class Factor(NamedTuple):
    """A factor at a batch size, as prepared calls multiply by it."""

    pattern: Pattern
    layout: Layout
    batch: int
    exchange: Exchange | None
    is_folded: bool = False  # whether it stands for a factor with tied weights and fewer rows
    is_swapped: bool = False  # whether its x are the weights of the factor for which it stands, and vice versa
    whole: tuple[int, ...] = ()  # shape to which each step repeats the weights; empty if it takes the given ones

    def x(self, matrix: Tensor) -> Tensor:
        """X of the factor, in the memory of a matrix with other rows or of another layout."""
        return _shaped(matrix, self.layout, self.batch, self.pattern.in_features)

    def y(self, matrix: Tensor) -> Tensor:
        """Y of the factor, like X."""
        return _shaped(matrix, self.layout, self.batch, self.pattern.out_features)

    def out(self, matrix: Tensor) -> Tensor:
        """Y as kernels write it: transposed, if the factor is swapped."""
        layout = "bsl" if self.is_swapped else self.layout
        return _shaped(matrix, layout, self.batch, self.pattern.out_features)

    def weights(self, given: Tensor) -> Tensor:
        """Repeat a slice, if the factor needs whole weights. Plain PyTorch, differentiable."""
        return given.expand(self.whole).contiguous() if self.whole else given


def _shaped(matrix: Tensor, layout: str, batch: int, features: int) -> Tensor:
    shape = (batch, features) if layout == "bsf" else (features, batch)
    return matrix if matrix.shape == shape else matrix.reshape(shape)


def ties_of(layer: Any) -> Ties:
    """Ties of a layer's weights."""
    if (steps := steps_of(layer)) is None:
        return ()
    names = map(str, range(len(layer.chain)))
    found = [Tie(tie.axis, tie.count) if (tie := tie_of(steps.get(name, ()))) else None for name in names]
    return tuple(found) if any(found) else ()


def steps_of(layer: Any) -> dict[str, Any] | None:
    """Parametrizations of each factor's weights, by number; None if there are none."""
    weights = layer._modules.get("weights")
    computed = None if weights is None else weights._modules.get("parametrizations")
    found: dict[str, Any] | None = None if computed is None else computed._modules
    return found


def tie_of(steps: Any) -> Any:
    """The `Tied` among the parametrizations of a factor's weights, if it is the only one."""
    is_tied = len(steps) == 1 and hasattr(steps[0], "repeats") and hasattr(steps[0], "axis")
    return steps[0] if is_tied else None


def whole_shapes(weights: Sequence[Tensor | None], ties: Sequence[Tie | None]) -> tuple[Any, ...]:
    """Shapes of weights; for tied ones, the shape of all slices together."""
    shapes = [None if each is None else each.shape for each in weights]
    if not ties:
        return tuple(shapes)
    pairs = zip(shapes, ties, strict=False)  # pruning removes stored weights
    return tuple([tie.shape(shape) if tie and shape is not None else shape for shape, tie in pairs])


def views_of(weights: Sequence[Tensor | None], ties: Sequence[Tie | None]) -> list[Tensor | None]:
    """Weights, of which tied ones are views that repeat a slice without a copy."""
    pairs = zip(weights, ties, strict=True)
    return [each.expand(tie.shape(each.shape)) if each is not None and tie else each for each, tie in pairs]


@lru_cache(REMEMBERED)
def factors_of(chain: Chain, ties: Ties, layout: Layout, batch: int, added: tuple[bool, bool]) -> tuple[Factor, ...]:
    """Factors of a chain at a batch size. `added` says whether a bias, and whether a residual, is added to Y."""
    found = list[Factor]()
    for pattern, tie in zip(chain, ties or (None,) * len(chain), strict=True):
        is_last = len(found) + 1 == len(chain)
        factor = Factor(pattern, layout, batch, exchange_of(pattern))
        if tie is not None:
            folded = None if chain.is_exchanged else _folded(factor, tie, added if is_last else (False, False))
            factor = folded or factor._replace(whole=pattern.shape)
        found.append(factor)
    return tuple(found)


def _folded(factor: Factor, tie: Tie, added: tuple[bool, bool]) -> Factor | None:
    """A factor with one slice along an axis as its weights; None if there is none with X and Y in the same memory.

    A bias is added to a single row as its residual.
    """
    has_bias, has_residual = added
    layouts: dict[int, Layout] = {0: "bsf", 3: "bsl"}
    fitting = [axis for axis in tie.counts if factor.batch == 1 or layouts[axis] == factor.layout]
    if not fitting or (has_bias and (has_residual or factor.batch > 1)):
        return None
    axis = max(fitting, key=tie.counts.__getitem__)
    a, b, c, d = factor.pattern.shape
    pattern = Pattern(a, b, c, 1) if axis else Pattern(1, b, c, d)
    whole = pattern.shape if len(tie.counts) > 1 else ()
    return Factor(pattern, layouts[axis], factor.batch * tie.counts[axis], None, True, whole=whole)


def swapped(chain: Chain, factor: Factor, has_bias: bool) -> Factor | None:
    """A factor that multiplies the last weights of a chain by x; None if there is none, or if x is large.

    It writes y transposed, which is the order (j, k) of each row.
    """
    a, b, c, d = shape = chain[-1].shape
    if has_bias or a > 1 or factor.is_folded or factor.whole or factor.batch > min(MOST_SWAPPED, b):
        return None
    ordered = Pattern(*shape, "j.k") if d > 1 else Pattern(*shape)
    is_ordered = chain.factors == (*(each.natural for each in chain.factors[:-1]), ordered)
    if not is_ordered or (factor.layout == "bsl" and factor.batch > 1):
        return None
    return Factor(Pattern(1, factor.batch, c, d), "bsf", b, None, is_swapped=True)
