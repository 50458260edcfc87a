"""Keeps freed memory in the C library during measurements, so that no contender pays for getting pages."""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt, in glibc's malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """From now on, build large arrays from memory that was used before, as an application would. Linux with glibc only."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Return free memory to the system, so that it knows how much is free."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
