"""DLPack tensors, read from the capsules in which libraries share them.

Never copies, and does not check whether a tensor fits a kernel.
"""

import ctypes
from typing import Any

from ksgen.errors import LaunchError

# Structures of https://dmlc.github.io/dlpack/latest/c_api.html.

PLACES = {1: "host", 2: "cuda", 3: "host", 13: "cuda"}  # CPU, CUDA, pinned host and managed memory
_DTYPES = {  # by (code, bits)
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16", (5, 64): "complex64", (5,
        128): "complex128",
}  # fmt: skip
_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY = 1
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # keeps the GIL: some producers' deleters count on it


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null for row-major
        ("byte_offset", ctypes.c_uint64),
    )


class _Unversioned(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_rename_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
_CAPSULES = {  # name -> its layout, and its name once consumed: stored here, because capsules do not copy names
    b"dltensor": (_Unversioned, ctypes.c_char_p(b"used_dltensor")),
    b"dltensor_versioned": (_Versioned, ctypes.c_char_p(b"used_dltensor_versioned")),
}


class Managed:
    """A tensor consumed from its capsule; its producer's deleter runs when this object is destroyed."""

    def __init__(self, capsule: Any, name: str) -> None:
        self._address = None
        label = _capsule_name(capsule)
        if label not in _CAPSULES:
            raise LaunchError(
                f"{name}: its __dlpack__ returned a capsule called {label!r}; one called dltensor or "
                "dltensor_versioned is needed"
            )
        layout, used = _CAPSULES[label]
        address = _capsule_pointer(capsule, label)
        managed = layout.from_address(address)
        _rename_capsule(capsule, used)
        self._address, self._deleter = address, managed.deleter
        if isinstance(managed, _Versioned) and managed.major != 1:
            raise LaunchError(f"{name} speaks DLPack {managed.major}.{managed.minor}; accepted: 1.x and older")
        self.tensor: _Tensor = managed.tensor
        self.writeable = not (isinstance(managed, _Versioned) and managed.flags & _READ_ONLY)

    def __del__(self) -> None:
        if self._address is not None and self._deleter:
            self._deleter(self._address)


def element_type(tensor: _Tensor) -> tuple[str | None, str]:
    """Name of the dtype, or None if no kernel takes it, and a description of the type for messages."""
    dtype_name = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    code = _CODES.get(tensor.code, f"code {tensor.code}, ")
    return dtype_name, f"{code}{tensor.bits}" + ("" if tensor.lanes == 1 else f" x {tensor.lanes}")
