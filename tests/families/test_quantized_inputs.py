"""X and weights in eight bits: X is widened when read, or multiplied directly by tensor cores, with equal results."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ksgen import reference
from ksgen.errors import ConstantsError, SpecError
from ksgen.families import FAMILIES, check, cuda_limits, families_for, family_for, family_named
from ksgen.families.chains import factor_kernels
from ksgen.families.mma.shape import MmaConstants
from ksgen.families.vector.shape import VectorConstants
from ksgen.launch.choice import Choice
from ksgen.launch.fused import verdict_for
from ksgen.launch.planner import PLANNER
from ksgen.measure.verify import Bench, Problem, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized, QuantizedInputs, numpy_type
from ksgen.spec import LAYOUTS, STORAGES, Epilogue, KernelSpec
from ksgen.spec.storage import x_precisions
from tests.families import test_vector as vector
from tests.measure.test_verify import needs_opencl
from tests.support import kernels
from tests.support.counting import compared, count_kernel
from tests.support.host_memory import processor
from tests.support.kernels import in_emulator, source_of
from tests.support.native import chosen_native

LIMITS = cuda_limits("sm_90a")
ALL = Epilogue(True, "gelu", True)
FLOATS = ("e4m3", "e5m2")
BEFORE, SINCE = "", "#define __CUDA_ARCH__ 890\n"  # there are instructions for floats in eight bits
# ragged edges in all of them; runs of X that are copied wide, and one by one; d in a block, in several, and of one
CASES = [
    ("gemv", (1, 70, 50, 1), "float32", "int8", "bsf", 1, BEFORE),
    ("gemv", (2, 37, 13, 3), "float16", "e4m3", "bsl", 5, BEFORE),
    ("gemv", (1, 5, 32, 1), "bfloat16", "e5m2", "bsf", 2, BEFORE),
    ("gemv", (2, 9, 24, 20), "float32", "e4m3", "bsf", 3, SINCE),
    ("simt", (2, 37, 12, 4), "float32", "e5m2", "bsf", 9, BEFORE),
    ("simt", (2, 37, 13, 3), "bfloat16", "e4m3", "bsl", 12, BEFORE),
    ("simt", (1, 9, 13, 1), "float32", "int8", "bsf", 9, BEFORE),
    ("mma", (2, 37, 24, 3), "float16", "e4m3", "bsf", 9, BEFORE),
    ("mma", (2, 37, 24, 3), "bfloat16", "e5m2", "bsf", 9, SINCE),
    ("mma", (1, 37, 160, 1), "bfloat16", "e4m3", "bsf", 16, SINCE),
    ("mma", (1, 21, 40, 32), "float16", "e5m2", "bsf", 5, BEFORE),
    ("mma", (2, 37, 24, 3), "float16", "e4m3", "bsl", 9, SINCE),
    ("mma", (2, 37, 24, 1), "bfloat16", "e5m2", "bsl", 144, BEFORE),
    ("mma", (2, 37, 24, 3), "float32", "e4m3", "bsf", 9, SINCE),
    ("mma", (1, 40, 272, 16), "float32", "e5m2", "bsf", 17, BEFORE),
    ("mma", (2, 37, 24, 3), "float32", "e5m2", "bsl", 9, SINCE),
    ("mma", (2, 37, 160, 1), "float32", "e4m3", "bsl", 144, BEFORE),
]


def kernel_of(
    shape: tuple[int, ...], precision: str, storage: str, layout: str, epilogue: Epilogue = ALL
) -> KernelSpec:
    return KernelSpec(Pattern(*shape), precision, layout, epilogue, weights=storage, inputs=storage)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "shape", "precision", "storage", "layout", "batch", "target"), CASES)
def test_agrees_with_float64(
    family: str, shape: tuple[int, ...], precision: str, storage: str, layout: str, batch: int, target: str
) -> None:  # fmt: skip
    kernel, own = kernel_of(shape, precision, storage, layout), family_named(family)
    source = source_of(family, kernel, own.default(kernel, LIMITS, batch))
    kernels.check(replace(source, text=target + source.text), batch, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "batch", "target", "sanitize"), [("bsf", 20, BEFORE, "race"), ("bsl", 32, SINCE, "address")]
)
def test_slices_of_x_begin_anywhere(layout: str, batch: int, target: str, sanitize: str) -> None:
    """Rows lie as far apart as the call says, X begins at any byte, both or one of them off the boundaries that wide
    copies keep to; and no address is wrong, and nothing read that is being written."""
    kernel = replace(kernel_of((2, 20, 32, 1), "float16", "e4m3", layout), stride="any")
    source = source_of("mma", kernel, FAMILIES["mma"].default(kernel, LIMITS, batch))
    source, problem = replace(source, text=target + source.text), make_problem(kernel, batch)
    whole = -problem.given_x.shape[1] % 16  # to rows that begin at multiples of 16 bytes
    for shift, gap, run in (
        (3, whole, in_emulator()),
        (16, whole + 3, in_emulator()),
        (3, whole + 3, in_emulator(sanitize=sanitize)),
    ):
        found = kernels.multiply(problem, source, run, shift=shift, behind=5, gaps={"x": gap, "y": 1})
        assert kernels.compare(problem, found)[0] <= tolerance("float16", 32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("storage", STORAGES)
def test_every_value_is_widened_exactly(storage: str) -> None:
    """NaN and infinity too, each by instructions and without."""
    truth = reference.values_of(STORAGES[storage])
    bits = np.arange(256, dtype=np.uint8)
    if storage == "e5m2":  # beyond the largest value, which the reference calls NaN, lies infinity
        truth[[0x7C, 0xFC]] = np.inf, -np.inf
    if storage == "int8":
        truth[128] = -128
    x = QuantizedInputs(storage, bits.reshape(-1, 1), 1.0)
    weights = np.ones((1, 1, 1, 1), numpy_type(STORAGES[storage]))
    given = Quantized(
        Pattern(1, 1, 1, 1), storage, "factor", weights, np.full((1, 1, 1, 1), 0.5, np.float32), x_scale=2.0
    )
    served = [
        *product(("gemv", "simt"), ("float16",)),
        *product(("mma",), ("float16", "float32") if storage in FLOATS else ()),
    ]
    for family, precision in served:
        kernel = KernelSpec(given.pattern, precision, weights=storage, inputs=storage)
        source = source_of(family, kernel, family_named(family).default(kernel, LIMITS, 256))
        problem = Problem(
            kernel, 256, truth.reshape(-1, 1), np.ones((1, 1, 1, 1)), None, None, quantized=(given,), inputs=x
        )
        for target in (BEFORE, SINCE):
            found = kernels.multiply(problem, replace(source, text=target + source.text), in_emulator())
            np.testing.assert_array_equal(found[:, 0].astype(np.float64), truth)


def test_what_tensor_cores_cut_off_of_eight_bits() -> None:
    """Thirteen bits below the largest product, as the emulator has it of the instruction: so sums are promoted after
    128 inputs.
    """
    kernel = kernel_of((1, 16, 32, 1), "float16", "e4m3", "bsf", Epilogue())
    x = np.full((1, 32), 2.0**-6)
    x[0, 0] = 256  # what is less than a 2^13th of it is lost
    kind = numpy_type(STORAGES["e4m3"])
    weights = np.ones((1, 16, 32, 1), kind)
    given = Quantized(kernel.pattern, "e4m3", "factor", weights, np.ones((1, 1, 1, 1), np.float32), x_scale=1.0)
    inputs = QuantizedInputs("e4m3", x.astype(kind), 1.0)
    problem = Problem(kernel, 1, x, weights.astype(np.float64), None, None, quantized=(given,), inputs=inputs)
    # which float16 has not; Y in float32 has it, and is not multiplied by the instruction anywhere
    exact = 256 + 31 * 2.0**-6
    rows = (
        ("float16", BEFORE, 256.5),
        ("float16", SINCE, 256.0),
        ("float32", BEFORE, exact),
        ("float32", SINCE, exact),
    )
    for precision, target, wanted in rows:
        own = replace(kernel, precision=precision)
        source = source_of("mma", own, FAMILIES["mma"].default(own, LIMITS, 1))
        found = kernels.multiply(
            replace(problem, kernel=own), replace(source, text=target + source.text), in_emulator()
        )
        assert set(found[0].astype(np.float64)) == {wanted}
    for c, promote in ((128, 0), (129, 128), (768, 128)):
        long = kernel_of((1, 64, c, 1), "float16", "e4m3", "bsf")
        constants = FAMILIES["mma"].default(long, LIMITS)
        assert isinstance(constants, MmaConstants)
        assert constants.promote == promote


@pytest.mark.exhaustive
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(("family", "target", "head"), [("mma", "sm_89", SINCE), ("wgmma_shared", "sm_90a", BEFORE)])
def test_errors_of_sums_of_eight_bits(family: str, target: str, head: str, positive: bool) -> None:
    """Rounding to float16 costs at most half of the tolerance, which sums of positive numbers alone exceed."""
    kind, random = numpy_type(STORAGES["e4m3"]), np.random.default_rng(8)
    for c in (128, 768):
        kernel = kernel_of((1, 64, c, 1), "float16", "e4m3", "bsf", Epilogue())
        x, weights = (
            draw.astype(kind) for draw in (random.standard_normal((64, c)), random.uniform(-1, 1, (1, 64, c, 1)))
        )
        if positive:
            x, weights = np.abs(x), np.abs(weights)
        given = Quantized(kernel.pattern, "e4m3", "factor", weights, np.ones((1, 1, 1, 1), np.float32), x_scale=1.0)
        wide = (each.astype(np.float64) for each in (x, weights))
        problem = Problem(kernel, 64, *wide, None, None, quantized=(given,), inputs=QuantizedInputs("e4m3", x, 1.0))
        source = source_of(family, kernel, limits=cuda_limits(target))
        found = kernels.multiply(problem, replace(source, text=head + source.text), in_emulator(target=target))
        error = kernels.compare(problem, found)[0]
        print(f"{target} c={c} {'positive' if positive else 'normal'}: {error:.2e}")
        if positive:
            assert tolerance("float16", c) < error < 9e-4
        else:
            assert error < 0.6 * tolerance("float16", c)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "target", "product"),
    [("float16", SINCE, "e4m3"), ("bfloat16", BEFORE, "f16"), ("float32", SINCE, "f16")],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_cost_model_says_moved_is_what_moves(layout: str, precision: str, target: str, product: str) -> None:
    kernel = kernel_of((1, 48, 48, 4), precision, "e4m3", layout, Epilogue())
    source = source_of("mma", kernel, FAMILIES["mma"].default(kernel, LIMITS))
    source = replace(source, text=target + source.text)
    own, around = count_kernel(source, 256)
    for name, (expected, counted) in compared(source, 256, own, around).items():
        # scales of weights, which are not counted, are a fiftieth here
        assert expected == pytest.approx(counted, rel=0.03), name
    assert {name.split()[-1] for name in own.instructions} == {product}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_serves_it(layout: str) -> None:
    kernel = kernel_of((1, 768, 192, 2), "float16", "e4m3", layout, Epilogue())
    assert [each.name for each in families_for(kernel, LIMITS)] == ["mma", "simt", "gemv"]
    assert [each.name for each in families_for(replace(kernel, precision="float32"), LIMITS)] == ["mma", "simt", "gemv"]
    assert family_for(replace(kernel, precision="float32"), LIMITS, 25088).name == "mma"
    whole = replace(kernel, weights="int8", inputs="int8")
    assert [each.name for each in families_for(whole, LIMITS)] == ["simt", "gemv"]
    with pytest.raises(ConstantsError, match="X is not in eight bits, or is in an eight-bit float"):
        check(FAMILIES["mma"], whole, FAMILIES["mma"].default(kernel, LIMITS))
    wide, found = (
        replace(kernel, precision="float32"),
        FAMILIES["simt"].default(replace(kernel, precision="float32"), LIMITS),
    )
    with pytest.raises(
        ConstantsError, match="copy=async must be registers in a 16-bit precision, and with X in eight bits"
    ):
        check(FAMILIES["simt"], wide, replace(found, copy="async"))


def test_who_takes_it_through_several_factors() -> None:
    """Processors fuse it, and GPUs for small batches. Large batches take one launch per factor, with a reason."""
    pair = (Pattern(6, 64, 64, 1), Pattern(1, 768, 384, 1))
    kernel = KernelSpec((pair,), "bfloat16", "bsf", Epilogue(), weights="e4m3", inputs="e4m3")
    assert [each.name for each in families_for(kernel, LIMITS)] == ["gemv"]
    assert [each.name for each in families_for(replace(kernel, inputs="same"), LIMITS)] == ["mma", "gemv"]
    assert verdict_for(kernel, LIMITS, "cuda", 1, "yes").is_one
    for fuse in ("yes", "auto"):
        found = verdict_for(kernel, LIMITS, "cuda", 4096, fuse)
        assert (found.is_one, found.why) == (False, "no family for such a batch takes x in e4m3 through all factors")


def test_bytes_that_cross_memory() -> None:
    kernel = kernel_of((1, 768, 192, 2), "bfloat16", "e4m3", "bsf", Epilogue())
    plain = replace(kernel, weights="same", inputs="same")
    assert plain.bytes(10) - kernel.bytes(10) == 10 * 384 + plain.pattern.weight_count - 4 * 1536
    mma = FAMILIES["mma"]
    packed = mma.packed_bytes(kernel, mma.default(kernel, LIMITS))
    assert packed == plain.pattern.weight_count + 4 * 1536  # nothing is padded here
    moved = [mma.work(each, mma.default(each, LIMITS), 4096).memory_bytes for each in (kernel, plain)]
    assert moved[0] < 0.9 * moved[1]


def test_what_a_kernel_may_be() -> None:
    pattern = Pattern(2, 9, 8, 1)
    for options, told in (
        ({"inputs": "e4m3"}, "inputs=e4m3 with weights=same; accepted: inputs=same, or the weights' storage"),
        ({"weights": "e5m2", "inputs": "e4m3"}, "inputs=e4m3 with weights=e5m2"),
        ({"weights": "e4m3", "inputs": "int4"}, "inputs='int4'"),
        (
            {"inputs": "e4m3", "job": "gradient"},
            "job=gradient with inputs=e4m3; accepted: inputs=same, because training needs x unquantized",
        ),
    ):
        with pytest.raises(SpecError, match=told):
            KernelSpec(pattern, **options)
    whole = KernelSpec((Pattern(2, 8, 9, 1), pattern), "float16", weights="e4m3", inputs="e4m3")
    assert [each.inputs for each in factor_kernels(whole)] == ["e4m3", "same"]  # the intermediate is stored in Y's type
    one = KernelSpec(pattern, "float16", weights="e4m3", inputs="e4m3")
    assert one.name == "ks_2x9x8x1_float16_e4m3_inputs_bsf"
    assert one.as_json["inputs"] == "e4m3"
    assert (one.x_item_bytes, one.item_bytes) == (1, 2)


# ---- processors


def _agrees(kernel: KernelSpec, constants: VectorConstants, batch: int, native: bool) -> None:
    from ksgen.devices import find_device

    device = find_device() if native else processor()
    problem = make_problem(kernel, batch)
    plan = PLANNER.plan_of(device, kernel, batch, Choice("vector", constants, "this test"))
    bench = Bench(device, problem)
    error, _ = bench.check(plan, bench.pack(plan))
    assert error <= tolerance(kernel.precision, kernel.pattern.c), (kernel, constants, batch, error)


@pytest.mark.exhaustive
@pytest.mark.optimized
@needs_opencl
@pytest.mark.parametrize(("layout", "along"), [(layout, along) for layout in LAYOUTS for along in vector.WAYS])
def test_processors_agree_with_float64(layout: str, along: str) -> None:
    turn = 2 * LAYOUTS.index(layout) + list(vector.WAYS).index(along)
    for number, shape in list(enumerate(vector.PATTERNS.values()))[turn::4]:
        storage, precision = list(STORAGES)[number % 3], x_precisions()[number // 3 % 3]
        kernel = kernel_of(shape, precision, storage, layout, vector.EPILOGUES[number % len(vector.EPILOGUES)])
        constants = vector.constants_of(
            kernel, along, (16, 4, 8)[number % 3], vector.SIZES[number % 6], 1 + number % 4, 1 + number % 3
        )
        _agrees(kernel, constants, 17, native=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("storage", STORAGES)
def test_processors_agree_natively(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    for shape, layout, along in (
        ((1, 9, 5, 4), "bsf", "outputs"),
        ((2, 24, 5, 16), "bsl", "batch"),
        ((2, 9, 20, 1), "bsf", "batch"),
    ):
        kernel = kernel_of(shape, "bfloat16", storage, layout)
        for batch in (1, 33):
            _agrees(kernel, vector.constants_of(kernel, along, 16), batch, native=True)


@pytest.mark.exhaustive
@pytest.mark.optimized
@needs_opencl
@pytest.mark.parametrize(
    ("storage", "precision", "layout", "out_layout"),
    [("e4m3", "bfloat16", "bsf", None), ("int8", "float32", "bsl", "bsf"), ("e5m2", "float16", "bsf", "bsl")],
)
def test_processors_take_it_through_a_group_of_chains(
    storage: str, precision: str, layout: str, out_layout: str | None
) -> None:
    """All sizes are ragged. Lanes run along outputs or the batch. A change of layout takes a single chain."""
    chains = ((Pattern(2, 9, 20, 3), Pattern(1, 7, 54, 1)), (Pattern(1, 21, 40, 3),))
    one = KernelSpec(
        chains[: 1 if out_layout else 2],
        precision,
        layout,
        ALL,
        between="gelu",
        out_layout=out_layout,
        weights=storage,
        inputs=storage,
    )
    family, device = FAMILIES["vector"], processor()
    for batch in (5, 33):
        problem = make_problem(one, batch)
        plan = PLANNER.plan_of(
            device, one, batch, Choice(family.name, family.default(one, vector.CPU, batch), "this test")
        )
        bench = Bench(device, problem)
        error, _ = bench.check(plan, bench.pack(plan))
        assert error <= problem.tolerance, (plan.choice.constants, batch, error)
