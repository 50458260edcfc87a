"""What follows from the tensor-core family's constants: conflicts counted, lanes by the pattern."""

from dataclasses import replace

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import check, family_named
from ksgen.families.mma.shape import MmaConstants, MmaTiling, wavefronts
from ksgen.pattern import Pattern
from tests.support.mma_kernels import kernel

MMA = family_named("mma")
GOOD = MmaConstants(64, 64, 32, 4, 2, 2, 3, 0, 1)


def test_conflicts_are_counted_and_refused() -> None:
    assert wavefronts([16 * lane for lane in range(32)]) == 4
    assert wavefronts([128 * lane for lane in range(32)]) == 32
    assert wavefronts([0] * 32) == 4  # one chunk for all
    # four lanes read 64 bytes apart: whatever the pitch, two meet
    wide = kernel("tf32", pattern=Pattern(1, 16, 16, 16))
    with pytest.raises(ConstantsError, match="no bank conflicts"):
        check(MMA, wide, MmaConstants(16, 16, 8, 16, 2, 1, 2, 0, 1))


def test_shape_of_a_lane_follows_the_pattern() -> None:
    flat = MmaTiling(kernel("float16", pattern=Pattern(1, 48, 64, 3)), replace(GOOD, tile_d=3))
    assert (flat.group_chunks, flat.group_inputs, flat.super_in, flat.super_steps, flat.super_groups) == (
        3,
        8,
        32,
        2,
        1,
    )
    slab = MmaTiling(kernel("float16", pattern=Pattern(1, 48, 64, 16)), replace(GOOD, tile_d=8))
    assert (slab.group_chunks, slab.group_inputs, slab.super_in, slab.super_steps, slab.super_groups) == (
        1,
        1,
        16,
        1,
        4,
    )
    assert slab.x_vector == slab.y_vector == 8
    assert MmaTiling(kernel(pattern=Pattern(1, 48, 63, 1)), replace(GOOD, tile_d=1)).x_vector == 1
