"""The tests that `make quick` leaves out are tests, and of each with several cases one is run."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import slow

ROOT = Path(__file__).parents[1]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.emit.test_a" name="test_long[x]" time="0.75"/>
<testcase classname="tests.emit.test_a" name="test_long[y]" time="0.25"/>
<testcase classname="tests.test_b" name="test_short" time="0.9"/>
<testcase classname="tests.test_b" name="test_alone" time="30"/>
<testcase classname="tests.test_c" name="test_known[x]" time="0"><skipped/></testcase>
<testcase classname="tests.test_c" name="test_unknown" time="0"><skipped/></testcase>
</testsuite></testsuites>"""
SLOW = frozenset({"tests/emit/test_a.py::test_long", "tests/test_b.py::test_alone"})


def test_the_list_names_tests_once_each() -> None:
    lines = slow.LIST.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, _, function = line.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), f"{line}: gone; make test-times writes the list"


def test_of_several_cases_the_first_is_run() -> None:
    tests = [
        *(f"tests/emit/test_a.py::test_long[{case}]" for case in "xyz"),
        "tests/test_b.py::test_short",
        "tests/test_b.py::test_alone",
        "tests/test_c.py::test_long[x]",
    ]
    assert list(slow.left_out(tests, SLOW)) == [*tests[1:3], tests[4]]


def test_a_sample_has_each_word_that_several_cases_name_and_the_same_cases_each_time() -> None:
    words = product(("float16", "float32"), ("bsf", "bsl"), (f"size{number}" for number in range(50)))
    cases = [f"tests/emit/test_a.py::test_long[{'-'.join(each)}]" for each in words]
    tests = [*cases, "tests/test_b.py::test_alone", "tests/test_b.py::test_short[x]"]
    left_out = set(slow.beyond_sample(tests, SLOW, 5))
    kept = [test for test in tests if test not in left_out]
    assert set(slow.beyond_sample(tests, SLOW, 1)) == set()
    assert tests[-2:] == kept[-2:]
    assert 50 <= len(kept) <= 90, "a fifth, and a size each"
    for word in ("float16", "float32", "bsf", "bsl", *(f"size{number}]" for number in range(50))):
        assert any(word in test for test in kept), word
    assert [test for test in kept if test in set(tests) - set(slow.beyond_sample(tests, SLOW, 5))] == kept


def test_pytest_collects_a_sample_where_asked() -> None:
    def collected(*options: str) -> list[int]:
        """How many of products by tensor cores, and of those that hold any pattern of a processor's."""
        files = ("tests/families/test_mma.py", "tests/families/test_vector.py")
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files, *options]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [int(said.partition(f"{file}: ")[2].split()[0]) for file in files]

    wanted = ("-k", "test_mma or patterns_batches_and_constants or pattern_batch_and_constants")
    (some, drawn), (all_there_are, all_drawn) = collected(*wanted, "--every", "5"), collected(*wanted)
    assert some < all_there_are * 3 // 4
    assert (drawn, all_drawn) == (1, 2), "what is marked `many` is for all cases alone"


def test_the_list_is_written_from_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "LIST", tmp_path / "slow.txt")
    slow.LIST.write_text("tests/test_c.py::test_known\ntests/test_d.py::test_gone\ntests/test_b.py::test_short\n", encoding="utf-8")
    (tmp_path / "report.xml").write_text(REPORT, encoding="utf-8")
    done = CliRunner().invoke(slow.main, [str(tmp_path / "report.xml")])
    assert done.output.startswith("3 slow test functions"), done.output
    assert slow.listed() == {*SLOW, "tests/test_c.py::test_known"}
