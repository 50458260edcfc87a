"""`Transform`: a chain with its weights and the order of its outputs, called on arrays. Computes no factor itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from ksgen.errors import LaunchError
from ksgen.launch.chain import ChainLauncher
from ksgen.pattern import Chain, Pattern
from ksgen.spec import LAYOUTS, Layout
from ksgen.spec.kernel import check_word
from ksgen.transforms.library import Library, library_of
from ksgen.values import cached_property, misfit_of_x

Step = Callable[[Library, Any], Any]  # maps an array (batch, features) to another one
Options = ParamSpec("Options")


@dataclass(frozen=True, eq=False)
class Transform:
    """Fast transform y = transform(x), which is a chain of Kronecker-sparse factors with exact weights.

    The chain's outputs may be in another order: `order` holds the index of each of the transform's outputs among the
    chain's outputs. A call stores them in the transform's order. Real transforms add steps before and after the chain.
    Two objects are equal only if they are the same object.

    Attributes:
        name: Name in messages, such as "dft(360)".
        chain: Patterns of the factors.
        weights: Weights of each factor in float64 or complex128, as `KSLinear.from_weights` accepts them.
        digits: Radices of an output's index, if the chain reverses its digits; else empty.
        places: Index of each output among the chain's outputs, if these are in yet another order; else None.
        size: Number of inputs if it differs from the chain's; else 0.
        is_real: Whether x must be real.
        before: Step before the chain, or None.
        after: Step after the chain, or None.
        made: Function that repeats the call that created the transform, for copies and pickles.

    Examples:
        >>> import numpy as np
        >>> from ksgen import transforms
        >>> haar = transforms.haar(4)
        >>> print(haar.chain)
        2,2,2,1 then 1,2,2,2
        >>> haar(np.ones(4, np.float32)).round(3) + 0
        array([2., 0., 0., 0.], dtype=float32)
    """

    name: str
    chain: Chain
    weights: tuple[NDArray[Any], ...] = field(repr=False)
    digits: tuple[int, ...] = field(default=(), repr=False)
    places: NDArray[Any] | None = field(default=None, repr=False)
    size: int = 0
    is_real: bool = False
    before: Step | None = field(default=None, repr=False)
    after: Step | None = field(default=None, repr=False)
    made: Callable[[], "Transform"] | None = field(default=None, repr=False)
    _ready: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> Any:
        return (self.made, ()) if self.made else super().__reduce__()

    def __call__(self, x: Any, *, layout: Layout = "bsf") -> Any:
        """Transform the last axis of x in layout "bsf", or the first one in "bsl".

        Args:
            x: Array of NumPy, CuPy or PyTorch. Its dtype decides the precision. Whole numbers count as float64.
                Fourier, cosine and Hartley transforms compute float16 and bfloat16 in float32.
            layout: "bsf": x is (..., n). "bsl": x is (n, ...).

        Returns:
            y, an array of the same library with the transformed axis in the same place.

        Raises:
            LaunchError: x has another size, is complex for a real transform, or belongs to another library.

        Examples:
            >>> import numpy as np
            >>> from ksgen import transforms
            >>> transforms.hadamard(2)(np.array([[1, 2], [3, 4]], np.float32), layout="bsl")
            array([[ 4.,  6.],
                   [-2., -2.]], dtype=float32)
        """
        check_word("layout", layout, LAYOUTS)
        library = library_of(x, self.name)
        wanted = self.size or self.chain.in_features
        if wrong := misfit_of_x(x.shape, wanted, layout, "..."):
            raise LaunchError(f"{self.name}: {wrong}")
        if self.is_real and library.is_complex(x):
            raise LaunchError(f"{self.name}: got x of {library.dtype_of(x)}; accepted: real numbers")
        rows = x if layout == "bsf" else library.moved(x)
        y = self._of_rows(library, rows.reshape(-1, wanted))
        y = y.reshape(*rows.shape[:-1], y.shape[-1])
        return y if layout == "bsf" else library.contiguous(library.module.moveaxis(y, -1, 0))

    @property
    def order(self) -> NDArray[Any]:
        """Index of each of the transform's outputs among the chain's outputs."""
        if self.places is not None:
            return self.places
        features = np.arange(self.chain.out_features)
        return features.reshape(self.digits).transpose().ravel() if self.digits else features

    def _of_rows(self, library: Library, rows: Any) -> Any:
        """Transform rows of shape (batch, features)."""
        rows = self.before(library, library.as_floats(rows)) if self.before else rows
        rows = library.as_numbers(rows, self.weights[0].dtype.kind == "c")
        y = self._multiply(library, rows) if rows.shape[0] else rows.reshape(0, self.chain.out_features)
        y = y if self.places is None else library.taken(y, self._on(library, y, "places", self.places))
        return self.after(library, y) if self.after else y

    def _multiply(self, library: Library, rows: Any) -> Any:
        chain, weights = self._in_order
        given = [self._on(library, rows, number, each) for number, each in enumerate(weights)]
        return chain(rows, given)

    @cached_property
    def _in_order(self) -> tuple[ChainLauncher, Sequence[NDArray[Any]]]:
        """Launcher and weights of a call.

        If the chain reverses digits, factors store their outputs in another order, as Stockham's algorithm does. Each
        factor but the last stores its digit after those of later factors and before those of earlier factors.
        """
        if not self.digits:
            return ChainLauncher(self.chain), self.weights
        patterns, weights = list[Pattern](), list[NDArray[Any]]()
        for (done, radix, _, left), weight in zip((each.shape for each in self.chain), self.weights, strict=True):
            store = f"j1:{left}.k.j2:{done}" if left > 1 else ""
            patterns.append(Pattern(1, radix, radix, left * done, store))
            moved = weight.transpose(1, 2, 3, 0)  # digits of earlier factors come last
            weights.append(np.ascontiguousarray(moved).reshape(patterns[-1].shape))
        return ChainLauncher(*patterns), weights

    def _on(self, library: Library, like: Any, name: Any, array: NDArray[Any]) -> Any:
        """A NumPy array of this transform on the device of `like`, cached per device and type."""
        key = (library.name, str(getattr(like, "device", "")), str(like.dtype), name)
        if key not in self._ready:
            self._ready[key] = library.on_device_of(like, array)
        return self._ready[key]


def made_again(make: Callable[Options, Transform]) -> Callable[Options, Transform]:
    """Decorate a function so that its transforms are copied and pickled as the call that created them."""

    @wraps(make)
    def with_call(*arguments: Options.args, **options: Options.kwargs) -> Transform:
        return replace(make(*arguments, **options), made=partial(with_call, *arguments, **options))

    return with_call
