"""The check itself: that it passes what is right, fails what is wrong anywhere, and times against an honest floor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.devices import Found, find_device, list_devices
from ksgen.families.vector.family import Vector
from ksgen.launch.choice import Choice, choice_by_name, limits_of
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.plan import Plan
from ksgen.launch.planner import Planner
from ksgen.measure import verify
from ksgen.measure.roofline import measure_ceilings
from ksgen.measure.verify import (
    Bench,
    compare,
    exact_problem,
    fault_of,
    host_call,
    make_problem,
    measure,
    numpy_product,
    tolerance,
)
from ksgen.pattern import Pattern
from ksgen.spec import JOBS, LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from tests.emulator import is_installed
from tests.support.fake_gpu import FakeGpu

HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
KERNEL = KernelSpec(Pattern(2, 9, 5, 3), epilogue=Epilogue(True, "relu", True))


def truth(problem: verify.Problem) -> np.ndarray:
    epilogue = problem.kernel.epilogue
    return reference.multiply(
        problem.kernel.pattern, problem.x, problem.weights, problem.kernel.layout,
        bias=problem.bias, activation=epilogue.activation, residual=problem.residual,
    )  # fmt: skip


def test_problems_are_reproducible_and_as_the_protocol_says() -> None:
    one, again, other = make_problem(KERNEL, 500), make_problem(KERNEL, 500), make_problem(KERNEL, 500, seed=1)
    np.testing.assert_array_equal(one.x, again.x)
    assert (one.x != other.x).any()
    assert np.abs(one.weights).max() <= 1 / np.sqrt(5)
    assert abs(one.x.std() - 1) < 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compare_accepts_the_truth_and_finds_one_wrong_entry(layout: str) -> None:
    problem = make_problem(KernelSpec(Pattern(2, 9, 5, 3), layout=layout), 100)
    y = truth(problem).astype(np.float32)
    error, checked = compare(problem, y)
    assert error < 1e-7
    assert checked == 100
    y[3, 4] += 0.1
    assert compare(problem, y)[0] > tolerance("float32", 5)


def test_a_sample_holds_both_ends_and_any_gap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MOST_REFERENCE_FLOPS", 1)
    problem = make_problem(KernelSpec(Pattern(2, 9, 5, 3)), 1000)
    y = truth(problem).astype(np.float32)
    error, checked = compare(problem, y)
    assert error < 1e-7
    assert 60 <= checked <= 64
    for entry in (0, 999):
        wrong = y.copy()
        wrong[entry] = 0
        assert compare(problem, wrong)[0] > 0.01
    y[517, 3] = np.nan  # not in the sample
    assert np.isnan(compare(problem, y)[0])


def test_a_problem_can_be_compared_in_fewer_entries() -> None:
    problem = replace(make_problem(KERNEL, 1000), most_compared=128)
    y = truth(make_problem(KERNEL, 1000)).astype(np.float32)
    assert compare(problem, y)[0] < 1e-7
    assert 124 <= compare(problem, y)[1] <= 128
    y[-1] = 0
    assert compare(problem, y)[0] > 0.01
    assert compare(replace(problem, most_compared=1000), y)[1] == 1000


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_numpys_product_is_right(precision: str, layout: str, job: str) -> None:
    problem = make_problem(KernelSpec(Pattern(2, 9, 5, 3), precision, layout, job=job), 33)
    seconds, y = numpy_product(problem)
    assert seconds > 0
    assert y.flags.c_contiguous
    assert compare(problem, y)[0] <= tolerance(precision, 5)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    return FakeGpu()


PERMUTED = KernelSpec(Pattern(1, 16, 8, 2), "float16")
GRADIENT = KernelSpec(Pattern(1, 9, 5, 2), job="gradient")


def plan_in_parts(gpu: Any, parts: int, batch: int) -> Plan:
    """Plan a gradient that is summed in that many parts of the batch."""
    default = choice_by_name("gradient", GRADIENT, batch, limits_of(gpu))
    return Planner().plan_of(
        gpu, GRADIENT, batch, Choice("gradient", replace(default.constants, parts=parts), "a test")
    )


def test_what_launches_leave_to_each_other_is_poisoned_before_a_check(gpu: Any) -> None:
    """No candidate passes because of values that an earlier one left there."""
    permuted = Planner().plan_of(gpu, PERMUTED, 40, choice_by_name("wgmma_permuted", PERMUTED, 40, limits_of(gpu)))
    for right in (permuted, plan_in_parts(gpu, 2, 1000)):
        bench = Bench(gpu, make_problem(right.kernel, right.batch))
        assert bench.check(right, bench.pack(right))[0] <= tolerance(right.kernel.precision, bench.problem.terms)
        for missing in right.steps[:-1]:
            wrong = replace(right, steps=tuple(each for each in right.steps if each is not missing))
            assert np.isnan(bench.check(wrong, bench.pack(wrong))[0])


def test_plans_of_one_problem_share_the_largest_workspace(gpu: Any) -> None:
    _, small, large, again = plans = [plan_in_parts(gpu, parts, 1000) for parts in (1, 2, 4, 2)]
    assert [each.workspace_bytes // small.workspace_bytes for each in plans] == [0, 1, 2, 1]
    bench = Bench(gpu, make_problem(GRADIENT, 1000))
    launch = bench.launches(small, bench.pack(small))
    before = len(gpu._memory)
    for plan in plans:
        assert bench.check(plan, bench.pack(plan))[0] <= tolerance("float32", 1000)
        assert len(gpu._memory) - before == (1 if plan.workspace_bytes else 0)
    y = bench._sets[0]["grad"]
    gpu.upload(y, bench._poison["grad"])
    launch()  # made ready before there was memory for the large one
    result = np.empty_like(bench._poison["grad"])
    gpu.download(result, y)
    assert compare(bench.problem, result)[0] <= tolerance("float32", 1000)
    assert again.workspace_bytes < large.workspace_bytes == gpu._memory[bench._workspace.pointer].nbytes


@needs_opencl
@pytest.mark.parametrize(("layout", "precision"), [("bsf", "float32"), ("bsl", "tf32")])
def test_a_call_on_the_hosts_arrays_is_the_problems_own(layout: str, precision: str) -> None:
    problem = make_problem(replace(KERNEL, layout=layout, precision=precision), 70)
    result = host_call(find_device("opencl"), problem)()
    assert compare(problem, result)[0] <= tolerance("float32", problem.terms)


@needs_opencl
def test_measuring_a_kernel_and_a_device() -> None:
    device = find_device("opencl")
    measured = measure(device, KERNEL, 70, runs=3)
    assert measured.passed
    assert len(measured.seconds.values) >= 1
    assert measured.seconds.median > 0
    assert measure(device, KERNEL, 70, runs=0).seconds.values == ()
    for precision in ("float32", "float64", "tf32x3"):
        ceilings = measure_ceilings(device, precision)
        assert ceilings.products == 1  # there are no tensor cores, whose products would stand for one in threes
        assert 1e8 < ceilings.bytes_per_s < 1e14
        assert 1e8 < ceilings.flops_per_s < 1e16


def test_a_chains_problem_has_weights_of_every_factor() -> None:
    """The truth applies the factors sequentially. The tolerance is the sum of the factors' tolerances."""
    factors = (Pattern(2, 9, 5, 3), Pattern(1, 4, 18, 3))
    problem = make_problem(KernelSpec(factors), 70)
    between = reference.multiply(factors[0], problem.x, *problem.before, "bsf")
    np.testing.assert_array_equal(problem.truth, reference.multiply(factors[1], between, problem.weights, "bsf"))
    activated = make_problem(replace(problem.kernel, between="relu"), problem.batch)
    np.testing.assert_array_equal(
        activated.truth, reference.multiply(factors[1], np.maximum(between, 0), problem.weights, "bsf")
    )
    transposed = make_problem(
        replace(problem.kernel, out_layout="bsl", epilogue=Epilogue(residual=True)), problem.batch
    )
    assert transposed.residual is not None
    assert transposed.result_shape == transposed.residual.shape == (12, 70)
    between = reference.multiply(factors[0], transposed.x, *transposed.before, "bsf")
    plain = reference.multiply(factors[1], between, transposed.weights, "bsf")
    np.testing.assert_allclose(transposed.truth, plain.T + transposed.residual, rtol=1e-12)
    assert problem.tolerance == tolerance("float32", 5) + tolerance("float32", 18)


def test_a_groups_problem_is_one_for_each_chain_on_the_same_x() -> None:
    """Equal chains have weights of their own, so that none passes by another's; each output counts."""
    pair, alone = (Pattern(2, 9, 5, 3), Pattern(1, 4, 18, 3)), (Pattern(2, 4, 5, 3),)
    problem = make_problem(KernelSpec((pair, alone, pair), "float32", "bsf", Epilogue(True), between="relu"), 70)
    first, second, third = problem.each
    assert first.x is second.x is third.x
    assert [array.shape for array in problem.given] == [each.shape for each in (*pair, *alone, *pair)]
    assert (first.weights != third.weights).any()
    assert second.bias is not None
    np.testing.assert_array_equal(
        second.truth, reference.multiply(alone[0], problem.x, second.weights, "bsf", bias=second.bias)
    )
    results = [each.truth.astype(np.float32) for each in problem.each]
    assert compare(problem, *results) == (pytest.approx(0, abs=1e-7), 70)
    assert compare(problem.comparing(64), *results)[1] <= 64
    results[1][3, 4] += 1
    assert compare(problem, *results)[0] > problem.tolerance
    results[2][0, 0] = np.nan
    assert np.isnan(compare(problem, *results)[0])


@needs_opencl
def test_a_kernel_of_slices_is_measured_on_slices() -> None:
    device = find_device("opencl")
    bench = Bench(device, make_problem(replace(KERNEL, stride="any"), 40))
    assert {name: array.shape for name, array in bench._arrays.items() if name != "bias"} == {
        "x": (40, 30 + verify.GAP), "y": (40, 54 + verify.GAP), "residual": (40, 54 + verify.GAP)
    }  # fmt: skip
    assert measure(device, replace(KERNEL, stride="any"), 40, runs=1).passed


CHAIN_OF_TWO = (Pattern(2, 8, 24, 1), Pattern(1, 24, 8, 2))
EXACT = [
    KernelSpec(Pattern(2, 9, 5, 3), "bfloat16", "bsf", Epilogue(True, "relu", True)),
    KernelSpec(Pattern(2, 9, 5, 3), "complex64", "bsl"),
    KernelSpec(Pattern(2, 9, 5, 3), "float16", job="gradient"),
    KernelSpec((CHAIN_OF_TWO, CHAIN_OF_TWO), "float16"),
]


@pytest.mark.parametrize("kernel", EXACT, ids=str)
def test_one_wrong_bit_of_an_exact_sum_is_a_fault(kernel: KernelSpec) -> None:
    problem = exact_problem(kernel, 12)
    assert problem.is_exact
    right = [each.truth.astype(numpy_dtype(kernel.dtype)) for each in problem.each]
    for result in right:
        assert (result.real.astype(np.float64) % 1 == 0).all()
    assert fault_of(problem, *right) == ""
    bits = right[-1].reshape(-1)[-1:].view(np.uint8)
    bits[0] ^= 1  # the last bit of a mantissa
    assert fault_of(problem, *right) == "sums of small integers are not exact at batch 12"
    right[-1][...] = np.nan
    assert fault_of(problem, *right).startswith("relative error nan at batch 12, at most ")


def test_weights_of_tied_kernels_are_equal_along_their_ties() -> None:
    """Ties are those of all chains of a group, and of one chain alone."""
    tied: dict[Any, tuple[str, ...]] = {CHAIN_OF_TWO: ("a", "d"), (CHAIN_OF_TWO, CHAIN_OF_TWO): ("a", "d", "", "d")}
    slices = [(1, 8, 24, 1), (1, 24, 8, 1), (2, 8, 24, 1), (1, 24, 8, 1)]
    for chains, ties in tied.items():
        kernel = KernelSpec(chains, tied=ties)
        for problem in (make_problem(kernel, 12), exact_problem(kernel, 12)):
            whole = [weights for each in problem.each for weights in (*each.before, each.weights)]
            assert [each.shape for each in problem.given] == slices[: len(ties)]
            for weights, given in zip(whole, problem.given, strict=True):
                np.testing.assert_array_equal(weights, np.broadcast_to(given, weights.shape))


@needs_opencl
@pytest.mark.parametrize("reads_ties", [True, False])
def test_tied_weights_are_measured_as_their_kernel_reads_them(
    reads_ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "PLANNER", Planner())
    monkeypatch.setattr(Vector, "reads_ties", lambda *_: reads_ties)
    measured = measure(find_device("opencl"), replace(KERNEL, tied=("ad",)), 70, runs=0)
    assert measured.passed
    assert measured.plan.kernel.tie == ("ad" if reads_ties else "")


def test_kernels_that_round_more_than_once_are_compared_by_their_error() -> None:
    for kernel in (
        KernelSpec(Pattern(2, 9, 5, 3), "float16", epilogue=Epilogue(activation="gelu")),
        KernelSpec(Pattern(2, 9, 16, 3), "float16", weights="e4m3"),
    ):
        problem = exact_problem(kernel, 12)
        assert not problem.is_exact
        y = problem.truth.astype(np.float16)
        y[0, 0] = np.nextafter(y[0, 0], np.float16(9))
        assert fault_of(problem, y) == ""
        assert fault_of(problem, y * np.float16(1.5)).startswith("relative error ")
