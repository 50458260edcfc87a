"""One kernel on one device, checked against the float64 reference and timed by the device's own clock."""

from dataclasses import dataclass, replace
from itertools import cycle
from math import sqrt
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ksgen import reference
from ksgen.devices.base import Buffer, Device
from ksgen.errors import DeviceError
from ksgen.memory import numpy_dtype
from ksgen.plan import PLANNER, Plan
from ksgen.spec import PRECISIONS, KernelSpec

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32x3": 2.0**-24,
    "fp16x3": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
GPU_CACHE_BYTES, CPU_CACHE_BYTES = 256 * 2**20, 64 * 2**20  # more than a last-level cache holds
MOST_ROTATED = 8  # sets of arrays that timed runs take in turn
MOST_REFERENCE_FLOPS = 2e10  # beyond, a sample of the batch is compared


@dataclass(frozen=True)
class Problem:
    """Random arrays of one kernel and batch: weights uniform in +-1/sqrt(c), the others standard normal. A gradient's kernel has
    no use for the weights, and the others none for the gradient of Y."""

    kernel: KernelSpec
    batch: int
    x: "Array"
    weights: "Array"
    bias: "Array | None"
    residual: "Array | None"
    grad_y: "Array | None" = None

    @property
    def y_shape(self) -> tuple[int, int]:
        outputs = self.kernel.pattern.out_features
        return (self.batch, outputs) if self.kernel.layout == "bsf" else (outputs, self.batch)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.kernel.pattern.shape if self.kernel.job == "gradient" else self.y_shape

    @property
    def terms(self) -> int:
        """Products in one sum."""
        return self.batch if self.kernel.job == "gradient" else self.kernel.pattern.c


@dataclass(frozen=True)
class Measured:
    """What one check and timing found."""

    plan: Plan
    error: float  # Frobenius norm of the difference over that of the reference
    tolerance: float
    checked: int  # batch entries that were compared
    seconds: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    @property
    def median_s(self) -> float:
        return median(self.seconds)


def tolerance(precision: str, terms: int) -> float:
    """What rounding can do: one rounding of 16-bit outputs or tf32 operands, the accumulated roundings of the terms otherwise."""
    if precision in ("float16", "bfloat16", "tf32"):
        return UNIT_ROUNDOFF[precision]
    return UNIT_ROUNDOFF[precision] * max(4.0, 2 * sqrt(terms))


def make_problem(kernel: KernelSpec, batch: int, seed: int = 0) -> Problem:
    """Reproducible: the same arrays for the same kernel, batch and seed."""
    dtype = numpy_dtype(kernel.dtype)
    random = np.random.default_rng([seed, batch, *kernel.pattern.shape])
    pattern = kernel.pattern
    inputs, outputs = pattern.in_features, pattern.out_features

    def normal(*shape: int) -> "Array":
        drawn: Array = random.standard_normal(shape, np.float32).astype(dtype)
        return drawn

    first = kernel.layout == "bsf"
    bound = np.float32(1 / sqrt(pattern.c))
    weights = (random.random(pattern.shape, np.float32) * 2 * bound - bound).astype(dtype)
    y_shape = (batch, outputs) if first else (outputs, batch)
    return Problem(
        kernel,
        batch,
        normal(batch, inputs) if first else normal(inputs, batch),
        weights,
        normal(outputs) if kernel.epilogue.bias else None,
        normal(*y_shape) if kernel.epilogue.residual else None,
        normal(*y_shape) if kernel.job == "gradient" else None,
    )


def measure(device: Device, kernel: KernelSpec, batch: int, runs: int = 10, seed: int = 0) -> Measured:
    """Build if need be, run once on a poisoned output, compare, then time over arrays that a cache cannot hold."""
    problem = make_problem(kernel, batch, seed)
    plan = PLANNER.plan(device, kernel, batch)
    y = np.full(problem.result_shape, np.nan, np.float32).astype(problem.x.dtype)
    inputs = [array for array in (problem.x, problem.grad_y, y, problem.bias, problem.residual) if array is not None]
    is_gradient = kernel.job == "gradient"
    between = device.allocate(plan.left_bytes or 1) if is_gradient else plan.pack(_uploaded(device, problem.weights), None)

    def arguments() -> tuple[Any, ...]:
        uploaded = tuple(_uploaded(device, array) for array in inputs)
        return uploaded if is_gradient else (uploaded[0], between, *uploaded[1:], batch)

    def launch(given: tuple[Any, ...]) -> None:
        if is_gradient:
            plan.launch_gradient((given[0], given[1], given[2]), between, None)
        else:
            plan.launch(given, None)

    first = arguments()
    launch(first)
    device.download(y, first[2])
    error, checked = compare(problem, y)
    seconds: list[float] = []
    if runs:
        beyond_cache = (CPU_CACHE_BYTES if device.limits.is_cpu else GPU_CACHE_BYTES) // sum(array.nbytes for array in inputs)
        rotated = cycle([first, *(arguments() for _ in range(min(beyond_cache, MOST_ROTATED - 1)))])
        seconds = device.time(lambda: launch(next(rotated)), None, runs=runs, warmup=2)
        if not all(second > 0 for second in seconds):
            raise DeviceError(f"{device.name}: its clock reported {min(seconds)} s for a run; update its driver")
    return Measured(plan, error, tolerance(kernel.precision, problem.terms), checked, tuple(seconds))


def _uploaded(device: Device, array: "Array") -> Buffer:
    buffer = device.allocate(array.nbytes)
    device.upload(buffer, array)
    return buffer


def truth_of(problem: Problem) -> "Array":
    """What is right, in float64."""
    kernel = problem.kernel
    if problem.grad_y is not None:
        return reference.gradient(kernel.pattern, problem.x, problem.grad_y, kernel.layout)
    return reference.multiply(
        kernel.pattern, problem.x, problem.weights, kernel.layout,
        bias=problem.bias, activation=kernel.epilogue.activation, residual=problem.residual,
    )  # fmt: skip


def compare(problem: Problem, y: "Array") -> tuple[float, int]:
    """The relative error of a result, and how many batch entries were compared; NaN where any entry is not finite."""
    if not np.isfinite(y).all():
        return float("nan"), problem.batch
    sampled, found = (_sampled_blocks if problem.kernel.job == "gradient" else _sampled_entries)(problem, y)
    truth = truth_of(sampled)
    difference = found.astype(np.float64) - truth
    expected = sqrt(sampled.terms * truth.size) if problem.kernel.job == "gradient" else 0.0  # few sums may all cancel
    scale = max(float(np.linalg.norm(truth)), expected) or 1.0
    return float(np.linalg.norm(difference)) / scale, sampled.batch


def _sampled_entries(problem: Problem, y: "Array") -> tuple[Problem, "Array"]:
    """Fewer batch entries of a large product, and their outputs."""
    batch = problem.batch
    within = max(64, int(MOST_REFERENCE_FLOPS / problem.kernel.flops(1)))
    if within >= batch:
        return problem, y
    # Both ends, where tiles are ragged, and a spread in between.
    chosen = np.unique(np.concatenate([np.arange(16), np.arange(batch - 16, batch), np.linspace(0, batch - 1, within - 32).astype(int)]))

    def sample(array: "Array") -> "Array":
        return array[chosen] if problem.kernel.layout == "bsf" else array[:, chosen]

    residual = None if problem.residual is None else sample(problem.residual)
    return replace(problem, batch=len(chosen), x=sample(problem.x), residual=residual), sample(y)


def _sampled_blocks(problem: Problem, grad: "Array") -> tuple[Problem, "Array"]:
    """Fewer j of a large gradient, and theirs: every batch entry counts for each."""
    kernel, batch = problem.kernel, problem.batch
    a, b, c, d = kernel.pattern.shape
    within = max(1, int(MOST_REFERENCE_FLOPS / kernel.flops(batch) * d))
    if within >= d or problem.grad_y is None:
        return problem, grad
    chosen = np.linspace(0, d - 1, within).astype(int)

    def sample(array: "Array", rows: int) -> "Array":
        if kernel.layout == "bsf":
            return array.reshape(batch, a, rows, d)[..., chosen].reshape(batch, -1)
        return array.reshape(a, rows, d, batch)[:, :, chosen].reshape(-1, batch)

    smaller = replace(kernel, pattern=replace(kernel.pattern, d=len(chosen)))
    return replace(problem, kernel=smaller, x=sample(problem.x, c), grad_y=sample(problem.grad_y, b)), grad[..., chosen]


def numpy_way(problem: Problem) -> tuple[float, "Array"]:
    """Seconds, and the result, of what one writes in NumPy: permute, batched matrix product, permute back. 16-bit goes through
    float32."""
    a, b, c, d = problem.kernel.pattern.shape
    batch = problem.batch
    small = PRECISIONS[problem.kernel.precision].item_bytes == 2

    def columns_of(array: "Array", rows: int) -> "Array":
        """(a * d, rows, batch)"""
        wide = array.astype(np.float32) if small else array
        if problem.kernel.layout == "bsf":
            return wide.reshape(batch, a, rows, d).transpose(1, 3, 2, 0).reshape(a * d, rows, batch)
        return wide.reshape(a, rows, d, batch).transpose(0, 2, 1, 3).reshape(a * d, rows, batch)

    if problem.grad_y is not None:
        begin = perf_counter()
        grad = np.matmul(columns_of(problem.grad_y, b), columns_of(problem.x, c).transpose(0, 2, 1))
        grad = grad.reshape(a, d, b, c).transpose(0, 2, 3, 1).astype(problem.x.dtype, order="C")
        return perf_counter() - begin, grad
    stacked = np.ascontiguousarray(problem.weights.transpose(0, 3, 1, 2).reshape(a * d, b, c))
    stacked = stacked.astype(np.float32) if small else stacked
    begin = perf_counter()
    y = np.matmul(stacked, columns_of(problem.x, c)).reshape(a, d, b, batch)
    y = y.transpose(3, 0, 2, 1) if problem.kernel.layout == "bsf" else y.transpose(0, 2, 1, 3)
    y = y.reshape(problem.y_shape)
    y = y.astype(problem.x.dtype, copy=False)
    return perf_counter() - begin, y
