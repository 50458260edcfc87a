"""A fixture for tests of what calls a processor's kernels, and not of those themselves: they compile hundreds, in less time."""

import shlex
from collections.abc import Iterator

import pytest

from ksgen.build.host import HostCompiler
from ksgen.devices import find_device
from ksgen.errors import DeviceError
from tests.support.compilers import hasty


@pytest.fixture(scope="module", autouse=True)
def compiles_hastily(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In this process, whose processor was found before, and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            processor = find_device("native")
        except DeviceError:
            pass  # there is no compiler: tests that need one say so
        else:
            program = str(hasty(tmp_path_factory.mktemp("compiler")))
            compiler = HostCompiler((program,))
            patch.setattr(processor, "compiler", lambda: compiler)
            patch.setenv("KSGEN_CXX", shlex.quote(program))
        yield
