"""What the driver's version tells."""

from ksgen.devices import base


def test_the_driver_version_tells_the_newest_cuda():
    assert base.cuda_driver_version(12080).endswith("CUDA 12.8")
