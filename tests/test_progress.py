"""The progress line of `make test`: what is done, what failed, how long it takes yet, and why tests were skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.progress import LAST_RUN, Progress

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(40))
def test_some(number):
    if number % 20 == 3:
        pytest.skip("no GPU")
    assert number != 7
"""


class Terminal:
    """A terminal reporter that keeps what is written."""

    def __init__(self, is_terminal: bool) -> None:
        self.isatty, self.stats, self.lines = is_terminal, {}, []  # type: ignore[var-annotated]
        self._held: list[str] = []

    def write_line(self, line: str) -> None:
        self._held.append(line)

    def flush(self) -> None:
        self.lines += self._held
        self._held.clear()

    def rewrite(self, line: str, **_: Any) -> None:
        self.flush()
        self.lines.append(f"\r{line}")


def progress_of(known: dict[str, float], seconds: dict[str, float], is_terminal: bool = False) -> list[str]:
    """The lines of a run whose tests take `seconds`, after one in which they took `known`."""
    now, terminal, kept = [100.0], Terminal(is_terminal), {LAST_RUN: known}
    cache = SimpleNamespace(get=kept.get, set=kept.__setitem__)
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _: terminal), cache=cache)
    progress = Progress(config, clock=lambda: now[0])
    progress.begin(list(seconds))
    for name, taken in seconds.items():
        now[0] += taken
        for when in ("setup", "call", "teardown"):
            report: Any = SimpleNamespace(
                nodeid=name, when=when, failed=name == "bad" and when == "call", duration=taken / 3
            )
            progress.pytest_runtest_logreport(report)
    assert not terminal._held, "a log shows each line at once"
    progress.pytest_terminal_summary()
    terminal.flush()
    assert kept[LAST_RUN] == pytest.approx(known | seconds, abs=1e-3)
    return terminal.lines


def test_the_time_left_follows_from_the_last_run() -> None:
    lines = progress_of({"short": 10, "long": 90}, {"short": 20, "long": 180})
    assert lines == [" 50% of 2 tests, 3:00 left", "100% of 2 tests, 0:00 left"]


def test_unknown_tests_count_as_average_ones() -> None:
    assert progress_of({}, {"a": 30, "b": 30, "c": 30})[0] == " 33% of 3 tests, 1:00 left"
    assert progress_of({"a": 10, "b": 30}, {"a": 10, "c": 20})[0] == " 50% of 2 tests, 0:20 left"


def test_failures_are_named_as_they_happen() -> None:
    assert progress_of({}, {"bad": 1, "good": 1}) == [
        "FAILED bad",
        " 50% of 2 tests, 1 failed, 0:01 left",
        "100% of 2 tests, 1 failed, 0:00 left",
    ]


def test_a_terminal_has_one_line_that_changes() -> None:
    lines = progress_of({}, {"good": 1, "bad": 1, "last": 1}, is_terminal=True)
    assert lines[:3] == ["\r 33% of 3 tests, 0:02 left", "\r", "FAILED bad"]
    assert lines[-2:] == ["\r", "100% of 3 tests, 1 failed, 0:00 left"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_pytest_shows_it(workers: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        workers,
        "-p",
        "tests.progress",
        "-o",
        "console_output_style=classic",
        "-c",
        os.devnull,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "."],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^100% of 40 tests, 1 failed, 0:00 left$", done.stdout, re.MULTILINE)
    assert re.search(r"^FAILED test_some.py::test_some\[7\]$", done.stdout, re.MULTILINE)
    assert "2 skipped: no GPU" in done.stdout
    assert not re.search(r"^[.sF]+$", done.stdout, re.MULTILINE)
