"""Tests of the small-batch family: blocks that share rows of weights, small batches, counted bytes, rules and defaults.

`test_families.py` tests what it has in common with other families.
"""

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen.build.toolchain import WARNINGS, find_compiler
from ksgen.errors import ConstantsError, ToolchainError
from ksgen.families import FAMILIES, check, cuda_limits, families_for, family_for
from ksgen.families.expected import resident_blocks
from ksgen.families.gemv.defaults import MOST_OF_BLOCK, MOST_REGISTERS, best, expected_cycles, factor_options, rows_for
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec, stratified
from tests.emulator import is_installed, run_cuda
from tests.support import kernels
from tests.support.counting import compared, count_kernel
from tests.support.kernels import in_emulator, kernel_of, source_of

FEW = FAMILIES["gemv"]
LIMITS = cuda_limits("sm_90a")
ALL = Epilogue(True, "gelu", True)
# no row is whole; d = 3; d large; rows longer than a block of lanes, in stages; nothing but one weight; a > 1
PATTERNS = (
    (1, 70, 50, 1),
    (2, 37, 13, 3),
    (1, 5, 24, 40),
    (1, 3, 1100, 1),
    (1, 1, 1, 1),
    (4, 16, 64, 2),
)
BATCHES = (1, 2, 5, 16, 32, 33)
SPLIT = GemvConstants(4, 4, 2, 2, 32, 4, 1)  # four warps share a row
STORED = ("float32", "float64", "float16", "bfloat16")
needs_counts = pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pattern", "layout"), list(product(PATTERNS, LAYOUTS)))
def test_each_batch_under_the_constants_made_for_it(pattern: tuple[int, ...], layout: str) -> None:
    for number, batch in enumerate(BATCHES):
        kernel = kernel_of(pattern, STORED[number % 4], layout, ALL if number % 2 else Epilogue())
        kernels.check(source_of("gemv", kernel, FEW.default(kernel, LIMITS, batch)), batch, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_sums_that_warps_share_are_right_and_leave_inf_and_nan_where_they_are(precision: str, layout: str) -> None:
    """Five stages, the last of them ragged; and a batch of more entries than a block has."""
    kernel = kernel_of((2, 6, 4 * 32 * 4 * (8 if precision == "float16" else 4) + 24, 3), precision, layout)
    assert GemvTiling(kernel, SPLIT).stages == 5
    source = source_of("gemv", kernel, SPLIT)
    kernels.check_leaks(source, 7, in_emulator())
    first = kernels.check(source, 3, in_emulator())
    for options in ({"order": "reverse"}, {"order": 5}, {"sanitize": "address"}, {"sanitize": "race"}):
        np.testing.assert_array_equal(kernels.check(source, 3, in_emulator(**options)), first)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", [(1, 40, 64, 1), (2, 12, 20, 3)])
def test_slices_and_memory_that_is_not_aligned(pattern: tuple[int, ...], layout: str) -> None:
    """The first pattern copies whole vectors of X in batch-size-first, if pitch and address allow it."""
    kernel = replace(kernel_of(pattern, "float16", layout, Epilogue(residual=True)), stride="any")
    assert (GemvTiling(kernel, FEW.default(kernel, LIMITS, 5)).x_vector == 8) == (layout == "bsf" and pattern[-1] == 1)
    source = source_of("gemv", kernel, FEW.default(kernel, LIMITS, 5))
    for gaps, shift in product(({}, {"x": 5, "y": 3, "residual": 7}, {"x": 8}), (0, 1)):
        kernels.check(source, 5, in_emulator(), gaps=gaps, shift=shift)


LAST_STAGE = """
ENTRY(THREADS, 1)
void last_stage(const stored* x, stored* found, const extent first_in) {
    const Tile tile = {0, 0, 0, 0, 0, 1};
    Copied held[X_ROUNDS];
    read_x(held, x - first_in, tile, (int)first_in, 1, false);
    for (int round = 0; round < X_ROUNDS; ++round)
        for (int e = 0; e < X_VECTOR; ++e)
            found[(round * THREADS + thread_index()) * X_VECTOR + e] = held[round].at[e];
}
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_stage_of_the_longest_rows_ends_with_the_row(layout: str) -> None:
    """Three steps do not divide 2^31, so the stage's end exceeds 32 bits. The array holds the last inputs alone."""
    kernel = kernel_of((1, 1, 2**31 - 4, 1), "float32", layout)
    tiling = GemvTiling(kernel, GemvConstants(1, 1, 1, 1, 32, 1, 3))
    first = (tiling.stages - 1) * tiling.tile_in
    assert first < kernel.pattern.c < 2**31 < first + tiling.tile_in
    x = np.arange(1, kernel.pattern.c - first + 1, dtype=np.float32)
    found = np.full(tiling.tile_in, np.nan, np.float32)
    text = source_of("gemv", kernel, tiling.constants).text + LAST_STAGE
    run_cuda(text, "last_stage", 1, tiling.threads, 0, [x, found, first])
    np.testing.assert_array_equal(found, np.pad(x, (0, len(found) - len(x))))


@pytest.mark.libraries
def test_rows_of_the_most_inputs_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pieces of such a row have 2^31 inputs, which an int cannot count."""
    monkeypatch.setenv(WARNINGS, "error")
    try:
        compiler = find_compiler("nvrtc")
    except ToolchainError as absent:
        pytest.skip(str(absent))
    source = source_of("gemv", kernel_of((1, 1, 2**31 - 1, 1), "float32", "bsf"), GemvConstants(1, 1, 1, 1, 32, 1, 1))
    assert compiler.compile(source.text, source.entry, "sm_90a").data


@st.composite
def cases(draw: st.DrawFn) -> tuple[KernelSpec, GemvConstants, int]:
    """A kernel, constants that the rules allow and no search would try, and a batch."""
    size = st.integers(1, 40)
    pattern = draw(st.integers(1, 3)), draw(size), draw(st.integers(1, 300)), draw(st.integers(1, 9))
    spec = kernel_of(pattern, draw(st.sampled_from(STORED)), draw(st.sampled_from(LAYOUTS)))
    thread_out = draw(st.sampled_from([1, 2, 3, 8]))
    constants = GemvConstants(
        tile_batch=draw(st.sampled_from([1, 2, 3, 6, 8, 20])),
        tile_out=thread_out * draw(st.integers(1, 6)),
        tile_d=draw(st.integers(1, min(pattern[3], 5))),
        thread_out=thread_out,
        lanes_in=draw(st.sampled_from([1, 2, 4, 8, 16, 32])),
        warps_in=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 3)),
    )
    if not FEW.keeps_rules(spec, constants) or not FEW.fits(spec, constants, LIMITS):
        constants = FEW.default(spec, LIMITS, 7)
    return spec, constants, draw(st.integers(1, 40))


@settings(max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_odd_constants(case: tuple[KernelSpec, GemvConstants, int]) -> None:
    """The same cases in each run, so that the emulator's builds of them are found again."""
    spec, constants, batch = case
    kernels.check(source_of("gemv", spec, constants), batch, in_emulator())


@pytest.mark.second
@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_many_odd_constants(case: tuple[KernelSpec, GemvConstants, int]) -> None:
    test_odd_constants.hypothesis.inner_test(case)  # type: ignore[attr-defined]


# ---- what is moved


COUNTED = [(1, 48, 48, 4), (1, 256, 64, 1), (1, 70, 50, 1), (2, 37, 13, 3), (1, 8, 1100, 1)]


@pytest.mark.exhaustive
@needs_counts
@pytest.mark.parametrize(("pattern", "layout"), list(product(COUNTED, LAYOUTS)))
def test_bytes_of_memory_are_within_a_tenth_of_the_least_and_the_model_s(pattern: tuple[int, ...], layout: str) -> None:
    """Each weight is read once, whatever the batch; blocks are as the model says."""
    for batch, precision in ((1, "float16"), (5, "float32"), (16, "bfloat16"), (32, "float16")):
        kernel = kernel_of(pattern, precision, layout)
        source = source_of("gemv", kernel, FEW.default(kernel, LIMITS, batch))
        own, around = count_kernel(source, batch)
        rows = compared(source, batch, own, around)
        found = {name: counted for name, (_, counted) in rows.items()}
        assert found["blocks"] == rows["blocks"][0]
        least = kernel.bytes(batch) + 3 * 32  # three arrays end within sectors
        assert kernel.bytes(batch) <= found["bytes of memory"] <= 1.1 * least, (batch, source.constants)
        assert rows["bytes of memory"][0] == pytest.approx(found["bytes of memory"], rel=0.05)
        assert rows["bytes of shared memory"][0] == pytest.approx(found["bytes of shared memory"], rel=0.02)
        off = 0.2 if pattern[2] == 13 else 0.02  # rows of odd pieces meet in the banks as the model does not say
        assert rows["cycles of shared memory"][0] == pytest.approx(found["cycles of shared memory"], rel=off)


@pytest.mark.parametrize(
    ("c", "precision", "vector"),
    [
        (64, "float16", 8),
        (64, "float32", 4),
        (64, "float64", 2),
        (13, "float16", 2),
        (50, "float16", 4),
        (3, "bfloat16", 1),
        (73, "float16", 8),
    ],
)
def test_rows_are_read_16_bytes_at_a_time_unless_that_makes_them_a_tenth_longer(
    c: int, precision: str, vector: int
) -> None:
    shape = GemvTiling(kernel_of((1, 8, c, 2), precision, "bsf"), GemvConstants(1, 1, 1, 1, 1, 1, 1))
    assert shape.vector == vector
    assert shape.packed_bytes <= 1.1 * shape.kernel.pattern.weight_count * shape.kernel.item_bytes


# ---- constants


GOOD = GemvConstants(4, 8, 2, 2, 8, 2, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "every constant is at least 1; got steps=0; try steps=1$"),
        ({"tile_batch": 33}, "tile_batch=33 must be at most 32; try 32$"),
        ({"thread_out": 9, "tile_out": 9}, "thread_out=9 must be at most 8"),
        ({"steps": 9}, "steps=9 must be at most 8; try 8$"),
        ({"lanes_in": 12}, "lanes_in=12 must be a power of two up to 32; try 8 or 16$"),
        ({"tile_out": 9}, "tile_out=9 must be a multiple of thread_out = 2; try 8 or 10$"),
        ({"tile_d": 5}, "tile_d=5 must be at most d=4; try 4$"),
        ({"early": 2}, "early=2 must be 0 or 1; try 1$"),
        ({"tile_out": 800, "tile_d": 4}, "a block has at most 1024 threads: 25600"),
    ],
)
def test_each_rule_refuses_its_case(changes: dict[str, int], says: str) -> None:
    kernel = kernel_of((1, 64, 64, 4), "float32", "bsf")
    check(FEW, kernel, GOOD, LIMITS)
    with pytest.raises(ConstantsError, match=says):
        check(FEW, kernel, replace(GOOD, **changes))


@pytest.mark.parametrize(("target", "early"), [("sm_80", 0), ("sm_89", 0), ("sm_90", 1), ("sm_90a", 1), ("sm_120", 1)])
def test_launches_begin_early_where_a_gpu_can(target: str, early: int) -> None:
    """Each launch of a chain or a graph then waits for the previous one by itself."""
    kernel = kernel_of((1, 64, 64, 4), "float16", "bsf")
    constants = FEW.default(kernel, cuda_limits(target), 1)
    assert constants.early == early
    assert FEW.geometry(kernel, constants, 1).starts_early == bool(early)
    assert next(FEW.space(kernel, cuda_limits(target))).early == early
    assert ("wait_for_previous_grid" in source_of("gemv", kernel, constants).text) == bool(early)


def test_constants_from_wisdom_are_checked_by_name_and_type() -> None:
    assert FEW.constants(asdict(GOOD)) == GOOD
    with pytest.raises(ConstantsError, match="gemv constants are tile_batch"):
        FEW.constants({"tile_batch": 1})


def test_a_block_has_a_power_of_two_of_rows_that_holds_the_batch() -> None:
    assert [rows_for(batch) for batch in (1, 2, 3, 9, 16, 17, 32, 33, None)] == [1, 2, 4, 16, 16, 32, 32, 32, 32]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_defaults_fit_and_are_the_best_of_those_looked_at(target: str) -> None:
    limits = cuda_limits(target)
    for pattern, (precision, layout), batch in zip(
        stratified(12), product(STORED, LAYOUTS), (1, 4, 8, 16, 32) * 3, strict=False
    ):
        kernel = KernelSpec(pattern, precision, layout)
        chosen = FEW.default(kernel, limits, batch)
        check(FEW, kernel, chosen, limits)
        shape = GemvTiling(kernel, chosen)
        assert shape.registers <= min(MOST_REGISTERS, MOST_OF_BLOCK // shape.threads)
        assert resident_blocks(target, limits, shape.threads, shape.registers, shape.shared_bytes) >= 1
        cycles = expected_cycles(kernel, chosen, limits, batch)
        assert all(
            cycles <= expected_cycles(kernel, each, limits, batch) for each in factor_options(kernel, chosen.tile_batch)
        )


def test_as_many_outputs_as_multiprocessors_give_each_of_them_a_block_or_more() -> None:
    """Long sums need no split over blocks. The warps of a block share a row if outputs are fewer; other SMs idle."""
    blocks = {}
    for outputs in (16, 64, 132, 1024):
        kernel = kernel_of((1, outputs, 8192, 1), "float16", "bsf")
        chosen = FEW.default(kernel, LIMITS, 1)
        blocks[outputs] = GemvTiling(kernel, chosen).grid(1)
        assert GemvTiling(kernel, chosen).sharers >= 64 or outputs == 1024
    assert blocks[16] == 16
    assert blocks[64] == 64
    assert min(blocks[132], blocks[1024]) >= LIMITS.multiprocessors


def test_rows_too_few_for_threads_to_copy_x_have_smaller_tiles_of_the_batch() -> None:
    """One row of 1003 inputs: 32 entries of a stage of X are more than a warp holds on their way."""
    kernel = kernel_of((1, 1, 1003, 1), "float16", "bsf")
    assert not list(factor_options(kernel, 32))
    assert FEW.default(kernel, LIMITS, 32).tile_batch < 32
    assert best(kernel, LIMITS, 1).tile_batch == 1


# ---- who is served


def test_what_it_serves() -> None:
    kernel = kernel_of((1, 64, 64, 4), "float32", "bsf")
    assert FEW in families_for(kernel, LIMITS, 1, aligned=False)
    assert FEW in families_for(kernel, LIMITS, 4096)  # right for every batch, and for none of those the default
    for limits in (cuda_limits("sm_75"), replace(LIMITS, is_cpu=True)):
        assert not FEW.supports(kernel, limits)
    assert not FEW.supports(replace(kernel, job="gradient"), LIMITS)
    assert not FEW.supports(replace(kernel, precision="complex64"), LIMITS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "layout"), list(product(("sm_80", "sm_90a"), LAYOUTS)))
@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.second)])
def test_it_is_chosen_for_small_batches_alone(count: int, target: str, layout: str) -> None:
    """Every pattern chooses it in float32 at batches 1 and 8, and half of them in float16. No batch above 32 does."""
    limits, patterns = cuda_limits(target), stratified(count)
    for precision in ("float32", "float16"):
        taken = dict.fromkeys((1, 8, 33, 64, 25088), 0)
        for pattern, batch in product(patterns, taken):
            taken[batch] += family_for(KernelSpec(pattern, precision, layout), limits, batch) is FEW
        assert taken[33] == taken[64] == taken[25088] == 0
        assert min(taken[1], taken[8]) >= (len(patterns) if precision == "float32" else len(patterns) // 2), taken
    assert family_for(KernelSpec(Pattern(1, 768, 192, 2), "float16", layout), limits) is not FEW
