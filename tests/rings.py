"""Two rings of tests.

The first ring proves each promise once: `make test` and `make test-torch` run it. The second ring holds the other
cases, and `make test-all` runs both. Two markers decide:

* `exhaustive`: a test with many cases. The first ring takes a few that together name each family, and each precision,
  layout, pattern or other word that several cases name.
* `second`: a test or a case of the second ring alone.

CI runs the first ring and one tenth of the second (`--tenth`). `.ci/tenth` names the tenth; each landing advances it.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import pytest

from ksgen.families import FAMILIES

TENTHS = 10
Case = TypeVar("Case", bound=Hashable)


def function_of(test: str) -> str:
    """A test's name without its case."""
    return test.partition("[")[0]


def beyond_sample(tests: Sequence[str]) -> set[str]:
    """The cases that the first ring does not need to have each family, and each word that several cases name.

    A function's first case is always kept.
    """
    uses = Counter((function_of(test), word) for test in tests for word in _words(test))
    cases: defaultdict[str, dict[str, set[str]]] = defaultdict(dict)
    for test in tests:
        function = function_of(test)
        first = set() if function in cases else {"a function's first case"}
        cases[function][test] = first | {word for word in _words(test) if uses[function, word] > 1 or word in FAMILIES}
    return set(tests) - {test for words in cases.values() for test in covering(words)}


def covering(values: Mapping[Case, Set[object]], is_usable: Callable[[Case], bool] = lambda _: True) -> Iterator[Case]:
    """Usable cases that together have all values: again and again, the case with the most of those that are missing."""
    left, missing = dict(values), set().union(*values.values())
    while left:
        case = max(left, key=lambda each: len(left[each] & missing))
        own = left.pop(case)
        if not own & missing:
            return
        if is_usable(case):
            missing -= own
            yield case


def _words(test: str) -> set[str]:
    return set(re.findall(r"[\w.]+", test.partition("[")[2]))


def second_ring(items: Sequence[pytest.Item]) -> set[str]:
    """The names of the items that the first ring leaves out."""
    exhaustive = [item.nodeid for item in items if item.get_closest_marker("exhaustive")]
    return beyond_sample(exhaustive) | {item.nodeid for item in items if item.get_closest_marker("second")}


def tenth_of(test: str) -> int:
    """The tenth that holds a test: the same in every run."""
    return int(hashlib.sha256(test.encode()).hexdigest(), 16) % TENTHS
