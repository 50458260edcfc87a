"""Array operations that transforms need in addition to products, for NumPy, CuPy and PyTorch. Imports no library."""

import sys
from typing import Any

from ksgen.errors import LaunchError
from ksgen.values import excerpt, is_masked

NUMBERS = "buifc"  # kinds of NumPy's types
_LIBRARIES = {"numpy": "ndarray", "cupy": "ndarray", "torch": "Tensor"}


class Library:
    """Operations of NumPy and CuPy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module: Any = sys.modules[name]

    def dtype_of(self, x: Any) -> str:
        return str(x.dtype.name)

    def is_complex(self, x: Any) -> bool:
        return "complex" in self.dtype_of(x)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype, copy=False)

    def as_floats(self, x: Any) -> Any:
        """x in a floating type and native byte order: float64 for integers and for longer floats."""
        dtype = self.dtype_of(x)
        if dtype not in ("complex64", "float32", "float16", "bfloat16"):
            dtype = "complex128" if self.is_complex(x) else "float64"
        return self.cast(x, dtype)

    def as_numbers(self, x: Any, is_complex: bool) -> Any:
        """Contiguous floating-point array. If `is_complex`, float64 becomes complex128, and other floats complex64."""
        x = self.as_floats(x)
        if is_complex and not self.is_complex(x):
            x = self.cast(x, "complex128" if self.dtype_of(x) == "float64" else "complex64")
        return self.contiguous(x)

    def contiguous(self, x: Any) -> Any:
        return self.module.ascontiguousarray(x)

    def moved(self, x: Any) -> Any:
        """x with its first axis moved to the end."""
        return self.module.moveaxis(x, 0, -1)

    def taken(self, x: Any, order: Any) -> Any:
        """Columns of x in the given order."""
        return self.module.take(x, order, 1)

    def joined(self, *parts: Any) -> Any:
        """Columns of all parts, concatenated."""
        return self.module.concatenate(parts, 1)

    def reversed(self, x: Any) -> Any:
        return x[:, ::-1]

    def on_device_of(self, like: Any, array: Any) -> Any:
        """A NumPy array copied to the device and type of `like`; whole numbers keep their type."""
        array = self.module.asarray(array)
        return array if array.dtype.kind == "i" else array.astype(like.dtype)

    def pairs(self, x: Any) -> Any:
        """Pairs of neighbouring real numbers as complex numbers."""
        x = self.contiguous(x)
        # CuPy needs complex numbers at addresses that are multiples of their size
        if self.name == "cupy" and x.data.ptr % (2 * x.itemsize):
            x = x.copy()
        return x.view("complex64" if self.dtype_of(x) == "float32" else "complex128")

    def parts(self, x: Any) -> Any:
        """Complex numbers as pairs of neighbouring real numbers, the inverse of `pairs`."""
        return self.contiguous(x).view("float32" if self.dtype_of(x) == "complex64" else "float64")


class PyTorch(Library):
    """Operations of PyTorch, on any of its devices that ksgen knows."""

    def dtype_of(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.module, dtype))

    def contiguous(self, x: Any) -> Any:
        return x.resolve_conj().resolve_neg().contiguous()

    def taken(self, x: Any, order: Any) -> Any:
        return x.index_select(1, order)

    def reversed(self, x: Any) -> Any:
        return x.flip(1)

    def on_device_of(self, like: Any, array: Any) -> Any:
        tensor = self.module.from_numpy(array)
        return tensor.to(like.device) if array.dtype.kind == "i" else tensor.to(like.device, like.dtype)

    def pairs(self, x: Any) -> Any:
        x = self.contiguous(x)
        x = x.clone() if x.storage_offset() % 2 else x  # PyTorch needs complex numbers at even offsets
        return self.module.view_as_complex(x.unflatten(1, (-1, 2)))

    def parts(self, x: Any) -> Any:
        return self.module.view_as_real(x.resolve_conj()).flatten(1)


def library_of(x: Any, caller: str) -> Library:
    """Library that an array belongs to; `LaunchError` for other objects."""
    for name, kind in _LIBRARIES.items():
        if name in sys.modules and isinstance(x, getattr(sys.modules[name], kind, ())) and not is_masked(x):
            dtype: Any = getattr(x, "dtype", None)
            if name != "torch" and dtype.kind not in NUMBERS and str(dtype) != "bfloat16":
                raise LaunchError(f"{caller}: x is of {dtype}; accepted: numbers")
            layout: Any = getattr(x, "layout", None)
            if name == "torch" and layout is not sys.modules[name].strided:
                raise LaunchError(f"{caller}: x is a {layout} tensor; accepted: a dense one, such as x.to_dense()")
            return PyTorch(name) if name == "torch" else Library(name)
    raise LaunchError(f"{caller}: x={excerpt(x)}; accepted: a NumPy or CuPy array, or a PyTorch tensor")
