"""The tensor-core family's constants before any search."""

import pytest

from ksgen.families import check, cuda_limits, family_named
from ksgen.families.mma.defaults import others
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, paper_patterns
from tests.support.mma_kernels import kernel

MMA = family_named("mma")
GPU = cuda_limits("sm_90a")
PRECISIONS = ("float16", "bfloat16", "tf32", "tf32x3", "fp16x3", "c64_tf32x3")
TARGETS = ("sm_80", "sm_86", "sm_90a")


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("step", [36, pytest.param(9, marks=pytest.mark.second)])
def test_defaults_hold_for_the_paper(step: int, precision: str, target: str) -> None:
    limits = cuda_limits(target)
    odd = [
        Pattern(1, 1, 1, 1),
        Pattern(3, 997, 5, 97),
        Pattern(1, 17, 33, 13),
        Pattern(2, 5, 1009, 1),
        Pattern(1, 3, 3, 9),
    ]
    own = paper_patterns()[step * TARGETS.index(target) :: step * len(TARGETS)]  # each target has others
    for pattern in [*own, *odd]:
        for layout in LAYOUTS:
            each = kernel(precision, layout, pattern)
            constants = MMA.default(each, limits)
            check(MMA, each, constants, limits)
            assert MMA.registers(each, constants) <= 255 or pattern in odd
            assert MMA.shared_bytes(each, constants) <= limits.shared_bytes_for(constants.min_blocks)


def test_float32_grade_sums_are_promoted() -> None:
    for layout in LAYOUTS:
        for precision, target, inputs, wanted in (
            ("tf32x3", "sm_90a", (16, 47, 48, 64), [0, 16, 32, 32]),
            ("tf32x3", "sm_100", (47, 48), [16, 32]),
            ("tf32x3", "sm_80", (47, 48, 64), [16, 16, 16]),
            ("tf32x3", "sm_89", (48,), [16]),
            ("fp16x3", "sm_90a", (32, 33, 64, 65), [0, 32, 32, 64]),
            ("fp16x3", "sm_80", (16, 17, 47, 48, 64), [0, 16, 16, 32, 32]),
            ("c64_tf32x3", "sm_90a", (8, 9, 23, 24), [0, 8, 8, 16]),
            ("c64_tf32x3", "sm_80", (16, 24, 48), [8, 8, 8]),
            ("tf32", "sm_80", (48, 1024), [0, 0]),
        ):
            limits = cuda_limits(target)
            found = [MMA.default(kernel(precision, layout, Pattern(1, 48, c, 4)), limits).promote for c in inputs]
            assert found == wanted, (precision, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_space_holds_to_the_rules_and_the_default_lies_near(layout: str) -> None:
    each = kernel("tf32x3", layout)
    found = list(MMA.space(each, GPU))
    assert len(found) > 200
    for constants in found[:: len(found) // 20]:
        check(MMA, each, constants, GPU)
    assert {constants.promote for constants in found} == {32}  # a search buys no speed with accuracy
    assert {constants.promote for constants in MMA.space(each, cuda_limits("sm_80"))} == {16}


def test_no_two_alternatives_differ_in_min_blocks_alone() -> None:
    for layout in LAYOUTS:
        found = list(others(kernel("tf32x3", layout, Pattern(1, 192, 48, 2)), cuda_limits("sm_86")))
        assert {each.min_blocks for each in found} == {1, 2}
        assert len({each.changed(min_blocks=1) for each in found}) == len(found)
