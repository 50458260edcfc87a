"""Series of blocks that end early, as tests do not ask how fast a kernel is: on a busy machine each would take its full time.

`python -m tests.support.short_series` is `python -m ksgen` with such series.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ksgen.cli import main
from ksgen.measure import trust

SERIES_S = 0.1


def shorten(set_attribute: Callable[[Any, str, Any], None], with_searches: bool) -> None:
    """Shorten the series of commands, and those of searches, whose import takes a quarter of a second."""
    set_attribute(trust, "MOST_SECONDS", SERIES_S)
    if with_searches:
        from ksgen.tuning import search

        set_attribute(search, "FIRST", replace(search.FIRST, seconds=SERIES_S))
        set_attribute(search, "FINAL", replace(search.FINAL, seconds=SERIES_S))


if __name__ == "__main__":
    shorten(setattr, with_searches="tune" in sys.argv)
    main()
