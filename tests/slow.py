"""Which tests are slow, and which of their cases are run: `python -m tests.slow REPORT` writes the list, from the JUnit report of a run
of all tests.

`slow.txt` names the test functions that took SECONDS or more, all their cases together. Of such a function with several cases, `make quick`
runs the first, and `make test` a sample (`beyond_sample`); `make test-all` runs all. What is marked `slow` by hand is left out of
`make quick` besides.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import click

SECONDS = 1.0
LIST = Path(__file__).with_name("slow.txt")


def function_of(test: str) -> str:
    """A test's name without its case."""
    return test.partition("[")[0]


def listed() -> frozenset[str]:
    return frozenset(LIST.read_text(encoding="utf-8").split())


def left_out(tests: Iterable[str], slow: frozenset[str]) -> Iterator[str]:
    """Of the tests, named as pytest names them and in its order, those that are left out."""
    seen = set()
    for test in tests:
        function = function_of(test)
        if function in slow and (test == function or function in seen):
            yield test
        seen.add(function)


def beyond_sample(tests: Sequence[str], slow: frozenset[str], every: int) -> Iterator[str]:
    """Of the tests, those that a sample leaves out. It has one in `every` case of a slow function, the same ones each time, and besides
    the first case that has a word: each precision, layout or pattern that several cases name.
    """
    cases = [test for test in tests if "[" in test and function_of(test) in slow]
    uses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for test in cases:
        uses[function_of(test)].update(_words(test))
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for test in cases:
        function = function_of(test)
        new = {word for word in _words(test) if uses[function][word] > 1} - seen[function]
        seen[function] |= new
        if not new and int(hashlib.sha256(test.encode()).hexdigest(), 16) % every:
            yield test


def _words(test: str) -> set[str]:
    return set(re.findall(r"[\w.]+", test.partition("[")[2]))


def slow_ones(report: str, known: frozenset[str]) -> list[str]:
    """The functions of a JUnit report that are slow; of those that were skipped whole, the ones that are known to be."""
    seconds: Counter[str] = Counter()
    run = set()
    for case in ElementTree.fromstring(report).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/")
        function = function_of(f"{path}.py::{case.attrib['name']}")
        seconds[function] += float(case.attrib["time"])
        if case.find("skipped") is None:
            run.add(function)
    return sorted(each for each, taken in seconds.items() if (taken >= SECONDS if each in run else each in known))


@click.command()
@click.argument("report", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(report: Path) -> None:
    """Write the list of slow tests."""
    found = slow_ones(report.read_text(encoding="utf-8"), listed())
    LIST.write_text("".join(f"{each}\n" for each in found), encoding="utf-8")
    click.echo(f"{len(found)} slow test functions, in {LIST}")


if __name__ == "__main__":
    main()
