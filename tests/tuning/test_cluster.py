"""A search on a real Dask cluster on this machine: a scheduler, workers that measure and one that only compiles, one
lost on the way.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ksgen.errors import DeviceError, KsgenError
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.cluster import ClusterEngine
from ksgen.tuning.job import Job
from ksgen.tuning.search import Budget, Tuned
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner, open_engine
from ksgen.wisdom import load_wisdom
from tests.tuning.test_worker import HAS_OPENCL

pytest.importorskip("distributed", reason="dask.distributed is not installed")
pytestmark = [pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device"), pytest.mark.slow]
JOBS = [Job(KernelSpec(Pattern(2, 24, 9, 3), layout=layout), 70) for layout in ("bsf", "bsl")]

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for lost workers often, as nothing else is to be done."""
    monkeypatch.setattr("ksgen.tuning.cluster.POLL_SECONDS", 0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Dask's own programs, each with a cache of its own, and ends them."""
    running: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KSGEN_DEVICE": "opencl:0"}

    def run(program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        folder = tmp_path / f"{program}-{len(running)}"
        folder.mkdir()
        child = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{program}", *arguments], cwd=folder, start_new_session=True,
            env=environment | {"KSGEN_CACHE_DIR": str(folder / "cache")},
            stdout=subprocess.DEVNULL, stderr=(folder / "log").open("wb"),
        )  # fmt: skip
        running.append(child)
        return child

    yield run
    for child in running:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture
def scheduler(start: Start, tmp_path: Path) -> str:
    start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    log = tmp_path / "scheduler-0" / "log"
    for _ in range(600):
        if found := re.search(r"Scheduler at:\s+(tcp://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def measuring_worker(start: Start, scheduler: str) -> "subprocess.Popen[bytes]":
    return start("worker", scheduler, "--resources", "GPU=1", "--nthreads", "2", "--no-nanny", "--no-dashboard")


def wait_for_workers(scheduler: str, count: int) -> None:
    import distributed

    with distributed.Client(scheduler, set_as_default=False) as client:
        client.wait_for_workers(count, timeout=60)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialStore:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    return TrialStore(tmp_path / "trials.sqlite")


def test_a_search_survives_the_loss_of_a_worker(start: Start, scheduler: str, store: TrialStore) -> None:
    doomed, _ = measuring_worker(start, scheduler), measuring_worker(start, scheduler)
    start("worker", scheduler, "--nthreads", "1", "--no-nanny", "--no-dashboard")
    wait_for_workers(scheduler, 3)
    engine = open_engine(scheduler=scheduler)
    assert (engine.devices, engine.compilers) == (2, 5)

    def lose_one() -> None:
        while len(store.trials()) < 3:
            time.sleep(0.05)
        os.killpg(doomed.pid, signal.SIGKILL)

    killer = threading.Thread(target=lose_one)
    killer.start()
    results = Tuner(engine, store, SearchOptions(Budget(candidates=5))).run(JOBS)
    killer.join()
    engine.close()
    assert doomed.wait() == -signal.SIGKILL
    for job, found in zip(JOBS, results, strict=True):
        assert isinstance(found, Tuned), found
        assert found.looked == 5
        trials = store.trials(job.kernel)
        others = [(trial.state, trial.reason) for trial in trials if trial.state != "measured"]
        assert len(trials) == 5
        assert len(others) <= 1, others  # a processor's clock may fail one where the machine is busy
        assert {trial.device for trial in trials} == {engine.facts.name}
    assert len(load_wisdom(engine.facts.name).entries()) == 2


def test_without_a_worker_that_measures_the_search_says_how_to_start_one(start: Start, scheduler: str) -> None:
    start("worker", scheduler, "--nthreads", "1", "--no-nanny", "--no-dashboard")
    wait_for_workers(scheduler, 1)
    with pytest.raises(
        DeviceError, match="no worker of the cluster measures; start some with: dask worker ADDRESS --resources GPU=1"
    ):
        ClusterEngine(scheduler)


def test_the_search_ends_with_a_report_when_the_last_worker_is_lost(
    start: Start, scheduler: str, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ksgen.tuning.cluster.PATIENCE_SECONDS", 1.0)
    only = measuring_worker(start, scheduler)
    wait_for_workers(scheduler, 1)
    engine = ClusterEngine(scheduler)

    def lose_it() -> None:
        while not store.trials():
            time.sleep(0.05)
        os.killpg(only.pid, signal.SIGKILL)

    threading.Thread(target=lose_it).start()
    (result,) = Tuner(engine, store, SearchOptions(strategy="exhaustive")).run(JOBS[:1])
    engine.close()
    assert isinstance(result, DeviceError)
    assert "is lost, and none came in 1 s; the trials so far are kept" in str(result)
    assert store.trials()


def test_a_worker_that_comes_in_the_place_of_the_last_one_goes_on(
    start: Start, scheduler: str, store: TrialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is lost at the worst moment: it has done a task and is seen to be there, but its result was not
    asked for.
    """
    only = measuring_worker(start, scheduler)
    wait_for_workers(scheduler, 1)
    engine = ClusterEngine(scheduler)
    submit, eligible, own, once = engine._client.submit, engine._eligible, threading.local(), threading.Lock()

    def submitted(*given: Any, **options: Any) -> Any:
        own.task = submit(*given, **options)
        return own.task

    def eligible_until_now() -> list[str]:
        found, task = eligible(), vars(own).pop("task", None)
        if task and store.trials() and once.acquire(blocking=False):
            while not task.done():
                time.sleep(0.02)
            os.killpg(only.pid, signal.SIGKILL)
            only.wait()
            measuring_worker(start, scheduler)
        return found

    monkeypatch.setattr(engine._client, "submit", submitted)
    monkeypatch.setattr(engine, "_eligible", eligible_until_now)
    (result,) = Tuner(engine, store, SearchOptions(Budget(candidates=4))).run(JOBS[:1])
    engine.close()
    assert only.poll() is not None
    assert isinstance(result, Tuned), result
    assert result.looked == 4


def test_a_scheduler_that_does_not_answer_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksgen.tuning.cluster.CONNECT_SECONDS", 1)
    with pytest.raises(KsgenError, match=r"--scheduler tcp://127\.0\.0\.1:9: no Dask scheduler answers there"):
        open_engine(scheduler="tcp://127.0.0.1:9")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("address", "why"), [("dask", "missing port number"), ("tcp://dask:port", "invalid literal"), ("no://dask:1", "")]
)
def test_an_address_that_is_none_is_refused_at_once_and_alone(address: str, why: str) -> None:
    """A client of such an address prints a traceback, 40 seconds later."""
    done = subprocess.run(
        [sys.executable, "-m", "ksgen", "tune", "--pattern", "1,2,3,4", "--scheduler", address],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"ksgen: --scheduler {address}: no Dask scheduler answers there ({why}")
    assert done.stderr.count("\n") == 1
