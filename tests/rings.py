"""Two rings of tests.

The first ring proves each promise once: `make test` and `make test-torch` run it. The second ring holds the other
cases, and `make test-all` runs both. Two markers decide:

* `exhaustive`: a test with many cases. The first ring takes those in which a word occurs first: each family, and each
  precision, layout, pattern or other word that several cases name.
* `second`: a test or a case of the second ring alone.

CI runs the first ring and one tenth of the second (`--tenth`). `.ci/tenth` names the tenth; each landing advances it.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from ksgen.families import FAMILIES

TENTHS = 10


def function_of(test: str) -> str:
    """A test's name without its case."""
    return test.partition("[")[0]


def beyond_sample(tests: Sequence[str]) -> set[str]:
    """The cases in which no family, and no other word of several cases, occurs first.

    A function's first case is always kept.
    """
    uses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for test in tests:
        uses[function_of(test)].update(_words(test))
    seen: dict[str, set[str]] = {}
    beyond = set()
    for test in tests:
        function = function_of(test)
        words = {word for word in _words(test) if uses[function][word] > 1 or word in FAMILIES}
        if function in seen and words <= seen[function]:
            beyond.add(test)
        seen.setdefault(function, set()).update(words)
    return beyond


def _words(test: str) -> set[str]:
    return set(re.findall(r"[\w.]+", test.partition("[")[2]))


def second_ring(items: Sequence[pytest.Item]) -> set[str]:
    """The names of the items that the first ring leaves out."""
    exhaustive = [item.nodeid for item in items if item.get_closest_marker("exhaustive")]
    return beyond_sample(exhaustive) | {item.nodeid for item in items if item.get_closest_marker("second")}


def tenth_of(test: str) -> int:
    """The tenth that holds a test: the same in every run."""
    return int(hashlib.sha256(test.encode()).hexdigest(), 16) % TENTHS
