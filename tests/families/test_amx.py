"""Products by matrix tiles, emulated where the processor has none: right, within their arrays, beyond finite numbers
as plain float32.
"""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen.build.host import find_host_compiler, source_of
from ksgen.devices.base import Device
from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import Limits, check, family_for
from ksgen.families.amx.chain import exchange_cycles
from ksgen.families.amx.defaults import reads_in_place
from ksgen.families.amx.shape import AmxConstants, AmxTiling
from ksgen.launcher import Launcher
from ksgen.measure.verify import compare, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.emulator import is_installed
from tests.families.test_vector import EPILOGUES, agrees, kernel_of, multiplied
from tests.support.amx_kernels import FAMILY, PATTERNS, PRECISIONS
from tests.support.emulated_tiles import needs_emulation
from tests.support.hasty import compiles_unoptimized
from tests.support.host_launches import agrees_between_fences, planned
from tests.support.host_memory import NOTHING, Array, stay_within_their_arrays
from tests.support.native import chosen_native

__all__ = ["compiles_unoptimized"]  # which pytest finds by its name

BATCHES = (1, 16, 31, 33, 97)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    needs_emulation()
    return chosen_native(monkeypatch)


def constants_of(kernel: KernelSpec, block: int = 32, outputs: int = 32, parts: int = 2) -> AmxConstants:
    """Choose short blocks, rows read in place if possible, and streaming stores in every other block size."""
    steps = AmxTiling(kernel, AmxConstants(block, outputs, 1, 1, 0, 1)).steps
    panels = 0 if reads_in_place(kernel) else 1 + outputs // 32 % 2
    found = AmxConstants(block, outputs, 1, panels, block // 32 % 2, (steps + 1) // 2)
    return replace(found, parts=min(parts, AmxTiling(kernel, found).columns))


# ---- what is right


def matrix() -> Iterator[object]:
    """Every pattern and layout; precisions, epilogues and constants in turn."""
    for number, ((name, shape), layout) in enumerate(product(PATTERNS.items(), LAYOUTS)):
        precision = PRECISIONS[number * 3 // 2 % 4]
        kernel = kernel_of(shape, precision, layout, EPILOGUES[number % len(EPILOGUES)])
        constants = constants_of(kernel, (32, 64, 96)[number % 3], (32, 64)[number // 2 % 2], 1 + number % 3)
        if number % 5 == 0:
            constants = replace(constants, panel=1)
        yield pytest.param(kernel, constants, id=f"{name} {precision} {layout}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "constants"), list(matrix()))
def test_agrees_with_float64(kernel: KernelSpec, constants: AmxConstants) -> None:
    for batch in BATCHES:
        agrees(kernel, constants, batch)


EXCHANGED = (
    "4,32,16,1@k1:8.i.k2", "3,40,33,1@k.i", "l.i@4,20,40,1", "l1:2.i.l2@2,16,64,1@k1:2.i.k2", "j.l.i@3,9,35,4@i.j.k",
    "l.j.i@2,20,33,18@j.i.k", "i2:2.i1:2.i3:4@16,8,1,1",
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "bf16x6"])
@pytest.mark.parametrize("text", EXCHANGED)
def test_exchanged_features(text: str, precision: str) -> None:
    """Pieces of sixteen, of fewer, and single features; two panels that alternate, and one."""
    pattern = Pattern.parse(text)
    for layout, (number, batch) in product(LAYOUTS, enumerate((1, 33, 97))):
        kernel = KernelSpec(pattern, precision, layout, Epilogue(True, "relu", True))
        constants = replace(constants_of(kernel, 32 + 32 * (number % 2), 32), panel=1 + number % 2)
        agrees(kernel, constants, batch)


def test_exchanged_features_are_taken_by_name() -> None:
    limits = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, tiles=("bf16", "f16"))
    for text in EXCHANGED:
        kernel = KernelSpec(Pattern.parse(text), "bfloat16")
        assert FAMILY.supports(kernel, limits)
        natural = KernelSpec(kernel.pattern.natural, "bfloat16")
        work, plain = (FAMILY.work(each, FAMILY.default(each, limits, 512), 512).cycles for each in (kernel, natural))
        assert work > plain
        check(FAMILY, kernel, FAMILY.default(kernel, limits, 64), limits)
    for text, layout, rows, name in (
        ("l.i@4,64,64,1", "bsf", 1568, "vector"),  # few multiply-adds for features that are moved one by one
        ("4,64,64,1", "bsf", 64, "amx"),
        ("l.i@4,64,64,1", "bsl", 64, "amx"),
        ("4,64,256,1@k1:4.i.k2", "bsf", 64, "amx"),
        ("4,64,256,1@k1:4.i.k2", "bsf", 4, "vector"),
    ):
        assert family_for(KernelSpec(Pattern.parse(text), "bfloat16", layout), limits, rows).name == name
    loaded = Pattern.parse("l.i@4,20,40,1")
    assert family_for(KernelSpec(loaded, "bf16x6"), limits, 64).name == "amx", "the precision asks for tiles"
    with pytest.raises(ConstantsError, match="panel=0 must be 1 or 2, except in bsf for 16-bit types"):
        check(FAMILY, KernelSpec(loaded, "bfloat16"), AmxConstants(32, 32, 1, 0, 0, 1))


def test_short_pieces_of_exchanged_features_cost_as_much_as_single_ones() -> None:
    def cycles(store: str) -> float:
        shape = AmxTiling(KernelSpec(Pattern(4, 64, 64, 1, store), "bfloat16"), AmxConstants(64, 64, 1, 1, 0, 1))
        return exchange_cycles(shape, "outputs")

    assert cycles("k.i") == cycles("k1:16.i.k2:4") == 16 * cycles("k1:4.i.k2:16") > cycles("") == 0


def test_the_matrix_holds_all_there_is() -> None:
    rows = [row.values for row in matrix()]  # type: ignore[attr-defined]
    assert {(kernel.precision, kernel.layout) for kernel, _ in rows} == set(product(PRECISIONS, LAYOUTS))
    assert {kernel.epilogue.activation for kernel, _ in rows} == {"none", "relu", "gelu", "gelu_tanh", "silu"}
    for name in ("panel", "streaming"):
        assert {getattr(constants, name) for _, constants in rows} == ({0, 1, 2} if name == "panel" else {0, 1})
    assert {constants.parts > 1 for _, constants in rows} == {True, False}
    assert {AmxTiling(*row).is_interleaved for row in rows} == {True, False}
    assert {AmxTiling(*row).planes_j > 1 for row in rows if row[0].layout == "bsf"} == {True, False}


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
    precision = data.draw(st.sampled_from(PRECISIONS))
    kernel = kernel_of(shape, precision, data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(EPILOGUES)))
    depth = data.draw(number(1, (shape[2] + 31) // 32))
    constants = AmxConstants(
        32 * data.draw(number(1, 3)), 32 * data.draw(number(1, 3)), 1, 1, data.draw(number(0, 1)), depth
    )
    constants = replace(constants, panel=data.draw(number(0 if reads_in_place(kernel) else 1, 2)))
    constants = replace(constants, parts=data.draw(number(1, min(7, AmxTiling(kernel, constants).columns))))
    for batch in data.draw(st.lists(number(1, 150), min_size=2, max_size=4)):
        agrees(kernel, constants, batch)


@pytest.mark.slow
@pytest.mark.second
@pytest.mark.optimized
@settings(
    parent=settings.default,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(st.data())
def test_many_patterns_batches_and_constants(data: st.DataObject) -> None:
    test_any_pattern_batch_and_constants.hypothesis.inner_test(data)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_rows_in_place_give_the_same_bits_as_a_panel_of_them() -> None:
    for shape, batch in (((2, 20, 50, 1), 75), ((1, 33, 64, 1), 64), ((3, 16, 32, 1), 33)):
        problem = make_problem(kernel_of(shape, "bfloat16"), batch)
        constants = constants_of(problem.kernel, 64)
        assert constants.panel == 0
        np.testing.assert_array_equal(multiplied(problem, constants), multiplied(problem, replace(constants, panel=1)))


# ---- float32 by six products of bfloat16


def relative_error(c: int, precision: str) -> float:
    """Frobenius norm of the difference over that of float64's."""
    problem = make_problem(kernel_of((1, 32, c, 1), precision), 64)
    return compare(problem, multiplied(problem, constants_of(problem.kernel, 64)))[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("c", [2, 48, 192, 1024])
def test_six_products_are_more_precise_than_float32s_own(c: int) -> None:
    """Plain kernels add the products in float32 sequentially."""
    problem = make_problem(kernel_of((1, 32, c, 1)), 64)
    x, weights, total = problem.x, problem.weights[0, :, :, 0], np.zeros((64, 32), np.float32)
    for inputs, column in zip(x.T, weights.T, strict=True):
        total = (total.astype(np.float64) + np.outer(inputs, column).astype(np.float64)).astype(np.float32)
    assert relative_error(c, "bf16x6") < max(compare(problem, total)[0], 6e-8)


@pytest.mark.slow
def test_components_are_the_number() -> None:
    """One product by 1 gives back each float32 from 2^-103 on, whatever its digits.

    Below, parts of less than 2^-126 are lost.
    """
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 4096, np.uint64).astype(np.uint32)
    values = bits.view(np.float32)[: 4096 // 32 * 32]
    values = np.where(np.isfinite(values), values, 1).astype(np.float32)
    values[:6] = [np.finfo(np.float32).max, -np.finfo(np.float32).max, 3.395e38, 2.0**-126, 2.0**-149, 0]
    for layout in LAYOUTS:
        kernel = kernel_of((1, 1, 1, 1), "bf16x6", layout)
        problem = replace(make_problem(kernel, len(values)), x=values.reshape((-1, 1) if layout == "bsf" else (1, -1)))
        for one in (np.float32(1), np.float32(-1)):
            problem = replace(problem, weights=np.full((1, 1, 1, 1), one))
            got = multiplied(problem, constants_of(kernel)).reshape(-1) * one
            is_whole = (np.abs(values) >= 2.0**-103) | (values == 0)
            np.testing.assert_array_equal(got[is_whole], values[is_whole])
            assert is_whole.sum() > len(values) // 2
            assert np.abs(got - values)[~is_whole].max() <= 3 * 2.0**-126


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_beyond_finite_numbers_it_is_plain_float32(layout: str, d: int) -> None:
    """Inf times what is a bfloat16, whose other parts are zeros; what a rounding would make Inf; sums that leave
    float32's range.
    """
    kernel = kernel_of((1, 20, 34, d), "bf16x6", layout)
    problem = make_problem(kernel, 40)
    x, weights = problem.x.copy(), problem.weights.copy()
    rows = x if layout == "bsf" else x.T
    weights[0, :5] = 1
    weights[0, 6, 3] = np.inf
    weights[0, 7, :2] = 3.4e38
    weights[0, 8] = 0
    rows[0, 0] = np.inf
    rows[1, d] = np.finfo(np.float32).max
    rows[2, : 5 * d] = 3.4e38
    rows[3, 2 * d], rows[3, 3 * d] = np.inf, -np.inf
    problem = replace(problem, x=x, weights=weights)
    got = multiplied(problem, constants_of(kernel))
    plain = np.zeros((40, 20, d), np.float32)
    with np.errstate(all="ignore"):
        for each in range(34):
            wide = rows.reshape(40, 34, d)[:, each, None, :].astype(np.float64) * weights[0, :, each].astype(np.float64)
            plain = (plain.astype(np.float64) + wide).astype(np.float32)
    plain = plain.reshape(40, -1) if layout == "bsf" else plain.reshape(40, -1).T
    np.testing.assert_array_equal(np.isnan(got), np.isnan(plain))
    np.testing.assert_array_equal(got[np.isinf(plain)], plain[np.isinf(plain)])
    finite = np.isfinite(plain)
    assert finite.sum() > got.size // 2
    assert (~finite).sum() > 60
    np.testing.assert_allclose(got[finite], plain[finite], rtol=1e-4, atol=1e-4)


# ---- nothing outside the arrays is touched

BOTH = Epilogue(True, "none", True)
FENCED = [  # every way to copy, to read in place and to store, and edges of every kind
    ((2, 20, 40, 1), "bfloat16", "bsf", 0),
    ((2, 20, 40, 1), "bf16x6", "bsf", 1),
    ((2, 20, 7, 2), "bf16x6", "bsf", 2),
    ((1, 17, 33, 3), "bfloat16", "bsf", 2),
    ((1, 17, 3, 3), "tf32x3", "bsf", 1),
    ((2, 5, 7, 20), "float16", "bsf", 2),
    ((1, 33, 35, 3), "bfloat16", "bsl", 2),
    ((1, 5, 7, 2), "bf16x6", "bsl", 1),
    ((59, 1, 1, 1), "bf16x6", "bsf", 1),
    ((7, 1, 13, 1), "bfloat16", "bsl", 1),
]


def run_fenced() -> None:
    for shape, precision, layout, panel in FENCED:
        kernel = kernel_of(shape, precision, layout, BOTH)
        agrees_between_fences(kernel, replace(constants_of(kernel), panel=panel), (1, 37, 64))
    print("all within their arrays")


@pytest.mark.slow
def test_no_access_beyond_the_ends_of_arrays() -> None:
    stay_within_their_arrays(__name__, timeout=600)


HEAD = """
#include <stdio.h>
#include <stdlib.h>
#define EMULATED_TILES
"""
MAIN = """
static void* taken(FILE* from, const size_t bytes) {  // an array to its last byte, and nothing behind it
    void* memory = malloc(bytes);
    if (from ? fread(memory, 1, bytes, from) != bytes : !memset(memory, 0xFF, bytes)) exit(3);
    return memory;
}
int main() {
    FILE* from = fopen("given", "rb");
    void *x = taken(from, SIZE_X), *w = taken(from, SIZE_W), *bias = taken(from, SIZE_BIAS), *residual = taken(from,
        SIZE_Y);
    void *packed = taken(0, SIZE_PACKED), *workspace = taken(0, SIZE_WORKSPACE), *y = taken(0, SIZE_Y);
    const int64_t packs[] = {(int64_t)w, (int64_t)packed};
    const int64_t multiplies[] = {
        (int64_t)x, (int64_t)packed, (int64_t)y, (int64_t)workspace, (int64_t)bias, (int64_t)residual, BATCH_GIVEN};
    PACK(packs, 0, PACK_GROUPS, PACK_GROUPS);
    MULTIPLY(multiplies, 0, GROUPS_GIVEN, GROUPS_GIVEN);
    FILE* to = fopen("made", "wb");
    fwrite(y, 1, SIZE_Y, to);
    fclose(to), fclose(from);
    free(x), free(w), free(bias), free(residual), free(packed), free(workspace), free(y);
}
"""


def sanitized(
    kernel: KernelSpec, constants: AmxConstants, batch: int, folder: Path, change: tuple[str, str] = ("", "")
) -> tuple[Array, str]:
    """What a program gives whose arrays end where its memory does, and what AddressSanitizer and
    UndefinedBehaviorSanitizer say of it.
    """
    problem = make_problem(kernel, batch)
    assert problem.bias is not None
    assert problem.residual is not None
    source = render(kernel, constants, family="amx", dialect="opencl")
    geometry, groups = FAMILY.geometry(kernel, constants, batch), 3
    sizes = {
        "SIZE_X": problem.x.nbytes, "SIZE_W": problem.weights.nbytes, "SIZE_BIAS": problem.bias.nbytes,
        "SIZE_Y": problem.residual.nbytes,
        "SIZE_PACKED": FAMILY.packed_bytes(kernel, constants), "SIZE_WORKSPACE": geometry.group_bytes * groups,
        "BATCH_GIVEN": batch,
        "PACK_GROUPS": FAMILY.pack_geometry(kernel, constants).grid, "GROUPS_GIVEN": groups,
        "MULTIPLY": f"{source.entry}__walk", "PACK": f"{source.second_entry}__walk",
    }  # fmt: skip
    text = source_of(source.text.replace(*change) if change[0] else source.text, source.entries)
    (folder / "k.cpp").write_text(
        HEAD + text + "".join(f"#define {name} {value}\n" for name, value in sizes.items()) + MAIN
    )
    (folder / "given").write_bytes(
        b"".join(each.tobytes() for each in (problem.x, problem.weights, problem.bias, problem.residual))
    )
    options = (
        "-std=gnu++17",
        "-O1",
        "-march=native",
        "-w",
        "-fno-strict-aliasing",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    )
    subprocess.run(
        [*find_host_compiler().command, *options, "k.cpp", "-o", "k"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    done = subprocess.run(
        ["./k"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LSAN_OPTIONS": "detect_leaks=0"},
    )
    made = folder / "made"
    got = np.frombuffer(made.read_bytes(), problem.x.dtype).reshape(problem.y_shape) if made.exists() else np.zeros(0)
    return got, done.stderr


SANITIZED = [
    ((1, 17, 33, 2), "bf16x6", "bsf"),
    ((2, 20, 40, 1), "bfloat16", "bsf"),
    ((1, 17, 33, 3), "float16", "bsf"),
    ((1, 18, 5, 20), "bf16x6", "bsf"),
    ((2, 20, 33, 2), "bfloat16", "bsl"),
    ((1, 9, 35, 1), "tf32x3", "bsl"),
]


@pytest.mark.parametrize(
    ("shape", "precision", "layout"),
    [SANITIZED[0], *(pytest.param(*case, marks=pytest.mark.second) for case in SANITIZED[1:])],
)
def test_sanitizers_find_nothing(shape: tuple[int, ...], precision: str, layout: str, tmp_path: Path) -> None:
    if not is_installed("address"):
        pytest.skip("needs the libraries of the compiler's sanitizers")
    kernel = kernel_of(shape, precision, layout, BOTH)
    got, said = sanitized(kernel, constants_of(kernel, 64), 37, tmp_path)
    assert said == ""
    error, _ = compare(make_problem(kernel, 37), got)
    assert error <= tolerance(precision, shape[2])


@pytest.mark.slow
def test_sanitizers_would_find_it(tmp_path: Path) -> None:
    if not is_installed("address"):
        pytest.skip("needs the libraries of the compiler's sanitizers")
    kernel = kernel_of((2, 20, 40, 1), "bfloat16", "bsf", BOTH)
    _, said = sanitized(
        kernel,
        constants_of(kernel, 64),
        37,
        tmp_path,
        ("if (some >= LANES) return vload16(0, at);", "return vload16(0, at);"),
    )
    assert "ERROR: AddressSanitizer" in said


# ---- who is served

SHAPE = (2, 20, 34, 2)


def called(precision: str | None = None) -> tuple[Array, float]:
    problem = make_problem(kernel_of(SHAPE), 40)
    got = np.asarray(Launcher(*SHAPE)(problem.x, problem.weights, precision=precision))
    return got, compare(problem, got)[0]


@pytest.mark.slow
def test_launchers_take_it_where_it_is_asked_for(with_tiles: Device) -> None:
    plain, _ = called()
    problem = make_problem(kernel_of(SHAPE), 40)
    for precision in ("bf16x6", "tf32x3"):
        assert "by amx" in str(Launcher(*SHAPE).prepare(problem.x, problem.weights, precision=precision).plan)
        got, error = called(precision)
        assert error <= tolerance(precision, 34)
        assert (got != plain).any()
    assert "by vector" in str(Launcher(*SHAPE).prepare(problem.x, problem.weights).plan)


@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize("precision", ["bf16x6", "tf32x3"])
def test_without_tiles_it_is_plain_float32(precision: str) -> None:
    np.testing.assert_array_equal(called(precision)[0], called()[0])


@pytest.mark.slow
def test_packed_weights_do_not_depend_on_constants(device: Device) -> None:
    """A chain's launch can thus take weights that were packed for products alone."""
    kernel = kernel_of((2, 17, 70, 3), "bfloat16")
    problem, found = make_problem(kernel, 5), []
    for constants in (constants_of(kernel), replace(constants_of(kernel, 96, 64, 1), depth=1)):
        plan = planned(device, kernel, constants, 5)
        place = np.zeros(plan.packed_bytes, np.uint8)
        plan.pack(device.shared(problem.weights.ctypes.data), None, into=device.shared(place.ctypes.data))
        device.synchronize(None)
        found.append((plan.packing, place.tobytes()))
    assert found[0] == found[1]


def test_pack_writes_every_tile(device: Device) -> None:
    """Zeros beyond the edges, whatever lay there."""
    kernel = kernel_of((2, 17, 33, 3), "bfloat16")
    plan = planned(device, kernel, constants_of(kernel), 5)
    packed, problem = np.full(plan.packed_bytes, NOTHING, np.uint8), make_problem(kernel, 5)
    weights = np.ones_like(problem.weights)
    plan.pack(device.shared(weights.ctypes.data), None, into=device.shared(packed.ctypes.data))
    found = packed.view(np.uint16)
    assert set(found.tolist()) == {0, 0x3F80}
    assert (found == 0x3F80).sum() == weights.size
    assert packed.nbytes == 2 * 3 * 2 * 2 * 1024  # two tiles of outputs, two of inputs
