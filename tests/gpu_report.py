"""A plugin of pytest for `make gpu-check`: a verdict per test, written as it comes, and an end to the time.

Each line of the file that KSGEN_GPU_REPORT names is an object of JSON: the names of all tests, a test that began, or
its verdict; the last one counts. It is written before pytest prints it, so that a kill loses none. Tests that
would begin after KSGEN_GPU_REPORT_END, seconds of the system's clock, are skipped, for TIME_IS_UP.
"""

import json
import os
from collections.abc import Iterator
from time import time
from typing import Any

import pytest

FILE, END, CACHE = "KSGEN_GPU_REPORT", "KSGEN_GPU_REPORT_END", "KSGEN_GPU_REPORT_CACHE"
TIME_IS_UP = "the time was up"


class Report:
    """Report of the tests, written by the process that speaks to the user, not by its workers."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._of: dict[str, dict[str, Any]] = {}  # the verdict of a test that has not ended

    def _write(self, **facts: Any) -> None:
        os.write(self._file, (json.dumps(facts) + "\n").encode())  # one call: a line is there, or it is not

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._of[nodeid] = {"test": nodeid, "verdict": "passed", "seconds": 0.0}
        self._write(began=nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._of.setdefault(report.nodeid, {"test": report.nodeid, "verdict": "passed", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 3)
        if report.failed:
            found |= {"verdict": "failed", "why": str(report.longrepr)[-4000:]}
        elif report.skipped and found["verdict"] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            found |= {"verdict": "skipped", "why": reason.removeprefix("Skipped: ")}
        # as soon as the test ends, and again after its clean-up; a worker that died has the phase "???"
        if report.when != "setup":
            self._write(**found, properties=dict(report.user_properties))
        if report.when == "teardown":
            self._of.pop(report.nodeid, None)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._write(tests=ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._write(tests=[item.nodeid for item in session.items])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and os.environ.get(FILE):
        config.pluginmanager.register(Report(os.environ[FILE]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip a test before its fixtures, which may take long."""
    if time() > float(os.environ.get(END, "inf")):
        pytest.skip(TIME_IS_UP)


@pytest.fixture(scope="session", autouse=True)
def _one_cache(_own_folders: None) -> Iterator[None]:
    """Workers share what they compile."""
    patch = pytest.MonkeyPatch()
    if shared := os.environ.get(CACHE):
        patch.setenv("KSGEN_CACHE_DIR", shared)
    yield
    patch.undo()
