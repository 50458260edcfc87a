"""When sparse products pay: by density, by the number of products after a conversion, and by rules that predict it."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest

from benchmarks.readme_figures import agreed, agreement
from ksgen.bench import report
from ksgen.bench.comparison import Results
from ksgen.bench.payoff import (
    LEAST_PATTERNS,
    PAPERS,
    RULES,
    Judged,
    _threshold,
    by_density,
    conclusion,
    conversions,
    crossing,
    judge,
)
from ksgen.bench.roster import OTHERS, OURS
from ksgen.bench.rows import ResultRow, read_rows
from ksgen.bench.tables import NONE
from ksgen.measure.gains import BATCH_ON_PROCESSORS, ON_PROCESSORS, gain_on_processors
from ksgen.pattern import Pattern
from ksgen.spec import stratified
from tests.support.bench_rows import row

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


def against_dense(dense_us: Any, count: int = 60, **values: Any) -> list[ResultRow]:
    """Rows of ours, which take 100 us, and of a dense product."""
    found = []
    for pattern in stratified(count):
        found += [row(str(pattern), OURS, **values)]
        found += [row(str(pattern), "dense", median_us=dense_us(pattern), **values)]
    return found


# ---- density


def test_the_density_at_which_ours_stops_paying_is_found() -> None:
    rows = against_dense(lambda pattern: 100 * (0.25 / pattern.density) ** 0.8)
    (line,) = by_density(rows).rows
    assert line[:4] == ("25088", "float32", "bsl", "time")
    assert line[-1] == "25 %"
    above = [(0.25 / each.density) ** 0.8 for each in stratified(60) if each.density > 1 / 4]
    assert line[4].startswith("x")
    assert line[4].endswith(f"x{min(above):.2f} ({len(above)})")
    assert sum(int(cell.partition("(")[2].rstrip(")")) for cell in line[4:8]) == 60


def test_a_density_of_nearly_all_has_no_exponent() -> None:
    (line,) = by_density(against_dense(lambda pattern: 99.7 / pattern.density)).rows
    assert line[-1] == "100 %"


def test_each_density_is_in_its_class_and_a_bound_in_the_lower_one() -> None:
    rows = []
    for pattern, us in (("1,8,8,3", 150.0), ("2,8,8,2", 400.0), ("4,8,8,4", 800.0), ("1,8,8,64", 900.0)):
        rows += [row(pattern), row(pattern, "dense", median_us=us)]
    (line,) = by_density(rows).rows
    assert line[4:8] == ("x1.50, x1.50 (1)", "x4.00, x4.00 (1)", "x8.00, x8.00 (1)", "x9.00, x9.00 (1)")


def test_a_few_wrong_times_do_not_move_the_crossing() -> None:
    pairs = [(Pattern(1, 8, 8, d), d / 8) for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    assert crossing(pairs) == pytest.approx(1 / 8)
    pairs[0], pairs[-1] = (pairs[0][0], 1000.0), (pairs[-1][0], 0.001)
    assert crossing(pairs) == pytest.approx(1 / 8, rel=0.3)


def test_without_a_slope_there_is_no_crossing() -> None:
    assert crossing([(Pattern(1, 8, 8, 2), 3.0), (Pattern(2, 4, 8, 1), 2.0)]) is None  # equal densities
    assert crossing([(Pattern(1, 8, 8, d), 1 / d) for d in (1, 2, 4)]) is None  # the ratio grows with the density
    (line,) = by_density(against_dense(lambda pattern: 300 / pattern.density)).rows
    assert line[-1] == "any density"


def test_without_a_dense_product_its_floor_counts() -> None:
    values = {"ceiling_flop_per_s": 1e12, "ceiling_byte_per_s": 1e11, "batch": 1000}
    rows = [row("1,100,100,4", **values), row("1,100,100,4", "bmm", median_us=500.0, **values)]
    rows += [row("1,100,100,4", arithmetic="tf32x3", median_us=80.0, **values | {"ceiling_flop_per_s": 9e12})]
    (line,) = by_density(rows).rows
    assert line[3] == "floor"
    assert line[5] == "x4.00, x4.00 (1)"  # 2 * 1000 * 400 * 400 operations take 320 us
    (line,) = by_density([replace(each, ceiling_byte_per_s=2.4e9) for each in rows]).rows
    assert line[5] == "x20.00, x20.00 (1)"  # 4 * (1000 * 800 + 400 * 400) bytes take 1600 us
    assert by_density([replace(each, ceiling_flop_per_s=None) for each in rows]).rows == ()
    assert by_density([replace(each, precision="float8") for each in rows]).rows == ()  # of another version


# ---- conversion


def converted() -> list[ResultRow]:
    times = {OURS: (10.0, 40.0), "bmm": (40.0, 20.0), "sparse": (90.0, 1000.0), "einsum": (50.0, 0.0)}
    rows = [row("1,8,8,2", name, median_us=us, conversion_us=own) for name, (us, own) in times.items()]
    return [*rows, row("1,8,8,2", "layer", median_us=12.0)]


def test_a_conversion_stands_next_to_the_time_and_is_paid_after_some_products() -> None:
    table = conversions(Results(converted(), "float32", 25088))
    assert {line[1]: line[2:] for line in table.rows} == {
        OURS: ("1", "0.01", "0.04", "4", "1"),
        "bmm": ("1", "0.04", "0.02", "0.5", "2"),
        "sparse": ("1", "0.09", "1", "11.1", "never"),
        "einsum": ("1", "0.05", NONE, NONE, NONE),
        "layer": ("1", "0.012", NONE, NONE, NONE),
    }


def test_rows_of_older_files_have_no_conversions() -> None:
    old = [replace(each, conversion_us=None) for each in converted()]
    assert conversions(Results(old, "float32", 25088)).rows == ()
    assert "Conversion of weights" not in report.markdown(old)


def test_the_report_shows_both_for_products_and_layers() -> None:
    layers = [replace(each, layer="up") for each in converted()]
    rows = [*converted(), *layers, row("1,8,8,2", "dense", median_us=80.0)]
    text, page = report.markdown(rows), report.page(rows)
    for title, count in (("Speed against density", 1), ("Conversion of weights, float32, batch 25088", 2)):
        assert (text.count(f"### {title}"), page.count(title)) == (count, count)
    assert text.count("### Conversion of weights, float32, batch 25088, batch-size-last\n") == 1


def test_a_table_of_conversions_names_one_layout_and_groups() -> None:
    results = Results(converted(), "float32", 25088)
    assert conversions(results).title == "Conversion of weights, float32, batch 25088"
    title = "Conversion of weights, float32, batch 25088, batch-size-last, groups"
    assert conversions(results, "bsl", is_group=True).title == title


def ratios_by(score: Any, count: int = 60) -> list[tuple[Pattern, float]]:
    return [(pattern, score(pattern)) for pattern in stratified(count)]


def test_the_rule_that_made_the_results_is_found() -> None:
    judged = judge(ratios_by(lambda pattern: 0.5 + 30 * pattern.d * pattern.rewrite_ratio))
    assert judged[0].rule == "d (b+c)/(bc)"
    assert judged[0].correlation == pytest.approx(1.0)
    assert judged[0].accuracy > 0.95
    better = conclusion(judged, 60, is_gpu=True)
    assert better.startswith("d (b+c)/(bc) predicts better than (b+c)/(bc): rank correlation 1.00 against 0.")
    same = judge(ratios_by(lambda pattern: 0.5 + 30 * pattern.rewrite_ratio))
    assert conclusion(same, 60, is_gpu=True) == "(b+c)/(bc) predicts as well as any rule here: rank correlation 1.00."


def test_no_claim_with_few_patterns_or_by_one_kind_of_processors() -> None:
    judged = judge(ratios_by(lambda pattern: pattern.d))
    for is_gpu in (False, True):
        assert conclusion(judged, 29, is_gpu=is_gpu) == "No claim: 29 patterns, and at least 30 are needed."
    on_gpu, here = (conclusion(judged, 60, is_gpu=is_gpu) for is_gpu in (True, False))
    assert on_gpu.startswith("d predicts better than (b+c)/(bc): rank correlation 1.00 against ")
    assert here == f"{on_gpu} It counts if 2 kinds of processors agree."


def test_a_rule_must_be_better_on_each_half_of_the_patterns() -> None:
    """d made the results of every other pattern, the paper's rule the others: over all of them d is better."""
    halves = [
        (pattern, 9.0 * pattern.d if place % 2 else 1 + pattern.rewrite_ratio)
        for place, (pattern, _) in enumerate(ratios_by(lambda pattern: 0.0))
    ]
    judged = judge(halves)
    by_rule = {each.rule: each for each in judged}
    assert by_rule["d"].correlation > by_rule[PAPERS].correlation + 0.05
    assert not any(each.is_better for each in judged)
    found = conclusion(judged, 60, is_gpu=True)
    assert found == f"No claim: {judged[0].rule} is not better than (b+c)/(bc) by 0.05 on each half of the patterns."


def test_two_kinds_of_processors_must_agree() -> None:
    def kind(**margins: float) -> list[Judged]:
        return [Judged(rule, 0.5, None, margins.get(rule, 0.0)) for rule in ("d", "c", PAPERS)]

    assert agreed([kind(d=0.3), kind(c=0.3)]) is None
    assert agreed([kind(d=0.3), kind(d=0.049)]) is None
    assert agreed([kind(d=0.3, c=0.1), kind(d=0.05, c=0.1), kind()]) == "d"  # the greater margin, summed


def test_the_rule_for_processors_is_that_of_the_results() -> None:
    """Classes of its values have the gains that `ksgen show` prints, on every kind with enough patterns to judge it."""
    files = (Path(__file__).parents[2] / "benchmarks" / "results").glob("*-cores/paper.csv")
    kinds = {path.parent.name: read_rows(path) for path in files}
    found = {cells[:3]: cells[5] for cells in agreement(kinds).rows if cells[5] != "-"}
    assert found == {(str(BATCH_ON_PROCESSORS), *job): rule for job, (rule, _) in ON_PROCESSORS.items()}
    for (precision, layout), (rule, classes) in ON_PROCESSORS.items():
        found_ratios = [
            Results(rows, precision, BATCH_ON_PROCESSORS).ratios(OURS, OTHERS, layout) for rows in kinds.values()
        ]
        judged = [ratios for ratios in found_ratios if len(ratios) >= LEAST_PATTERNS]
        assert len(judged) == 3
        for ratios in judged:
            by_class: dict[float, list[float]] = {}
            for pattern, ratio in ratios:
                named = gain_on_processors(pattern, precision, layout)
                assert named is not None
                assert named.value == RULES[rule](pattern)
                by_class.setdefault(named.gain, []).append(ratio)
            assert {gain for _, gain in classes} == set(by_class)
            for gain, some in by_class.items():
                assert geometric_mean(some) == pytest.approx(gain, rel=0.15)
    assert gain_on_processors(Pattern(1, 64, 64, 16), "float32", "bsl") is None


def test_processors_agree_per_layout_and_only_with_enough_patterns() -> None:
    def rows(count: int, layout: str, sign: int) -> list[Any]:
        found = []
        for pattern in stratified(count):
            gain = (1 + pattern.d) ** sign if layout == "bsf" else 1 + pattern.rewrite_ratio
            found += [row(str(pattern), OURS, layout=layout), row(str(pattern), "bmm", layout=layout, median_us=gain)]
        return found

    kinds = {name: [*rows(count, "bsf", 1), *rows(60, "bsl", 1)] for name, count in (("a", 60), ("b", 30), ("c", 29))}
    bsf, bsl = agreement(kinds).rows
    assert (bsf[:4], bsf[5:]) == (("25088", "float32", "bsf", "2"), ("d", "1.00"))
    assert (bsl[:4], bsl[4:]) == (("25088", "float32", "bsl", "3"), ("1.00", "-", "-"))
    kinds["b"] = rows(60, "bsf", -1)
    assert agreement(kinds).rows[0][5] == "-"


def test_where_ours_always_wins_nothing_is_predicted() -> None:
    for sign in (1, -1):
        judged = judge(ratios_by(lambda pattern, sign=sign: (1 + pattern.rewrite_ratio) ** sign))
        assert {each.accuracy for each in judged} == {None}
    rows = [
        row(str(pattern), name, median_us=us) for pattern in stratified(3) for name, us in ((OURS, 10.0), ("bmm", 20.0))
    ]
    text = report.markdown(rows)
    assert "Ours wins in 3 of 3 patterns: there are no wins and losses to tell apart." in text
    assert re.search(r"\| \(b\+c\)/\(bc\) \| [\d.-]+ \| - \|", text)


def test_a_rule_is_judged_on_patterns_that_its_threshold_did_not_see() -> None:
    """One pattern wins and its score is the largest: without it nothing tells the threshold."""
    results = [(Pattern(1, 48, 48, 128), 2.0), *((Pattern(1, 48, 48, d), 0.5) for d in (1, 2, 3))]
    judged = next(each for each in judge(results) if each.rule == "d")
    assert judged.accuracy == 0.75
    scores = [pattern.d for pattern, _ in results]
    assert 3 < _threshold(np.array(scores), np.array([ratio > 1 for _, ratio in results])) < 128
