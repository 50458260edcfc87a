"""Who is compared, by name, and in which precisions: what every part of the benchmark agrees on. Imports no PyTorch."""

from dataclasses import dataclass

from ksgen.spec import PRECISIONS

OURS = "ksgen"
PAPERS = ("bmm", "einsum", "bsr", "dense", "sparse")
EXPERTS = ("strided", "three_passes", "densified", "compiled")
LIBRARIES = ("scipy", "lazylinop")  # that may be installed: on processors
PARTS = ("rewriting",)  # no products: neither checked nor compared
PYTORCH = PAPERS + EXPERTS
OTHERS = PYTORCH + LIBRARIES
NAMES = (OURS, *OTHERS, *PARTS)


@dataclass(frozen=True)
class Comparison:
    """What both sides may multiply in."""

    name: str
    says: str
    ours: tuple[str, ...]  # precisions of our kernels
    baselines: str
    allows_tf32: bool = False


def as_precise_as(name: str) -> tuple[str, ...]:
    """Those that take the same arrays, and all of their range, with errors as small or twice that."""
    own = PRECISIONS[name]
    same = [each for each in PRECISIONS.values() if (each.dtype, each.unit_roundoff) == (own.dtype, own.unit_roundoff)]
    return tuple(each.name for each in same if not each.range_note)


COMPARISONS = {
    each.name: each
    for each in (
        Comparison(
            "float32", "errors as small as float32's, or twice that: TF32 is off for the baselines", as_precise_as("float32"), "float32"
        ),
        Comparison("tf32", "float32 arrays with TF32 allowed on both sides", ("tf32",), "tf32", allows_tf32=True),
        Comparison("float16", "float16, summed in float32", ("float16",), "float16"),
        Comparison("bfloat16", "bfloat16, summed in float32", ("bfloat16",), "bfloat16"),
        Comparison(
            "fp16x3", "errors as small as float32's, or twice that, in float16's range, beside float32 baselines", ("fp16x3",), "float32"
        ),
    )
}
USUAL = ("float32", "float16", "tf32", "bfloat16")  # the most telling first
