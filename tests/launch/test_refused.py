"""Sources that a device refuses, or whose first result is wrong: the planner takes another kernel, and says so once."""

from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest

from ksgen.devices.base import CONTEXT_LOST
from ksgen.emit.render import render
from ksgen.errors import ConstantsError, DeviceError
from ksgen.families import cuda_limits, family_for
from ksgen.families.expected import LARGE
from ksgen.launch.plan import RefusedError
from ksgen.launch.planner import Planner, checks_first_results
from ksgen.passport import standing
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.driver import completed
from tests.support.fake_gpu import FakeGpu

KERNEL = KernelSpec(Pattern(3, 136, 104, 1), "tf32x3")  # by wgmma in clusters of two blocks


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


def test_refused_clusters_give_way_to_the_same_kernel_without(
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


def test_refused_tensor_maps_give_way_to_mma(part: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "encode_map", refuse)
    plan = planner.plan(part, KERNEL, LARGE)
    assert (plan.choice.family, plan.choice.why) == ("mma", "the device refuses wgmma")


def test_a_lost_context_is_no_refusal(part: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> Any:
        raise DeviceError(f"CUDA, describing: it fell off the bus{CONTEXT_LOST}")

    monkeypatch.setattr(part, "encode_map", lose)
    with pytest.raises(DeviceError, match="it fell off the bus") as told:
        planner.plan(part, KERNEL, LARGE)
    assert not isinstance(told.value, RefusedError)


def test_no_proof_is_started_while_a_graph_is_recorded(
    gpu: FakeGpu, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr(standing, "begin", begun.append)

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
    kernel = KernelSpec(Pattern(3, 136, 104, 1), "tf32x3")
    plan = PLANNER.plan(find_device(), kernel, 25088)
    print(plan.choice.family, getattr(plan.choice.constants, "cluster_batch", None))
    """
    assert printed(script, runtime)[0] == ["wgmma 2"]
    assert printed(script, runtime, KSGEN_DRIVER_CLUSTER="1")[0] == ["wgmma 1"]
    assert printed(script, runtime, KSGEN_DRIVER_FAULTS="cuTensorMapEncodeTiled:801")[0] == ["mma None"]
    # a driver that cannot answer changes nothing
    assert printed(script, runtime, KSGEN_DRIVER_FAULTS="cuOccupancyMaxActiveClusters:801")[0] == ["wgmma 2"]
