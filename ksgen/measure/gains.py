"""Rules such as (b+c)/(bc), which predict the gain of ksgen's kernel over other methods from a pattern.

It also has the gains on processors, by the rule that is better there. `ksgen.bench.payoff` evaluates the rules on
results; launchers never use them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from ksgen.pattern import Pattern

PAPERS = "(b+c)/(bc)"
RULES: dict[str, Callable[[Pattern], float]] = {  # values of a pattern that should grow with the gain
    PAPERS: lambda pattern: pattern.rewrite_ratio,
    "d (b+c)/(bc)": lambda pattern: pattern.d * pattern.rewrite_ratio,
    "(b+c)/(bc), and 0 where d = 1": lambda pattern: pattern.rewrite_ratio * (pattern.d > 1),
    "log2(2 d) (b+c)/(bc)": lambda pattern: log2(2 * pattern.d) * pattern.rewrite_ratio,
    "1/b": lambda pattern: 1 / pattern.b,
    "1/c": lambda pattern: 1 / pattern.c,
    "1/min(b,c)": lambda pattern: 1 / min(pattern.b, pattern.c),
    "1/max(b,c)": lambda pattern: 1 / max(pattern.b, pattern.c),
    "d": lambda pattern: pattern.d,
    "a d": lambda pattern: pattern.a * pattern.d,
    "a d / (bc)": lambda pattern: pattern.a * pattern.d / (pattern.b * pattern.c),
}


BATCH_ON_PROCESSORS = 6272  # batch size of the following gains
# By precision and layout: the rule that is better on several kinds of processors, and (least value, mean gain) of
# classes of patterns. `tests/bench/test_payoff.py` compares both with the results in benchmarks/results.
ON_PROCESSORS = {("float32", "bsf"): ("a d / (bc)", ((1 / 512, 4.3), (1 / 8192, 2.2), (0.0, 1.5)))}


@dataclass(frozen=True)
class ProcessorGain:
    """Value of a pattern by the rule for processors, and the mean gain of its class over the fastest other method."""

    rule: str
    value: float
    gain: float
    batch: int = BATCH_ON_PROCESSORS


def gain_on_processors(pattern: Pattern, precision: str, layout: str) -> ProcessorGain | None:
    """Gain that results on processors suggest; None if no rule is better than the paper's for these options.

    Examples:
        >>> from ksgen import Pattern
        >>> gain_on_processors(Pattern(1, 64, 64, 16), "float32", "bsf").gain
        4.3
    """
    if (precision, layout) not in ON_PROCESSORS:
        return None
    rule, classes = ON_PROCESSORS[precision, layout]
    value = RULES[rule](pattern)
    return ProcessorGain(rule, value, next(gain for least, gain in classes if value >= least))
