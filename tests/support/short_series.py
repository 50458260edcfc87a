"""Series of blocks that end early, and probes of a processor that copy and multiply little. Tests do not ask how fast a
kernel is: on a busy machine each series would take its full time, and each probe half a gigabyte of memory.

`python -m tests.support.short_series` is `python -m ksgen` with them. `tests.support.short_probes` is for the children
of searches.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ksgen.measure import trust

SERIES_S = 0.1


def shorten(
    set_attribute: Callable[[Any, str, Any], None],
    with_probes: bool = True,
    with_searches: bool = True,
    with_forks: bool = False,
) -> None:
    """Shorten the series of commands. Importing what probes and searches need takes a quarter of a second each.

    With forks, so does starting a search's children (`tests/support/forked.py`).
    """
    set_attribute(trust, "MOST_SECONDS", SERIES_S)
    if with_probes:
        from ksgen.measure import roofline

        set_attribute(roofline, "PROCESSOR_COPIED_BYTES", 2**24)
        set_attribute(roofline, "PROCESSOR_ROUNDS", 2**11)
    if with_searches:
        from ksgen.tuning import engine, search, tuner

        for module, runs in ((search, "FIRST"), (search, "FINAL"), (tuner, "NOISE_RUNS")):
            set_attribute(module, runs, replace(getattr(module, runs), seconds=SERIES_S))
        # one child that compiles: starting one takes longer than compiling
        set_attribute(engine, "usable_cores", lambda: 1)
        worker = _forked() if with_forks else engine.Worker
        set_attribute(
            engine,
            "Worker",
            lambda device, preload, limit_s: worker(device, (*preload, "tests.support.short_probes"), limit_s),
        )


def _forked() -> Any:
    from tests.support.forked import ForkedWorker

    return ForkedWorker


if __name__ == "__main__":
    from ksgen.cli import main

    shorten(setattr, with_probes=not {"run", "tune", "bench"}.isdisjoint(sys.argv), with_searches="tune" in sys.argv)
    main()
