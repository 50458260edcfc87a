"""Two factors in one launch for small batches: correct, bits of separate launches, in bounds; counts and rules."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksgen.emit.render import Source, render
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, check, cuda_limits, families_for, family_for
from ksgen.families.gemv.chain_shape import GemvChainConstants, GemvChainTiling, most_alike
from ksgen.families.gemv.defaults import best_chain, chain_cycles, chain_options
from ksgen.launch.fused import family_of_chain
from ksgen.measure.verify import compare, make_problem
from ksgen.order import Place
from ksgen.pattern import Chain, Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.emulator import Counts, is_installed
from tests.support.counting import Counting, compared
from tests.support.exchange import exchanged_patterns, stored_order
from tests.support.gpu_chains import EVEN, RAGGED, check_against_factors, factor_sources, is_right, run_chain
from tests.support.kernels import as_bits, in_emulator, pack
from tests.support.products import ALL, arrays_of, chain_of, truth_of

FAMILY = FAMILIES["gemv"]
LIMITS = cuda_limits("sm_90a")
UNEVEN = RAGGED[1:]  # 120 -> 74 -> 19: pieces of four bytes, zeros behind the last input
DOWN = (Pattern(6, 16, 24, 1), Pattern(1, 12, 32, 3))  # as vit's: rows of neighbouring l read other blocks of X
PLANES = (Pattern(2, 24, 20, 2), Pattern(1, 9, 24, 4))  # j of the first factor too
GPT2 = (Pattern(16, 64, 64, 1), Pattern(1, 192, 64, 16))
FEW_BLOCKS = (Pattern(1, 48, 64, 1), Pattern(4, 16, 12, 1))  # the first factor has fewer blocks i than the second
# outputs that lie apart, whose rows of neighbouring l read one block of X, and those with neighbours in other blocks
EXCHANGED = Chain(("4,32,16,1@k1:8.i.k2", "8,16,16,1@k.i")).factors
APART = Chain(("4,16,16,2@i.k1:4.j.k2", "4,8,8,4")).factors
# warps share the second factor's rows, j stand in tiles that do not divide d
SPLIT = GemvChainConstants(4, 4, 3, 2, 32, 2, 1, 1, 32, 1)


def source_of(kernel: KernelSpec, batch: int, constants: GemvChainConstants | None = None) -> Source:
    constants = constants or FAMILY.default(kernel, LIMITS, batch)
    check(FAMILY, kernel, constants, LIMITS)
    return render(kernel, constants, family="gemv")


CASES: list[tuple[tuple[Pattern, ...], str, str, Epilogue, int, dict[str, Any]]] = [
    (EVEN, "float32", "bsf", ALL, 1, {"between": "gelu"}),
    (EVEN, "bfloat16", "bsl", ALL, 5, {}),
    (UNEVEN, "float16", "bsf", Epilogue(residual=True), 16, {"out_layout": "bsl", "between": "relu"}),
    (UNEVEN, "float64", "bsl", Epilogue(bias=True), 2, {"out_layout": "bsf"}),
    (DOWN, "float16", "bsf", ALL, 33, {"stride": "any"}),
    (PLANES, "float32", "bsl", ALL, 7, {"stride": "any"}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("patterns", "precision", "layout", "epilogue", "batch", "more"), CASES)
def test_agrees_with_float64_and_gives_the_bits_of_one_launch_per_factor(
    patterns: tuple[Pattern, ...], precision: str, layout: str, epilogue: Epilogue, batch: int, more: dict[str, Any]
) -> None:
    kernel = chain_of(patterns, precision, layout, epilogue, **more)
    source, arrays, run = source_of(kernel, batch), arrays_of(kernel, batch), in_emulator()
    if kernel.is_strided:
        assert is_right(kernel, run_chain(source, arrays, run), truth_of(kernel, arrays))
    else:
        check_against_factors(source, arrays, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_any_order_of_blocks_and_threads_within_its_arrays_without_races(layout: str) -> None:
    """Several stages and passes, warps that share rows, several j, and a ragged batch."""
    patterns = (
        (Pattern(3, 26, 600, 1), Pattern(1, 9, 13, 6))
        if layout == "bsf"
        else (Pattern(2, 15, 70, 1), Pattern(1, 6, 6, 5))
    )
    kernel = chain_of(patterns, "float16", layout, ALL)
    source = source_of(kernel, 7, SPLIT)
    shape = GemvChainTiling(kernel, source.constants)
    assert shape.passes > 1
    assert (shape.first.stages > 2, shape.first.planes_i) == (layout == "bsf", len(patterns) + (layout == "bsf"))
    arrays = arrays_of(kernel, 5)
    first = run_chain(source, arrays, in_emulator())
    assert is_right(kernel, first, truth_of(kernel, arrays))
    for options_ in ({"order": "reverse"}, {"sanitize": "address"}, {"sanitize": "race"}):
        np.testing.assert_array_equal(run_chain(source, arrays, in_emulator(**options_), behind=0), first)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("patterns", "precision", "layout", "weights", "inputs", "more"),
    [
        (UNEVEN, "bfloat16", "bsf", "int8", "same", {}),
        (UNEVEN, "float32", "bsf", "e4m3", "same", {}),
        (UNEVEN, "float16", "bsf", "e4m3", "e4m3", {}),
        (PLANES, "float32", "bsl", "int8", "int8", {"out_layout": "bsf"}),
        (EVEN, "bfloat16", "bsf", "e5m2", "e5m2", {"out_layout": "bsl"}),  # X is copied sixteen bytes at a time
        (EXCHANGED, "float16", "bsl", "int8", "same", {}),
    ],
)
def test_weights_and_x_in_eight_bits(
    patterns: tuple[Pattern, ...], precision: str, layout: str, weights: str, inputs: str, more: dict[str, Any]
) -> None:
    """The intermediate is scaled before its activation, and stored in Y's type."""
    kernel, run, batch = (
        chain_of(patterns, precision, layout, ALL, between="gelu", weights=weights, inputs=inputs, **more),
        in_emulator(),
        3,
    )
    source, problem = source_of(kernel, batch), make_problem(kernel, batch)
    packed = [
        pack(replace(make_problem(each.kernel, 1), quantized=(own,)), each, run)
        for each, own in zip(factor_sources(source), problem.quantized, strict=True)
    ]
    assert problem.bias is not None
    assert problem.residual is not None
    y = np.full(problem.y_shape, np.nan, problem.bias.dtype)
    arguments = [as_bits(problem.given_x), *packed, as_bits(y), as_bits(problem.bias), as_bits(problem.residual), batch]
    run(source, source.entry, FAMILY.geometry(kernel, source.constants, batch), arguments)
    assert compare(problem, y)[0] <= problem.tolerance


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", ["address", "race"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanged_outputs_have_no_races(layout: str, sanitize: str) -> None:
    """Lanes with several rows, warps that share rows, several j, passes and rows of the batch."""
    for patterns, own in (
        (EXCHANGED, GemvChainConstants(4, 8, 1, 2, 32, 2, 1, 4, 16, 1)),
        (APART, GemvChainConstants(8, 4, 2, 1, 4, 1, 1, 1, 8, 1)),
    ):
        kernel = chain_of(patterns, "float32", layout, ALL)
        source, arrays = source_of(kernel, 9, own), arrays_of(kernel, 9)
        found = run_chain(source, arrays, in_emulator(sanitize=sanitize), behind=0)
        assert is_right(kernel, found, truth_of(kernel, arrays))
        np.testing.assert_array_equal(run_chain(source, arrays, in_emulator(order="reverse")), found)


@settings(max_examples=200, derandomize=True)
@given(st.data())
def test_digits_find_the_row_and_the_inputs_of_each_intermediate(data: st.DataObject) -> None:
    """The features of exchanged outputs are counted one by one."""
    mine = data.draw(exchanged_patterns().filter(lambda each: each.outputs.is_exchanged))
    sizes = [each for each in range(1, mine.out_features + 1) if mine.out_features % each == 0]
    d = data.draw(st.sampled_from(sizes))
    a = data.draw(st.sampled_from([each for each in sizes if mine.out_features // d % each == 0]))
    then = Pattern(a, 2, mine.out_features // (a * d), d)
    kernel, tile_d = KernelSpec((mine, then), "float32"), data.draw(st.integers(1, d))
    if mine.outputs.undivided(then.inputs):
        assert not FAMILY.supports(kernel, LIMITS)
        return
    first = GemvChainTiling(kernel, GemvChainConstants(1, 1, tile_d, 1, 1, 1, 1, 1, 1, 1)).first
    stored, alike = stored_order(mine.outputs), most_alike(kernel)

    def total(places: list[Place], **indices: int) -> int:
        return sum(each.of(indices[each.name]) for each in places)

    for at, row in enumerate(stored):
        i, inputs, j = at // (then.c * d), at // d % then.c, at % d
        assert total(first.row_places, i=i, l=inputs, j=j) == row
        plane, first_j = first.plane_of(inputs, j), j // tile_d * tile_d
        of_i, of_j = divmod(plane, first.planes_d)
        assert plane < first.x_planes
        assert total(first.index_places("i"), i=i, j=first_j, plane=of_i) == row // (mine.b * mine.d)
        assert total(first.index_places("j"), i=i, j=first_j, plane=of_j) == row % mine.d
        if inputs and (alike == float("inf") or inputs % alike):  # a lane takes both
            assert (stored[at - d], first.plane_of(inputs - 1, j)) == (row - first.row_step, plane)


def test_inf_and_nan_stay_in_their_blocks() -> None:
    kernel, run = chain_of(DOWN, "float16", "bsf"), in_emulator()
    source, arrays = source_of(kernel, 9), arrays_of(kernel, 9)
    arrays["x"][2, 1], arrays["x"][4, 60] = np.nan, np.inf
    got, truth = run_chain(source, arrays, run), truth_of(kernel, arrays)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(truth))
    assert not np.isfinite(got).all()


# ---- what is moved


@pytest.mark.exhaustive
@pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")
@pytest.mark.parametrize(
    ("patterns", "precision", "layout", "batch"),
    [
        (EVEN, "float16", "bsf", 1),
        (UNEVEN, "float16", "bsf", 1),
        (DOWN, "float32", "bsf", 16),
        (EVEN, "bfloat16", "bsl", 16),
        (EXCHANGED, "float16", "bsf", 16),
        (APART, "float32", "bsf", 16),
    ],
)
def test_what_the_cost_model_says_moved_is_what_moves(
    patterns: tuple[Pattern, ...], precision: str, layout: str, batch: int
) -> None:
    """Memory once, however often blocks read the first factor's weights; of shared memory, the first warp is taken
    for all.
    """
    kernel = chain_of(patterns, precision, layout)
    source, run = source_of(kernel, batch), Counting(timeout_s=300)
    run_chain(source, arrays_of(kernel, batch), run, behind=0)
    rows = compared(source, batch, run.by_entry[source.entry], Counts())
    assert rows["blocks"][0] == rows["blocks"][1]
    assert rows["bytes of memory"][1] <= 1.1 * kernel.bytes(batch)
    for name, (expected, counted) in rows.items():
        within = 0.15 if "shared" in name else 0.01
        assert expected == pytest.approx(counted, rel=within), (name, source.constants, rows)


# ---- constants, and what is served


GOOD = GemvChainConstants(1, 32, 1, 2, 8, 1, 1, 4, 8, 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "every constant is at least 1; got steps=0; try steps=1$"),
        ({"early": 2}, "early=2 must be 0 or 1; try 1$"),
        (
            {"tile_d": 17, "tile_out": 2},
            "each factor's constants are as its own rules allow: of factor 2, tile_d=17 must be at most d=16",
        ),
        ({"first_lanes_in": 12}, "of factor 1, lanes_in=12 must be a power of two up to 32"),
        (
            {"first_thread_out": 8},
            "first_thread_out=8 must be 1 or a divisor of the number of rows that read the same X = 4; try 4$",
        ),
        ({"tile_out": 800, "tile_d": 16}, "a block has at most 1024 threads: 51200"),
    ],
)
def test_each_rule_refuses_its_case(changes: dict[str, int], says: str) -> None:
    kernel = chain_of(GPT2, "float16", "bsf")
    check(FAMILY, kernel, GOOD, LIMITS)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, replace(GOOD, **changes))


def test_chains_that_it_cannot_take_are_refused() -> None:
    with pytest.raises(ConstantsError, match="a chain of two factors is one layer's"):
        check(FAMILY, chain_of((*EVEN, *EVEN), "float16", "bsf"), GOOD)
    undivided = Pattern(2, 6, 4, 1, "k1:2.i.k2"), Pattern(3, 5, 4, 1)
    for patterns in (RAGGED[:2], undivided):
        with pytest.raises(ConstantsError, match=r"the second factor's a divides the first one's a.* digits divide"):
            check(FAMILY, chain_of(patterns, "float16", "bsf"), GOOD)


def test_what_it_serves() -> None:
    kernel = chain_of(GPT2, "float16", "bsf")
    assert FAMILY in families_for(kernel, LIMITS, 1)
    for limits in (cuda_limits("sm_75"), replace(LIMITS, is_cpu=True), replace(LIMITS, shared_bytes=1000)):
        assert not FAMILY.supports(kernel, limits)
    # the first factor with the second one's i and j has 2^31 inputs, or half as many
    vast, large = ((Pattern(1, 2**16, c, 1), Pattern(1, 2, 1, 2**16)) for c in (2**15, 2**14))
    for chains in (RAGGED[:2], (*EVEN, *EVEN), vast):
        assert not FAMILY.supports(KernelSpec(chains, "float16", "bsf"), LIMITS)
    assert FAMILY.supports(KernelSpec(large, "float16", "bsf"), LIMITS)
    assert not FAMILY.supports(chain_of(GPT2, "complex64", "bsf"), LIMITS)


@pytest.mark.parametrize(
    ("chains", "shared_bytes"),
    [
        (FEW_BLOCKS, 2**17),
        (RAGGED[:2], 2**17),
        ((*EVEN, *EVEN), 2**17),
        ((RAGGED[:2],) * 2, 2**17),
        (EVEN, 100),
        ((EVEN, EVEN), 100),
    ],
)
def test_a_default_where_it_does_not_serve_is_refused(chains: Any, shared_bytes: int) -> None:
    kernel = KernelSpec(chains, "float16", "bsf")
    said = rf"^{kernel.name}: not supported by gemv on this device; gemv is for: small batches, as in decoding"
    with pytest.raises(ConstantsError, match=said):
        FAMILY.default(kernel, replace(LIMITS, shared_bytes=shared_bytes), 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_it_is_chosen_for_small_batches_alone(precision: str) -> None:
    kernel = chain_of(GPT2, precision, "bsf")
    for batch in (1, 16):
        assert family_for(kernel, LIMITS, batch).name == "gemv"
    chosen = family_of_chain(kernel, LIMITS, 25088)
    assert chosen is None or chosen.name != "gemv"
    only = chain_of((Pattern(1, 4096, 16, 1), Pattern(1, 16, 4096, 1)), "float64", "bsf")
    assert FAMILY.supports(only, LIMITS)
    assert family_of_chain(only, LIMITS, 25088) is None  # and no other has room


def test_defaults_fit_are_the_best_of_those_looked_at_and_take_part_in_early_launches() -> None:
    kernel = chain_of(EVEN, "bfloat16", "bsf")
    for target, batch in (("sm_80", 8), ("sm_90a", 1)):
        limits = cuda_limits(target)
        chosen = FAMILY.default(kernel, limits, batch)
        check(FAMILY, kernel, chosen, limits)
        assert chosen.early == FAMILY.geometry(kernel, chosen, batch).starts_early == (target == "sm_90a")
        assert re.search("wait_for_previous_grid", source_of(kernel, batch, chosen).text) is None or chosen.early
        found = best_chain(kernel, limits, batch)
        assert found is not None
        cycles = chain_cycles(kernel, found, limits, batch)
        others = chain_options(kernel, limits.shared_bytes, batch)
        assert all(cycles <= chain_cycles(kernel, each, limits, batch) for each in others)
    assert FAMILY.constants(vars(chosen)) == chosen
    assert FAMILY.packed_bytes(kernel, chosen) == 0  # packed as for each factor alone
