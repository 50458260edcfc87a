"""Who is compared, by name, and in which precisions: what every part of the benchmark agrees on. Imports no PyTorch."""

from dataclasses import dataclass

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


COMPARISONS = {
    each.name: each
    for each in (
        Comparison(
            "float32", "errors as small as float32's, or twice that: TF32 is off for the baselines", ("float32", "tf32x3"), "float32"
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
