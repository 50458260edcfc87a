"""The patterns of the paper's benchmark. Never the precisions or layouts to try them in."""

from itertools import product

from ksgen.pattern import Pattern

BATCH = 25088  # 128 sequences of 196 tokens

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of a in the second sweep, of d in the first
_COUNTS_OF_D = (4, 16, 64)  # in the second sweep
_SIDES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # of b and c
_LEFT_OUT = {(1024, 256), (256, 1024), (128, 512), (512, 128), (64, 256), (256, 64)}  # (b, c), of the second sweep
_MOST_ELEMENTS = 2**31 - 1  # of X, Y and the weights each


def paper_patterns(batch: int = BATCH) -> list[Pattern]:
    """Two sweeps, over d with a = 1 and over a, of blocks that are square or 4 to 1: those that fit 32-bit indices."""
    blocks = [(b, c) for b, c in product(_SIDES, _SIDES) if b == c or b == 4 * c or c == 4 * b]
    kept = [block for block in blocks if block not in _LEFT_OUT]
    over_d = [Pattern(1, b, c, d) for (b, c), d in product(blocks, _COUNTS)]
    over_a = [Pattern(a, b, c, d) for a, (b, c), d in product(_COUNTS[1:], kept, _COUNTS_OF_D)]
    return [pattern for pattern in over_d + over_a if _most_elements(pattern, batch) <= _MOST_ELEMENTS]


def _most_elements(pattern: Pattern, batch: int) -> int:
    return max(batch * pattern.in_features, batch * pattern.out_features, pattern.weight_count)
