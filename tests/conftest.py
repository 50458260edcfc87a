"""Every test has a cache of its own session, and Hypothesis never times."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache and wisdom are neither read nor written."""
    patch = pytest.MonkeyPatch()
    folder: Path = tmp_path_factory.mktemp("ksgen")
    patch.setenv("KSGEN_CACHE_DIR", str(folder / "cache"))
    patch.setenv("KSGEN_WISDOM_DIR", str(folder / "wisdom"))
    for name in ("KSGEN_CACHE_PATH", "KSGEN_NO_COMPILE", "KSGEN_DEVICE"):
        patch.delenv(name, raising=False)
    yield
    patch.undo()
