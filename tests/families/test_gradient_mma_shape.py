"""What follows from the constants of gradients on tensor cores."""

from dataclasses import replace

import pytest

from ksgen.families.gradient.mma import GradientMmaConstants, GradientMmaTiling
from ksgen.families.gradient.parts import registers_taken
from ksgen.families.mma.shape import wavefronts
from tests.support.gradients import kernel

GOOD_MMA = GradientMmaConstants(64, 32, 1, 32, 2, 1, 3, 1024, 2, 1)


def test_lanes_read_operands_without_bank_conflicts() -> None:
    for tile_batch in (32, 64, 96):
        shape = GradientMmaTiling(kernel(precision="float16", layout="bsl"), replace(GOOD_MMA, tile_batch=tile_batch))
        assert wavefronts([(lane // 4 * shape.pitch + (lane % 4 ^ lane // 8) * 8) * 2 for lane in range(32)]) == 4


@pytest.mark.parametrize(("d", "turns"), [(1, 1), (2, 1), (3, 2), (4, 1), (8, 1)])
def test_copies_of_words_meet_few_bank_conflicts(d: int, turns: int) -> None:
    each = kernel((1, 64, 64, d), precision="tf32", layout="bsf")
    shape = GradientMmaTiling(each, replace(GOOD_MMA, tile_d=d, tile_batch=16))
    for side, tile in ((shape.x, 32), (shape.dy, 64)):
        assert shape.write_cycles(side) <= turns * d * tile * 16 * 4 // 128


def test_registers_are_given_to_four_warps_at_a_time() -> None:
    assert registers_taken(100, 96, 1) == 100 * 128
    assert registers_taken(100, 96, 4) == 100 * 96 * 4
    assert registers_taken(168, 96, 3) <= 65536 < registers_taken(176, 96, 3)
