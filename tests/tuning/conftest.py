"""What tests of searches share: a worker of this machine, a store and wisdom of a test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ksgen.launch.planner import PLANNER
from ksgen.tuning.process import Worker
from ksgen.tuning.trials import TrialStore


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker("opencl:0", ["tests.support.broken_kernels"], limit_s=6)
    yield made
    made.close()


@pytest.fixture
def wisdom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of the test's own, in which launchers look."""
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    PLANNER.forget()
    yield
    PLANNER.forget()


@pytest.fixture
def store(tmp_path: Path, wisdom: None) -> TrialStore:
    return TrialStore(tmp_path / "trials.sqlite")
