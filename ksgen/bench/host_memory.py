"""What the C library does with memory that is freed: kept while something is measured, so that nobody's time is that of getting pages."""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt, in glibc's malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """From now on large arrays are made of memory that was used before, as an application's own would be. Linux with glibc alone."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """To the system, which then knows how much is free."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
