"""Tests share a cache of binaries that outlives them, Hypothesis never times, two rings hold the tests
(`tests/rings.py`), and tests marked `stand_in` run on the stand-in machine where there is no GPU.
"""

import gc
import hashlib
import os
import sys

# pytest has a worker more than cores: threads of theirs that spin would take them from each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["KSGEN_COMPILE"] = "wait"  # calls take their kernels at once; tests of the background unset it
os.environ["KSGEN_PERMIT"] = "all"  # launchers choose unproven families too; tests of passports unset it

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ksgen.build.build import usable_cores
from ksgen.launch.planner import PLANNER
from ksgen.tuning.trials import TrialStore
from tests import rings, times
from tests.driver import NotHereError, items
from tests.emulator.build import cache_folder
from tests.support import libraries
from tests.support.hasty import drivers_compile_unoptimized
from tests.support.native import without_tiles
from tests.support.short_series import shorten

__all__ = ["drivers_compile_unoptimized", "without_tiles"]
ROOT = Path(__file__).parents[1]
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def kept_binaries() -> Path:
    """The cache of all workers, and of later runs of the same sources: its keys know texts and compilers, not how
    ksgen calls them.
    """
    digest = hashlib.sha256()
    for path in sorted(
        path for package in ("build", "devices") for path in (ROOT / "ksgen" / package).iterdir() if path.is_file()
    ):
        digest.update(path.read_bytes())
    return cache_folder() / f"binaries-{digest.hexdigest()[:32]}"


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache and wisdom are neither read nor written. The stand-in machine has its own."""
    if "KSGEN_DRIVER_REGISTRY" in os.environ:
        yield
        return
    patch = pytest.MonkeyPatch()
    folder: Path = tmp_path_factory.mktemp("ksgen")
    patch.setenv("KSGEN_CACHE_DIR", str(kept_binaries()))
    patch.setenv("KSGEN_WISDOM_DIR", str(folder / "wisdom"))
    for name in ("KSGEN_CACHE_PATH", "KSGEN_NO_COMPILE", "KSGEN_DEVICE"):
        patch.delenv(name, raising=False)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _short_series() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch.setattr, with_forks=sys.platform == "linux")
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than this process may use cores, as tests wait for time limits and for what they start a fifth
    of the time. Where psutil is installed, xdist counts two threads of a core once.
    """
    return usable_cores() + 1


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    config.add_cleanup(gc.unfreeze)
    config.pluginmanager.register(times.Books(patch))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ring", choices=["first", "second"], help="run one ring of tests (tests/rings.py); both by default"
    )
    parser.addoption("--tenth", type=int, help="run one tenth of the second ring: a counter, whose last digit counts")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python looks for garbage neither while tests are collected nor among them: it would for a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ring, tenth, second = config.getoption("ring"), config.getoption("tenth"), rings.second_ring(items)
    left_out = {item.nodeid for item in items if ring and (item.nodeid in second) != (ring == "second")}
    if tenth is not None:
        left_out |= {test for test in second if rings.tenth_of(test) != tenth % rings.TENTHS}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips for want of a library is one of `make test-torch`, or it would run nowhere."""
    report = yield
    if report.skipped and libraries.REASON in str(report.longrepr) and not item.get_closest_marker("libraries"):
        report.outcome, report.longrepr = "failed", f"mark it: @pytest.mark.libraries\n{report.longrepr}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs an item marked `stand_in` on the stand-in machine, and reports it from here."""
    if not item.get_closest_marker("stand_in") or items.is_on_machine():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        reports = items.run_item(item)
    except NotHereError as error:
        reports = [
            pytest.TestReport(
                item.nodeid, item.location, {}, "skipped", (*item.location[:2], f"Skipped: {error}"), "setup"
            )
        ]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # what items before it left set up for their neighbours
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
