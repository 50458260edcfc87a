"""What is special to the SIMT family: its rules and defaults, odd constants, and memory that is not aligned.

What it has in common with the others is in `test_families.py`.
"""

from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ksgen.errors import ConstantsError
from ksgen.families import Limits, check, cuda_limits
from ksgen.families.simt import Shape, Simt, SimtConstants
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from tests.support import kernels
from tests.support.kernels import SERVED, in_emulator, source_of

SIMT = Simt()
PLAIN = Epilogue()
GPU = cuda_limits("sm_90a")
GOOD = SimtConstants(64, 32, 8, 1, 8, 8, 3, 1, "async")
NAMES = list(dict.fromkeys(precision for family, precision, _ in SERVED if family == "simt"))


def kernel(pattern=(2, 37, 13, 5), precision="float32", layout="bsf", epilogue=PLAIN, batch=None) -> KernelSpec:
    return KernelSpec(Pattern(*pattern), precision, layout, epilogue, batch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", NAMES)
def test_memory_that_is_not_aligned_to_16_bytes(precision: str, layout: str) -> None:
    for shift in (1, 2):
        source = source_of("simt", kernel((2, 48, 16, 4), precision, layout, Epilogue(residual=True)))
        kernels.check(source, 64, in_emulator(), shift=shift)


@st.composite
def cases(draw: st.DrawFn) -> tuple[KernelSpec, SimtConstants, int]:
    """A kernel, constants that the rules allow and no search would try, and a batch."""
    size = st.integers(1, 40)
    spec = kernel(
        (draw(st.integers(1, 3)), draw(size), draw(size), draw(st.integers(1, 20))),
        draw(st.sampled_from(NAMES)),
        draw(st.sampled_from(LAYOUTS)),
    )
    group = 2 if spec.precision == "float64" else 4
    thread_batch = group * draw(st.integers(1, 8 // group))
    thread_out = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    constants = SimtConstants(
        tile_batch=8 * thread_batch * draw(st.integers(1, 3)),
        tile_out=4 * thread_out * draw(st.integers(1, 3)),
        tile_in=draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16])),
        tile_d=1 if spec.layout == "bsl" else draw(st.integers(1, min(spec.pattern.d, 9))),
        thread_batch=thread_batch,
        thread_out=thread_out,
        stages=draw(st.integers(2, 4)),
        min_blocks=1,
        copy=draw(st.sampled_from(["async", "registers"])),
    )
    if constants.copy == "registers" or PRECISIONS[spec.precision].item_bytes == 2:
        constants = replace(constants, copy="registers", stages=2)
    if any(not rule.holds(spec, constants) for rule in SIMT.rules()) or not SIMT.fits(spec, constants, GPU):
        constants = SIMT.default(spec, GPU)
    return spec, constants, draw(st.integers(1, 140))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_odd_constants(case: tuple[KernelSpec, SimtConstants, int]) -> None:
    spec, constants, batch = case
    kernels.check(source_of("simt", spec, constants), batch, in_emulator())


@settings(max_examples=500)
@example((2, 39, 31, 8), "float16", "bsf", "large cpu")  # three warps of outputs for each of eight j
@given(
    st.tuples(*[st.integers(1, 64) | st.integers(1, 2000)] * 4),
    st.sampled_from(NAMES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["sm_75", "sm_80", "sm_90a", "small cpu", "large cpu"]),
)
def test_defaults_keep_their_own_rules_and_fit_every_device(shape: tuple[int, ...], precision: str, layout: str, target: str) -> None:
    try:
        spec = kernel(shape, precision, layout)
    except Exception:
        return  # more features than a kernel counts
    cpus = {
        "small cpu": Limits(32 * 1024, 256, 0, is_cpu=True, async_copies=False),
        "large cpu": Limits(2**18, 8192, 0, is_cpu=True, async_copies=False),
    }
    limits = cpus.get(target) or cuda_limits(target)
    check(SIMT, spec, SIMT.default(spec, limits), limits)


def test_defaults_take_little_padding() -> None:
    for b in (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        for layout in LAYOUTS:
            constants = SIMT.default(kernel((1, b, 64, 4), layout=layout), GPU)
            assert b % constants.tile_out == 0, constants


def test_shared_memory_of_the_copy_is_free_of_bank_conflicts() -> None:
    """Every warp-wide 4-byte store of the transposing copy, and every 16-byte load of a fragment, hits all banks once."""
    for d in range(1, 17):
        spec = kernel((1, 64, 64, d))
        shape = Shape(spec, SIMT.default(spec, GPU))
        plan = shape.x_plan
        banks = set()
        for lane in range(32):
            line, run = lane // plan.lane_run, lane % plan.lane_run
            tile_d = shape.constants.tile_d
            banks.add((run % tile_d * shape.x_plane + run // tile_d * shape.x_pitch + line) % 32)
        assert len(banks) == 32 or plan.lane_run < 8, (d, shape.constants)


BROKEN = [
    ({"copy": "bulk"}, "copy=bulk must be async or registers$"),
    ({"tile_in": 0}, "every constant is at least 1; got tile_in=0; try tile_in=1$"),
    ({"thread_batch": 6}, "thread_batch=6 must be a multiple of a 16-byte group = 4; try 4 or 8$"),
    ({"thread_out": 20, "tile_out": 80}, "thread_out=20 must be at most 16; try 10$"),
    ({"tile_batch": 96}, r"tile_batch=96 must be a multiple of 8 \* thread_batch = 64; try 64 or 128$"),
    ({"tile_out": 40}, r"tile_out=40 must be a multiple of 4 \* thread_out = 32; try 32 or 64$"),
    ({"tile_batch": 1024, "tile_out": 128}, "a block has at most 1024 threads: 2048; got tile_batch=1024; try tile_batch=512$"),
    ({"tile_d": 6}, "tile_d=6 must be at most d=5; try 5$"),
    ({"stages": 1}, "stages=1 must be at least 2; try 2$"),
    ({"copy": "registers"}, "stages=3 must be 2 with copy=registers; try 2$"),
]


@pytest.mark.parametrize(("changes", "says"), BROKEN)
def test_each_rule_refuses_its_case(changes: dict[str, object], says: str) -> None:
    check(SIMT, kernel(), GOOD)
    with pytest.raises(ConstantsError, match=says):
        check(SIMT, kernel(), replace(GOOD, **changes))


def test_rules_on_layout_and_precision() -> None:
    with pytest.raises(ConstantsError, match="tile_d=2 must be 1 in bsl; try 1"):
        check(SIMT, kernel(layout="bsl"), replace(GOOD, tile_d=2))
    with pytest.raises(ConstantsError, match="copy=async must be registers in a 16-bit precision"):
        check(SIMT, kernel(precision="float16"), GOOD)


def test_limits_of_a_device_are_named() -> None:
    with pytest.raises(ConstantsError, match=r"needs \d+ bytes of shared memory, the device has 1000"):
        check(SIMT, kernel(), GOOD, Limits(1000))
    with pytest.raises(ConstantsError, match=r"needs 32 threads a block, the device allows 16"):
        check(SIMT, kernel(), GOOD, Limits(10**6, threads=16))


def test_constants_from_wisdom_are_checked_by_name_and_type() -> None:
    assert SIMT.constants(asdict(GOOD)) == GOOD
    with pytest.raises(ConstantsError, match="simt constants are tile_batch"):
        SIMT.constants({"tile_batch": 1})
    with pytest.raises(ConstantsError, match="stages='3' must be an integer"):
        SIMT.constants({**asdict(GOOD), "stages": "3"})
