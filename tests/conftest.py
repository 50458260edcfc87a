"""Every test has a cache of its own session, Hypothesis never times, and what `make quick` leaves out is listed."""

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


SLOW = {  # files and tests, beyond a minute together on two cores
    "test_fuzz.py",
    "test_fuzz_cli.py",
    "test_fuzz_files.py",
    "test_numerics.py",
    "test_oclgrind.py",
    "test_sass.py",
    "test_any_pattern_constants_and_batch",
    "test_compiled_by_inductor",
    "test_inf_and_nan_do_not_leak",
    "test_nvcc_takes_the_text",
    "test_the_space_holds_only_what_fits_and_is_right",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not SLOW.isdisjoint((item.path.name, item.name.partition("[")[0])):
            item.add_marker("slow")
