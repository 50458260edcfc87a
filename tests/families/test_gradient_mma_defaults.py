"""Constants of gradients on tensor cores before any search."""

from dataclasses import replace
from typing import Any

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import cuda_limits
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants
from ksgen.families.gradient.plain import GradientConstants
from tests.support.gradients import kernel

FAMILY, TENSOR_CORES = Gradient(GradientConstants), Gradient(GradientMmaConstants)
GPU = cuda_limits("sm_90a")


@pytest.mark.parametrize("family", [FAMILY, TENSOR_CORES])
def test_a_device_that_no_tile_fits_is_reported(family: Any) -> None:
    small, spec = replace(GPU, shared_bytes=512), kernel(precision="float16")
    with pytest.raises(
        ConstantsError, match=r"ks_2x37x13x5_float16_bsf_gradient: no tile fits 512 bytes of shared memory and 1024"
    ):
        family.default(spec, small)
