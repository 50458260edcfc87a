"""What tests of commands share: a small spec."""

from pathlib import Path

import pytest

from tests.support.hasty import compiles_hastily
from tests.support.program import SMALL

__all__ = ["compiles_hastily"]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path
