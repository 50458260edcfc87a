"""A block of warpgroups: its registers and its conflicts."""

from dataclasses import replace

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import check, family_named
from ksgen.families.wgmma import block as blocks
from ksgen.families.wgmma.registers import RegistersConstants
from tests.support.wgmma_kernels import GPU, kernel

SHARED, REGISTERS, PERMUTED = map(family_named, ("wgmma_shared", "wgmma_registers", "wgmma_permuted"))
FLAT = RegistersConstants(128, 48, 32, 4, 2, 1, 3, 0)
SLAB = RegistersConstants(64, 32, 16, 16, 1, 2, 3, 0)


def test_registers_that_warpgroups_take_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infeasible sum compiles, and then waits for ever."""
    for groups, (copying, multiplying) in blocks.REGISTERS.items():
        assert 128 * (copying + groups * multiplying) <= blocks.LAUNCHED[groups] * 128 * (groups + 1) <= 65536
    monkeypatch.setitem(blocks.REGISTERS, 2, (40, 240))
    with pytest.raises(ConstantsError, match="the warpgroups' registers fit a multiprocessor"):
        check(REGISTERS, kernel(), FLAT, GPU)


def test_conflicts_are_counted_and_refused() -> None:
    """16 j of 32 bits in one run hit the same banks; as runs of 32 bytes they do not."""
    each = kernel("tf32", pattern=(1, 48, 64, 16))
    check(REGISTERS, each, replace(SLAB, tile_d=8), GPU)
    with pytest.raises(ConstantsError, match="X is read from shared memory with no bank conflicts"):
        check(REGISTERS, each, replace(SLAB, tile_d=16, tile_out=8, groups_d=2), GPU)
