"""Views of a user's arrays: address, shape, type, device and stream. Never copies, and imports no library.

Libraries are recognised by the modules that the user has imported, so unused ones among PyTorch, CuPy, PyCUDA and
pyopencl cost nothing. `views_of` reads the arrays of a call; `checks.py` decides whether they fit.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from ksgen.devices.base import LEGACY_STREAM, address_of
from ksgen.devices.libcuda import device_of
from ksgen.errors import KsgenError, LaunchError
from ksgen.launch.dlpack import PLACES, Managed, element_type
from ksgen.spec import Activation, Layout, PrecisionName
from ksgen.spec.precision import stored_types
from ksgen.spec.storage import BYTE_TYPES
from ksgen.values import excerpt, is_masked, whole_number

DTYPES = stored_types()
ACCEPTED = (
    "a NumPy array, a PyCUDA GPUArray, a PyTorch or CuPy tensor, a pyopencl Array, or an object with "
    "__cuda_array_interface__ or __dlpack__"
)

Place = Literal["host"] | tuple[Literal["cuda"], int | None] | tuple[Literal["opencl"], Any]
"""Place of memory: the host, a CUDA device (number None if the array does not report it), or an OpenCL context."""


class ArrayView(NamedTuple):
    """An array in the form that kernels use. `owner` keeps its memory alive."""

    kind: str  # "numpy", "torch", "pycuda", "cupy", "pyopencl", "cuda" (its array interface) or "dlpack"
    pointer: Any  # an address, or a pyopencl Buffer
    shape: tuple[int, ...]
    dtype: str  # one of DTYPES; for x also one of BYTE_TYPES
    strides: tuple[int, ...] | None  # bytes between elements along each axis; None: row-major, without gaps
    device: Place
    stream: Any  # CUDA handle or pyopencl queue that the owner currently uses; None if unknown
    owner: Any
    writeable: bool


# kind, shape, dtype, strides and device of an ArrayView, which decide whether it fits a call
form_of = operator.itemgetter(0, 2, 3, 4, 5)

Reader = Callable[[Any, str, int | None], ArrayView]  # takes an array, its name in messages, and the stream of its use

# dtypes by the type strings of NumPy's array interface
_NUMBERS = {"<f2": "float16", "<f4": "float32", "<f8": "float64", "<c8": "complex64", "<c16": "complex128"}
_BYTES = {"|u1": "uint8", "|i1": "int8"}
_readers: dict[type, Reader] = {}  # by type, for all types met so far
_dtypes: dict[Any, str] = {}  # by dtype object, for all met so far


def view(array: Any, name: str = "array", stream: int | None = None) -> ArrayView:
    """Read an array.

    `stream` is the CUDA stream that will use it. A DLPack producer makes that stream wait for its own work.
    """
    try:
        reader = _readers.get(type(array)) or _find_reader(array, name)
        return reader(array, name, stream)
    except KsgenError:
        raise
    except Exception as error:  # foreign objects may break their protocol anywhere
        raise LaunchError(f"{name} is {_article(array)}, which has no array interface; give {ACCEPTED}") from error


def common_device(views: Mapping[str, ArrayView]) -> Place:
    """Device on which all arrays lie; `LaunchError` if they differ."""
    first_name, first = next(iter(views.items()))
    place = first.device
    for name, other in views.items():
        if place[0] == other.device[0] == "cuda" and None in (place[1], other.device[1]):
            place = place if other.device[1] is None else other.device
        elif place != other.device:
            raise LaunchError(
                f"{first_name} lies {_describe(place)} and {name} {_describe(other.device)}; give both in one place"
            )
    return place


def type_name(found: ArrayView) -> str:
    """Name of the type of the user's array."""
    owner = found.owner[-1] if found.kind == "dlpack" else found.owner
    return type(owner).__name__


def stream_handle(stream: Any) -> Any:
    """Convert a stream to a CUDA handle or a pyopencl CommandQueue.

    None, which names no stream, is returned unchanged.
    """
    if stream is None:
        return None
    if isinstance(stream, int) and not isinstance(stream, bool) and 0 <= stream < 2**64:
        return stream
    pyopencl = sys.modules.get("pyopencl")
    if pyopencl and isinstance(stream, pyopencl.CommandQueue):
        return stream
    with suppress(Exception):  # foreign objects may raise anything
        if hasattr(stream, "__cuda_stream__"):
            protocol = stream.__cuda_stream__
            _, handle = protocol() if callable(protocol) else protocol
            return int(handle)
        for attribute in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, PyCUDA
            if isinstance(handle := getattr(stream, attribute, None), int):
                return handle
    description = _article(stream) if whole_number(stream) is None else excerpt(stream)
    raise LaunchError(
        f"stream is {description}; give a CUDA stream's handle, a PyTorch, CuPy or PyCUDA stream, "
        "an object with __cuda_stream__, a pyopencl CommandQueue, or None"
    )


def is_same_stream(one: Any, other: Any) -> bool:
    """Whether two handles name the same stream: CUDA's default stream is both 0 and 1."""
    return bool(one == other) or (isinstance(one, int) and isinstance(other, int) and {one, other} == {0, 1})


def _find_reader(array: Any, name: str) -> Reader:
    reader: Reader = _read_interface
    for module, classname, library_reader in _LIBRARIES:
        library = sys.modules.get(module)
        if library is not None and isinstance(array, getattr(library, classname, ())):
            if is_masked(array):
                raise _no_array(array, name)
            reader = library_reader
            break
    return _readers.setdefault(type(array), reader)


def _read_interface(array: Any, name: str, stream: int | None) -> ArrayView:
    """Read an array by an interface that any library may offer.

    A type may offer it for some of its arrays only.
    """
    # that of JAX names no stream, so nothing would wait for the work on the array; DLPack lets the stream wait
    if not _is_of_jax(array) and getattr(array, "__cuda_array_interface__", None) is not None:
        return _read_cuda_array_interface(array, name, stream)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _read_dlpack(array, name, stream)
    raise _no_array(array, name)


def _is_of_jax(array: Any) -> bool:
    return isinstance(array, getattr(sys.modules.get("jax"), "Array", ()))


def _argument(name: str) -> str:
    """Argument of a call that holds an array: "weights" for "weights of factor 1"."""
    return name.split()[0]


def _no_array(thing: Any, name: str) -> LaunchError:
    from ksgen.quantized import QuantizedInputs  # imports NumPy

    if isinstance(thing, QuantizedInputs):
        return LaunchError(f"{name} is {_article(thing)}; give its values: {_argument(name)}.values")
    made = f"np.asarray({_argument(name)}, np.float32), or " if isinstance(thing, list | tuple) else ""
    return LaunchError(f"{name} is {_article(thing)}; give {made}{ACCEPTED}")


def _read_numpy(array: Any, name: str, stream: int | None) -> ArrayView:
    flags, dtype = array.flags, dtype_of(array.dtype, name)
    strides = None if flags.c_contiguous else array.strides
    return ArrayView("numpy", address_of(array), array.shape, dtype, strides, "host", None, array, flags.writeable)


def _read_torch(tensor: Any, name: str, stream: int | None) -> ArrayView:
    place: Place
    current = None
    if tensor.is_cuda:
        index = tensor.get_device()
        place, current = ("cuda", index), current_stream(index)
    elif tensor.device.type == "cpu":
        place = "host"
    else:
        raise LaunchError(f"{name} is a tensor on {tensor.device}; give one on a CUDA device or the CPU")
    dtype = dtype_of(tensor.dtype, name)
    try:
        pointer = tensor.data_ptr()
        strides = None if tensor.is_contiguous() else _in_bytes(tensor.stride(), tensor.element_size())
    except RuntimeError as error:  # sparse, quantised or traced: without plain memory
        raise LaunchError(f"{name} is a tensor without plain memory ({error}); give a dense one") from None
    if not pointer and tensor.numel():
        raise LaunchError(f"{name} is a {type(tensor).__name__} without memory, as tracing makes; give a real tensor")
    if tensor.is_neg():
        raise LaunchError(f"{name} is a lazily negated view; give {_argument(name)}.resolve_neg()")
    if tensor.is_conj():
        raise LaunchError(f"{name} is a lazily conjugated view; give {_argument(name)}.resolve_conj()")
    return ArrayView("torch", pointer, tensor.shape, dtype, strides, place, current, tensor, True)


def current_stream(index: int) -> int:
    """Handle of PyTorch's current stream on that GPU.

    The private function costs a fraction of the public one, which creates an object.
    """
    torch = sys.modules["torch"]
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle: int = raw_stream(index) if raw_stream else torch.cuda.current_stream(index).cuda_stream
    return handle


def _read_pycuda(array: Any, name: str, stream: int | None) -> ArrayView:
    pointer = 0 if array.gpudata is None else int(array.gpudata)
    dtype = dtype_of(array.dtype, name)
    return ArrayView(
        "pycuda", pointer, array.shape, dtype, _strides(array), ("cuda", device_of(pointer)), None, array, True
    )


def _read_cupy(array: Any, name: str, stream: int | None) -> ArrayView:
    index = array.device.id
    current = sys.modules["cupy"].cuda.get_current_stream(index).ptr  # of its device, which need not be current
    dtype = dtype_of(array.dtype, name)
    return ArrayView("cupy", array.data.ptr, array.shape, dtype, _strides(array), ("cuda", index), current, array, True)


def _read_pyopencl(array: Any, name: str, stream: int | None) -> ArrayView:
    if array.offset:  # kernels take buffers without an offset
        raise LaunchError(f"{name} starts {array.offset} bytes into its buffer; give {_argument(name)}.copy()")
    place: Place = ("opencl", array.context)
    dtype = dtype_of(array.dtype, name)
    return ArrayView("pyopencl", array.base_data, array.shape, dtype, _strides(array), place, array.queue, array, True)


def _read_cuda_array_interface(array: Any, name: str, stream: int | None) -> ArrayView:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise LaunchError(f"{name} is masked; give an array without a mask")
    shape, typestr = tuple(map(operator.index, interface["shape"])), interface["typestr"]
    address, read_only = interface["data"]
    pointer, known = operator.index(address), _NUMBERS.get(typestr)
    # bfloat16 has no type string of its own: only the array's dtype tells it from two raw bytes.
    dtype = known or dtype_of(getattr(array, "dtype", typestr) if typestr in ("<V2", "|V2") else typestr, name)
    steps = interface.get("strides")
    strides = (
        None if steps is None or is_row_major(shape, steps, int(typestr[2:])) else tuple(map(operator.index, steps))
    )
    current = interface.get("stream")
    return ArrayView(
        "cuda", pointer, shape, dtype, strides, ("cuda", device_of(pointer)), current, array, not read_only
    )


def _read_dlpack(array: Any, name: str, stream: int | None) -> ArrayView:
    device_type, index = (int(number) for number in array.__dlpack_device__())
    if device_type not in PLACES:
        raise LaunchError(f"{name} lies on DLPack device type {device_type}; give one on a CUDA device or the host")
    place: Place = "host" if PLACES[device_type] == "host" else ("cuda", index)
    consumer = None if place == "host" else stream or LEGACY_STREAM  # the protocol forbids 0
    try:
        try:
            capsule = array.__dlpack__(stream=consumer, max_version=(1, 0))
        except TypeError:  # a producer without DLPack versions
            capsule = array.__dlpack__(stream=consumer)
    except (BufferError, RuntimeError, ValueError) as error:
        raise LaunchError(f"{name} is {_article(array)} that cannot be shared by DLPack: {error}") from None
    owner = Managed(capsule, name)
    tensor = owner.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    steps = _in_bytes(tensor.strides[: tensor.ndim], tensor.bits // 8) if tensor.strides else None
    strides = None if steps is None or is_row_major(shape, steps, tensor.bits // 8) else steps
    pointer = (tensor.data or 0) + tensor.byte_offset
    dtype, description = element_type(tensor)
    if dtype is None and name == "x" and description in BYTE_TYPES:
        dtype = description
    if dtype is None:
        raise LaunchError(f"{name} is of {description}; give {', '.join(DTYPES)}")
    writeable = owner.writeable and not _is_of_jax(array)  # which are immutable, but not marked
    return ArrayView("dlpack", pointer, shape, dtype, strides, place, stream, (owner, array), writeable)


_LIBRARIES: tuple[tuple[str, str, Reader], ...] = (
    ("torch", "Tensor", _read_torch),
    ("pycuda.gpuarray", "GPUArray", _read_pycuda),
    ("numpy", "ndarray", _read_numpy),
    ("cupy", "ndarray", _read_cupy),
    ("pyopencl.array", "Array", _read_pyopencl),
)


def dtype_of(dtype: Any, name: str) -> str:
    """Name of a library's dtype object."""
    if (known := _dtypes.get(dtype)) is not None:
        return known
    text = str(dtype).removeprefix("torch.")
    if name == "x" and (text := _BYTES.get(text, text)) in BYTE_TYPES:  # only x may be in eight bits
        return text
    if text not in DTYPES:
        raise LaunchError(f"{name} is of {text}; give {', '.join(DTYPES)}")
    return _dtypes.setdefault(dtype, text)


def _strides(array: Any) -> tuple[int, ...] | None:
    """Strides of a NumPy-like array; None if it is contiguous."""
    return None if array.flags.c_contiguous else tuple(array.strides)


def _in_bytes(steps: Any, item_bytes: int) -> tuple[int, ...]:
    return tuple([step * item_bytes for step in steps])


def is_row_major(shape: tuple[int, ...], steps: Any, item_bytes: int) -> bool:
    """Whether an array is row-major without gaps.

    Steps along an axis of length one do not matter, and none matters in an empty array.
    """
    if 0 in shape:
        return True
    expected = item_bytes
    for length, step in zip(reversed(shape), reversed(steps), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _describe(place: Place) -> str:
    if place == "host":
        return "on the host"
    kind, where = place
    if kind == "opencl":
        return f"in an OpenCL context ({where})"
    return "on a CUDA device" if where is None else f"on cuda:{where}"


def _article(thing: Any) -> str:
    """Name of a thing's type with an article, for messages; "None" for None."""
    if thing is None:
        return "None"
    kind = type(thing)
    type_name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if type_name[0] in 'aeiouAEIOU' else 'a'} {type_name}"


Views = Mapping[str, ArrayView]


class CallOptions(NamedTuple):
    """Options of a call: all its arguments except arrays."""

    layout: Layout = "bsf"
    activation: Activation = "none"
    precision: PrecisionName | None = None
    out_layout: Layout | None = None
    residual_first: bool = False
    stream: Any = None


def views_of(arrays: Mapping[str, Any], stream: Any) -> dict[str, ArrayView]:
    """Read the arrays of a call.

    If `stream` is a CUDA stream, DLPack producers make it wait for their own work.
    """
    handle = None if stream is None else stream_handle(stream)
    if not isinstance(handle, int):
        handle = None
    return {name: view(array, name, handle) for name, array in arrays.items()}
