"""A gradient's constants before any search: a device is filled, its workspace is bounded."""

import pytest

from ksgen.families import cuda_limits
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants
from ksgen.families.gradient.plain import GradientConstants
from ksgen.spec import LAYOUTS, PRECISIONS
from tests.support.gradients import kernel

FAMILY, TENSOR_CORES = Gradient(GradientConstants), Gradient(GradientMmaConstants)
GPU = cuda_limits("sm_90a")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 48, 48, 1), (1, 192, 48, 2), (6, 64, 256, 1), (2, 192, 768, 16), (1, 4096, 4096, 1)]
)
def test_long_batches_fill_a_device_with_a_bounded_workspace(shape: tuple[int, ...], precision: str) -> None:
    for layout in LAYOUTS:
        spec = kernel(shape, precision, layout)
        for family in (family for family in (FAMILY, TENSOR_CORES) if family.supports(spec, GPU)):
            constants = family.default(spec, GPU)
            few, many = (family.geometry(spec, constants, batch) for batch in (1, 2**20))
            assert few.workspace_bytes == 0
            assert many.grid * many.block // 32 >= 1900
            assert many.workspace_bytes <= 40_000_000
            assert many.workspace_bytes <= family.packed_bytes(spec, constants)
