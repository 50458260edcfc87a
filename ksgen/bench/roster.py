"""Names of all contenders and models, and the precisions in which they are compared. Imports no PyTorch."""

from dataclasses import dataclass

from ksgen.spec import PRECISIONS

OURS = "ksgen"
PAPERS = ("bmm", "einsum", "bsr", "dense", "sparse")
EXPERTS = ("strided", "three_passes", "densified", "pieces", "onednn", "grouped", "semi_structured", "compiled")
LIBRARIES = ("scipy", "lazylinop", "torch_structured", "nvmath")  # measured where they are installed
PARTS = ("rewriting",)  # incomplete products: neither checked nor compared
COMPILED = ("compiled",)  # they compile for seconds at their first run
LAYER = "layer"  # a frozen KSLinear, as users call it
PYTORCH = PAPERS + EXPERTS
OTHERS = PYTORCH + LIBRARIES
MODELS = ("vit-s16", "gpt2-medium", "llama-1b", "llama-1b-blast")
LAYERS = ("qkv", "projection", "up", "down")  # the linear layers of a transformer's block
FORWARD, TRAINING, DECODE = "forward", "training", "decode"
STEP_TITLES = {FORWARD: "forward", TRAINING: "training steps", DECODE: "one token per sequence"}
STEPS_OF_LAYERS = (FORWARD, TRAINING)  # by default forward alone
NAMES = (OURS, LAYER, *OTHERS, *PARTS)
ONE_LAUNCH, EACH_FACTOR, EACH_LAYER = OUR_METHODS = ("one_launch", "each_factor", "each_layer")  # launches of a layer
AND, PLUS = " and ", " plus "  # separate the chains of a group, and of a sum, in a row's pattern
# PyTorch's, for layers
OTHER_METHODS = ("bmm", "views", "einsum", "pieces", "grouped", "onednn", "compiled", "authors", "dense")
LIBRARY_METHODS = ("torch_structured", "blr")  # for layers, where they are installed
OTHERS_OF_LAYERS = OTHER_METHODS + LIBRARY_METHODS  # the best of them is what our layers are compared with
EVERYONE = tuple(dict.fromkeys((*OTHERS, *OTHERS_OF_LAYERS)))  # all contenders that are not ksgen's
METHODS = (*OUR_METHODS, LAYER, *OTHERS_OF_LAYERS)  # contenders for layers
METHODS_OF_MODELS = {  # contenders for whole models, with their descriptions
    LAYER: "the model with KSLinear layers, which choose by themselves",
    "bmm": "the model with batched products in its sparse layers",
    "einsum": "the model with einsums in its sparse layers",
    "dense": "the model with dense layers of the same matrices",
}
WHOLE = "whole model"  # in the place of a row's pattern


@dataclass(frozen=True)
class Comparison:
    """Precisions that our kernels and the baselines may use."""

    name: str
    says: str
    ours: tuple[str, ...]  # precisions of our kernels
    baselines: str
    allows_tf32: bool = False


def as_precise_as(name: str) -> tuple[str, ...]:
    """Precisions for the same arrays with the same unit roundoff, that accept the full range of these arrays."""
    wanted = PRECISIONS[name]
    key = (wanted.dtype, wanted.unit_roundoff)
    same = [each for each in PRECISIONS.values() if (each.dtype, each.unit_roundoff) == key]
    return tuple(each.name for each in same if not each.range_note)


COMPARISONS = {
    each.name: each
    for each in (
        Comparison(
            "float32",
            "errors at most twice float32's: TF32 is off for the baselines",
            as_precise_as("float32"),
            "float32",
        ),
        Comparison("tf32", "float32 arrays with TF32 allowed on both sides", ("tf32",), "tf32", allows_tf32=True),
        Comparison("float16", "float16, summed in float32", ("float16",), "float16"),
        Comparison("bfloat16", "bfloat16, summed in float32", ("bfloat16",), "bfloat16"),
        Comparison(
            "fp16x3",
            "errors at most twice float32's, in float16's range; the baselines use float32",
            ("fp16x3",),
            "float32",
        ),
    )
}
USUAL = ("float32", "float16", "tf32", "bfloat16")  # compared by default, the most informative first
