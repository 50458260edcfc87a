"""How well a one-line rule predicts where our kernel wins: (b+c)/(bc), and whether the results support a better one.

Judges rules on rows; never chooses for a launcher. Claims nothing without results of a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ksgen.measure.ranks import rank_correlation
from ksgen.pattern import Pattern
from ksgen.words import counted

LEAST_PATTERNS = 30  # fewer say nothing
LEAST_GAIN = 0.05  # of the rank correlation, for a rule to be called better than the paper's

Numbers = NDArray[np.float64]
Ratios = Sequence[tuple[Pattern, float]]  # the best other's time over ours: above 1 ours is faster


@dataclass(frozen=True)
class Rule:
    """A number of a pattern that is claimed to grow with our kernel's gain."""

    says: str
    score: Callable[[Pattern], float]


PAPERS = Rule("(b+c)/(bc)", lambda pattern: pattern.rewrite_ratio)
RULES = (
    PAPERS,
    Rule("d (b+c)/(bc)", lambda pattern: pattern.d * pattern.rewrite_ratio),
    Rule("(b+c)/(bc), and 0 where d = 1", lambda pattern: pattern.rewrite_ratio * (pattern.d > 1)),
    Rule("log2(2 d) (b+c)/(bc)", lambda pattern: float(np.log2(2 * pattern.d)) * pattern.rewrite_ratio),
    Rule("1/b", lambda pattern: 1 / pattern.b),
    Rule("1/c", lambda pattern: 1 / pattern.c),
    Rule("1/min(b,c)", lambda pattern: 1 / min(pattern.b, pattern.c)),
    Rule("1/max(b,c)", lambda pattern: 1 / max(pattern.b, pattern.c)),
    Rule("d", lambda pattern: pattern.d),
    Rule("a d", lambda pattern: pattern.a * pattern.d),
    Rule("a d / (bc)", lambda pattern: pattern.a * pattern.d / (pattern.b * pattern.c)),
)


@dataclass(frozen=True)
class Judged:
    """How good a rule is on some results."""

    rule: Rule
    correlation: float  # of ranks, with the gain
    accuracy: float | None  # of "ours wins above the threshold", each pattern by a threshold found on the others; None: all are alike
    threshold: float  # found on all


@dataclass(frozen=True)
class Verdict:
    """All rules, best first, and the conclusion that the results allow."""

    judged: tuple[Judged, ...]
    patterns: int
    wins: int
    says: str


def judge(ratios: Ratios, is_gpu: bool) -> Verdict:
    """Every rule on the results of one precision and layout."""
    gains = np.log([ratio for _, ratio in ratios])
    judged = sorted((_judge(rule, ratios, gains) for rule in RULES), key=lambda each: (-each.correlation, -(each.accuracy or 0)))
    wins = int((gains > 0).sum())
    return Verdict(tuple(judged), len(ratios), wins, _says(judged, len(ratios), is_gpu))


def _says(judged: Sequence[Judged], patterns: int, is_gpu: bool) -> str:
    papers, best = next(each for each in judged if each.rule is PAPERS), judged[0]
    if not is_gpu:
        return "No claim: these are not a GPU's results."
    if patterns < LEAST_PATTERNS:
        return f"No claim: {counted(patterns, 'pattern')}, and at least {LEAST_PATTERNS} are needed."
    if best.correlation < papers.correlation + LEAST_GAIN:
        return f"{PAPERS.says} predicts as well as any rule here: rank correlation {papers.correlation:.2f}."
    return f"{best.rule.says} predicts better than {PAPERS.says}: rank correlation {best.correlation:.2f} against {papers.correlation:.2f}."


def _judge(rule: Rule, ratios: Ratios, gains: Numbers) -> Judged:
    scores = np.array([rule.score(pattern) for pattern, _ in ratios])
    wins = gains > 0
    places = np.arange(len(scores))
    accuracy = None  # where ours always wins, or never, there is nothing to foretell
    if 0 < wins.sum() < len(wins):
        hits = [(scores[one] > _threshold(scores[places != one], wins[places != one])) == wins[one] for one in places]
        accuracy = float(np.mean(hits))
    correlation = np.nan_to_num(rank_correlation(scores, gains))  # a rule that never changes predicts nothing
    return Judged(rule, float(correlation), accuracy, _threshold(scores, wins))


def _threshold(scores: Numbers, wins: NDArray[np.bool_]) -> float:
    """The threshold above which "ours wins" is right most often: between two scores, or always, or never."""
    known = np.unique(scores)
    if not known.size:
        return 0.0
    candidates = np.concatenate([[-np.inf], (known[1:] + known[:-1]) / 2, [np.inf]])
    right = [int(((scores > candidate) == wins).sum()) for candidate in candidates]
    return float(candidates[int(np.argmax(right))])
