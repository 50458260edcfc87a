"""Number of processor cores that kernels use: `KSGEN_THREADS`, else PyTorch's number of threads, else all cores."""

import os
import sys
from functools import cache

from ksgen.errors import DeviceError
from ksgen.values import excerpt


def groups_for(grid: int, cores: int) -> int:
    """Number of work groups of a launch that distributes the work itself: at most the threads."""
    threads = wanted_threads()
    return grid if threads is None or threads >= cores else min(grid, threads)


def wanted_threads() -> int | None:
    """Number of threads to use; None for all cores."""
    if number := threads_of_environment():
        return number
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


@cache
def threads_of_environment() -> int | None:
    """Value of the environment at its first use, cached because reading it costs as much as the smallest launch."""
    given = os.environ.get("KSGEN_THREADS")
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and 0 < int(given) < 2**16):
        raise DeviceError(f"KSGEN_THREADS={excerpt(given)}; accepted: a whole number from 1 up")
    return int(given)
