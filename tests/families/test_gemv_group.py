"""Layers on one X in one launch for small batches: correct, bits of separate launches, in bounds; counts, rules."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen.emit.render import Source, render
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, check, cuda_limits, families_for, family_for
from ksgen.families.chains import layer_kernels
from ksgen.families.gemv.family import Gemv
from ksgen.families.gemv.group import GemvGroupConstants, GemvGroupTiling, best
from ksgen.families.gemv.shape import GemvConstants
from ksgen.launch.fused import family_of_chain, verdict_for
from ksgen.measure.verify import compare, make_problem
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.emulator import Counts, is_installed
from tests.families.test_gemv_chain import DOWN, EXCHANGED, GPT2, PLANES, UNEVEN
from tests.support.counting import Counting, compared
from tests.support.gpu_chains import EVEN, factor_sources, group_of, is_right, run_chain, run_group
from tests.support.kernels import Array, Run, as_bits, in_emulator, pack
from tests.support.products import ALL, arrays_of, chain_of, truth_of

FAMILY = Gemv()
LIMITS = cuda_limits("sm_90a")
Chains = tuple[tuple[Pattern, ...], ...]
QKV: Chains = (EVEN, EVEN, EVEN)  # one text
GROUPED: Chains = (EVEN, EVEN[:1], EVEN, (Pattern(2, 40, 64, 1),))  # 128 -> 128, 96, 128 and 80: one factor next to two
ODD: Chains = (UNEVEN, (Pattern(4, 7, 10, 3),), (Pattern(1, 5, 120, 1),))  # 120 -> 19, 84 and 5: every size with a rest
# one factor each, X in rows of three kinds
SINGLE: Chains = ((Pattern(2, 37, 13, 3),), (Pattern(1, 50, 78, 1),), (Pattern(1, 9, 2, 39),))
# whose second a does not divide the first one's: a block would read more of X
WIDE = (Pattern(3, 20, 35, 2), Pattern(2, 37, 60, 1))
LOWERED: Chains = (DOWN, (Pattern(1, 11, 144, 1),))


def source_of(kernel: KernelSpec, batch: int, constants: GemvGroupConstants | None = None) -> Source:
    constants = constants or FAMILY.default(kernel, LIMITS, batch)
    check(FAMILY, kernel, constants, LIMITS)
    return render(kernel, constants, family="gemv")


def by_itself(source: Source, arrays: dict[str, Array], number: int, run: Run) -> Array:
    """A layer's output by a launch of its own, under its own constants of the group."""
    layer, own = layer_kernels(source.kernel)[number], source.constants.layers[number]
    first = sum(map(len, source.kernel.chains[:number]))
    given = {
        name: arrays[f"{name}_{number + 1}"] for name in ("y", "bias", "residual") if f"{name}_{number + 1}" in arrays
    }
    given |= {"x": arrays["x"]} | {f"weights {at}": arrays[f"weights {first + at}"] for at in range(len(layer.factors))}
    one = render(layer, own, family="gemv")
    return run_chain(one, given, run) if len(layer.factors) > 1 else run_single(one, given, run)


def run_single(source: Source, arrays: dict[str, Array], run: Run) -> Array:
    kernel, batch = source.kernel, arrays["x"].shape[0 if source.kernel.layout == "bsf" else 1]
    packed = pack(replace(make_problem(kernel, 1), weights=arrays["weights 0"]), source, run)
    y = np.full_like(arrays["y"], np.nan)
    extras = [as_bits(arrays[name]) for name in ("bias", "residual") if name in arrays]
    run(
        source,
        source.entry,
        FAMILY.geometry(kernel, source.constants, batch),
        [as_bits(arrays["x"]), packed, as_bits(y), *extras, batch],
    )
    return y


def check_all(source: Source, batch: int, run: Run) -> None:
    """All outputs are right, and have the bits of launches of their own."""
    kernel, arrays = source.kernel, arrays_of(source.kernel, batch)
    for number, got in enumerate(run_group(source, arrays, run)):
        assert is_right(kernel, got, truth_of(kernel, arrays, number), number), (number, source.constants, batch)
        if not kernel.is_strided:
            np.testing.assert_array_equal(got, by_itself(source, arrays, number, run))


CASES: list[tuple[Chains, str, str, Epilogue, int, dict[str, Any]]] = [
    (QKV, "bfloat16", "bsf", Epilogue(bias=True), 1, {}),
    (GROUPED, "float32", "bsl", ALL, 3, {"between": "gelu"}),
    (GROUPED, "float16", "bsf", ALL, 16, {"stride": "any"}),
    (ODD, "float16", "bsf", Epilogue(residual=True), 32, {"between": "relu"}),
    (ODD, "float64", "bsl", Epilogue(bias=True), 33, {}),
    (SINGLE, "float32", "bsf", ALL, 3, {}),
    (SINGLE, "bfloat16", "bsl", ALL, 16, {"stride": "any"}),
    (LOWERED, "float32", "bsf", Epilogue(activation="gelu"), 1, {}),
    ((PLANES, PLANES), "float16", "bsl", ALL, 7, {"stride": "any"}),
    ((EXCHANGED, (Pattern(1, 12, 64, 1, "k1:3.k3:2.k2"),)), "float32", "bsf", ALL, 5, {}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("chains", "precision", "layout", "epilogue", "batch", "more"), CASES)
def test_agrees_with_float64_and_gives_the_bits_of_one_launch_per_layer(
    chains: Chains, precision: str, layout: str, epilogue: Epilogue, batch: int, more: dict[str, Any]
) -> None:
    check_all(source_of(KernelSpec(chains, precision, layout, epilogue, **more), batch), batch, in_emulator())


@pytest.mark.parametrize(
    ("chains", "layout"),
    [
        (ODD, "bsf"),
        *(pytest.param(*case, marks=pytest.mark.second) for case in ((ODD, "bsl"), (GROUPED, "bsf"), (GROUPED, "bsl"))),
    ],
)
def test_in_any_order_of_blocks_and_threads_within_its_arrays_without_races(chains: Chains, layout: str) -> None:
    kernel = group_of(chains, "float16", layout, ALL)
    source, arrays = source_of(kernel, 8), arrays_of(kernel, 11)
    expected = run_group(source, arrays, in_emulator())
    for options in ({"order": "reverse"}, {"sanitize": "address"}, {"sanitize": "race"}):
        for got, y in zip(run_group(source, arrays, in_emulator(**options), behind=0), expected, strict=True):
            np.testing.assert_array_equal(got, y)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("chains", "precision", "layout", "weights", "inputs"),
    [
        (GROUPED, "bfloat16", "bsf", "int8", "same"),
        (ODD, "float32", "bsl", "e4m3", "same"),
        (ODD, "float16", "bsf", "e4m3", "e4m3"),
        (SINGLE, "float32", "bsf", "int8", "int8"),
        (QKV, "bfloat16", "bsl", "e5m2", "e5m2"),
        (GROUPED, "float32", "bsf", "bfloat16", "same"),
    ],
)
def test_weights_and_x_stored_otherwise(chains: Chains, precision: str, layout: str, weights: str, inputs: str) -> None:
    between = "gelu" if any(len(each) > 1 for each in chains) else "none"
    kernel, run, batch = (
        KernelSpec(chains, precision, layout, ALL, between=between, weights=weights, inputs=inputs),
        in_emulator(),
        3,
    )
    source, problem = source_of(kernel, batch), make_problem(kernel, batch)
    stored = [each for own in problem.each for each in own.quantized]
    packed = [
        pack(replace(make_problem(each.kernel, 1), quantized=(own,)), each, run)
        for each, own in zip(factor_sources(source), stored, strict=True)
    ]
    added = [[getattr(own, name) for own in problem.each] for name in ("bias", "residual")]
    ys = [np.full(own.y_shape, np.nan, own.bias.dtype) for own in problem.each if own.bias is not None]
    arguments = [
        as_bits(problem.given_x),
        *packed,
        *map(as_bits, ys),
        *map(as_bits, added[0]),
        *map(as_bits, added[1]),
        batch,
    ]
    run(source, source.entry, FAMILY.geometry(kernel, source.constants, batch), arguments)
    assert compare(problem, *ys)[0] <= problem.tolerance


def test_inf_and_nan_stay_in_their_entries() -> None:
    kernel, run = group_of(GROUPED, "float16", "bsf"), in_emulator()
    source, arrays = source_of(kernel, 9), arrays_of(kernel, 9)
    arrays["x"][2, 1], arrays["x"][4, 60] = np.nan, np.inf
    for number, got in enumerate(run_group(source, arrays, run)):
        truth = truth_of(kernel, arrays, number)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(truth))
        assert not np.isfinite(got).all()


def test_layers_that_are_equal_have_one_text() -> None:
    found = {}
    for chains in (QKV, GROUPED, SINGLE):
        source = source_of(group_of(chains, "float16", "bsf"), 1)
        found[chains] = source.text.count("// ======== kind ")
    assert list(found.values()) == [1, 3, 3]
    assert (
        "// ======== kind 1: 2,48,64,1 then 1,64,48,2, of layers 1, 3\n"
        in source_of(group_of(GROUPED, "float16", "bsf"), 1).text
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[KernelSpec, GemvGroupConstants, int]:
    """Layers of one factor or two, constants that a search might try, and a batch."""
    size = st.integers(1, 12)
    a, c, d = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 4))
    first = Pattern(a, draw(size), c, d)
    chains: list[tuple[Pattern, ...]] = [(first, Pattern(1, draw(size), first.out_features // d, d))]
    chains += [(Pattern(1, draw(st.integers(1, 40)), a * c * d, 1),)] * draw(st.integers(1, 2))
    order = draw(st.permutations(chains))
    precision, layout = (
        draw(st.sampled_from(["float32", "float64", "float16", "bfloat16"])),
        draw(st.sampled_from(LAYOUTS)),
    )
    kernel = KernelSpec(
        order,
        precision,
        layout,
        draw(st.sampled_from([ALL, Epilogue()])),
        stride=draw(st.sampled_from(["dense", "any"])),
    )
    space = list(islice(FAMILY.space(kernel, LIMITS), 60))
    return kernel, draw(st.sampled_from(space)), draw(st.integers(1, 35))


@settings(max_examples=5, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_drawn_groups(case: tuple[KernelSpec, GemvGroupConstants, int]) -> None:
    """The same cases in each run, so that the emulator's builds of them are found again."""
    kernel, constants, batch = case
    check_all(source_of(kernel, batch, constants), batch, in_emulator())


@pytest.mark.second
@settings(max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_many_drawn_groups(case: tuple[KernelSpec, GemvGroupConstants, int]) -> None:
    test_drawn_groups.hypothesis.inner_test(case)  # type: ignore[attr-defined]


# ---- what is moved


@pytest.mark.exhaustive
@pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")
@pytest.mark.parametrize(
    ("chains", "precision", "layout", "batch"),
    [
        (QKV, "bfloat16", "bsf", 1),
        (GROUPED, "float16", "bsf", 16),
        (GROUPED, "bfloat16", "bsl", 16),
        (LOWERED, "float32", "bsf", 3),
        ((EVEN[:1],) * 3, "float32", "bsl", 32),
    ],
)
def test_what_the_cost_model_says_moved_is_what_moves(chains: Chains, precision: str, layout: str, batch: int) -> None:
    """Memory once, X too, however many layers read it; of shared memory, the first warp is taken for all."""
    kernel = group_of(chains, precision, layout)
    source, run = source_of(kernel, batch), Counting(timeout_s=300)
    run_group(source, arrays_of(kernel, batch), run, behind=0)
    rows = compared(source, batch, run.by_entry[source.entry], Counts())
    assert rows["blocks"][0] == rows["blocks"][1]
    assert rows["blocks"][0] == sum(each.grid(batch) for each in GemvGroupTiling(kernel, source.constants).layers)
    assert rows["bytes of memory"][1] <= 1.1 * kernel.bytes(batch)
    for name, (expected, counted) in rows.items():
        within = 0.15 if "shared" in name else 0.01
        assert expected == pytest.approx(counted, rel=within), (name, source.constants, rows)


# ---- constants, and what is served


GOOD = GemvGroupConstants(1, "4 8 1, 32 1 2 8 1 1; 16 1 1 8 1 1")  # for EVEN and its first factor


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"early": 2}, "early=2 must be 0 or 1; try 1$"),
        (
            {"tiles": "4 8 1, 32 1 2 8 1 1"},
            "tiles holds what each factor's own rules allow: factors per chain are 2 in tiles, and 2, 1 in the kernel; "
            "got tiles=",
        ),
        ({"tiles": "4 8 1, 32 1 2 8 1 1; 16 1 1 12 1 1"}, "of factor 3, lanes_in=12 must be a power of two up to 32"),
        (
            {"tiles": "5 8 1, 32 1 2 8 1 1; 16 1 1 8 1 1"},
            "of layer 1, first_thread_out=5 must be 1 or a divisor of the number of rows .* = 24; try 4",
        ),
        (
            {"tiles": "4 8 1, 32 1 2 8 1 1; 8 1 1 8 1 1"},
            "tiles has the same number of threads for all layers: 128 and 64; got tiles=",
        ),
        (
            {"tiles": "4 8 1, 32 1 2 8 1; 16 1 1 8 1 1"},
            "'32 1 2 8 1' must be 6 integers: tile_out, tile_d, thread_out, lanes_in, warps_in, steps",
        ),
    ],
)
def test_each_rule_refuses_its_case(changes: dict[str, Any], says: str) -> None:
    kernel = group_of((EVEN, EVEN[:1]), "float16", "bsf")
    check(FAMILY, kernel, GOOD, LIMITS)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, replace(GOOD, **changes))


def test_groups_that_it_cannot_take_are_refused() -> None:
    with pytest.raises(ConstantsError, match="layers on one X have one factor or two, and one layout"):
        check(FAMILY, chain_of(EVEN, "float16", "bsf"), GOOD)
    tiles = "4 4 1, 16 1 1 4 1 1; 4 4 1, 16 1 1 4 1 1"
    with pytest.raises(ConstantsError, match="of layer 1, the second factor's a divides the first one's a"):
        check(FAMILY, group_of((WIDE, WIDE), "float16", "bsf"), GemvGroupConstants(1, tiles))
    assert not FAMILY.supports(KernelSpec([EVEN, (*EVEN, *EVEN)], "float16", "bsf"), LIMITS)
    assert not FAMILY.supports(group_of((WIDE, WIDE), "float16", "bsf"), LIMITS)
    assert not FAMILY.supports(KernelSpec((EVEN, EVEN), "float16", "bsf", out_layout="bsl"), LIMITS)
    kernel = group_of(QKV, "float16", "bsf")
    assert FAMILIES["gemv"] in families_for(kernel, LIMITS, 1)
    for limits in (cuda_limits("sm_75"), replace(LIMITS, is_cpu=True), replace(LIMITS, shared_bytes=100)):
        assert not FAMILY.supports(kernel, limits)
    assert not FAMILY.supports(group_of((EVEN, EVEN), "complex64", "bsf"), LIMITS)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_it_is_chosen_for_small_batches_alone_where_the_model_expects_it_to_be_faster(precision: str) -> None:
    kernel = group_of((GPT2, GPT2, GPT2), precision, "bsf")
    for target, batch in (("sm_80", 1), ("sm_90a", 16)):
        limits = cuda_limits(target)
        assert family_for(kernel, limits, batch).name == "gemv"
        assert verdict_for(kernel, limits, "cuda", batch).is_one
        chosen = FAMILY.default(kernel, limits, batch)
        check(FAMILY, kernel, chosen, limits)
        assert chosen.early == FAMILY.geometry(kernel, chosen, batch).starts_early == (target == "sm_90a")
    chosen_for_many = family_of_chain(kernel, LIMITS, 25088)
    assert chosen_for_many is None or chosen_for_many.name != "gemv"
    apart = verdict_for(group_of((WIDE, WIDE), "float64", "bsf"), LIMITS, "cuda", 1)
    assert (apart.is_one, "us for one launch" in apart.why or "no family has room" in apart.why) == (False, True)


def test_constants_are_read_again_and_spell_those_of_each_layer() -> None:
    kernel = group_of(GROUPED, "bfloat16", "bsf")
    found = best(kernel, LIMITS, 4)
    assert found is not None
    assert FAMILY.constants(vars(found)) == found
    assert GemvGroupConstants.of(kernel, found.layers) == found
    assert len(found.parsed) == 6
    assert all(isinstance(each, GemvConstants) for each in found.parsed)
    space = list(FAMILY.space(kernel, LIMITS))
    assert {each.tile_batch for each in space} == {1, 2, 4, 8, 16, 32}
    assert all(FAMILY.keeps_rules(kernel, each) for each in space)
    assert len(set(space)) == len(space) > 20
