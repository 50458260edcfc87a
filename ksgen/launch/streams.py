"""Device and stream of a call: the stream that the caller gives, else the stream of the arrays."""

import sys
from collections.abc import Mapping
from typing import Any

from ksgen.devices import device_for, find_device
from ksgen.devices.base import Device, Stream, refuse_capture
from ksgen.devices.libcuda import context_of
from ksgen.errors import DeviceError, LaunchError
from ksgen.launch.arrays import ArrayView, Place, Views, is_same_stream, stream_handle, views_of
from ksgen.launch.memory import STREAM_ORDERED, torch_stream

OUT_OF_ORDER = 1  # OpenCL's CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE
WAITED = {"cuda", "pyopencl"}  # kinds of arrays for whose own streams a call on another stream waits


def where_to_work(
    caller: object,
    place: Place,
    arrays: Mapping[str, Any],
    views: dict[str, ArrayView],
    stream: Any,
    packed_on: Device | None = None,
) -> tuple[Device, Stream, dict[str, ArrayView]]:
    """Device and stream of a call, and its arrays. Work on the arrays precedes later work on the stream.

    The stream is the given one, else that of the arrays. A call on host arrays runs on the device of its packed
    weights, if there are any.
    """
    if place == "host" and stream is None:
        return packed_on or device_for(place), None, views
    if place == "host" and packed_on and packed_on.kind == "cuda":
        return *stream_on(caller, packed_on, stream), views
    if stream is None and (agreed := agreed_stream(caller, views)):
        ready = views_of({name: arrays[name] for name, found in views.items() if found.kind == "dlpack"}, agreed)
        views = views | ready
        device, launch_stream = device_and_stream(caller, place, agreed)
    else:
        device, launch_stream = device_and_stream(caller, place, stream)
        if stream is not None:
            wait_for_producers(device, stream_handle(stream), views)
            keep_for_stream(stream_handle(stream), views)
    return in_their_context(caller, device, launch_stream, views), launch_stream, views


def agreed_stream(caller: object, views: Views) -> Any:
    """Stream that the arrays work on, None if none of them reports it; `LaunchError` if two differ."""
    first, agreed = "", None
    for name, given in views.items():
        if given.stream is None:
            continue
        if agreed is None:
            first, agreed = name, given.stream
        elif not is_same_stream(given.stream, agreed):
            streams = f"{first} works on stream {agreed} and {name} on {given.stream}"
            remedy = "let one wait for the other, and give it as stream="
            if {views[first].kind, given.kind} <= WAITED:
                remedy = "give stream=, which waits for the work of both"
            raise LaunchError(f"{caller!r}: {streams}; {remedy}")
    return agreed


def device_and_stream(caller: object, place: Place, stream: Any) -> tuple[Device, Stream]:
    """Device of a place, and the stream in that device's form.

    For host arrays, a pyopencl queue also decides the device, by its context.
    """
    if stream is None:
        return device_for(place), None
    handle = stream_handle(stream)
    if not isinstance(handle, int):
        if place == "host":
            place = ("opencl", handle.context)
        if place[0] == "cuda":
            raise LaunchError(
                f"{caller!r}: stream is a pyopencl CommandQueue, and x lies on a CUDA device; give a CUDA stream, or "
                "None"
            )
        if handle.context != place[1]:
            raise LaunchError(f"{caller!r}: stream is a queue of another OpenCL context than x; give one of x's own")
    return stream_on(caller, device_for(place), stream)


def stream_on(caller: object, device: Device, stream: Any) -> tuple[Device, Stream]:
    """Device and stream for a launch.

    PyCUDA launches only on its own streams. For a stream of another library, the driver runtime takes its handle.
    """
    handle = stream_handle(stream)
    if device.kind == "native":
        if handle is not None:
            raise LaunchError(f"{caller!r}: {device.name} has no streams: a call returns when it is done; omit stream=")
        return device, None
    if device.kind == "opencl":
        if isinstance(handle, int):
            raise LaunchError(
                f"{caller!r}: stream {handle} is a CUDA stream, and {device.name} wants a pyopencl CommandQueue, or "
                "None"
            )
        if handle is not None and handle.properties & OUT_OF_ORDER:
            raise LaunchError(
                f"{caller!r}: stream is an out-of-order queue, where packing may be overtaken; give an in-order queue"
            )
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
    """Wait for arrays that report another stream than the caller's."""
    for found in views.values():
        if found.kind not in WAITED or found.stream is None or is_same_stream(found.stream, handle):
            continue
        refuse_capture(device, handle, "waits for arrays of another stream")
        where = device if device.kind == "opencl" or device.supports_foreign_streams else _driver_runtime(device)
        where.synchronize(found.stream)


def keep_for_stream(handle: Stream, views: Views) -> None:
    """Report to PyTorch that another stream uses the memory of its tensors.

    PyTorch otherwise reuses freed memory in the order of its own stream.
    """
    for found in views.values():
        if found.kind == "torch" and found.device != "host" and not is_same_stream(found.stream, handle):
            found.owner.record_stream(torch_stream(handle, found.device[1]))


def in_their_context(caller: object, device: Device, stream: Stream, views: Views) -> Device:
    """Device whose CUDA context holds the arrays.

    PyCUDA adopts its user's context. Other libraries use the primary one, in which the driver runtime works.
    `LaunchError` if neither works.
    """
    device_context = device.context
    for found in views.values():
        if device_context and found.device != "host" and context_of(found.pointer) != device_context:
            break
    else:
        return device
    contexts = {name: context_of(found.pointer) for name, found in views.items() if found.device != "host"}
    for name, held in contexts.items():
        # PyTorch and CuPy cache freed memory, and their arrays may lie in host memory
        if held is None and views[name].kind not in STREAM_ORDERED:
            address = f"{views[name].pointer:#x}"
            raise LaunchError(
                f"{caller!r}: {name} lies at {address}, which is not memory of CUDA and may have been freed; give an "
                "array with memory"
            )
    apart = {name: held for name, held in contexts.items() if held}
    if set(apart.values()) <= {device_context}:
        return device
    name = next(name for name, held in apart.items() if held != device_context)
    if device.runtime == "pycuda" and device_context not in apart.values() and stream is None:
        primary = _driver_runtime(device, f"{caller!r}: {name} lies in another CUDA context than PyCUDA's")
        if set(apart.values()) == {primary.context}:
            return primary
    whose = "PyCUDA" if views[name].kind == "pycuda" else "its library"
    where = f"a CUDA context of {whose}'s own, and the driver runtime works in the primary one"
    if device.runtime == "pycuda":
        where = "another CUDA context than the one that PyCUDA had current when ksgen first used the GPU"
    raise LaunchError(
        f"{caller!r}: {name} lies in {where}; import pycuda.autoprimaryctx in the place of pycuda.autoinit"
    )


def _driver_runtime(device: Device, why: str = "PyCUDA cannot launch on a stream of another library") -> Device:
    try:
        return find_device(f"driver:{device.index}")
    except DeviceError as error:
        raise LaunchError(f"{why}, and the driver runtime is not there: {error}") from None
