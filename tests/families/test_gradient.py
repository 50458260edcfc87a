"""The gradient's constants: rules, parts of the batch, bank conflicts, work."""

from dataclasses import replace
from typing import Any

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, Limits, check, cuda_limits, family_for
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants
from ksgen.families.gradient.plain import GradientConstants
from ksgen.spec import PRECISIONS
from tests.support.gradients import kernel

FAMILY, TENSOR_CORES = Gradient(GradientConstants), Gradient(GradientMmaConstants)
GPU = cuda_limits("sm_90a")
GOOD = GradientConstants(32, 32, 1, 16, 8, 4, 3, 2, 1, "async")
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"copy": "bulk"}, "copy=bulk must be async or registers$"),
    ({"parts": 0}, "every constant is at least 1; got parts=0; try parts=1$"),
    ({"tile_in": 136, "thread_in": 17}, "thread_in=17 must be at most 16; try 1$"),
    ({"tile_in": 40}, r"tile_in=40 must be a multiple of 8 \* thread_in = 32; try 32 or 64$"),
    ({"tile_out": 48}, r"tile_out=48 must be a multiple of 4 \* thread_out = 32; try 32 or 64$"),
    ({"tile_batch": 12}, "tile_batch=12 must be a multiple of 8; try 8 or 16$"),
    ({"tile_in": 512, "tile_out": 256}, "a block has at most 1024 threads: 4096; got tile_out=256; try tile_out=64$"),
    ({"tile_d": 6}, "tile_d=6 must be at most d=5; try 5$"),
    ({"stages": 1}, "stages=1 must be at least 2; try 2$"),
    ({"copy": "registers"}, "stages=3 must be 2 with copy=registers; try 2$"),
]


@pytest.mark.parametrize(("changes", "says"), BROKEN)
def test_each_rule_refuses_its_case(changes: dict[str, Any], says: str) -> None:
    check(FAMILY, kernel(), GOOD, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel(), replace(GOOD, **changes))


def test_rules_on_job_layout_and_precision() -> None:
    with pytest.raises(ConstantsError, match="job=multiply must be gradient"):
        check(FAMILY, replace(kernel(), job="multiply"), GOOD)
    with pytest.raises(ConstantsError, match="tile_d=2 must be 1 in bsl; try 1"):
        check(FAMILY, kernel(layout="bsl"), replace(GOOD, tile_d=2))
    with pytest.raises(ConstantsError, match="copy=async must be registers in a 16-bit precision"):
        check(FAMILY, kernel(precision="float16"), GOOD)


def test_which_family_takes_a_gradient() -> None:
    def on_cores(precision: str, limits: Limits) -> bool:
        own = kernel(precision=precision)
        assert (family_for(own, limits).name, FAMILIES["gradient"].supports(own, limits)) == ("gradient", True)
        assert FAMILIES["gradient"].defaults(own, limits)[-1] == FAMILY.default(own, limits)
        return bool(FAMILIES["gradient"].default(own, limits).on_tensor_cores)

    assert {name: on_cores(name, GPU) for name in PRECISIONS} == {
        name: bool(each.operand) for name, each in PRECISIONS.items()
    }
    assert not any(on_cores(precision, cuda_limits("sm_75")) for precision in PRECISIONS)
