"""Rules of constants as data: the sentence, the test, and a refusal that says what to try.

Decides nothing about a family.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from ksgen.errors import ConstantsError
from ksgen.spec import KernelSpec

ConstantsT = TypeVar("ConstantsT")
FARTHEST = 512  # largest distance from a refused number to the numbers that are tried in its place
_OF_KERNELS = ("precision", "layout", "job")  # subjects of a sentence that are not constants but the kernel's
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Rule(Generic[ConstantsT]):
    """A sentence about a kernel's constants that must be true, and its test.

    The values that a refusal suggests are found by the tests, so that each rule states only once what it accepts.
    """

    says: str  # "tile_out is a multiple of 4 * thread_out": begins with the constant to blame, if there is one
    holds: Callable[[KernelSpec, ConstantsT], bool]
    # the value that the sentence's last words have for these constants, such as 32
    comes_to: Callable[[KernelSpec, ConstantsT], object] | None = None


def positive(says: str, *left_out: str) -> Rule[Any]:
    """Rule that every number among the constants is at least 1, except for those in `left_out`."""
    return Rule(
        says, lambda k, c: all(v >= 1 for name, v in vars(c).items() if name not in left_out and type(v) is not str)
    )


def at_most(says: str, most: int, value: Callable[[KernelSpec, Any], Any]) -> Rule[Any]:
    """Rule that a value is at most `most`; its refusal names the value."""
    return Rule(says, lambda kernel, constants: value(kernel, constants) <= most, value)


def no_more(name: str, what: str, most: Callable[[KernelSpec, Any], int]) -> Rule[Any]:
    """Rule that a constant is at most a number that depends on the kernel; its refusal names the number."""
    says = f"{name} is at most {what}"
    return Rule(says, lambda kernel, constants: getattr(constants, name) <= most(kernel, constants), most)


def multiple(name: str, what: str, unit: Callable[[KernelSpec, Any], int]) -> Rule[Any]:
    """Rule that a constant is a multiple of a unit; its refusal names the unit."""
    says = f"{name} is a multiple of {what}"
    return Rule(says, lambda kernel, constants: getattr(constants, name) % unit(kernel, constants) == 0, unit)


def first_broken(
    rules: Sequence[Rule[ConstantsT]], kernel: KernelSpec, constants: ConstantsT
) -> Rule[ConstantsT] | None:
    """First rule that does not hold; None if all do. Later rules are tested only if the earlier ones hold."""
    for rule in rules:
        if not rule.holds(kernel, constants):
            return rule
    return None


class BrokenRuleError(ConstantsError):
    """A broken rule.

    The message is composed only when it is read, so that a search does not wait for messages that it drops.
    """

    def __init__(self, rules: Sequence[Rule[Any]], rule: Rule[Any], kernel: KernelSpec, constants: Any) -> None:
        super().__init__()
        self._found = partial(refusal, rules, rule, kernel, constants)
        self._name = kernel.name

    def __str__(self) -> str:
        return f"{self._name}: {self._found()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ConstantsError, (str(self),)  # rules have functions, which cannot be pickled


def refusal(
    rules: Sequence[Rule[ConstantsT]], rule: Rule[ConstantsT], kernel: KernelSpec, constants: ConstantsT
) -> str:
    """Message about a broken rule, with the values concerned and values to try:
    `tile_out=72 must be a multiple of 4 * thread_out = 32; try 64 or 96`."""
    values: dict[str, Any] = dict(vars(constants))
    subject, is_, rest = rule.says.partition(" is ")
    comes_to = "" if rule.comes_to is None else str(rule.comes_to(kernel, constants))
    if is_ and subject in _OF_KERNELS:
        return f"{subject}={getattr(kernel, subject)} must be {rest}{f': {comes_to}' if comes_to else ''}"
    named = [name for name in dict.fromkeys(_WORD.findall(rule.says)) if name in values]
    mentioned = [] if subject.startswith("every ") else named
    repaired, accepted = next(_near(rules, rule, kernel, constants, mentioned or values), ("", []))
    if is_ and subject in values:
        text = (
            f"{subject}={values[subject]} must be "
            f"{f'{rest} = {comes_to}' if comes_to else _with_values(rest, values, kernel)}"
            f"{f'; got {repaired}={values[repaired]}' if comes_to and repaired not in ('', subject) else ''}"
        )
    else:
        shown = mentioned or ([repaired] if repaired else [] if comes_to else values)
        got = ", ".join(f"{name}={values[name]}" for name in shown)
        text = f"{rule.says}{f': {comes_to}' if comes_to else ''}{f'; got {got}' if got else ''}"
    listed = " or ".join(map(str, accepted))
    return text if not accepted else f"{text}; try {listed if repaired == subject else f'{repaired}={listed}'}"


def _with_values(text: str, values: dict[str, Any], kernel: KernelSpec) -> str:
    """Insert the values of integer constants, and of b, c and d, after their names in a text."""
    known = {name: value for name, value in values.items() if isinstance(value, int)}
    known |= {name: getattr(kernel.pattern, name) for name in "bcd"}
    return _WORD.sub(lambda word: f"{word[0]}={known[word[0]]}" if word[0] in known else word[0], text)


def _near(
    rules: Sequence[Rule[ConstantsT]],
    rule: Rule[ConstantsT],
    kernel: KernelSpec,
    constants: ConstantsT,
    names: Iterable[str],
) -> Iterator[tuple[str, list[int]]]:
    """Yield each constant whose change alone repairs the broken rule, with the nearest accepted numbers on both sides.

    These numbers keep all rules. If there are none, they keep the rules up to the broken one.
    """

    def nearest(name: str, numbers: range, tests: Sequence[Rule[ConstantsT]]) -> list[int]:
        kept = (n for n in numbers if first_broken(tests, kernel, replace(constants, **{name: n})) is None)  # type: ignore[type-var]
        return [*islice(kept, 1)]

    for name in names:
        value = getattr(constants, name)
        if not isinstance(value, int):
            continue
        below, above = range(value - 1, max(value - FARTHEST, 0) - 1, -1), range(value + 1, value + FARTHEST + 1)
        for tests in (rules, rules[: rules.index(rule) + 1]):
            if accepted := nearest(name, below, tests) + nearest(name, above, tests):
                yield name, accepted
                break
