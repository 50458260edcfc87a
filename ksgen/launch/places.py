"""Operands of a launch: arrays on the device, host arrays that the device shares, or copies.

The last step before the launch, for products and gradients alike. It allocates outputs, packed weights, workspaces and
copies.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ksgen.devices.base import Stream
from ksgen.devices.capture import refuse_capture
from ksgen.errors import LaunchError
from ksgen.families import operand_of
from ksgen.families.signature import each_chains, pitches_of
from ksgen.launch.arrays import ArrayView, stream_handle, view
from ksgen.launch.call import Call
from ksgen.launch.checks import group_shape
from ksgen.launch.memory import STREAM_ORDERED, host_array, new_array, pitch_of
from ksgen.launch.plan import Arguments, Plan
from ksgen.launch.weights import Packed, Weights
from ksgen.pattern import Chain


def on_device(plan: Plan, views: dict[str, ArrayView], weights: Mapping[str, Packed], out: Any, stream: Stream) -> Call:
    """Prepare a call on arrays of the device, in stream order."""
    if out is None:
        if views["x"].kind != "torch":  # PyTorch keeps memory for graphs
            refuse_capture(plan.device, stream, "allocates its output", "give out=")
        out = _new_out(plan, views, None if plan.device.kind == "opencl" else stream_handle(stream))
    workspace = new_workspace(plan, views["x"], stream)
    operands = {name: found.pointer for name, found in views.items()}
    operands["workspace"] = workspace.pointer
    operands |= _pitches(plan, views)
    arguments, before = _bound(plan, operands, weights)
    return Call(plan, arguments, stream, out, before, None, (views, weights, workspace))


def on_shared(plan: Plan, views: dict[str, ArrayView], weights: Mapping[str, Packed], out: Any, stream: Stream) -> Call:
    """Prepare a call on host arrays in place, for a device that shares host memory.

    The call waits until the launch is complete.
    """
    device = plan.device
    if out is None:
        out = _new_out(plan, views)
    operands = {name: device.shared(found.pointer) for name, found in views.items() if name not in weights}
    operands["workspace"] = plan.workspace(stream)
    operands |= _pitches(plan, views)
    arguments, before = _bound(plan, operands, weights)
    return Call(plan, arguments, stream, out, before, partial(device.synchronize, stream), (views, weights))


def on_host(caller: object, plan: Plan, views: dict[str, ArrayView], packed: Weights | None, out: Any, stream: Stream) -> Call:
    """Prepare a call on host arrays, which are copied to the device and back at every call."""
    import numpy as np

    device = plan.device
    stream = device.host_stream if stream is None else stream
    refuse_capture(device, stream, "copies arrays from the host", "give arrays that lie on the device")
    if out is None:
        out = _new_out(plan, views)
    hosts = {name: host_array(found) for name, found in views.items()}
    dense = {name: host if host.flags.c_contiguous else np.empty(host.shape, host.dtype) for name, host in hosts.items()}
    operands = {name: device.allocate(host.nbytes) for name, host in hosts.items()}
    operands["workspace"] = plan.workspace(stream)
    result = hosts.pop("out")
    weights = {}
    if packed:
        weights["weights"] = packed.use(plan, stream)
    elif "weights" in hosts:
        at = device.allocate(plan.packed_bytes)
        weights["weights"] = Packed(at, partial(plan.pack, operands["weights"], stream, at))
    uploads = [(operands[name], host, dense[name]) for name, host in hosts.items()]
    landing = dense["out"]
    arguments, pack = _bound(plan, operands, weights)

    def send() -> None:
        for buffer, host, sent in uploads:
            if sent is not host:
                sent[...] = host
            device.upload(buffer, sent, stream)
        if pack:
            pack()

    def receive() -> None:
        device.download(landing, operands["out"], stream)
        if landing is not result:
            result[...] = landing
        check_range(caller, plan, hosts, result)

    return Call(plan, arguments, stream, out, send, receive, (packed, views))


def check_range(caller: object, plan: Plan, given: Mapping[str, Any], result: Any) -> None:
    """Raise `LaunchError` if float16 products overflowed: finite host arrays gave a non-finite output."""
    if not (accepted := plan.kernel.arithmetic.range_note):
        return
    import numpy as np

    is_split = operand_of(plan.kernel, plan.choice.constants) is not None
    if is_split and not np.isfinite(result).all() and all(np.isfinite(array).all() for array in given.values()):
        largest = ", ".join(f"{name} up to {np.abs(array).max():.3g}" for name, array in given.items() if name in ("x", "weights"))
        raise LaunchError(f"{caller!r}: {plan.kernel.precision} takes {accepted}; got {largest}; take tf32x3")


def _new_out(plan: Plan, views: dict[str, ArrayView], handle: Any = None) -> Any:
    """Allocate an output like x, and add it to the views.

    A group gets slices of one array, one per output.
    """
    kernel = plan.kernel
    dtype = kernel.dtype if kernel.has_bytes_in else None  # else x's own
    shape = kernel.pattern.shape if kernel.job == "gradient" else group_shape(kernel.chains, kernel.y_layout, plan.batch)
    out = new_array(views["x"], shape, handle, dtype)
    if not kernel.is_group:
        views["out"] = view(out, "out")
        return out
    outs = outputs_in(out, kernel.chains, kernel.layout)
    views |= {name: view(each) for name, each in zip(each_chains(kernel, "y"), outs, strict=True)}
    return outs


def outputs_in(out: Any, chains: Sequence[Chain], layout: str) -> list[Any]:
    """Outputs of several chains as slices of one array."""
    ends = list(accumulate((chain.out_features for chain in chains), initial=0))
    return [out[:, begin:end] if layout == "bsf" else out[begin:end] for begin, end in pairwise(ends)]


def _pitches(plan: Plan, views: Mapping[str, ArrayView]) -> dict[str, int]:
    """Row pitches of sliced arrays, by operand."""
    own = {"y": "out"}
    return {pitch: pitch_of(views[own.get(array, array)]) for array, pitch in pitches_of(plan.kernel).items()}


def _bound(plan: Plan, operands: dict[str, Any], weights: Mapping[str, Packed]) -> tuple[Arguments, Callable[[], object] | None]:
    """Operands in order, and the step on weights before each launch."""
    if "out" in operands:  # outputs of a group have the names of their operands
        operands[plan.result] = operands["out"]
    before = None
    for name, packed in weights.items():
        operands[name], before = packed.at, packed.before
    if len(weights) > 1:
        before = partial(_all_of, [packed.before for packed in weights.values()])
    return plan.arguments(operands), before


def _all_of(steps: Iterable[Callable[[], object]]) -> None:
    for step in steps:
        step()


class Workspace(NamedTuple):
    """Address of a workspace, and its owner, which must live until the last launch is enqueued.

    The address is None if launches take none.
    """

    pointer: Any = None
    owner: Any = None


NONE = Workspace()


def new_workspace(plan: Plan, x: ArrayView, stream: Stream) -> Workspace:
    """Allocate a plan's workspace for launches on that stream alone."""
    if not plan.workspace_bytes:
        return NONE
    if x.kind != "torch":  # PyTorch keeps memory for graphs
        prepared = "record the call that launcher.prepare(...) gave before the capture"
        remedy = "give PyTorch's tensors" if plan.kernel.job == "gradient" else prepared
        refuse_capture(plan.device, stream, "allocates memory to work in", remedy)
    if x.kind in STREAM_ORDERED:
        array = new_array(x, (plan.workspace_bytes // plan.kernel.item_bytes,), stream_handle(stream))
        return Workspace(view(array).pointer, array)
    return Workspace(buffer := plan.workspace(stream), buffer)
