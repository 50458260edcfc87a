"""Proofs over the stand-in driver: families that lie, hang and fault, proofs that are killed or run twice at once, and
machines on which there is none.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ksgen.calibration import proof
from ksgen.calibration.proof import prove
from ksgen.errors import DeviceError, KsgenError
from tests.driver import completed
from tests.support.fake_gpu import FakeGpu
from tests.support.mounts import mounted

pytestmark = pytest.mark.slow

PREAMBLE = """
import json, os, signal
import tests.support.few_cases
from ksgen.calibration import proof
from ksgen.calibration.proof import prove
from ksgen.errors import KsgenError
from ksgen.families import FAMILIES
from ksgen.passport import load
from ksgen.tuning.process import Worker
proof.CASE_SECONDS = 6

def facts():
    worker = Worker(None)
    try:
        return worker.facts()
    finally:
        worker.close()

def say(found):
    print(json.dumps({name: [each.state, each.reason, each.cases] for name, each in found.families.items()}))
"""


def lines_of(script: str, folder: Path, runtime: str = "driver", **variables: str) -> list[Any]:
    """The lines of JSON that a process on the stand-in machine prints."""
    own = {"KSGEN_WISDOM_DIR": str(folder), "KSGEN_PERMIT": ""} | variables
    return [json.loads(line) for line in completed(f"{PREAMBLE}\n{dedent(script)}", runtime, **own).stdout.splitlines()]


@pytest.mark.parametrize("runtime", ["driver", pytest.param("pycuda", marks=pytest.mark.second)])
def test_families_that_lie_hang_and_fault_are_disabled(runtime: str, tmp_path: Path) -> None:
    """The first family's kernel hangs, which costs the others nothing."""
    script = """
    faults = {"wgmma": "hang", "mma": "wrong", "simt": "700", "gemv": "701"}
    os.environ["KSGEN_DRIVER_FAULTS"] = ",".join(
        f"{proof.cases_of(FAMILIES[name], 'sm_90a')[0].sources[0].entry}:{fault}" for name, fault in faults.items()
    )
    say(prove())
    del os.environ["KSGEN_DRIVER_FAULTS"]
    say(prove())
    say(prove(families=["simt"], again=True))
    """
    first, second, again = lines_of(script, tmp_path, runtime)
    assert first == second  # a verdict stays
    assert {name: state for name, (state, _, _) in first.items()} == {
        "wgmma": "disabled",
        "mma": "disabled",
        "simt": "disabled",
        "gemv": "disabled",
        "gradient": "proven",
    }
    assert "_float16_bsf_bias_relu_residual: not done after 6 s (wgmma: tile_batch=" in first["wgmma"][1]
    assert "relative error" in first["mma"][1]
    assert "at batch 7, at most" in first["mma"][1]
    assert "illegal memory access" in first["simt"][1].lower()
    assert "resources" in first["gemv"][1].lower()
    assert {name: cases for name, (_, _, cases) in first.items()} == dict.fromkeys(first, 1) | {"gradient": 2}
    assert again["simt"] == ["proven", "", 2]


def test_a_binary_that_the_driver_refuses_disables_its_family(tmp_path: Path) -> None:
    script = """
    os.environ["KSGEN_DRIVER_FAULTS"] = "cuLibraryLoadData:209"
    say(prove(families=["simt"]))
    """
    [found] = lines_of(script, tmp_path)
    assert found["simt"][0] == "disabled"
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in found["simt"][1]


def test_a_family_that_is_wrong_now_and_then_is_disabled(tmp_path: Path) -> None:
    script = """
    entry = proof.cases_of(FAMILIES["simt"], "sm_90a")[0].sources[0].entry
    os.environ["KSGEN_DRIVER_FAULTS"] = f"{entry}:wrong@2"
    say(prove(families=["simt"]))
    """
    [found] = lines_of(script, tmp_path)
    assert found["simt"][0] == "disabled"
    assert "repeated launches differ at batch 7" in found["simt"][1]


def test_clusters_and_early_launches_are_tried(tmp_path: Path) -> None:
    """A case whose clusters do not fit is left out. Launches that fail plainly alone disable the family."""
    script = """
    from dataclasses import replace
    from ksgen.tuning.job import Candidate
    case = proof.cases_of(FAMILIES["wgmma"], "sm_90a")[0]
    clustered = replace(case.candidate.constants, cluster_batch=2)
    every = [case, replace(case, candidate=Candidate("wgmma", clustered), batches=(7, 301))]
    proof.cases_of = lambda family, target: every
    say(prove(families=["wgmma"]))
    os.environ["KSGEN_DRIVER_CLUSTER"] = "1"
    say(prove(families=["wgmma"], again=True))
    os.environ["KSGEN_DRIVER_CLUSTER"] = "8"
    os.environ["KSGEN_DRIVER_FAULTS"] = "cuLaunchKernel:719@2"  # the second plain launch of the child: none was early
    say(prove(families=["wgmma"], again=True))
    os.environ["KSGEN_DRIVER_FAULTS"] = "cuLaunchKernelEx:912"  # clusters that the driver refuses at the launch alone
    proof.cases_of = lambda family, target: every[1:]
    say(prove(families=["wgmma"], again=True))
    proof.cases_of = lambda family, target: every[:1]
    say(prove(families=["wgmma"], again=True))
    """
    right, small, plain, late, refused = lines_of(script, tmp_path)
    assert right["wgmma"] == ["proven", "", 2]
    assert small["wgmma"] == ["proven", "", 2]  # launchers take no clusters there
    assert plain["wgmma"][0] == "disabled"
    assert late["wgmma"] == ["proven", "", 1]
    assert refused["wgmma"][0] == "disabled"
    assert "CUDA_ERROR_INVALID_CLUSTER_SIZE" in refused["wgmma"][1]


def test_a_proof_that_is_killed_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Killed at each step, a new proof has the verdicts of all families that were done."""
    script = """
    names, steps = ["gradient", "simt"], []
    def killed_at(step):
        if not (child := os.fork()):
            seen = []
            def on_step(each):
                seen.append(each)
                if len(seen) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            prove(families=names, on_step=on_step)
            os._exit(0)
        return os.waitpid(child, 0)[1]
    own = facts()
    for step in (1, 2, 3, 2, 3, 9):
        status = killed_at(step)
        found = load(own)
        print(json.dumps([status, sorted(found.families) if found else []]))
    """
    assert lines_of(script, tmp_path) == [
        [9, []],
        [9, []],
        [9, []],  # with the verdict, before it is recorded
        [9, []],
        [9, []],
        [0, ["gradient", "simt"]],
    ]


def test_two_processes_at_once_prove_each_family_once(tmp_path: Path) -> None:
    script = """
    reading, writing = os.pipe()
    children = []
    for _ in range(2):
        if not (child := os.fork()):
            verdicts = []
            prove(families=["simt", "gradient"], on_step=lambda each: each.proof and verdicts.append(each.family))
            os.write(writing, f"{json.dumps(verdicts)}\\n".encode())
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    print(os.read(reading, 1000).decode(), end="")
    say(load(facts()))
    """
    *verdicts, found = lines_of(script, tmp_path)
    assert sorted(name for each in verdicts for name in each) == ["gradient", "simt"]
    assert {state for state, _, _ in found.values()} == {"proven"}


def test_a_gpu_without_memory_left_disables_nothing(tmp_path: Path) -> None:
    script = """
    os.environ["KSGEN_DRIVER_FAULTS"] = "cuMemAlloc:2"
    try:
        prove(families=["simt"])
    except KsgenError as error:
        print(json.dumps(str(error)))
    print(json.dumps(load(facts())))
    """
    message, found = lines_of(script, tmp_path)
    assert message.startswith("NVIDIA H200: no memory is left on the GPU for a proof (CUDA, allocating ")
    assert found is None


def test_a_child_that_something_else_kills_disables_nothing(tmp_path: Path) -> None:
    script = """
    call = Worker._call
    def killed(worker, function, *arguments):
        if function == "prove":
            os.kill(worker._child.pid, signal.SIGKILL)  # as where memory runs out, or a job ends
        return call(worker, function, *arguments)
    Worker._call = killed
    try:
        prove(families=["simt"])
    except KsgenError as error:
        print(json.dumps(str(error)))
    Worker._call = call
    print(json.dumps(load(facts())))
    """
    message, found = lines_of(script, tmp_path)
    assert message == "NVIDIA H200: no verdict on simt: its process was killed; try again on an idle machine"
    assert found is None


def test_compilers_that_do_not_end_disable_nothing(tmp_path: Path) -> None:
    script = """
    os.environ["KSGEN_COMPILE_SECONDS"] = "0.01"
    try:
        prove(families=["simt"])
    except KsgenError as error:
        print(json.dumps(str(error)))
    print(json.dumps(load(facts())))
    """
    message, found = lines_of(script, tmp_path, KSGEN_CACHE_DIR=str(tmp_path / "empty"))
    assert message.endswith(
        "nvcc was stopped: it had not finished after 0.01 s (KSGEN_COMPILE_SECONDS); set the variable to more"
    )
    assert found is None


def test_a_machine_that_is_too_slow_disables_nothing(tmp_path: Path) -> None:
    script = """
    proof.FAMILY_SECONDS = 0
    try:
        prove(families=["simt"])
    except KsgenError as error:
        print(json.dumps(str(error)))
    print(json.dumps(load(facts())))
    """
    message, found = lines_of(script, tmp_path)
    why = "no verdict on simt, since 1 case of 2 took 0 s; try again on an idle machine"
    assert (message, found) == (f"NVIDIA H200: {why}", None)


def test_machines_without_a_compiler_prove_what_a_bundle_holds(tmp_path: Path) -> None:
    script = """
    from pathlib import Path
    from ksgen.build.build import build
    from ksgen.build.bundle import write_bundle
    from ksgen.build.request import Request
    folder = Path(os.environ["KSGEN_WISDOM_DIR"])
    held = proof.cases_of(FAMILIES["simt"], "sm_90a")[:1]
    requests = [Request(each.text, each.entry, "sm_90a") for case in held for each in case.sources]
    write_bundle(folder / "held.ksb", [(each, build(each.text, each.entry, each.target)) for each in requests])
    os.environ |= {"KSGEN_NO_COMPILE": "1", "KSGEN_CACHE_DIR": str(folder / "empty")}
    try:
        prove(families=["simt"])
    except KsgenError as error:
        print(json.dumps(str(error)))
    os.environ["KSGEN_CACHE_PATH"] = str(folder / "held.ksb")
    say(prove(families=["simt", "gradient"]))
    try:
        prove(families=["simt", "wgmma"])
    except KsgenError as error:
        print(json.dumps(str(error)))
    """
    message, found, missing = lines_of(script, tmp_path)
    assert "no cache holds it for sm_90a, and KSGEN_NO_COMPILE forbids compiling it" in message
    assert "\n" not in message
    assert found == {"simt": ["proven", "", 1]}
    assert "KSGEN_NO_COMPILE forbids compiling it" in missing  # a family that must be proven is not


def test_a_launcher_starts_a_proof_and_later_plans_take_the_family(tmp_path: Path) -> None:
    script = """
    import numpy as np
    from ksgen.devices import find_device
    from ksgen.launch.planner import PLANNER
    from ksgen.launcher import Launcher
    from ksgen import passport
    from ksgen.pattern import Pattern
    from ksgen.spec import KernelSpec
    passport._CHILD = f"import tests.support.few_cases; {passport._CHILD}"
    kernel, device = KernelSpec(Pattern(1, 24, 16, 1), "float16"), find_device()
    large = KernelSpec(Pattern(1, 1024, 1024, 1), "float16")
    print(json.dumps(PLANNER.choice(device, large, 25088).family))
    x, weights = np.ones((7, 16), np.float16), np.ones((1, 24, 16, 1), np.float16)
    assert (Launcher(1, 24, 16, 1)(x, weights) == 16).all()
    assert passport._known[device].child.wait() == 0
    print(json.dumps(PLANNER.choice(device, large, 25088).family))
    say(load(device))
    """
    before, after, found = lines_of(script, tmp_path)
    assert (before, after) == ("mma", "wgmma")
    assert {state for state, _, _ in found.values()} == {"proven"}
    permitted = """
    from ksgen.devices import find_device
    from ksgen.passport import bars
    print(json.dumps("wgmma" not in {bar.family for bar in bars(find_device())}))
    """
    assert lines_of(permitted, tmp_path) == [True]
    assert lines_of(permitted, tmp_path, KSGEN_DRIVER_CUDA="12040+") == [False]  # another driver
    assert lines_of(permitted, tmp_path, KSGEN_DRIVER_GPUS="A100") == [True]  # has no such instructions


def test_the_users_process_goes_on_where_no_child_can_use_the_gpu(tmp_path: Path) -> None:
    script = """
    import warnings
    import numpy as np
    from ksgen.devices import find_device
    from ksgen.launch.choice import limits_of
    from ksgen.launcher import Launcher
    from ksgen import passport
    device = find_device()
    os.environ["KSGEN_DRIVER_FAULTS"] = "cuDevicePrimaryCtxRetain:808"  # MPS_MAX_CLIENTS_REACHED, for the child
    x, weights = np.ones((7, 16), np.float32), np.ones((1, 24, 16, 1), np.float32)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert (Launcher(1, 24, 16, 1)(x, weights) == 16).all()
        if child := passport._known[device].child:
            child.wait()
        limits_of(device)
        assert (Launcher(1, 24, 16, 1)(x, weights) == 16).all()
    print(json.dumps([str(each.message) for each in told]))
    """
    [[message]] = lines_of(script, tmp_path)
    assert "no passport" in message
    assert "MPS_MAX_CLIENTS_REACHED" in message
    [[message]] = lines_of(script, tmp_path, KSGEN_DRIVER_MODE="3")
    assert "the GPU is in exclusive-process mode" in message
    assert lines_of(script, tmp_path, KSGEN_TRIAL="off") == [[]]


# ---- what needs no driver


def test_a_processor_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    with pytest.raises(DeviceError, match=r"it needs no passport; accepted: an NVIDIA GPU, such as device='cuda'$"):
        prove("native")


def test_a_process_that_waits_for_another_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    with proof._wait_for_turn(FakeGpu(), pytest.fail):  # without another process
        pass
    with ExitStack() as other:
        told: list[str] = []

        def end_the_other(why: str) -> None:
            told.append(why)
            other.close()

        other.enter_context(proof._wait_for_turn(FakeGpu(), pytest.fail))
        with proof._wait_for_turn(FakeGpu(), end_the_other):
            assert told == ["Fake GPU: waiting for another process, which proves the families of this device"]


def test_nothing_is_proven_that_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", "size=64k,mode=700,ro") as disk:
        monkeypatch.setenv("KSGEN_WISDOM_DIR", str(disk))
        with pytest.raises(KsgenError, match="cannot be written there; set KSGEN_WISDOM_DIR to another folder"):
            prove("native")
