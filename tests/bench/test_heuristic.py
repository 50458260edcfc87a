"""The rule that predicts a gain: found again, judged on patterns that it did not see, claimed only with a GPU."""

import re
from typing import Any

import pytest

from ksgen.bench import report
from ksgen.bench.heuristic import conclusion, judge
from ksgen.bench.roster import OURS
from ksgen.pattern import Pattern
from ksgen.spec import stratified
from tests.support.bench_rows import row

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


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


def test_no_claim_without_a_gpu_or_with_few_patterns() -> None:
    judged = judge(ratios_by(lambda pattern: pattern.d))
    assert conclusion(judged, 60, is_gpu=False) == "No claim: these are not a GPU's results."
    assert conclusion(judged, 29, is_gpu=True) == "No claim: 29 patterns, and at least 30 are needed."


def test_where_ours_always_wins_nothing_is_foretold() -> None:
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
    assert 3 < judged.threshold < 128
