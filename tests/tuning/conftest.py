"""What tests of searches share: a worker of this machine."""

from collections.abc import Iterator

import pytest

from ksgen.tuning.process import Worker
from tests.support.hasty import compiles_hastily

__all__ = ["compiles_hastily"]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker("opencl:0", ["tests.support.broken_kernels"], limit_s=6)
    yield made
    made.close()
