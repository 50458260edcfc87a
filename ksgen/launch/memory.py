"""Host memory of any library as NumPy arrays, and new arrays of an argument's library.

Arrays are copied in two cases. Separate launches of a layer transpose x or an intermediate if the layouts of X and Y
differ. Weights are copied if they repeat a slice by strides of zero.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

from ksgen.devices.base import HostArray, host_memory, use_huge_pages
from ksgen.devices.libcuda import context_of
from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView, is_row_major, is_same_stream, stream_handle, type_name, view
from ksgen.spec.kernel import TIES
from ksgen.spec.storage import BYTE_TYPES, element_bytes

STREAM_ORDERED = ("torch", "cupy")  # libraries that reuse freed memory only in stream order
COPYING = ("torch", "cupy")  # libraries that copy and transpose arrays on a device; NumPy does on the host

ON_LINE_BYTES = 64 * 1024  # new arrays of at least this size begin at a cache line


def numpy_dtype(precision: str) -> Any:
    """NumPy's dtype, or that of ml_dtypes for bfloat16; uint8 for eight-bit storage."""
    import numpy as np

    if precision in BYTE_TYPES:
        return np.dtype(np.uint8)
    if precision == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(precision)


def size_of(array: ArrayView) -> int:
    """Bytes from the first element to the end of the last one, including gaps between rows."""
    item_bytes = element_bytes(array.dtype)
    if array.strides is None:
        return prod(array.shape) * item_bytes
    return sum((length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)) + item_bytes


def rows_are_whole(array: ArrayView) -> bool:
    """Whether an array is a matrix with strides, whose only gaps are between its rows."""
    if len(array.shape) != 2 or array.strides is None:
        return False
    item_bytes, length, (next_row, step) = element_bytes(array.dtype), array.shape[1], array.strides
    return (step == item_bytes or length == 1) and next_row % item_bytes == 0 and next_row >= length * item_bytes


def is_repeated(found: ArrayView) -> bool:
    """Whether an array repeats a contiguous slice by strides of zero, and its library can copy it."""
    if found.strides is None or 0 not in found.strides or (found.kind not in COPYING and found.device != "host"):
        return False
    of_slice = tuple([length if step else 1 for length, step in zip(found.shape, found.strides, strict=True)])
    return is_row_major(of_slice, found.strides, element_bytes(found.dtype))


def tie_of(found: ArrayView | None) -> str:
    """Axes along which weights repeat a slice by strides of zero: "a", "d" or "ad".

    Empty if there are none, or if weights also repeat along b or c: these are copied.
    """
    if found is None or found.strides is None:
        return ""
    axes = zip("abcd", found.shape, found.strides, strict=True)
    tie = "".join(axis for axis, length, step in axes if length > 1 and not step)
    return tie if tie in TIES else ""


def repetition(found: ArrayView, stream: Any) -> tuple[Any, Callable[[], None]]:
    """Allocate an array for all values of an array that `is_repeated`, and make the function that copies them into it.

    The copies run on `stream`, or else on the stream that was current when the array was viewed.
    """
    handle = found.stream if stream is None else stream_handle(stream)
    with sys.modules["torch"].inference_mode(False) if found.kind == "torch" else nullcontext():
        whole = new_array(found, found.shape, handle)  # prepared calls write to it outside inference mode, too
    later = found._replace(stream=None)  # another stream may be current when a prepared call runs

    def copy() -> None:
        if found.kind == "torch":
            with on_stream(later, handle, handle):
                whole.copy_(found.owner.detach())
        elif found.kind == "cupy":
            with sys.modules["cupy"].cuda.Device(found.device[1]), on_stream(later, handle, handle):
                whole[...] = found.owner
        else:
            host_array(view(whole))[...] = host_array(found)

    return whole, copy


def on_stream(found: ArrayView, stream: Any, handle: Any) -> Any:
    """Context in which PyTorch or CuPy work on a stream; None is their current one."""
    if found.device == "host" or stream is None or is_same_stream(handle or 0, found.stream):
        return nullcontext()
    if found.kind == "torch":
        return sys.modules["torch"].cuda.stream(torch_stream(handle, found.device[1]))
    return sys.modules["cupy"].cuda.ExternalStream(handle or 0, found.device[1])


def is_whole(found: ArrayView) -> bool:
    """Whether an array's address is a multiple of its element size, as kernels require."""
    return not found.pointer % element_bytes(found.dtype)


def host_array(found: ArrayView) -> HostArray:
    """View of the same host memory as a NumPy array. The owner must outlive it."""
    import numpy as np

    memory: Any = (ctypes.c_char * size_of(found)).from_address(found.pointer)
    return np.ndarray(tuple(found.shape), numpy_dtype(found.dtype), memory, strides=found.strides)


def new_host_array(shape: tuple[int, ...], dtype: Any) -> HostArray:
    """Allocate an uninitialised array; a large one begins at a cache line, where processor kernels write fastest."""
    import numpy as np

    size = prod(shape) * dtype.itemsize
    if size < ON_LINE_BYTES:
        return np.empty(shape, dtype)
    array: HostArray = host_memory(size).view(dtype).reshape(shape)
    return array


def torch_stream(handle: Any, index: Any) -> Any:
    """PyTorch stream for a GPU stream's handle; None is the default one."""
    return sys.modules["torch"].cuda.ExternalStream(handle or 0, index)


def new_tensor(like: Any, *shape: int, **options: Any) -> Any:
    """Allocate an uninitialised tensor of PyTorch like another; a large one on a processor lies in huge pages."""
    tensor = like.new_empty(*shape, **options)
    if tensor.is_cpu:
        use_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def new_array(like: ArrayView, shape: tuple[int, ...], stream: Any = None, dtype: str | None = None) -> Any:
    """Allocate an uninitialised array of the library and device of `like`, to be written on `stream`, a handle.

    It has the type of `like`, unless `dtype` names another. PyTorch and CuPy reuse freed memory in the order of the
    stream on which it was allocated, so they allocate it on `stream`.
    """
    if like.kind == "torch":
        more = {} if dtype is None else {"dtype": getattr(sys.modules["torch"], dtype)}
        if like.device == "host":
            return new_tensor(like.owner, *shape, **more)
        if is_same_stream(stream or 0, like.stream):
            return like.owner.new_empty(shape, **more)
        with sys.modules["torch"].cuda.stream(torch_stream(stream, like.device[1])):
            return like.owner.new_empty(shape, **more)
    if like.kind == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device[1]), on_stream(like, stream or 0, stream):
            return cupy.empty(shape, like.owner.dtype if dtype is None else numpy_dtype(dtype))
    if like.kind == "pycuda":
        current, owning_context = sys.modules["pycuda.driver"].Context.get_current(), context_of(like.pointer)
        if current is None or (owning_context and current.handle != owning_context):
            raise LaunchError(
                "x is a GPUArray of a context that is not current on this thread; push() it before the call, or give "
                "out="
            )
        return sys.modules["pycuda.gpuarray"].empty(shape, like.owner.dtype if dtype is None else numpy_dtype(dtype))
    if like.kind == "pyopencl":
        kind = like.owner.dtype if dtype is None else numpy_dtype(dtype)
        return sys.modules["pyopencl.array"].empty(like.owner.queue or like.owner.context, shape, kind)
    if like.device == "host":
        return new_host_array(shape, numpy_dtype(dtype or like.dtype))
    raise LaunchError("x gives its address, but no way to allocate an output; give out=")


def check_transposable(caller: object, found: ArrayView) -> None:
    """Raise `LaunchError` for an array that cannot be transposed, before any launch."""
    if found.kind not in COPYING and found.device != "host":
        raise LaunchError(
            f"{caller!r}: factors are launched one by one here, and nothing transposes a {type_name(found)} from one "
            "layout into the other; accepted: arrays of NumPy, PyTorch or CuPy, or one layout for x and y"
        )


def transposed(array: Any, stream: Any) -> Any:
    """Contiguous transpose of a matrix that passed `check_transposable`."""
    handle = stream_handle(stream)
    found = view(array, "x", handle if isinstance(handle, int) else None)
    if found.kind == "torch":
        with on_stream(found, stream, handle):
            return array.t().contiguous()
    if found.kind == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(found.device[1]), on_stream(found, stream, handle):
            return cupy.ascontiguousarray(array.T)
    import numpy as np

    return np.array(host_array(found).T, order="C")  # a copy, even of one row: the array does not own its memory
