"""What the arguments of a call say: whether the arrays fit its pattern and each other, and which device and stream they name.

Everything is refused here, before anything is launched.
"""

import sys
from collections.abc import Mapping
from typing import Any

from ksgen.devices import device_for, find_device
from ksgen.devices.base import Device, Stream
from ksgen.devices.libcuda import is_in_primary_context
from ksgen.errors import DeviceError, LaunchError
from ksgen.families import operand_of
from ksgen.launch.arrays import ArrayView, Place, is_same_stream, stream_handle, view
from ksgen.launch.memory import size_of
from ksgen.launch.plan import Plan
from ksgen.launch.weights import refuse_capture
from ksgen.pattern import Pattern
from ksgen.spec import ACTIVATIONS, LAYOUTS, PRECISIONS
from ksgen.spec.kernel import is_word
from ksgen.values import excerpt

Views = Mapping[str, ArrayView]
OUT_OF_ORDER = 1  # OpenCL's CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE


def y_shape(pattern: Pattern, layout: str, batch: int) -> tuple[int, int]:
    return (batch, pattern.out_features) if layout == "bsf" else (pattern.out_features, batch)


def check_words(caller: object, layout: str, activation: str) -> None:
    if not is_word(layout, LAYOUTS):
        raise LaunchError(f"{caller!r}: layout {excerpt(layout)} is unknown; accepted: {', '.join(LAYOUTS)}")
    if not is_word(activation, ACTIVATIONS):
        raise LaunchError(f"{caller!r}: activation {excerpt(activation)} is unknown; accepted: {', '.join(ACTIVATIONS)}")


def check_precision(caller: object, precision: str | None, dtype: str) -> str:
    """The precision of a call: the arrays' own, or another one whose arrays are stored the same way."""
    accepted = [name for name, known in PRECISIONS.items() if known.dtype == dtype]
    if precision is None or is_word(precision, accepted):
        return precision or dtype
    raise LaunchError(f"{caller!r}: precision={excerpt(precision)} for arrays of {dtype}; accepted: {', '.join(accepted)}")


def check_range(caller: object, plan: Plan, given: Mapping[str, Any], result: Any) -> None:
    """Raise `LaunchError` where float16 products overflowed: an output of finite host arrays is not finite."""
    if plan.kernel.precision != "fp16x3":
        return
    import numpy as np

    is_split = operand_of(plan.kernel, plan.choice.constants) is not None
    if is_split and not np.isfinite(result).all() and all(np.isfinite(array).all() for array in given.values()):
        largest = ", ".join(f"{name} up to {np.abs(array).max():.3g}" for name, array in given.items() if name in ("x", "weights"))
        raise LaunchError(f"{caller!r}: fp16x3 takes |x| up to 65504 and |weights| up to 63.9; got {largest}; take tf32x3")


def check_arrays(caller: object, pattern: Pattern, layout: str, views: Views, job: str = "multiply") -> int:
    """Raise `LaunchError` on the first array whose shape, precision or strides do not fit; the batch.

    `views` holds x, and any of weights, bias, residual, grad_y and out.
    """
    x = views["x"]
    batch_axis, feature_axis = (0, 1) if layout == "bsf" else (1, 0)
    if len(x.shape) != 2 or x.shape[feature_axis] != pattern.in_features or x.shape[batch_axis] < 1:
        wanted = f"(batch, {pattern.in_features})" if layout == "bsf" else f"({pattern.in_features}, batch)"
        raise LaunchError(f"{caller!r}: got x of shape {tuple(x.shape)}; layout {layout} wants {wanted}, with a batch of at least 1")
    batch = int(x.shape[batch_axis])
    y = y_shape(pattern, layout, batch)
    shapes = {"x": tuple(x.shape), "weights": pattern.shape, "bias": (pattern.out_features,), "residual": y, "grad_y": y}
    shapes["out"] = pattern.shape if job == "gradient" else y
    for name, given in views.items():
        if tuple(given.shape) != shapes[name]:
            raise LaunchError(f"{caller!r}: got {name} of shape {tuple(given.shape)}; {shapes[name]} is needed")
        if given.dtype != x.dtype:
            raise LaunchError(f"{caller!r}: got {given.dtype} for {name} and {x.dtype} for x; give both in one precision")
        if not given.contiguous:
            raise LaunchError(f"{caller!r}: {name} is not row-major without gaps; give a contiguous copy of it")
    return batch


def check_memory(caller: object, views: Views) -> None:
    """Raise `LaunchError` on what arrays of fitting shapes may still have wrong: it is asked anew at every call."""
    _check_gradients(caller, views)
    item_bytes = PRECISIONS[views["x"].dtype].item_bytes
    for name, given in views.items():
        if given.device != "host" and isinstance(given.pointer, int) and given.pointer % item_bytes:
            raise LaunchError(f"{caller!r}: {name} starts inside a {given.dtype}, at {given.pointer:#x}; give a copy of it")
    if "out" in views:
        _check_out(caller, views)


def agreed_stream(caller: object, views: Views) -> Any:
    """The stream that the arrays work on, None where none of them tells; `LaunchError` where two differ."""
    first, agreed = "", None
    for name, given in views.items():
        if given.stream is None:
            continue
        if agreed is None:
            first, agreed = name, given.stream
        elif not is_same_stream(given.stream, agreed):
            streams = f"{first} works on stream {agreed} and {name} on {given.stream}"
            raise LaunchError(f"{caller!r}: {streams}; give stream=, on which the work of both is waited for")
    return agreed


def views_of(arrays: Mapping[str, Any], stream: Any) -> dict[str, ArrayView]:
    """The arrays, made ready for work on a CUDA stream by those that can do that."""
    handle = None if stream is None else stream_handle(stream)
    if not isinstance(handle, int):
        handle = None
    return {name: view(array, name, handle) for name, array in arrays.items()}


def where_to_work(
    caller: object, place: Place, arrays: Mapping[str, Any], views: dict[str, ArrayView], stream: Any
) -> tuple[Device, Stream, dict[str, ArrayView]]:
    """The device and stream of a call: the named one, else the one that the arrays work on; and the arrays, ready for it."""
    if stream is None and (agreed := agreed_stream(caller, views)):
        ready = views_of({name: arrays[name] for name, found in views.items() if found.kind == "dlpack"}, agreed)
        return *device_and_stream(caller, place, agreed), views | ready
    device, on = device_and_stream(caller, place, stream)
    if stream is not None:
        wait_for_producers(device, stream_handle(stream), views)
    return device, on, views


def device_and_stream(caller: object, place: Place, stream: Any) -> tuple[Device, Stream]:
    """The device of a place, and the stream as that device takes it. Host arrays follow a queue to its context."""
    handle = stream_handle(stream)
    if handle is not None and not isinstance(handle, int):
        if place == "host":
            place = ("opencl", handle.context)
        if place[0] == "cuda":
            raise LaunchError(f"{caller!r}: stream is a pyopencl CommandQueue, and x lies on a CUDA device; give a CUDA stream, or None")
        if handle.context != place[1]:
            raise LaunchError(f"{caller!r}: stream is a queue of another OpenCL context than x; give one of x's own")
    return stream_on(caller, device_for(place), stream)


def stream_on(caller: object, device: Device, stream: Any) -> tuple[Device, Stream]:
    """PyCUDA launches on streams that it made itself; another library's goes to the driver runtime, by its handle."""
    handle = stream_handle(stream)
    if device.kind == "opencl":
        if isinstance(handle, int):
            raise LaunchError(f"{caller!r}: stream {handle} is a CUDA stream, and {device.name} wants a pyopencl CommandQueue, or None")
        if handle is not None and handle.properties & OUT_OF_ORDER:
            raise LaunchError(f"{caller!r}: stream is an out-of-order queue, where packing may be overtaken; give an in-order queue")
        return device, handle
    if device.supports_foreign_streams:
        return device, handle
    if handle is None or is_same_stream(handle, 0):
        return device, None
    pycuda = sys.modules.get("pycuda.driver")
    if pycuda is not None and isinstance(stream, pycuda.Stream):
        return device, stream
    return _driver_runtime(device), handle


def wait_for_producers(device: Device, handle: Stream, views: Views) -> None:
    """Arrays that name the stream they are written on are waited for, where the caller names another one."""
    for found in views.values():
        if found.kind not in ("cuda", "pyopencl") or found.stream is None or is_same_stream(found.stream, handle):
            continue
        refuse_capture(device, handle, "waits for arrays of another stream")
        where = device if device.kind == "opencl" or device.supports_foreign_streams else _driver_runtime(device)
        where.synchronize(found.stream)


def check_context(caller: object, device: Device, views: Views) -> None:
    """Raise `LaunchError` on PyCUDA's arrays in a context of PyCUDA's own, where the driver runtime does not work."""
    for name, found in views.items():
        if found.kind == "pycuda" and device.runtime == "driver" and not is_in_primary_context(found.pointer, device.index):
            other = "the driver runtime works in the primary one; import pycuda.autoprimaryctx in the place of pycuda.autoinit"
            raise LaunchError(f"{caller!r}: {name} lies in a CUDA context of PyCUDA's own, and {other}")


def _driver_runtime(device: Device) -> Device:
    try:
        return find_device(f"driver:{device.index}")
    except DeviceError as error:
        raise LaunchError(f"PyCUDA cannot launch on a stream of another library, and the driver runtime is not there: {error}") from None


def check_weights(caller: object, pattern: Pattern, weights: ArrayView) -> None:
    if tuple(weights.shape) != pattern.shape:
        raise LaunchError(f"{caller!r}: got weights of shape {tuple(weights.shape)}; {pattern.shape} is needed")
    if not weights.contiguous:
        raise LaunchError(f"{caller!r}: weights is not row-major without gaps; give a contiguous copy of it")


def _check_gradients(caller: object, views: Views) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, given in views.items():
        if given.kind == "torch" and given.owner.requires_grad:
            raise LaunchError(f"{caller!r}: {name} requires gradients, which launchers do not record; call under torch.no_grad()")


def _check_out(caller: object, views: Views) -> None:
    """`out` may be the residual itself; any other overlap would be read after it was written."""
    out = views["out"]
    if not out.writeable:
        raise LaunchError(f"{caller!r}: out is read-only; give an array that can be written to")
    for name, given in views.items():
        if name == "out" or (name == "residual" and given.pointer == out.pointer):
            continue
        if _overlap(given, out):
            raise LaunchError(f"{caller!r}: out shares memory with {name}; give memory of its own")


def _overlap(one: ArrayView, other: ArrayView) -> bool:
    if not isinstance(one.pointer, int) or not isinstance(other.pointer, int):
        return bool(one.pointer == other.pointer)
    return one.pointer < other.pointer + size_of(other) and other.pointer < one.pointer + size_of(one)
