"""Transforms of overlapping windows: entries are gathered, then one factor multiplies all windows.

Coarser levels are a separate transform of the means.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ksgen.pattern import Chain, Pattern
from ksgen.transforms import wavelets
from ksgen.transforms.library import Library
from ksgen.transforms.transform import Step, Transform


def of_windows(name: str, n: int, taps: int, levels: int, rest: Transform | None) -> Transform:
    """Create a transform from entries to coefficients; `rest` transforms the means by the coarser levels."""
    means = n >> levels

    def after(library: Library, y: Any) -> Any:
        return library.joined(rest._of_rows(library, y[:, :means]), y[:, means:]) if rest else y

    before = _gathered(wavelets.windows(n, taps, levels))
    return _transform(name, n, wavelets.analysis(taps, levels), before, after, wavelets.places(n, levels))


def to_windows(name: str, n: int, taps: int, levels: int, rest: Transform | None) -> Transform:
    """Create the inverse of `of_windows`, from coefficients to entries."""
    means, gathered = n >> levels, _gathered(wavelets.neighbours(n, taps, levels))

    def before(library: Library, x: Any) -> Any:
        return gathered(library, library.joined(rest._of_rows(library, x[:, :means]), x[:, means:]) if rest else x)

    return _transform(name, n, wavelets.synthesis(taps, levels), before)


def _gathered(order: NDArray[np.int64]) -> Step:
    return lambda library, x: library.taken(x, library.on_device_of(x, order))


def _transform(
    name: str, n: int, block: NDArray[Any], before: Step, after: Step | None = None, places: NDArray[Any] | None = None
) -> Transform:
    """Create a transform with one factor, whose blocks are all equal to `block`, one per step."""
    step, window = block.shape
    weights = np.broadcast_to(block[None, :, :, None], (n // step, step, window, 1)).copy()
    chain = Chain((Pattern(*weights.shape),), name.partition("(")[0])
    return Transform(name, chain, (weights,), places=places, size=n, before=before, after=after)
