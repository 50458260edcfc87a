"""What all runtimes share: targets by compute capability, and an array's own bytes."""

import ml_dtypes
import numpy as np
import pytest

from ksgen.devices import base
from ksgen.errors import DeviceError


def test_targets_name_hoppers_own_instructions():
    assert [base.cuda_target(*capability) for capability in ((8, 0), (9, 0), (12, 0))] == ["sm_80", "sm_90a", "sm_120"]


def test_bytes_of_an_array_are_its_own_memory():
    x = np.zeros((2, 2), ml_dtypes.bfloat16)
    base.as_bytes(x)[:] = 255
    assert np.isnan(x.astype(np.float32)).all()
    with pytest.raises(DeviceError, match="only row-major arrays are copied"):
        base.as_bytes(np.zeros((2, 2)).T)
