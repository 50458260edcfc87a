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
from typing import Any, TextIO

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


class _Server:
    """A plugin: a session of pytest that has collected one file, and runs its items as their names are read."""

    def __init__(self, name: str, names: TextIO, reports: TextIO) -> None:
        self.name = name  # the next item's; empty where no more are read
        self._names, self._reports = names, reports
        self._found: list[dict[str, Any]] = []  # what the phases of an item came to

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        while item := items.get(self.name):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            print(json.dumps(self._found), file=self._reports, flush=True)
            self._found.clear()
            self.name = self._names.readline().rstrip("\n")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._found.append(report._to_json() | {"$report_type": "TestReport"})


def _serve(writing: int) -> None:
    # pytest gives its tests an empty standard input
    with os.fdopen(os.dup(0)) as names, os.fdopen(writing, "w") as reports:
        name = names.readline().rstrip("\n")
        while name:  # a session collects once: fixtures of a second file would lack their parameters
            server = _Server(name, names, reports)
            file = name.partition("::")[0]
            pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", file], plugins=[server])
            if server.name == name:
                raise LookupError(f"{name}: no such item is collected")
            name = server.name


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
