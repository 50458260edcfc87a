"""What is special to the tensor-core family. What holds of every family's kernels is in test_families.py."""

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest

from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, check, cuda_limits, family_for, family_named
from ksgen.families.mma.defaults import MOST_REGISTERS
from ksgen.families.mma.shape import MmaConstants, MmaTiling
from ksgen.measure.verify import make_problem
from ksgen.pattern import Pattern
from ksgen.reference import wide_type
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.support import sass
from tests.support.counting import compared, count_kernel
from tests.support.kernels import check as check_result
from tests.support.kernels import in_emulator, multiply, source_of
from tests.support.mma_kernels import kernel

MMA = family_named("mma")
GPU = cuda_limits("sm_90a")
PRECISIONS = ("float16", "bfloat16", "tf32", "tf32x3", "fp16x3", "c64_tf32x3")
GOOD = MmaConstants(64, 64, 32, 4, 2, 2, 3, 0, 1)


# ---- rules


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile_d": 2}, "tile_d=2 must be d=4, or less and a multiple of 16 bytes; try 4$"),
        ({"tile_out": 40}, r"tile_out=40 must be a multiple of 16 \* warps_out = 32; try 32 or 64$"),
        ({"tile_batch": 24}, r"tile_batch=24 must be a multiple of 8 \* warps_batch .* = 16; try 16 or 32$"),
        (
            {"tile_in": 8},
            "tile_in=8 must be a multiple of the period of the lanes' order of inputs = 16; try 16$",
        ),
        ({"stages": 1}, "stages=1 must be at least 2; try 2$"),
        ({"min_blocks": 13}, "min_blocks blocks have at most 1536 threads: 1664; got min_blocks=13; try min_blocks=2$"),
        (
            {"min_blocks": 4},
            r"the registers of min_blocks blocks are at most 65536: \d+; got min_blocks=4; try min_blocks=2$",
        ),
        ({"promote": 48, "tile_batch": 32}, "promote=48 must be 0, or a multiple of tile_in=32; try 32 or 64$"),
        (
            {"warps_batch": 0},
            "every constant but promote and resident is at least 1; got warps_batch=0; try warps_batch=2$",
        ),
        (
            {"tile_batch": 256, "tile_out": 256},
            "a thread has at most 192 sums: 2048; got tile_batch=256; try tile_batch=16$",
        ),
        (
            {"tile_batch": 512, "tile_out": 64, "warps_batch": 32, "warps_out": 2},
            "a block has at most 1024 threads: 2048; got warps_batch=32; try warps_batch=16$",
        ),
    ],
)
def test_each_rule_has_two_sides(changes: dict[str, int], says: str) -> None:
    check(MMA, kernel(), GOOD, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(MMA, kernel(), replace(GOOD, **changes), GPU)


def test_rules_of_a_layout_and_a_precision() -> None:
    with pytest.raises(ConstantsError, match="tile_d=4 must be 1 in bsl; try 1"):
        check(MMA, kernel(layout="bsl"), GOOD)
    with pytest.raises(ConstantsError, match=r"in bsl of as many 16-byte chunks\) = 128; try 128"):
        check(MMA, kernel(layout="bsl"), replace(GOOD, tile_d=1))
    check(MMA, kernel(layout="bsl"), replace(GOOD, tile_d=1, tile_batch=128))
    with pytest.raises(
        ConstantsError,
        match="precision=float32 must be one that tensor cores multiply: float16, bfloat16, tf32, tf32x3, fp16x3, "
        "c64_tf32x3",
    ):
        check(MMA, kernel("float32"), GOOD)
    with pytest.raises(ConstantsError, match=r"needs .* bytes of shared memory"):
        check(MMA, kernel(), replace(GOOD, stages=9), GPU)


def test_warps_along_j_have_a_chunk_of_them_each() -> None:
    spread = replace(GOOD, tile_d=16, warps_d=2, tile_batch=32, tile_out=32)
    check(MMA, kernel(pattern=Pattern(1, 64, 64, 16)), spread, GPU)
    for wrong in (replace(spread, warps_d=4), replace(spread, tile_d=8), replace(GOOD, warps_d=2)):
        with pytest.raises(ConstantsError, match=r"warps_d=\d must be 1, or each warp has 16 bytes of the tile's j"):
            check(MMA, kernel(pattern=Pattern(1, 64, 64, wrong.tile_d)), wrong, GPU)
    with pytest.raises(ConstantsError, match=r"tile_d=32 must be at most 16 for each of warps_d"):
        check(MMA, kernel(pattern=Pattern(1, 64, 64, 32)), replace(spread, tile_d=32, warps_d=1), GPU)
    with pytest.raises(ConstantsError, match="warps_d=2 must be 1, or"):
        check(MMA, kernel(layout="bsl"), replace(GOOD, tile_d=1, tile_batch=128, warps_d=2))


def test_x_is_resident_only_for_several_tiles_of_outputs_in_bsf() -> None:
    check(MMA, kernel(pattern=Pattern(1, 128, 64, 4)), replace(GOOD, resident=1), GPU)
    says = "resident={} must be 0, or 1 in bsf with tile_out=64 less than b={}; try "
    for pattern, layout, tile_d, tile_batch, wrong in (
        ((1, 64, 64, 4), "bsf", 4, 64, 1),
        ((1, 128, 64, 4), "bsl", 1, 128, 1),
        ((1, 128, 64, 4), "bsf", 4, 64, 2),
    ):
        with pytest.raises(ConstantsError, match=says.format(wrong, pattern[1])):
            check(
                MMA,
                kernel(layout=layout, pattern=Pattern(*pattern)),
                replace(GOOD, tile_d=tile_d, tile_batch=tile_batch, resident=wrong),
            )


def test_constants_are_read_and_refused_by_name() -> None:
    values = asdict(GOOD)
    assert MMA.constants(values) == GOOD
    for newer in ("warps_d", "resident"):  # than some wisdom
        assert MMA.constants({name: value for name, value in values.items() if name != newer}) == GOOD
    with pytest.raises(ConstantsError, match=r"mma constants are tile_batch, .*; got tile"):
        MMA.constants({"tile": 1})
    with pytest.raises(ConstantsError, match="mma constant tile_batch='64' must be an integer"):
        MMA.constants({**values, "tile_batch": "64"})


def test_what_is_read_of_a_residual_has_registers_of_its_own() -> None:
    """All chunks of a run are read before the first is needed. They spilled on sm_80 next to 128 sums."""
    limits, many = cuda_limits("sm_80"), MmaConstants(128, 256, 32, 1, 2, 4, 4, 0, 1)
    plain, added = (
        KernelSpec(Pattern(1, 1536, 384, 1), "float16", "bsf", Epilogue(residual=has)) for has in (False, True)
    )
    assert MmaTiling(plain, many).registers <= MOST_REGISTERS < MmaTiling(added, many).registers
    assert MmaTiling(added, MMA.default(added, limits)).registers <= MOST_REGISTERS


# ---- selection


def test_float32_never_becomes_a_tensor_core_mode() -> None:
    for target in ("sm_75", "sm_80", "sm_90a"):
        for precision in ("float32", "float64"):
            assert family_for(kernel(precision), cuda_limits(target)).name == "simt"
    for precision in PRECISIONS:
        assert family_for(kernel(precision), cuda_limits("sm_75")).name == "simt"
        assert family_for(kernel(precision), cuda_limits("sm_80")).name == "mma"


def test_texts_say_their_precision_and_hold_only_their_instruction() -> None:
    text = render(kernel("tf32x3")).text
    assert "tf32x3" in text.splitlines()[1]
    assert "mma_tf32" in text
    assert "mma_f16" not in text
    assert "mma_bf16" in render(kernel("bfloat16")).text


def test_weights_are_packed_in_parts_only_where_these_take_no_more_bytes() -> None:
    sizes = {}
    for precision in PRECISIONS:
        each = kernel(precision, pattern=Pattern(1, 64, 64, 4))
        sizes[precision] = MMA.packed_bytes(each, replace(GOOD, promote=0)) // each.pattern.weight_count
    assert sizes == {"float16": 2, "bfloat16": 2, "tf32": 4, "tf32x3": 4, "fp16x3": 4, "c64_tf32x3": 8}


# ---- results

SPREAD = [  # several warps along j: whole tiles of them, and such that end beyond d
    ("float16", (2, 40, 40, 16), MmaConstants(32, 32, 16, 16, 2, 1, 3, 0, 1, 2)),
    ("float16", (1, 40, 24, 20), MmaConstants(16, 16, 16, 16, 2, 1, 2, 0, 1, 2)),
    ("bfloat16", (1, 33, 48, 24), MmaConstants(16, 16, 16, 24, 1, 1, 2, 0, 1, 3)),
    ("tf32", (1, 33, 40, 12), MmaConstants(16, 16, 16, 12, 2, 1, 3, 0, 1, 3)),
    ("tf32x3", (1, 40, 40, 8), MmaConstants(16, 32, 8, 8, 2, 1, 3, 32, 1, 2)),
    ("fp16x3", (1, 40, 40, 14), MmaConstants(16, 32, 16, 8, 2, 2, 3, 32, 1, 2)),
]

RESIDENT = [  # tiles of outputs that do not fill b, more and fewer stages than steps, ragged inputs and j
    ("float16", (2, 70, 40, 16), MmaConstants(32, 32, 16, 8, 2, 1, 3, 0, 1, 1, 1)),
    ("float16", (1, 48, 32, 3), MmaConstants(32, 32, 32, 3, 2, 1, 4, 0, 1, 1, 1)),
    ("bfloat16", (1, 33, 70, 20), MmaConstants(16, 16, 16, 16, 1, 1, 2, 0, 1, 2, 1)),
    ("tf32", (1, 40, 40, 12), MmaConstants(16, 16, 8, 4, 2, 1, 3, 0, 1, 1, 1)),
    ("tf32x3", (1, 70, 40, 8), MmaConstants(16, 32, 8, 8, 2, 1, 3, 32, 1, 2, 1)),
    ("fp16x3", (1, 40, 70, 4), MmaConstants(32, 16, 16, 4, 2, 1, 4, 64, 1, 1, 1)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "pattern", "constants"), [*SPREAD, *RESIDENT])
def test_warps_along_j_and_resident_x(precision: str, pattern: tuple[int, ...], constants: MmaConstants) -> None:
    each = KernelSpec(Pattern(*pattern), precision, "bsf", Epilogue(True, "relu", True))
    check(MMA, each, constants, GPU)
    source = source_of("mma", each, constants)
    check_result(source, 37, in_emulator())
    own, around = count_kernel(source, 37)
    for name, (expected, counted) in compared(source, 37, own, around).items():
        assert expected == pytest.approx(counted, rel=0.02), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "pattern", "constants"), [SPREAD[0], RESIDENT[0]])
def test_races_of_warps_along_j_and_of_resident_x(
    precision: str, pattern: tuple[int, ...], constants: MmaConstants
) -> None:
    each = KernelSpec(Pattern(*pattern), precision, "bsf", Epilogue(True, "relu", True))
    check_result(source_of("mma", each, constants), 37, in_emulator(sanitize="race"))


@pytest.mark.parametrize("sanitize", ["address", "race"])
def test_copies_whose_last_round_has_fewer_lines_and_leaves_threads_and_warps_idle(sanitize: str) -> None:
    """128 threads copy ten of 64 lines of twelve chunks at once; three of four warps copy all weights."""
    each = KernelSpec(Pattern(1, 48, 96, 3), "float16", "bsf")
    source = source_of("mma", each, MmaConstants(64, 16, 32, 3, 4, 1, 2, 0, 1))
    check_result(source, 65, in_emulator(sanitize=sanitize))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "target", "most"),
    [("bfloat16", "sm_80", 2.8), ("bfloat16", "sm_90a", 2.9), ("tf32x3", "sm_80", 4.1), ("tf32x3", "sm_90a", 3.5)],
)
def test_main_loops_have_few_other_instructions_per_product(precision: str, target: str, most: float) -> None:
    sass.needed_disassembler()
    constants = {
        "bfloat16": MmaConstants(64, 128, 32, 4, 2, 4, 3, 0, 1),
        "tf32x3": MmaConstants(32, 64, 16, 4, 2, 2, 3, 16 if target == "sm_80" else 32, 1),
    }[precision]
    source = render(KernelSpec(Pattern(1, 512, 512, 4), precision), constants)
    built = sass.compiled(source.text, source.entry, target)
    loop = sass.main_loop(sass.listing_of(built.data), source.entry)
    assert loop.total() <= (1 + most) * sass.products(loop)
    assert built.resources.spill_bytes == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_unaligned_memory(precision: str, layout: str, shift: int) -> None:
    each = kernel(precision, layout, Pattern(1, 40, 24, 3))
    check_result(source_of("mma", each), 65, in_emulator(), shift=shift)


@pytest.mark.parametrize("shift", [1, 3])
def test_unaligned_memory_of_resident_x(shift: int) -> None:
    precision, pattern, constants = RESIDENT[0]
    each = KernelSpec(Pattern(*pattern), precision, "bsf")
    check_result(source_of("mma", each, constants), 37, in_emulator(), shift=shift)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", ["address", "race"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["float16", "tf32x3"])
def test_sanitizers_find_nothing(precision: str, layout: str, sanitize: str) -> None:
    each = KernelSpec(Pattern(2, 21, 70, 3), precision, layout, Epilogue(True, "relu", True))
    check_result(source_of("mma", each), 33, in_emulator(sanitize=sanitize))


ERRORS = {  # relative, Frobenius, against float64, by c: what the precision may cost at most
    "float16": {48: 3.1e-4, 192: 3.1e-4, 1024: 3.1e-4},
    "bfloat16": {48: 2.5e-3, 192: 2.5e-3, 1024: 2.5e-3},
    "tf32": {48: 3.2e-4, 192: 3.2e-4, 1024: 3.2e-4},
    "tf32x3": {48: 2.5e-7, 192: 4.7e-7, 1024: 1.1e-6},  # twice a sequential float32 sum
    "fp16x3": {48: 2.5e-7, 192: 4.7e-7, 1024: 1.1e-6},
    "c64_tf32x3": {48: 3.6e-7, 192: 6.9e-7, 1024: 1.6e-6},  # of sums of twice as many products
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [48, 192, 1024])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_error_of_each_precision(target: str, precision: str, c: int, layout: str) -> None:
    each = kernel(precision, layout, Pattern(1, 48, c, 1))
    problem = make_problem(each, 64)
    y = multiply(problem, source_of("mma", each, limits=cuda_limits(target)), in_emulator(target=target))
    axis = "sc,kc->sk" if layout == "bsf" else "cs,kc->ks"
    exact = np.einsum(axis, *(array.astype(wide_type(y)) for array in (problem.x, problem.weights[0, :, :, 0])))
    error = np.linalg.norm(y.astype(exact.dtype) - exact) / np.linalg.norm(exact)
    print(f"{target} {precision} {layout} c={c}: {error:.2e}")
    assert error < ERRORS[precision][c]
    if precision in ("float16", "bfloat16"):  # as good as the exact sum rounded once
        once = exact.astype(y.dtype).astype(np.float64)
        assert error < 1.01 * np.linalg.norm(once - exact) / np.linalg.norm(exact)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "target"),
    [("mma", "sm_90a"), ("mma", "sm_80"), pytest.param("wgmma_registers", "sm_90a", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("layout", "d"), [("bsl", 1), ("bsf", 1), ("bsf", 4)])
@pytest.mark.parametrize("precision", ["tf32x3", "fp16x3", "c64_tf32x3"])
@pytest.mark.parametrize("inputs", [(6, 17, 33, 65), pytest.param((2, 9, 24, 28, 48, 49), marks=pytest.mark.second)])
def test_operands_in_parts_err_at_most_twice_as_much_as_a_sequential_sum(
    inputs: tuple[int, ...], precision: str, layout: str, d: int, family: str, target: str
) -> None:
    limits = cuda_limits(target)
    for c in inputs:
        each = kernel(precision, layout, Pattern(1, 32, c, d))
        if not family_named(family).supports(each, limits):  # then another family does, at last in plain float32
            assert c < each.arithmetic.promotion(limits.has_fine_sums).least_in or family != "mma"
            continue
        problem = make_problem(each, 64)
        y = multiply(problem, source_of(family, each, limits=limits), in_emulator(target=target))
        stored, wide = y.dtype, wide_type(y)
        x, y = (array.astype(wide) if layout == "bsf" else array.T.astype(wide) for array in (problem.x, y))
        x, y, w = x.reshape(64, c, d), y.reshape(64, 32, d), problem.weights[0].astype(wide)
        sequential, exact = np.zeros(y.shape, stored), np.einsum("scj,kcj->skj", x, w)
        halves = [1, 1j] if stored.kind == "c" else [1]
        # of complex numbers, the real part's products, then the imaginary one's
        for term, half in product(range(c), halves):
            own = (x[:, None, term] / half).real * half
            sequential = (sequential + own * w[None, :, term]).astype(stored)
        ratio = np.linalg.norm(y - exact) / np.linalg.norm(sequential - exact)
        print(f"{target} {family} {precision} {layout} d={d} c={c}: {ratio:.2f}")
        assert ratio < 2, (c, ratio)


def test_few_inputs_are_multiplied_in_plain_float32() -> None:
    for precision, leasts in (("tf32x3", (28, 28, 17, 17)), ("fp16x3", (6, 6, 6, 6)), ("c64_tf32x3", (16, 16, 9, 9))):
        for target, least in zip(("sm_80", "sm_89", "sm_90a", "sm_120"), leasts, strict=True):
            few, enough = (kernel(precision, pattern=Pattern(1, 64, c, 4)) for c in (least - 1, least))
            assert family_for(few, cuda_limits(target)).name == "simt"
            assert [FAMILIES["mma"].supports(each, cuda_limits(target)) for each in (few, enough)] == [False, True]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overflow_of_fp16x3_is_nan_in_its_own_outputs(layout: str) -> None:
    problem = make_problem(kernel("fp16x3", layout, Pattern(1, 20, 33, 3)), 40)
    problem.x[(7, 5) if layout == "bsf" else (5, 7)] = -65520  # batch entry 7, input 1 of j = 2
    problem.weights[0, 9, 4, 0] = 64
    y = multiply(problem, source_of("mma", problem.kernel), in_emulator())
    outputs = (y if layout == "bsf" else y.T).reshape(40, 20, 3)
    expected = np.zeros(outputs.shape, bool)
    expected[7, :, 2] = expected[:, 9, 0] = True
    np.testing.assert_array_equal(np.isnan(outputs), expected)
    problem.x[(7, 5) if layout == "bsf" else (5, 7)] = -65500
    problem.weights[0, 9, 4, 0] = 63.9
    assert np.isfinite(multiply(problem, source_of("mma", problem.kernel), in_emulator())).all()
