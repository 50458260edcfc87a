"""A matrix in the other layout, in memory of its own: what separate launches of a layer do once where its layouts of X and Y differ.

The library that the array came from turns it, on the stream that the launches work on. Never decides where.
"""

import sys
from contextlib import nullcontext
from typing import Any

from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView, is_same_stream, stream_handle, view
from ksgen.launch.memory import host_array, torch_stream

ABLE = ("torch", "cupy")  # of a device's arrays; those of the host NumPy turns


def check_turns(caller: object, found: ArrayView) -> None:
    """Raise `LaunchError` for an array that cannot be turned, before anything is launched."""
    if found.kind not in ABLE and found.device != "host":
        kind = type(found.owner).__name__
        raise LaunchError(
            f"{caller!r}: factors are launched one by one here, and nothing turns a {kind} from one layout into the other; "
            "accepted: arrays of NumPy, PyTorch or CuPy, or one layout for x and y"
        )


def turned(array: Any, stream: Any) -> Any:
    """The transpose of a matrix that `check_turns` let pass, without gaps."""
    handle = stream_handle(stream)
    found = view(array, "x", handle if isinstance(handle, int) else None)
    if found.kind == "torch" and (found.device == "host" or stream is None or is_same_stream(handle or 0, found.stream)):
        return array.t().contiguous()
    if found.kind == "torch":
        with sys.modules["torch"].cuda.stream(torch_stream(handle, found.device[1])):
            return array.t().contiguous()
    if found.kind == "cupy":
        cupy = sys.modules["cupy"]
        own = stream is None or is_same_stream(handle or 0, found.stream)
        with cupy.cuda.Device(found.device[1]), nullcontext() if own else cupy.cuda.ExternalStream(handle or 0, found.device[1]):
            return cupy.ascontiguousarray(array.T)
    import numpy as np

    return np.ascontiguousarray(host_array(found).T)
