"""A pytest plugin for long runs, `-p tests.progress`: one line with the time left in place of dots, and skips summed up
by reason.

A terminal gets a line that changes, everything else a line per 5 %. The time left follows from the durations of the
last run, which pytest's cache holds; tests that it does not know count as average ones.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

LAST_RUN = "ksgen/seconds"
STEP = 0.05  # of all tests, between two lines


class Progress:
    """Counts finished tests, in the process that starts the workers."""

    def __init__(self, config: pytest.Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._cache, self._clock = config.cache, clock
        self._known: dict[str, float] = self._cache.get(LAST_RUN, {}) if self._cache else {}
        self._average = sum(self._known.values()) / len(self._known) if self._known else 1.0
        self._seconds: Counter[str] = Counter()
        self._done = self._failed = 0
        # seconds expected of all tests, and of those behind
        self._total, self._shown, self._expected, self._behind = 0, 0.0, 0.0, 0.0
        self._begin = clock()

    def begin(self, tests: list[str]) -> None:
        """Every worker collects the same tests; the first one says which."""
        if not self._total:
            self._total = len(tests)
            self._begin = self._clock()
            self._expected = sum(map(self._weight, tests))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.begin(ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letters: the line counts failures, and their names are printed as they happen."""
        if hasattr(report, "wasxfail") or (report.passed and report.when != "call"):
            return None
        return ("error" if report.failed and report.when != "call" else report.outcome), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed += 1
            self._write(f"FAILED {report.nodeid}")
        if report.when == "teardown":
            self._behind += self._weight(report.nodeid)
            self._done += 1
            self._show()

    def pytest_terminal_summary(self) -> None:
        reasons = Counter(
            str(report.longrepr[-1]).removeprefix("Skipped: ") for report in self._terminal.stats.get("skipped", [])
        )
        for reason, count in reasons.most_common():
            self._terminal.write_line(f"{count:,} skipped: {reason}")
        if self._cache:
            self._cache.set(LAST_RUN, self._known | {name: round(taken, 3) for name, taken in self._seconds.items()})

    def line(self) -> str:
        """The state of the run: `42 % of 6,200 tests, 3 failed, 2:10 left`."""
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._done / self._total:4.0%} of {self._total:,} tests{failed}, {self._time_left()} left"

    def _weight(self, test: str) -> float:
        return self._known.get(test, self._average)

    def _time_left(self) -> str:
        passed = self._clock() - self._begin
        seconds = round(passed * (self._expected / self._behind - 1)) if self._behind else 0
        return f"{seconds // 60}:{seconds % 60:02}"

    def _show(self) -> None:
        is_last = self._done == self._total
        is_terminal = self._terminal.isatty
        if is_last or self._done / self._total >= self._shown + (0.002 if is_terminal else STEP):
            self._shown = self._done / self._total
            if is_terminal and not is_last:
                self._terminal.rewrite(self.line(), erase=True)
            else:
                self._write(self.line())

    def _write(self, line: str) -> None:
        """Write a line that stays, over the one that changes."""
        if self._terminal.isatty:
            self._terminal.rewrite("", erase=True)
        self._terminal.write_line(line)
        self._terminal.flush()  # a log is otherwise written in blocks, and empty for minutes


@pytest.hookimpl(trylast=True)  # behind the terminal reporter
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
