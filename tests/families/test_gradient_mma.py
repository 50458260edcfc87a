"""The same on tensor cores: rules, fragments without conflicts, registers by four warps."""

from dataclasses import replace
from typing import Any

import pytest

from ksgen.build.toolchain import WARNINGS, find_compiler
from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import check, cuda_limits
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants
from ksgen.families.gradient.plain import GradientConstants
from tests.support.gradients import kernel
from tests.support.program import needs_compiler

FAMILY, TENSOR_CORES = Gradient(GradientConstants), Gradient(GradientMmaConstants)
GPU = cuda_limits("sm_90a")
GOOD_MMA = GradientMmaConstants(64, 32, 1, 32, 2, 1, 3, 1024, 2, 1)
BROKEN_MMA: list[tuple[dict[str, Any], str]] = [
    ({"promote": 0}, "every constant is at least 1; got promote=0; try promote=32$"),
    ({"tile_out": 48}, r"tile_out=48 must be a multiple of 16 \* warps_out = 32; try 32 or 64$"),
    ({"tile_in": 36}, r"tile_in=36 must be a multiple of 8 \* warps_in = 8; try 32 or 40$"),
    ({"tile_batch": 16}, "tile_batch=16 must be a multiple of 64 bytes = 32; try 32$"),
    ({"tile_d": 2}, "tile_d=2 must be 1 in bsl; try 1$"),
    (
        {"warps_out": 4, "warps_in": 16, "tile_in": 128},
        "a block has at most 1024 threads: 2048; got warps_out=4; try warps_out=1$",
    ),
    ({"tile_in": 128, "tile_out": 128}, "a thread has at most 96 sums: 256; got tile_out=128; try tile_out=32$"),
    ({"min_blocks": 32}, "min_blocks blocks have at most 1536 threads: 2048; got min_blocks=32; try min_blocks=6$"),
    (
        {"min_blocks": 20},
        r"the registers of min_blocks blocks are at most 65536: \d+; got min_blocks=20; try min_blocks=6$",
    ),
    ({"stages": 1}, "stages=1 must be at least 2, and 2 in 16-bit bsf; try 2$"),
    ({"promote": 48}, "promote=48 must be a multiple of tile_batch=32; try 32 or 64$"),
]


@pytest.mark.parametrize(("changes", "says"), BROKEN_MMA)
def test_each_rule_of_tensor_cores_refuses_its_case(changes: dict[str, Any], says: str) -> None:
    spec = kernel(precision="float16", layout="bsl")
    check(TENSOR_CORES, spec, GOOD_MMA, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(TENSOR_CORES, spec, replace(GOOD_MMA, **changes))


def test_rules_of_tensor_cores_on_job_layout_and_precision() -> None:
    spec = kernel(precision="float16")
    check(TENSOR_CORES, spec, replace(GOOD_MMA, stages=2))
    with pytest.raises(ConstantsError, match="stages=3 must be at least 2, and 2 in 16-bit bsf; try 2"):
        check(TENSOR_CORES, spec, GOOD_MMA)
    with pytest.raises(ConstantsError, match="tile_d=6 must be at most d=5; try 4"):
        check(TENSOR_CORES, spec, replace(GOOD_MMA, stages=2, tile_d=6))
    with pytest.raises(ConstantsError, match="job=multiply must be gradient"):
        check(TENSOR_CORES, replace(spec, job="multiply"), GOOD_MMA)
    with pytest.raises(
        ConstantsError,
        match="precision=float32 must be one that tensor cores multiply: float16, bfloat16, tf32, tf32x3, fp16x3, "
        "c64_tf32x3",
    ):
        check(TENSOR_CORES, kernel(), GOOD_MMA)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("shape", [(2, 9, 5, 3), (2, 16, 8, 4)])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_sources_in_16_bits_compile_without_warnings(
    shape: tuple[int, int, int, int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies move one element in one shape, and several in the other one."""
    monkeypatch.setenv(WARNINGS, "error")
    spec = kernel(shape, precision)
    source = render(spec, TENSOR_CORES.default(spec, GPU), family="gradient_mma")
    assert ("X_VECTOR         =        1;" in source.text) == (shape[-1] == 3)
    assert find_compiler().compile(source.text, source.entry, "sm_80").data
