"""X from registers: its rules, and what fits registers."""

from dataclasses import replace

import pytest

from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import check, family_named
from ksgen.families.wgmma.registers import RegistersConstants
from tests.support import sass
from tests.support.wgmma_kernels import GPU, kernel

SHARED, REGISTERS, PERMUTED = map(family_named, ("wgmma_shared", "wgmma_registers", "wgmma_permuted"))
FLAT = RegistersConstants(128, 48, 32, 4, 2, 1, 3, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"tile_d": 2},
            "tile_d=2 must be 1 in bsl, and in bsf d=4 or a shorter run of 16, 32, 64 or 128 bytes; try 4$",
        ),
        ({"tile_batch": 192}, r"tile_batch=192 must be a multiple of 64 \* groups_batch = 128; try 128$"),
        ({"tile_batch": 320, "groups_batch": 1, "tile_out": 8}, "tile_batch=320 must be at most 256 in bsf; try 256$"),
        ({"tile_out": 44}, "tile_out=44 must be a multiple of 8, up to 256; try 40 or 48$"),
        ({"tile_out": 264}, "tile_out=264 must be a multiple of 8, up to 256; try 96$"),
        ({"tile_in": 24}, "tile_in=24 must be a multiple of the period .* of X's layout = 16; try 16 or 32$"),
        ({"tile_in": 272}, "tile_in=272 must be at most 256; try 256$"),
        ({"stages": 1}, "stages=1 must be 2 to 16; try 2$"),
        ({"stages": 0}, "every constant but promote and resident is at least 1; got stages=0; try stages=2$"),
        ({"cluster_batch": 3}, "of them 1, 2, 4 or 8 along the batch; got cluster_batch=3; try cluster_batch=2 or 4$"),
        (
            {"cluster_batch": 8, "cluster_out": 2, "tile_out": 24},
            "a cluster is at most 8 blocks.*; try cluster_batch=4$",
        ),
        ({"cluster_out": 2}, "cluster_out=2 must be a divisor of the tiles along the outputs = 1; try 1$"),
        (
            {"cluster_out": 4, "tile_out": 16, "tile_batch": 64, "groups_batch": 1},
            "cluster_out=4 must be a divisor of .* = 3; try 1$",
        ),
        (
            {"groups_batch": 4, "tile_batch": 256},
            "one to three warpgroups multiply: 4; got groups_batch=4; try groups_batch=3$",
        ),
        (
            {"groups_d": 2, "groups_batch": 1, "tile_batch": 64},
            "warpgroups along j have whole 16-byte chunks of their own; got groups_d=2; try groups_d=1$",
        ),
        ({"tile_out": 104}, r"sums and fragments fit a thread's registers: \d+; got tile_out=104; try tile_out=96$"),
        ({"promote": 48}, "promote=48 must be 0, or a multiple of tile_in=32; try 32 or 64$"),
    ],
)
def test_each_rule_of_registers_has_two_sides(changes: dict[str, int], says: str) -> None:
    check(REGISTERS, kernel(), FLAT, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(REGISTERS, kernel(), replace(FLAT, **changes), GPU)


@pytest.mark.exhaustive
@pytest.mark.parametrize("resident", [0, 1])
def test_three_warpgroups_have_as_many_outputs_as_compile(resident: int) -> None:
    """ptxas refuses one more eight of outputs, for its 128 registers per thread."""
    each = kernel("bfloat16", pattern=(1, 416, 64, 1))
    most = RegistersConstants(192, 192, 64, 1, 3, 1, 2, 0, resident)
    check(REGISTERS, each, most, GPU)
    source = render(each, most, family="wgmma")
    assert sass.compiled(source.text, source.entry, "sm_90a").resources.spill_bytes == 0
    with pytest.raises(ConstantsError, match="tile_out=200 must be at most 192 where three warpgroups multiply"):
        check(REGISTERS, each, replace(most, tile_out=200), GPU)


@pytest.mark.parametrize(
    ("precision", "j", "tile_out", "promote", "fits"),
    [  # what ptxas was seen to take without spills, and what it was not
        ("float16", 2, 96, 0, True),
        ("float16", 4, 96, 0, True),
        ("float16", 6, 48, 0, True),
        ("float16", 8, 40, 0, True),
        ("float16", 6, 64, 0, False),
        ("float16", 8, 48, 0, False),
        ("float16", 12, 24, 0, False),
        ("tf32x3", 4, 40, 32, True),
        ("tf32x3", 4, 48, 32, False),
    ],
)
def test_what_fits_registers_is_what_compiles(precision: str, j: int, tile_out: int, promote: int, fits: bool) -> None:
    each = kernel(precision, pattern=(1, 96, 64, j))
    constants = RegistersConstants(128, tile_out, 32, j, 2, 1, 2, promote)
    rule = next(rule for rule in REGISTERS.rules[RegistersConstants] if "fragments fit" in rule.says)
    assert rule.holds(each, constants) == fits
