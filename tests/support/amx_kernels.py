"""Kernels by matrix tiles, and a processor that has them, for the tests of their family."""

from ksgen.families import Limits
from ksgen.families.amx import Amx

FAMILY = Amx()
CPU = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, tiles=("bf16", "f16"), multiprocessors=2, async_copies=False)
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
}
