"""What tests of passports share: a GPU by its name alone, and a folder of the test's own."""

from pathlib import Path

import pytest

from ksgen import passport
from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A Hopper GPU without a passport, whose families need one."""
    monkeypatch.delenv("KSGEN_PERMIT")
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setattr(passport, "_known", {})
    return FakeGpu()
