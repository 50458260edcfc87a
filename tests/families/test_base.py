"""What all families share: limits of a device, by name."""

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import Limits, check
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants
from tests.support.simt_kernels import kernel

SIMT = Simt()
GOOD = SimtConstants(64, 32, 8, 1, 8, 8, 3, 1, "async")


def test_limits_of_a_device_are_named() -> None:
    with pytest.raises(ConstantsError, match=r"needs \d+ bytes of shared memory, the device has 1000"):
        check(SIMT, kernel(), GOOD, Limits(1000))
    with pytest.raises(ConstantsError, match=r"needs 32 threads per block, the device allows 16"):
        check(SIMT, kernel(), GOOD, Limits(10**6, threads=16))
