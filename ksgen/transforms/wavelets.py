"""Filters of Daubechies' orthonormal wavelets, and transforms by one factor for several levels of overlapping windows.

A level's filters are longer than its step, so windows overlap: inputs are first gathered, once per window that
contains them. A factor then multiplies contiguous windows. Coarser levels are a separate transform of the means.
Filters are computed in integers, fractions and float64.
"""

from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ksgen.errors import PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.transforms.factors import MOST_FEATURES
from ksgen.transforms.library import Library
from ksgen.transforms.transform import Step, Transform
from ksgen.values import excerpt, whole_number

MOST_TAPS = 20
CORRECTIONS = 4  # Newton iterations that correct filters, enough for the precision of float64

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]


def checked_taps(taps: object) -> int:
    count = whole_number(taps)
    if count is None or count % 2 or not 2 <= count <= MOST_TAPS:
        raise PatternError(f"taps={excerpt(taps)}; accepted: an even number from 2 to {MOST_TAPS}")
    return count


def checked_levels(n: object, taps: int, levels: object) -> tuple[int, int]:
    """Check and return the size and the number of levels.

    By default, each level must halve an even number, and the last one must leave at least taps - 1 means. There is at
    least one level.
    """
    size = whole_number(n)
    if size is None or size % 2 or not 2 <= size <= MOST_FEATURES:
        raise PatternError(f"n={excerpt(n)}; accepted: an even number up to {MOST_FEATURES}")
    halvings = (size & -size).bit_length() - 1
    if levels is None:
        fitting = (size // (taps - 1)).bit_length() - 1
        return size, max(1, min(halvings, fitting))
    count = whole_number(levels)
    if count is None or not 1 <= count <= halvings:
        raise PatternError(
            f"levels={excerpt(levels)} of n={size}; accepted: from 1 to {halvings}, because n has {halvings} factors 2"
        )
    return size, count


@cache
def lowpass(taps: int) -> tuple[float, ...]:
    """Minimum-phase filter of the means, equal to PyWavelets' `rec_lo`, rounded to float64."""
    half = taps // 2
    roots = np.roots([comb(half - 1 + power, power) for power in reversed(range(half))])
    halves = 1 - 2 * roots
    inner = halves - np.sqrt(halves * halves - 1 + 0j)
    inner = np.where(np.abs(inner) > 1, 1 / inner, inner)
    start = np.real(np.poly([*[-1.0] * half, *inner]))
    return _corrected([Fraction(float(each)) for each in start * (np.sqrt(2) / start.sum())])


def _corrected(found: list[Fraction]) -> tuple[float, ...]:
    """Refine a filter by Newton's method, with exact residuals of its defining equations.

    The equations: the filter is orthogonal to its even shifts, and the alternating filter has taps / 2 vanishing
    moments.
    """
    taps, half = len(found), len(found) // 2
    shifts = range(0, taps, 2)
    moments = [[(-1) ** at * Fraction(2 * at - taps + 1, taps) ** power for at in range(taps)] for power in range(half)]
    for _ in range(CORRECTIONS):
        products = [sum(found[at] * found[at + by] for at in range(taps - by)) - (by == 0) for by in shifts]
        vanishing = [sum(weight * each for weight, each in zip(row, found, strict=True)) for row in moments]
        padded = [Fraction(0)] * taps + found + [Fraction(0)] * taps
        slopes = [[padded[taps + at + by] + padded[taps + at - by] for at in range(taps)] for by in shifts]
        step = np.linalg.solve(np.array([*slopes, *moments], float), -np.array([*products, *vanishing], float))
        found = [each + Fraction(float(change)) for each, change in zip(found, step, strict=True)]
    return tuple(map(float, found))


def window_of(taps: int, levels: int) -> int:
    """Window length of the coarsest level."""
    return (taps - 1) * ((1 << levels) - 1) + 1


def levels_of_factor(taps: int, levels: int, most: int) -> int:
    """Number of levels in the factor of the finest levels: the most whose windows fit, and at least one.

    Windows fit if those of the transform and of its inverse have at most `most` entries.
    """
    longest = {each: max(window_of(taps, each), 2**each * len(_back(taps, each))) for each in range(2, levels + 1)}
    return max((each for each, length in longest.items() if length <= most), default=1)


def analysis(taps: int, levels: int) -> Array:
    """Matrix (2^levels, window) from a window to its coefficients: the mean, then the levels from the coarsest on."""
    low = np.array(lowpass(taps))
    high = low[::-1] * (-1.0) ** np.arange(taps)
    mean, details = np.ones(1), []
    for level in range(levels):
        upsampled = np.zeros((2, (taps - 1) * 2**level + 1))
        upsampled[:, :: 2**level] = low, high
        details.append(np.convolve(upsampled[1], mean))
        mean = np.convolve(upsampled[0], mean)
    found, centre = np.zeros((2**levels, window_of(taps, levels))), taps // 2 - 1
    found[0] = mean
    for level, detail in enumerate(details, 1):
        for at in range(2 ** (levels - level)):
            first = 2**level * at + centre * (2**levels - 2**level)
            found[2 ** (levels - level) + at, first : first + detail.size] = detail
    return found


def windows(n: int, taps: int, levels: int) -> Numbers:
    """Indices of the entries of each window, concatenated; both ends wrap around."""
    starts = np.arange(0, n, 2**levels) - _before(taps, levels)
    return np.asarray((starts[:, None] + np.arange(window_of(taps, levels))) % n).ravel()


def places(n: int, levels: int) -> Numbers:
    """Indices of the coefficients among the windows' outputs: all means, then each level from the coarsest on."""
    block = np.arange(n).reshape(-1, 2**levels)
    bounds = [0, *(2**level for level in range(levels + 1))]
    return np.concatenate([block[:, first:last].ravel() for first, last in pairwise(bounds)])


def synthesis(taps: int, levels: int) -> Array:
    """Matrix (2^levels, windows x 2^levels) from coefficients of neighbouring windows to the entries of one step."""
    block, step = analysis(taps, levels), 2**levels
    found = np.zeros((step, len(_back(taps, levels)), step))
    for number, by in enumerate(_back(taps, levels)):
        for entry in range(step):
            at = entry - step * by + _before(taps, levels)
            if 0 <= at < block.shape[1]:
                found[entry, number] = block[:, at]
    return found.reshape(step, -1)


def neighbours(n: int, taps: int, levels: int) -> Numbers:
    """Indices of the coefficients, in the order of `places`, that each step of the inverse reads."""
    of_window = np.empty(n, np.int64)
    of_window[places(n, levels)] = np.arange(n)
    blocks = of_window.reshape(-1, 2**levels)
    shifted = (np.arange(blocks.shape[0])[:, None] + np.array(_back(taps, levels))) % blocks.shape[0]
    return np.asarray(blocks[shifted]).ravel()


def _before(taps: int, levels: int) -> int:
    """Number of entries of a window before its step."""
    return (taps // 2 - 1) * ((1 << levels) - 1)


def _back(taps: int, levels: int) -> range:
    """Offsets, relative to a step's window, of the windows that contain an entry of the step."""
    step, before = 2**levels, _before(taps, levels)
    return range(-((window_of(taps, levels) - 1 - before) // step), (before + step - 1) // step + 1)


# ---- transforms: entries are gathered, then one factor multiplies all windows


def of_windows(name: str, n: int, taps: int, levels: int, rest: Transform | None) -> Transform:
    """Create a transform from entries to coefficients; `rest` transforms the means by the coarser levels."""
    means = n >> levels

    def after(library: Library, y: Any) -> Any:
        return library.joined(rest._of_rows(library, y[:, :means]), y[:, means:]) if rest else y

    before = _gathered(windows(n, taps, levels))
    return _transform(name, n, analysis(taps, levels), before, after, places(n, levels))


def to_windows(name: str, n: int, taps: int, levels: int, rest: Transform | None) -> Transform:
    """Create the inverse of `of_windows`, from coefficients to entries."""
    means, gathered = n >> levels, _gathered(neighbours(n, taps, levels))

    def before(library: Library, x: Any) -> Any:
        return gathered(library, library.joined(rest._of_rows(library, x[:, :means]), x[:, means:]) if rest else x)

    return _transform(name, n, synthesis(taps, levels), before)


def _gathered(order: Numbers) -> Step:
    return lambda library, x: library.taken(x, library.on_device_of(x, order))


def _transform(
    name: str, n: int, block: NDArray[Any], before: Step, after: Step | None = None, places: NDArray[Any] | None = None
) -> Transform:
    """Create a transform with one factor, whose blocks are all equal to `block`, one per step."""
    step, window = block.shape
    weights = np.broadcast_to(block[None, :, :, None], (n // step, step, window, 1)).copy()
    chain = Chain((Pattern(*weights.shape),), name.partition("(")[0])
    return Transform(name, chain, (weights,), places=places, size=n, before=before, after=after)
