"""The functions over PTX do what the manual says, in the emulator; and their texts are what nvcc takes."""

import re

import numpy as np
import pytest

from ksgen.build.build import build
from ksgen.families.ptx import WgmmaInstruction
from tests.emulator import is_installed, run_cuda
from tests.ptx.cases import TYPES, all_cases, exact, mma_text, normal, words
from tests.support.program import needs_compiler

needs_emulator = pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")
CASES = {case.name: case for case in all_cases()}
ASYNCHRONOUS = ["ring", "arrivals", "grids", "cluster", "panels", "batched", "box swizzle=128"]
ASYNCHRONOUS += ["wgmma bf16 A 128 along m B 128 along n 128"]


@pytest.mark.exhaustive
@needs_emulator
@pytest.mark.parametrize("name", list(CASES))
def test_case_comes_out_right(name: str) -> None:
    CASES[name].emulate()


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", ["address", "race"])
@pytest.mark.parametrize(
    "name",
    [
        *ASYNCHRONOUS,
        "matrices load=False store=True",
        "wgmma tf32, A in registers",
        "wgmma bf16, A in registers, 2 at once",
    ],
)
def test_sanitizers_find_nothing(name: str, sanitize: str) -> None:
    if not is_installed(sanitize):
        pytest.skip(f"g++ cannot link sanitize={sanitize!r}")
    CASES[name].emulate(sanitize)


@needs_emulator
@pytest.mark.parametrize("order", ["reverse", 1, 2])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_any_order_of_threads_and_of_the_engine_will_do(name: str, order: str | int) -> None:
    CASES[name].emulate(order=order)


@pytest.mark.exhaustive
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", list(CASES))
def test_nvcc_takes_the_text(name: str) -> None:
    text, target = CASES[name].text, CASES[name].target
    found = re.search(r'extern "C" __global__[^{;]*?void (\w+)\(', text)
    assert found
    assert build(text, found[1], target).data


def test_wgmma_is_spelled_with_every_operand_in_its_place() -> None:
    spelled = WgmmaInstruction("tf32", 8, a_in_registers=True)
    assert (spelled.name, spelled.k, spelled.sums, spelled.template) == ("wgmma_rs_tf32", 8, 4, "")
    assert spelled.instruction == "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32"
    assert spelled.operands == "{%0, %1, %2, %3}, {%6, %7, %8, %9}, %5, adds, 1, 1"
    both = WgmmaInstruction("f16", 8, a_in_registers=False)
    assert (both.adds_operand, both.operands) == ("%4", "{%0, %1, %2, %3}, %6, %5, adds, 1, 1, %7, %8")
    in_bytes = WgmmaInstruction("e4m3", 8, a_in_registers=False)
    assert (in_bytes.k, in_bytes.along_inputs) == (32, "wgmma_ss_e4m3")
    assert in_bytes.instruction == "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
    assert in_bytes.operands == "{%0, %1, %2, %3}, %6, %5, adds, 1, 1"  # which no bits transpose
    assert both.inputs.split()[:3] == ['"r"(static_cast<int>(adds)),', '"l"(b),', '"l"(a),']


# ---- numerics


def cut_off_sum(so_far: float, a: list[float], b: list[float], step: int, kept: int) -> float:
    """The rule of the tensor cores' sums for normal operands, in exact integers."""

    def exponent(value: float) -> int:
        return int(np.frexp(value)[1]) - 1

    for first in range(0, len(a), step):
        pairs = [
            pair for pair in zip(a[first : first + step], b[first : first + step], strict=True) if pair[0] and pair[1]
        ]
        last = max([exponent(x) + exponent(w) for x, w in pairs] + ([exponent(so_far)] if so_far else [])) - kept
        total = sum(int(np.trunc(np.ldexp(term, -last))) for term in (so_far, *(x * w for x, w in pairs)))
        drop = max(0, abs(total).bit_length() - 24)
        so_far = float(np.ldexp(float(np.sign(total) * (abs(total) >> drop << drop)), last))
    return so_far


@needs_emulator
@pytest.mark.parametrize(("target", "bytes_a_step", "kept"), [("sm_80", 16, 24), ("sm_90a", 32, 25)])
@pytest.mark.parametrize("operand", list(TYPES))
def test_sums_are_cut_off_or_rounded(operand: str, target: str, bytes_a_step: int, kept: int) -> None:
    depth = 8 if operand == "tf32" else 16
    rng = np.random.default_rng(3)
    a, b = normal((16, depth), operand), normal((8, depth), operand, 1)
    start = (rng.standard_normal((16, 8)) * 2.0 ** rng.integers(-12, 12, (16, 8))).astype(np.float32)
    cut, rounded = start.copy(), start.copy()
    run_cuda(mma_text(operand), "product", 1, 32, 0, [words(a), words(b), cut], target=target)
    run_cuda(
        mma_text(operand), "product", 1, 32, 0, [words(a), words(b), rounded], target=target, accumulation="rounded"
    )
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    rule = (bytes_a_step // a.itemsize, kept)
    expected = [
        [cut_off_sum(float(start[m, n]), list(wide_a[m]), list(wide_b[n]), *rule) for n in range(8)] for m in range(16)
    ]
    np.testing.assert_array_equal(cut, np.array(expected, np.float32))
    np.testing.assert_array_equal(rounded, (start.astype(np.float64) + wide_a @ wide_b.T).astype(np.float32))
    assert (cut != rounded).any()


@needs_emulator
def test_a_text_is_run_as_the_target_that_it_defines() -> None:
    a, b = normal((16, 16), "f16"), normal((8, 16), "f16", 1)
    head = "#define __CUDA_ARCH__ 800\n"

    def product(text: str, target: str = "") -> list[float]:
        y = np.random.default_rng(2).standard_normal((16, 8), np.float32)
        run_cuda(text, "product", 1, 32, 0, [words(a), words(b), y], target=target)
        return list(y.reshape(-1))

    of_ampere, of_hopper = (product(mma_text("f16"), target) for target in ("sm_80", "sm_90a"))
    assert of_ampere != of_hopper
    assert product(head + mma_text("f16")) == of_ampere
    assert product(mma_text("f16")) == of_hopper
    assert product(head + mma_text("f16"), "sm_90a") == of_hopper


@needs_emulator
def test_tf32_operands_lose_their_lower_bits() -> None:
    a, b = (np.random.default_rng(seed).standard_normal((rows, 8), np.float32) for seed, rows in ((0, 16), (1, 8)))
    y = np.zeros((16, 8), np.float32)
    run_cuda(mma_text("tf32"), "product", 1, 32, 0, [words(a), words(b), y])
    cut = [(words(each) & 0xFFFFE000).view(np.float32) for each in (a, b)]
    np.testing.assert_allclose(y, exact(*cut), rtol=0, atol=1e-5)
    assert np.abs(y - exact(a, b)).max() > 1e-4


@needs_emulator
@pytest.mark.parametrize("accumulation", ["cut off", "rounded"])
def test_sums_beyond_all_floats_are_infinite(accumulation: str) -> None:
    a, b = np.full((16, 8), 2.0**124, np.float32), np.full((8, 8), 2.0, np.float32)  # 8 products of 2^125 make 2^128
    a[1], a[2, 0] = -(2.0**124), 0
    y = np.zeros((16, 8), np.float32)
    run_cuda(mma_text("tf32"), "product", 1, 32, 0, [words(a), words(b), y], accumulation=accumulation)
    assert (y[0] == np.inf).all()
    assert (y[1] == -np.inf).all()
    assert (y[2] == 7 * 2.0**125).all()


@needs_emulator
def test_infinities_and_nans_go_through() -> None:
    a, b = normal((16, 16), "f16"), normal((8, 16), "f16", 1)
    a[3, 5], a[4, 0] = np.inf, np.nan
    y = np.zeros((16, 8), np.float32)
    run_cuda(mma_text("f16"), "product", 1, 32, 0, [words(a), words(b), y])
    np.testing.assert_array_equal(y[3], np.inf * np.sign(b[:, 5].astype(np.float32)))
    assert np.isnan(y[4]).all()
    assert np.isfinite(np.delete(y, [3, 4], 0)).all()
