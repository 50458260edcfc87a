"""Operands of a kernel's launch, by name and in order. The batch comes last, tensor maps come first.

A family's `signature` states all operands that its kernels may take. A kernel takes those that its epilogue and its job
need.
"""

from ksgen.spec import KernelSpec

PRODUCT: tuple[str, ...] = ("x", "weights", "y", "bias", "residual")
PRODUCT_WITH_WORKSPACE: tuple[str, ...] = ("x", "weights", "y", "workspace", "bias", "residual")
GRADIENT: tuple[str, ...] = ("x", "grad_y", "grad", "workspace")
GRADIENT_WITH_BIAS: tuple[str, ...] = (*GRADIENT, "bias")  # the bias's gradient, if the kernel computes it


def operands_of(signature: tuple[str, ...], kernel: KernelSpec) -> tuple[str, ...]:
    """Operands of a family's source for the kernel.

    A chain has one operand of weights per factor, and a group one output per chain.
    """
    spelled = {
        "bias": each_chains(kernel, "bias") if kernel.epilogue.bias else (),
        "residual": each_chains(kernel, "residual") if kernel.epilogue.residual else (),
        "y": each_chains(kernel, "y"),
        "weights": weights_of(kernel),
    }
    return (*(name for operand in signature for name in spelled.get(operand, (operand,))), *pitches_of(kernel).values())


def each_chains(kernel: KernelSpec, operand: str) -> tuple[str, ...]:
    """Names of an operand for each chain of a group."""
    return numbered(operand, len(kernel.chains))


def numbered(operand: str, chains: int) -> tuple[str, ...]:
    """Names of an operand that each chain has: numbered from 1 if there are several chains, else the plain name."""
    return tuple(f"{operand}_{number}" for number in range(1, chains + 1)) if chains > 1 else (operand,)


def features_of(kernel: KernelSpec) -> dict[str, int]:
    """Number of features of X, of each Y and of each residual, by operand."""
    found, rows = {"x": kernel.in_features}, ("y", "residual") if kernel.epilogue.residual else ("y",)
    for array in rows:
        found |= {
            name: chain.out_features for name, chain in zip(each_chains(kernel, array), kernel.chains, strict=True)
        }
    return found


def pitches_of(kernel: KernelSpec) -> dict[str, str]:
    """Operands with the pitches of strided arrays, by array.

    A pitch counts elements: from one row of the batch to the next in batch-size-first, and from one feature to the next
    in batch-size-last.
    """
    return {array: f"{array}_pitch" for array in features_of(kernel)} if kernel.is_strided else {}


def layout_of(kernel: KernelSpec, array: str) -> str:
    """Layout of X, or of an output or residual."""
    return kernel.layout if array == "x" else kernel.y_layout


def weights_of(kernel: KernelSpec) -> tuple[str, ...]:
    """Names of the operands that hold packed weights, chain by chain, in the order in which factors multiply."""
    if kernel.is_chain:
        return tuple(f"weights_{number}" for number in range(1, sum(map(len, kernel.chains)) + 1))
    return () if kernel.job == "gradient" else ("weights",)


def result_of(kernel: KernelSpec) -> str:
    """The operand that a launch writes for its caller."""
    return "grad" if kernel.job == "gradient" else "y"
