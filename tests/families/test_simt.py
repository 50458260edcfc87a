"""What is special to the SIMT family: its rules and defaults, odd constants, and memory that is not aligned.

What it has in common with the others is in `test_families.py`.
"""

import re
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen.errors import ConstantsError
from ksgen.families import check, cuda_limits
from ksgen.families.gpus import gpu_of
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants, SimtTiling
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec, stratified
from tests.emulator import SimtError
from tests.support import kernels
from tests.support.kernels import SERVED, in_emulator, source_of
from tests.support.simt_kernels import kernel

SIMT = Simt()
GPU = cuda_limits("sm_90a")
GOOD = SimtConstants(64, 32, 8, 1, 8, 8, 3, 1, "async")
NAMES = list(dict.fromkeys(precision for family, precision, _ in SERVED if family == "simt"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", NAMES)
def test_memory_that_is_not_aligned_to_16_bytes(precision: str, layout: str) -> None:
    for shift in (1, 2):
        source = source_of("simt", kernel((2, 48, 16, 4), precision, layout, Epilogue(residual=True)))
        kernels.check(source, 64, in_emulator(), shift=shift)


def test_packed_weights_lie_at_distances_of_64_bits() -> None:
    """The last stage of so many inputs begins 2^31 weights behind the first."""
    spec, constants = kernel((1, 1024, 2**21 + 1, 1)), SimtConstants(32, 1024, 1, 1, 4, 16, 2, 1, "registers")
    source, run = source_of("simt", spec, constants), in_emulator()
    last = "for (int step = STEPS - 2; step < STEPS; ++step)"
    text = source.text.replace("for (int step = 0; step < STEPS; ++step)", last)
    assert text.count(last) == text.count("fetch_weights(held_w, weights);") == 1
    text = text.replace("fetch_weights(held_w, weights);", "")
    x, y = np.zeros(spec.in_features, np.float32), np.zeros(1024, np.float32)
    with pytest.raises(SimtError, match=r"address 0x20000000., outside every buffer"):
        run(replace(source, text=text), source.entry, SIMT.geometry(spec, constants, 1), [x, None, y, 1])


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
    if not SIMT.keeps_rules(spec, constants) or not SIMT.fits(spec, constants, GPU):
        constants = SIMT.default(spec, GPU)
    return spec, constants, draw(st.integers(1, 140))


@pytest.mark.slow
@settings(max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_odd_constants(case: tuple[KernelSpec, SimtConstants, int]) -> None:
    """The same cases in each run, so that the emulator's builds of them are found again."""
    spec, constants, batch = case
    kernels.check(source_of("simt", spec, constants), batch, in_emulator())


@pytest.mark.second
@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_many_odd_constants(case: tuple[KernelSpec, SimtConstants, int]) -> None:
    test_odd_constants.hypothesis.inner_test(case)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "tile_in", "has_constant_steps"),
    [
        ("l.i.j@3,9,7,16", 8, True),  # one stage
        ("l1:2.i.j1:2.l2:24.j2@2,8,48,8", 8, True),  # digits above a stage
        ("l1:4.i.j.l2:12@3,16,48,4", 12, True),
        ("l1:13.i.j.l2:13@2,16,169,4", 8, False),
    ],
)
def test_exchanged_inputs_with_and_without_constant_distances(
    text: str, tile_in: int, has_constant_steps: bool
) -> None:
    spec = KernelSpec(Pattern.parse(text), epilogue=Epilogue(bias=True))
    for limits in (GPU, cuda_limits("sm_75")):
        constants = SIMT.default(spec, limits)
        if constants.copy == "async":
            assert constants.tile_in == tile_in
            assert SimtTiling(spec, constants).x_has_constant_steps == has_constant_steps
        for batch in (1, 37):
            kernels.check(source_of("simt", spec, constants), batch, in_emulator())


BROKEN = [
    ({"copy": "bulk"}, "copy=bulk must be async or registers$"),
    ({"tile_in": 0}, "every constant is at least 1; got tile_in=0; try tile_in=1$"),
    ({"thread_batch": 6}, "thread_batch=6 must be a multiple of a 16-byte group = 4; try 4 or 8$"),
    ({"thread_out": 20, "tile_out": 80}, "thread_out=20 must be at most 16; try 10$"),
    ({"tile_batch": 96}, r"tile_batch=96 must be a multiple of 8 \* thread_batch = 64; try 64 or 128$"),
    ({"tile_out": 40}, r"tile_out=40 must be a multiple of 4 \* thread_out = 32; try 32 or 64$"),
    (
        {"tile_batch": 1024, "tile_out": 128},
        "a block has at most 1024 threads: 2048; got tile_batch=1024; try tile_batch=512$",
    ),
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


def test_constants_from_wisdom_are_checked_by_name_and_type() -> None:
    assert SIMT.constants(asdict(GOOD)) == GOOD
    with pytest.raises(ConstantsError, match="simt constants are tile_batch"):
        SIMT.constants({"tile_batch": 1})
    with pytest.raises(ConstantsError, match="stages='3' must be an integer"):
        SIMT.constants({**asdict(GOOD), "stages": "3"})


def test_lanes_that_a_read_of_shared_memory_serves_at_once_share_it() -> None:
    """A warp's 16-byte reads take four cycles, or two where lanes n and n ^ 1, or n and n ^ 2, ask for the same."""
    text = source_of("simt", kernel()).text
    along = dict(re.findall(r"(lane_batch|lane_out) = ([^,;]+)[,;]", text))
    places = {
        name: [eval(said.replace("/", "//"), {"lane": lane}) for lane in range(32)] for name, said in along.items()
    }
    assert sorted(zip(places["lane_batch"], places["lane_out"], strict=True)) == [
        (m, n) for m in range(8) for n in range(4)
    ]
    for name, step in (("lane_batch", 1), ("lane_out", 2)):
        assert all(places[name][lane] == places[name][lane ^ step] for lane in range(32)), name
    work, registers = SIMT.work(kernel((1, 64, 64, 1)), GOOD, 64), 8 + 8  # operands of a thread for one input
    copied, stored = 2 * 64 * (64 + 32) * 4, 2 * 2 * 64 * 32 * 4
    assert work.shared_bytes + work.returned_bytes == copied + stored + 2 * 64 * (registers // 4) * 2 * 128


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_100", "sm_120", "sm_121"])
def test_defaults_leave_the_registers_that_ptxas_takes_more_of_on_some_targets(target: str) -> None:
    limits, more = cuda_limits(target), gpu_of(target).more_registers
    assert more > 0
    for pattern, precision, layout in product(stratified(30), ("float32", "float16"), LAYOUTS):
        spec = KernelSpec(pattern, precision, layout)
        constants = SIMT.default(spec, limits)
        threads = SimtTiling(spec, constants).threads * constants.min_blocks
        assert threads * (SimtTiling(spec, constants).registers + more) <= limits.registers


@pytest.mark.parametrize(
    ("pattern", "layout", "target", "tile_in", "stages"),
    [
        ((12, 128, 128, 4), "bsf", "sm_90a", 16, 2),
        ((12, 128, 128, 4), "bsl", "sm_90a", 16, 2),
        ((1, 256, 40, 4), "bsf", "sm_90a", 8, 3),  # 16 inputs would pad c
        ((4, 64, 64, 16), "bsf", "sm_86", 8, 3),  # 99 KB of shared memory
        ((12, 128, 128, 4), "bsf", "sm_120", 8, 3),  # where ptxas takes all registers for such a loop
        ((1, 64, 256, 12), "bsl", "sm_90a", 16, 4),  # 16 steps, which three do not divide
        ((1, 64, 192, 12), "bsl", "sm_90a", 16, 3),  # 12 steps, which three divide
        ((4, 64, 64, 16), "bsl", "sm_90a", 16, 3),  # 4 steps are one round: no loop
    ],
)
def test_stages_of_twice_the_inputs_or_as_many_as_divide_the_steps(
    pattern: tuple[int, ...], layout: str, target: str, tile_in: int, stages: int
) -> None:
    found = SIMT.default(KernelSpec(Pattern(*pattern), "float32", layout), cuda_limits(target))
    assert (found.tile_in, found.stages) == (tile_in, stages)


def test_an_epilogue_decides_no_constants() -> None:
    kernel, limits = KernelSpec(Pattern(12, 128, 128, 4), "float32", "bsf"), cuda_limits("sm_90a")
    for epilogue in (Epilogue(bias=True), Epilogue(True, "gelu"), Epilogue(residual=True)):
        assert SIMT.default(replace(kernel, epilogue=epilogue), limits) == SIMT.default(kernel, limits)
