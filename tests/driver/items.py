"""Runs pytest's items on the stand-in machine: those marked `stand_in`, where there is no driver of a real GPU.

Each runtime has a process of its own, kept for as long as it lives; what it reports of an item is reported here.
"""

import atexit
import ctypes
import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from tests.driver.machine import ROOT, environment

MOST_SECONDS = 120  # that an item takes

_children: dict[str, "Child"] = {}


@cache
def is_on_machine() -> bool:
    """Whether this process has a driver already: the stand-in, or a real GPU's."""
    with suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    return False


def run_item(item: pytest.Item) -> list[pytest.TestReport]:
    """The reports of one item from the process of its parameter `runtime`, the driver's unless it has one."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    runtime = parameters.get("runtime", "driver")
    child = _children.get(runtime)
    if child is None or not child.is_alive:
        child = _children[runtime] = Child(runtime)
    told = child.run(item.nodeid)
    if told is None:
        words = f"the process on the stand-in machine ended, or took more than {MOST_SECONDS} s\n{child.words()}"
        return [pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")]
    return [restored(item.config, data) for data in told]


def restored(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    """A report as pytest has it: the reason of a skip is a tuple, of which JSON makes a list."""
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
    if isinstance(report.longrepr, list):
        report.longrepr = tuple(report.longrepr)
    return report


class Child:
    """A process that runs items by their names."""

    def __init__(self, runtime: str) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it lives as long as the child)
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "tests.driver.items", str(writing)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(runtime), stdin=subprocess.PIPE, stdout=self._output,
            stderr=self._output,
            pass_fds=[writing], text=True,
        )  # fmt: skip
        os.close(writing)
        self._reports = os.fdopen(reading)
        atexit.register(self.kill)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, name: str) -> list[dict[str, Any]] | None:
        """What it reports; None where it ended, or was ended because it hangs."""
        assert self._process.stdin
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
            if select.select([self._reports], [], [], MOST_SECONDS)[0]:
                line = self._reports.readline()
        if not line:
            self.kill()
        return json.loads(line) if line else None

    def words(self) -> str:
        """The end of what it printed."""
        self._process.wait()
        self._output.seek(0)
        return f"exit code {self._process.returncode}\n{self._output.read()[-4000:]}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Reports:
    """A plugin: what an item's phases came to."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = report._to_json()
        self.found.append(data | {"$report_type": "TestReport"})


def _serve(writing: int) -> None:
    with os.fdopen(writing, "w") as reports:
        for line in sys.stdin:
            plugin = _Reports()
            pytest.main(
                ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", line.rstrip("\n")],
                plugins=[plugin],
            )
            print(json.dumps(plugin.found), file=reports, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
