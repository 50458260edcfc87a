"""The gradient of a launcher's weights, from the arrays of a caller: its memory, its launches, on the caller's stream.

Never knows how it is computed, and records no gradients of its own: `ksgen.torch` does.
"""

from typing import Any

from ksgen.devices.base import Stream, uploaded
from ksgen.devices.capture import refuse_capture
from ksgen.launch.arrays import ArrayView, stream_handle, view
from ksgen.launch.checks import check_memory
from ksgen.launch.fits import Fits
from ksgen.launch.memory import host_array, is_whole, new_array
from ksgen.launch.plan import Plan
from ksgen.launch.streams import check_context, where_to_work
from ksgen.launch.views import views_of
from ksgen.launch.workspace import new_workspace


def weight_gradient(caller: object, fits: Fits, x: Any, grad_y: Any, layout: str, out: Any, stream: Any, precision: str | None) -> Any:
    """An array (a, b, c, d) like x, or `out`. Host arrays return when it is done; others in stream order."""
    arrays = {"x": x, "grad_y": grad_y} | ({} if out is None else {"out": out})
    views = views_of(arrays, stream)
    fit = fits.find(caller, layout, "none", views, precision)
    check_memory(caller, views)
    device, on, views = where_to_work(caller, fit.place, arrays, views, stream)
    check_context(caller, device, views)
    plan = fits.plan(fit, device, on)
    return _on_host(plan, views, out, on) if fit.place == "host" else _on_device(plan, views, out, on)


def _on_device(plan: Plan, views: dict[str, ArrayView], out: Any, stream: Stream) -> Any:
    device, x = plan.device, views["x"]
    handle = None if device.kind == "opencl" else stream_handle(stream)
    if out is None:
        if x.kind != "torch":  # which keeps memory for graphs
            refuse_capture(device, stream, "allocates its output", "give out=")
        out = new_array(x, plan.kernel.pattern.shape, handle)
    pointers = (x.pointer, views["grad_y"].pointer, view(out, "out").pointer)
    sums = new_workspace(plan, x, stream, "give PyTorch's tensors")
    plan.launch((*pointers, *(sums.pointers or (None,)), plan.batch), stream)
    return out


def _on_host(plan: Plan, views: dict[str, ArrayView], out: Any, stream: Stream) -> Any:
    device = plan.device
    refuse_capture(device, stream, "copies arrays from the host", "give arrays that lie on the device")
    if out is None:
        out = new_array(views["x"], plan.kernel.pattern.shape)
        views["out"] = view(out, "out")
    result = host_array(views["out"])
    if device.shares_host and all(is_whole(found) for found in views.values()):
        shared = (device.shared(views[name].pointer) for name in ("x", "grad_y", "out"))
        plan.launch((*shared, *(plan.workspace(stream) or (None,)), plan.batch), stream)
        device.synchronize(stream)
        return out

    x, grad_y = (uploaded(device, host_array(views[name]), stream) for name in ("x", "grad_y"))
    grad = device.allocate(result.nbytes)
    plan.launch((x, grad_y, grad, *(plan.workspace(stream) or (None,)), plan.batch), stream)
    device.download(result, grad, stream)
    return out
