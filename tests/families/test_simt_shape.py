"""What follows from SIMT's constants: shared memory without bank conflicts, and copies whose addresses cost little."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksgen.families import cuda_limits
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants, SimtTiling
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.exchange import orders
from tests.support.simt_kernels import kernel

SIMT = Simt()
GPU = cuda_limits("sm_90a")


def test_shared_memory_of_the_copy_is_free_of_bank_conflicts() -> None:
    """Every warp-wide 4-byte store of the transposing copy, and every 16-byte load of a fragment, hits all banks
    once.
    """
    for d in range(1, 17):
        spec = kernel((1, 64, 64, d))
        shape = SimtTiling(spec, SIMT.default(spec, GPU))
        plan = shape.x_plan
        banks = set()
        for lane in range(32):
            line, run = lane // plan.lane_run, lane % plan.lane_run
            banks.add((run * shape.x_plane + line) % 32)
        assert len(banks) == 32 or plan.lane_run < 8, (d, shape.constants)


@pytest.mark.parametrize(
    ("pattern", "tile_batch", "tile_d", "rounds"),
    [
        ((4, 64, 64, 16), 64, 8, (1, 16)),  # 16 warps of four lines: each copies whole runs of its lines
        ((1, 384, 96, 4), 128, 4, (2, 8)),
        # 12 warps: with one to a run, the last round of lines would be nearly empty
        ((1, 1024, 1024, 6), 64, 6, (3, 6)),
        ((1, 64, 256, 12), 64, 6, (4, 4)),  # half of the j: only steps of whole l are alike, which take three warps
        ((1, 256, 256, 1), 128, 1, (4, 2)),
    ],
)
def test_a_thread_copies_along_the_run_where_that_saves_addresses(
    pattern: tuple[int, ...], tile_batch: int, tile_d: int, rounds: tuple[int, int]
) -> None:
    """A distance along a run is part of the instruction; each further row of the batch has an address of its own."""
    spec = kernel(pattern)
    shape = SimtTiling(spec, SIMT.default(spec, GPU))
    assert (shape.constants.tile_batch, shape.constants.tile_d) == (tile_batch, tile_d)
    assert (shape.x_plan.line_rounds, shape.x_plan.run_rounds) == rounds
    through_registers = SimtTiling(spec, replace(shape.constants, copy="registers", stages=2))
    assert through_registers.x_plan.warps_run >= shape.x_plan.warps_run


@st.composite
def tilings(draw: st.DrawFn) -> SimtTiling:
    """Sizes of blocks that read exchanged inputs."""
    natural = Pattern(*(draw(st.sampled_from(sizes)) for sizes in ([1, 2], [8, 64], [6, 8, 12, 24, 36], [1, 2, 4, 6])))
    tile_d = draw(st.sampled_from([each for each in (1, 2, 3, 4, 6) if natural.d % each == 0]))
    tile_in = draw(st.sampled_from([2, 3, 4, 6, 8, 12, 16]))
    pattern = Pattern(*natural.shape, load=draw(orders(natural.inputs)))
    constants = SimtConstants(32 * draw(st.sampled_from([1, 2])), 32, tile_in, tile_d, 4, 4, 3, 1, "async")
    return SimtTiling(KernelSpec(pattern), constants)


@given(tilings())
def test_exchanged_inputs_lie_at_constant_distances(own: SimtTiling) -> None:
    """A feature's place is the sum of the places of the thread's first input, of the stage, and of the round."""
    place, plan, pattern = own.kernel.pattern.inputs.place_of, own.x_plan, own.kernel.pattern
    tile_in, tile_d = own.constants.tile_in, own.constants.tile_d
    if not own.x_has_constant_steps:
        return
    for i, first_j, first_in, lane, number in product(
        range(pattern.a), range(0, pattern.d, tile_d), range(0, pattern.c, tile_in), range(plan.run_step),
        range(plan.run_rounds),
    ):  # fmt: skip
        run = lane + number * plan.run_step
        of_input = first_in + run // tile_d
        if of_input < pattern.c:
            of_round = place(0, number * (plan.run_step // tile_d), 0)
            added = place(i, lane // tile_d, first_j + lane % tile_d) + place(0, first_in, 0) + of_round
            assert place(i, of_input, first_j + run % tile_d) == added


@pytest.mark.parametrize(
    ("text", "target", "tile_in", "tile_out", "has_constant_steps"),
    [
        ("j.l.i@3,64,48,4", "sm_80", 16, 64, True),
        ("i.l1:2.l2.j@3,64,48,4", "sm_80", 16, 64, True),  # the natural order
        ("l1:2.i.l2:24.j@8,64,48,4", "sm_80", 8, 64, True),  # 16 do not divide 24
        ("l1:4.i.j.l2:12@3,64,48,4", "sm_80", 12, 64, True),
        ("l1:9.j.i.l2:7@2,64,63,4", "sm_90a", 7, 64, True),
        ("l1:13.i.j.l2:13@2,64,169,4", "sm_90a", 8, 32, False),  # more than 12 inputs: 12 warps instead of 16
        ("l1:4.i.j.l2:12@3,64,48,4", "sm_75", 8, 32, False),  # copies through registers
    ],
)
def test_stages_keep_exchanged_inputs_at_constant_distances(
    text: str, target: str, tile_in: int, tile_out: int, has_constant_steps: bool
) -> None:
    spec = KernelSpec(Pattern.parse(text))
    shape = SimtTiling(spec, SIMT.default(spec, cuda_limits(target)))
    assert (shape.constants.tile_in, shape.constants.tile_out) == (tile_in, tile_out)
    assert shape.x_has_constant_steps == has_constant_steps
