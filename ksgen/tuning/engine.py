"""Compiles and measures candidates in child processes of this machine. Chooses nothing and stores nothing.

If the device is a GPU, all cores compile while it measures. If it is the processor, compiling and measuring exclude
each other, by `Shared`.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from ksgen.build.build import compiling_is_forbidden, usable_cores
from ksgen.build.request import Binary
from ksgen.build.toolchain import find_compiler
from ksgen.errors import KsgenError, ToolchainError
from ksgen.locks import new_reentrant_lock
from ksgen.measure.roofline import Ceilings
from ksgen.spec import KernelSpec
from ksgen.tuning.job import Candidate, Facts, Job, Outcome, Runs
from ksgen.tuning.process import STEP_SECONDS, LostError, Worker

Entries = Sequence[tuple[Candidate, Binary]]


class Shared:
    """Lock between compiling and measuring on one processor: either any number of threads compile, or one measures."""

    def __init__(self) -> None:
        self._changed = threading.Condition(new_reentrant_lock())
        self._compiling, self._is_measuring = 0, False

    @contextmanager
    def compiling(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_measuring)
            self._compiling += 1
        try:
            yield
        finally:
            with self._changed:
                self._compiling -= 1
                self._changed.notify_all()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_measuring)
            self._is_measuring = True  # no compiler begins from now on
            self._changed.wait_for(lambda: not self._compiling)
        try:
            yield
        finally:
            with self._changed:
                self._is_measuring = False
                self._changed.notify_all()


class Engine(ABC):
    """Compiles and measures for any number of jobs at once, each of which runs in its own thread."""

    facts: Facts  # about the device that measures; all devices of an engine are of one kind

    def __init__(self, compilers: int, devices: int) -> None:
        self.compilers, self.devices = compilers, devices
        self._compiling, self._measuring = ThreadPoolExecutor(compilers), ThreadPoolExecutor(devices)

    @property
    def overlaps(self) -> bool:
        """Whether compiling leaves measurements undisturbed."""
        return not self.facts.limits.is_cpu

    @property
    def jobs_at_once(self) -> int:
        """Number of jobs that keeps the devices busy: one compiles while another one's finalists are measured."""
        return self.devices + 1 if self.overlaps else self.devices

    def compile(self, kernel: KernelSpec, candidate: Candidate) -> Future[Binary | Outcome]:
        """Binary of a candidate, or the outcome that says why there is none."""
        return self._compiling.submit(self._compile_safely, kernel, candidate)

    def measure(self, job: Job, entries: Entries, runs: Runs) -> Future[list[Outcome]]:
        return self._measuring.submit(self._measure, job, entries, runs)

    def ceilings(self, precision: str, operand: str | None) -> Ceilings:
        return self._measuring.submit(self._ceilings, precision, operand).result()

    def close(self) -> None:
        """End all work. Waiting for its results raises an error."""
        for pool in (self._compiling, self._measuring):
            pool.shutdown(cancel_futures=True)

    def _compile_safely(self, kernel: KernelSpec, candidate: Candidate) -> Binary | Outcome:
        try:
            return self._compile(kernel, candidate)
        except LostError as lost:
            return Outcome(lost.state, f"compiling: {lost.reason}")
        except KsgenError as error:
            return Outcome("failed", f"compiling: {error}")

    @abstractmethod
    def _compile(self, kernel: KernelSpec, candidate: Candidate) -> Binary: ...

    @abstractmethod
    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]: ...

    @abstractmethod
    def _ceilings(self, precision: str, operand: str | None) -> Ceilings: ...


class LocalEngine(Engine):
    """This machine: one child measures on its device, and one per core compiles.

    On a processor, the child that measures is one of those that compile.
    """

    def __init__(
        self,
        device: str | None = None,
        compilers: int | None = None,
        preload: Sequence[str] = (),
        limit_s: float = STEP_SECONDS,
    ) -> None:
        super().__init__(compilers or usable_cores(), 1)
        if compiling_is_forbidden():
            raise ToolchainError("KSGEN_NO_COMPILE forbids compiling, which a search needs; unset it to tune")
        self._processor = Shared()
        self._bench = Worker(device, preload, limit_s)
        self._crew: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        try:
            self.facts = self._measuring.submit(self._bench.facts).result()
            if self.facts.kind == "cuda":
                find_compiler()
        except BaseException:
            self.close()
            raise
        # nothing compiles on a processor while it measures, so the child that measures can compile at other times
        shared = [] if self.overlaps else [self._bench]
        self._crew = [*shared, *(Worker(device, preload, limit_s) for _ in range(self.compilers - len(shared)))]
        for worker in self._crew:
            self._idle.put(worker)

    def _compile(self, kernel: KernelSpec, candidate: Candidate) -> Binary:
        worker = self._idle.get()
        try:
            with nullcontext() if self.overlaps else self._processor.compiling():
                return worker.compile(kernel, candidate, self.facts)
        finally:
            self._idle.put(worker)

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        with nullcontext() if self.overlaps else self._processor.measuring():
            return self._bench.measure(job, entries, runs)

    def _ceilings(self, precision: str, operand: str | None) -> Ceilings:
        with nullcontext() if self.overlaps else self._processor.measuring():
            return self._bench.ceilings(precision, operand)

    def close(self) -> None:
        workers = {self._bench, *self._crew}
        for worker in workers:
            worker.stop()
        super().close()
        for worker in workers:
            worker.close()
