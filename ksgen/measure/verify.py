"""One kernel on one device, checked against the float64 reference and timed by the device's own clock."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from math import sqrt
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ksgen import reference
from ksgen.devices.base import Buffer, Device, uploaded
from ksgen.errors import DeviceError
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.plan import PLANNER, Plan, choice_by_name, limits_of
from ksgen.spec import PRECISIONS, KernelSpec

if TYPE_CHECKING:
    from ksgen.launcher import Call

    Array = np.ndarray[Any, Any]

CACHE_BYTES = 256 * 2**20  # more than a last-level cache holds
GPU_ROTATED, CPU_ROTATED = 256, 8  # most sets of arrays that timed runs take in turn
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
    most_compared: int | None = None  # batch entries; None: as many as the reference does in about a second

    @property
    def y_shape(self) -> tuple[int, int]:
        outputs = self.kernel.pattern.out_features
        return (self.batch, outputs) if self.kernel.layout == "bsf" else (outputs, self.batch)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.kernel.pattern.shape if self.grad_y is not None else self.y_shape

    @property
    def terms(self) -> int:
        """Products in one sum."""
        return self.batch if self.grad_y is not None else self.kernel.pattern.c

    @cached_property
    def chosen(self) -> Any:
        """Which batch entries are compared, or which j of a gradient, where every batch entry counts: all, or some of many."""
        kernel = self.kernel
        if self.grad_y is not None:
            d = kernel.pattern.d
            within = max(1, int(MOST_REFERENCE_FLOPS / kernel.flops(self.batch) * d))
            return slice(None) if within >= d else np.linspace(0, d - 1, within).astype(int)
        within = self.most_compared or max(64, int(MOST_REFERENCE_FLOPS / kernel.flops(1)))
        if within >= self.batch:
            return slice(None)
        # Both ends, where tiles are ragged, and a spread in between.
        spread = np.linspace(0, self.batch - 1, within - 32).astype(int)
        return np.unique(np.concatenate([np.arange(16), np.arange(self.batch - 16, self.batch), spread]))

    @property
    def checked(self) -> int:
        """How many batch entries are compared."""
        return self.batch if self.grad_y is not None or isinstance(self.chosen, slice) else len(self.chosen)

    def compared(self, result: "Array") -> "Array":
        """The part of a result that is compared."""
        return result[..., self.chosen] if self.grad_y is not None else self._entries(result)

    @cached_property
    def truth(self) -> "Array":
        """What that part is, in float64."""
        kernel, pattern = self.kernel, self.kernel.pattern
        if self.grad_y is not None:
            fewer = replace(pattern, d=len(np.arange(pattern.d)[self.chosen]))
            return reference.gradient(fewer, self._planes(self.x, pattern.c), self._planes(self.grad_y, pattern.b), kernel.layout)
        residual = None if self.residual is None else self._entries(self.residual)
        return reference.multiply(
            pattern, self._entries(self.x), self.weights, kernel.layout,
            bias=self.bias, activation=kernel.epilogue.activation, residual=residual,
        )  # fmt: skip

    def _entries(self, array: "Array") -> "Array":
        """The chosen batch entries of X, Y or the residual."""
        return array[self.chosen] if self.kernel.layout == "bsf" else array[:, self.chosen]

    def _planes(self, array: "Array", rows: int) -> "Array":
        """The chosen j of X or of Y's gradient."""
        a, d = self.kernel.pattern.a, self.kernel.pattern.d
        if self.kernel.layout == "bsf":
            return array.reshape(self.batch, a, rows, d)[..., self.chosen].reshape(self.batch, -1)
        return array.reshape(a, rows, d, self.batch)[:, :, self.chosen].reshape(-1, self.batch)


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
    known = PRECISIONS[precision]
    return known.unit_roundoff if known.rounds_once else known.unit_roundoff * max(4.0, 2 * sqrt(terms))


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


class Bench:
    """One problem's arrays on one device, for any number of plans of it, which share one workspace: it may be as large as X and
    Y together, and their launches are in order."""

    def __init__(self, device: Device, problem: Problem) -> None:
        self.device, self.problem = device, problem
        self._poison = np.full(problem.result_shape, np.nan, np.float32).astype(problem.x.dtype)
        given = (problem.x, problem.grad_y, self._poison, problem.bias, problem.residual)
        self._inputs = [array for array in given if array is not None]
        self._result = 1 if problem.grad_y is None else 2  # its place in a set of arrays
        self._weights = uploaded(device, problem.weights) if problem.grad_y is None else None
        self._sets = [self._new_set()]
        self._workspace: tuple[Buffer, ...] = ()
        self._workspace_bytes = 0

    def _new_set(self) -> list[Buffer]:
        return [uploaded(self.device, array) for array in self._inputs]

    def _rotated(self) -> list[list[Buffer]]:
        """More sets of arrays than a cache holds."""
        most = CPU_ROTATED if self.device.limits.is_cpu else GPU_ROTATED
        wanted = min(1 + CACHE_BYTES // sum(array.nbytes for array in self._inputs), most)
        while len(self._sets) < wanted:
            self._sets.append(self._new_set())
        return self._sets

    def pack(self, plan: Plan) -> Buffer:
        """The weights as a plan reads them; None for a gradient's."""
        return None if self._weights is None else plan.pack(self._weights, None)

    def check(self, plan: Plan, packed: Buffer) -> tuple[float, int]:
        """The relative error of one launch on a poisoned output and workspace, and how many batch entries were compared."""
        arrays = self._sets[0]
        self.device.upload(arrays[self._result], self._poison)
        for workspace in self._workspace_of(plan):  # where another plan may have left what is right
            self.device.upload(workspace, np.full(plan.workspace_bytes, 0xFF, np.uint8))
        self._launch(plan, packed, arrays)
        result = np.empty_like(self._poison)
        self.device.download(result, arrays[self._result])
        return compare(self.problem, result)

    def launches(self, plan: Plan, packed: Buffer) -> Callable[[], None]:
        """A launch over the next set of arrays at each call, to be timed."""
        rotated = cycle(self._rotated())
        return lambda: self._launch(plan, packed, next(rotated))

    def _launch(self, plan: Plan, packed: Buffer, arrays: list[Buffer]) -> None:
        workspace = self._workspace_of(plan)
        if self.problem.grad_y is not None:
            plan.launch((*arrays, *(workspace or (None,)), self.problem.batch), None)
        else:
            x, y, *extras = arrays
            plan.launch((x, packed, y, *workspace, *extras, self.problem.batch), None)

    def _workspace_of(self, plan: Plan) -> tuple[Buffer, ...]:
        """The shared one, if the plan takes any. It is asked for at each launch: a larger plan may have replaced it."""
        if plan.workspace_bytes > self._workspace_bytes:
            self._workspace, self._workspace_bytes = (), 0  # freed before there are two, which waits for launches that work in it
            self._workspace, self._workspace_bytes = plan.workspace(), plan.workspace_bytes
        return self._workspace if plan.workspace_bytes else ()


def time_launches(device: Device, launches: Callable[[], None], runs: int, warmup: int = 2) -> list[float]:
    """Seconds of each run; `DeviceError` where the device's clock cannot be believed."""
    seconds = device.time(launches, None, runs=runs, warmup=warmup)
    if not all(second > 0 for second in seconds):
        raise DeviceError(f"{device.name}: its clock reported {min(seconds)} s for a run; update its driver")
    return seconds


def measure(device: Device, kernel: KernelSpec, batch: int, runs: int = 10, seed: int = 0, family: str | None = None) -> Measured:
    """Build if need be, run once on a poisoned output, compare, then time over arrays that a cache cannot hold.

    `family` is one asked for by name; without it, what launchers take.
    """
    problem = make_problem(kernel, batch, seed)
    choice = choice_by_name(family, kernel, batch, limits_of(device)) if family else PLANNER.choice(device, kernel, batch)
    plan = PLANNER.plan_of(device, kernel, batch, choice)
    bench = Bench(device, problem)
    packed = bench.pack(plan)
    error, checked = bench.check(plan, packed)
    seconds = time_launches(device, bench.launches(plan, packed), runs) if runs else []
    return Measured(plan, error, tolerance(kernel.precision, problem.terms), checked, tuple(seconds))


def host_call(device: Device, problem: Problem) -> "Call":
    """The product as a user has it on NumPy arrays: prepared, with packed weights and an output that is there already."""
    from ksgen.launcher import Launcher

    own, kernel = Launcher(*problem.kernel.pattern.shape), problem.kernel
    packed = own.pack(problem.weights, device=f"{device.runtime}:{device.index}")
    return own.prepare(
        problem.x, packed, layout=kernel.layout, bias=problem.bias, activation=kernel.epilogue.activation,
        residual=problem.residual, precision=kernel.precision, out=np.zeros_like(problem.x, shape=problem.y_shape),
    )  # fmt: skip


def compare(problem: Problem, result: "Array") -> tuple[float, int]:
    """The relative error of a result, and how many batch entries were compared; NaN where any number is not finite."""
    if not np.isfinite(result).all():
        return float("nan"), problem.batch
    difference = problem.compared(result).astype(np.float64) - problem.truth
    expected = sqrt(problem.terms * problem.truth.size) if problem.grad_y is not None else 0.0  # few sums may all cancel
    scale = max(float(np.linalg.norm(problem.truth)), expected) or 1.0
    return float(np.linalg.norm(difference)) / scale, problem.checked


def numpy_way(problem: Problem) -> tuple[float, "Array"]:
    """Seconds, and the result, of what one writes in NumPy: permute, batched matrix product, permute back. 16-bit goes through
    float32."""
    a, b, c, d = problem.kernel.pattern.shape
    batch = problem.batch
    small = problem.kernel.item_bytes == 2

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
