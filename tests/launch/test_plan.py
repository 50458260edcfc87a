"""What a launch takes: operands in the order of the kernel's signature, and no more blocks than there can be."""

from dataclasses import replace

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch.choice import choice_by_name, limits_of
from ksgen.launch.plan import Plan
from ksgen.launch.planner import Planner
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.launching import PATTERN


def test_a_batch_beyond_a_launch_is_refused(gpu: FakeGpu) -> None:
    class Huge(FakeArray):
        pass

    ks = Launcher(1, 1, 1, 1)
    x, y, weights = (Huge(gpu, np.zeros(shape, np.float32)) for shape in ((1, 1), (1, 1), (1, 1, 1, 1)))
    for array in (x, y):
        array.__cuda_array_interface__["shape"] = (2**40, 1)
    array = y
    array.__cuda_array_interface__["data"] = (x.content.ctypes.data + 2**45, False)
    with pytest.raises(
        LaunchError,
        match=r"ks_1x1x1x1_float32_bsf: a batch of 1099511627776 needs \d+ blocks; a launch has at most 2147483647",
    ):
        ks(x, weights, out=array)


@pytest.fixture
def plan(gpu: FakeGpu) -> Plan:
    kernel = KernelSpec(PATTERN, epilogue=Epilogue(True, "relu", True))
    return Planner().plan(gpu, kernel, 5)  # type: ignore[arg-type]


def test_operands_are_ordered_by_name_and_the_batch_comes_last(plan: Plan) -> None:
    given = {"residual": 5, "y": 3, "unpacked": 7, "bias": 4, "weights": 2, "x": 1, "workspace": None}
    assert plan.operands == ("x", "weights", "y", "bias", "residual")
    assert plan.arguments(given) == (1, 2, 3, 4, 5, plan.batch)
    assert plan.result == "y"


@pytest.mark.parametrize("missing", ["x", "weights", "y", "bias", "residual"])
def test_no_operand_may_be_missing(plan: Plan, missing: str) -> None:
    given = dict.fromkeys(plan.operands, 1)
    del given[missing]
    with pytest.raises(KeyError, match=missing):
        plan.arguments(given)


def test_a_plan_that_was_changed_orders_what_it_takes_itself(plan: Plan) -> None:
    given = {"x": 1, "weights": 2, "y": 3, "bias": 4, "residual": 5}
    assert plan.arguments(given) == (1, 2, 3, 4, 5, 5)
    assert replace(plan, operands=("y", "x"), at_launch=(7, 8), batch=9).arguments(given) == (3, 1, 7, 8, 9)


def test_maps_describe_operands_wherever_a_launch_has_them(gpu: FakeGpu) -> None:
    kernel = KernelSpec(Pattern(1, 16, 8, 2), "float16")
    choice = choice_by_name("wgmma_permuted", kernel, 40, limits_of(gpu))  # type: ignore[arg-type]
    plan = Planner().plan_of(gpu, kernel, 40, choice)  # type: ignore[arg-type]
    arrays = {name: gpu.allocate(4096) for name in ("x", "weights", "y")}
    workspace = plan.workspace()
    plan.launch(plan.arguments({**arrays, "workspace": workspace}), None)
    assert gpu.encoded == [int(workspace)] * len(plan.maps)
