"""Patterns of the paper's benchmark, and a small representative sample of them. Leaves out precisions and layouts."""

from bisect import bisect_left
from collections import Counter
from functools import cache
from itertools import product
from math import fsum, sqrt

from ksgen.pattern import Pattern

BATCH = 25088  # 128 sequences of 196 tokens

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # values of a in the second sweep, of d in the first
_COUNTS_OF_D = (4, 16, 64)  # in the second sweep
_SIDES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # values of b and c
_LEFT_OUT = {(1024, 256), (256, 1024), (128, 512), (512, 128), (64, 256), (256, 64)}  # (b, c), of the second sweep
_MOST_ELEMENTS = 2**31 - 1  # elements of each array: X, Y and the weights
_BANDS = (40, 64, 100, 200)  # upper ends of bands of bc/(b + c); the last band has none


def paper_patterns(batch: int = BATCH) -> list[Pattern]:
    """Patterns of two sweeps: over d with a = 1, and over a. Blocks have b = c, b = 4c or c = 4b.

    Patterns are omitted if an array exceeds 32-bit indices at this batch size.
    """
    blocks = [(b, c) for b, c in product(_SIDES, _SIDES) if b == c or b == 4 * c or c == 4 * b]
    kept = [block for block in blocks if block not in _LEFT_OUT]
    over_d = [Pattern(1, b, c, d) for (b, c), d in product(blocks, _COUNTS)]
    over_a = [Pattern(a, b, c, d) for a, (b, c), d in product(_COUNTS[1:], kept, _COUNTS_OF_D)]
    return [
        pattern
        for pattern in over_d + over_a
        if max(batch * pattern.in_features, batch * pattern.out_features, pattern.weight_count) <= _MOST_ELEMENTS
    ]


def stratified(n: int) -> list[Pattern]:
    """The n patterns that represent all of them best, the most representative first. The order is the same for every n.

    Each pattern is the one whose classes the earlier patterns cover least. Classes are weighted by the square root of
    their size, so that rare classes come early too. If several patterns are equal, the paper's order decides.
    """
    return list(_stratified(n))


@cache
def _stratified(n: int) -> tuple[Pattern, ...]:
    left = paper_patterns()
    counts = Counter(each for pattern in left for each in _classes(pattern))
    covered: Counter[tuple[object, ...]] = Counter()
    chosen: list[Pattern] = []

    while left and len(chosen) < n:
        gains = {each: sqrt(count) / (1 + covered[each]) for each, count in counts.items()}
        # fsum, because `sum` rounds differently in different versions of Python
        chosen.append(max(left, key=lambda pattern: fsum(map(gains.__getitem__, _classes(pattern)))))
        left.remove(chosen[-1])
        covered.update(_classes(chosen[-1]))
    return tuple(chosen)


@cache
def _classes(pattern: Pattern) -> tuple[tuple[object, ...], ...]:
    a, b, c, d = pattern.shape
    band = bisect_left(_BANDS, b * c / (b + c))
    shape = "tall" if b > c else "wide" if b < c else "square"
    return (
        ("d", d),
        ("band", band),
        ("d, band", d, band),
        ("shape", shape),
        ("block", b, c),
        ("several", a > 1),
        ("a", a),
    )
