"""The rule that predicts a gain: found again, judged on patterns that it did not see, claimed by a GPU or by two kinds
of processors.
"""

import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from benchmarks.readme_figures import agreed, agreement
from ksgen.bench import report
from ksgen.bench.comparison import Results
from ksgen.bench.payoff import (
    LEAST_PATTERNS,
    PAPERS,
    RULES,
    Judged,
    conclusion,
    judge,
)
from ksgen.bench.roster import OTHERS, OURS
from ksgen.bench.rows import read_rows
from ksgen.measure.gains import BATCH_ON_PROCESSORS, ON_PROCESSORS, gain_on_processors
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
        return [Judged(rule, 0.5, None, 0.0, margins.get(rule, 0.0)) for rule in ("d", "c", PAPERS)]

    assert agreed([kind(d=0.3), kind(c=0.3)]) is None
    assert agreed([kind(d=0.3), kind(d=0.049)]) is None
    assert agreed([kind(d=0.3, c=0.1), kind(d=0.05, c=0.1), kind()]) == "d"  # the greater margin, summed


def test_the_rule_for_processors_is_that_of_the_results() -> None:
    """Classes of its values have the gains that `ksgen show` prints, on every kind with enough patterns to judge it."""
    folders = (Path(__file__).parents[2] / "benchmarks" / "results").glob("*-cores")
    kinds = {folder.name: read_rows(folder / "paper.csv") for folder in folders}
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
