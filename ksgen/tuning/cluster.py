"""Presents a Dask cluster as one engine: workers with `GPU=1` measure, any worker with a compiler compiles.

Dask moves the jobs of a lost worker to others. Each worker keeps child processes of its own, as a local search does.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import wait
from typing import Any

from ksgen import __version__
from ksgen.build.request import Binary
from ksgen.emit.templates import template_digest
from ksgen.errors import DeviceError, KsgenError
from ksgen.families import FAMILIES
from ksgen.locks import new_lock
from ksgen.measure.roofline import Ceilings
from ksgen.spec import KernelSpec
from ksgen.tuning.engine import Engine, Entries, Shared
from ksgen.tuning.job import Candidate, Facts, Job, Outcome, Runs
from ksgen.tuning.process import LostError, Worker

RESOURCE = "GPU"
CONNECT_SECONDS = 20
LOSSES = 10  # workers that one task may lose before it is given up
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 60.0  # how long to wait for a new or returning worker if none is left


class ClusterEngine(Engine):
    """The devices of one name in a Dask cluster. Times of devices with different names are never compared."""

    def __init__(self, scheduler: str, device: str | None = None) -> None:
        try:
            import distributed
        except ImportError as error:
            from ksgen.install import install_line

            raise KsgenError(f"--scheduler needs dask.distributed ({error}); {install_line('tune')}") from None
        self._device = device
        self._facts: dict[str, Facts] = {}  # by the address of each worker that measures
        self._guard = new_lock()
        try:
            _check_address(scheduler)
            connect: Any = distributed.Client
            self._client = connect(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise KsgenError(
                f"--scheduler {scheduler}: no Dask scheduler answers there ({error}); `dask scheduler` starts one"
            ) from None
        try:
            self.facts = self._most_common()
            workers = self._client.scheduler_info(n_workers=-1)["workers"]
            threads = sum(worker["nthreads"] for worker in workers.values())
            super().__init__(compilers=max(1, threads), devices=max(1, len(self._eligible())))
        except BaseException:
            self._client.close()
            raise

    def close(self) -> None:
        self._client.close()
        super().close()

    def _most_common(self) -> Facts:
        """Facts about the device that most workers have; `DeviceError` if no worker measures."""
        self._eligible_facts()
        names = Counter(facts.name for facts in self._facts.values())
        if not names:
            raise DeviceError(
                f"no worker of the cluster measures; start some with: dask worker ADDRESS --resources {RESOURCE}=1"
            )
        name, _ = names.most_common(1)[0]
        return next(facts for facts in self._facts.values() if facts.name == name)

    def _eligible_facts(self) -> None:
        """Ask new workers for the facts about their devices, and forget workers that are gone."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        measuring = [address for address, worker in workers.items() if worker.get("resources", {}).get(RESOURCE)]
        for address in set(self._facts) - set(measuring):
            del self._facts[address]
        asked = {
            address: self._client.submit(
                _on_bench, self._device, "facts", workers=[address], resources={RESOURCE: 1}, pure=False, retries=LOSSES
            )
            for address in measuring
            if address not in self._facts
        }
        for address, answer in asked.items():
            with contextlib.suppress(TimeoutError):  # the worker is lost again, or has not started yet
                facts = answer.result(timeout=CONNECT_SECONDS)
                _check_version(address, facts)
                self._facts[address] = facts

    def _eligible(self) -> list[str]:
        """The workers whose device is the one being tuned."""
        with self._guard:
            self._eligible_facts()
            return sorted(address for address, facts in self._facts.items() if _is_same(facts, self.facts))

    def _at_least_one(self) -> list[str]:
        """Return the eligible workers. If none is left, wait for one as long as a cluster's manager may take to start
        one."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (workers := self._eligible()):
            if time.monotonic() > deadline:
                waited = f"none came in {PATIENCE_SECONDS:g} s"
                raise DeviceError(
                    f"every worker that measured on {self.facts.name} is lost, and {waited}; the trials so far are kept"
                )
            time.sleep(POLL_SECONDS)
        return workers

    def _compile(self, kernel: KernelSpec, candidate: Candidate) -> Binary:
        # An OpenCL driver compiles for its own device only; nvcc does it anywhere.
        found = self._run(
            _compile, self._device, kernel, candidate, self.facts, on_device=self.facts.dialect == "opencl"
        )
        if isinstance(found, Outcome):
            raise LostError(found.reason, 0, found.state)
        binary: Binary = found
        return binary

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        outcomes: list[Outcome] = self._measured("measure", job, list(entries), runs)
        return outcomes

    def _ceilings(self, precision: str, operand: str | None) -> Ceilings:
        ceilings: Ceilings = self._measured("ceilings", precision, operand)
        return ceilings

    def _measured(self, *asked: Any) -> Any:
        return self._run(_on_bench, self._device, *asked, on_device=True, resources={RESOURCE: 1})

    def _run(self, function: Any, *arguments: Any, on_device: bool, resources: dict[str, int] | None = None) -> Any:
        """Return the result of a task. If all its workers are lost, the task is sent to workers that replace them."""
        import distributed

        while True:
            workers = self._at_least_one() if on_device else None
            task = self._client.submit(
                function, *arguments, pure=False, retries=LOSSES, workers=workers, resources=resources
            )
            # If a worker is lost after its task is done, the client waits for the result forever. If the client waits
            # with a time limit, it cancels what other threads gather. So the client gathers without a limit, and this
            # thread checks whether workers are left.
            gathered = asyncio.run_coroutine_threadsafe(
                self._client.gather(task, asynchronous=True), self._client.loop.asyncio_loop
            )
            while workers is None or not set(workers).isdisjoint(self._eligible()):
                if wait([gathered], POLL_SECONDS).done:
                    try:
                        return gathered.result()
                    except distributed.scheduler.KilledWorker as error:
                        raise DeviceError(f"the cluster lost {LOSSES} workers in a row: {error}") from None
            task.cancel()


def _check_address(scheduler: str) -> None:
    """Raise `ValueError` if this is not an address: a Dask client with a wrong address prints a traceback when it is
    garbage-collected."""
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.registry import get_backend

    scheme, place = parse_address(scheduler)
    get_backend(scheme)
    if scheme != "inproc":
        parse_host_port(place)


def _is_same(facts: Facts, other: Facts) -> bool:
    return (facts.name, facts.target, facts.driver_version) == (other.name, other.target, other.driver_version)


def _check_version(address: str, facts: Facts) -> None:
    here = (__version__, tuple(template_digest(family) for family in FAMILIES))
    if (facts.ksgen, facts.templates) != here:
        raise KsgenError(
            f"{address} has ksgen {facts.ksgen} with other templates than this machine's ksgen {__version__}; install "
            "the same ksgen on both"
        )


# ---- code of a Dask worker: each of its threads has a child that compiles, and the process has one that measures

_of_thread = threading.local()  # its `worker` compiles
_processor = Shared()  # a GPU uses its `measuring` alone: compilers do not disturb it
_benches: dict[str | None, Worker] = {}


def _on_bench(device: str | None, method: str, *arguments: Any) -> Any:
    """Result of a method of the child that measures."""
    with _processor.measuring():
        return getattr(_benches.setdefault(device, Worker(device)), method)(*arguments)


def _compile(device: str | None, kernel: KernelSpec, candidate: Candidate, facts: Facts) -> Binary | Outcome:
    if not hasattr(_of_thread, "worker"):
        _of_thread.worker = Worker(device)
    worker: Worker = _of_thread.worker
    try:
        with _processor.compiling() if facts.limits.is_cpu else contextlib.nullcontext():
            return worker.compile(kernel, candidate, facts)
    except LostError as lost:
        return Outcome(lost.state, lost.reason)
