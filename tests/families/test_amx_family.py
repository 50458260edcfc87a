"""Tests of the amx family: kernels that it serves, and constants that it accepts."""

from dataclasses import replace
from itertools import product

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import check, families_for, family_for
from ksgen.families.amx import AmxConstants
from ksgen.spec import LAYOUTS
from tests.families.test_vector import kernel_of
from tests.support.amx_kernels import CPU, FAMILY


def test_which_kernels_it_serves() -> None:
    kernel = kernel_of((2, 9, 5, 3), "bf16x6")
    assert family_for(kernel, CPU).name == family_for(replace(kernel, precision="tf32x3"), CPU).name == "amx"
    assert family_for(kernel, replace(CPU, tiles=())).name == "vector"
    assert family_for(replace(kernel, precision="float32"), CPU).name == "vector"
    assert not FAMILY.serves(replace(kernel, precision="float32"), CPU)
    for precision, tiles in (("bfloat16", "bf16"), ("float16", "f16")):
        each = replace(kernel, precision=precision)
        assert [family.name for family in families_for(each, CPU)] == ["amx", "vector", "simt"]
        assert family_for(each, CPU).name == "vector"  # until it is measured
        assert not FAMILY.serves(each, replace(CPU, tiles=tuple({"bf16", "f16"} - {tiles})))
    assert not FAMILY.serves(replace(kernel, job="gradient"), CPU)
    assert not FAMILY.serves(kernel, replace(CPU, is_cpu=False))


# ---- constants

GOOD = AmxConstants(64, 32, 2, 1, 0, 2)
BAD = {
    "every constant but panel and past is at least 1; got parts=0; try parts=1": replace(GOOD, parts=0),
    "panel=3 must be 0, 1 or 2": replace(GOOD, panel=3),
    "past=-1 must be 0 or 1; try 0": replace(GOOD, past=-1),
    "block=40 must be a multiple of 32; try 32 or 64": replace(GOOD, block=40),
    "outputs=16 must be a multiple of 32; try 32": replace(GOOD, outputs=16),
    "panel=0 must be 1 or 2 but for rows of 16-bit neighbours, at least 32 of them: bsf, not interleaved; try 1": replace(GOOD, panel=0),
    "depth=3 must be at most the tiles along the inputs = 2; try 2": replace(GOOD, depth=3),
    "parts=5 must be at most the groups of outputs = 4; try 4": replace(GOOD, parts=5),
}


@pytest.mark.parametrize("says", BAD)
def test_rules(says: str) -> None:
    kernel = kernel_of((2, 40, 40, 2), "bfloat16")
    check(FAMILY, kernel, GOOD)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, BAD[says])


def test_rules_of_the_job_of_precisions_and_of_rows_in_place() -> None:
    with pytest.raises(ConstantsError, match="job=gradient must be multiply"):
        check(FAMILY, replace(kernel_of((2, 40, 40, 2), "bfloat16"), job="gradient"), GOOD)
    with pytest.raises(ConstantsError, match="precision=float32 must be one that matrix tiles multiply: float16, bfloat16, tf32x3, bf16x6"):
        check(FAMILY, kernel_of((2, 40, 40, 2)), GOOD)
    check(FAMILY, kernel_of((2, 40, 40, 1), "bfloat16"), replace(GOOD, panel=0))
    for kernel in (
        kernel_of((2, 40, 31, 1), "bfloat16"),
        kernel_of((2, 40, 40, 1), "bf16x6"),
        kernel_of((2, 40, 40, 1), "bfloat16", "bsl"),
    ):
        with pytest.raises(ConstantsError, match="panel=0 must be 1 or 2 but for rows"):
            check(FAMILY, kernel, replace(GOOD, panel=0, depth=1))


def test_the_space_keeps_the_rules() -> None:
    for shape, layout in product(((2, 40, 40, 1), (1, 1, 1, 1), (2, 4, 5, 3)), LAYOUTS):
        kernel = kernel_of(shape, "bfloat16", layout)
        found = list(FAMILY.space(kernel, CPU))
        assert len(set(found)) == len(found) > 3
        for constants in found:
            check(FAMILY, kernel, constants, CPU)
    assert {each.panel for each in FAMILY.space(kernel_of((2, 40, 40, 1), "bfloat16"), CPU)} == {0, 1, 2}
