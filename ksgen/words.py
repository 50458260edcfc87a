"""Numbers in words: so many of a thing, and from one number to another."""

from collections.abc import Callable, Iterable


def counted(count: int, one: str, several: str = "") -> str:
    """`1 kernel`, `2 kernels`, `2 entries`: what does not take an s is given as `several`."""
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def spanned(values: Iterable[float], show: Callable[[float], str] = str) -> str:
    """`10`, or `2 to 10`; empty for no value. Values that read the same are the same."""
    found = sorted(set(values))
    ends = [show(found[0]), show(found[-1])] if found else []
    return " to ".join(dict.fromkeys(ends))
