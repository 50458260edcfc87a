"""What the commands of `ksgen bench` share: durations, and which patterns."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.bench.rows import write_csv
from ksgen.commands.bench_common import Done, Selection, patterns_named, print_results
from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Pattern
from tests.support.bench_rows import row
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")


def test_large_patterns_can_be_left_out() -> None:
    few = patterns_named(None, 5, most_weights=9000)
    assert len(few) == 5
    assert all(pattern.weight_count <= 9000 for pattern in few)
    assert patterns_named("1,8,8,2 2,4,8,1", None, most_weights=100) == [Pattern(2, 4, 8, 1)]


@pytest.mark.parametrize(("limit", "jobs"), [(float("inf"), 2), (1e308, 2), (1e-3, 1), (float("nan"), 0)])
def test_any_limit_of_operations_selects_patterns(limit: float, jobs: int) -> None:
    selection = Selection(
        Path("paper.jsonl"), None, limit, "1,8,8,2 4,8,16,8", 1024, ("float32",), ("bsf",), None, None, None, None, 0
    )
    device: Any = SimpleNamespace()
    if jobs:
        assert len(selection.jobs(device)) == jobs
    else:
        with pytest.raises(SpecError, match="--most-gflop nan at batch 1024: every pattern needs more"):
            selection.jobs(device)


def test_rough_times_are_not_counted_as_unreliable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.csv"
    doubt = "the median is uncertain by 9%"
    write_csv([row(), row(doubt=doubt, uncertainty=0.09), row(doubt=doubt, uncertainty=0.9)], log)
    print_results(Done("abacus", 3, 3, (log,)), as_json=True, tables=lambda _: ())
    assert json.loads(capsys.readouterr().out)["in_doubt"] == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("8m", 480), ("1.5h", 5400), ("1h30m", 5400), (".5s", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    from ksgen.commands.bench_common import duration

    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "8 m", "8m9", "-1s", "1d", "nan"])
def test_what_is_no_duration(text: str) -> None:
    from ksgen.commands.bench_common import duration

    with pytest.raises(KsgenError, match=r"time '.*'; accepted: 90s, 8m, 1h30m"):
        duration(text)


def test_which_patterns() -> None:
    from ksgen.commands.bench_common import patterns_named
    from ksgen.spec import paper_patterns, stratified

    assert patterns_named(None, 7) == stratified(7)
    assert patterns_named(None, 60) == stratified(60)
    assert max(pattern.d for pattern in patterns_named(None, None, most_d=64)) == 64
    assert set(patterns_named("paper", None)) == set(paper_patterns())
    assert patterns_named("published", None)[0] == Pattern(1, 48, 48, 16)
    assert len(patterns_named("specs/vit.yaml", None)) == 6
    assert patterns_named("1,2,3,4  4,3,2,1", 1) == [Pattern(1, 2, 3, 4)]
