"""Products of all factors of a layer, or of one: their kernels, random arrays, and the expected outputs in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ksgen import reference
from ksgen.families.signature import each_chains
from ksgen.launch.memory import numpy_dtype
from ksgen.pattern import Pattern
from ksgen.reference import wide_type
from ksgen.spec import Epilogue, KernelSpec

Array = np.ndarray[Any, Any]
ALL = Epilogue(True, "gelu", True)


def chain_of(
    patterns: tuple[Pattern, ...],
    precision: str = "float32",
    layout: str = "bsf",
    epilogue: Epilogue | None = None,
    **more: Any,
) -> KernelSpec:
    return KernelSpec(patterns, precision, layout, epilogue or Epilogue(), **more)


def arrays_of(kernel: KernelSpec, batch: int) -> dict[str, Array]:
    random, dtype = np.random.default_rng(batch), numpy_dtype(kernel.dtype)

    def normal(*shape: int) -> Array:
        drawn = random.standard_normal(shape)
        return (drawn + 1j * random.standard_normal(shape) if dtype.kind == "c" else drawn).astype(dtype)

    def rows(features: int, layout: str = kernel.y_layout) -> Array:
        return normal(batch, features) if layout == "bsf" else normal(features, batch)

    def of_each(operand: str, made: Callable[[int], Array]) -> dict[str, Array]:
        return {
            name: made(chain.out_features)
            for name, chain in zip(each_chains(kernel, operand), kernel.chains, strict=True)
        }

    found = {"x": rows(kernel.in_features, kernel.layout)}
    factors = enumerate(pattern for chain in kernel.chains for pattern in chain)
    found |= {f"weights {number}": normal(*each.shape) / np.sqrt(each.c).astype(dtype) for number, each in factors}
    found |= of_each("y", rows)
    found |= of_each("bias", normal) if kernel.epilogue.bias else {}
    return found | (of_each("residual", rows) if kernel.epilogue.residual else {})


def truth_of(kernel: KernelSpec, arrays: dict[str, Array], chain: int = 0) -> Array:
    """Compute the expected outputs of one of a group's chains, or of the only chain."""
    y, first, patterns = (
        arrays["x"].astype(wide_type(arrays["x"])),
        sum(map(len, kernel.chains[:chain])),
        kernel.chains[chain].factors,
    )
    weights = [arrays[f"weights {first + number}"] for number in range(len(patterns))]
    for pattern, each in zip(patterns[:-1], weights, strict=False):
        y = reference.multiply(pattern, y, each, kernel.layout, activation=kernel.between)
    bias, residual = (arrays.get(each_chains(kernel, operand)[chain]) for operand in ("bias", "residual"))
    y = y.T if kernel.out_layout else y
    return reference.multiply(
        patterns[-1],
        y,
        weights[-1],
        kernel.y_layout,
        bias=bias,
        activation=kernel.epilogue.activation,
        residual=residual,
    )
