"""Proves kernel families on a GPU, and records the verdicts in its passport.

This process renders and compiles small kernels. A child process with an alarm loads, launches and checks them, so that
a kernel that hangs or faults ends only that child. Every verdict is recorded at once, so that a proof that was killed
continues where it ended. Chooses nothing.

`check_result` checks the first result of a source on the device that has just loaded it: `KSGEN_CHECK=first`.
"""

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, product
from textwrap import shorten
from time import monotonic
from typing import Any

from ksgen.build.build import build_many, compiling_is_forbidden
from ksgen.build.children import RefusedSourceError
from ksgen.build.request import Binary, Request
from ksgen.build.toolchain import find_compiler
from ksgen.devices.base import Device, RefusedError
from ksgen.emit.render import Source, render
from ksgen.emit.templates import template_digest
from ksgen.errors import DeviceError, KsgenError, ToolchainError
from ksgen.families import FAMILIES, Family, Limits, cuda_limits, family_named
from ksgen.families.expected import LARGE
from ksgen.files import locked
from ksgen.launch.choice import Choice
from ksgen.launch.fused import packing_choices
from ksgen.launch.plan import Loaded, make_plan
from ksgen.measure.verify import Bench, exact_problem, fault_of
from ksgen.passport import MOST_LETTERS, Known, Passport, Proof, load, needs_proof, path_of, record
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from ksgen.spec.kernel import activations_of
from ksgen.spec.storage import SAME, STORAGES, STORED, x_precisions
from ksgen.tuning.job import Candidate, Facts
from ksgen.tuning.process import LostError, Worker
from ksgen.values import counted
from ksgen.wisdom import check_writable

# rows of whole 16-byte chunks in every precision, and ragged tiles; several j, in one tile and in several, and one j
FACTORS = (Pattern(2, 72, 40, 8), Pattern(3, 136, 104, 1))
SMALL = Pattern(2, 37, 13, 5)  # no size is a multiple of another, for families that accept it
LAYERS = (Pattern(2, 8, 24, 1), Pattern(1, 24, 8, 2))  # 48 -> 16 -> 48
WIDE = Pattern(2, 136, 144, 1)  # whole 16-byte chunks in eight bits
# larger than a tile and no multiple of it; the same with rows of whole 16-byte chunks; small batches of both kinds
BATCHES = (301, 312, 7, 8)


@dataclass(frozen=True)
class Case:
    """One kernel with one choice of constants, checked at each batch that its family takes."""

    kernel: KernelSpec
    candidate: Candidate
    batches: tuple[int, ...]

    @property
    def sources(self) -> list[Source]:
        """The kernel's source, and for a chain the sources that pack each factor's weights."""
        family, constants = self.candidate.family, self.candidate.constants
        of_factors = packing_choices(self.kernel, family, constants) if self.kernel.is_chain else []
        pairs = [(self.kernel, constants), *((factor, choice.constants) for factor, choice in of_factors)]
        return [render(kernel, chosen, family=family) for kernel, chosen in pairs]


def cases_of(family: Family[Any], target: str) -> list[Case]:
    """Return the cases that prove a family on a GPU, each source once.

    Constants are chosen for the target's usual card, not for this GPU, so that bundles contain the same sources.
    """
    limits = cuda_limits(target)
    cases: dict[tuple[KernelSpec, Any], Case] = {}
    clustered: set[object] = set()
    for kernel in _kernels(family, limits):
        batch = BATCHES[-1] if family.for_small_batches else LARGE
        for constants in (*family.defaults(kernel, limits, batch), *_in_clusters(family, kernel, limits, clustered)):
            batches = tuple(each for each in BATCHES if family.takes(kernel, each, aligned=True))
            cases[kernel, constants] = Case(kernel, Candidate(family.name, constants), batches)
    return list(cases.values())


def _kernels(family: Family[Any], limits: Limits) -> Iterator[KernelSpec]:
    """Yield kernels that the family supports: factors, gradients, chains, groups, and weights and X in other types.

    A family that must be proven before it is chosen gets every pattern and layout; any other family gets them in turn.
    """
    patterns = cycle([(SMALL, *FACTORS), (*FACTORS, SMALL), (*FACTORS[::-1], SMALL)])
    chains = cycle([(LAYERS,), (LAYERS, LAYERS), (LAYERS[:1], LAYERS[:1])])
    for precision, layout in product(PRECISIONS, LAYOUTS):
        full = Epilogue(True, "relu" if "relu" in activations_of(precision) else "none", True)
        for job, epilogue in (("multiply", full), ("gradient", Epilogue())):
            kernels = [KernelSpec(each, precision, layout, epilogue, job=job) for each in next(patterns)]
            yield from list(_supported(family, limits, kernels))[: None if family.by_warpgroups else 1]
        if layout == "bsf" or family.by_warpgroups:
            yield from _supported(family, limits, [KernelSpec(next(chains), precision, layout, full)])
    layouts = cycle(LAYOUTS)
    for storage, inputs in [*((each, SAME) for each in STORED), *((each, each) for each in STORAGES)]:
        turns = LAYOUTS if family.by_warpgroups else (next(layouts),)
        kernels = [
            KernelSpec(pattern, precision, layout, Epilogue(bias=True), weights=storage, inputs=inputs)
            for layout, pattern, precision in product(turns, (*FACTORS, WIDE), x_precisions(storage))
        ]
        yield from list(_supported(family, limits, kernels))[: len(turns)]


def _supported(family: Family[Any], limits: Limits, kernels: Iterable[KernelSpec]) -> Iterator[KernelSpec]:
    return (kernel for kernel in kernels if family.supports(kernel, limits))


def _in_clusters(family: Family[Any], kernel: KernelSpec, limits: Limits, done: set[object]) -> Iterator[Any]:
    """Yield constants without clusters, and with clusters of two blocks along the batch, once per type and layout."""
    for constants in family.defaults(kernel, limits, LARGE):
        key = type(constants), kernel.layout
        if not hasattr(constants, "cluster_batch") or key in done:
            continue
        done.add(key)
        for blocks in (1, 2):
            changed = replace(constants, cluster_batch=blocks, cluster_out=1)
            if family.keeps_rules(kernel, changed):
                yield changed


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
    with closing(Worker(device, limit_s=CASE_SECONDS)) as worker:
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
            what = f"no verdict on {case.candidate.family}: its process was killed"
            raise DeviceError(f"{facts.name}: {what}; try again on an idle machine") from None
        reason = lost.reason
    if "out of memory" in reason.lower():
        raise DeviceError(
            f"{facts.name}: no memory is left on the GPU for a proof ({reason}); end other programs on it"
        )
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


def check_result(device: Device, loaded: Loaded, choice: Choice) -> None:
    """Raise `RefusedError` if a source gives wrong results at a ragged batch.

    The operands are small integers if their sums are exact; results must then have the bits of the float64 reference.
    """
    kernel, family = loaded.source.kernel, family_named(choice.family)
    batches = (kernel.batch,) if kernel.batch else BATCHES[::-1] if family.for_small_batches else BATCHES
    batch = next(each for each in batches if family.takes(kernel, each, aligned=True))
    problem = exact_problem(kernel, batch)
    plan = make_plan(device, kernel, batch, choice, loaded)
    if fault := fault_of(problem, *Bench(device, problem).results(plan)):
        raise RefusedError(f"{choice.family} is wrong on {device.name}: {fault}")
