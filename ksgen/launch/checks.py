"""Checks that the arrays and options of a call fit its pattern and each other. Everything is refused before a launch.

`ArgumentChecks` caches the result for each combination of shapes, precisions and devices. Never reads devices or streams.
"""

import sys
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from weakref import ReferenceType

from ksgen.devices.base import Device
from ksgen.errors import LaunchError
from ksgen.families import MAP_ALIGNMENT
from ksgen.launch.arrays import FORM, ArrayView, CallOptions, Place, Views, common_device
from ksgen.launch.memory import rows_are_whole, size_of
from ksgen.launch.plan import Plan
from ksgen.pattern import Chain, Pattern
from ksgen.spec import ACTIVATIONS, LAYOUTS, PRECISIONS, STORAGES, Epilogue, KernelSpec
from ksgen.spec.kernel import is_word
from ksgen.spec.precision import stored_types
from ksgen.spec.storage import BYTE_TYPES, SAME, element_bytes
from ksgen.values import cached_property, excerpt

MOST_CHECKED = 4096  # cached results of checks: one per batch size, and cheap to repeat


def y_shape(pattern: Pattern, layout: str, batch: int) -> tuple[int, int]:
    return (batch, pattern.out_features) if layout == "bsf" else (pattern.out_features, batch)


def result_shape(pattern: Pattern, layout: str, batch: int, job: str) -> tuple[int, ...]:
    """Shape of the array that a call returns."""
    return pattern.shape if job == "gradient" else y_shape(pattern, layout, batch)


def group_shape(chains: Sequence[Chain], layout: str, batch: int) -> tuple[int, int]:
    """Shape of one array that holds the outputs of all chains."""
    features = sum(chain.out_features for chain in chains)
    return (batch, features) if layout == "bsf" else (features, batch)


def check_words(caller: object, layout: str, activation: str, name: str = "layout") -> None:
    if not is_word(layout, LAYOUTS):
        raise LaunchError(f"{caller!r}: {name} {excerpt(layout)} is unknown; accepted: {', '.join(LAYOUTS)}")
    if not is_word(activation, ACTIVATIONS):
        raise LaunchError(f"{caller!r}: activation {excerpt(activation)} is unknown; accepted: {', '.join(ACTIVATIONS)}")


def check_precision(caller: object, precision: str | None, dtype: str) -> str:
    """Precision of a call: that of the arrays, or another one whose arrays have the same storage type."""
    accepted = [name for name, known in PRECISIONS.items() if known.dtype == dtype]
    if precision is None or is_word(precision, accepted):
        return precision or dtype
    raise LaunchError(f"{caller!r}: precision={excerpt(precision)} for arrays of {dtype}; accepted: {', '.join(accepted)}")


def type_of_call(caller: object, views: Views, precision: str | None, inputs: str = SAME) -> str:
    """Dtype of the arrays of a call.

    If `inputs` says that x is in eight bits, the other arrays decide it, else float32.
    """
    x = views["x"].dtype
    if inputs == SAME:
        if x in BYTE_TYPES:
            made = "weights that ksgen.quantize made with x_scale, which take x in eight bits"
            raise LaunchError(f"{caller!r}: x is of {x}; give {', '.join(stored_types())}, or {made}")
        return x
    if x not in (accepted := STORAGES[inputs].dtypes):
        makes = f"ksgen.quantize_inputs(x, {inputs!r}, scale=the weights' x_scale).values"
        raise LaunchError(f"{caller!r}: got x of {x} for weights that multiply x in {inputs}; give {' or '.join(accepted)}: {makes}")
    given = next((views[name].dtype for name in ("out", "bias", "residual") if name in views), "float32")
    asked = PRECISIONS.get(precision) if isinstance(precision, str) else None
    return given if asked is None else asked.dtype


def check_arrays(
    caller: object, pattern: Pattern, layout: str, views: Views, job: str = "multiply", dtype: str | None = None
) -> int:  # fmt: skip
    """Return the batch size; `LaunchError` on the first array whose shape, precision or strides do not fit.

    `views` holds x, and any of weights, bias, residual, grad_y and out. `dtype` is that of all others, if x is in eight
    bits.
    """
    x = views["x"]
    batch_axis, feature_axis = (0, 1) if layout == "bsf" else (1, 0)
    if len(x.shape) != 2 or x.shape[feature_axis] != pattern.in_features or x.shape[batch_axis] < 1:
        wanted = f"(batch, {pattern.in_features})" if layout == "bsf" else f"({pattern.in_features}, batch)"
        raise LaunchError(f"{caller!r}: got x of shape {tuple(x.shape)}; layout {layout} wants {wanted}, with a batch of at least 1")
    batch = int(x.shape[batch_axis])
    y = y_shape(pattern, layout, batch)
    shapes = {"x": tuple(x.shape), "weights": pattern.shape, "bias": (pattern.out_features,), "residual": y, "grad_y": y}
    shapes["out"] = result_shape(pattern, layout, batch, job)
    for name, given in views.items():
        if tuple(given.shape) != shapes[name]:
            raise LaunchError(f"{caller!r}: got {name} of shape {tuple(given.shape)}; {shapes[name]} is needed")
        if dtype is not None and name != "x" and given.dtype != dtype:
            raise LaunchError(f"{caller!r}: got {given.dtype} for {name} and y in {dtype}; give both in one precision")
        if dtype is None and given.dtype != x.dtype:
            raise LaunchError(f"{caller!r}: got {given.dtype} for {name} and {x.dtype} for x; give both in one precision")
        if given.strides is not None and not (job == "multiply" and name in ("x", "out", "residual") and rows_are_whole(given)):
            raise LaunchError(f"{caller!r}: {name} is not {_accepted(job, name)}; give a contiguous copy of it")
    return batch


def _accepted(job: str, name: str) -> str:
    """Accepted memory layout of an array."""
    slices = job == "multiply" and name in ("x", "out", "residual")
    return "row-major with gaps between its rows at most" if slices else "row-major without gaps"


def are_aligned(views: Views) -> bool:
    """Whether all arrays are aligned for tensor maps and wide loads.

    The output may be missing.
    """
    pointers = (views[name].pointer for name in ("x", "bias", "residual", "out") if name in views)
    return all(not isinstance(pointer, int) or pointer % MAP_ALIGNMENT == 0 for pointer in pointers)


def check_weights(caller: object, pattern: Pattern, weights: ArrayView) -> None:
    if tuple(weights.shape) != pattern.shape:
        raise LaunchError(f"{caller!r}: got weights of shape {tuple(weights.shape)}; {pattern.shape} is needed")
    if weights.strides is not None:
        raise LaunchError(f"{caller!r}: weights is not row-major without gaps; give a contiguous copy of it")


def check_memory(caller: object, views: Views) -> None:
    """Raise `LaunchError` on faults that arrays of fitting shapes may still have.

    Every call checks them again.
    """
    _check_gradients(caller, views)
    for name, given in views.items():
        if isinstance(given.pointer, int) and not given.pointer:  # arrays of fitting shapes are never empty
            raise LaunchError(f"{caller!r}: {name} is of shape {tuple(given.shape)} and lies at address 0; give an array with memory")
        if given.device != "host" and isinstance(given.pointer, int) and given.pointer % element_bytes(given.dtype):
            raise LaunchError(f"{caller!r}: {name} starts inside a {given.dtype}, at {given.pointer:#x}; give a copy of it")
    if "out" in views:
        _check_out(caller, views)


def _check_gradients(caller: object, views: Views) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, given in views.items():
        if given.kind == "torch" and given.owner.requires_grad:
            raise LaunchError(f"{caller!r}: {name} requires gradients, which launchers do not record; call under torch.no_grad()")


def _check_out(caller: object, views: Views) -> None:
    """Raise `LaunchError` if `out` is read-only or overlaps an operand.

    `out` may be the residual itself; any other overlap would be read after it was written.
    """
    out = views["out"]
    if not out.writeable:
        raise LaunchError(f"{caller!r}: out is read-only; give an array that can be written to")
    for name, given in views.items():
        if name == "out" or (name == "residual" and (given.pointer, given.strides) == (out.pointer, out.strides)):
            continue
        if _overlap(given, out):
            raise LaunchError(f"{caller!r}: out shares memory with {name}; give memory of its own")


def _overlap(one: ArrayView, other: ArrayView) -> bool:
    """Whether two arrays share memory.

    Adjacent column slices of one array interleave by rows, and do not.
    """
    if not isinstance(one.pointer, int) or not isinstance(other.pointer, int):
        return bool(one.pointer == other.pointer)
    first, second = (one, other) if one.pointer <= other.pointer else (other, one)
    if second.pointer >= first.pointer + size_of(first):
        return False
    if first.strides is None or second.strides is None or first.strides[0] != second.strides[0]:
        return True
    begin = (second.pointer - first.pointer) % first.strides[0]  # offset of the second's rows from the first's
    lengths = [each.shape[1] * element_bytes(each.dtype) for each in (first, second)]
    return bool(begin < lengths[0] or begin + lengths[1] > first.strides[0])


@dataclass(eq=False)
class CheckedArguments:
    """Arguments whose shapes, precisions and devices were checked, with their kernel and its plans."""

    batch: int
    place: Place
    kernel: KernelSpec
    # By device, the planner's generation and alignment. Only the planner keeps the plans alive.
    plans: dict[tuple[Device, int, bool], ReferenceType[Plan]] = field(default_factory=dict)

    @cached_property
    def of_copies(self) -> "CheckedArguments":
        """Arguments of copies on a device, where rows are contiguous."""
        return CheckedArguments(self.batch, self.place, replace(self.kernel, stride="dense")) if self.kernel.is_strided else self


class ArgumentChecks:
    """Validated argument signatures of one launcher and job."""

    def __init__(self, pattern: Pattern, batches: Collection[int | None], job: str = "multiply") -> None:
        self.pattern, self._batches, self._job = pattern, batches, job
        self._found: dict[Hashable, CheckedArguments] = {}

    def __len__(self) -> int:
        return len(self._found)

    def find(self, caller: object, options: CallOptions, views: Views, weights: str = SAME, inputs: str = SAME) -> CheckedArguments:
        """Checked arguments with these shapes, precisions, strides and devices; checked at the first call.

        `weights` is the storage of packed weights; `inputs` is that of the x that they multiply.
        """
        layout, activation, _, asked = options
        key = (layout, activation, asked, weights, inputs, *[(name, found[FORM]) for name, found in views.items()])
        try:
            return self._found[key]
        except (KeyError, TypeError):  # unhashable or new arguments are checked below
            check_words(caller, layout, activation)
            dtype = type_of_call(caller, views, asked, inputs)
            precision = check_precision(caller, asked, dtype)
        batch = check_arrays(caller, self.pattern, layout, views, self._job, None if inputs == SAME else dtype)
        place = common_device(views)
        kernel = self.kernel(precision, layout, Epilogue("bias" in views, activation, "residual" in views), batch, weights, inputs)
        if any(found.strides is not None for found in views.values()):
            kernel = replace(kernel, stride="any")
        if len(self._found) >= MOST_CHECKED:
            self._found.clear()
        fit = self._found[key] = CheckedArguments(batch, place, kernel)
        return fit

    def kernel(
        self, precision: str, layout: str, epilogue: Epilogue, batch: int, weights: str = SAME, inputs: str = SAME
    ) -> KernelSpec:  # fmt: skip
        own = batch if batch in self._batches else None
        return KernelSpec(self.pattern, precision, layout, epilogue, own, self._job, weights=weights, inputs=inputs)
