"""Reads users' values as numbers, writes values, numbers and misfits in messages, and groups items."""

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Key = TypeVar("Key")
MOST_SHOWN = 400  # characters of a path


class cached_property(Generic[T]):  # noqa: N801 (named like Python's)
    """Python's `cached_property` without the lock of Python 3.11, which takes longer than most of what the cost model
    computes.

    If two threads first access it at the same time, each of them computes the value.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, owner: Any, of: type[Any] | None = None) -> T:
        if owner is None:  # read from the class, as documentation tools do
            return self  # type: ignore[return-value]
        value = owner.__dict__[self._name] = self._compute(owner)
        return value


def whole_number(value: Any) -> int | None:
    """An integer of any library, such as NumPy, as a Python int; None for any other value, including True."""
    try:
        return None if isinstance(value, bool) else index(value)
    except Exception:  # an array of several numbers, or any error of a foreign object
        return None


def real_number(value: Any) -> float | None:
    """A real number of any library as a Python float; None for any other value, including True and text."""
    try:
        return None if isinstance(value, bool | str | bytes) else float(value)
    except Exception:  # an array of several numbers, or any error of a foreign object
        return None


def is_masked(array: Any) -> bool:
    """Whether an array is one of NumPy with a mask, which conversions drop without a word."""
    return isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def listed(values: Any) -> tuple[Any, ...] | None:
    """Items of an iterable value as a tuple; None for any other value."""
    try:
        return tuple(values)
    except TypeError:
        return None


def grouped(items: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Group items by a key. Keys are in order of their first appearance."""
    found: dict[Key, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def excerpt(value: object) -> str:
    """The value as a message shows it: in one line, and short."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # its repr fails
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown(path: Any) -> str:
    """A path for a message: in one line, with non-text characters escaped, and a very long one shortened in the
    middle."""
    text = str(path) if str(path).isprintable() else ascii(str(path))[1:-1]
    return text if len(text) <= MOST_SHOWN else f"{text[:57]}...{text[-57:]}"


def misfit_of_x(shape: Sequence[int], features: int, layout: str, batch: str = "batch", least: int = 0) -> str:
    """How the shape of x differs from what a product takes; empty if it fits.

    `batch` is "..." if x may have any number of batch dimensions, `least` the smallest batch size of a matrix.
    """
    axis, other, other_layout = (-1, 0, "bsl") if layout == "bsf" else (0, -1, "bsf")
    has_dimensions = len(shape) == 2 or (shape and batch == "...")
    if has_dimensions and shape[axis] == features and (not least or shape[other]):
        return ""
    wanted = f"({batch}, {features})" if layout == "bsf" else f"({features}, {batch})"
    remedy = f", with a batch of at least {least}" if least else ""
    fits_other = has_dimensions and shape[other] == features and (not least or shape[axis])
    remedy += f"; that fits layout {other_layout}" if fits_other else ""
    return f"got x of shape {tuple(shape)}; layout {layout} wants {wanted}{remedy}"


def misfit(name: str, shape: Sequence[int], needed: Sequence[int]) -> str:
    """How the shape of an array differs from the one that is needed; empty if it does not."""
    found, wanted = tuple(shape), tuple(needed)
    return "" if found == wanted else f"got {name} of shape {found}; {wanted} is needed"


def unlike(name: str, dtype: str, expected: str, of: str = "x") -> str:
    """How the dtype of an array differs from that of x; empty if it does not."""
    return "" if dtype == expected else f"got {of} of {expected} and {name} of {dtype}; give both in one precision"


def counted(count: int, one: str, several: str = "") -> str:
    """`1 kernel`, `2 kernels`, `2 entries`. `several` is the plural, if it is not the singular with an s."""
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def spanned(values: Iterable[float], show: Callable[[float], str] = str) -> str:
    """`10`, or `2 to 10`; empty for no value. Two ends that are shown alike appear once."""
    found = sorted(set(values))
    ends = [show(found[0]), show(found[-1])] if found else []
    return " to ".join(dict.fromkeys(ends))
