"""X and weights in e4m3 or e5m2 by Hopper's own instruction: `wgmma_shared` in batch-size-first with d = 1."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.emit.render import template_digest
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, TensorMap, check, cuda_limits, families_for, family_for, family_named, operand_of
from ksgen.families.expected import speed_of
from ksgen.families.wgmma.shared import SharedConstants
from ksgen.launch.choice import choice_by_name, choose
from ksgen.measure.verify import Problem, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized, QuantizedInputs, numpy_type, quantize
from ksgen.spec import STORAGES, Epilogue, KernelSpec
from ksgen.tuning.job import Job
from ksgen.tuning.pool import supported_families
from ksgen.wisdom import Entry, Wisdom, dump, parse_export
from tests.compile_matrix import SERIALISED
from tests.emit.test_lean import unused
from tests.emulator import SimtError
from tests.support import kernels, sass
from tests.support.counting import compared, count_kernel
from tests.support.kernels import PLAIN, in_emulator, source_of

SHARED, GPU = family_named("wgmma_shared"), cuda_limits("sm_90a")
ALL, FLOATS = Epilogue(True, "gelu", True), ("e4m3", "e5m2")
CLUSTERED = SharedConstants(64, 24, 128, 1, 2, 2, 2)
# b, c and the batch fill no tile, or all do; None: by default
CASES: list[tuple[tuple[int, ...], str, str, Any, int]] = [
    ((1, 192, 320, 1), "float16", "e4m3", None, 130),
    ((2, 37, 48, 1), "bfloat16", "e5m2", None, 9),  # an odd number of outputs: stored one by one
    ((3, 5, 16, 1), "float16", "e5m2", None, 1),
    ((1, 64, 128, 1), "bfloat16", "e4m3", None, 64),
    ((1, 40, 144, 1), "float16", "e4m3", SharedConstants(64, 16, 128, 1, 2), 65),  # registers as launched
    # three warpgroups, two stages past the ring
    ((2, 100, 400, 1), "bfloat16", "e5m2", SharedConstants(192, 96, 128, 3, 3), 200),
    ((1, 200, 272, 1), "float16", "e4m3", SharedConstants(256, 96, 128, 2, 2), 300),  # two instructions along the batch
    ((2, 90, 272, 1), "bfloat16", "e4m3", CLUSTERED, 300),
]


def kernel_of(
    shape: tuple[int, ...],
    precision: str = "float16",
    storage: str = "e4m3",
    epilogue: Epilogue = ALL,
    layout: str = "bsf",
) -> KernelSpec:
    return KernelSpec(Pattern(*shape), precision, layout, epilogue, weights=storage, inputs=storage)


def text_of(kernel: KernelSpec, constants: Any = None) -> Any:
    constants = constants or SHARED.default(kernel, GPU)
    check(SHARED, kernel, constants, GPU)
    return source_of("wgmma_shared", kernel, constants)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shape", "precision", "storage", "constants", "batch"), CASES)
def test_agrees_with_float64(shape: tuple[int, ...], precision: str, storage: str, constants: Any, batch: int) -> None:
    for epilogue in (ALL, PLAIN):
        source = text_of(kernel_of(shape, precision, storage, epilogue), constants)
        kernels.check(source, batch, in_emulator(), behind=kernels.BEHIND)
    assert ("Totals sums;" in source.text) == (shape[2] > 128)


@pytest.mark.parametrize("per", ["factor", "i", "output"])
@pytest.mark.parametrize("storage", FLOATS)
def test_scales_of_each_kind_reach_their_outputs(storage: str, per: str) -> None:
    """The sizes of the weights differ a hundredfold from output to output."""
    kernel = kernel_of((3, 42, 160, 1), "bfloat16", storage)
    problem = make_problem(kernel, 70)
    assert problem.inputs is not None
    sizes = 10.0 ** np.random.default_rng(1).uniform(-1, 1, (3, 42, 1, 1))
    given = quantize(problem.weights * sizes, storage, per=per, x_scale=problem.inputs.scale)
    assert np.unique(given.scale).size == {"factor": 1, "i": 3, "output": 126}[per]
    problem = replace(problem, weights=reference.dequantized(given.values, given.scale), quantized=(given,))
    found = kernels.multiply(problem, text_of(kernel), in_emulator())
    assert kernels.compare(problem, found)[0] <= tolerance("bfloat16", 160)


def whole_problem(kernel: KernelSpec, batch: int) -> Problem:
    """Small whole numbers, and scales that are powers of two: every sum and product is exact."""
    random, kind = np.random.default_rng(batch), numpy_type(STORAGES[kernel.inputs])
    a, b, _, _ = kernel.pattern.shape
    x = random.integers(-2, 3, (batch, kernel.pattern.in_features)).astype(np.float64)
    weights = random.integers(-1, 2, kernel.pattern.shape).astype(np.float64)
    scale = 2.0 ** -(np.arange(a * b) % 4).reshape(a, b, 1, 1)
    given = Quantized(
        kernel.pattern, kernel.weights, "output", weights.astype(kind), scale.astype(np.float32), x_scale=1.0
    )
    inputs = QuantizedInputs(kernel.inputs, x.astype(kind), 1.0)
    return Problem(kernel, batch, x, weights * scale, None, None, quantized=(given,), inputs=inputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shape", "precision", "storage", "constants", "batch"), CASES)
def test_whole_numbers_come_out_to_the_last_bit(
    shape: tuple[int, ...], precision: str, storage: str, constants: Any, batch: int
) -> None:
    problem = whole_problem(kernel_of(shape, precision, storage, PLAIN), batch)
    found = kernels.multiply(problem, text_of(problem.kernel, constants), in_emulator())
    np.testing.assert_array_equal(found.astype(np.float64), problem.truth.astype(found.dtype).astype(np.float64))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", ["address", "race"])
@pytest.mark.parametrize("constants", [None, CLUSTERED, SharedConstants(192, 48, 128, 3, 2)])
def test_no_race_and_no_access_outside(constants: Any, sanitize: str) -> None:
    for c in (272, 112):  # sums that are promoted, and one stage, whose end is beyond c
        kernels.check(text_of(kernel_of((2, 90, c, 1)), constants), 70, in_emulator(sanitize=sanitize))


def test_runs_are_bit_identical_in_any_order_of_blocks_and_threads() -> None:
    for constants in (None, CLUSTERED):
        source = text_of(kernel_of((2, 90, 272, 1)), constants)
        first, *others = (
            kernels.check(source, 290, in_emulator(order=order)) for order in ("forward", "forward", "reverse", 5)
        )
        for y in others:
            np.testing.assert_array_equal(y, first)


@pytest.mark.parametrize("storage", FLOATS)
def test_a_nan_in_x_stays_in_its_batch_entry_and_i(storage: str) -> None:
    kernel = kernel_of((2, 40, 144, 1), "float16", storage, PLAIN)
    clean, source = make_problem(kernel, 70), text_of(kernel)
    assert clean.inputs is not None
    planted = clean.inputs.values.copy()
    # the last input of i = 0, the first of i = 1
    planted.view(np.uint8)[5, 143], planted.view(np.uint8)[66, 144] = 0x7F, 0x7F
    expected = kernels.multiply(clean, source, in_emulator())
    got = kernels.multiply(replace(clean, inputs=replace(clean.inputs, values=planted)), source, in_emulator())
    touched = np.zeros((70, 2, 40), bool)
    touched[5, 0], touched[66, 1] = True, True
    np.testing.assert_array_equal(np.isnan(got), touched.reshape(70, 80))
    np.testing.assert_array_equal(got[~np.isnan(got)], expected[~np.isnan(got)])


def test_what_is_cut_off_is_cut_off_within_128_inputs() -> None:
    """Thirteen bits below the largest, as the emulator has it of the instruction; the sum of a stage is added in
    float32.
    """
    kernel, kind = kernel_of((1, 16, 256, 1), "float16", "e4m3", PLAIN), numpy_type(STORAGES["e4m3"])
    x = np.full((1, 256), 2.0**-6)
    x[0, 0] = 256  # values below a 2^13th of it are lost
    weights = np.ones((1, 16, 256, 1), kind)
    given = Quantized(kernel.pattern, "e4m3", "factor", weights, np.ones((1, 1, 1, 1), np.float32), x_scale=1.0)
    problem = Problem(
        kernel,
        1,
        x,
        weights.astype(np.float64),
        None,
        None,
        quantized=(given,),
        inputs=QuantizedInputs("e4m3", x.astype(kind), 1.0),
    )
    found = kernels.multiply(problem, text_of(kernel), in_emulator())
    assert set(found[0].astype(np.float64)) == {258.0}  # 256, and the 128 of the second stage


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "constants"), [((1, 256, 64, 1), None), ((1, 256, 256, 1), None), ((2, 90, 272, 1), CLUSTERED)]
)
@pytest.mark.parametrize("batch", [256, 200])
def test_what_the_cost_model_says_moved_is_what_moves(shape: tuple[int, ...], constants: Any, batch: int) -> None:
    source = text_of(kernel_of(shape, epilogue=Epilogue(residual=True)), constants)
    own, around = count_kernel(source, batch)
    for name, (expected, counted) in compared(source, batch, own, around).items():
        assert expected == pytest.approx(counted, rel=0.02), (name, source.constants)
    assert {name.split()[-1] for name in own.instructions} == {"e4m3"}


# ---- what it is for


def test_what_is_served() -> None:
    def served(shape: tuple[int, ...] = (2, 37, 48, 1), target: str = "sm_90a", **options: Any) -> bool:
        kernel, limits = replace(kernel_of(shape, epilogue=PLAIN), **options), cuda_limits(target)
        found = "wgmma" in [each.name for each in families_for(kernel, limits)]
        assert [each.x_from for each in FAMILIES["wgmma"].defaults(kernel, limits)] == ["shared"] * found
        return found

    assert served()
    assert served(weights="e5m2", inputs="e5m2")
    assert served(precision="bfloat16")
    assert not served(target="sm_90")
    assert not served(target="sm_100")
    assert not served((2, 37, 40, 1))  # rows of 40 bytes
    assert not served((2, 40, 48, 2))
    assert not served(layout="bsl")
    assert not served(weights="int8", inputs="int8")
    assert not served(inputs="same")  # weights alone
    assert not served(precision="float32")
    assert not served(stride="any")
    assert family_for(kernel_of((2, 37, 48, 1)), GPU, 25088).name == "wgmma"


@pytest.mark.parametrize(
    ("changes", "target"),
    [({"layout": "bsl"}, "sm_90a"), ({"chains": Pattern(1, 48, 48, 2)}, "sm_90a"), ({"weights": "int8",
        "inputs": "int8"}, "sm_90a"),
     ({"precision": "float32"}, "sm_90a"), ({"chains": Pattern(1, 48, 40, 1)}, "sm_90a"), ({}, "sm_89")],
)  # fmt: skip
def test_a_request_by_name_is_answered_with_its_purpose(changes: dict[str, Any], target: str) -> None:
    kernel = replace(kernel_of((1, 48, 48, 1), epilogue=PLAIN), **changes)
    said = (
        r"at batch 64: not supported by wgmma_shared on this device; wgmma_shared is for: wgmma of sm_90a .*in bsf "
        r"with d = 1; there also X and "
        r"weights in e4m3 or e5m2, with y in 16 bits; rows of X in whole 16 bytes$"
    )
    with pytest.raises(ConstantsError, match=f"^{kernel.name} {said}"):
        choice_by_name("wgmma_shared", kernel, 64, cuda_limits(target))
    choice = choice_by_name("wgmma_shared", kernel_of((1, 48, 48, 1)), 64, GPU)
    assert choice.constants == SHARED.default(kernel_of((1, 48, 48, 1)), GPU, 64)


def test_wisdom_selects_it_and_a_search_looks_at_it() -> None:
    kernel = kernel_of((1, 48, 48, 1))
    entry = Entry(kernel, 512, "wgmma", SHARED.default(kernel, GPU), {"template": template_digest("wgmma")})
    known = Wisdom(parse_export(dump("a GPU", Wisdom([entry])), "a file")["a GPU"])
    found = choose(kernel, 500, GPU, known)
    assert (found.family, found.constants, found.is_measured) == ("wgmma", entry.constants, True)
    assert choose(kernel, 500, GPU, known, aligned=False).family != "wgmma"
    assert "the constants in wisdom do not fit this device" in choose(kernel, 500, cuda_limits("sm_89"), known).why
    assert supported_families(Job(kernel, 512), GPU) == ["wgmma", "mma", "simt"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile_in": 64}, "tile_in=64 must be 128 with X in eight bits; try 128$"),
        ({"tile_in": 256}, "tile_in=256 must be 128 with X in eight bits; try 128$"),
        # twice, because of promotion
        ({"tile_out": 256}, "sums fit a thread's registers: 256; got tile_out=256; try tile_out=200$"),
    ],
)
def test_each_rule_has_two_sides(changes: dict[str, int], says: str) -> None:
    kernel, plain = kernel_of((1, 256, 256, 1)), SharedConstants(128, 192, 128, 2, 3)
    check(SHARED, kernel, plain, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(SHARED, kernel, replace(plain, **changes), GPU)
    if "tile_out" in changes:
        check(SHARED, kernel_of((1, 256, 128, 1)), replace(plain, **changes), GPU)


def test_every_constants_of_a_search_keep_the_rules() -> None:
    kernel = kernel_of((2, 100, 272, 1))
    found = list(SHARED.space(kernel, GPU))
    assert len(found) > 50
    assert {each.tile_in for each in found} == {128}
    for constants in found[:: len(found) // 6]:
        kernels.check(text_of(kernel, constants), 70, in_emulator())


def test_x_is_a_map_of_bytes_and_places_that_it_cannot_describe_are_not_taken() -> None:
    kernel = kernel_of((2, 37, 48, 1))
    (x,) = SHARED.maps(kernel, SharedConstants(128, 40, 128, 2, 2), 100)
    assert x == TensorMap("x", 1, (48, 2, 100), (48, 96), (128, 1, 128), 128)
    assert SHARED.takes(kernel, 7, aligned=True)
    assert not SHARED.takes(kernel, 7, aligned=False)


def test_packed_weights_stay_in_eight_bits_and_products_count_double() -> None:
    kernel = kernel_of((1, 256, 256, 1), epilogue=PLAIN)
    plain, constants = replace(kernel, weights="same", inputs="same"), SharedConstants(128, 128, 128, 2, 3)
    assert SHARED.packed_bytes(kernel, constants) == SHARED.packed_bytes(plain, constants) // 2 + 4 * 256
    assert (operand_of(kernel, constants), operand_of(plain, constants)) == ("e4m3", "f16")
    bytes_a_s, halves_a_s = (speed_of(SHARED, each, GPU) for each in (kernel, plain))
    assert bytes_a_s is not None
    assert halves_a_s is not None
    assert bytes_a_s.flops_per_s == 2 * halves_a_s.flops_per_s
    # which widens them on this target
    assert speed_of(FAMILIES["mma"], kernel, GPU) == speed_of(FAMILIES["mma"], plain, GPU)


# ---- texts


WAIT, RELEASE = "            wgmma_wait<0>();\n            hold(sums.current);\n", "            release(ring);\n"


@pytest.mark.parametrize(
    ("was", "becomes", "sanitize", "says"),
    [
        ("    wgmma_fence();\n", "", "none", "no wgmma_fence"),
        (WAIT, "", "none", "the thread exits while wgmma may still be under way"),
        (WAIT + RELEASE, RELEASE + WAIT, "race", "race"),
    ],
)
def test_what_the_text_needs_is_missed(was: str, becomes: str, sanitize: str, says: str) -> None:
    source = text_of(kernel_of((1, 40, 400, 1)), SharedConstants(64, 40, 128, 1, 2))
    assert source.text.count(was) == 1
    with pytest.raises(SimtError, match=says):
        kernels.check(replace(source, text=source.text.replace(was, becomes)), 70, in_emulator(sanitize=sanitize))


@pytest.mark.parametrize("c", [128, 272])
@pytest.mark.parametrize("constants", [None, CLUSTERED])
def test_nothing_in_a_text_is_unused(constants: Any, c: int) -> None:
    for epilogue in (ALL, PLAIN):
        assert unused(text_of(kernel_of((2, 90, c, 1), epilogue=epilogue), constants).text) == set()


def test_scales_are_read_after_the_grid_before() -> None:
    """The previous grid may have packed the scales. A restricted pointer would let nvcc load them before the wait."""
    text = text_of(kernel_of((1, 40, 272, 1))).text
    assert "RESTRICT weights" not in text
    before, after = text[text.index("\nENTRY(THREADS, 1)") : text.index("\nENTRY(PACK_THREADS")].split(
        "wait_for_previous_grid();"
    )
    assert "SCALES" not in before
    assert "weights + SCALES" in after


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("storage", "name"), [("e4m3", "E4M3"), ("e5m2", "E5M2")])
@pytest.mark.parametrize(
    "constants", [None, SharedConstants(192, 96, 128, 3, 3), SharedConstants(128, 96, 128, 2, 3, 2, 2)]
)
def test_it_becomes_the_instruction_with_no_spills(storage: str, name: str, constants: Any) -> None:
    sass.needed_disassembler()
    source = text_of(kernel_of((1, 384, 512, 1), "float16", storage), constants)
    built = sass.compiled(source.text, source.entry, "sm_90a")
    counts = sass.instructions(built.data)[source.entry]
    assert sass.count(counts, f"QGMMA.{name}") == 4 * (
        source.constants.tile_batch // (64 * source.constants.groups_batch)
    )
    assert sass.count(counts, "LDG.128") >= 3  # scales, bias and residual
    assert sass.count(counts, "LDG.CONSTANT") == 0
    assert sass.count(counts, "STG.128") >= 4
    assert sass.local_accesses(counts) == built.resources.spill_bytes == 0
    assert not any(code in built.provenance.get("notes", "") for code in SERIALISED)
