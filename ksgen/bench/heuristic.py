"""Quality of one-line rules, such as (b+c)/(bc), that predict where our kernel is faster.

Evaluates rules on results; launchers never use them. A GPU's results decide alone, and processors' only if two kinds of
processors agree.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ksgen.bench.comparison import Results, comparisons
from ksgen.bench.roster import OTHERS, OURS
from ksgen.bench.rows import ResultRow
from ksgen.bench.tables import LAYOUT_WORDS, ResultTable, percent
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.measure.gains import PAPERS, RULES
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from ksgen.tuning.model import rank_correlation
from ksgen.values import counted, spanned

LEAST_PATTERNS = 30  # fewer are not significant
LEAST_GAIN = 0.05  # least gain in rank correlation of a better rule than the paper's
LEAST_KINDS = 2  # of processors that must find the same better rule
HALVES = slice(0, None, 2), slice(1, None, 2)  # of the patterns

Numbers = NDArray[np.float64]
Ratios = Sequence[tuple[Pattern, float]]  # the best other's time over ours: above 1 ours is faster


@dataclass(frozen=True)
class Judged:
    """Quality of a rule on some results."""

    rule: str
    correlation: float  # rank correlation with the gain
    accuracy: float | None  # cross-validated, of predicting a win above a threshold; None: ours wins always or never
    threshold: float  # the best one over all patterns
    margin: float  # gain in correlation over the paper's rule, on the half of the patterns where it is less

    @property
    def is_better(self) -> bool:
        """Whether either half of the patterns confirms a gain over the paper's rule found on the other half."""
        return self.margin >= LEAST_GAIN


def predictors(results: Results, layout: str) -> ResultTable:
    """Table of all rules, best first, with the conclusion that the results allow.

    It has no rows for fewer than two patterns.
    """
    title = f"What predicts the gain, {results.title}, {LAYOUT_WORDS[layout]}"
    columns, ratios = ("rule", "rank correlation with the gain", "wins predicted"), results.ratios(OURS, OTHERS, layout)
    if len(ratios) < 2:
        return ResultTable.of(title, columns, ())
    judged, patterns, wins = judge(ratios), len(ratios), sum(ratio > 1 for _, ratio in ratios)
    description = f"Ours wins in {wins} of {counted(patterns, 'pattern')}"
    if 0 < wins < patterns:
        description += (
            "; each pattern is predicted with a threshold found on the others. A constant prediction is right in "
        )
        description += f"{max(wins, patterns - wins)}."
    else:
        description += ": there are no wins and losses to tell apart."
    is_gpu = all(row.runtime not in PROCESSOR_RUNTIMES for row in results.rows)
    lines = [(each.rule, f"{each.correlation:.2f}", percent(each.accuracy)) for each in judged]
    return ResultTable.of(title, columns, lines, conclusion(judged, patterns, is_gpu), description)


def judge(ratios: Ratios) -> list[Judged]:
    """Evaluate every rule on the results of one precision and layout, the best first."""
    gains = np.log([ratio for _, ratio in ratios])
    papers = np.maximum(_of_halves(_scores(PAPERS, ratios), gains), 0)  # without correlation, a rule is of no use
    judged = (_judge(rule, ratios, gains, papers) for rule in RULES)
    return sorted(judged, key=lambda each: (-each.correlation, -(each.accuracy or 0)))


def conclusion(judged: Sequence[Judged], patterns: int, is_gpu: bool) -> str:
    """Sentence on the rule that predicts best, as far as the results of one device allow a claim."""
    papers, best = next(each for each in judged if each.rule == PAPERS), judged[0]
    if patterns < LEAST_PATTERNS:
        return f"No claim: {counted(patterns, 'pattern')}, and at least {LEAST_PATTERNS} are needed."
    if best.correlation < papers.correlation + LEAST_GAIN:
        return f"{PAPERS} predicts as well as any rule here: rank correlation {papers.correlation:.2f}."
    better = next((each for each in judged if each.is_better), None)
    if better is None:
        return f"No claim: {best.rule} is not better than {PAPERS} by {LEAST_GAIN} on each half of the patterns."
    alone = "" if is_gpu else f" It counts if {LEAST_KINDS} kinds of processors agree."
    return (
        f"{better.rule} predicts better than {PAPERS}: rank correlation {better.correlation:.2f} against "
        f"{papers.correlation:.2f}.{alone}"
    )


def agreement(kinds: Mapping[str, Sequence[ResultRow]]) -> ResultTable:
    """Table of the rules that kinds of processors find better than the paper's, by batch size, precision and layout."""
    found: dict[tuple[int, str, str], list[list[Judged]]] = {}
    for rows in kinds.values():
        for results, layout in product(comparisons(rows), LAYOUTS):
            ratios = results.ratios(OURS, OTHERS, layout)
            if len(ratios) >= LEAST_PATTERNS:
                found.setdefault((results.batch, results.precision, layout), []).append(judge(ratios))
    lines = []
    for job, each_kind in sorted(found.items()):
        if len(each_kind) >= LEAST_KINDS:
            rule = agreed(each_kind)
            shown = (_correlations(each_kind, name) if name else None for name in (PAPERS, rule))
            lines.append((*job, len(each_kind), next(shown), rule, next(shown)))
    columns = ("batch", "precision", "layout", "kinds", PAPERS, "better rule", "its rank correlation")
    note = (
        "Rank correlations with the gain over the fastest of the others, on kinds with "
        f"{counted(LEAST_PATTERNS, 'pattern')} or more. "
        f"A better rule exceeds the paper's by {LEAST_GAIN} on each half of the patterns, on {LEAST_KINDS} kinds."
    )
    return ResultTable.of("What predicts the gain on processors", columns, lines, note)


def agreed(each_kind: Sequence[Sequence[Judged]]) -> str | None:
    """Rule that the most kinds of processors find better than the paper's; None if fewer than `LEAST_KINDS` do."""
    better = [each for judged in each_kind for each in judged if each.is_better]
    votes = Counter(each.rule for each in better)
    margins = {rule: sum(each.margin for each in better if each.rule == rule) for rule in votes}
    rule = max(votes, key=lambda name: (votes[name], margins[name]), default=None)
    return rule if rule and votes[rule] >= LEAST_KINDS else None


def _correlations(each_kind: Sequence[Sequence[Judged]], rule: str) -> str:
    found = (each.correlation for judged in each_kind for each in judged if each.rule == rule)
    return spanned(found, "{:.2f}".format)


def _scores(rule: str, ratios: Ratios) -> Numbers:
    return np.array([RULES[rule](pattern) for pattern, _ in ratios])


def _of_halves(scores: Numbers, gains: Numbers) -> Numbers:
    """Rank correlation on each half; equal scores for all patterns predict nothing."""
    return np.nan_to_num([rank_correlation(scores[half], gains[half]) for half in HALVES])


def _judge(rule: str, ratios: Ratios, gains: Numbers, papers: Numbers) -> Judged:
    scores = _scores(rule, ratios)
    wins = gains > 0
    places = np.arange(len(scores))
    accuracy = None  # nothing to predict if ours always wins, or never
    if 0 < wins.sum() < len(wins):
        hits = [(scores[one] > _threshold(scores[places != one], wins[places != one])) == wins[one] for one in places]
        accuracy = float(np.mean(hits))
    correlation = np.nan_to_num(rank_correlation(scores, gains))  # equal scores for all patterns predict nothing
    margin = float((_of_halves(scores, gains) - papers).min())
    return Judged(rule, float(correlation), accuracy, _threshold(scores, wins), margin)


def _threshold(scores: Numbers, wins: NDArray[np.bool_]) -> float:
    """Threshold above which predicting a win is right most often: between two scores, or infinite (always or never)."""
    known = np.unique(scores)
    if not known.size:
        return 0.0
    candidates = np.concatenate([[-np.inf], (known[1:] + known[:-1]) / 2, [np.inf]])
    right = [int(((scores > candidate) == wins).sum()) for candidate in candidates]
    return float(candidates[int(np.argmax(right))])
