"""Weights in eight bits on processors: multiplied directly, packed in one byte each, widened to the encoded values."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ksgen import reference
from ksgen.errors import ConstantsError, LaunchError
from ksgen.families import check, families_for, family_for
from ksgen.families.vector.shape import VectorConstants, VectorTiling
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.measure.verify import compare, make_problem, measure, tolerance
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized, numpy_type, quantize
from ksgen.spec import LAYOUTS, STORAGES, Epilogue, KernelSpec
from ksgen.spec.storage import x_precisions
from tests.families import test_vector as vector
from tests.families.test_vector import CPU, FAMILY
from tests.measure.test_verify import needs_opencl
from tests.support.host_memory import processor
from tests.support.native import chosen_native


def kernel_of(
    shape: tuple[int, ...], precision: str, weights: str, layout: str, epilogue: Epilogue | None = None
) -> KernelSpec:
    return KernelSpec(Pattern(*shape), precision, layout, epilogue or Epilogue(), weights=weights)


def matrix() -> Iterator[object]:
    """Every pattern, layout and way; storages, precisions, lanes, epilogues and tiles in turn."""
    for number, ((name, shape), layout, along) in enumerate(product(vector.PATTERNS.items(), LAYOUTS, vector.WAYS)):
        storage, precision = list(STORAGES)[number % 3], x_precisions()[number // 3 % 3]
        kernel = kernel_of(shape, precision, storage, layout, vector.EPILOGUES[number % len(vector.EPILOGUES)])
        constants = vector.constants_of(
            kernel, along, (16, 4, 8)[number % 3], vector.SIZES[number % 6], 1 + number % 4, 1 + number % 3
        )
        yield pytest.param(kernel, constants, id=f"{name} {precision} {storage} {layout} along {along}")


@pytest.mark.optimized
@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("kernel", "constants"), list(matrix()))
def test_agrees_with_float64(kernel: KernelSpec, constants: VectorConstants) -> None:
    for batch in (1, 17, 33):
        vector.agrees(kernel, constants, batch, boundary=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("storage", STORAGES)
def test_agrees_natively(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    for lanes, shape, layout, along in ((4, (1, 9, 5, 4), "bsf", "outputs"), (16, (2, 24, 5, 16), "bsl", "batch")):
        kernel = kernel_of(shape, "float16" if lanes == 4 else "float32", storage, layout, Epilogue(True, "relu", True))
        vector.agrees(kernel, vector.constants_of(kernel, along, lanes), 17, boundary=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("runtime", ["opencl", "native"])
def test_every_value_is_widened_exactly(runtime: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of outputs (small batches) and of the batch widen all finite values, subnormal ones included."""
    device = processor() if runtime == "opencl" else chosen_native(monkeypatch)
    how, truth = STORAGES[storage], reference.values_of(STORAGES[storage])
    bits = np.flatnonzero(np.isfinite(truth) & (np.abs(truth) <= how.largest)).astype(np.uint8)
    values = bits.view(numpy_type(how)).reshape(1, -1, 1, 1)
    own = Launcher(*values.shape)
    given = Quantized(own.pattern, storage, "factor", values, np.full((1, 1, 1, 1), 0.5, np.float32))
    packed = own.pack(given, device=f"{device.runtime}:{device.index}")
    for batch, layout in ((1, "bsf"), (1, "bsl"), (40, "bsl")):
        x = np.full((batch, 1) if layout == "bsf" else (1, batch), 2, np.float32)
        y = np.asarray(own(x, packed, layout=layout))
        rows = y if layout == "bsf" else y.T
        np.testing.assert_array_equal(rows, np.broadcast_to(truth[bits], rows.shape))


@pytest.mark.parametrize("along", vector.WAYS)
def test_packed_weights_stay_in_eight_bits(along: str) -> None:
    """Packed weights take a quarter of float32's bytes plus scales, also if lanes of the batch read them as scalars."""
    plain = kernel_of((6, 64, 64, 1), "float32", "same", "bsl")
    constants = vector.constants_of(plain, along, 16, (8, 2))
    for storage in STORAGES:
        shape = VectorTiling(replace(plain, weights=storage), constants)
        whole = VectorTiling(plain, constants).packed_bytes
        assert whole / 4 < shape.packed_bytes <= whole / 4 + 1.1 * 4 * 6 * 64
    assert VectorTiling(plain, constants).slot == VectorTiling(replace(plain, weights="int8"), constants).widened_offset


def test_what_serves_them() -> None:
    """No family whose kernels read weights as X is stored; and inputs are not multiplied by pairs."""
    able = replace(CPU, dots=("bf16",), tiles=("bf16", "f16"))
    for precision, layout in product(x_precisions(), LAYOUTS):
        kernel = kernel_of((6, 64, 64, 1), precision, "e4m3", layout)
        assert [family.name for family in families_for(kernel, able)] == ["vector", "simt"]
        assert {each.pairs for each in FAMILY.space(kernel, able)} == {0}
        assert all(FAMILY.default(kernel, able, batch).pairs == 0 for batch in (1, 16, 6272))
    refused = vector.constants_of(
        replace(kernel, precision="bfloat16", weights="same", layout="bsf"), "batch", 8, pairs=1
    )
    with pytest.raises(ConstantsError, match="pairs=1 must be 0 with weights in eight bits"):
        check(FAMILY, replace(kernel, precision="bfloat16", layout="bsf"), refused)
    chain = KernelSpec((Pattern(6, 64, 64, 1), Pattern(1, 64, 64, 6)), weights="int8")
    assert family_for(chain, CPU).name == "vector"


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_chain_in_one_launch(precision: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = chosen_native(monkeypatch)
    """With an activation between factors; y in batch-size-first in either case."""
    kernel = KernelSpec(
        (Pattern(6, 8, 4, 1), Pattern(2, 12, 8, 3)), precision, layout, Epilogue(True, "relu"), weights="e4m3",
        between="gelu", out_layout="bsf",
    )  # fmt: skip
    found = measure(device, kernel, 40, runs=0)
    assert found.plan.choice.family == "vector"
    assert found.passed, found.error


@pytest.mark.slow
def test_a_layer_takes_one_launch_where_all_its_weights_are_stored_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    chain = ChainLauncher(Launcher(6, 8, 4, 1), Launcher(2, 12, 8, 3))
    random = np.random.default_rng(0)
    weights = [random.standard_normal(each.shape).astype(np.float32) for each in chain.chain]
    x = random.standard_normal((64 * 16, 24)).astype(np.float32)
    cases = (
        (("int8", "int8"), True),
        (("int8", "e5m2"), False),
        (("bfloat16", "bfloat16"), True),
        (("bfloat16", "int8"), False),
    )
    for storages, is_one in cases:
        own = [
            factor.pack(quantize(each, storage))
            for factor, each, storage in zip(chain.factors, weights, storages, strict=True)
        ]
        call = chain.prepare(x, own)
        assert (call is not None and call.plan.kernel.weights == storages[0]) == is_one
        wide = [reference.dequantized(each.values, each.scale) for each in map(quantize, weights, storages)]
        truth = reference.multiply(
            chain.chain[1], reference.multiply(chain.chain[0], x, wide[0], "bsf"), wide[1], "bsf"
        )
        found = np.asarray(chain(x, own))
        assert np.linalg.norm(found - truth) <= 2 * tolerance("float32", 8) * np.linalg.norm(truth)
    always = ChainLauncher(*chain.factors, fuse="yes")
    with pytest.raises(LaunchError, match="weights of the factors differ in storage; accepted: fuse='auto' or 'no'"):
        always(x, own)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_batches_by_default_constants(layout: str) -> None:
    """A decoder calls them at batches 1 to 16, with weights whose tiles are mostly full."""
    device = processor()
    kernel = kernel_of((2, 48, 32, 1), "bfloat16", "int8", layout, Epilogue(True, "silu", True))
    for batch in (1, 16):
        problem = make_problem(kernel, batch)
        constants = FAMILY.default(kernel, CPU, batch)
        assert compare(problem, vector.multiplied(problem, constants, boundary=4))[0] <= problem.tolerance
    assert device.shares_host
