"""One kernel on one device, checked against the float64 reference and timed by the device's own clock."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
GPU_ROTATED, CPU_ROTATED = 256, 8  # most sets of arrays that timed runs take in turn
MOST_REFERENCE_FLOPS = 2e10  # beyond, a sample of the batch is compared


@dataclass(frozen=True)
class Problem:
    """Random arrays of one kernel and batch: weights uniform in +-1/sqrt(c), the others standard normal."""

    kernel: KernelSpec
    batch: int
    x: "Array"
    weights: "Array"
    bias: "Array | None"
    residual: "Array | None"
    most_compared: int | None = None  # batch entries; None: as many as the reference does in about a second

    @property
    def y_shape(self) -> tuple[int, int]:
        outputs = self.kernel.pattern.out_features
        return (self.batch, outputs) if self.kernel.layout == "bsf" else (outputs, self.batch)

    @cached_property
    def sampled(self) -> Any:
        """The batch entries that are compared: all, or both ends, where tiles are ragged, and a spread in between."""
        within = self.most_compared or max(64, int(MOST_REFERENCE_FLOPS / self.kernel.flops(1)))
        if within >= self.batch:
            return slice(None)
        spread = np.linspace(0, self.batch - 1, within - 32).astype(int)
        return np.unique(np.concatenate([np.arange(16), np.arange(self.batch - 16, self.batch), spread]))

    def sample(self, array: "Array") -> "Array":
        return array[self.sampled] if self.kernel.layout == "bsf" else array[:, self.sampled]

    @cached_property
    def truth(self) -> "Array":
        """What Y is, in float64, at the sampled batch entries."""
        return reference.multiply(
            self.kernel.pattern, self.sample(self.x), self.weights, self.kernel.layout,
            bias=self.bias, activation=self.kernel.epilogue.activation,
            residual=None if self.residual is None else self.sample(self.residual),
        )  # fmt: skip


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


def tolerance(precision: str, c: int) -> float:
    """What rounding can do: one rounding of 16-bit outputs or tf32 operands, the accumulated roundings of c terms otherwise."""
    if precision in ("float16", "bfloat16", "tf32"):
        return UNIT_ROUNDOFF[precision]
    return UNIT_ROUNDOFF[precision] * max(4.0, 2 * sqrt(c))


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
    )


class Bench:
    """One problem's arrays on one device, for any number of plans of it."""

    def __init__(self, device: Device, problem: Problem) -> None:
        self.device, self.problem = device, problem
        self._poison = np.full(problem.y_shape, np.nan, np.float32).astype(problem.x.dtype)
        self._inputs = [each for each in (problem.x, self._poison, problem.bias, problem.residual) if each is not None]
        self._weights = _uploaded(device, problem.weights)
        self._sets = [self._new_set()]

    def _new_set(self) -> list[Buffer]:
        return [_uploaded(self.device, array) for array in self._inputs]

    def _rotated(self) -> list[list[Buffer]]:
        """More sets of arrays than a cache holds."""
        is_cpu = self.device.limits.is_cpu
        cache_bytes, most = (CPU_CACHE_BYTES, CPU_ROTATED) if is_cpu else (GPU_CACHE_BYTES, GPU_ROTATED)
        wanted = min(1 + cache_bytes // sum(array.nbytes for array in self._inputs), most)
        while len(self._sets) < wanted:
            self._sets.append(self._new_set())
        return self._sets

    def pack(self, plan: Plan) -> Buffer:
        return plan.pack(self._weights, None)

    def check(self, plan: Plan, packed: Buffer) -> tuple[float, int]:
        """The relative error of one launch on a poisoned output, and how many batch entries were compared."""
        arrays = self._sets[0]
        self.device.upload(arrays[1], self._poison)
        self._launch(plan, packed, arrays)
        y = np.empty_like(self._poison)
        self.device.download(y, arrays[1])
        return compare(self.problem, y)

    def launches(self, plan: Plan, packed: Buffer) -> Callable[[], None]:
        """A launch over the next set of arrays at each call, to be timed."""
        rotated = cycle(self._rotated())
        return lambda: self._launch(plan, packed, next(rotated))

    def _launch(self, plan: Plan, packed: Buffer, arrays: list[Buffer]) -> None:
        x, y, *extras = arrays
        plan.launch((x, packed, y, *extras, self.problem.batch), None)


def time_launches(device: Device, launches: Callable[[], None], runs: int, warmup: int = 2) -> list[float]:
    """Seconds of each run; `DeviceError` where the device's clock cannot be believed."""
    seconds = device.time(launches, None, runs=runs, warmup=warmup)
    if not all(second > 0 for second in seconds):
        raise DeviceError(f"{device.name}: its clock reported {min(seconds)} s for a run; update its driver")
    return seconds


def measure(device: Device, kernel: KernelSpec, batch: int, runs: int = 10, seed: int = 0) -> Measured:
    """Build if need be, run once on a poisoned output, compare, then time over arrays that a cache cannot hold."""
    problem = make_problem(kernel, batch, seed)
    plan = PLANNER.plan(device, kernel, batch)
    bench = Bench(device, problem)
    packed = bench.pack(plan)
    error, checked = bench.check(plan, packed)
    seconds = time_launches(device, bench.launches(plan, packed), runs) if runs else []
    return Measured(plan, error, tolerance(kernel.precision, kernel.pattern.c), checked, tuple(seconds))


def _uploaded(device: Device, array: "Array") -> Buffer:
    buffer = device.allocate(array.nbytes)
    device.upload(buffer, array)
    return buffer


def compare(problem: Problem, y: "Array") -> tuple[float, int]:
    """The relative error of an output, and how many batch entries were compared; NaN where any entry is not finite."""
    if not np.isfinite(y).all():
        return float("nan"), problem.batch
    difference = problem.sample(y).astype(np.float64) - problem.truth
    scale = float(np.linalg.norm(problem.truth)) or 1.0
    everything = isinstance(problem.sampled, slice)
    return float(np.linalg.norm(difference)) / scale, problem.batch if everything else len(problem.sampled)


def numpy_way(problem: Problem) -> tuple[float, "Array"]:
    """Seconds, and Y, of what one writes in NumPy: permute, batched matrix product, permute back. 16-bit goes through float32."""
    a, b, c, d = problem.kernel.pattern.shape
    batch = problem.batch
    small = PRECISIONS[problem.kernel.precision].item_bytes == 2
    stacked = np.ascontiguousarray(problem.weights.transpose(0, 3, 1, 2).reshape(a * d, b, c))
    stacked = stacked.astype(np.float32) if small else stacked
    begin = perf_counter()
    x = problem.x.astype(np.float32) if small else problem.x
    if problem.kernel.layout == "bsf":
        columns = x.reshape(batch, a, c, d).transpose(1, 3, 2, 0).reshape(a * d, c, batch)
        y = np.matmul(stacked, columns).reshape(a, d, b, batch).transpose(3, 0, 2, 1).reshape(problem.y_shape)
    else:
        columns = x.reshape(a, c, d, batch).transpose(0, 2, 1, 3).reshape(a * d, c, batch)
        y = np.matmul(stacked, columns).reshape(a, d, b, batch).transpose(0, 2, 1, 3).reshape(problem.y_shape)
    y = y.astype(problem.x.dtype, copy=False)
    return perf_counter() - begin, y
