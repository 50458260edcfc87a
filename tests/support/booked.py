"""Books the processor seconds of this process, and of the programs that it starts, under the causes that they have."""

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

OWN = "tests and their kernels on the host"
EMULATION = "emulation"
# the stand-in driver starts the emulator itself
PROGRAMS = EMULATION if "KSGEN_DRIVER_REGISTRY" in os.environ else "other programs"

seconds: Counter[str] = Counter()
calls: Counter[str] = Counter()
_seen: dict[str, float] = {}  # what is booked already of this process, and of its programs that ended


@contextmanager
def booked(cause: str, own: bool = False) -> Iterator[None]:
    """Books the programs that end meanwhile, or this process itself.

    Of threads that do so at once, only the sum is exact.
    """
    flush()
    try:
        yield
    finally:
        flush(cause if own else OWN, PROGRAMS if own else cause)
        calls[cause] += 1


def flush(own: str = OWN, programs: str = PROGRAMS) -> None:
    """Books seconds that are not booked yet."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for cause, now, kind in ((own, time.process_time(), "own"), (programs, used.ru_utime + used.ru_stime, "programs")):
        seconds[cause] += now - _seen.get(kind, 0.0)
        _seen[kind] = now
