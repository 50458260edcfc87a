"""Operands of a launch: arrays on the device, host arrays that the device shares, or copies.

The last step before the launch, for products and gradients alike. It allocates outputs, packed weights, workspaces and
copies.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from ksgen.devices.base import Stream, refuse_capture
from ksgen.errors import LaunchError
from ksgen.families import operand_of
from ksgen.launch.arrays import ArrayView, stream_handle, view
from ksgen.launch.memory import STREAM_ORDERED, host_array, new_array
from ksgen.launch.plan import Call, Packing, Plan
from ksgen.launch.weights import Packed, Weights
from ksgen.pattern import Chain
from ksgen.spec.storage import element_bytes


def on_device(plan: Plan, views: dict[str, ArrayView], packed: Sequence[Packed], out: Any, stream: Stream) -> Call:
    """Prepare a call on arrays of the device, in stream order."""
    if out is None:
        if views["x"].kind != "torch":  # PyTorch can allocate while a graph is recorded
            refuse_capture(plan.device, stream, "allocates its output", "give out=")
        out = _new_out(plan, views, None if plan.device.kind == "opencl" else stream_handle(stream))
    operands = {operand: views[name].pointer for operand, name in plan.arrays}
    operands["workspace"], workspace = new_workspace(plan, views["x"], stream)
    return _bound(plan, views, operands, packed, out, stream, None, workspace)


def on_shared(plan: Plan, views: dict[str, ArrayView], packed: Sequence[Packed], out: Any, stream: Stream) -> Call:
    """Prepare a call on host arrays in place, for a device that shares host memory.

    The call waits until the launch is complete.
    """
    device = plan.device
    if out is None:
        out = _new_out(plan, views)
    operands = {operand: device.shared(views[name].pointer) for operand, name in plan.arrays}
    operands["workspace"] = device.workspace(plan.workspace_bytes, stream) if plan.workspace_bytes else None
    return _bound(plan, views, operands, packed, out, stream, partial(device.synchronize, stream))


def on_host(
    caller: object, plan: Plan, views: dict[str, ArrayView], packed: Sequence[Weights], out: Any, stream: Stream
) -> Call:
    """Prepare a call of one factor on host arrays, which are copied to the device and back at every call."""
    import numpy as np

    device = plan.device
    stream = device.host_stream if stream is None else stream
    refuse_capture(device, stream, "copies arrays from the host", "give arrays that lie on the device")
    if out is None:
        out = _new_out(plan, views)
    hosts = {name: host_array(found) for name, found in views.items()}
    dense = {
        name: host if host.flags.c_contiguous else np.empty(host.shape, host.dtype) for name, host in hosts.items()
    }
    copies = {name: device.allocate(host.nbytes) for name, host in hosts.items()}
    result = hosts.pop("out")
    weights = [each.use(plan, stream) for each in packed]
    if "weights" in hosts:
        buffer = device.allocate(plan.packed_bytes)
        weights = [Packed(buffer, packing=Packing(plan, copies["weights"], buffer))]
    uploads = [(copies[name], host, dense[name]) for name, host in hosts.items()]
    landing = dense["out"]

    def send() -> None:
        for copy, host, sent in uploads:
            if sent is not host:
                sent[...] = host
            device.upload(copy, sent, stream)

    is_checked = bool(plan.kernel.arithmetic.range_note)
    overwrites_residual = "residual" in views and views["residual"].pointer == views["out"].pointer

    def receive() -> None:
        inputs = hosts | {"residual": hosts["residual"].copy()} if is_checked and overwrites_residual else hosts
        device.download(landing, copies["out"], stream)
        if landing is not result:
            result[...] = landing
        check_range(caller, plan, inputs, result)

    operands = {operand: copies[name] for operand, name in plan.arrays} | {"workspace": plan.workspace(stream)}
    call = _bound(plan, views, operands, weights, out, stream, receive, packed)
    call.before, call.copies = (send, *call.before), True
    return call


def check_range(caller: object, plan: Plan, inputs: Mapping[str, Any], result: Any) -> None:
    """Raise `LaunchError` if products of float16 overflowed: finite inputs gave an output that is not finite."""
    if not (accepted := plan.kernel.arithmetic.range_note):
        return
    import numpy as np

    is_split = operand_of(plan.kernel, plan.choice.constants) is not None
    if is_split and not np.isfinite(result).all() and all(np.isfinite(array).all() for array in inputs.values()):
        largest = ", ".join(
            f"{name} up to {np.abs(array).max():.3g}" for name, array in inputs.items() if name in ("x", "weights")
        )
        raise LaunchError(f"{caller!r}: {plan.kernel.precision} takes {accepted}; got {largest}; take tf32x3")


def _new_out(plan: Plan, views: dict[str, ArrayView], handle: Any = None) -> Any:
    """Allocate an output like x, and add it to the views.

    A group gets slices of one array, one per output.
    """
    out = new_array(views["x"], plan.out_shape, handle, plan.out_dtype)
    if len(plan.outs) == 1:
        views["out"] = view(out, "out")
        return out
    outs = outputs_in(out, plan.kernel.chains, plan.kernel.layout)
    views |= zip(plan.outs, map(view, outs), strict=True)
    return outs


def outputs_in(out: Any, chains: Sequence[Chain], layout: str) -> list[Any]:
    """Outputs of several chains as slices of one array."""
    ends = list(accumulate((chain.out_features for chain in chains), initial=0))
    return [out[:, begin:end] if layout == "bsf" else out[begin:end] for begin, end in pairwise(ends)]


def _bound(
    plan: Plan, views: Mapping[str, ArrayView], operands: dict[str, Any], packed: Sequence[Packed], out: Any,
    stream: Stream,
    after: Callable[[], None] | None, *keep: Any,
) -> Call:  # fmt: skip
    """Bind a launch to its operands: `operands` has arrays and workspace; packed weights and row pitches are added."""
    for name, each in zip(plan.weights, packed, strict=True):
        operands[name] = each.at
    steps = [each.before for each in packed if each.before]
    packs = [each.packing for each in packed if each.packing]
    for pitch, name in plan.pitches:
        array = views[name]  # a matrix: its pitch counts elements from one row to the next
        operands[pitch] = int(
            array.shape[1] if array.strides is None else array.strides[0] // element_bytes(array.dtype)
        )
    call = Call(plan, plan.arguments(operands), stream, out, steps, after, (views, packed, *keep), packs)
    if "residual" in views and views["residual"].pointer == views["out"].pointer:  # its reads have filled the caches
        call.keep_output()
    return call


def new_workspace(plan: Plan, x: ArrayView, stream: Stream) -> tuple[Any, Any]:
    """Allocate a plan's workspace, which only launches on this stream may use; Nones if launches need none.

    Returns its address, and its owner, which must live until the last launch is enqueued.
    """
    if not plan.workspace_bytes:
        return None, None
    if x.kind != "torch":  # PyTorch can allocate while a graph is recorded
        prepared = "before the capture, prepare the call by launcher.prepare(...), and record the prepared call"
        remedy = "give PyTorch's tensors" if plan.kernel.job == "gradient" else prepared
        refuse_capture(plan.device, stream, "allocates its workspace", remedy)
    if x.kind in STREAM_ORDERED:
        array = new_array(x, (plan.workspace_bytes // plan.kernel.item_bytes,), stream_handle(stream))
        return view(array).pointer, array
    return (buffer := plan.workspace(stream)), buffer
