"""Settings that keep freed memory in the C library during measurements, so that no contender pays for new pages."""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt, in glibc's malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Allocate large arrays from freed memory from now on, like a long-running application. Linux with glibc only."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Return free memory to the system, so that its report of available memory is right."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
