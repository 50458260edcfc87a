"""Reads users' values as numbers, and writes values and numbers in messages."""

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MOST_SHOWN = 400  # characters of a path


class cached_property(Generic[T]):  # noqa: N801 (named like Python's)
    """Python's `cached_property` without the lock of Python 3.11, which takes longer than most of what the cost model
    computes.

    Threads that meet at the first access compute the same value twice.
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


def listed(values: Any) -> tuple[Any, ...] | None:
    """Items of an iterable value as a tuple; None for any other value."""
    try:
        return tuple(values)
    except TypeError:
        return None


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


def counted(count: int, one: str, several: str = "") -> str:
    """`1 kernel`, `2 kernels`, `2 entries`. `several` is the plural, if it is not the singular with an s."""
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def spanned(values: Iterable[float], show: Callable[[float], str] = str) -> str:
    """`10`, or `2 to 10`; empty for no value. Two ends that are shown alike appear once."""
    found = sorted(set(values))
    ends = [show(found[0]), show(found[-1])] if found else []
    return " to ".join(dict.fromkeys(ends))
