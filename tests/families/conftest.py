"""What several families' tests start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ksgen.devices.base import Device
from tests.support.native import saying_it_has_tiles


@pytest.fixture
def with_tiles(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A processor that says it has tiles, with nothing found by a search."""
    with saying_it_has_tiles(device, tmp_path / "wisdom", monkeypatch):
        yield device
