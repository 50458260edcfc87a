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
_OF_KERNELS = ("precision", "layout", "job")  # first words that a sentence may have instead of a constant
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Rule(Generic[ConstantsT]):
    """A sentence that must hold of a kernel's constants, and the test of it.

    Near values that would hold are found by the tests themselves, so that no rule says twice what it accepts.
    """

    says: str  # "tile_out is a multiple of 4 * thread_out": a constant first where one is to blame
    holds: Callable[[KernelSpec, ConstantsT], bool]
    # the value of the rule's last words for these constants, such as 32
    comes_to: Callable[[KernelSpec, ConstantsT], object] | None = None
    # of a family with several classes of constants: the rule of one class, and that class
    own: "tuple[type[Any], Rule[Any]] | None" = None


def positive(says: str, *left_out: str) -> Rule[Any]:
    """Rule that every number among the constants is at least 1, but those left out."""
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

    Its message is composed when it is read, so that a search that drops constants does not wait for messages.
    """

    def __init__(self, rules: Sequence[Rule[Any]], rule: Rule[Any], kernel: KernelSpec, constants: Any) -> None:
        super().__init__()
        self._found = partial(refusal, rules, rule, kernel, constants)
        self._name = kernel.name

    def __str__(self) -> str:
        return f"{self._name}: {self._found()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ConstantsError, (str(self),)  # the rules are functions, which no process hands to another


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
    named = (
        []
        if subject.startswith("every ")
        else [name for name in dict.fromkeys(_WORD.findall(rule.says)) if name in values]
    )
    helps, found = next(_near(rules, rule, kernel, constants, named or values), ("", []))
    if is_ and subject in values:
        text = (
            f"{subject}={values[subject]} must be "
            f"{f'{rest} = {comes_to}' if comes_to else _with_values(rest, values, kernel)}"
            f"{f'; got {helps}={values[helps]}' if comes_to and helps not in ('', subject) else ''}"
        )
    else:
        shown = named or ([helps] if helps else [] if comes_to else values)
        got = ", ".join(f"{name}={values[name]}" for name in shown)
        text = f"{rule.says}{f': {comes_to}' if comes_to else ''}{f'; got {got}' if got else ''}"
    listed = " or ".join(map(str, found))
    return text if not found else f"{text}; try {listed if helps == subject else f'{helps}={listed}'}"


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
    """Yield the constants that can repair the broken rule alone, with the nearest accepted numbers below and above.

    Numbers must keep all rules; if none does, the rules up to the broken one.
    """

    def nearest(name: str, numbers: range, asked: Sequence[Rule[ConstantsT]]) -> list[int]:
        does = (n for n in numbers if first_broken(asked, kernel, replace(constants, **{name: n})) is None)  # type: ignore[type-var]
        return [*islice(does, 1)]

    for name in names:
        value = getattr(constants, name)
        if not isinstance(value, int):
            continue
        below, above = range(value - 1, max(value - FARTHEST, 0) - 1, -1), range(value + 1, value + FARTHEST + 1)
        for asked in (rules, rules[: rules.index(rule) + 1]):
            if found := nearest(name, below, asked) + nearest(name, above, asked):
                yield name, found
                break
