"""SIMT's constants before any search hold all rules, fit every device, and pad little."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ksgen.families import Limits, check, cuda_limits
from ksgen.families.family import PITCH_REGISTERS
from ksgen.families.simt.family import Simt
from ksgen.spec import LAYOUTS, KernelSpec, stratified
from tests.support.kernels import SERVED
from tests.support.simt_kernels import kernel

SIMT = Simt()
GPU = cuda_limits("sm_90a")
NAMES = list(dict.fromkeys(precision for family, precision, _ in SERVED if family == "simt"))


@settings(max_examples=500)
@example((2, 39, 31, 8), "float16", "bsf", "large cpu")  # three warps of outputs for each of eight j
@given(
    st.tuples(*[st.integers(1, 64) | st.integers(1, 2000)] * 4),
    st.sampled_from(NAMES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["sm_75", "sm_80", "sm_90a", "small cpu", "large cpu"]),
)
def test_defaults_keep_their_own_rules_and_fit_every_device(
    shape: tuple[int, ...], precision: str, layout: str, target: str
) -> None:
    try:
        spec = kernel(shape, precision, layout)
    except Exception:
        return  # more features than a kernel counts
    cpus = {
        "small cpu": Limits(32 * 1024, 256, 0, is_cpu=True, async_copies=False),
        "large cpu": Limits(2**18, 8192, 0, is_cpu=True, async_copies=False),
    }
    limits = cpus.get(target) or cuda_limits(target)
    check(SIMT, spec, SIMT.default(spec, limits), limits)


def test_defaults_take_little_padding() -> None:
    for b in (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        for layout in LAYOUTS:
            constants = SIMT.default(kernel((1, b, 64, 4), layout=layout), GPU)
            assert b % constants.tile_out == 0, constants


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
def test_defaults_of_slices_leave_the_registers_that_pitches_take(target: str) -> None:
    """Slices in batch-size-first have a pitch per call. Kernels in batch-size-last always have one: the batch."""
    limits = cuda_limits(target)
    for pattern, precision, layout in product(stratified(30), ("float32", "float64"), LAYOUTS):
        dense = KernelSpec(pattern, precision, layout)
        slices = replace(dense, stride="any")
        constants = SIMT.default(slices, limits)
        more = SIMT.registers(slices, constants, target) - SIMT.registers(dense, constants, target)
        assert more == (PITCH_REGISTERS if layout == "bsf" else 0)
        threads = SIMT.geometry(slices, constants, 1).block * constants.min_blocks
        assert threads * SIMT.registers(slices, constants, target) <= limits.registers
        assert layout == "bsf" or constants == SIMT.default(dense, limits)
