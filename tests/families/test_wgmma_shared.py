"""X from shared memory: its rules."""

from dataclasses import replace

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import check, family_named
from ksgen.families.wgmma.shared import SharedConstants
from ksgen.spec import Epilogue
from tests.support.kernels import check as check_result
from tests.support.kernels import check_exact, in_emulator
from tests.support.wgmma_kernels import GPU, kernel, text_of

SHARED, REGISTERS, PERMUTED = map(family_named, ("wgmma_shared", "wgmma_registers", "wgmma_permuted"))
PLAIN = SharedConstants(256, 64, 64, 2, 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile_out": 40}, "tile_out=40 must be a multiple of 16 in bsl; try 32 or 48$"),
        ({"tile_in": 24}, "tile_in=24 must be a multiple of 16 in bsl, of 64 in bsf; try 16 or 32$"),
        ({"tile_out": 256}, r"sums fit a thread's registers: 256; got tile_batch=256; try tile_batch=128$"),
        ({"groups_batch": 3}, r"tile_batch=256 must be a multiple of 64 \* groups_batch = 192; try 192 or 384$"),
        ({"cluster_batch": 16}, "a cluster is at most 8 blocks.*; got cluster_batch=16; try cluster_batch=8$"),
    ],
)
def test_each_rule_of_shared_has_two_sides(changes: dict[str, int], says: str) -> None:
    check(SHARED, kernel(layout="bsl"), PLAIN, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(SHARED, kernel(layout="bsl"), replace(PLAIN, **changes), GPU)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "constants",
    [SharedConstants(64, 32, 16, 1, 2), SharedConstants(192, 48, 32, 3, 3), SharedConstants(256, 16, 48, 2, 2)],
)
def test_a_residual_comes_to_where_y_leaves_as_boxes(constants: SharedConstants) -> None:
    """One to three warpgroups take tile after tile in the same place, over ragged outputs and batches."""
    each = replace(kernel(layout="bsl", pattern=(2, 37, 24, 3)), epilogue=Epilogue(True, "relu", True))
    source = text_of(SHARED, each, constants)
    check_result(source, 300, in_emulator(), in_place=True)
    check_result(source, 72, in_emulator(sanitize="race"))
    check_exact(source, 136, in_emulator(sanitize="address"))
