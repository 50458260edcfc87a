"""Gradients by matrix tiles, emulated where the processor has none: right, in bounds, always the same bits."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen import reference
from ksgen.devices.base import Device
from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, Limits, check, family_for, family_named
from ksgen.families.cpu_gradient.family import CpuGradient
from ksgen.families.cpu_gradient.tiles import AmxGradientConstants, AmxGradientTiling
from ksgen.families.cpu_gradient.vectors import VectorGradientConstants
from ksgen.launch.choice import check_fit, choice_by_name
from ksgen.launcher import Launcher
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec
from tests.families.test_cpu_gradient_vectors import (
    agrees,
    agrees_between_fences,
    arrays_of,
    gradient,
    kernel_of,
    sums_outputs,
)
from tests.support.amx_kernels import CPU, PATTERNS, PRECISIONS
from tests.support.emulated_tiles import needs_emulation
from tests.support.hasty import compiles_unoptimized
from tests.support.host_memory import Array, stay_within_their_arrays
from tests.support.native import chosen_native

__all__ = ["compiles_unoptimized"]  # which pytest finds by its name

FAMILY = CpuGradient(AmxGradientConstants)
BATCHES = (1, 31, 64, 131)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    needs_emulation()
    return chosen_native(monkeypatch)


def constants_of(kernel: KernelSpec, block: int = 32, outputs: int = 32, parts: int = 3) -> AmxGradientConstants:
    """Short blocks, some parts, and two pieces where they may be."""
    constants = AmxGradientConstants(block, outputs, parts, 1)
    return replace(constants, pieces=min(2, AmxGradientTiling(kernel, constants).units))


# ---- what is right


@pytest.mark.parametrize("precision", ["bfloat16", "tf32x3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bias_takes_the_sum_of_the_outputs(precision: str, layout: str) -> None:
    kernel = kernel_of((2, 37, 20, 2), precision, layout)
    sums_outputs(kernel, constants_of(kernel), 131)


def matrix() -> Iterator[object]:
    """Every pattern and layout; precisions and constants in turn."""
    for number, ((name, shape), layout) in enumerate(product(PATTERNS.items(), LAYOUTS)):
        kernel = kernel_of(shape, PRECISIONS[number * 3 // 2 % 4], layout)
        constants = constants_of(kernel, (32, 64, 96)[number % 3], (32, 64)[number // 2 % 2], 1 + number % 3)
        yield pytest.param(kernel, constants, id=f"{name} {kernel.precision} {layout}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "constants"), list(matrix()))
def test_agrees_with_float64(kernel: KernelSpec, constants: AmxGradientConstants) -> None:
    for batch in BATCHES:
        agrees(kernel, constants, batch)


def test_the_matrix_holds_all_there_is() -> None:
    rows = [row.values for row in matrix()]  # type: ignore[attr-defined]
    assert {(kernel.precision, kernel.layout) for kernel, _ in rows} == set(product(PRECISIONS, LAYOUTS))
    assert {AmxGradientTiling(*row).is_interleaved for row in rows} == {True, False}
    assert {AmxGradientTiling(*row).planes_j > 1 for row in rows if row[0].layout == "bsf"} == {True, False}
    assert {AmxGradientTiling(*row).groups > 1 for row in rows} == {True, False}
    assert {constants.pieces for _, constants in rows} == {1, 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["bfloat16", "bf16x6"])
@pytest.mark.parametrize("text", ["l.i@4,20,40,1", "l1:2.i.l2@2,16,64,1", "j.l.i@3,9,35,4", "l.j.i@2,20,33,18"])
def test_exchanged_inputs(text: str, precision: str, layout: str) -> None:
    """Single inputs, pieces of sixteen, interleaved j, and j apart."""
    kernel = KernelSpec(Pattern.parse(text), precision, layout, job="gradient")
    for batch in (1, 37):
        agrees(kernel, constants_of(kernel), batch)


def test_exchanged_inputs_cost_the_cycles_of_their_pieces() -> None:
    texts = ("l1:2.i.l2@2,64,32,1", "l.i@2,64,32,1")  # pieces of sixteen inputs, and single ones
    for layout, is_free in (("bsl", True), ("bsf", False)):
        kernels = [KernelSpec(Pattern.parse(text), "bfloat16", layout, job="gradient") for text in texts]
        found = [FAMILY.work(each, constants_of(each), 512).cycles for each in kernels]
        assert (found[0] == found[1]) if is_free else (found[0] < found[1])


@pytest.mark.slow
@pytest.mark.optimized
@settings(
    max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.data())
def test_any_pattern_batch_and_constants(data: st.DataObject) -> None:
    number = st.integers
    shape = data.draw(
        st.tuples(number(1, 3), number(1, 70), number(1, 70), st.sampled_from([1, 1, 2, 3, 4, 5, 8, 16, 17]))
    )
    kernel = kernel_of(shape, data.draw(st.sampled_from(PRECISIONS)), data.draw(st.sampled_from(LAYOUTS)))
    constants = AmxGradientConstants(
        32 * data.draw(number(1, 3)), 32 * data.draw(number(1, 3)), data.draw(number(1, 5)), 1
    )
    constants = replace(constants, pieces=data.draw(number(1, min(9, AmxGradientTiling(kernel, constants).units))))
    for batch in data.draw(st.lists(number(1, 200), min_size=2, max_size=4)):
        agrees(kernel, constants, batch)


@pytest.mark.slow
@pytest.mark.second
@pytest.mark.optimized
@settings(
    max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.data())
def test_many_patterns_batches_and_constants(data: st.DataObject) -> None:
    test_any_pattern_batch_and_constants.hypothesis.inner_test(data)  # type: ignore[attr-defined]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 48, 192, 1), (1, 24, 16, 3), (1, 40, 16, 24)])
def test_defaults_for_small_batches(shape: tuple[int, ...], layout: str) -> None:
    for precision, batch in (("bfloat16", 1), ("bf16x6", 5)):
        kernel = kernel_of(shape, precision, layout)
        agrees(kernel, FAMILY.default(kernel, CPU, batch), batch)


def test_a_kernel_specialised_to_one_batch() -> None:
    kernel = kernel_of((2, 9, 5, 3), "bfloat16", batch=70)
    agrees(kernel, constants_of(kernel), 70)


def test_long_sums_err_less_than_float32s_own() -> None:
    """Six products are compared with sequential multiply-adds in float32."""
    kernel, batch = kernel_of((1, 16, 16, 1), "bf16x6"), 1024
    x, grad_y = arrays_of(kernel, batch)
    truth = reference.gradient(kernel.pattern, x, grad_y, "bsf")
    plain = np.zeros((16, 16), np.float32)
    for entry in range(batch):
        plain = (plain.astype(np.float64) + np.outer(grad_y[entry].astype(np.float64), x[entry])).astype(np.float32)
    got = gradient(kernel, constants_of(kernel, 512), x, grad_y).astype(np.float64)
    assert np.linalg.norm(got - truth) < np.linalg.norm(plain[None, :, :, None] - truth)


# ---- the same bits, and each weight's own


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_beyond_bfloat16s_parts_are_plain_float32s(layout: str) -> None:
    """The largest float32, which bfloat16 rounds to Inf; sums that leave float32's range and come back."""
    kernel = kernel_of((1, 2, 3, 2), "bf16x6", layout)
    x, grad_y = arrays_of(kernel, 40)
    rows_x, rows_y = (x, grad_y) if layout == "bsf" else (x.T, grad_y.T)
    rows_x[:, 0], rows_y[:, 0] = 0, 1
    rows_x[3, 0], rows_x[5, 0] = np.finfo(np.float32).max, -1e38
    got = gradient(kernel, constants_of(kernel), x, grad_y)
    assert got[0, 0, 0, 0] == np.float32(np.finfo(np.float32).max) - np.float32(1e38)


@pytest.mark.parametrize("family", ["amx", "amx_gradient"])
def test_a_thread_gets_its_tiles_back(family: str) -> None:
    kernel = replace(kernel_of((2, 20, 7, 2), "bfloat16"), job="multiply" if family == "amx" else "gradient")
    text = render(kernel, family_named(family).default(kernel, CPU), family=family, dialect="opencl").text
    begun, _, rest = text.partition("const TileState before = tile_begin(bf16);")
    assert rest.count("tile_end(bf16, before);") == 1
    assert "return" not in rest.partition("tile_end(")[0]
    assert "tile_" not in begun.partition("{")[2]


# ---- nothing outside the arrays is touched

FENCED = [  # every way to copy, and edges of every kind
    ((2, 20, 40, 1), "bfloat16", "bsf"),
    ((2, 20, 7, 2), "bf16x6", "bsf"),
    ((1, 17, 33, 3), "bfloat16", "bsf"),
    ((2, 5, 7, 20), "float16", "bsf"),
    ((1, 33, 35, 3), "bfloat16", "bsl"),
    ((1, 5, 7, 2), "bf16x6", "bsl"),
    ((59, 1, 1, 1), "bf16x6", "bsf"),
    ((7, 1, 13, 1), "bfloat16", "bsl"),
]


def run_fenced() -> None:
    for shape, precision, layout in FENCED:
        kernel = kernel_of(shape, precision, layout)
        agrees_between_fences(kernel, constants_of(kernel))
    print("all within their arrays")


@pytest.mark.second
@pytest.mark.slow
def test_no_access_beyond_the_ends_of_arrays() -> None:
    stay_within_their_arrays(__name__)


# ---- who is served, and by which constants


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16x6", "tf32x3"])
def test_launchers_take_it_where_it_is_asked_for(precision: str, with_tiles: Device) -> None:
    kernel = kernel_of((2, 20, 34, 2), precision)
    ks = Launcher(*kernel.pattern.shape)
    assert "vector registers full of sums: processors), block=" in ks.explain(300, job="gradient", precision=precision)
    assert "vector registers full of sums: processors), along=" in ks.explain(300, job="gradient")
    x, grad_y = arrays_of(kernel, 300)

    def error(got: Array) -> float:
        truth = reference.gradient(kernel.pattern, x, grad_y, "bsf")
        return float(np.linalg.norm(got - truth) / np.linalg.norm(truth))

    by_tiles, plain = ks.gradient(x, grad_y, precision=precision), ks.gradient(x, grad_y)
    assert error(by_tiles) <= tolerance(precision, 300)
    assert (by_tiles != plain).any()


def test_which_processors_it_serves() -> None:
    kernel = kernel_of((2, 19, 15, 3), "bf16x6")

    def kind(limits: Limits = CPU, **changes: str) -> type:
        asked = replace(kernel, **changes)
        family = family_for(asked, limits)
        assert family.name == "cpu_gradient"
        return type(family.default(asked, limits))

    assert kind() is AmxGradientConstants
    assert kind(replace(CPU, tiles=())) is kind(replace(CPU, tiles=("f16",))) is VectorGradientConstants
    assert kind(precision="bfloat16") is AmxGradientConstants
    assert kind(precision="float16") is VectorGradientConstants, "not measured yet"
    family, bfloat16 = FAMILIES["cpu_gradient"], replace(kernel, precision="bfloat16")
    guesses = [FAMILY.default(bfloat16, CPU, 300), family_named("vector_gradient").default(bfloat16, CPU, 300)]
    assert family.default(bfloat16, CPU, 300) == guesses[0]
    assert family.defaults(bfloat16, CPU, 300) == guesses  # a search and a benchmark look at both
    for each, limits in ((kernel, CPU), (bfloat16, replace(CPU, tiles=()))):
        assert family.defaults(each, limits, 300) == [family.default(each, limits, 300)]
    assert type(choice_by_name("amx_gradient", bfloat16, 300, CPU).constants) is AmxGradientConstants
    with pytest.raises(ConstantsError, match="not supported by amx_gradient on this device"):
        choice_by_name("amx_gradient", bfloat16, 300, replace(CPU, tiles=()))
    by_tiles = FAMILY.default(bfloat16, CPU, 300)
    check_fit("cpu_gradient", by_tiles, bfloat16, CPU)
    with pytest.raises(
        ConstantsError,
        match=r"cpu_gradient does not run on this device \(.* by matrix tiles: processors that have them; .*\): block=",
    ):
        check_fit("cpu_gradient", by_tiles, bfloat16, replace(CPU, tiles=()))
    space = [type(each) for each in family.space(bfloat16, CPU)]
    assert {*space} == {VectorGradientConstants, AmxGradientConstants}
    assert {type(each) for each in FAMILY.space(bfloat16, CPU)} == {AmxGradientConstants}
    assert family_for(replace(kernel, job="multiply"), CPU).name == "amx"


GOOD = AmxGradientConstants(64, 32, 3, 2)
BAD = {
    "block=40 must be a multiple of 32; try 32 or 64": replace(GOOD, block=40),
    "outputs=33 must be a multiple of 32; try 32 or 64": replace(GOOD, outputs=33),
    "every constant is at least 1; got parts=0; try parts=1": replace(GOOD, parts=0),
    "pieces=7 must be at most the units of columns that work groups take = 2; try 2": replace(GOOD, pieces=7),
}


@pytest.mark.parametrize("says", BAD)
def test_rules(says: str) -> None:
    kernel = kernel_of((2, 20, 7, 2), "bfloat16")
    check(FAMILY, kernel, GOOD)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, BAD[says])


def test_rules_of_the_job_and_the_precision() -> None:
    kernel = kernel_of((2, 20, 7, 2), "bfloat16")
    with pytest.raises(ConstantsError, match="job=multiply must be gradient"):
        check(FAMILY, replace(kernel, job="multiply"), GOOD)
    with pytest.raises(ConstantsError, match="precision=float64 must be one that matrix tiles multiply"):
        check(FAMILY, replace(kernel, precision="float64"), GOOD)


@pytest.mark.parametrize("precision", ["bfloat16", "bf16x6"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [*PATTERNS.values(), (6, 64, 64, 1), (1, 768, 192, 3), (512, 2, 2, 1), (1, 4096, 4096, 1)]
)
def test_defaults_keep_the_rules(shape: tuple[int, ...], layout: str, precision: str) -> None:
    kernel = kernel_of(shape, precision, layout)
    for cores, batch in product((1, 2, 64), (None, 1, 100, 25088)):
        limits = replace(CPU, multiprocessors=cores)
        constants = FAMILY.default(kernel, limits, batch)
        check(FAMILY, kernel, constants, limits)
        geometry = FAMILY.geometry(kernel, constants, batch or 1)
        assert (
            geometry.workspace_bytes
            == AmxGradientTiling(kernel, constants).parts(batch or 1) * AmxGradientTiling(kernel, constants).part_bytes
        )
        if batch == 25088 and kernel.pattern.weight_count > 10**4:
            assert geometry.grid >= cores  # every core has work
        assert FAMILY.work(kernel, constants, batch or 1).multiply_adds >= kernel.flops(batch or 1) / 2


def test_the_space_keeps_the_rules() -> None:
    for shape, layout in product(((2, 20, 7, 2), (1, 1, 1, 1), (2, 80, 5, 3)), LAYOUTS):
        kernel = kernel_of(shape, "bf16x6", layout)
        found = list(FAMILY.space(kernel, CPU))
        assert len(set(found)) == len(found) > 2
        for constants in found:
            check(FAMILY, kernel, constants, CPU)
