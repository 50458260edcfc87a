"""Gradients from vector registers full of sums, run on host memory as it lies: right, within its arrays, the same
bits always.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen import reference
from ksgen.errors import ConstantsError
from ksgen.families import Limits, check, cuda_limits, family_for
from ksgen.families.cpu_gradient import vectors
from ksgen.families.cpu_gradient.family import CpuGradient
from ksgen.families.cpu_gradient.vectors import FETCH_STEP, VectorGradientConstants, VectorGradientTiling
from ksgen.launcher import Launcher
from ksgen.measure.verify import make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.measure.test_verify import needs_opencl
from tests.support.host_launches import launch, planned, plans_of
from tests.support.host_memory import NOTHING, Array, fenced, placed, processor, stay_within_their_arrays

FAMILY = CpuGradient(VectorGradientConstants)
CPU = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False)
PATTERNS = {
    "short d": (2, 20, 7, 2),
    "d of all lanes": (1, 5, 3, 16),
    "long d": (2, 5, 7, 20),
    "odd d": (2, 4, 5, 3),
    "little": (9, 2, 2, 1),
    "one": (1, 1, 1, 1),
}
BATCHES = (1, 7, 64, 131)


def kernel_of(
    shape: tuple[int, ...], precision: str = "float32", layout: str = "bsf", batch: int | None = None
) -> KernelSpec:
    return KernelSpec(Pattern(*shape), precision, layout, batch=batch, job="gradient")


def constants_of(
    kernel: KernelSpec, along: str, lanes: int, height: int = 3, width: int = 2
) -> VectorGradientConstants:
    """Tiles that leave ragged edges, short blocks, three parts, and two pieces where they may be."""
    height, width = min(height, kernel.pattern.c), min(width, kernel.pattern.b)
    constants = VectorGradientConstants(along, lanes, height, width, 2 * lanes, 3, 1)
    return replace(constants, pieces=min(2, VectorGradientTiling(kernel, constants).units))


def allows(kernel: KernelSpec, along: str, lanes: int) -> bool:
    return along == "batch" or lanes % kernel.pattern.d == 0 or kernel.pattern.d > lanes


def gradient(kernel: KernelSpec, constants: Any, x: Array, grad_y: Array, groups: int | None = None) -> Array:
    """The kernel's result; nothing else was written to. `groups`: how many are launched."""
    device = processor()
    batch = x.shape[0 if kernel.layout == "bsf" else 1]
    plan = planned(device, kernel, constants, batch)
    if groups:
        plan = replace(plan, steps=(plan.steps[0]._replace(grid=groups), *plan.steps[1:]))
    memory, places = placed({"x": x, "grad_y": grad_y, "grad": np.zeros(kernel.pattern.shape, x.dtype)}, kernel.dtype)
    places["grad"].view(np.uint8)[:] = NOTHING
    before = memory.copy()
    launch(device, (plan, []), places)
    result = places["grad"].reshape(kernel.pattern.shape).copy()
    places["grad"].view(np.uint8)[:] = NOTHING
    np.testing.assert_array_equal(memory, before)
    return result


def with_bias(kernel: KernelSpec, constants: Any, x: Array, grad_y: Array) -> tuple[Array, Array]:
    """Gradients of the weights and of a bias by one launch; nothing else was written to."""
    device, kernel = processor(), replace(kernel, epilogue=Epilogue(bias=True))
    plan = planned(device, kernel, constants, x.shape[0 if kernel.layout == "bsf" else 1])
    outputs = {"grad": kernel.pattern.shape, "bias": kernel.pattern.out_features}
    arrays = {"x": x, "grad_y": grad_y} | {name: np.zeros(shape, x.dtype) for name, shape in outputs.items()}
    memory, places = placed(arrays, kernel.dtype)
    for name in outputs:
        places[name].view(np.uint8)[:] = NOTHING
    before = memory.copy()
    launch(device, (plan, []), places)
    found = places["grad"].reshape(kernel.pattern.shape).copy(), places["bias"].copy()
    for name in outputs:
        places[name].view(np.uint8)[:] = NOTHING
    np.testing.assert_array_equal(memory, before)
    return found


def sums_outputs(kernel: KernelSpec, constants: Any, batch: int) -> None:
    """A bias's gradient is right, and the weights' gradient has the same bits with and without it."""
    x, grad_y = arrays_of(kernel, batch)
    weights, bias = with_bias(kernel, constants, x, grad_y)
    np.testing.assert_array_equal(weights, gradient(kernel, constants, x, grad_y))
    wide = np.complex128 if np.iscomplexobj(grad_y) else np.float64
    truth = grad_y.astype(wide).sum(0 if kernel.layout == "bsf" else 1)
    error = np.linalg.norm(bias.astype(wide) - truth)
    assert error <= tolerance(kernel.precision, batch) * np.linalg.norm(truth), (constants, batch)


def arrays_of(kernel: KernelSpec, batch: int) -> tuple[Array, Array]:
    problem = make_problem(kernel, batch)
    assert problem.grad_y is not None
    return problem.x, problem.grad_y


def agrees(kernel: KernelSpec, constants: Any, batch: int) -> None:
    x, grad_y = arrays_of(kernel, batch)
    truth = reference.gradient(kernel.pattern, x, grad_y, kernel.layout)
    error = np.linalg.norm(gradient(kernel, constants, x, grad_y).astype(np.float64) - truth)
    assert error <= tolerance(kernel.precision, batch) * np.linalg.norm(truth), (constants, batch)


def agrees_between_fences(kernel: KernelSpec, constants: Any) -> None:
    """Each array begins behind, or ends in front of, a page that nothing may touch."""
    device, shape = processor(), kernel.pattern.shape
    for batch, at_end in product((1, 37), (False, True)):
        x, grad_y = arrays_of(kernel, batch)
        truth = reference.gradient(kernel.pattern, x, grad_y, kernel.layout)
        places = fenced({"x": x, "grad_y": grad_y, "grad": np.zeros(shape, x.dtype)}, at_end)
        launch(device, plans_of(device, kernel, constants, batch), places)
        error = np.linalg.norm(places["grad"].reshape(shape).astype(np.float64) - truth)
        assert error <= tolerance(kernel.precision, batch) * np.linalg.norm(truth), (kernel, batch)


# ---- what is right

MATRIX = [
    pytest.param(shape, layout, along, (4, 8, 16)[number % 3], id=f"{name} {layout} along {along}")
    for number, ((name, shape), layout, along) in enumerate(product(PATTERNS.items(), LAYOUTS, ("outputs", "batch")))
    if allows(kernel_of(shape), along, (4, 8, 16)[number % 3])
]


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("shape", "layout", "along", "lanes"), MATRIX)
def test_a_bias_takes_the_sum_of_the_outputs(shape: tuple[int, ...], layout: str, along: str, lanes: int) -> None:
    kernel = kernel_of(shape, layout=layout)
    for batch in (1, 131):
        sums_outputs(kernel, constants_of(kernel, along, lanes), batch)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("precision", ["float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bias_in_every_precision(precision: str, layout: str) -> None:
    kernel = kernel_of(PATTERNS["short d"], precision, layout)
    sums_outputs(kernel, constants_of(kernel, "batch", 4), 131)


@pytest.mark.optimized
@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("shape", "layout", "along", "lanes"), MATRIX)
def test_agrees_with_float64(shape: tuple[int, ...], layout: str, along: str, lanes: int) -> None:
    kernel = kernel_of(shape, layout=layout)
    for batch in BATCHES:
        agrees(kernel, constants_of(kernel, along, lanes), batch)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("along", ["outputs", "batch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["float64", "float16", "bfloat16"])
def test_precisions(precision: str, layout: str, along: str) -> None:
    kernel = kernel_of((2, 9, 5, 2), precision, layout)
    for batch in (7, 131):
        agrees(kernel, constants_of(kernel, along, {"float64": 8, "float16": 16, "bfloat16": 4}[precision]), batch)


PAIRED = [
    (shape, layout, along, 16 if shape[3] != 20 else 8)
    for shape, (layout, along) in product(PATTERNS.values(), (("bsf", "outputs"), ("bsf", "batch"), ("bsl", "batch")))
    if allows(kernel_of(shape), along, 16 if shape[3] != 20 else 8)
]


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("shape", "layout", "along", "lanes"), PAIRED)
def test_two_rows_of_the_batch_at_a_time(shape: tuple[int, ...], layout: str, along: str, lanes: int) -> None:
    kernel = kernel_of(shape, "bfloat16", layout)
    constants = replace(constants_of(kernel, along, lanes), pairs=1)
    for batch in (1, 2, 7, 63, 131):
        agrees(kernel, constants, batch)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 48, 192, 1), (1, 24, 16, 3), (1, 40, 16, 24), (2, 5, 7, 3)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_defaults_for_small_batches_stay_in_their_memory(precision: str, shape: tuple[int, ...], layout: str) -> None:
    kernel = kernel_of(shape, precision, layout)
    for batch in (1, 2, 5):
        agrees(kernel, FAMILY.default(kernel, CPU, batch), batch)


@needs_opencl
@pytest.mark.parametrize("lanes", [2, 16])
@pytest.mark.parametrize("along", ["outputs", "batch"])
def test_lanes_tall_and_wide_tiles(along: str, lanes: int) -> None:
    kernel = kernel_of((1, 37, 13, 2))
    height, width = (6, 4) if lanes == 16 else (2, 7)
    agrees(kernel, constants_of(kernel, along, lanes, height, width), 131)


@needs_opencl
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.data())
def test_any_pattern_batch_and_constants(data: st.DataObject) -> None:
    number = st.integers
    shape = data.draw(st.tuples(number(1, 4), number(1, 20), number(1, 12), st.sampled_from([1, 2, 3, 4, 7, 8, 20])))
    kernel = kernel_of(
        shape, data.draw(st.sampled_from(["float32", "float64", "bfloat16"])), data.draw(st.sampled_from(LAYOUTS))
    )
    lanes = data.draw(st.sampled_from([4, 8]))
    pairs = data.draw(number(0, 1)) if kernel.precision == "bfloat16" else 0
    along = data.draw(st.sampled_from([each for each in ("outputs", "batch") if allows(kernel, each, lanes)]))
    pairs *= int(kernel.layout == "bsf" or along == "batch")
    block = (data.draw(number(1, 4)) * lanes if along == "batch" else data.draw(number(1, 40))) * (1 + pairs)
    height, width = data.draw(number(1, min(4, kernel.pattern.c))), data.draw(number(1, min(4, kernel.pattern.b)))
    constants = VectorGradientConstants(along, lanes, height, width, block, data.draw(number(1, 9)), 1, pairs)
    constants = replace(constants, pieces=data.draw(number(1, min(9, VectorGradientTiling(kernel, constants).units))))
    for batch in data.draw(st.lists(number(1, 150), min_size=2, max_size=3)):
        agrees(kernel, constants, batch)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("shape", "layout", "along", "lanes"), MATRIX)
@pytest.mark.parametrize("panel_bytes", [1, 1000])
def test_inputs_are_copied_a_few_tiles_at_a_time(
    monkeypatch: pytest.MonkeyPatch, panel_bytes: int, shape: tuple[int, ...], layout: str, along: str, lanes: int
) -> None:
    monkeypatch.setattr(vectors, "PANEL_BYTES", panel_bytes)
    monkeypatch.setattr(vectors, "AVX2_PANEL_BYTES", panel_bytes)
    kernel = kernel_of(shape, layout=layout)
    constants = constants_of(kernel, along, lanes, 2)
    made = VectorGradientTiling(kernel, constants)
    assert made.rows_at_once == made.rows or (made.rows_at_once < made.rows and not made.transposes)
    assert panel_bytes > 1 or made.rows_at_once == (made.rows if made.transposes else 1)
    for batch in (7, 131):
        agrees(kernel, constants, batch)


def test_copied_inputs_stay_in_the_second_level_cache() -> None:
    kernel = kernel_of((2, 192, 768, 16))
    for vector_bytes, most in ((32, vectors.AVX2_PANEL_BYTES), (64, vectors.PANEL_BYTES)):
        made = VectorGradientTiling(kernel, FAMILY.default(kernel, replace(CPU, vector_bytes=vector_bytes), 1568))
        assert made.copied_inputs < 768
        assert made.copied_inputs * made.block_rows * vector_bytes <= most
        assert made.slot * 4 <= 1.3 * most


def test_pieces_are_whole_planes_if_these_suffice() -> None:
    """Pieces of one plane would each copy its inputs."""
    for shape, pieces in (((2, 192, 768, 16), 4), ((1, 192, 768, 8), 8), ((3, 192, 768, 8), 8)):
        assert FAMILY.default(kernel_of(shape), replace(CPU, vector_bytes=32), 1568).pieces == pieces


@needs_opencl
@pytest.mark.parametrize(("d", "at_once"), [(3, 3), (16, 16), (20, 10), (33, 11)])
def test_whole_cache_lines_of_weights_are_stored(d: int, at_once: int) -> None:
    kernel = kernel_of((2, 5, 7, d), layout="bsl")
    constants = constants_of(kernel, "batch", 8)
    assert VectorGradientTiling(kernel, constants).j_at_once == at_once
    for batch in (7, 131):
        agrees(kernel, constants, batch)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("shape", "square"), [((2, 21, 19, 1), 8), ((2, 13, 11, 2), 4), ((1, 9, 7, 4), 2)])
@pytest.mark.parametrize("height", [3, 6, 8])
def test_whole_squares_of_weights_are_transposed(height: int, shape: tuple[int, ...], square: int) -> None:
    """Tiles are lower than a square, taller, or whole squares; the last ones share inputs with those before."""
    for precision in ("float32", "bfloat16"):
        kernel = kernel_of(shape, precision)
        constants = constants_of(kernel, "outputs", 8, height)
        assert VectorGradientTiling(kernel, constants).square == square
        agrees(kernel, constants, 5)


@pytest.mark.parametrize(
    ("shape", "vector_bytes", "block"),
    [
        ((1, 192, 48, 24), 32, 48),  # the inputs are columns
        ((8, 192, 48, 1), 32, 170),  # 16 KB of a column's outputs
        ((1, 256, 96, 2), 32, 170),  # 128 KB of copied inputs
        ((1, 256, 256, 4), 32, 128),  # 128 KB would be 32 rows
        ((1, 64, 64, 16), 64, 64),
    ],
)
def test_blocks_stay_in_the_smaller_caches_of_avx2(shape: tuple[int, ...], vector_bytes: int, block: int) -> None:
    found = FAMILY.default(kernel_of(shape), replace(CPU, vector_bytes=vector_bytes), 2048)
    assert (found.along, found.block) == ("outputs", block)


@pytest.mark.parametrize("pairs", [0, 1])
@pytest.mark.parametrize("shape", [(8, 192, 48, 1), (1, 64, 64, 16), (1, 1024, 1024, 1), (4, 20, 7, 1), (2, 3, 2, 4)])
def test_the_tiles_of_a_column_prefetch_all_rows_of_the_next(shape: tuple[int, ...], pairs: int) -> None:
    kernel, count = kernel_of(shape, "bfloat16" if pairs else "float32"), 96
    made = VectorGradientTiling(kernel, replace(constants_of(kernel, "outputs", 16), block=count, pairs=pairs))
    rows_of_tile = -(-count // made.rows_at_once)
    assert rows_of_tile <= count // made.together // FETCH_STEP * made.fetched_rows
    assert replace(made, kernel=kernel_of(shape, layout="bsl")).fetched_rows == 0


def test_tiles_of_few_rows_are_whole_squares() -> None:
    for d, square in ((1, 16), (2, 8), (4, 4)):
        kernel = kernel_of((1, 96, 96, d))
        assert FAMILY.default(kernel, CPU, 16).height % square == 0
        assert FAMILY.default(kernel, CPU, 64).height % square > 0


@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
def test_launchers_take_it_on_a_processor(layout: str) -> None:
    kernel = kernel_of((2, 9, 5, 3), layout=layout)
    processor()
    ks = Launcher(*kernel.pattern.shape)
    assert (
        "cpu_gradient (the weights' gradient by matrix tiles: processors that have them; or the weights' gradient "
        "from vector registers full of sums: processors), "
        "along=" in ks.explain(300, job="gradient", layout=layout)
    )
    x, grad_y = arrays_of(kernel, 300)
    truth = reference.gradient(kernel.pattern, x, grad_y, layout)
    assert np.linalg.norm(ks.gradient(x, grad_y, layout=layout) - truth) <= tolerance("float32", 300) * np.linalg.norm(
        truth
    )


@needs_opencl
def test_a_kernel_specialised_to_one_batch() -> None:
    kernel = kernel_of((2, 9, 5, 3), batch=70)
    agrees(kernel, constants_of(kernel, "batch", 8), 70)


# ---- the same bits, and each weight's own


# ---- nothing outside the arrays is touched


FENCED = [  # every way to copy, and edges of every kind
    ((2, 20, 7, 2), "float32", "bsf", "outputs"),
    ((2, 5, 7, 20), "bfloat16", "bsf", "outputs"),
    ((2, 5, 7, 20), "float32", "bsl", "outputs"),
    ((2, 4, 5, 3), "bfloat16", "bsf", "batch"),
    ((2, 4, 5, 3), "float32", "bsl", "batch"),
]


def run_fenced() -> None:
    for shape, precision, layout, along in FENCED:
        kernel = kernel_of(shape, precision, layout)
        agrees_between_fences(kernel, constants_of(kernel, along, 8))
    print("all within their arrays")


@pytest.mark.second
@needs_opencl
def test_no_access_beyond_the_ends_of_arrays() -> None:
    processor()
    stay_within_their_arrays(__name__)


# ---- constants

GOOD = VectorGradientConstants("outputs", 8, 3, 2, 32, 3, 2)
BAD = {
    "along=inputs must be outputs or batch": replace(GOOD, along="inputs"),
    "lanes=6 must be 2, 4, 8 or 16; try 4 or 8": replace(GOOD, lanes=6),
    "every constant but pairs is at least 1; got parts=0; try parts=1": replace(GOOD, parts=0),
    "a tile has at most 64 vectors: 70; got height=7; try height=6": replace(GOOD, height=7, width=10),
    "height=8 must be at most c=7; try 7": replace(GOOD, height=8),
    "width=21 must be at most b=20 along the batch; try 20": replace(GOOD, along="batch", height=1, width=21),
    "pairs=2 must be 0 or 1; try 0": replace(GOOD, pairs=2),
    "pairs=1 must be 0 but in bfloat16 with four lanes=8 or more, in bsf or with lanes=8 along": replace(GOOD, pairs=1),
    "block=36 must be a multiple of lanes=8 along the batch; try 32 or 40": replace(GOOD, along="batch", block=36),
    "pieces=7 must be at most the units of columns that work groups take = 6; try 6": replace(GOOD, pieces=7),
}


@pytest.mark.parametrize("says", BAD)
def test_rules(says: str) -> None:
    kernel = kernel_of((2, 20, 7, 2))
    check(FAMILY, kernel, GOOD)
    check(FAMILY, kernel, replace(GOOD, along="batch", pieces=1))
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, BAD[says])


def test_rules_of_the_job_and_of_d() -> None:
    with pytest.raises(ConstantsError, match="job=multiply must be gradient"):
        check(FAMILY, replace(kernel_of((2, 20, 7, 2)), job="multiply"), GOOD)
    with pytest.raises(ConstantsError, match="along=outputs needs a d that divides the lanes, or more j than lanes"):
        check(FAMILY, kernel_of((2, 20, 7, 3)), GOOD)
    check(FAMILY, kernel_of((2, 20, 7, 9)), GOOD)


def test_pairs_are_two_whole_entries_of_bfloat16() -> None:
    kernel, paired = kernel_of((2, 20, 7, 2), "bfloat16"), replace(GOOD, pairs=1)
    check(FAMILY, kernel, paired)
    with pytest.raises(
        ConstantsError,
        match="block=33 must be even with pairs=1, and along the batch a multiple of twice the lanes=8; try 32 or 34",
    ):
        check(FAMILY, kernel, replace(paired, block=33))
    with pytest.raises(
        ConstantsError,
        match="block=40 must be even with pairs=1, and along the batch a multiple of twice the lanes=8; try 32 or 48",
    ):
        check(FAMILY, kernel, replace(paired, along="batch", pieces=1, block=40))
    with pytest.raises(ConstantsError, match="pairs=1 must be 0 but in bfloat16"):
        check(FAMILY, replace(kernel, layout="bsl"), paired)


def test_processors_with_dot_products_take_pairs() -> None:
    able = replace(CPU, dots=("bf16",))
    for shape, layout in product([(6, 64, 64, 1), (1, 48, 48, 3), (2, 5, 7, 20)], LAYOUTS):
        kernel = kernel_of(shape, "bfloat16", layout)
        found = FAMILY.default(kernel, able, 1568)
        check(FAMILY, kernel, found, able)
        assert found.pairs == int(layout == "bsf" or found.along == "batch")
        assert not FAMILY.default(kernel, CPU, 1568).pairs
        assert not FAMILY.default(replace(kernel, precision="float16"), able, 1568).pairs
        assert (
            FAMILY.work(kernel, found, 1568).cycles
            < FAMILY.work(kernel, FAMILY.default(kernel, CPU, 1568), 1568).cycles
        )
    assert {each.pairs for each in FAMILY.space(kernel_of((2, 20, 7, 2), "bfloat16"), able)} == {0, 1}


def test_which_devices_it_serves() -> None:
    kernel = kernel_of((2, 9, 5, 3))
    assert family_for(kernel, CPU).name == "cpu_gradient"
    assert family_for(replace(kernel, precision="tf32x3"), CPU).name == "cpu_gradient"
    assert family_for(kernel, replace(CPU, is_cpu=False)).name == "gradient"
    assert family_for(kernel, cuda_limits("sm_90a")).name == "gradient"
    assert family_for(replace(kernel, job="multiply"), CPU).name == "vector"


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [*PATTERNS.values(), (6, 64, 64, 1), (1, 768, 192, 3), (512, 2, 2, 1), (1, 4096, 4096, 1)]
)
def test_defaults_keep_the_rules_on_every_processor(shape: tuple[int, ...], layout: str, precision: str) -> None:
    kernel = kernel_of(shape, precision, layout)
    for vector_bytes, cores, batch in product((16, 32, 64), (1, 2, 64), (None, 1, 100, 25088)):
        limits = replace(CPU, vector_bytes=vector_bytes, multiprocessors=cores)
        constants = FAMILY.default(kernel, limits, batch)
        check(FAMILY, kernel, constants, limits)
        assert FAMILY.registers(kernel, constants) <= (32 if vector_bytes == 64 else 16)
        assert VectorGradientTiling(kernel, constants).slot * 4 <= 2**26
        geometry = FAMILY.geometry(kernel, constants, batch or 1)
        assert (
            geometry.workspace_bytes
            == min(constants.parts, -(-(batch or 1) // constants.block))
            * VectorGradientTiling(kernel, constants).part_bytes
        )
        if batch == 25088 and kernel.pattern.weight_count > 10**4:
            assert geometry.grid >= cores  # every core has work
