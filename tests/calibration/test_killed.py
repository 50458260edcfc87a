"""Calibrations that are killed, or run side by side: nothing that was settled is lost, and nothing is tried twice."""

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from ksgen.wisdom import load_wisdom
from tests.support.fake_gpu import FakeGpu

BATCHES = (5, 16, 70, 200)
PROGRAM = """
import os, time
from ksgen.calibration.trials import Calibration
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning import tuner
from ksgen.tuning.job import Job
from ksgen.tuning.trials import TrialStore
from tests.support.fake_gpu import FakeGpu
from tests.support.tuning_search import TimedEngine, some_of_space

class Slow(TimedEngine):
    def _measure(self, job, entries, runs):
        os.write(1, f"{job.batch}\\n".encode())
        time.sleep(0.02)
        return super()._measure(job, entries, runs)

tuner.list_space = some_of_space
engine = Slow(FakeGpu(), lambda kernel, candidate: 10.0)
jobs = [Job(KernelSpec(Pattern(2, 8, 16, 1), "float16"), batch) for batch in %s]
found = Calibration(engine, TrialStore()).run(jobs)
engine.close()
assert all(each.entry for each in found)
print("done")
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    return dict(os.environ)


def begun(environment: dict[str, str], batches: tuple[int, ...] = BATCHES) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM % (batches,)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def settled() -> set[int]:
    return {entry.batch for entry in load_wisdom(FakeGpu().name, strict=True).entries()}


@pytest.mark.slow
def test_a_calibration_that_is_killed_at_any_time_goes_on_where_it_was(environment: dict[str, str]) -> None:
    for lines in (0, 1, 4, 9, 14):  # after so many measurements
        before, process = settled(), begun(environment)
        assert process.stdout is not None
        # it may have been done with what was left
        seen = [int(line) for line in islice(process.stdout, lines) if line != "done\n"]
        time.sleep(0.005 * lines)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert not before & set(seen)  # what is settled is not tried again
        assert before <= settled()
    process = begun(environment)
    text, _ = process.communicate(timeout=60)
    assert text.splitlines()[-1] == "done"
    assert settled() == set(BATCHES)


@pytest.mark.slow
def test_two_calibrations_side_by_side_lose_nothing(environment: dict[str, str]) -> None:
    both = [begun(environment, batches) for batches in (BATCHES, tuple(each + 1 for each in BATCHES))]
    for process in both:
        text, _ = process.communicate(timeout=60)
        assert text.splitlines()[-1] == "done"
    assert settled() == {*BATCHES, *(each + 1 for each in BATCHES)}
