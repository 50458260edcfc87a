"""Kernels by matrix tiles, and a processor that has them, for the tests of their families."""

from ksgen.families import Limits
from ksgen.families.amx.family import Amx
from ksgen.pattern import Pattern

FAMILY = Amx()
CPU = Limits(
    2**18, registers=0, is_cpu=True, vector_bytes=64, tiles=("bf16", "f16"), multiprocessors=2, async_copies=False
)
PRECISIONS = ("bfloat16", "bf16x6", "float16", "tf32x3")
PATTERNS = {
    "one": (1, 1, 1, 1),
    "many little": (40, 1, 3, 2),
    "d 1": (2, 33, 50, 1),
    "d 1, whole": (1, 64, 96, 1),
    "d 2": (1, 40, 33, 2),
    "d 3": (2, 18, 36, 3),
    "d 4": (1, 49, 32, 4),
    "d 7": (1, 20, 12, 7),
    "d 8": (2, 17, 31, 8),
    "d 16": (1, 16, 40, 16),
    "d 20": (1, 18, 34, 20),
    "d 32": (1, 5, 6, 32),
    "d 70": (1, 18, 34, 70),
}
CHAINS = {
    "in place, ragged": (Pattern(2, 36, 40, 1), Pattern(1, 45, 72, 1), Pattern(1, 10, 45, 1)),  # 80 -> 72 -> 45 -> 10
    "d 2 and 3": (Pattern(3, 20, 33, 2), Pattern(1, 17, 40, 3)),  # 198 -> 120 -> 51
    "d 20 and 1": (Pattern(1, 18, 10, 20), Pattern(8, 33, 45, 1)),  # 200 -> 360 -> 264
    "four of one size": (Pattern(1, 8, 8, 8), Pattern(8, 8, 8, 1), Pattern(2, 4, 4, 8), Pattern(4, 4, 4, 4)),
    "one": (Pattern(1, 1, 1, 1), Pattern(1, 3, 1, 1)),
    "exchanged": (Pattern(4, 24, 16, 1, "k1:6.i.k2"), Pattern(6, 16, 16, 1)),
    "wide, then narrow": (Pattern(1, 100, 3, 1), Pattern(1, 2, 50, 2), Pattern(1, 70, 4, 1)),  # 3 -> 100 -> 4 -> 70
}
