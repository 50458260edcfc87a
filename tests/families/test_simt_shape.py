"""What follows from SIMT's constants: shared memory without bank conflicts, and copies whose addresses cost little."""

from dataclasses import replace

import pytest

from ksgen.families import cuda_limits
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtTiling
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
