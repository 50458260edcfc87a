"""Quality of one-line rules, such as (b+c)/(bc), that predict where our kernel is faster.

Evaluates rules on results; launchers never use them. Without results of a GPU, it concludes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ksgen.bench.comparison import Results
from ksgen.bench.roster import OTHERS, OURS
from ksgen.bench.tables import LAYOUT_WORDS, ResultTable, percent
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.measure.ranks import rank_correlation
from ksgen.pattern import Pattern
from ksgen.values import counted

LEAST_PATTERNS = 30  # fewer are not significant
LEAST_GAIN = 0.05  # least gain in rank correlation of a better rule than the paper's

Numbers = NDArray[np.float64]
Ratios = Sequence[tuple[Pattern, float]]  # the best other's time over ours: above 1 ours is faster

PAPERS = "(b+c)/(bc)"
RULES: dict[str, Callable[[Pattern], float]] = {  # numbers of a pattern that should grow with our kernel's gain
    PAPERS: lambda pattern: pattern.rewrite_ratio,
    "d (b+c)/(bc)": lambda pattern: pattern.d * pattern.rewrite_ratio,
    "(b+c)/(bc), and 0 where d = 1": lambda pattern: pattern.rewrite_ratio * (pattern.d > 1),
    "log2(2 d) (b+c)/(bc)": lambda pattern: float(np.log2(2 * pattern.d)) * pattern.rewrite_ratio,
    "1/b": lambda pattern: 1 / pattern.b,
    "1/c": lambda pattern: 1 / pattern.c,
    "1/min(b,c)": lambda pattern: 1 / min(pattern.b, pattern.c),
    "1/max(b,c)": lambda pattern: 1 / max(pattern.b, pattern.c),
    "d": lambda pattern: pattern.d,
    "a d": lambda pattern: pattern.a * pattern.d,
    "a d / (bc)": lambda pattern: pattern.a * pattern.d / (pattern.b * pattern.c),
}


@dataclass(frozen=True)
class Judged:
    """Quality of a rule on some results."""

    rule: str
    correlation: float  # rank correlation with the gain
    accuracy: float | None  # cross-validated, of predicting a win above a threshold; None: ours wins always or never
    threshold: float  # the best one over all patterns


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
    judged = (_judge(rule, ratios, gains) for rule in RULES)
    return sorted(judged, key=lambda each: (-each.correlation, -(each.accuracy or 0)))


def conclusion(judged: Sequence[Judged], patterns: int, is_gpu: bool) -> str:
    papers, best = next(each for each in judged if each.rule == PAPERS), judged[0]
    if not is_gpu:
        return "No claim: these are not a GPU's results."
    if patterns < LEAST_PATTERNS:
        return f"No claim: {counted(patterns, 'pattern')}, and at least {LEAST_PATTERNS} are needed."
    if best.correlation < papers.correlation + LEAST_GAIN:
        return f"{PAPERS} predicts as well as any rule here: rank correlation {papers.correlation:.2f}."
    return (
        f"{best.rule} predicts better than {PAPERS}: rank correlation {best.correlation:.2f} against "
        f"{papers.correlation:.2f}."
    )


def _judge(rule: str, ratios: Ratios, gains: Numbers) -> Judged:
    scores = np.array([RULES[rule](pattern) for pattern, _ in ratios])
    wins = gains > 0
    places = np.arange(len(scores))
    accuracy = None  # nothing to predict if ours always wins, or never
    if 0 < wins.sum() < len(wins):
        hits = [(scores[one] > _threshold(scores[places != one], wins[places != one])) == wins[one] for one in places]
        accuracy = float(np.mean(hits))
    correlation = np.nan_to_num(rank_correlation(scores, gains))  # equal scores for all patterns predict nothing
    return Judged(rule, float(correlation), accuracy, _threshold(scores, wins))


def _threshold(scores: Numbers, wins: NDArray[np.bool_]) -> float:
    """Threshold above which predicting a win is right most often: between two scores, or infinite (always or never)."""
    known = np.unique(scores)
    if not known.size:
        return 0.0
    candidates = np.concatenate([[-np.inf], (known[1:] + known[:-1]) / 2, [np.inf]])
    right = [int(((scores > candidate) == wins).sum()) for candidate in candidates]
    return float(candidates[int(np.argmax(right))])
