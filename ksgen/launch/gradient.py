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
    sums = new_workspace(plan, x, stream, "give PyTorch's tensors")
    operands = {"x": x.pointer, "grad_y": views["grad_y"].pointer, plan.result: view(out, "out").pointer, "workspace": sums.pointer}
    plan.launch(plan.arguments(operands), stream)
    return out


def _on_host(plan: Plan, views: dict[str, ArrayView], out: Any, stream: Stream) -> Any:
    device = plan.device
    refuse_capture(device, stream, "copies arrays from the host", "give arrays that lie on the device")
    if out is None:
        out = new_array(views["x"], plan.kernel.pattern.shape)
        views["out"] = view(out, "out")
    result = host_array(views["out"])
    if device.shares_host and all(is_whole(found) for found in views.values()):
        operands = {name: device.shared(found.pointer) for name, found in views.items()}
        operands |= {plan.result: operands["out"], "workspace": plan.workspace(stream)}
        plan.launch(plan.arguments(operands), stream)
        device.synchronize(stream)
        return out

    operands = {name: uploaded(device, host_array(views[name]), stream) for name in ("x", "grad_y")}
    operands |= {plan.result: (grad := device.allocate(result.nbytes)), "workspace": plan.workspace(stream)}
    plan.launch(plan.arguments(operands), stream)
    device.download(result, grad, stream)
    return out
