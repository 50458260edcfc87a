"""Tables of a report."""

from dataclasses import replace

import pytest

from ksgen.bench import report, tables
from ksgen.bench.comparison import Results
from ksgen.bench.roster import OTHERS, OURS
from ksgen.bench.rows import ResultRow
from tests.support.bench_report import FOUR, lines
from tests.support.bench_rows import row

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


def test_the_papers_tables_with_the_papers_numbers() -> None:
    results = Results(FOUR, "float32", 25088)
    three = lines(tables.table3(results))
    assert three["ksgen faster than the paper's five"] == ("2", "50 %", "x1.60", "x1.10", "88 % (x1.39), Table 3")
    assert "ksgen faster than the expert's" not in three  # not measured
    five = lines(tables.table5(results))
    assert five["bsl: ksgen faster than min(bmm, einsum, bsr, dense, sparse)"][-1] == "88 % (x1.39), Table 5"
    assert five["bsf: ksgen faster than min(bmm, einsum, bsr, dense, sparse)"] == (
        "1",
        "0 %",
        "-",
        "x0.50",
        "20 % (x1.28), Table 5",
    )
    eight = tables.table8(results, "bsl")
    assert eight.columns == ("", OURS, "bmm", "einsum")
    assert lines(eight)[OURS] == ("", "50 % (x2.00)", "100 % (x8.00)")
    assert lines(tables.layouts(results))["all"] == ("3.2", "0.8", "2")
    errors = {line[1]: line[2:] for line in tables.errors(FOUR).rows}
    assert errors["dense"] == ("float32", "1", "5.0e-01", "1")
    assert tables.absent(FOUR).rows == (("sparse", "failed", "1", "no luck"),)


def test_a_result_with_nan_has_the_largest_error_of_its_contender() -> None:
    found = [row(error=1e-7), row("1,64,64,4", error=float("nan"))]
    for some in (found, found[::-1]):
        assert [line[3:] for line in tables.errors(some).rows] == [("2", "nan", "1")]


def test_every_contender_has_its_version_or_its_reason() -> None:
    found = [
        row(identity="ksgen 1 aa"),
        row("2,48,192,1", identity="ksgen 1 bb"),
        row("2,48,192,1", "onednn", identity="torch 2, oneDNN 3"),
        row("1,48,48,2", "onednn", identity="torch 2, oneDNN 3", status="unsupported", reason="bsl", median_us=None),
        row("1,48,48,2", "blr", status="unsupported", reason="processors", median_us=None),
        row("2,48,192,1", "blr", status="unsupported", reason="not installed", median_us=None),
        row("1,48,192,1", "blr", status="unsupported", reason="not installed", median_us=None),
        row("1,192,48,1", "blr", status="too slow", reason="a second", median_us=None),
    ]
    assert lines(tables.versions(found)) == {
        OURS: ("ksgen 1 aa; ksgen 1 bb", "2 of 2 rows", ""),
        "onednn": ("torch 2, oneDNN 3", "1 of 2 rows", "1 unsupported: bsl"),
        "blr": ("-", "0 of 4 rows", "3 unsupported: not installed; 1 too slow: a second"),
    }
    assert "### Contenders and their versions" in report.markdown(found)


def test_markdown_tables(rows: list[ResultRow]) -> None:
    text = report.markdown(rows)
    assert text.startswith("# Kronecker-sparse products: Abacus\n")
    for title in (
        "### Table 3, float16, batch 25088",
        "### Table 5, float16, batch 25088",
        "### Table 8, float16, batch 25088, batch-size-last",
        "## Energy",
        "### What predicts the gain",
    ):
        assert title in text
    widths = [
        [line.count(" | ") for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")
    ]
    assert all(len(set(counts)) <= 1 for counts in widths)


def test_numbers_have_three_digits_and_no_exponent() -> None:
    values = (None, 0.0123456, 999.4, 999.5, 999.96, 1000.0, 123456.7)
    assert list(map(tables.number, values)) == [tables.NONE, "0.0123", "999", "1000", "1000", "1000", "123457"]
    share = {
        "model": "ViT-H/14",
        "precision": "float32",
        "whole_us": 1.23456e6,
        "share": 0.5,
        "paper": 0.5,
        "doubt": "",
    }
    (line,) = tables.shares({"shares": [share], "batch": 128, "device": "abacus"}).rows
    assert line[2] == "1235"


def test_names_of_what_was_measured() -> None:
    assert tables.measured_names(FOUR, OTHERS) == "bmm, einsum and dense"
    assert tables.measured_names(FOUR, ["dense"]) == "dense"
    assert tables.measured_note(FOUR, ["sparse"]) == ""  # it failed
    assert tables.arithmetic_note(FOUR) == ""
    split = replace(FOUR[0], implementation="ksgen", precision="float32", arithmetic="tf32x3", status="ok")
    said = "In float32, ksgen may multiply in `tf32x3`, which launchers use only if asked."
    assert tables.arithmetic_note([*FOUR, split]) == said
    assert said in tables.overview([*FOUR, split]).note


def test_families_are_compared_with_each_other_and_with_pytorch() -> None:
    small = {"precision": "bfloat16", "arithmetic": "bfloat16"}
    rows = [row(pattern, "bmm", median_us=400.0, **small) for pattern in ("1,512,512,2", "1,4,4,512")]
    rows += [row(each.pattern, median_us=300.0, family="vector", **small) for each in rows]
    assert tables.families(Results(rows, "bfloat16", 25088)).rows == ()  # all is of one
    rows += [
        row("1,512,512,2", median_us=100.0, family="amx", share_of_floor=0.5, **small),
        row("1,4,4,512", median_us=400.0, family="amx", share_of_floor=0.3, **small),
        row("1,4,4,512", median_us=1.0, family="amx", error=0.5, **small),  # fast and wrong
    ]
    table = tables.families(Results(rows, "bfloat16", 25088))
    assert table.rows == (
        ("bsl", "vector, bfloat16", "2", "x1.33", "x1.33", "2", "x0.67", "x0.33", "-"),
        ("bsl", "amx, bfloat16", "2", "x2.00", "x1.00", "2", "x1.50", "x0.75", "40 %"),
    )
    assert table.title in report.markdown(rows)
