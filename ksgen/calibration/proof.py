"""Proves kernel families on a GPU, and records the verdicts in its passport.

This process renders and compiles small kernels. A child process with an alarm loads, launches and checks them, so that
a kernel that hangs or faults ends only that child. Every verdict is recorded at once, so that a proof that was killed
continues where it ended. Chooses nothing.
"""

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from time import monotonic

from ksgen.build.build import build_many, compiling_is_forbidden
from ksgen.build.refused import RefusedSourceError
from ksgen.build.request import Binary, Request
from ksgen.build.toolchain import find_compiler
from ksgen.calibration.cases import Case, cases_of
from ksgen.emit.templates import template_digest
from ksgen.errors import DeviceError, KsgenError, ToolchainError
from ksgen.families import FAMILIES, family_named
from ksgen.files import locked
from ksgen.passport.standing import needs_proof
from ksgen.passport.store import MOST_LETTERS, Known, Passport, Proof, load, path_of, record
from ksgen.tuning.job import Facts
from ksgen.tuning.process import LostError, Worker
from ksgen.values import counted
from ksgen.wisdom.store import check_writable

CASE_SECONDS = 60.0  # limit of one case in the child, which then counts as hanging; a busy machine takes seconds
FAMILY_SECONDS = 600.0  # limit of all cases of a family in the child, after which there is no verdict
BACKGROUND_SECONDS = 900  # limit of a whole proof that a launcher started
BACKGROUND_NICE = 10  # niceness added to such a proof, so that the user's own work goes first


class NotNeededError(DeviceError):
    """The device needs no passport."""


@dataclass(frozen=True)
class ProofProgress:
    """Progress of one family's proof."""

    family: str
    done: int  # cases
    total: int
    proof: Proof | None = None  # the verdict, at the last step


def prove(
    device: str | None = None,
    families: Collection[str] | None = None,
    on_step: Callable[[ProofProgress], object] = lambda step: None,
    again: bool = False,
    on_wait: Callable[[str], object] = lambda why: None,
) -> Passport:
    """Prove a GPU's families in child processes, and return its passport. This process opens no device.

    Args:
        device: A device as `KSGEN_DEVICE` names it. None: the one that launchers take.
        families: Names of families. None: all that have kernels for the device.
        on_step: Called after every case, and again with each verdict.
        again: Prove families again that have a verdict for this driver and these templates.
        on_wait: Called with the reason before waiting for another process that proves this device's families.

    Returns:
        The passport, which lies next to the user's wisdom.

    Raises:
        NotNeededError: The device is no NVIDIA GPU.
        DeviceError: The device cannot be used by a child process.
        ToolchainError: Kernels can neither be compiled nor found in caches and bundles.
        KsgenError: The passport cannot be written.
    """
    wanted = [family_named(name).name for name in (FAMILIES if families is None else families)]
    check_writable()
    worker = Worker(device, limit_s=CASE_SECONDS)
    try:
        facts = worker.facts()
        if facts.kind != "cuda":
            raise NotNeededError(f"{facts.name}: it needs no passport; accepted: an NVIDIA GPU, such as device='cuda'")
        worker.close()  # so that no CUDA context stays open while waiting for other processes
        with _wait_for_turn(facts, on_wait):
            passport = load(facts) or Passport(facts.name, facts.target, facts.driver_version)
            absent = ""
            for name in wanted:
                if name in passport.families and not again:
                    continue
                try:
                    proof = _prove(worker, name, facts, on_step)
                except ToolchainError as error:  # a cache or bundle may hold the binaries of other families
                    absent = absent or str(error).splitlines()[0]
                    continue
                if proof:
                    passport = record(facts, {name: proof})
        missing = [name for name in wanted if name not in passport.families and needs_proof(name, facts.target)]
        if absent and (missing or not passport.families):
            raise ToolchainError(absent)
        return passport
    finally:
        worker.close()


def main() -> None:
    """Run a proof that a launcher started. Argument: the device. On failure, the last line of stderr is the reason."""
    signal.alarm(BACKGROUND_SECONDS)
    os.nice(BACKGROUND_NICE)
    try:
        prove(sys.argv[1])
    except KsgenError as error:
        sys.exit(str(error).splitlines()[0])


@contextmanager
def _wait_for_turn(device: Known, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Let one process at a time prove this device's families. A process that waited finds the verdicts recorded."""
    path = path_of(device.name)
    why = f"{device.name}: waiting for another process, which proves the families of this device"
    with locked(path.with_name(f".{path.name}.proof.lock"), lambda: on_wait(why)):
        yield


def _prove(worker: Worker, name: str, facts: Facts, on_step: Callable[[ProofProgress], object]) -> Proof | None:
    """The verdict on one family; None if it supports no kernel on the device.

    `ToolchainError` if none of its cases can be built or found.
    """
    begin = _processor_seconds() - worker.seconds()
    cases = cases_of(family_named(name), facts.target)
    if not cases:
        return None
    binaries, reason = _built(cases, facts)
    deadline, done = monotonic() + FAMILY_SECONDS, 0
    for case, binary in binaries:
        if reason:
            break
        reason = _fault_of(worker, case, binary, facts)
        done += 1
        if not reason and monotonic() > deadline:
            slow = f"{counted(done, 'case')} of {len(cases)} took {FAMILY_SECONDS:g} s"
            raise DeviceError(f"{facts.name}: no verdict on {name}, since {slow}; try again on an idle machine")
        on_step(ProofProgress(name, done, len(cases)))
    reason = "".join(letter if letter.isprintable() else " " for letter in shorten(reason, MOST_LETTERS))
    seconds = max(0.0, _processor_seconds() + worker.seconds() - begin)
    proof = Proof("disabled" if reason else "proven", reason, template_digest(name), done, round(seconds, 1))
    on_step(ProofProgress(name, done, len(cases), proof))
    return proof


def _fault_of(worker: Worker, case: Case, binary: Binary, facts: Facts) -> str:
    """Reason why a case gives wrong results, faults or hangs; empty if its results are right."""
    try:
        outcome = worker.prove(case.kernel, case.candidate, binary, case.batches)
        reason = outcome.reason if outcome.state == "wrong" else ""
    except LostError as lost:
        if lost.is_killed:
            raise DeviceError(f"{facts.name}: no verdict on {case.candidate.family}: its process was killed") from None
        reason = lost.reason
    if "out of memory" in reason.lower():
        raise DeviceError(f"{facts.name}: no memory is left on the GPU for a proof ({reason})")
    return reason and f"{case.kernel.name}: {reason} ({case.candidate})"


def _built(cases: list[Case], facts: Facts) -> tuple[list[tuple[Case, Binary]], str]:
    """Return the cases with their binaries, and the reason if a compiler refuses the source of a case.

    Without a compiler, cases that no cache or bundle holds are left out. Raise `ToolchainError` if all cases are left
    out, or if a compiler fails for a reason other than the source.
    """
    needed = [[Request(each.text, each.entry, facts.target) for each in case.sources] for case in cases]
    requests = list(dict.fromkeys(request for of_case in needed for request in of_case))
    results = dict(zip(requests, build_many(requests), strict=True))
    missing = [result for result in results.values() if isinstance(result, KsgenError)]
    if missing and _can_compile():
        for error in missing:
            if not isinstance(error, RefusedSourceError):
                raise ToolchainError(str(error))
        return [], f"a case does not compile: {missing[0]}"
    built = []
    for case, of_case in zip(cases, needed, strict=True):
        binaries = [each for request in of_case if isinstance(each := results[request], Binary)]
        if len(binaries) == len(of_case):
            built.append((case, binaries[0]))
    if not built:
        raise ToolchainError(str(missing[0]))
    return built, ""


def _can_compile() -> bool:
    try:
        return not compiling_is_forbidden() and bool(find_compiler())
    except ToolchainError:
        return False


def _processor_seconds() -> float:
    """Processor seconds of this process and of the compilers that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
