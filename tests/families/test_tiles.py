"""What families of tiled kernels share: how constants are read, how many tiles there are, how warps walk over one."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from ksgen.errors import ConstantsError
from ksgen.families.mma.shape import MmaConstants, MmaTiling
from ksgen.families.simt.shape import SimtConstants, SimtTiling
from ksgen.families.tiles import (
    WARP,
    Constants,
    CopyPlan,
    Tiled,
    divide_up,
    epilogue_constexprs,
    pattern_constexprs,
    power_of_two_in,
    read_constants,
)  # fmt: skip
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec


@dataclass(frozen=True)
class Few(Constants):
    tile_in: int
    copy: str
    tile_out: int = 8
    tile_d: int = 1


def test_numbers() -> None:
    assert [divide_up(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [power_of_two_in(value, 8) for value in (1, 6, 24, 48)] == [1, 2, 8, 8]


def test_constants_are_read_by_name_and_what_came_later_has_its_default() -> None:
    assert read_constants("few", (Few,), {"tile_in": 4, "copy": "async"}) == Few(4, "async", 8)
    assert str(Few(4, "async")) == "tile_in=4, copy=async, tile_out=8, tile_d=1"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tile_in": 4}, "few constants are tile_in, copy, tile_out, tile_d; got tile_in"),
        (
            {"tile_in": 4, "copy": "a", "more": 1},
            "few constants are tile_in, copy, tile_out, tile_d; got tile_in, copy, more",
        ),
        ({"tile_in": "4", "copy": "a"}, "few constant tile_in='4' must be an integer"),
        ({"tile_in": True, "copy": "a"}, "few constant tile_in=True must be an integer"),
        ({"tile_in": 4, "copy": 1}, "few constant copy=1 must be a word"),
    ],
)
def test_other_names_and_types_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstantsError) as caught:
        read_constants("few", (Few,), values)
    assert str(caught.value) == message


def elements(plan: CopyPlan) -> list[tuple[int, int]]:
    """What each lane copies, as (line, place in its run); lines beyond the last are not there."""
    found = []
    for warp in range(plan.warps):
        along, down = warp % plan.warps_run, warp // plan.warps_run
        for lane in range(WARP):
            for line_round in range(plan.line_rounds):
                line = line_round * plan.line_step + down * plan.lane_lines + lane // plan.lane_run
                for run_round in range(plan.run_rounds):
                    place = run_round * plan.run_step + (along * plan.lane_run + lane % plan.lane_run) * plan.vector
                    found += [(line, place + each) for each in range(plan.vector) if line < plan.lines]
    return found


@pytest.mark.parametrize(
    "plan",
    [
        CopyPlan(32, 64, 4, 16, 4),
        CopyPlan(7, 32, 1, 32, 3),
        CopyPlan(16, 8, 2, 4, 8),
        CopyPlan(5, 128, 4, 8, 6),
        CopyPlan(40, 128, 4, 8, 6),
    ],
    ids=str,
)
def test_a_blocks_warps_copy_every_element_once(plan: CopyPlan) -> None:
    assert sorted(elements(plan)) == [(line, place) for line in range(plan.lines) for place in range(plan.run)]


def test_changed_constants_are_those_that_dataclasses_would_make() -> None:
    few = Few(4, "async")
    changed = few.changed(tile_in=8, copy="registers")
    assert (changed, hash(changed)) == (Few(8, "registers"), hash(Few(8, "registers")))
    assert (list(vars(changed)), few) == (["tile_in", "copy", "tile_out", "tile_d"], Few(4, "async"))
    with pytest.raises(TypeError, match=r"^Few has no tile$"):
        few.changed(tile=8)


def test_tiles_cover_a_pattern_with_rests() -> None:
    tiled = Tiled()
    tiled.kernel, tiled.constants = KernelSpec(Pattern(3, 17, 9, 5)), Few(4, "async", 8, 2)
    assert (tiled.steps, tiled.tiles_out, tiled.tiles_d, tiled.tiles_of_batch) == (3, 3, 3, 27)


def test_sizes_of_the_same_two_objects_are_one_object_and_of_others_their_own() -> None:
    kernel, constants = KernelSpec(Pattern(3, 17, 9, 5)), SimtConstants(32, 16, 8, 1, 4, 4, 2, 1, "registers")
    sizes, again = SimtTiling.of(kernel, constants), SimtTiling.of(kernel, constants)
    assert sizes is again
    assert sizes == SimtTiling(kernel, constants)
    wider, bfloat16 = replace(constants, tile_out=32), replace(kernel, precision="bfloat16")
    for each in ((kernel, wider), (bfloat16, wider), (kernel, constants)):
        assert SimtTiling.of(*each) == SimtTiling(*each)
    tiles = MmaConstants(64, 32, 16, 5, 2, 1, 2, 0, 1)
    assert type(MmaTiling.of(bfloat16, tiles)) is MmaTiling
    assert MmaTiling.of(bfloat16, tiles).shared_bytes == MmaTiling(bfloat16, tiles).shared_bytes


def test_every_text_states_its_pattern_batch_and_epilogue() -> None:
    kernel = KernelSpec(Pattern(2, 3, 4, 5), batch=7, epilogue=Epilogue(bias=True))
    assert {each.name: each.value for each in pattern_constexprs(kernel)} == {
        "A": 2,
        "B": 3,
        "C": 4,
        "D": 5,
        "BATCH": 7,
    }
    assert {each.name: each.value for each in epilogue_constexprs(kernel)} == {"HAS_BIAS": True, "HAS_RESIDUAL": False}
    assert pattern_constexprs(KernelSpec(Pattern(2, 3, 4, 5)))[-1].value == 0
