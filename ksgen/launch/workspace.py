"""Memory in which the launches of a plan hand on what they found, from the library of a caller's array. Never launches."""

from typing import Any, NamedTuple

from ksgen.devices.base import Stream
from ksgen.devices.capture import refuse_capture
from ksgen.launch.arrays import ArrayView, stream_handle, view
from ksgen.launch.memory import new_array
from ksgen.launch.plan import Plan

STREAM_ORDERED = ("torch", "cupy")  # whose freed memory is not given to others before the stream is done with it


class Workspace(NamedTuple):
    """What launches take of it, None where they take none, and what keeps it: needed until the last launch was enqueued."""

    pointer: Any = None
    owner: Any = None


NONE = Workspace()


def new_workspace(plan: Plan, x: ArrayView, stream: Stream) -> Workspace:
    """A plan's, for launches on that stream alone."""
    if not plan.workspace_bytes:
        return NONE
    if x.kind != "torch":  # which keeps memory for graphs
        prepared = "record the call that launcher.prepare(...) gave before the capture"
        remedy = "give PyTorch's tensors" if plan.kernel.job == "gradient" else prepared
        refuse_capture(plan.device, stream, "allocates memory to work in", remedy)
    if x.kind in STREAM_ORDERED:
        array = new_array(x, (plan.workspace_bytes // plan.kernel.item_bytes,), stream_handle(stream))
        return Workspace(view(array).pointer, array)
    return Workspace(buffer := plan.workspace(stream), buffer)
