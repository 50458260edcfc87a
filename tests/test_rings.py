"""The first ring of tests names every word of a test with many cases; the second ring is the rest, in ten parts."""

import subprocess
import sys
from itertools import product
from pathlib import Path

from tests.rings import TENTHS, beyond_sample, tenth_of

ROOT = Path(__file__).parents[1]
TENTH = ROOT / ".ci" / "tenth"


def test_a_sample_has_each_word_that_several_cases_name() -> None:
    words = product(("float16", "float32"), ("bsf", "bsl"), (f"size{number}" for number in range(50)))
    tests = [f"tests/emit/test_a.py::test_long[{'-'.join(each)}]" for each in words]
    kept = [test for test in tests if test not in beyond_sample(tests)]
    assert len(kept) == 50, "one case for each size, and among these each precision and each layout"
    for word in ("float16", "float32", "bsf", "bsl", *(f"size{number}]" for number in range(50))):
        assert any(word in test for test in kept), word


def test_functions_are_sampled_apart_and_keep_their_first_case() -> None:
    tests = [
        "a.py::test_a[x]",
        "a.py::test_b[x]",
        "a.py::test_b[y]",
        "a.py::test_c[1-x]",
        "a.py::test_c[2-x]",
        "b.py::test_c[1-x]",
    ]
    assert beyond_sample(tests) == {"a.py::test_b[y]", "a.py::test_c[2-x]"}


def test_the_first_ring_has_every_family() -> None:
    tests = [f"a.py::test_a[{each}]" for each in ("simt", "vector", "x", "y")]
    assert beyond_sample(tests) == {tests[2], tests[3]}


def test_ten_parts_are_the_whole() -> None:
    found = [tenth_of(f"a.py::test_a[{number}]") for number in range(200)]
    assert set(found) == set(range(TENTHS))
    assert found == [tenth_of(f"a.py::test_a[{number}]") for number in range(200)]


def test_the_committed_counter_is_a_number() -> None:
    assert TENTH.read_text(encoding="utf-8").strip().isdecimal()


def collected(*runs: tuple[str, ...]) -> list[set[str]]:
    """The tests that each run collects of two files, in one process, which imports them once."""
    files = ("tests/families/test_mma.py", "tests/families/test_vector.py")
    commands = [
        ["--collect-only", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *files, *options] for options in runs
    ]
    code = f"import pytest\nfor command in {commands}:\n    print('run', int(pytest.main(command)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    *outputs, _ = done.stdout.split("run 0\n")
    assert len(outputs) == len(runs), done.stdout + done.stderr
    return [{line for line in output.splitlines() if "::" in line} for output in outputs]


def test_pytest_collects_a_ring() -> None:
    runs = (), ("--ring=first",), ("--ring=second",), ("--ring=second", "--tenth=3"), ("--tenth=13",)
    every, first, second, tenth, of_ci = collected(*runs)
    assert first | second == every
    assert not first & second
    assert len(first) < len(every) * 3 // 4
    assert tenth == {test for test in second if tenth_of(test) == 3}
    assert of_ci == first | tenth
    assert "tests/families/test_vector.py::test_many_patterns_batches_and_constants" in second
