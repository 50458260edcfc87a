"""What tests of devices share: the OpenCL device of this machine."""

import pytest

from ksgen.devices import find_device
from ksgen.errors import DeviceError


@pytest.fixture(scope="module")
def device():
    try:
        return find_device("opencl")
    except DeviceError as absent:
        pytest.skip(str(absent))
