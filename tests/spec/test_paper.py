"""The stratified patterns: one fixed order, whose beginnings cover what the paper's patterns are like."""

from collections import Counter, defaultdict

import pytest

from ksgen.pattern import Pattern
from ksgen.spec import paper_patterns, stratified

PAPER = paper_patterns()
ORDER = stratified(len(PAPER))
COUNTS_OF_D = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128}


def band(pattern: Pattern) -> int:
    return sum(pattern.b * pattern.c / (pattern.b + pattern.c) > edge for edge in (40, 64, 100, 200))


def bands_of_d(patterns: list[Pattern]) -> dict[int, set[int]]:
    found = defaultdict(set)
    for pattern in patterns:
        found[pattern.d].add(band(pattern))
    return found


def test_an_order_of_all_patterns() -> None:
    assert sorted(ORDER) == sorted(PAPER)
    assert stratified(len(PAPER) + 1) == ORDER
    assert stratified(0) == []


@pytest.mark.parametrize("n", [1, 7, 40, 60, 100])
def test_fewer_are_a_prefix_of_more(n: int) -> None:
    assert stratified(n) == ORDER[:n]


def test_the_order_is_fixed() -> None:
    assert [str(pattern) for pattern in ORDER[:6]] == [
        "1,48,48,4",
        "2,192,768,16",
        "1,384,96,4",
        "3,96,96,64",
        "4,64,64,16",
        "1,512,512,4",
    ]
    assert [str(pattern) for pattern in ORDER[39:60:20]] == ["1,1024,1024,3", "1,1024,256,8"]


def test_forty_cover_every_class() -> None:
    forty = ORDER[:40]
    assert {pattern.d for pattern in forty} == COUNTS_OF_D
    assert {band(pattern) for pattern in forty} == {0, 1, 2, 3, 4}
    assert {pattern.a > 1 for pattern in forty} == {True, False}
    assert {(pattern.b > pattern.c) - (pattern.b < pattern.c) for pattern in forty} == {-1, 0, 1}
    assert {(pattern.b, pattern.c) for pattern in forty} == {(pattern.b, pattern.c) for pattern in PAPER}


def test_sixty_cover_every_d_in_two_bands() -> None:
    there, covered = bands_of_d(PAPER), bands_of_d(ORDER[:60])
    assert {d: len(found) for d, found in covered.items() if len(found) < min(2, len(there[d]))} == {}


def test_what_is_frequent_in_the_paper_comes_early() -> None:
    assert {pattern.d for pattern in ORDER[:5]} == {4, 16, 64}
    for n in (10, 20, 40, 60):
        assert {d for d, _ in Counter(pattern.d for pattern in ORDER[:n]).most_common(3)} == {4, 16, 64}
    assert 25 <= sum(pattern.a > 1 for pattern in ORDER[:60]) <= 35  # about half, as in the paper
