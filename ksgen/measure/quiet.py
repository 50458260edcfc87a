"""Keeps this process from disturbing its own measurements on a processor.

Contenders are the implementations that a benchmark compares. A pause lasts until threads of the previous contender
sleep. Settings keep freed memory in the C library, so that no contender pays for new pages.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import get_native_id
from time import process_time, sleep

NAP_S, MOST_NAPS = 2e-3, 125  # a quarter of a second: OpenBLAS's threads spin for 2^28 cycles, 0.1 s and more
AWAKE_SHARE = 0.1  # largest share of a nap that threads may work
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt, in glibc's malloc.h
_NEVER = 2**31 - 1
_TASKS = Path("/proc/self/task")


def rest() -> None:
    """Wait until this process's other threads sleep.

    After an operation, threads of PyTorch and OpenCL spin for milliseconds, NumPy's for a tenth of a second. They wait
    for the next operation, and take cores from whatever runs then.
    """
    for _ in range(MOST_NAPS):
        spent = process_time()
        sleep(NAP_S)
        states = list(_states())
        # Processor time decides only if the system reports no states of threads: Linux adds other threads' time only
        # at ticks, which are longer than a nap.
        if "R" not in states if states else process_time() - spent < AWAKE_SHARE * NAP_S:
            return


def _states() -> Iterator[str]:
    """Yield the scheduler's letter of each thread, with S for this one; nothing if the system does not report them."""
    with suppress(OSError):
        for number in os.listdir(_TASKS):
            with suppress(OSError):  # the thread has just ended
                state = (_TASKS / number / "stat").read_text().rpartition(")")[2].split()[0]
                yield "S" if int(number) == get_native_id() else state


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
