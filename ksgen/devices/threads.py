"""How many of a processor's cores kernels take: what `KSGEN_THREADS` says, else as many as PyTorch is told to take, else all."""

import os
import sys
from functools import cache

from ksgen.errors import DeviceError
from ksgen.values import excerpt


def groups_for(grid: int, cores: int) -> int:
    """Work groups of a launch whose groups share out the work among them: no more than threads, where these are fewer than cores."""
    threads = wanted_threads()
    return grid if threads is None or threads >= cores else min(grid, threads)


def wanted_threads() -> int | None:
    """None: all there are."""
    if number := threads_of_environment():
        return number
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


@cache
def threads_of_environment() -> int | None:
    """What the environment said when it was first asked: to ask at each launch takes as long as the smallest of them does."""
    given = os.environ.get("KSGEN_THREADS")
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and 0 < int(given) < 2**16):
        raise DeviceError(f"KSGEN_THREADS={excerpt(given)}; accepted: a whole number from 1 up")
    return int(given)
