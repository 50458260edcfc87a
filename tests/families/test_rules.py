"""What a broken rule says: the constants concerned, and values that would do in their place."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, check
from ksgen.families.rules import BrokenRuleError, Rule, first_broken, refusal
from ksgen.pattern import Pattern
from ksgen.spec import JOBS, LAYOUTS, PRECISIONS, KernelSpec
from tests.support.kernels import LIMITS

KERNEL = KernelSpec(Pattern(2, 48, 64, 4))


@dataclass(frozen=True)
class Few:
    """Constants of a family that only this file knows."""

    tile: int
    thread: int
    copy: str = "async"


RULES: tuple[Rule[Few], ...] = (
    Rule("every constant but copy is at least 1", lambda k, c: min(c.tile, c.thread) >= 1),
    Rule("job is multiply", lambda k, c: k.job == "multiply", lambda k, c: "a product"),
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    Rule("tile is a multiple of 4 * thread", lambda k, c: c.tile % (4 * c.thread) == 0, lambda k, c: 4 * c.thread),
    Rule("thread is 1 with copy=registers", lambda k, c: c.copy == "async" or c.thread == 1),
    Rule("thread is at most d, and no more than tile", lambda k, c: c.thread <= min(k.pattern.d, c.tile)),
    Rule("a block has at most 1024 threads", lambda k, c: c.tile * c.thread <= 1024, lambda k, c: c.tile * c.thread),
)


def said(kernel: KernelSpec = KERNEL, **changes: Any) -> str:
    constants = Few(**{"tile": 16, "thread": 2, **changes})
    broken = first_broken(RULES, kernel, constants)
    return refusal(RULES, broken, kernel, constants) if broken else ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"tile": 18}, "tile=18 must be a multiple of 4 * thread = 8; try 16 or 24"),
        ({"tile": 3}, "tile=3 must be a multiple of 4 * thread = 8; try 8"),
        ({"thread": 0}, "every constant but copy is at least 1; got thread=0; try thread=1"),
        ({"tile": -5}, "every constant but copy is at least 1; got tile=-5; try tile=8"),
        ({"copy": "bulk"}, "copy=bulk must be async or registers"),
        ({"copy": "registers"}, "thread=2 must be 1 with copy=registers; try 1"),
        ({"tile": 64, "thread": 8}, "thread=8 must be at most d=4, and no more than tile=64; try 4"),
        ({"tile": 520}, "a block has at most 1024 threads: 1040; got tile=520; try tile=512"),
        ({"tile": 10**9}, "a block has at most 1024 threads: 2000000000"),  # nothing near would do
    ],
)
def test_each_broken_rule_has_a_message(changes: dict[str, Any], message: str) -> None:
    assert said(**changes) == message


def test_a_rule_that_no_constant_can_satisfy_is_reported_of_the_kernel() -> None:
    assert said(replace(KERNEL, job="gradient")) == "job=gradient must be multiply: a product"


def test_words_are_looked_for_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    rule: Rule[Few] = Rule("tile is even", lambda k, c: c.tile % 2 == 0, lambda k, c: asked.append(c) or 2)
    error = BrokenRuleError((rule,), rule, KERNEL, Few(3, 1))
    assert not asked
    assert str(error) == f"{KERNEL.name}: tile=3 must be even = 2; try 2 or 4"
    assert asked


def test_another_process_gets_the_same_report() -> None:
    family = FAMILIES["simt"]
    with pytest.raises(ConstantsError) as caught:
        check(family, KERNEL, replace(family.default(KERNEL, LIMITS), stages=1))
    there = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(there, ConstantsError)
    assert str(there) == str(caught.value) == f"{KERNEL.name}: stages=1 must be at least 2; try 2"


def broken_cases() -> Iterator[Any]:
    """Every family's default with each of its numbers changed, where a rule is against it."""
    for name, family in FAMILIES.items():
        every = (KernelSpec(KERNEL.pattern, *kind, job=job) for kind in product(PRECISIONS, LAYOUTS) for job in JOBS)
        limits = replace(
            LIMITS, is_cpu=name.startswith(("vector", "amx", "cpu")), vector_bytes=32, tiles=("bf16", "f16")
        )
        kernel = next(each for each in every if family.supports(each, limits))
        constants = family.default(kernel, limits)
        for field in fields(constants):
            value = getattr(constants, field.name)
            for other in (value + 1, value - 1, 3 * value, 0) if isinstance(value, int) else ():
                changed = replace(constants, **{field.name: other})
                if not family.keeps_rules(kernel, changed):
                    yield pytest.param(family, kernel, changed, id=f"{name}-{field.name}-{other}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "kernel", "constants"), list(broken_cases()))
def test_what_is_to_be_tried_would_do(family: Any, kernel: KernelSpec, constants: Any) -> None:
    with pytest.raises(ConstantsError) as caught:
        check(family, kernel, constants)
    message = str(caught.value).removeprefix(f"{kernel.name}: ")
    head, _, tried = message.rpartition("; try ")
    assert head, f"nothing to try: {message}"
    named, _, numbers = tried.rpartition("=")
    subject = named or message.partition("=")[0]
    assert re.search(rf"\b{subject}=-?\d+", head), message
    rules = family.rules[type(constants)]
    place = [rule.says for rule in rules].index(first_broken(rules, kernel, constants).says)
    for number in numbers.split(" or "):
        assert first_broken(rules[: place + 1], kernel, replace(constants, **{subject: int(number)})) is None, message
