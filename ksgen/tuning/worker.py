"""Runs in a child process: compiles, checks and times candidates. Chooses nothing and keeps no trials.

A candidate that hangs or crashes takes only this process with it. Each step has a time limit: an alarm, whose default
action ends the process. So the limit holds even inside a driver's call, and after the parent is gone.

NVML detects whether a GPU's clocks or temperature moved within a block of runs. Clocks are never locked or set. Without
nvidia-ml-py nothing is detected.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing.connection import Connection
from time import process_time
from typing import Any

from ksgen import __version__
from ksgen.build.build import build
from ksgen.build.request import Binary
from ksgen.devices import find_device
from ksgen.devices.base import Device, RefusedError
from ksgen.emit.render import Source, render
from ksgen.emit.templates import Dialect, template_digest
from ksgen.errors import DeviceError, KsgenError, LaunchError
from ksgen.families import FAMILIES, family_named
from ksgen.launch.choice import Choice
from ksgen.launch.plan import Plan, check_launchable, load, make_plan
from ksgen.measure.roofline import Ceilings, measure_ceilings
from ksgen.measure.trust import Timer, take_blocks
from ksgen.measure.verify import Bench, Packed, Problem, exact_problem, fault_of, make_problem
from ksgen.spec import KernelSpec
from ksgen.tuning.job import Candidate, Facts, Job, Outcome, Runs

RAGGED_BATCHES = (301, 312)  # more than a tile, and no multiple of one; 312 16-bit elements are 39 chunks of 16 bytes
MOST_COMPARED = 512  # largest number of rows of the job's own batch that are compared; all its rows must be finite
REPEATS = 2  # launches of each kind (early, plain) in a proof, whose results must have equal bits
MOST_JOBS = 2  # jobs whose arrays stay on the device
MOST_READY = 16  # candidates per job that stay loaded

Say = Callable[..., None]


class Arrays:
    """One job's arrays on the device, and its candidates that are ready."""

    def __init__(self, device: Device, job: Job) -> None:
        self.job = job
        full = make_problem(job.kernel, job.batch).comparing(MOST_COMPARED)
        ragged = [] if job.kernel.batch else [make_problem(job.kernel, batch) for batch in RAGGED_BATCHES]
        self.benches = [Bench(device, problem) for problem in (*ragged, full)]
        # candidates whose results are right, each loaded and with its weights packed
        self.ready: OrderedDict[Candidate, tuple[Plan, Packed]] = OrderedDict()


class Bencher:
    """The functions that a parent may call. `say("at", index)` names the candidate that is being worked on."""

    def __init__(self, device: str | None, limit_s: float, say: Say) -> None:
        self._name, self._limit_s, self._say = device, limit_s, say
        self._arrays: OrderedDict[Job, Arrays] = OrderedDict()

    @property
    def _device(self) -> Device:
        return find_device(self._name)

    def facts(self) -> Facts:
        device = self._device
        digests = tuple(template_digest(family) for family in FAMILIES)
        return Facts(
            device.name, device.target, device.dialect, device.kind, device.driver_version, device.limits, __version__,
            digests
        )  # fmt: skip

    def ceilings(self, precision: str, operand: str | None) -> Ceilings:
        return measure_ceilings(self._device, precision, operand)

    def compile(self, kernel: KernelSpec, candidate: Candidate, target: str, dialect: Dialect) -> Binary:
        """Compile a candidate. Opens no GPU, because a compiler for CUDA needs none."""
        source = _source_of(kernel, candidate, dialect)
        return build(source.text, source.entry, target, self._device.compiler() if dialect == "opencl" else None)

    def measure(self, job: Job, entries: Sequence[tuple[Candidate, Binary]], runs: Runs) -> list[Outcome]:
        """Check each candidate that is not ready yet, then time the right ones, taking turns."""
        arrays = self._arrays_of(job)
        outcomes: list[Outcome] = []
        for index, (candidate, binary) in enumerate(entries):
            self._step(index)
            outcomes.append(self._prepare(arrays, candidate, binary))
        right = [index for index, outcome in enumerate(outcomes) if outcome.state == "measured"]
        notes: dict[int, set[str]] = {index: set() for index in right}  # about a GPU's clocks
        timers = [self._timer(index, arrays, entries[index][0], runs.block_s, notes[index]) for index in right]
        measured = take_blocks(timers, self._device.limits.is_cpu, runs.seconds, runs.give_up_us)
        for index, blocks in zip(right, measured, strict=True):
            note = ", ".join(filter(None, (*sorted(notes[index]), blocks.why_unreliable)))
            outcomes[index] = Outcome("measured", "", blocks.values, note)
        while len(arrays.ready) > MOST_READY:
            arrays.ready.popitem(last=False)
        return outcomes

    def prove(self, kernel: KernelSpec, candidate: Candidate, binary: Binary, batches: Sequence[int]) -> Outcome:
        """Check a candidate at several batches, launched early and plainly, each repeated for equal bits.

        A candidate whose clusters do not fit the GPU is "pruned", because launchers reject it there, too.
        """
        source = _source_of(kernel, candidate, self._device.dialect)
        choice = Choice(candidate.family, candidate.constants, "a case of a proof")
        geometry = family_named(candidate.family).geometry(kernel, candidate.constants, 1)
        try:
            loaded = [load(self._device, source, binary, early) for early in (True, False)[: 1 + geometry.starts_early]]
            check_launchable(self._device, loaded[0])
            for batch, make in product(batches, (make_problem, exact_problem)):
                plans = [make_plan(self._device, kernel, batch, choice, each) for each in loaded]
                if fault := self._fault_of(make(kernel, batch), plans):
                    return Outcome("wrong", fault)
        except (DeviceError, LaunchError) as error:
            if isinstance(error, RefusedError) and geometry.cluster > 1:
                return Outcome("pruned", str(error))
            raise GuiltyError(str(error)) from error
        return Outcome("measured")

    def seconds(self) -> float:
        """Processor seconds of this process so far."""
        return process_time()

    def _fault_of(self, problem: Problem, plans: Sequence[Plan]) -> str:
        """Reason why the results of some plans, whose bits must be equal, are wrong; empty if they are right."""
        bench = Bench(self._device, problem)
        first, *others = [bench.results(plan) for plan in plans for _ in range(REPEATS)]
        pairs = [pair for other in others for pair in zip(first, other, strict=True)]
        if not all(one.tobytes() == two.tobytes() for one, two in pairs):
            return f"repeated launches differ at batch {problem.batch}"
        return fault_of(problem, *first)

    def _timer(self, index: int, arrays: Arrays, candidate: Candidate, block_s: float, notes: set[str]) -> Timer:
        """Timer of a ready candidate's blocks, in microseconds per launch."""
        block = arrays.benches[-1].timer(*arrays.ready[candidate], seconds=block_s)

        def take() -> float:
            self._step(index)
            before = Clocks.of(self._device)
            try:
                us = block() * 1e6
            except (DeviceError, LaunchError) as error:
                raise GuiltyError(str(error)) from error
            notes.update(Clocks.of(self._device).moved_since(before))
            return us

        return take

    def _step(self, index: int) -> None:
        self._say("at", index)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def _arrays_of(self, job: Job) -> Arrays:
        if job not in self._arrays:
            while len(self._arrays) >= MOST_JOBS:
                self._arrays.popitem(last=False)
            self._arrays[job] = Arrays(self._device, job)
        self._arrays.move_to_end(job)
        return self._arrays[job]

    def _prepare(self, arrays: Arrays, candidate: Candidate, binary: Binary) -> Outcome:
        if candidate in arrays.ready:
            arrays.ready.move_to_end(candidate)
            return Outcome("measured")
        kernel = arrays.job.kernel
        try:
            loaded = load(self._device, _source_of(kernel, candidate, self._device.dialect), binary)
            choice = Choice(candidate.family, candidate.constants, "a candidate")
            for bench in arrays.benches:  # the job's own batch comes last
                if not family_named(candidate.family).takes(kernel, bench.problem.batch, aligned=True):
                    continue
                plan = make_plan(self._device, kernel, bench.problem.batch, choice, loaded)
                packed = bench.pack(plan)
                if fault := fault_of(bench.problem, *bench.results(plan, packed)):
                    return Outcome("wrong", fault)
        except (DeviceError, LaunchError) as error:
            raise GuiltyError(str(error)) from error
        arrays.ready[candidate] = plan, packed
        return Outcome("measured")


def _source_of(kernel: KernelSpec, candidate: Candidate, dialect: Dialect) -> Source:
    return render(kernel, candidate.constants, family=candidate.family, dialect=dialect)


class GuiltyError(Exception):
    """A candidate made the device fail. This process may not be able to use it any more."""


def serve(connection: Connection, device: str | None, limit_s: float) -> None:
    """Answer calls until the parent closes the connection, or is gone."""
    bencher = Bencher(device, limit_s, lambda *message: connection.send(message))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            function, arguments = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                answer: tuple[Any, ...] = ("done", getattr(bencher, function)(*arguments))
            except GuiltyError as error:
                connection.send(("guilty", str(error)))
                return
            except KsgenError as error:
                answer = ("error", type(error), str(error))
            except MemoryError as error:
                answer = ("error", DeviceError, f"this machine has not enough memory for that ({error})")
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(answer)


def main() -> None:
    """Run the child.

    Arguments: the connection's file descriptor, seconds per step, the device, modules to import first.
    """
    number, limit_s, device, *modules = sys.argv[1:]
    os.dup2(2, 1)  # what drivers print goes to standard error
    for module in modules:
        importlib.import_module(module)
    serve(Connection(int(number)), device or None, float(limit_s))


CLOCK_SHARE = 0.03  # largest relative change of the multiprocessors' clock that is ignored
DEGREES = 5  # largest change of the temperature that is ignored


@dataclass(frozen=True)
class Clocks:
    """NVML's readings at one moment; None for those it lacks."""

    megahertz: int | None = None  # clock of the multiprocessors
    degrees: int | None = None  # Celsius
    slowed: bool = False  # whether heat or lack of power limits the clocks

    @classmethod
    def of(cls, device: Device) -> "Clocks":
        """Read the clocks of a device now; no readings without NVML, or for a device that it does not know."""
        if device.kind != "cuda" or (found := _nvml(device.index, device.name)) is None:
            return cls()
        nvml, handle = found
        slow = (
            nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        try:
            return cls(
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slow),
            )
        except nvml.NVMLError:
            return cls()

    def moved_since(self, before: "Clocks") -> set[str]:
        """Notes for a time that was measured between the earlier reading and this one."""
        notes = set()
        if self.megahertz and before.megahertz and abs(self.megahertz / before.megahertz - 1) > CLOCK_SHARE:
            notes.add("clocks moved")
        if self.degrees and before.degrees and abs(self.degrees - before.degrees) > DEGREES:
            notes.add("temperature moved")
        if self.slowed or before.slowed:
            notes.add("clocks were throttled")
        return notes


@cache
def _nvml(index: int, name: str) -> tuple[Any, Any] | None:
    """NVML and its handle of CUDA's GPU `index`; None without NVML, or if its GPU has another name than CUDA's."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        shown = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        which = shown[index] if index < len(shown) else str(index)
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(which)) if which.isdecimal() else by_uuid(which)
        found = pynvml.nvmlDeviceGetName(handle)
    except (pynvml.NVMLError, AttributeError):
        return None
    return (pynvml, handle) if (found.decode() if isinstance(found, bytes) else found) == name else None
