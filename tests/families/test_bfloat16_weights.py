"""Weights in bfloat16 with X in float32: rounded once, multiplied directly, packed in two bytes, summed in float32."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen.emit.render import render
from ksgen.errors import LaunchError, SpecError
from ksgen.families import FAMILIES, cuda_limits, families_for, family_for
from ksgen.families.vector.shape import VectorTiling
from ksgen.launcher import Launcher
from ksgen.measure.verify import Problem, compare, make_problem, measure
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized, numpy_type, quantize, quantize_inputs
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec, parse
from ksgen.spec.storage import BFLOAT16, SCALE_BYTES
from tests.families import test_vector as vector
from tests.families.test_vector import CPU
from tests.measure.test_verify import needs_opencl
from tests.support import kernels
from tests.support.gpu_chains import RAGGED, factor_sources
from tests.support.host_memory import processor
from tests.support.kernels import in_emulator, source_of
from tests.support.native import chosen_native
from tests.support.products import chain_of

LIMITS = cuda_limits("sm_90a")
ALL = Epilogue(True, "gelu", True)
BEFORE = Pattern(6, 8, 4, 1)
BITS = np.arange(0, 1 << 16, 257, dtype=np.uint16)  # of every exponent: subnormal numbers, infinities and NaN as well
VALUES = BITS.view(numpy_type(BFLOAT16))


def kernel_of(shape: tuple[int, ...], layout: str = "bsf", epilogue: Epilogue = ALL) -> KernelSpec:
    return KernelSpec(Pattern(*shape), "float32", layout, epilogue, weights="bfloat16")


def whole_of(values: np.ndarray) -> Quantized:
    return Quantized(Pattern(*values.shape), "bfloat16", "factor", values, np.ones((1, 1, 1, 1), np.float32))


# ---- values


def test_each_weight_is_rounded_to_nearest() -> None:
    """Ties round to even, NaN and infinity stay, and larger values become infinity. None counts as saturated."""
    one, step = np.float32(1), np.float32(2**-7)
    given = np.array(
        [one + step / 2, one + 3 * step / 2, one + 0.51 * step, np.nan, np.inf, -3.4e38, 2**-133, 1e-45], np.float32
    )
    made = quantize(given.reshape(1, 2, 2, 2), "bfloat16")
    found = made.dequantized().ravel()
    np.testing.assert_array_equal(
        found, np.array([1, 1 + 2 * step, 1 + step, np.nan, np.inf, -np.inf, 2**-133, 0], np.float32)
    )
    assert (made.saturated, made.per, made.nbytes) == (0, "factor", 2 * 8 + SCALE_BYTES)
    assert repr(made) == "Quantized(1,2,2,2, bfloat16, no scales, 0 of 8 weights saturated)"
    assert BFLOAT16.largest == np.nanmax(np.where(np.isfinite(VALUES.astype(np.float64)), BFLOAT16.largest, 0))
    random = np.random.default_rng(0).standard_normal((3, 4, 5, 2)).astype(np.float32)
    assert 0 < quantize(random, "bfloat16").error(random) < 2.0**-8


@pytest.mark.parametrize("runtime", ["opencl", "native"])
def test_every_value_is_widened_exactly_on_processors(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = processor() if runtime == "opencl" else chosen_native(monkeypatch)
    values = VALUES.reshape(1, -1, 1, 1)
    own = Launcher(*values.shape)
    packed = own.pack(whole_of(values), device=f"{device.runtime}:{device.index}")
    for batch, layout in ((1, "bsf"), (40, "bsl")):
        y = np.asarray(own(np.ones((batch, 1) if layout == "bsf" else (1, batch), np.float32), packed, layout=layout))
        rows = y if layout == "bsf" else y.T
        np.testing.assert_array_equal(rows, np.broadcast_to(VALUES.astype(np.float32), rows.shape))


@pytest.mark.parametrize("family", ["gemv", "simt"])
def test_every_value_is_widened_exactly_on_gpus(family: str) -> None:
    values = VALUES.reshape(-1, 1, 1, 1)  # each of an i, with an input of its own
    kernel = KernelSpec(Pattern(*values.shape), weights="bfloat16")
    problem = Problem(
        kernel,
        1,
        np.ones((1, values.size), np.float32),
        values.astype(np.float64),
        None,
        None,
        quantized=(whole_of(values),),
    )
    source = source_of(family, kernel, FAMILIES[family].default(kernel, LIMITS, 1))
    np.testing.assert_array_equal(kernels.multiply(problem, source, in_emulator())[0], VALUES.astype(np.float32))


# ---- products


@pytest.mark.parametrize(
    ("family", "shape", "layout", "batch"),
    [("gemv", (1, 70, 50, 1), "bsf", 1), ("gemv", (2, 37, 13, 3), "bsl", 5), ("simt", (2, 37, 13, 3), "bsf", 9)],
)
def test_agrees_with_float64_on_gpus(family: str, shape: tuple[int, ...], layout: str, batch: int) -> None:
    kernel = kernel_of(shape, layout)
    kernels.check(source_of(family, kernel, FAMILIES[family].default(kernel, LIMITS, batch)), batch, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("along", vector.WAYS)
def test_agrees_with_float64_on_processors(along: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    for lanes, shape in ((4, (1, 9, 5, 4)), (16, (2, 24, 5, 16)), (8, (3, 7, 6, 1))):
        kernel = kernel_of(shape, layout)
        for batch in (1, 17):
            vector.agrees(kernel, vector.constants_of(kernel, along, lanes), batch, boundary=4)


@pytest.mark.optimized
@needs_opencl
@pytest.mark.parametrize("along", vector.WAYS)
def test_agrees_by_opencl(along: str) -> None:
    kernel = kernel_of((2, 9, 5, 4), "bsl")
    vector.agrees(kernel, vector.constants_of(kernel, along, 8), 17, boundary=4)


@pytest.mark.parametrize("family", ["gemv", "simt"])
def test_chains_on_gpus(family: str) -> None:
    """Each factor's weights packed by the kernel of a launch of its own."""
    kernel = replace(chain_of(RAGGED[1:], "float32", "bsf", Epilogue(True, "relu"), between="gelu"), weights="bfloat16")
    batch, own, run = 3, FAMILIES[family], in_emulator()
    source, problem = render(kernel, own.default(kernel, LIMITS, batch), family=family), make_problem(kernel, batch)
    packed = [
        kernels.pack(replace(make_problem(each.kernel, 1), quantized=(weights,)), each, run)
        for each, weights in zip(factor_sources(source), problem.quantized, strict=True)
    ]
    assert problem.bias is not None
    y = np.full((batch, kernel.pattern.out_features), np.nan, np.float32)
    run(
        source,
        source.entry,
        own.geometry(kernel, source.constants, batch),
        [problem.x, *packed, y, problem.bias, batch],
    )
    assert compare(problem, y)[0] <= problem.tolerance


@pytest.mark.exhaustive
@pytest.mark.parametrize("others", [(), ((Pattern(1, 5, 24, 1),),)])
def test_chains_and_groups_on_processors(
    others: tuple[tuple[Pattern, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = chosen_native(monkeypatch)
    own = KernelSpec(
        ((BEFORE, Pattern(2, 12, 8, 3)), *others), "float32", "bsl", Epilogue(True, "relu"), weights="bfloat16",
        between="gelu",
    )  # fmt: skip
    found = measure(device, own, 40, runs=0)
    assert found.plan.choice.family == "vector"
    assert found.passed, found.error


# ---- bytes, and who serves them


def test_bytes() -> None:
    kernel = kernel_of((1, 768, 192, 2), epilogue=Epilogue())
    plain, count, features = replace(kernel, weights="same"), 768 * 192 * 2, 768 * 2
    assert kernel.weight_bytes == 2 * count + SCALE_BYTES * features
    assert plain.bytes(1) - kernel.bytes(1) == 2 * count - SCALE_BYTES * features
    assert kernel.scales_begin == 2 * count
    assert replace(kernel, chains=Pattern(1, 1, 9, 1)).scales_begin == 32
    few = FAMILIES["gemv"]
    for batch in (1, 16):
        constants = few.default(kernel, LIMITS, batch)
        own, wide = (few.work(each, constants, batch) for each in (kernel, plain))
        assert few.packed_bytes(kernel, constants) == kernel.weight_bytes
        assert own.memory_bytes == kernel.bytes(batch)
        assert wide.cache_bytes - own.cache_bytes == plain.bytes(1) - kernel.bytes(1)
    for along in vector.WAYS:
        shape = VectorTiling(kernel, vector.constants_of(kernel, along, 16, (8, 2)))
        assert shape.packed_bytes == kernel.weight_bytes  # tiles are full


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_serves_them(layout: str) -> None:
    kernel = kernel_of((1, 768, 192, 2), layout, Epilogue())
    assert kernel.name == f"ks_1x768x192x2_float32_bfloat16_{layout}"
    assert [each.name for each in families_for(kernel, LIMITS)] == ["simt", "gemv"]
    assert family_for(kernel, LIMITS, 1).name == "gemv"
    able = replace(CPU, dots=("bf16",), tiles=("bf16", "f16"))
    assert [each.name for each in families_for(kernel, able)] == ["vector", "simt"]
    assert {each.pairs for each in FAMILIES["vector"].space(kernel, able)} == {0}


# ---- what is refused


def test_what_is_refused() -> None:
    kernel, weights = kernel_of((6, 64, 64, 1)), np.ones((2, 6, 8, 3), np.float32)
    words = (
        r"precision=bfloat16 with weights=bfloat16; accepted: precision=float32, or weights in bfloat16 that are not "
        r"converted \(weights=same\)"
    )
    with pytest.raises(SpecError, match=words):
        replace(kernel, precision="bfloat16")
    for precision in ("float16", "float64", "tf32", "tf32x3", "complex64"):
        with pytest.raises(
            SpecError, match=f"precision={precision} with weights=bfloat16; accepted: precision=float32$"
        ):
            replace(kernel, precision=precision, epilogue=Epilogue())
    with pytest.raises(SpecError, match="inputs='bfloat16'; accepted: same, int8, e4m3, e5m2"):
        replace(kernel, inputs="bfloat16")
    with pytest.raises(SpecError, match=r"inputs: got 'bfloat16'; accepted: same, int8, e4m3, e5m2"):
        parse("kernels:\n  - {pattern: [6,64,64,1], weights: bfloat16, inputs: bfloat16}\n", "a.yaml")
    for name, value in dict[str, Any](x=np.ones((2, 48)), scale=1.0, x_scale=1.0).items():
        with pytest.raises(
            LaunchError, match=f"{name} was given with storage=bfloat16, which has no scales; accepted: weights alone"
        ):
            quantize(weights, "bfloat16", **{name: value})
    with pytest.raises(LaunchError, match="storage='bfloat16'; accepted: int8, e4m3, e5m2"):
        quantize_inputs(np.ones((2, 48), np.float32), "bfloat16")
    with pytest.raises(LaunchError, match="which is in bfloat16 already; accepted: the weights in floating point"):
        quantize(quantize(weights, "bfloat16"), "int8")
    own = Launcher(2, 6, 8, 3)
    with pytest.raises(LaunchError, match="weights in bfloat16 with precision=float16; accepted: x of float32"):
        own(np.ones((2, 48), np.float16), quantize(weights, "bfloat16"))
