"""Every kernel family in the emulator: its kernels against the float64 reference, over the matrix of `kernels.py`."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, check, cuda_limits, family_for, family_named, faster_family
from ksgen.families.expected import LARGE, default_us
from ksgen.launch.memory import numpy_dtype
from ksgen.measure.verify import make_problem
from ksgen.pattern import Pattern
from ksgen.reference import multiply
from ksgen.spec import ACTIVATIONS, LAYOUTS, PRECISIONS, Activation, Epilogue, KernelSpec
from tests.support import kernels
from tests.support.kernels import (
    ALIGNED,
    JOB_OF,
    LIMITS,
    MATRIX,
    PATTERNS,
    SERVED,
    VARIANTS,
    batch_for,
    batches_for,
    in_emulator,
    job_of,
    kernel_of,
    patterns_of,
    ragged_of,
    source_of,
    supports,
)

RAGGED = PATTERNS["flat"]
STORED = {precision.dtype for precision in PRECISIONS.values()}  # plain families multiply what is stored


def one_of_each_size(*sizes: int) -> list[tuple[str, str, str]]:
    """Return a precision per size in bytes, for tests that depend on the size of elements and not on their format."""
    found = {(family, layout, PRECISIONS[name].item_bytes): (family, name, layout) for family, name, layout in SERVED}
    return [each for (*_, size), each in found.items() if size in sizes]


FIRST = {family: precision for family, precision, _ in reversed(SERVED)}
FEW = {"multiply": ("tiny", "flat", "rest", "aligned"), "gradient": ("flat", "aligned")}


def in_rings(family: str, precision: str, layout: str, name: str) -> Any:
    """The quick ring has every pattern in a product's first precision, and in the others a few; a gradient takes two.
    The rest is later. Family and layout are one word of the name, so that the first ring takes each family in each
    layout.
    """
    job = JOB_OF[family]
    is_whole = job == "multiply" and precision == FIRST[family]
    marks = [] if is_whole or name in FEW[job] else [pytest.mark.slow]
    return pytest.param(family, precision, layout, name, marks=marks, id=f"{family}_{layout}-{precision}-{name}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "precision", "layout", "name"), [in_rings(*each) for each in MATRIX])
def test_agrees_with_float64(family: str, precision: str, layout: str, name: str) -> None:
    """Random arrays and small integers alternate, so that each batch is launched once."""
    source, run = source_of(family, kernel_of(patterns_of(family, precision)[name], precision, layout)), in_emulator()
    for batch, check_one in zip(batches_for(source), cycle((kernels.check, kernels.check_exact)), strict=False):
        check_one(source, batch, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*each, id="_".join(each))  # one word, so that the first ring takes each family in each layout
        for each in dict.fromkeys((family, layout) for family, _, layout in SERVED if JOB_OF[family] == "multiply")
    ],
)
def test_epilogues(family: str, layout: str, activation: str) -> None:
    """Each activation in one precision, each precision with one or two."""
    precisions = [precision for name, precision, where in SERVED if (name, where) == (family, layout)]
    number = list(ACTIVATIONS).index(activation)
    for bias, residual in ((True, number % 2 == 0), (False, True)):
        precision = precisions[number % len(precisions)]
        kernel = kernel_of(
            ragged_of(family, precision, layout), precision, layout, Epilogue(bias, activation, residual)
        )
        kernels.check(source_of(family, kernel), 66, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*each, id="_".join(each))
        for each in dict.fromkeys((family, layout) for family, _, layout in SERVED if JOB_OF[family] == "multiply")
    ],
)
def test_an_activation_may_follow_the_residual(family: str, layout: str) -> None:
    precision = next(each for name, each, where in SERVED if (name, where) == (family, layout))
    pattern, epilogue = ragged_of(family, precision, layout), Epilogue(True, "relu", True, True)
    kernels.check_exact(source_of(family, kernel_of(pattern, precision, layout, epilogue)), 66, in_emulator())


@pytest.mark.parametrize("tie", ["a", "d", "ad"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_simt_packs_tied_weights_once(layout: str, tie: str) -> None:
    for shape in ((3, 37, 9, 11), (2, 5, 7, 16)):
        kernel = replace(kernel_of(shape, "float32", layout), tied=(tie,))
        source, whole = source_of("simt", kernel), source_of("simt", kernel.untied)
        packed = [FAMILIES["simt"].packed_bytes(each.kernel, source.constants) for each in (source, whole)]
        assert packed[0] * (shape[0] if "a" in tie else 1) <= packed[1]
        kernels.check(source, 33, in_emulator())
        kernels.check_exact(source, 17, in_emulator())


def activated(values: kernels.Array, precision: str, activation: Activation) -> kernels.Array:
    """Y of values that a kernel multiplies by 1."""
    kernel = kernel_of((1, 1, 1, 1), precision, "bsf", Epilogue(activation=activation))
    x, one = (np.asarray(each, numpy_dtype(kernel.dtype)) for each in (values, np.ones((1, 1, 1, 1))))
    problem = replace(make_problem(kernel, x.size), x=x[:, None], weights=one)
    return np.asarray(kernels.multiply(problem, source_of("simt", kernel), in_emulator())[:, 0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_of_nan_is_nan(activation: Activation, precision: str) -> None:
    y = activated(np.array([np.nan, 2, np.inf]), precision, activation).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(y), [True, False, False])
    assert y[2] == np.inf


@pytest.mark.parametrize(("precision", "digits"), [("float16", 10), ("bfloat16", 7)])
@pytest.mark.parametrize(("activation", "most"), [("gelu", 1.06e-4), ("gelu_tanh", 7.8e-5)])
def test_short_activations_add_little_to_the_rounding_to_16_bits(
    activation: Activation, most: float, precision: str, digits: int
) -> None:
    """Every 13th number up to 16 of the type, of both signs; the error is that beyond rounding the exact result."""
    kind = numpy_dtype(precision)
    patterns = np.arange(0, int(np.array(16, kind).view(np.uint16)), 13).astype(np.uint16)
    values = np.concatenate([patterns, patterns | 0x8000]).view(kind)
    exact = multiply(Pattern(1, 1, 1, 1), values[:, None], np.ones((1, 1, 1, 1)), "bsf", activation=activation)[:, 0]
    rounding = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - digits - 1)
    error = np.abs(activated(values, precision, activation).astype(np.float64) - exact)
    assert (error <= rounding + most * np.abs(exact) + 1e-8).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "precision", "layout"), [each for each in one_of_each_size(2, 4, 8, 16) if JOB_OF[each[0]] == "multiply"]
)
def test_what_is_added_is_read_where_it_lies(family: str, precision: str, layout: str) -> None:
    """Bias and residual are read in Y's own place, and at addresses that are less aligned than Y."""
    pattern = patterns_of(family, precision)["blocks" if family == "wgmma_shared" else "aligned"]
    source = source_of(family, kernel_of(pattern, precision, layout, Epilogue(True, "relu", True)))
    kernels.check(source, 72, in_emulator(), in_place=True)
    kernels.check(source, 77, in_emulator(), in_place=True)
    if VARIANTS[family].takes(source.kernel, 72, aligned=False):
        for shifts in ({"bias": 1}, {"residual": 1}, {"bias": 2, "residual": 2}):
            kernels.check(source, 72, in_emulator(), **shifts)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "precision", "layout"), one_of_each_size(4))
def test_a_kernel_specialised_to_one_batch(family: str, precision: str, layout: str) -> None:
    general = source_of(family, kernel_of(ragged_of(family, precision, layout), precision, layout))
    batch = batch_for(general, 77)
    kernels.check(source_of(family, replace(general.kernel, batch=batch)), batch, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", ["address", "race"])
@pytest.mark.parametrize(("family", "precision", "layout"), one_of_each_size(2, 4))
def test_no_race_and_no_access_outside(family: str, precision: str, layout: str, sanitize: str) -> None:
    run = in_emulator(sanitize=sanitize)
    for pattern, batch in ((ragged_of(family, precision, layout), 65), ((1, 9, 20, 12), 33))[
        : 2 if sanitize == "race" else 1
    ]:
        kernel = kernel_of(pattern, precision, layout, Epilogue(True, "gelu", True))
        if supports(family, kernel):
            kernels.check(source_of(family, kernel), batch, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "precision", "layout"), SERVED)
def test_runs_are_bit_identical_in_any_order_of_blocks_and_threads(family: str, precision: str, layout: str) -> None:
    source = source_of(family, kernel_of(ragged_of(family, precision, layout), precision, layout))
    first, *others = (
        kernels.check(source, 150, in_emulator(order=order)) for order in ("forward", "forward", "reverse", 5)
    )
    for y in others:
        np.testing.assert_array_equal(y, first)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "layout", "name"),
    [
        (family, precision, layout, name)
        for family, precision, layout in SERVED
        for name in ("rest", "flat", "blocks")
        if supports(family, kernel_of(patterns_of(family, precision)[name], precision, layout))
    ],
)
def test_inf_and_nan_do_not_leak(family: str, precision: str, layout: str, name: str) -> None:
    kernel = kernel_of(patterns_of(family, precision)[name], precision, layout)
    kernels.check_leaks(source_of(family, kernel), 65, in_emulator())


def _with_ragged_planes() -> Iterator[tuple[str, KernelSpec, Any]]:
    """Families in float32 whose tiles hold several j, each with constants of which d = 5 is no multiple."""
    for family in JOB_OF:
        kernel = job_of(family, kernel_of((2, 37, 13, 5), "float32", "bsf"))
        if not supports(family, kernel) or not hasattr(own := VARIANTS[family].default(kernel, LIMITS), "tile_d"):
            continue
        ragged = (replace(own, tile_d=tile_d) for tile_d in (2, 3, 4))
        if found := next((each for each in ragged if is_allowed(family, kernel, each)), None):
            yield family, kernel, found


def test_tiles_of_j_that_end_within_d_are_right() -> None:
    """Defaults divide d, and searches try other numbers. A gradient of 300 rows has several parts."""
    found = list(_with_ragged_planes())
    assert {family for family, *_ in found} >= {"simt", "gemv", "gradient"}
    for family, kernel, constants in found:
        kernels.check(source_of(family, kernel, constants), 300 if kernel.job == "gradient" else 9, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("family", JOB_OF)
def test_the_space_holds_only_what_fits_and_is_right(family: str) -> None:
    kernels_of_all = (
        job_of(family, kernel_of((1, 64, 64, 4), precision, layout))
        for precision, layout in product(PRECISIONS, LAYOUTS)
    )
    kernel = next(each for each in kernels_of_all if supports(family, each))
    found = list(VARIANTS[family].space(kernel, LIMITS))
    assert len(found) > 100
    for constants in found[:: len(found) // 50]:
        check(VARIANTS[family], kernel, constants, LIMITS)
    for constants in found[:: len(found) // 4]:
        kernels.check(source_of(family, kernel, constants), 70, in_emulator())


@pytest.mark.parametrize(("family", "precision", "layout"), SERVED)
def test_a_launch_starts_early_where_the_text_waits(family: str, precision: str, layout: str) -> None:
    source = source_of(family, kernel_of(ragged_of(family, precision, layout), precision, layout))
    geometry = VARIANTS[family].geometry(source.kernel, source.constants, 1)
    assert geometry.starts_early == ("    wait_for_previous_grid();" in source.text)
    assert not VARIANTS[family].pack_geometry(source.kernel, source.constants).starts_early


def test_families_are_found_by_name() -> None:
    for name, family in FAMILIES.items():
        assert family_named(name) is family
        assert family.name == name
    with pytest.raises(ConstantsError, match=f"unknown kernel family 'nope'; known: {', '.join(FAMILIES)}"):
        family_named("nope")
    assert family_for(kernel_of(RAGGED, "float32", "bsf"), LIMITS).name == "simt"


def test_families_that_need_wisdom_are_no_default_and_those_that_cannot_take_a_batch_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = {name for name, family in FAMILIES.items() if not family.by_default}
    assert waiting == set()
    kernel = kernel_of(ALIGNED["blocks"], "float16", "bsl")
    assert family_named("wgmma_shared").supports(kernel, LIMITS)
    assert not family_named("wgmma_shared").supports(kernel, cuda_limits("sm_100"))
    assert family_for(kernel, LIMITS, 4096).name == "wgmma"
    monkeypatch.setattr(FAMILIES["wgmma"], "by_default", False)
    assert family_for(kernel, LIMITS, 4096).name == "mma"
    monkeypatch.undo()
    assert family_for(kernel, LIMITS, 4097).name == "mma"  # rows of 8194 bytes
    assert family_for(kernel, LIMITS, 4096, aligned=False).name == "mma"
    assert family_for(kernel, LIMITS, 2**31).name == "mma"  # a coordinate has 32 bits
    assert family_for(kernel, cuda_limits("sm_80"), 4096).name == "mma"


def test_a_family_that_is_expected_to_be_faster_is_named_with_the_factor() -> None:
    kernel = KernelSpec(Pattern(2, 192, 768, 16), "bfloat16", "bsf")
    assert family_for(kernel, LIMITS, LARGE).name == "wgmma"
    found = faster_family("mma", kernel, LIMITS, LARGE)
    assert found is not None
    family, factor = found
    us = {
        name: default_us(VARIANTS[name], kernel, LIMITS, LARGE) for name in ("mma", "wgmma_registers", "wgmma_permuted")
    }
    assert (family.name, factor) == ("wgmma", us["mma"] / us["wgmma_registers"])
    assert us["wgmma_registers"] < us["wgmma_permuted"] < us["mma"]
    assert faster_family("wgmma_registers", kernel, LIMITS, LARGE) is None
    assert faster_family("mma", kernel, cuda_limits("sm_80"), LARGE) is None
    assert faster_family("mma", kernel, cuda_limits("sm_999"), LARGE) is None  # whose rates are unknown


# ---- whatever the rules allow


def defaults(family: str, kernel: KernelSpec) -> Iterator[Any]:
    """A family's defaults for GPUs of several generations."""
    for target in ("sm_90a", "sm_80", "sm_75"):
        with suppress(ConstantsError):
            yield VARIANTS[family].default(kernel, cuda_limits(target))


def neighbours(values: list[Any]) -> list[Any]:
    """What a constant may be instead: the other defaults, and for a number what lies around it."""
    near = [
        near
        for value in values[:1]
        if isinstance(value, int)
        for near in (1, value // 2, 2 * value, value - 1, value + 1, 3, 0)
    ]
    return list(dict.fromkeys([*values, *near]))


def is_allowed(family: str, kernel: KernelSpec, constants: Any) -> bool:
    try:
        check(VARIANTS[family], kernel, constants, LIMITS)
    except ConstantsError:
        return False
    return True


@st.composite
def by_maps(
    draw: st.DrawFn, family: str, precision: str, layout: str, pattern: tuple[int, ...]
) -> tuple[KernelSpec, Any]:
    """Few patterns by chance have rows of whole chunks, and no constant of these families can be changed alone."""
    a, b, c, d = pattern
    if layout == "bsf":
        c, d = 8 * -(-c // 8), 1 if family == "wgmma_shared" else d
    if family == "wgmma_permuted":
        b, d = 8 * -(-b // 8), max(2, d)
    kernel = kernel_of((a, b, c, d), precision, layout)
    assume(supports(family, kernel))
    return kernel, draw(st.sampled_from(list(VARIANTS[family].space(kernel, LIMITS))))


@st.composite
def cases(draw: st.DrawFn, family: str) -> tuple[KernelSpec, Any, int]:
    """A kernel, constants a few steps within the rules from its default, and a batch."""
    precision, layout = draw(st.sampled_from([(p, layout) for name, p, layout in SERVED if name == family]))
    a, b, c = draw(st.integers(1, 3)), draw(st.integers(1, 70)), draw(st.integers(1, 70))
    pattern = (a, b, c, draw(st.integers(1, max(1, min(20, 20000 // (a * b * c))))))
    if family.startswith("wgmma"):
        return *draw(by_maps(family, precision, layout, pattern)), draw(st.integers(1, 140))
    kernel = job_of(family, kernel_of(pattern, precision, layout))
    assume(supports(family, kernel))
    constants, *others = defaults(family, kernel)
    for name in draw(st.lists(st.sampled_from([field.name for field in fields(constants)]), max_size=8)):
        values = [getattr(each, name) for each in (constants, *others)]
        changed = replace(constants, **{name: draw(st.sampled_from(neighbours(values)))})
        constants = changed if is_allowed(family, kernel, changed) else constants
    return kernel, constants, draw(st.integers(1, 140) if kernel.job == "multiply" else st.integers(1, 400))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("family", JOB_OF)
@settings(max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_pattern_constants_and_batch(family: str, data: st.DataObject) -> None:
    kernel, constants, batch = data.draw(cases(family))
    assume(batch * kernel.pattern.out_features >= 32)  # a lone sum may cancel, and then be off by anything
    kernels.check(source_of(family, kernel, constants), batch, in_emulator())


@pytest.mark.second
@pytest.mark.parametrize("family", JOB_OF)
@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_many_patterns_constants_and_batches(family: str, data: st.DataObject) -> None:
    test_any_pattern_constants_and_batch.hypothesis.inner_test(family, data)  # type: ignore[attr-defined]


def test_steps_from_the_default_reach_every_constant() -> None:
    """The rules are tried beyond the default."""
    for family, precision, layout in SERVED:
        if family.startswith("wgmma"):  # whose cases are drawn from its space
            continue
        kernel = job_of(family, kernel_of((2, 37, 13, 20), precision, layout))
        constants, *others = defaults(family, kernel)
        steps = [
            (field.name, near)
            for field in fields(constants)
            for near in neighbours([getattr(each, field.name) for each in (constants, *others)])
        ]
        allowed = {
            name
            for name, near in steps
            if near != getattr(constants, name) and is_allowed(family, kernel, replace(constants, **{name: near}))
        }
        assert len(allowed) >= len(fields(constants)) // 3, (family, precision, layout, allowed)


# ---- the checks themselves


def test_mistakes_are_reported() -> None:
    kernel = kernel_of((2, 6, 5, 3), "float32", "bsf")
    source, right = source_of("simt", kernel), in_emulator()

    def broken(**changes: Any) -> Any:
        """A run that does to one array, by its place among the arguments, what a wrong kernel would."""

        def run(source: Any, entry: str, geometry: Any, args: list[Any]) -> None:
            right(source, entry, geometry, args)
            change = changes.get("pack" if entry.endswith("_pack") else "multiply")
            if change:
                change(args)

        return run

    def damage(index: int, at: int, value: float) -> Any:
        def change(args: list[Any]) -> None:
            args[index].reshape(-1)[at] = value

        return change

    def leak(args: list[Any]) -> None:
        x, y = args[0][: 9 * 30].reshape(9, 30), args[2][: 9 * 36].reshape(9, 36)
        y[~np.isfinite(x).all(1), 0] = np.nan

    problem = make_problem(kernel, 9)
    before = iter((0xFF, 0))
    with pytest.raises(AssertionError, match="packing left bytes unwritten"):
        kernels.pack(problem, source, broken(pack=lambda args: args[1][4:8].fill(next(before))))
    with pytest.raises(AssertionError, match="wrote behind Y"):
        kernels.check_leaks(source, 9, broken(multiply=damage(2, -1, 0)))
    with pytest.raises(AssertionError, match="Mismatched elements: 1 /"):
        kernels.check_exact(source, 9, broken(multiply=damage(2, 17, 1000)))
    with pytest.raises(AssertionError):
        kernels.check(source, 9, broken(multiply=damage(2, 17, 1000)))
    with pytest.raises(AssertionError, match="nan location mismatch"):
        kernels.check_leaks(source, 9, broken(multiply=leak))


def test_ulps_count_the_floats_between() -> None:
    one = np.array([1, -0.0, 0], np.float32)
    assert kernels.ulps(one, one) == 0
    assert kernels.ulps(one, np.array([np.nextafter(np.float32(1), np.float32(2)), 0, -0.0], np.float32)) == 1
    assert kernels.ulps(np.array([-1e-45], np.float32), np.array([1e-45], np.float32)) == 2
    assert kernels.ulps(np.array([1], np.float16), np.array([1 + 2**-9], np.float16)) == 2


def test_every_family_precision_and_layout_is_in_the_matrix() -> None:
    here = {name for name in VARIANTS if not name.startswith(("vector", "amx", "cpu"))}  # which have tests of their own
    assert {family for family, *_ in SERVED} == set(JOB_OF) == here
    for plain in ("simt", "gradient"):
        assert {(precision, layout) for family, precision, layout in SERVED if family == plain} == set(
            product(STORED, LAYOUTS)
        )
    assert len({(family, precision, layout) for family, precision, layout, _ in MATRIX}) == len(SERVED)


WORKED = [
    ("simt", "float32", 4, 1),
    ("mma", "float16", 4, 1),
    ("mma", "tf32x3", 4, 3),
    ("wgmma_shared", "float16", 1, 1),
    ("wgmma_registers", "tf32x3", 4, 3),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "precision", "d", "products"), WORKED)
def test_work_counts_tiles_padding_and_products(
    family: str, precision: str, d: int, products: int, layout: str
) -> None:
    chosen = VARIANTS[family]
    kernel = kernel_of((2, 128, 64, d), precision, layout)
    constants = chosen.default(kernel, LIMITS)
    batch = 8 * constants.tile_batch
    work = chosen.work(kernel, constants, batch)
    assert work.memory_bytes == kernel.bytes(
        batch
    ) - kernel.pattern.weight_count * kernel.item_bytes + chosen.packed_bytes(kernel, constants)
    assert work.multiply_adds * 2 == products * kernel.flops(batch)  # every tile is full
    assert work.blocks == chosen.geometry(kernel, constants, batch).grid
    tiles_out = 128 // constants.tile_out
    times_brought = 1 if getattr(constants, "resident", 0) else tiles_out
    least = kernel.item_bytes * batch * (kernel.pattern.in_features * times_brought + kernel.pattern.out_features)
    assert least <= work.cache_bytes <= least + 8 * kernel.pattern.weight_count * (batch // constants.tile_batch)
    assert work.shared_bytes > (times_brought + tiles_out) * kernel.item_bytes * batch * kernel.pattern.in_features
    ragged = chosen.work(kernel_of((2, 129, 64, d), precision, layout), constants, batch)
    assert ragged.multiply_adds > work.multiply_adds
