"""The child that measures: candidates that hang, crash or are wrong are named, and cost the others nothing."""

import shutil
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from ksgen.devices import Found, list_devices
from ksgen.devices.base import DeviceLimits
from ksgen.emit.render import render
from ksgen.errors import DeviceError, ToolchainError
from ksgen.families import FAMILIES, cuda_limits, family_named
from ksgen.families.simt.shape import SimtConstants
from ksgen.measure import verify
from ksgen.measure.trust import HOPELESS_BLOCKS, LEAST_SECONDS, Blocks
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.tuning import worker as child
from ksgen.tuning.job import Candidate, Facts, Job, Runs
from ksgen.tuning.process import LostError, Worker
from tests.emulator import is_installed
from tests.support import broken_kernels as broken
from tests.support.fake_gpu import FakeGpu, TextCompiler

HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
HAS_NVCC = shutil.which("nvcc") is not None
JOB = Job(KernelSpec(Pattern(2, 24, 9, 3), epilogue=Epilogue(True, "none", True)), 70)
CONSTANTS = SimtConstants(32, 16, 8, 1, 4, 4, 2, 1, "registers")
RUNS = Runs(seconds=0.0, block_s=0.001)


def candidate(min_blocks: int) -> Candidate:
    return Candidate("simt", replace(CONSTANTS, min_blocks=min_blocks))


@pytest.fixture(scope="module")
def facts(worker: Worker) -> Facts:
    return worker.facts()


@needs_opencl
def test_facts_and_ceilings_are_the_devices(worker: Worker, facts: Facts) -> None:
    assert facts.dialect == facts.kind == "opencl"
    assert facts.limits.threads_per_block > 0
    assert worker.ceilings("float32", None).flops_per_s > 1e8


@needs_opencl
def test_right_candidates_are_timed_in_turns(worker: Worker, facts: Facts) -> None:
    entries = [(each, worker.compile(JOB.kernel, each, facts)) for each in (candidate(1), candidate(2))]
    first, second = worker.measure(JOB, entries, replace(RUNS, seconds=0.05))
    assert len(first.microseconds) == len(second.microseconds) >= 1
    for outcome in (first, second):
        assert (outcome.state, outcome.reason) == ("measured", "")
        assert min(outcome.microseconds) <= outcome.median_us <= max(outcome.microseconds)
        assert outcome.spread >= 0


@needs_opencl
def test_a_candidate_far_behind_the_best_gets_no_more_than_the_first_blocks(worker: Worker, facts: Facts) -> None:
    binary = worker.compile(JOB.kernel, candidate(1), facts)
    block_s = 2 * LEAST_SECONDS  # after one the load is known
    long = replace(JOB, batch=7000)  # a block has at most MOST_RUNS runs
    (outcome,) = worker.measure(
        long, [(candidate(1), binary)], replace(RUNS, seconds=60.0, block_s=block_s, give_up_us=1e-3)
    )
    assert len(outcome.microseconds) == HOPELESS_BLOCKS


@pytest.mark.slow
@needs_opencl
def test_those_that_misbehave_are_named_and_the_others_are_measured(worker: Worker, facts: Facts) -> None:
    kinds = (1, broken.WRONG, broken.CRASHES, 2, broken.HANGS, 3)
    entries = [(candidate(kind), worker.compile(JOB.kernel, candidate(kind), facts)) for kind in kinds]
    outcomes = worker.measure(JOB, entries, RUNS)
    assert [outcome.state for outcome in outcomes] == ["measured", "wrong", "failed", "measured", "hung", "measured"]
    assert outcomes[1].reason.startswith("relative error ")
    assert " at batch 301, at most " in outcomes[1].reason
    assert outcomes[2].reason.startswith("the process died: SIG")
    assert outcomes[4].reason == "not done after 6 s"
    assert not any(outcome.microseconds for outcome in outcomes if outcome.state != "measured")


@needs_opencl
def test_a_text_that_is_refused_names_the_compilers_complaint(worker: Worker, facts: Facts) -> None:
    with pytest.raises(ToolchainError, match="the OpenCL compiler refused it"):
        worker.compile(JOB.kernel, candidate(broken.REFUSED), facts)


@needs_opencl
def test_a_compiler_that_crashes_or_hangs_is_named_and_the_next_text_compiles(worker: Worker, facts: Facts) -> None:
    with pytest.raises(LostError, match="the process died: SIGABRT"):
        worker.compile(JOB.kernel, candidate(broken.CRASHES_COMPILER), facts)
    impatient = Worker("opencl:0", ["tests.support.broken_kernels"], limit_s=3)
    with pytest.raises(LostError, match="not done after 3 s") as caught:
        impatient.compile(JOB.kernel, candidate(broken.HANGS_COMPILER), facts)
    assert caught.value.state == "hung"
    impatient.close()
    assert worker.compile(JOB.kernel, candidate(1), facts).data


@needs_opencl
def test_a_device_that_is_not_there_is_the_users_mistake() -> None:
    absent = Worker("no such device")
    with pytest.raises(DeviceError, match="device 'no such device': none is called that"):
        absent.facts()
    absent.close()
    broken_child = Worker("opencl:0", ["no.such.module"])
    with pytest.raises(
        DeviceError, match=r"the process that measures: the process died: exit status 1 .*No module named 'no'"
    ):
        broken_child.facts()
    broken_child.close()


@pytest.mark.skipif(not is_installed("none"), reason="the fake GPU is the emulator, which needs g++")
def test_candidates_that_stay_loaded_share_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would hold as much as X and Y together otherwise."""
    gpu, family = FakeGpu(), family_named("wgmma_permuted")
    job = Job(KernelSpec(Pattern(1, 16, 8, 2), "float16", batch=40), 40)
    monkeypatch.setattr(child, "find_device", lambda name: gpu)
    monkeypatch.setattr(child, "render", render)
    monkeypatch.setattr(verify, "time_launches", lambda device, launches, runs, warmup: [launches() or 1.0])
    monkeypatch.setattr(child, "take_blocks", lambda timers, *_: [Blocks((timer(),)) for timer in timers])
    entries: list[Any] = []
    for constants in islice(family.space(job.kernel, cuda_limits("sm_90a")), 3):
        source = render(job.kernel, constants, family=family.name)
        entries.append(
            (Candidate(family.name, constants), TextCompiler().compile(source.text, source.entry, gpu.target))
        )
    bencher = child.Bencher(None, 0, lambda *message: None)  # no time limit, whose alarm would end the tests
    assert [outcome.state for outcome in bencher.measure(job, entries, RUNS)] == ["measured"] * 3
    assert len(bencher._arrays[job].ready) == 3
    workspace_bytes = family.geometry(job.kernel, entries[0][0].constants, 40).workspace_bytes
    assert [memory.nbytes for memory in gpu._memory.values()].count(workspace_bytes) == 1


@pytest.mark.skipif(not HAS_NVCC, reason="no CUDA compiler")
def test_a_cuda_candidate_compiles_where_there_is_no_gpu() -> None:
    limits = DeviceLimits(227 * 1024, 1024, 132)
    facts = Facts("NVIDIA H200", "sm_90a", "cuda", "cuda", "580", limits, "", ())
    kernel = KernelSpec(Pattern(1, 192, 48, 2), "float16")
    worker = Worker("no such device")
    binary = worker.compile(kernel, Candidate("mma", FAMILIES["mma"].default(kernel, cuda_limits("sm_90a"))), facts)
    assert binary.target == "sm_90a"
    assert binary.resources.registers
    assert binary.resources.spill_bytes == 0
    worker.close()
