"""Peak host memory of checking one kernel, computed in advance. Never allocates.

Counts the arrays of `verify.py` and `reference.py`; the tests compare it with traced memory.
"""

from dataclasses import dataclass

from ksgen.families import Limits, family_for
from ksgen.families.signature import features_of, layout_of
from ksgen.measure.verify import CACHE_BYTES, GAP, MOST_REFERENCE_FLOPS
from ksgen.reference import ELEMENTS_AT_ONCE
from ksgen.spec import KernelSpec


@dataclass(frozen=True)
class Footprint:
    """Bytes of this machine's memory: arrays, the float64 check, and a processor device's own memory."""

    arrays: int
    reference: int
    device: int

    @property
    def total(self) -> int:
        return self.arrays + self.reference + self.device


def footprint(kernel: KernelSpec, batch: int, limits: Limits) -> Footprint:
    """Compute the footprint of one kernel at a batch, on a device with these limits, with default constants."""
    item, features = kernel.item_bytes, sum(chain.out_features for chain in kernel.chains)
    inputs, outputs = batch * kernel.in_features, batch * features
    weights = sum(chain.weight_count for chain in kernel.chains)
    is_gradient = kernel.job == "gradient"
    results = weights if is_gradient else outputs
    given = inputs + outputs * (kernel.epilogue.residual + is_gradient) + features * kernel.epilogue.bias
    compared_rows = batch if is_gradient else min(batch, max(64, int(MOST_REFERENCE_FLOPS / kernel.flops(1))))
    compared = weights if is_gradient else compared_rows * features
    widest = max(pattern.in_features + pattern.out_features for chain in kernel.chains for pattern in chain)
    part = min(compared_rows * widest, max(ELEMENTS_AT_ONCE, widest))
    # bytes per element; with an activation, erfc converts elements to Python's numbers
    of_part = 16 if kernel.epilogue.activation == "none" else 80
    of_compared = 28  # the truth, the result and their difference in float64, and the result in its own type
    of_rounding = 48 * weights * kernel.is_quantized  # float64 numbers that are rounded to eight bits
    of_inputs = 37 * inputs * kernel.has_bytes_in  # the same of x
    if kernel.is_strided:  # the rows of slices lie apart
        row_counts = {"bsf": batch, "bsl": 0}
        given += GAP * sum(
            row_counts[layout_of(kernel, array)] or count for array, count in features_of(kernel).items()
        )
    reference = of_rounding + max(8 * weights + 8 * compared + of_part * part, of_compared * compared, of_inputs)
    device = 0
    if limits.is_cpu:
        family = family_for(kernel, limits, batch)
        constants = family.default(kernel, limits, batch)
        # timing adds sets of arrays until they exceed a cache
        device = item * (given + results) + CACHE_BYTES
        device += 0 if is_gradient else item * weights
        device += family.geometry(kernel, constants, batch).workspace_bytes + (
            0 if is_gradient else family.packed_bytes(kernel, constants)
        )
    return Footprint(item * (given + weights + 2 * results), reference, device)
