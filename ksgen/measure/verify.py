"""Checks one kernel on one device against the float64 reference, and times it by the device's own clock.

A problem is the arrays of one kernel at one batch size. `footprint` estimates the memory of a check.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from math import sqrt
from time import perf_counter
from typing import Any, cast

import numpy as np

from ksgen import passport, reference
from ksgen.devices.base import Buffer, Device, RefusedError, uploaded
from ksgen.families import Limits, family_for
from ksgen.families.chains import layer_kernels
from ksgen.families.signature import each_chains, features_of, layout_of, pitches_of, result_of, weights_of
from ksgen.launch.choice import choice_by_name, limits_of
from ksgen.launch.fused import packings
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.plan import Arguments, Plan
from ksgen.launch.planner import PLANNER
from ksgen.launcher import Call, Launcher
from ksgen.measure.queued import time_launches
from ksgen.measure.trust import BLOCK_SECONDS, Blocks, Timer, block_of, take_blocks
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized, QuantizedInputs, quantize, quantize_inputs
from ksgen.reference import ELEMENTS_AT_ONCE
from ksgen.spec import PRECISIONS, Activation, KernelSpec, Layout
from ksgen.spec.kernel import SLICES
from ksgen.values import cached_property

CACHE_BYTES = 256 * 2**20  # more than a last-level cache holds
GPU_ROTATED, CPU_ROTATED = 256, 8  # largest number of sets of arrays among which timed runs alternate
GAP = 16  # elements between the rows of slices
MOST_EXACT_IN = 64  # largest c of a factor whose intermediates, sums of small integers, are exact in every precision
MOST_REFERENCE_FLOPS = 2e10  # operations above which only a sample of the batch is compared


Array = np.ndarray[Any, Any]
Packed = dict[str, Buffer]  # packed weights, by operand of the launch


@dataclass(frozen=True)
class Problem:
    """Random arrays for one kernel and batch size. Weights are uniform in +-1/sqrt(c), other arrays standard normal.

    Kernels of gradients do not use the weights; other kernels do not use the gradient of Y. In a chain, `weights` are
    those of the last factor.
    """

    kernel: KernelSpec
    batch: int
    x: Array
    weights: Array
    bias: Array | None
    residual: Array | None
    grad_y: Array | None = None
    most_compared: int | None = None  # most rows that are compared; None: those computed in about a second
    before: tuple[Array, ...] = ()  # weights of all factors but the last, in the order in which they multiply X
    quantized: tuple[Quantized, ...] = ()  # exact quantized form of all weights, if they are quantized
    # problems of a group's other chains on the same X; this problem is that of the first chain
    others: "tuple[Problem, ...]" = ()
    is_exact: bool = False  # whether correct results equal the reference exactly, rounded once to their type
    inputs: QuantizedInputs | None = None  # exact quantized form of x, if it is stored in eight bits

    @property
    def each(self) -> "tuple[Problem, ...]":
        """Problems of all chains; a group has several."""
        return self, *self.others

    @property
    def given(self) -> tuple[Array, ...]:
        """Weights of each factor in the form that is copied to a device: quantized, and one slice of tied ones."""
        of_chain = tuple(each.whole for each in self.quantized) or (*self.before, self.weights)
        if self.kernel.tied:
            of_chain = tuple(map(slice_of, of_chain, self.kernel.tied))
        return of_chain + tuple(array for other in self.others for array in other.given)

    def comparing(self, most: int) -> "Problem":
        """This problem, with at most `most` rows of the batch compared."""
        return replace(self, most_compared=most, others=tuple(other.comparing(most) for other in self.others))

    @property
    def given_x(self) -> Array:
        """X in the form that is copied to a device: quantized if it is stored in eight bits."""
        return self.x if self.inputs is None else self.inputs.values.view(np.uint8)

    @property
    def y_shape(self) -> tuple[int, int]:
        outputs = self.kernel.pattern.out_features
        return (self.batch, outputs) if self.kernel.y_layout == "bsf" else (outputs, self.batch)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.kernel.pattern.shape if self.grad_y is not None else self.y_shape

    @property
    def terms(self) -> int:
        """Number of products that one sum adds."""
        return self.batch if self.grad_y is not None else self.kernel.pattern.c

    @property
    def tolerance(self) -> float:
        """Largest relative error that rounding explains, summed over the factors. A group has its worst chain's."""
        precision = self.kernel.precision
        of_chain = tolerance(precision, self.terms) + sum(
            tolerance(precision, pattern.c) for pattern in self.kernel.factors.factors[:-1]
        )
        return max(of_chain, *(other.tolerance for other in self.others)) if self.others else of_chain

    @cached_property
    def chosen(self) -> Any:
        """Index of the rows of the batch that are compared: all, or a sample.

        A gradient is summed over the batch, so it is compared for all values of j or for a sample of them. The index is
        then that of the values of j.
        """
        kernel = self.kernel
        if self.grad_y is not None:
            d = kernel.pattern.d
            within = max(1, int(MOST_REFERENCE_FLOPS / kernel.flops(self.batch) * d))
            return slice(None) if within >= d else np.linspace(0, d - 1, within).astype(int)
        within = self.most_compared or max(64, int(MOST_REFERENCE_FLOPS / kernel.flops(1)))
        if within >= self.batch:
            return slice(None)
        # the first and the last rows, at which tiles are ragged, and evenly spaced rows between them
        spread = np.linspace(0, self.batch - 1, within - 32).astype(int)
        return np.unique(np.concatenate([np.arange(16), np.arange(self.batch - 16, self.batch), spread]))

    @property
    def checked(self) -> int:
        """Number of rows of the batch that are compared."""
        return self.batch if self.grad_y is not None or isinstance(self.chosen, slice) else len(self.chosen)

    def compared(self, result: Array) -> Array:
        """Part of a result that is compared."""
        return result[..., self.chosen] if self.grad_y is not None else self._rows(result, self.kernel.y_layout)

    @cached_property
    def truth(self) -> Array:
        """Reference values of the compared part, in float64."""
        kernel, pattern = self.kernel, self.kernel.pattern
        layout, y_layout = cast("Layout", kernel.layout), cast("Layout", kernel.y_layout)
        activation, between = cast("Activation", kernel.epilogue.activation), cast("Activation", kernel.between)
        if self.grad_y is not None:
            fewer = replace(pattern, d=len(np.arange(pattern.d)[self.chosen]))
            return reference.gradient(
                fewer, self._planes(self.x, pattern.c), self._planes(self.grad_y, pattern.b), layout
            )
        residual = None if self.residual is None else self._rows(self.residual, y_layout)
        x = self._rows(self.x, layout)
        for factor, weights in zip(kernel.factors.factors[:-1], self.before, strict=True):
            x = reference.multiply(factor, x, weights, layout, activation=between)
        return reference.multiply(
            pattern, x.T if kernel.out_layout else x, self.weights, y_layout,
            bias=self.bias, activation=activation, residual=residual,
            residual_first=kernel.epilogue.residual_first,
        )  # fmt: skip

    def _rows(self, array: Array, layout: str) -> Array:
        """Chosen rows of the batch of X, Y or the residual."""
        return array[self.chosen] if layout == "bsf" else array[:, self.chosen]

    def _planes(self, array: Array, rows: int) -> Array:
        """X or the gradient of Y at the chosen values of j."""
        a, d = self.kernel.pattern.a, self.kernel.pattern.d
        if self.kernel.layout == "bsf":
            return array.reshape(self.batch, a, rows, d)[..., self.chosen].reshape(self.batch, -1)
        return array.reshape(a, rows, d, self.batch)[:, :, self.chosen].reshape(-1, self.batch)


@dataclass(frozen=True)
class Measured:
    """Result of one check, and of the timing."""

    plan: Plan
    error: float  # Frobenius norm of the difference over that of the reference
    tolerance: float
    checked: int  # rows of the batch that were compared
    seconds: Blocks  # empty if nothing was timed

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def tolerance(precision: str, terms: int) -> float:
    """Largest relative error that rounding explains: one rounding (16-bit outputs, tf32), else several.

    Rounding errors of a sum grow like a random walk. So 2 sqrt(terms) roundings are allowed, and at least 4. A complex
    term counts twice.
    """
    known = PRECISIONS[precision]
    roundings = 1.0 if known.rounds_once else max(4.0, 2 * sqrt(known.reals_per_number * terms))
    return known.unit_roundoff * roundings


def make_problem(kernel: KernelSpec, batch: int, seed: int = 0) -> Problem:
    """Draw the random arrays of a problem. Equal kernels, batch sizes and seeds give equal arrays.

    Equal chains of a group have different weights.
    """
    first = _made(kernel, batch, seed, None)
    if not kernel.is_group:
        return first
    others = enumerate(layer_kernels(kernel)[1:], 1)
    return replace(first, others=tuple(_made(each, batch, seed + number, first.x) for number, each in others))


def exact_problem(kernel: KernelSpec, batch: int) -> Problem:
    """Problem of small integers, whose sums are exact in every precision and in any order, until the result is rounded.

    Kernels whose x or weights are stored in another type get a random problem of another seed. `is_exact` is False for
    these, for activations that round, and for chains whose intermediates may be rounded.
    """
    if not (is_exact := _has_exact_sums(kernel)) and (kernel.is_quantized or kernel.has_bytes_in):
        return make_problem(kernel, batch, seed=1)
    random, whole = np.random.default_rng(batch), make_problem(kernel, batch)

    def integers(like: Any, most: int = 2) -> Any:
        if like is None:
            return None
        drawn = random.integers(-most, most + 1, (2, *like.shape))
        return (drawn[0] + 1j * drawn[1] if like.dtype.kind == "c" else drawn[0]).astype(like.dtype)

    x = integers(whole.x)

    def redrawn(problem: Problem) -> Problem:
        drawn = tuple(integers(weights, 1) for weights in (*problem.before, problem.weights))
        *before, weights = _repeated(drawn, problem.kernel)
        return replace(
            problem,
            x=x,
            weights=weights,
            before=tuple(before),
            bias=integers(problem.bias),
            residual=integers(problem.residual),
            grad_y=integers(problem.grad_y),
            others=(),
            is_exact=is_exact,
        )

    first, *others = map(redrawn, whole.each)
    return replace(first, others=tuple(others))


def _has_exact_sums(kernel: KernelSpec) -> bool:
    """Whether a kernel's sums of small integers are exact, and every precision holds its intermediates exactly."""
    activations = {kernel.epilogue.activation, kernel.between}
    is_narrow = all(pattern.c <= MOST_EXACT_IN for chain in kernel.chains for pattern in chain.factors[:-1])
    return activations <= {"none", "relu"} and is_narrow and not kernel.is_quantized and not kernel.has_bytes_in


def fault_of(problem: Problem, *results: Array) -> str:
    """Reason why results are wrong; empty if they are correct. If sums are exact, results must be equal to the bit."""
    error, _ = compare(problem, *results)
    if not error <= problem.tolerance:
        return f"relative error {error:.1e} at batch {problem.batch}, at most {problem.tolerance:.1e} is right"
    pairs = zip(problem.each, results, strict=True)
    if problem.is_exact and not all(
        np.array_equal(each.compared(result), each.truth.astype(result.dtype)) for each, result in pairs
    ):
        return f"sums of small integers are not exact at batch {problem.batch}"
    return ""


def _made(kernel: KernelSpec, batch: int, seed: int, x: Array | None) -> Problem:
    """Problem of one chain, on a new X unless one is given."""
    dtype = numpy_dtype(kernel.dtype)
    random = np.random.default_rng([seed, batch, *kernel.pattern.shape])
    *others, last = kernel.factors
    inputs, outputs = kernel.in_features, last.out_features

    def drawn(draw: Callable[..., Any], shape: tuple[int, ...]) -> Array:
        numbers = draw((*shape, PRECISIONS[kernel.precision].reals_per_number), np.float32)
        found: Array = (numbers[..., 0] if numbers.shape[-1] == 1 else numbers[..., 0] + 1j * numbers[..., 1]).astype(
            dtype
        )
        return found

    def uniform(pattern: Pattern) -> Array:
        bound = np.float32(1 / sqrt(pattern.c))
        return drawn(lambda shape, kind: random.random(shape, kind) * 2 * bound - bound, pattern.shape)

    def normal(*shape: int) -> Array:
        return drawn(random.standard_normal, shape)

    first = kernel.layout == "bsf"
    last_weights = uniform(last)
    weights: tuple[Array, ...] = (*map(uniform, others), last_weights)
    quantized: tuple[Quantized, ...] = ()
    given = None
    x = (normal(batch, inputs) if first else normal(inputs, batch)) if x is None else x
    if kernel.has_bytes_in:
        stored_x: Any = kernel.inputs
        given = quantize_inputs(x, stored_x)
        x = reference.dequantized(given.values, np.float32(given.scale))
    if kernel.is_quantized:
        x_scales = [None if given is None else given.scale, *[None] * len(others)]  # intermediates are stored as Y is
        storage: Any = kernel.weights
        quantized = tuple(
            quantize(each, storage, x_scale=x_scale) for each, x_scale in zip(weights, x_scales, strict=True)
        )
        weights = tuple(reference.dequantized(each.values, each.scale) for each in quantized)
    *before, weights_of_last = _repeated(weights, kernel)
    y_shape = (batch, outputs) if kernel.y_layout == "bsf" else (outputs, batch)
    return Problem(
        kernel,
        batch,
        x,
        weights_of_last,
        normal(outputs) if kernel.epilogue.bias else None,
        normal(*y_shape) if kernel.epilogue.residual else None,
        normal(*y_shape) if kernel.job == "gradient" else None,
        before=tuple(before),
        quantized=quantized,
        inputs=given,
    )


def _repeated(weights: tuple[Array, ...], kernel: KernelSpec) -> tuple[Array, ...]:
    """Weights of a chain's factors, repeated along the axes of their ties. For a group, these are the first chain's."""
    if not kernel.tied:
        return weights
    ties = zip(weights, kernel.tied[: len(weights)], strict=True)
    return tuple(np.broadcast_to(slice_of(each, tie), each.shape).copy() for each, tie in ties)


def slice_of(weights: Array, tie: str) -> Array:
    """Slice that tied weights repeat along the axes of the tie."""
    return np.ascontiguousarray(weights[SLICES[tie]])


def most_sets(is_cpu: bool) -> int:
    """Largest number of sets of X and Y among which timed runs alternate."""
    return CPU_ROTATED if is_cpu else GPU_ROTATED


class Bench:
    """One problem's arrays on one device, for any number of plans of its kernel.

    Plans share one workspace, which may be as large as X and Y together. They can, because launches run in order.
    """

    def __init__(self, device: Device, problem: Problem) -> None:
        self.device, self.problem = device, problem
        kernel = problem.kernel
        given = {"x": problem.given_x, "grad_y": problem.grad_y}
        for name in ("bias", "residual"):
            given |= dict(zip(each_chains(kernel, name), (getattr(each, name) for each in problem.each), strict=True))
        results = zip(each_chains(kernel, result_of(kernel)), problem.each, strict=True)
        dtype = numpy_dtype(kernel.dtype)
        self._poison = {name: np.full(each.result_shape, np.nan, np.float32).astype(dtype) for name, each in results}
        self._arrays = {name: array for name, array in given.items() if array is not None} | self._poison
        self._arrays |= {name: _spaced(self._arrays[name]) for name in pitches_of(kernel)}
        weights = problem.given if problem.grad_y is None else ()
        self._weights = [uploaded(device, array) for array in weights]
        self._sets = [self._new_set()]
        self._workspace: Buffer = None
        self._workspace_bytes = 0

    def _new_set(self) -> dict[str, Buffer]:
        return {name: uploaded(self.device, array) for name, array in self._arrays.items()}

    def _rotated(self) -> list[dict[str, Buffer]]:
        """Sets of arrays, so many that together they exceed every cache, but at most `most_sets`."""
        wanted = min(
            1 + CACHE_BYTES // sum(array.nbytes for array in self._arrays.values()),
            most_sets(self.device.limits.is_cpu),
        )
        while len(self._sets) < wanted:
            self._sets.append(self._new_set())
        return self._sets

    def pack(self, plan: Plan) -> Packed:
        """Pack the weights for a plan: one array per factor; none for a gradient."""
        each = packings(self.device, plan) if plan.kernel.is_chain else (plan,)
        pairs = zip(weights_of(plan.kernel), each, self._weights, strict=False)
        return {name: packing.pack(weights, None) for name, packing, weights in pairs}

    def check(self, plan: Plan, packed: Packed) -> tuple[float, int]:
        """Launch once, and return the relative error and the number of compared rows of the batch."""
        return compare(self.problem, *self.results(plan, packed))

    def results(self, plan: Plan, packed: Packed | None = None) -> list[Array]:
        """Launch once, with outputs and workspace full of NaN before, and download the results.

        Without packed weights, the launch immediately follows the packing, so that it must itself wait for the packing.
        """
        arrays = self._sets[0]
        for name in self._poison:
            self.device.upload(arrays[name], self._arrays[name])
        if (workspace := self._workspace_of(plan)) is not None:  # another plan may have left correct values there
            self.device.upload(workspace, np.full(plan.workspace_bytes, 0xFF, np.uint8))
        plan.launch(self._arguments(plan, self.pack(plan) if packed is None else packed, arrays), None)
        results = []
        for name, poison in self._poison.items():
            landing = np.empty_like(self._arrays[name])
            self.device.download(landing, arrays[name])
            results.append(landing[tuple(map(slice, poison.shape))])
        return results

    def launches(self, plan: Plan, packed: Packed) -> Callable[[], None]:
        """Function to time: each call launches on the next set of arrays."""
        if plan.workspace_bytes:
            rotated = cycle(self._rotated())
            return lambda: plan.launch(self._arguments(plan, packed, next(rotated)), None)
        ready = cycle([self._arguments(plan, packed, arrays) for arrays in self._rotated()])
        return lambda: plan.launch(next(ready), None)

    def timer(self, plan: Plan, packed: Packed, least_runs: int = 1, seconds: float = BLOCK_SECONDS) -> Timer:
        """Timer of blocks of launches; each block returns the median of seconds per launch."""
        passport.wait(self.device)
        launch = self.launches(plan, packed)
        return block_of(lambda runs: time_launches(self.device, launch, runs, warmup=0), least_runs, seconds)

    def _arguments(self, plan: Plan, packed: Packed, arrays: dict[str, Buffer]) -> Arguments:
        pitches = {pitch: self._arrays[array].shape[1] for array, pitch in pitches_of(plan.kernel).items()}
        return plan.arguments({**arrays, **packed, "workspace": self._workspace_of(plan), **pitches})

    def _workspace_of(self, plan: Plan) -> Buffer:
        """The shared workspace, or None if the plan needs none.

        Each launch asks for it, because a plan that needs a larger one may have replaced it.
        """
        if plan.workspace_bytes > self._workspace_bytes:
            # freed first, so that there are never two; this waits for launches that use it
            self._workspace, self._workspace_bytes = None, 0
            self._workspace, self._workspace_bytes = plan.workspace(), plan.workspace_bytes
        return self._workspace if plan.workspace_bytes else None


def _spaced(array: Array) -> Array:
    """Copy an array into a wider one, whose additional columns are NaN, for kernels of slices."""
    wide = np.full((array.shape[0], array.shape[1] + GAP), np.nan, np.float32).astype(array.dtype)
    wide[:, : array.shape[1]] = array
    return wide


def measure(
    device: Device, kernel: KernelSpec, batch: int, runs: int = 1, seed: int = 0, family: str | None = None
) -> Measured:
    """Build if needed, launch once and compare, then time launches that alternate between sets of arrays.

    The sets exceed the caches, unless this takes too many. `family` names the family to use; None: the one that
    launchers choose. `runs` is the least number of launches that are timed together; 0: nothing is timed.
    """
    if family:
        plan = PLANNER.plan_of(device, kernel, batch, choice_by_name(family, kernel, batch, limits_of(device)))
    else:
        plan = PLANNER.plan_or_fallback(device, kernel, batch, True, PLANNER.choice(device, kernel, batch))
    problem = make_problem(plan.kernel, batch, seed)  # the plan decides whether tied weights are read once
    bench = Bench(device, problem)
    packed = bench.pack(plan)
    try:
        error, checked = bench.check(plan, packed)
    except RefusedError as refused:
        if family or not plan.maps:
            raise
        PLANNER.refuse(plan, str(refused))
        return measure(device, kernel, batch, runs, seed)
    timers = [bench.timer(plan, packed, runs)] if runs else []
    (seconds,) = take_blocks(timers, device.limits.is_cpu) or (Blocks(()),)
    return Measured(plan, error, problem.tolerance, checked, seconds)


def host_call(device: Device, problem: Problem) -> Call:
    """Prepare the call by which a user multiplies NumPy arrays: with packed weights, and an output of its own."""
    kernel = problem.kernel
    stated: Any = {"layout": kernel.layout, "precision": kernel.precision, "activation": kernel.epilogue.activation}
    launcher = Launcher(kernel.pattern, residual_first=kernel.epilogue.residual_first, **stated)
    packed = launcher.pack(*problem.quantized or (problem.weights,), device=f"{device.runtime}:{device.index}")
    return launcher.prepare(problem.given_x, packed, bias=problem.bias, residual=problem.residual)


def compare(problem: Problem, *results: Array) -> tuple[float, int]:
    """Relative error of a result (NaN if any number is not finite), and the number of compared rows of the batch.

    A group has one result per chain. Its error is the largest one.
    """
    found = [_compared(each, result) for each, result in zip(problem.each, results, strict=True)]
    return max(found, key=lambda each: (each[0] != each[0], each[0]))


def _compared(problem: Problem, result: Array) -> tuple[float, int]:
    if not np.isfinite(result).all():
        return float("nan"), problem.batch
    difference = problem.compared(result).astype(reference.wide_type(result)) - problem.truth
    # a gradient may have few sums, whose terms may all cancel, so its norm alone is not a scale
    expected = sqrt(problem.terms * problem.truth.size) if problem.grad_y is not None else 0.0
    scale = max(float(np.linalg.norm(problem.truth)), expected) or 1.0
    return float(np.linalg.norm(difference)) / scale, problem.checked


def numpy_product(problem: Problem) -> tuple[float, Array]:
    """Seconds and result of NumPy: permute, batched product, permute back. 16-bit types are multiplied in float32."""
    pattern, batch = problem.kernel.pattern, problem.batch
    (a, b, c, d), is_bsf = pattern.shape, problem.kernel.layout == "bsf"
    small = problem.kernel.item_bytes == 2

    def other_layout(array: Array) -> Array:
        """Transpose an array of bsl to (batch, features), or back; return one of bsf unchanged."""
        return array if is_bsf else array.T

    x = other_layout(reference.natural(pattern.inputs, other_layout(problem.x)))

    def columns_of(array: Array, rows: int) -> Array:
        """(a * d, rows, batch)"""
        wide = array.astype(np.float32) if small else array
        if is_bsf:
            return wide.reshape(batch, a, rows, d).transpose(1, 3, 2, 0).reshape(a * d, rows, batch)
        return wide.reshape(a, rows, d, batch).transpose(0, 2, 1, 3).reshape(a * d, rows, batch)

    if problem.grad_y is not None:
        begin = perf_counter()
        grad = np.matmul(columns_of(problem.grad_y, b), columns_of(x.conj(), c).transpose(0, 2, 1))
        grad = grad.reshape(a, d, b, c).transpose(0, 2, 3, 1).astype(problem.x.dtype, order="C")
        return perf_counter() - begin, grad
    stacked = np.ascontiguousarray(problem.weights.transpose(0, 3, 1, 2).reshape(a * d, b, c))
    stacked = stacked.astype(np.float32) if small else stacked
    begin = perf_counter()
    y = np.matmul(stacked, columns_of(x, c)).reshape(a, d, b, batch)
    y = y.transpose(3, 0, 2, 1) if is_bsf else y.transpose(0, 2, 1, 3)
    y = other_layout(reference.exchanged(pattern.outputs, other_layout(y.reshape(problem.y_shape))))
    y = y.astype(numpy_dtype(problem.kernel.dtype), copy=False)
    return perf_counter() - begin, y


# ---- memory


@dataclass(frozen=True)
class Footprint:
    """Peak bytes of the host's memory: for arrays, for the float64 check, and for a device that is a processor."""

    arrays: int
    reference: int
    device: int

    @property
    def total(self) -> int:
        return self.arrays + self.reference + self.device


def footprint(kernel: KernelSpec, batch: int, limits: Limits) -> Footprint:
    """Estimate in advance the memory of checking one kernel at a batch size, with default constants for these limits.

    The arrays of this module and of `reference.py` are counted. Tests compare the estimate with traced memory.
    """
    item, features = kernel.item_bytes, kernel.out_features
    inputs, outputs = batch * kernel.in_features, batch * features
    weights = sum(chain.weight_count for chain in kernel.chains)
    is_gradient = kernel.job == "gradient"
    results = weights if is_gradient else outputs
    given = inputs + outputs * (kernel.epilogue.residual + is_gradient) + features * kernel.epilogue.bias
    compared_rows = batch if is_gradient else min(batch, max(64, int(MOST_REFERENCE_FLOPS / kernel.flops(1))))
    compared = weights if is_gradient else compared_rows * features
    widest = max(pattern.in_features + pattern.out_features for chain in kernel.chains for pattern in chain)
    part = min(compared_rows * widest, max(ELEMENTS_AT_ONCE, widest))
    # bytes per element; with an activation, erfc converts elements to Python's numbers
    of_part = 16 if kernel.epilogue.activation == "none" else 80
    of_compared = 28  # the truth, the result and their difference in float64, and the result in its own type
    of_rounding = 48 * weights * kernel.is_quantized  # float64 copies of weights that are rounded to eight bits
    of_inputs = 37 * inputs * kernel.has_bytes_in  # the same for x
    if kernel.is_strided:  # the rows of slices lie apart
        row_counts = {"bsf": batch, "bsl": 0}
        given += GAP * sum(
            row_counts[layout_of(kernel, array)] or count for array, count in features_of(kernel).items()
        )
    reference = of_rounding + max(8 * weights + 8 * compared + of_part * part, of_compared * compared, of_inputs)
    device = 0
    if limits.is_cpu:
        family = family_for(kernel, limits, batch)
        constants = family.default(kernel, limits, batch)
        # timing adds sets of arrays until they exceed a cache
        device = item * (given + results) + CACHE_BYTES
        device += 0 if is_gradient else item * weights
        device += family.geometry(kernel, constants, batch).workspace_bytes + (
            0 if is_gradient else family.packed_bytes(kernel, constants)
        )
    return Footprint(item * (given + weights + 2 * results), reference, device)
