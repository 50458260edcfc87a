"""What tests of layers start from. All of them need PyTorch; without it none is collected."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.hasty import compiles_hastily

__all__ = ["compiles_hastily"]
HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("torch") else ["*test_*.py"]


@pytest.fixture(autouse=True)
def without_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run in Python, whether or not a cache has the extension. `test_replay.py` loads it."""
    from ksgen.torch.operators import replay

    monkeypatch.setattr(replay, "_loaded", [])
    monkeypatch.setattr(replay, "_refused", ["these tests are those of calls in Python"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("libraries")
