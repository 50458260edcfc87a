"""Weights in eight bits on GPUs: `gemv` widens them in registers, `simt` and `mma` widen them during packing."""

from dataclasses import replace

import numpy as np
import pytest

from ksgen import reference
from ksgen.families import FAMILIES, cuda_limits, families_for, family_for
from ksgen.families.gemv.shape import GemvTiling
from ksgen.launch.plan import Plan
from ksgen.measure.verify import Problem, measure, tolerance
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized, numpy_type
from ksgen.spec import LAYOUTS, STORAGES, Epilogue, KernelSpec
from tests.measure.test_verify import needs_opencl
from tests.support import kernels
from tests.support.host_memory import processor
from tests.support.kernels import in_emulator, source_of

LIMITS = cuda_limits("sm_90a")
ALL = Epilogue(True, "gelu", True)
CASES = [  # rows of odd lengths, in stages, of pieces of one weight; d in a block and in several; of all a row
    ("gemv", (1, 70, 50, 1), "float32", "int8", "bsf", 1),
    ("gemv", (2, 37, 13, 3), "float16", "e4m3", "bsl", 5),
    ("gemv", (1, 5, 24, 40), "bfloat16", "e5m2", "bsf", 2),
    ("gemv", (1, 3, 1100, 1), "bfloat16", "int8", "bsl", 33),
    ("gemv", (1, 1, 3, 1), "float32", "e4m3", "bsf", 1),
    ("simt", (2, 37, 13, 3), "float32", "e5m2", "bsf", 9),
    ("simt", (2, 37, 13, 3), "bfloat16", "e4m3", "bsl", 9),
    ("mma", (2, 37, 24, 3), "float16", "int8", "bsf", 9),
    ("mma", (2, 37, 24, 3), "bfloat16", "e4m3", "bsl", 9),
]


def kernel_of(
    shape: tuple[int, ...], precision: str, weights: str, layout: str, epilogue: Epilogue = ALL
) -> KernelSpec:
    return KernelSpec(Pattern(*shape), precision, layout, epilogue, weights=weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "shape", "precision", "weights", "layout", "batch"), CASES)
def test_agrees_with_float64(
    family: str, shape: tuple[int, ...], precision: str, weights: str, layout: str, batch: int
) -> None:
    kernel, own = kernel_of(shape, precision, weights, layout), FAMILIES[family]
    source = source_of(family, kernel, own.default(kernel, LIMITS, batch))
    kernels.check(source, batch, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("storage", STORAGES)
def test_every_value_is_widened_exactly(storage: str) -> None:
    """Values widen in registers, with and without conversion instructions, and during packing."""
    how, truth = STORAGES[storage], reference.values_of(STORAGES[storage])
    bits = np.flatnonzero(np.abs(truth) <= how.largest).astype(np.uint8)  # NaN is not
    values = bits.view(numpy_type(how)).reshape(-1, 1, 1, 1)  # each of an i, with an input of its own
    given = Quantized(Pattern(*values.shape), storage, "factor", values, np.full((1, 1, 1, 1), 0.5, np.float32))
    x = np.full((1, values.size), 2, np.float32)
    for family, target in (("gemv", ""), ("gemv", "#define __CUDA_ARCH__ 900\n"), ("simt", "")):
        kernel = KernelSpec(given.pattern, weights=storage)
        source = source_of(family, kernel, FAMILIES[family].default(kernel, LIMITS, 1))
        problem = Problem(kernel, 1, x, reference.dequantized(values, given.scale), None, None, quantized=(given,))
        found = kernels.multiply(problem, replace(source, text=target + source.text), in_emulator())
        np.testing.assert_array_equal(found[0], truth[bits])


def test_a_row_of_weights_ends_in_zeros_whatever_lies_behind_it() -> None:
    """The scales lie behind the last row. Here, their bytes would be NaN as weights."""
    values, scale = np.ones((1, 16, 23, 1), numpy_type(STORAGES["e5m2"])), np.array([0x3F7F7F7F], np.uint32)
    given = Quantized(Pattern(*values.shape), "e5m2", "factor", values, scale.view(np.float32).reshape(1, 1, 1, 1))
    kernel, weights = KernelSpec(given.pattern, "float16", weights="e5m2"), reference.dequantized(values, given.scale)
    constants = FAMILIES["gemv"].default(kernel, LIMITS, 1)
    tiling = GemvTiling(kernel, constants)
    assert tiling.pieces * tiling.vector == 24
    problem = Problem(kernel, 1, np.ones((1, 23), np.float16), weights, None, None, quantized=(given,))
    y = kernels.multiply(problem, source_of("gemv", kernel, constants), in_emulator())
    np.testing.assert_allclose(y, weights.sum(axis=(2, 3)), rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_serves_them(layout: str) -> None:
    """Small batches read a weight as one byte. Families without kernels for eight-bit weights do not serve them."""
    kernel = kernel_of((1, 768, 192, 2), "float16", "int8", layout, Epilogue())
    assert [each.name for each in families_for(kernel, LIMITS)] == ["mma", "simt", "gemv"]
    assert family_for(kernel, LIMITS, 1).name == "gemv"
    assert family_for(kernel, LIMITS, 25088).name == "mma"
    assert [each.name for each in families_for(replace(kernel, precision="float32"), LIMITS)] == ["simt", "gemv"]
    chain = KernelSpec((Pattern(6, 64, 64, 1), Pattern(1, 64, 64, 6)), "float16", layout, weights="int8")
    assert [each.name for each in families_for(chain, LIMITS)] == ["mma", "gemv"]


def test_packed_weights_of_small_batches_stay_in_eight_bits() -> None:
    few = FAMILIES["gemv"]
    for precision, share in (("float32", 4), ("bfloat16", 2)):
        plain = kernel_of((1, 768, 192, 2), precision, "same", "bsf", Epilogue())
        for batch in (1, 16):
            for weights in STORAGES:
                kernel = replace(plain, weights=weights)
                packed = few.packed_bytes(kernel, few.default(kernel, LIMITS, batch))
                assert packed == few.packed_bytes(plain, few.default(plain, LIMITS, batch)) // share + 4 * 768 * 2
                assert GemvTiling(kernel, few.default(kernel, LIMITS, batch)).scales_offset == 768 * 192 * 2
                assert kernel.bytes(batch) < plain.bytes(batch)


@pytest.mark.optimized
@needs_opencl
def test_simt_of_any_opencl_device() -> None:
    kernel = kernel_of((2, 9, 13, 3), "float32", "e4m3", "bsf")
    found = measure(processor(), kernel, 33, runs=0, family="simt")
    assert isinstance(found.plan, Plan)
    assert found.error <= tolerance("float32", 13)
