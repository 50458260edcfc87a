"""A processor's kernels on slices of larger arrays: right, within them, and nothing between their rows is touched."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen.families.signature import pitches_of
from ksgen.spec import LAYOUTS, KernelSpec
from tests.families import test_vector as alone
from tests.families import test_vector_chain as chains
from tests.measure.test_verify import needs_opencl
from tests.support.host_launches import is_right, launch, plans_of
from tests.support.host_memory import (
    NOTHING,
    Array,
    fenced,
    placed,
    processor,
    rows_in,
    spread,
    stay_within_their_arrays,
)
from tests.support.products import arrays_of, chain_of, truth_of

# whole lines, and not
GAPS = ({"x": 3, "y": 5, "residual": 1}, {"x": 16, "y": 48, "residual": 32}, {"x": 0, "y": 7}, {"x": 64})


def of_slices(kernel: KernelSpec) -> KernelSpec:
    return replace(kernel, stride="any")


def pitches(kernel: KernelSpec, arrays: Mapping[str, Array], gaps: Mapping[str, int]) -> dict[str, int]:
    return {pitch: arrays[name].shape[1] + gaps.get(name, 0) for name, pitch in pitches_of(kernel).items()}


def on_slices(arrays: Mapping[str, Array], gaps: Mapping[str, int]) -> dict[str, Array]:
    """Each flat, with gaps between the rows of those that have them."""
    return {name: spread(each, gaps[name]) if name in gaps else each for name, each in arrays.items()}


def poisoned(place: Array, shape: tuple[int, ...], gap: int) -> Array:
    """The matrix in it, full of NaN."""
    matrix = rows_in(place, shape, gap)
    matrix.view(np.uint8)[:] = NOTHING
    return matrix


def agrees(kernel: KernelSpec, constants: Any, batch: int, gaps: Mapping[str, int], boundary: int = 1) -> None:
    device, arrays = processor(), arrays_of(kernel, batch)
    memory, places = placed(on_slices(arrays, gaps), kernel.dtype, boundary)
    y = poisoned(places["y"], arrays["y"].shape, gaps.get("y", 0))
    before = memory.copy()
    launch(device, plans_of(device, kernel, constants, batch), places, pitches(kernel, arrays, gaps))
    assert is_right(kernel, y, truth_of(kernel, arrays)), (kernel, constants, batch, gaps)
    y.view(np.uint8)[:] = NOTHING
    np.testing.assert_array_equal(memory, before)


def cases() -> Iterator[object]:
    """Yield slices for the patterns, vectorizations, precisions and epilogues that test dense arrays."""
    for number, row in enumerate(alone.matrix()):
        kernel, constants = row.values  # type: ignore[attr-defined]
        yield pytest.param(of_slices(kernel), constants, GAPS[number // 2 % len(GAPS)], id=row.id)  # type: ignore[attr-defined]


CASES = list(cases())


@pytest.mark.optimized
@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("kernel", "constants", "gaps"), CASES)
def test_agrees_with_float64(kernel: KernelSpec, constants: Any, gaps: dict[str, int]) -> None:
    for batch, boundary in ((1, 1), (17, 64), (100, 1)):
        agrees(kernel, constants, batch, gaps, boundary)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("along", alone.WAYS)
def test_streaming_stores_if_each_row_begins_at_a_vector(along: str, layout: str) -> None:
    """Gaps align every row, or only the first."""
    kernel = of_slices(alone.kernel_of((1, 32, 5, 4), layout=layout, epilogue=alone.EPILOGUES[3]))
    constants = replace(alone.constants_of(kernel, along, 8), streaming=1)
    for gap in (8, 16, 3):
        agrees(kernel, constants, 96, {"x": gap, "y": gap, "residual": 2 * gap}, 64)


@needs_opencl
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.data())
def test_any_gaps(data: st.DataObject) -> None:
    number = st.integers
    shape = data.draw(st.tuples(number(1, 3), number(1, 12), number(1, 9), st.sampled_from([1, 2, 3, 8, 20])))
    precision, layout = (
        data.draw(st.sampled_from(["float32", "float64", "bfloat16"])),
        data.draw(st.sampled_from(LAYOUTS)),
    )
    kernel = of_slices(alone.kernel_of(shape, precision, layout, data.draw(st.sampled_from(alone.EPILOGUES))))
    constants = alone.any_constants(data, kernel)
    for batch in data.draw(st.lists(number(1, 120), min_size=2, max_size=3)):
        gaps = {name: data.draw(number(0, 40)) for name in pitches_of(kernel)}
        agrees(kernel, constants, batch, gaps, data.draw(st.sampled_from([1, 64])))


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("number", range(len(chains.CASES)))
def test_chains_agree_with_float64(number: int) -> None:
    patterns, precision, layout, ways, lanes, epilogue = chains.CASES[number]
    kernel = of_slices(chain_of(patterns, precision, layout, epilogue))
    for batch in (1, 3 * lanes + 1, 100):
        agrees(kernel, chains.constants_of(kernel, ways, lanes), batch, GAPS[number % len(GAPS)])


def run_fenced() -> None:
    device = processor()
    for (shape, precision, layout, along), gap in product(alone.FENCED, (3, 16)):
        kernel = of_slices(alone.kernel_of(shape, precision, layout, alone.BOTH))
        gaps = {"x": gap, "y": 2 * gap, "residual": gap + 1}
        for batch, at_end in product((1, 37), (False, True)):
            arrays = arrays_of(kernel, batch)
            places = fenced(on_slices(arrays, gaps), at_end)
            plans = plans_of(device, kernel, alone.constants_of(kernel, along, 8), batch)
            launch(device, plans, places, pitches(kernel, arrays, gaps))
            assert is_right(kernel, rows_in(places["y"], arrays["y"].shape, gaps["y"]), truth_of(kernel, arrays))
    print("all within their arrays")


@pytest.mark.second
@pytest.mark.slow
@needs_opencl
def test_no_access_beyond_the_ends_of_slices() -> None:
    processor()
    stay_within_their_arrays(__name__)
