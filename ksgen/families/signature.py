"""Which operands a kernel's launch takes, by name and in order. The batch comes last, tensor maps come first.

A family's `signature` states all that its kernels may take; a kernel takes those of them that its epilogue and its job ask for.
"""

from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

PRODUCT: tuple[str, ...] = ("x", "weights", "y", "bias", "residual")
PRODUCT_WITH_WORKSPACE: tuple[str, ...] = ("x", "weights", "y", "workspace", "bias", "residual")
GRADIENT: tuple[str, ...] = ("x", "grad_y", "grad", "workspace")


def operands_of(signature: tuple[str, ...], kernel: KernelSpec) -> tuple[str, ...]:
    """What a family's text for the kernel takes; a chain's weights are one operand per factor."""
    spelled = {
        "bias": ("bias",) if kernel.epilogue.bias else (),
        "residual": ("residual",) if kernel.epilogue.residual else (),
        "weights": weights_of(kernel),
    }
    return (*(name for operand in signature for name in spelled.get(operand, (operand,))), *pitches_of(kernel).values())


def features_of(kernel: KernelSpec) -> dict[str, int]:
    """Of the arrays with a row for each batch entry, or for each feature."""
    outputs = kernel.pattern.out_features
    return {"x": kernel.in_features, "y": outputs} | ({"residual": outputs} if kernel.epilogue.residual else {})


def pitches_of(kernel: KernelSpec) -> dict[str, str]:
    """The arrays whose rows lie apart, each with the operand that says how many elements: in batch-size-first from a batch entry to
    the next, in batch-size-last from a feature to the next."""
    return {array: f"{array}_pitch" for array in features_of(kernel)} if kernel.is_strided else {}


def dense_pitches(kernel: KernelSpec, batch: int) -> dict[str, int]:
    """Those operands for arrays without gaps."""
    features = features_of(kernel)
    return {pitch: features[array] if kernel.layout == "bsf" else batch for array, pitch in pitches_of(kernel).items()}


def weights_of(kernel: KernelSpec) -> tuple[str, ...]:
    """The operands that hold packed weights, from the factor that meets X first."""
    if kernel.job == CHAIN:
        return tuple(f"weights_{number}" for number in range(1, len(kernel.factors) + 1))
    return () if kernel.job == "gradient" else ("weights",)


def result_of(kernel: KernelSpec) -> str:
    """The operand that a launch writes for its caller."""
    return "grad" if kernel.job == "gradient" else "y"
