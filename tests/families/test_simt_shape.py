"""What follows from SIMT's constants: shared memory without bank conflicts."""

from ksgen.families import cuda_limits
from ksgen.families.simt import Simt, SimtTiling
from tests.support.simt_kernels import kernel

SIMT = Simt()
GPU = cuda_limits("sm_90a")


def test_shared_memory_of_the_copy_is_free_of_bank_conflicts() -> None:
    """Every warp-wide 4-byte store of the transposing copy, and every 16-byte load of a fragment, hits all banks once."""
    for d in range(1, 17):
        spec = kernel((1, 64, 64, d))
        shape = SimtTiling(spec, SIMT.default(spec, GPU))
        plan = shape.x_plan
        banks = set()
        for lane in range(32):
            line, run = lane // plan.lane_run, lane % plan.lane_run
            tile_d = shape.constants.tile_d
            banks.add((run % tile_d * shape.x_plane + run // tile_d * shape.x_pitch + line) % 32)
        assert len(banks) == 32 or plan.lane_run < 8, (d, shape.constants)
