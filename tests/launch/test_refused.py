"""Sources that a device refuses, or whose first result is wrong: the planner takes another kernel, and says so once."""

from dataclasses import replace
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from ksgen import passport
from ksgen.calibration import proof
from ksgen.devices.base import CONTEXT_LOST, RefusedError
from ksgen.emit.render import render
from ksgen.errors import ConstantsError, DeviceError, LaunchError
from ksgen.families import cuda_limits, family_for
from ksgen.families.expected import LARGE
from ksgen.launch import base, fused, streams
from ksgen.launch.choice import Choice, described, limits_of
from ksgen.launch.planner import Planner, checks_first_results
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.driver import completed
from tests.support.fake_gpu import FakeArray, FakeGpu

KERNEL = KernelSpec(Pattern(3, 136, 200, 1), "tf32x3")  # by wgmma in clusters of two blocks
BATCH = 300


def refuse(*_: Any) -> Any:
    raise DeviceError("CUDA, asking: this part of a GPU is small")


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def part(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A part of a GPU, on which no clusters fit."""
    monkeypatch.setattr(gpu, "check_clusters", refuse, raising=False)
    return gpu


def test_refused_clusters_fall_back_to_the_same_kernel_without(
    part: FakeGpu, planner: Planner, caplog: pytest.LogCaptureFixture
) -> None:
    before = planner.choice(part, KERNEL, LARGE)
    assert (before.family, before.constants.cluster_batch) == ("wgmma", 2)
    plan = planner.plan(part, KERNEL, LARGE)
    assert plan.choice.constants == replace(before.constants, cluster_batch=1)
    assert plan.choice.why == "the device refuses its clusters"
    assert [each.getMessage() for each in caplog.records] == [
        f"{KERNEL.name}: CUDA, asking: this part of a GPU is small; launchers take wgmma without clusters"
    ]
    compiled = len(part.compiles.compiled)
    assert planner.plan(part, KERNEL, LARGE + 1).choice.constants == plan.choice.constants
    assert len(part.compiles.compiled) == compiled  # it is remembered


def test_no_cluster_waits_for_others_to_end(gpu: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent blocks of one cluster too many would run after all others: the driver says how many run at a time."""
    monkeypatch.setattr(gpu, "check_clusters", lambda *_: 7, raising=False)
    plan = planner.plan(gpu, KERNEL, LARGE)
    assert plan.choice.constants.cluster_batch == 2
    assert plan.grid == 14


def test_refused_tensor_maps_fall_back_to_mma(part: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "encode_map", refuse)
    plan = planner.plan(part, KERNEL, LARGE)
    assert (plan.choice.family, plan.choice.why) == ("mma", "the device refuses wgmma")


def test_no_family_that_was_refused_is_taken_again(
    gpu: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One family after another is wrong; where all are, the error names each of them."""
    kernel, wrong = KernelSpec(KERNEL.pattern, "float16"), {"wgmma", "mma"}

    def check(device: FakeGpu, loaded: Any, choice: Choice) -> None:
        if choice.family in wrong:
            raise RefusedError(f"{choice.family} lies")

    monkeypatch.setenv("KSGEN_CHECK", "first")
    monkeypatch.setattr(proof, "check_result", check)
    assert planner.choice(gpu, kernel, BATCH).family == "wgmma"
    plan = planner.plan(gpu, kernel, BATCH)
    assert (plan.choice.family, plan.choice.why) == ("simt", "the device refuses mma")
    assert described(plan.choice, kernel, BATCH, limits_of(gpu)) == "the device refuses mma"
    wrong.add("simt")
    each = "; ".join(f"{name} is refused by the device: {name} lies" for name in ("wgmma", "mma", "simt"))
    with pytest.raises(DeviceError) as told:
        Planner().plan(gpu, kernel, BATCH)
    assert str(told.value) == f"{kernel.name}: no family can compute it on this device; {each}"
    assert told.value.__context__ is None


def test_a_lost_context_is_no_refusal(part: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> Any:
        raise DeviceError(f"CUDA, describing: it fell off the bus{CONTEXT_LOST}")

    monkeypatch.setattr(part, "encode_map", lose)
    with pytest.raises(DeviceError, match="it fell off the bus") as told:
        planner.plan(part, KERNEL, LARGE)
    assert not isinstance(told.value, RefusedError)


@pytest.mark.timeout(120)  # the choice must end
@pytest.mark.parametrize(
    ("precision", "families"),
    [("float16", ["wgmma", "wgmma", "mma", "simt"]), ("tf32x3", ["wgmma", "wgmma", "mma", "simt"])],
)
def test_families_are_refused_in_turn_until_none_is_left(
    precision: str, families: list[str], gpu: FakeGpu, planner: Planner, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = replace(KERNEL, precision=precision)
    for number, family in enumerate(families[:-1], 1):
        plan = planner.plan(gpu, kernel, LARGE)
        assert plan.choice.family == family
        planner.refuse(plan, f"no room, {number}")
        assert f": no room, {number}; launchers take {families[number]}" in caplog.messages[-1]
    said = caplog.messages[:]
    last = planner.plan(gpu, kernel, LARGE)
    assert last.choice.family == families[-1]
    left = r"no family can compute it on this device; wgmma is refused by the device: no room, 2; mma is .*, 3; simt is"
    with pytest.raises(DeviceError, match=left):
        planner.refuse(last, "no room, 4")
    for aligned in (True, False):
        with pytest.raises(DeviceError, match="simt is refused by the device: no room, 4"):
            planner.plan(gpu, kernel, LARGE, aligned)
    assert caplog.messages == said


def test_the_warning_names_the_kernel_of_arrays_that_are_aligned_like_those_of_the_call(
    gpu: FakeGpu, planner: Planner, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = replace(KERNEL, precision="float16")
    plan = planner.plan(gpu, kernel, LARGE, aligned=False)
    assert plan.choice.family == "mma"
    planner.refuse(plan, "no room", aligned=False)
    assert caplog.messages == [f"{kernel.name}: no room; launchers take simt"]
    assert planner.choice(gpu, kernel, LARGE, aligned=False).family == "simt"
    assert planner.choice(gpu, kernel, LARGE).family == "wgmma"


class Part(FakeGpu):
    """A part of a GPU that answers that clusters fit, and refuses their launches."""

    error: DeviceError = RefusedError("CUDA, launching: no room")
    refused = 0

    def launch(self, kernel: Any, *given: Any) -> None:
        text, _, is_early = kernel
        if is_early and "__cluster_dims__" in text:
            self.refused += 1
            raise type(self.error)(*self.error.args)  # one without a traceback, whose frames hold memory
        super().launch(kernel, *given)


@pytest.fixture
def late(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Part:
    """A GPU that refuses clusters at the launch alone."""
    found = Part(compiles=gpu.compiles)
    monkeypatch.setattr(streams, "device_for", lambda place: found)
    return found


def operands(gpu: FakeGpu) -> tuple[FakeArray, FakeArray, FakeArray]:
    a, b, c, d = KERNEL.pattern.shape
    shapes = (BATCH, a * c * d), (a, b, c, d), (BATCH, a * b * d)
    x, weights, out = (
        FakeArray(gpu, np.full(shape, value, np.float32)) for shape, value in zip(shapes, (1, 1, 0), strict=True)
    )
    return x, weights, out


def test_clusters_that_are_refused_at_the_launch_are_dropped_and_it_is_remembered(
    late: Part, caplog: pytest.LogCaptureFixture
) -> None:
    x, weights, out = operands(late)
    own = Launcher(KERNEL.pattern, precision="tf32x3")
    call = own.prepare(x, weights, out=out)
    for _ in range(2):
        assert call() is out
        late.synchronize()
        assert (out.content == 200).all()
        out.content[...] = 0
    assert own(x, weights, out=out) is out
    late.synchronize()
    assert (out.content == 200).all()
    assert late.refused == 1
    assert [each.getMessage() for each in caplog.records] == [
        f"{KERNEL.name}: CUDA, launching: no room; launchers take wgmma without clusters"
    ]
    found = base.PLANNER.choice(late, KERNEL, BATCH)
    assert (found.constants.cluster_batch, found.why) == (1, "the device refuses its clusters")


def test_no_other_kernel_is_taken_where_all_would_fail(late: Part) -> None:
    x, weights, out = operands(late)
    late.error = DeviceError("CUDA, launching: out of memory")
    with pytest.raises(DeviceError, match="out of memory"):
        Launcher(KERNEL.pattern, precision="tf32x3")(x, weights, out=out)
    assert base.PLANNER.choice(late, KERNEL, BATCH).constants.cluster_batch == 2


def test_a_launch_that_is_refused_while_a_graph_is_recorded_builds_nothing(late: Part) -> None:
    x, weights, out = operands(late)
    call = Launcher(KERNEL.pattern, precision="tf32x3").prepare(x, weights, out=out)
    late.begin_capture()
    with pytest.raises(LaunchError, match="builds and loads its kernel"):
        call()
    late.end_capture()
    assert call() is out
    late.synchronize()
    assert (out.content == 200).all()


def test_a_refusal_leaves_a_chain_s_plan_to_captures(late: Part) -> None:
    chain = ChainLauncher("2,8,24,1", "1,24,8,2", fuse="yes")
    x, *weights, out = (
        FakeArray(late, np.ones(shape, np.float32))
        for shape in ((BATCH, 48), (2, 8, 24, 1), (1, 24, 8, 2), (BATCH, 48))
    )
    chain(x, weights, out=out)
    kernel = next(each for each in base.PLANNER.derived)[1]
    known, generation = fused.fused_plan(late, kernel, BATCH, "yes"), base.PLANNER.generation
    late.synchronize()
    out.content[...] = 0
    factor, own_weights, y = operands(late)
    Launcher(KERNEL.pattern, precision="tf32x3")(factor, own_weights, out=y)
    late.synchronize()
    assert (late.refused, base.PLANNER.earlier[-1]) == (1, generation)  # its calls may keep their kernels
    late.begin_capture()
    assert fused.fused_plan(late, kernel, BATCH, "yes") is known
    chain(x, weights, out=out)
    late.end_capture()()
    assert (out.content == 24 * 8).all()


def test_a_chain_s_plan_is_cached_under_the_guard_of_refusals(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal in another thread iterates over such plans."""

    class Guarded(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            assert base.PLANNER._guard._is_owned()
            super().__setitem__(key, value)

    monkeypatch.setattr(base, "find_device", lambda name: gpu)
    monkeypatch.setattr(base.PLANNER, "derived", Guarded())
    ChainLauncher("2,8,24,1", "1,24,8,2", fuse="yes").build(BATCH)
    assert len(base.PLANNER.derived) == 1


def test_a_call_after_a_refusal_keeps_the_memory_of_its_kernel_alone(late: Part) -> None:
    a, b, c, d = KERNEL.pattern.shape
    x, weights = np.ones((BATCH, a * c * d), np.float32), np.ones((a, b, c, d), np.float32)
    own = Launcher(KERNEL.pattern, precision="tf32x3")
    before, kept = len(late._memory), list[int]()
    for refused in (1, 1):
        call = own.prepare(x, weights)
        assert (call() == 200).all()
        assert late.refused == refused
        kept.append(len(late._memory) - before)
        del call
        assert len(late._memory) == before
    assert kept[0] == kept[1]


def test_a_call_that_was_launched_keeps_the_memory_that_a_graph_may_read(
    late: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights, out = operands(late)
    call = Launcher(KERNEL.pattern, precision="tf32x3").prepare(x, weights, out=out)
    with monkeypatch.context() as patched:
        patched.setattr(Part, "launch", FakeGpu.launch)
        call()
    former = call.keep
    assert call() is out
    assert late.refused == 1
    assert len(call.keep) > len(former)
    assert all(each is other for each, other in zip(former, call.keep, strict=False))


def test_no_proof_is_started_while_a_graph_is_recorded(
    gpu: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr(passport, "begin", begun.append)

    def capturing() -> None:
        raise DeviceError("a graph is being recorded")

    with pytest.raises(DeviceError, match="a graph is being recorded"):
        planner.plan(gpu, KERNEL, LARGE, before_loading=capturing)
    assert begun == []
    planner.plan(gpu, KERNEL, LARGE)
    assert begun == [gpu]


def test_another_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_CHECK", "all")
    with pytest.raises(ConstantsError, match=r"^KSGEN_CHECK='all'; accepted: first, or unset$"):
        checks_first_results()


PREAMBLE = """
import logging
import numpy as np
from ksgen.devices import find_device
from ksgen.devices.libcuda import EarlyLaunch
from ksgen.launch.planner import PLANNER
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
logging.basicConfig(format="%(message)s")

def multiply(*pattern, precision="float16", batch=300):
    x, weights = np.ones((batch, pattern[0] * pattern[2] * pattern[3]), precision), np.ones(pattern, precision)
    y = Launcher(*pattern)(x, weights)
    kernel = KernelSpec(Pattern(*pattern), precision)
    print(bool((y == pattern[2]).all()), PLANNER.choice(find_device(), kernel, batch).family)
"""


def printed(script: str, runtime: str = "driver", **variables: str) -> tuple[list[str], str]:
    """What a process on the stand-in machine prints and warns."""
    done = completed(f"{PREAMBLE}\n{dedent(script)}", runtime, **variables)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_the_first_result_of_a_source_is_checked_if_asked_for() -> None:
    """A wrong kernel gives way before a call takes its results."""
    kernel = KernelSpec(Pattern(1, 24, 16, 1), "float16")
    limits = cuda_limits("sm_90a")
    family = family_for(kernel, limits, 300)
    entry = render(kernel, family.default(kernel, limits, 300), family=family.name).entry
    script, wrong = "multiply(1, 24, 16, 1)", {"KSGEN_DRIVER_FAULTS": f"{entry}:wrong"}
    assert printed(script) == ([f"True {family.name}"], "")
    assert printed(script, **wrong)[0] == [f"False {family.name}"]
    [line], warned = printed(script, **wrong, KSGEN_CHECK="first")
    assert line.startswith("True")
    assert f"{family.name} is wrong on NVIDIA H200: " in warned
    assert "; launchers take " in warned
    assert printed(script, KSGEN_CHECK="first") == ([f"True {family.name}"], "")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["driver", pytest.param("pycuda", marks=pytest.mark.second)])
def test_a_refused_early_launch_becomes_a_plain_one(runtime: str) -> None:
    script = """
    multiply(1, 24, 16, 1, batch=3)  # by gemv, whose launches begin early
    multiply(1, 24, 16, 1, batch=4)
    print(EarlyLaunch.are_refused)
    """
    lines, warned = printed(script, runtime, KSGEN_DRIVER_FAULTS="cuLaunchKernelEx:801@1")
    assert [line.partition(" ")[0] for line in lines] == ["True"] * 3
    assert warned.count("the driver refuses early launches (CUDA_ERROR_NOT_SUPPORTED") == 1


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["driver", pytest.param("pycuda", marks=pytest.mark.second)])
def test_a_driver_is_asked_for_tensor_maps_and_clusters(runtime: str) -> None:
    script = """
    kernel = KernelSpec(Pattern(3, 136, 128, 1), "tf32x3")
    plan = PLANNER.plan(find_device(), kernel, 25088)
    print(plan.choice.family, getattr(plan.choice.constants, "cluster_batch", None))
    """
    assert printed(script, runtime)[0] == ["wgmma 2"]
    assert printed(script, runtime, KSGEN_DRIVER_CLUSTER="1")[0] == ["wgmma 1"]
    assert printed(script, runtime, KSGEN_DRIVER_FAULTS="cuTensorMapEncodeTiled:801")[0] == ["mma None"]
    # a driver that cannot answer changes nothing
    assert printed(script, runtime, KSGEN_DRIVER_FAULTS="cuOccupancyMaxActiveClusters:801")[0] == ["wgmma 2"]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["driver", pytest.param("pycuda", marks=pytest.mark.second)])
@pytest.mark.parametrize(
    ("fault", "precision", "family", "kernels"),
    [
        ("cuLaunchKernelEx:912@1", "tf32x3", "wgmma 1", ["wgmma without clusters"]),
        ("cuLaunchKernelEx:912", "tf32x3", "mma None", ["wgmma without clusters", "mma"]),
        ("cuTensorMapEncodeTiled:1", "float16", "mma None", ["mma"]),
    ],
)
def test_a_launch_that_the_driver_refuses_is_made_by_another_kernel(
    fault: str, precision: str, family: str, kernels: list[str], runtime: str
) -> None:
    """The driver answers that it fits, and refuses it later. Later calls take the other kernel at once."""
    script = f"""
    import ctypes
    own, kernel, device = Launcher(3, 96, 104, 1), KernelSpec(Pattern(3, 96, 104, 1), {precision!r}), find_device()
    assert PLANNER.plan(device, kernel, 300).choice.family == "wgmma"
    ctypes.CDLL("libcuda.so.1").ksgen_driver_faults({fault.encode()!r})
    x, weights = np.ones((300, 312), kernel.dtype), np.ones((3, 96, 104, 1), kernel.dtype)
    for _ in range(2):
        y = own(x, weights, precision={precision!r})
        choice = PLANNER.choice(device, kernel, 300)
        print(bool((y == 104).all()), choice.family, getattr(choice.constants, "cluster_batch", None))
    """
    lines, warned = printed(script, runtime)
    assert lines == [f"True {family}"] * 2
    assert [line.rpartition("; launchers take ")[2] for line in warned.splitlines()] == kernels
