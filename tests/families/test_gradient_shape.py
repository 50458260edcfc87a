"""What follows from a gradient's constants: few bank conflicts."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ksgen.emit.render import render
from ksgen.families.gradient.plain import GradientConstants, GradientTiling
from ksgen.families.simt.shape import eight_read_cycles, four_read_cycles
from ksgen.spec import LAYOUTS
from tests.support.gradients import kernel

GOOD = GradientConstants(32, 32, 1, 16, 8, 4, 3, 2, 1, "async")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_meet_few_bank_conflicts(layout: str) -> None:
    """Two elements in a bank at most, and none where TILE_D is a power of two."""
    for d, most in ((1, 1), (2, 1), (3, 2), (4, 1), (5, 2), (6, 2), (7, 2), (8, 1)):
        shape = GradientTiling(kernel((1, 64, 64, d), layout=layout), replace(GOOD, tile_d=1 if layout == "bsl" else d))
        for side in (shape.x, shape.dy):
            assert max(_banks(side, layout, shape.constants.tile_d)) <= most, (d, side)


def test_lanes_that_a_read_of_shared_memory_serves_at_once_share_it() -> None:
    """Lanes share reads as in `simt`: a warp's 16-byte reads take two cycles."""
    text = render(kernel((1, 64, 64, 2))).text
    along = dict(re.findall(r"(lane_in|lane_out) = ([^,;]+)[,;]", text))
    places = {
        name: [eval(said.replace("/", "//"), {"lane": lane}) for lane in range(32)] for name, said in along.items()
    }
    assert sorted(zip(places["lane_in"], places["lane_out"], strict=True)) == [
        (m, n) for m in range(8) for n in range(4)
    ]
    for name, step in (("lane_in", 1), ("lane_out", 2)):
        assert all(places[name][lane] == places[name][lane ^ step] for lane in range(32)), name
    assert (eight_read_cycles(16), four_read_cycles(16)) == (2, 2)


def _banks(side: Any, layout: str, tile_d: int) -> list[int]:
    count = [0] * 32
    if side.plan.vector > 1:  # copied 16 bytes at a time, as they lie
        return count
    for lane in range(32):
        line, run = divmod(lane, side.plan.lane_run)
        place: Callable[[int, int], int] = (
            (lambda line, run: run % tile_d * side.image.plane + line * side.image.next_row + run // tile_d)
            if layout == "bsf"
            else (lambda line, run: run * side.image.next_row + line)
        )
        count[place(line, run) % 32] += 1
    return count
